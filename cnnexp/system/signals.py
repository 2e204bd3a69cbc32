"""Signals that wait: what must not be cut in two ends before Ctrl-C, SIGTERM or SIGHUP does its work."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

WAITING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Delay signals' handlers to the end of the block; that of a second signal of the same kind runs at once.

    Only signals with a handler in Python wait, and only in the main thread, where Python handles them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: found for number in WAITING if callable(found := signal.getsignal(number))}
    came: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        if any(number == earlier for earlier, _ in came):
            handlers[number](number, frame)
        came.append((number, frame))

    try:
        for number in handlers:
            signal.signal(number, note)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number, frame in came:
        handlers[number](number, frame)
