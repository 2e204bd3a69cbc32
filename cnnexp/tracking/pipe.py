"""The pipe to a process that loads MLflow and writes to its store, while this one trains.

Imports nothing heavy, so that the process can start before anything else is loaded.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from cnnexp.errors import TrackingError, without_secrets

MOST_WAITING = 100_000  # calls, some 50 MB: from there on epochs are in the journal alone
ANSWER_S = 180.0  # the recorder answers sooner, with an error if need be; after this it is called dead
LOOK_S = 1.0
BUSY = 10  # times as long may it take where it computes: on a busy machine, loading MLflow takes minutes
MOST_DEATHS = 3  # of recorders in a row that die before they answer anything
SETTLE_S = 0.1  # an sqlite store takes a tenth of that for an epoch
# Settings of MLflow's client in the recorder: give up after seconds, not after the four minutes of its defaults.
CLIENT_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # it would show the password in a store's address
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # what fails is told once, by us
}


_early: list[subprocess.Popen[str]] = []


def start_early(database: bool = True) -> None:
    """Start the process of the first `Recorder` to come, which then finds it with its libraries loaded.

    Args:
        database: whether its store will be a database, as far as anyone can tell by now.
    """
    with contextlib.suppress(OSError):  # none can be started now; the recorder says so
        _early.append(_start_process(database))


def end_early() -> None:
    """End the process of `start_early` if no recorder has taken it."""
    while _early:
        with _early.pop() as process:
            process.kill()


class RecorderDied(TrackingError):
    """The process is gone; `Recorder.restart` starts another."""


class NoAnswerYet(TrackingError):
    """The store takes longer than its caller wants to wait; it can be waited for again."""


class Recorder:
    """A process that writes runs to an MLflow store; started at once, ready some two seconds later.

    Args:
        uri: as `address.store_uri` returns it.
        experiment: name of the MLflow experiment.

    Raises:
        TrackingError: no process can be started.
    """

    def __init__(self, uri: str, experiment: str) -> None:
        self._opening = {"uri": uri, "experiment": experiment}
        self._store = f"tracking.uri={without_secrets(uri)}"
        self._death = f"{self._store}: the recorder process has died"
        self._ids = itertools.count()
        self._deaths = 0
        early = _early.pop() if _early else None
        self._start(early if early is not None and early.poll() is None else self._another())

    def restart(self) -> None:
        """Start another process in the place of one that has died; what that one was sent it does not know.

        Raises:
            TrackingError: `MOST_DEATHS` in a row have died before they answered anything, or none can be started.
        """
        self._deaths = 1 if self._answering else self._deaths + 1
        if self._deaths > MOST_DEATHS:
            raise TrackingError(self._death)
        self._end()
        self._start(self._another())

    def _another(self) -> subprocess.Popen[str]:
        try:
            return _start_process()
        except OSError as error:
            raise TrackingError(
                f"{self._store}: the recorder process cannot be started: {error.strerror or error}; tracking=none does "
                "without one"
            ) from error

    def _start(self, process: subprocess.Popen[str]) -> None:
        self._slow = self._answering = False
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._process = process
        calls, lines = _ends(process)
        self._listener = threading.Thread(target=self._listen, args=(lines, self._answers), daemon=True)
        self._listener.start()
        threading.Thread(target=_write, args=(calls, self._outbox), daemon=True).start()
        self._opened = next(self._ids)
        self._outbox.put(json.dumps([self._opened, "open", self._opening]) + "\n")

    def reopen(self) -> None:
        """Try again to open a store that could not be opened; an open one stays as it is.

        Raises:
            RecorderDied: the process is gone.
        """
        self._opened = next(self._ids)
        self._send(self._opened, "open", self._opening)

    def ask(self, method: str, /, **arguments: Any) -> Callable[..., Any]:
        """Call a method of `store.Store`; return a function that waits for its value.

        That function takes the seconds that it may wait for a silent store, as many as it takes to call it dead where
        it is given none. It raises NoAnswerYet after those, RecorderDied, and TrackingError where the store could not
        be opened, the method raised, or the recorder was called dead.
        """
        call_id = next(self._ids)
        self._send(call_id, method, arguments)
        return functools.partial(self._receive, call_id)

    def call(self, method: str, /, **arguments: Any) -> Any:
        """Call a method of `store.Store` and return its value; raises as `ask`."""
        return self.ask(method, **arguments)()

    def post(self, method: str, /, **arguments: Any) -> bool:
        """Call a method of `store.Store` without waiting for it, however slow the store is.

        Returns:
            Whether it will be called; not where the recorder is `MOST_WAITING` calls behind.

        Raises:
            RecorderDied: the process is gone.
        """
        if self._outbox.qsize() >= MOST_WAITING:
            return False
        self._send(None, method, arguments)
        return True

    def settle(self) -> None:
        """Wait a moment for what was posted to be done, so that it does not compute beside what is timed next.

        A store that once takes longer than `SETTLE_S` is not waited for again.
        """
        if self._slow:
            return
        call_id = next(self._ids)
        self._send(call_id, "settle", {})
        deadline = time.monotonic() + SETTLE_S
        with contextlib.suppress(queue.Empty):
            while line := self._answers.get(timeout=max(0.0, deadline - time.monotonic())):
                if json.loads(line)[0] == call_id:
                    return
            self._answers.put(line)  # the end, for who calls next
        self._slow = True

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """Let the recorder finish and end, or raise TrackingError where it hangs. Idempotent."""
        self._end()

    def _end(self) -> None:
        self._outbox.put(None)
        for _ in self._looks(ANSWER_S):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LOOK_S)
                break
        else:
            self._process.kill()
            raise TrackingError(f"{self._store}: the recorder process hung at its end and was killed")
        self._listener.join()

    def _send(self, call_id: int | None, method: str, arguments: Mapping[str, Any]) -> None:
        if not self.alive:
            raise RecorderDied(self._death)
        self._outbox.put(json.dumps([call_id, method, arguments]) + "\n")

    def _receive(self, call_id: int, most_s: float | None = None) -> Any:
        while True:
            line = self._next_answer(most_s)
            if not line:
                self._process.kill()  # it may not have ended altogether
                self._process.wait()
                raise RecorderDied(self._death)
            answered, value, error = json.loads(line)
            # an earlier answer is of a call whose wait was interrupted, or of `open`, whose failure is everyone's
            if error is not None and answered in (call_id, self._opened):
                raise TrackingError(error)
            if answered == call_id:
                return value

    def _next_answer(self, most_s: float | None) -> str:
        with contextlib.suppress(queue.Empty):
            return self._answers.get(timeout=0)
        for _ in self._looks(ANSWER_S if most_s is None else most_s):
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=LOOK_S)
        if most_s is not None:
            raise NoAnswerYet(f"{self._store}: no answer yet")
        self._process.kill()
        raise TrackingError(f"{self._store}: no answer in {ANSWER_S:g} s")

    def _looks(self, most_s: float) -> Iterator[None]:
        """Yield for as long as the process may be silent; while it computes, or takes what it is sent, for longer.

        Silence is counted in looks, not by a clock: where all stood still for an hour, nobody was silent.
        """
        silent_s, computed = 0.0, None
        while silent_s < most_s:
            yield
            before, computed = computed, (_computed_s(self._process.pid), self._outbox.qsize())
            silent_s += LOOK_S if computed == before else LOOK_S / BUSY

    def _listen(self, lines: IO[str], answers: queue.SimpleQueue[str]) -> None:
        with lines:
            for line in lines:
                self._answering = True
                answers.put(line)
        answers.put("")  # the end


def _computed_s(pid: int) -> float | None:
    import psutil  # where somebody is silent, and nowhere else

    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return None


def _write(calls: IO[str], outbox: queue.SimpleQueue[str | None]) -> None:
    """Write what is sent, in a thread of its own: the pipe of a recorder that waits for its store is soon full."""
    with contextlib.suppress(OSError, ValueError):  # it is dead; who sends or waits next is told
        while (line := outbox.get()) is not None:
            calls.write(line)
            calls.flush()
    with contextlib.suppress(OSError, ValueError):
        calls.close()


def _start_process(database: bool = False) -> subprocess.Popen[str]:
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "cnnexp.tracking.store", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the training process, which then ends the run here
        env={**CLIENT_SETTINGS, **os.environ, "PYTHONPATH": path},
    )
    calls, _ = _ends(process)
    with contextlib.suppress(OSError):  # it is dead; who sends next is told
        calls.write(json.dumps([None, "load", {"database": database}]) + "\n")
        calls.flush()
    return process


def _ends(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    """Return our ends of a process's pipes: what it reads and what it writes."""
    return cast(IO[str], process.stdin), cast(IO[str], process.stdout)
