"""Signs of life between processes, and how long none has come.

Silence is counted in looks, not by a clock: where a whole run is stopped and goes on after an hour, nobody looked
meanwhile, so nobody was silent. It imports nothing of the package: a process that only watches starts at once.
"""

import threading
from collections.abc import Callable


class Heartbeat:
    """What one process knows of the life of another, which counts as stopped after `timeout_s` seconds of silence.

    Looks are `look_s` apart. Before the first sign `start_timeout_s` counts, where it is given.
    """

    def __init__(self, timeout_s: float, look_s: float, start_timeout_s: float | None = None) -> None:
        self.timeout_s, self.silent_s = timeout_s, 0.0
        self._look_s, self._start_timeout_s = look_s, start_timeout_s
        self._last: object = 0

    def look(self, sign: object) -> bool:
        """Return whether the other was silent for too long; its `sign`, 0 before the first, changes while it lives."""
        self.silent_s = self.silent_s + self._look_s if sign == self._last else 0.0
        self._last = sign
        timeout_s = self.timeout_s if sign or self._start_timeout_s is None else self._start_timeout_s
        return self.silent_s >= timeout_s


def beat(give_sign: Callable[[], None], every_s: float, ended: threading.Event) -> None:
    """Give a sign of life at once, then every `every_s` seconds, in a thread of its own, until `ended` is set.

    A thread, so that a process which computes, compiles or loads for long gives signs all the same.
    """

    def work() -> None:
        give_sign()
        while not ended.wait(every_s):
            give_sign()

    threading.Thread(target=work, daemon=True).start()
