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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, cast

from cnnexp.errors import TrackingError, without_password

OPEN_ID = 0  # of the first call
MOST_WAITING = 100_000  # calls, some 50 MB: from there on epochs are in the journal alone
ANSWER_S = 180.0  # the recorder answers sooner, with an error if need be; after this it is called dead
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


def start_early() -> None:
    """Start the process of the first `Recorder` to come, which then finds it with its libraries loaded."""
    _early.append(_start_process())


def end_early() -> None:
    """End the process of `start_early` if no recorder has taken it."""
    while _early:
        with _early.pop() as process:
            process.kill()


class Recorder:
    """A process that writes runs to an MLflow store; started at once, ready some two seconds later.

    Args:
        uri: as `store.store_uri` returns it.
        experiment: name of the MLflow experiment.
    """

    def __init__(self, uri: str, experiment: str) -> None:
        self._store = f"tracking.uri={without_password(uri)}"
        self._death = f"{self._store}: the recorder process has died"
        self._ids = itertools.count(OPEN_ID)
        self._slow = False
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._process = _early.pop() if _early else _start_process()
        self._calls, self._lines = _ends(self._process)
        self._outbox: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        threading.Thread(target=self._write, daemon=True).start()
        self.ask("open", uri=uri, experiment=experiment)

    def ask(self, method: str, /, **arguments: Any) -> Callable[[], Any]:
        """Call a method of `store.Store`; return a function that waits for its value.

        That function raises TrackingError where the store could not be opened, the method raised, or the recorder died.
        """
        call_id = next(self._ids)
        self._send(call_id, method, arguments)
        return functools.partial(self._receive, call_id)

    def call(self, method: str, /, **arguments: Any) -> Any:
        """Call a method of `store.Store` and return its value; raises as `ask`."""
        return self.ask(method, **arguments)()

    def post(self, method: str, /, **arguments: Any) -> None:
        """Call a method of `store.Store` without waiting for it, however slow the store is.

        Raises:
            TrackingError: the recorder has died, or is `MOST_WAITING` calls behind.
        """
        if self._outbox.qsize() >= MOST_WAITING:
            raise TrackingError(f"{self._store}: {MOST_WAITING} calls behind")
        self._send(None, method, arguments)

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
        self._outbox.put(None)
        try:
            self._process.wait(ANSWER_S)
        except subprocess.TimeoutExpired as error:
            self._process.kill()
            raise TrackingError(f"{self._store}: the recorder process hung at its end and was killed") from error
        self._listener.join()

    def _send(self, call_id: int | None, method: str, arguments: Mapping[str, Any]) -> None:
        if not self.alive:
            raise TrackingError(self._death)
        self._outbox.put(json.dumps([call_id, method, arguments]) + "\n")

    def _write(self) -> None:
        """Write what is sent, in a thread of its own: the pipe of a recorder that waits for its store is soon full."""
        with contextlib.suppress(OSError, ValueError):  # it is dead; who sends or waits next is told
            while (line := self._outbox.get()) is not None:
                self._calls.write(line)
                self._calls.flush()
        with contextlib.suppress(OSError, ValueError):
            self._calls.close()

    def _receive(self, call_id: int) -> Any:
        deadline = time.monotonic() + ANSWER_S
        while True:
            try:
                line = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                line = ""
            if not line:
                raise TrackingError(self._death)
            answered, value, error = json.loads(line)
            # an earlier answer is of a call whose wait was interrupted, or of `open`, whose failure is everyone's
            if error is not None and answered in (call_id, OPEN_ID):
                raise TrackingError(error)
            if answered == call_id:
                return value

    def _listen(self) -> None:
        with self._lines as answers:
            for line in answers:
                self._answers.put(line)
        self._answers.put("")  # the end


def _start_process() -> subprocess.Popen[str]:
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "cnnexp.tracking.store"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the training process, which then ends the run here
        env={**CLIENT_SETTINGS, **os.environ, "PYTHONPATH": path},
    )
    calls, _ = _ends(process)
    calls.write(json.dumps([None, "draw", {"kind": "warm_up"}]) + "\n")
    calls.flush()
    return process


def _ends(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    """Return our ends of a process's pipes: what it reads and what it writes."""
    return cast(IO[str], process.stdin), cast(IO[str], process.stdout)
