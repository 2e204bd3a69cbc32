"""The recorder, as other processes see it: a process that loads MLflow and follows journals, while this one trains.

Imports nothing heavy, so that the process can start before anything else is loaded.
"""

import contextlib
import itertools
import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import IO, Any, cast

from cnnexp.errors import TrackingError, reason_of, without_secrets
from cnnexp.system.heartbeat import Heartbeat

ANSWER_S = 180.0  # the recorder answers sooner, or computes, as it loads MLflow; after this it is called dead
LOOK_S = 1.0
LEAST_SHARE = 0.05  # of a time that it computes in, if it does; a locked store is asked for with less
MOST_DEATHS = 3  # of recorders in a row that die before they have done anything but open the store
FLUSH_S = 0.1  # an sqlite store takes a tenth of that for an epoch
# Settings of MLflow's client in the recorder: give up after seconds, not after the four minutes of its defaults.
CLIENT_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # it would show the password in a store's address
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # what fails is said once, by us
}
_early: list[subprocess.Popen[str]] = []


def start_early(database: bool = True) -> None:
    """Start the process of the first `Recorder` to come; it loads its libraries, those of a `database` where told."""
    with contextlib.suppress(OSError):  # none can be started now; the recorder says so
        _early.append(_start_process(database))


def end_early() -> None:
    """End the process of `start_early` if no recorder has taken it."""
    while _early:
        with _early.pop() as process:
            process.kill()


class RecorderDied(TrackingError):
    """The process is gone; the next call starts another."""


class NoAnswerYet(TrackingError):
    """The store takes longer than its caller wants to wait."""


class Recorder:
    """A process that brings an MLflow store up to journals; started at once, ready some two seconds later.

    It knows nothing that the journals do not say, so another one goes on where it dies. The address is one that
    `address.store_uri` returned. It raises TrackingError where no process can be started.
    """

    def __init__(self, uri: str, experiment: str) -> None:
        self._opening = {"uri": uri, "experiment": experiment}
        self._store = f"tracking.uri={without_secrets(uri)}"
        self._death = f"{self._store}: the recorder process has died"
        self._ids, self._deaths, self._slow = itertools.count(), 0, False
        self._folder: Path | None = None  # that was looked into last
        self._look: Future[Any] | None = None
        self._start()

    def follow(self, folder: Path) -> Future[Any]:
        """Have the recorder look into a folder's journal; return what will have the run's id, of the last such look.

        It gets a moment for what is new there, so as not to compute beside what is timed next, but no more once a store
        has taken longer than `FLUSH_S`. While a look is under way none is asked for: the recorder looks each second.
        TrackingError is raised where none can be started.
        """
        look = self._look if self._folder == folder else None
        if look is None or look.done():
            is_ready = look is not None and look.exception() is None
            look = self.ask("follow", folder=str(folder), now=False)
            self._folder, self._look = folder, look
            if is_ready and not self._slow:
                self._slow = not wait([look], FLUSH_S).done
        return look

    def check(self) -> None:
        """Raise TrackingError where there is no store at the address, as far as can be seen without MLflow."""
        from cnnexp.tracking.address import need_store

        try:
            need_store(self._opening["uri"], wait_s=0.0)
        except (OSError, sqlite3.Error) as error:
            if "locked" not in str(error):  # it is there, and busy
                raise TrackingError(f"{self._store}: cannot be opened: {error}") from error

    def hold(self) -> None:
        """Have a recorder that is not ready keep still for a while, since what is timed begins."""
        _write(self._process, None, "hold", {})

    def ask(self, method: str, /, **arguments: Any) -> Future[Any]:
        """Call a method of `store.Store`; return its value to come; raise TrackingError where no process can start."""
        if not self._alive:
            self._deaths += 1
            if self._deaths > MOST_DEATHS:
                raise TrackingError(self._death)
            self.close()
            self._start()
        return self._send(method, arguments)

    def call(self, method: str, /, within_s: float | None = None, **arguments: Any) -> Any:
        """Call a method of `store.Store` and return its value; where the recorder dies of it, another one is asked.

        NoAnswerYet is raised where the store is silent for `within_s`; None waits until the recorder is called dead.
        TrackingError is raised then, where recorders die one after the other, and where the method raised it.
        """
        timeout_s = ANSWER_S if within_s is None else within_s
        while True:
            try:
                return self._patiently(self.ask(method, **arguments).result, timeout_s)
            except RecorderDied:
                continue
            except TimeoutError:
                if within_s is not None:
                    raise NoAnswerYet(f"{self._store}: no answer yet") from None
                self._process.kill()
                raise TrackingError(f"{self._store}: no answer in {ANSWER_S:g} s") from None

    def close(self) -> None:
        """Let the recorder finish and end, or raise TrackingError where it hangs. Idempotent."""
        with contextlib.suppress(OSError, ValueError):
            cast(IO[str], self._process.stdin).close()
        try:
            self._patiently(self._process.wait, ANSWER_S)
        except TimeoutError:
            self._process.kill()
            raise TrackingError(f"{self._store}: the recorder process hung at its end and was killed") from None
        self._listener.join()

    def _start(self) -> None:
        early = _early.pop() if _early else None
        try:
            self._process = early if early is not None and early.poll() is None else _start_process()
        except OSError as error:
            why = f"the recorder process cannot be started: {reason_of(error)}"
            raise TrackingError(f"{self._store}: {why}; tracking=none does without one") from error
        self._waiting: dict[int, Future[Any]] = {}
        self._alive, self._lock = True, threading.Lock()
        lines = cast(IO[str], self._process.stdout)
        self._listener = threading.Thread(target=self._listen, args=(lines, self._waiting), daemon=True)
        self._listener.start()
        self._send("open", self._opening)

    def _send(self, method: str, arguments: Mapping[str, Any]) -> Future[Any]:
        call_id, answer = next(self._ids), Future[Any]()
        with self._lock:
            if not self._alive:
                answer.set_exception(RecorderDied(self._death))
                return answer
            self._waiting[call_id] = answer
        _write(self._process, call_id, method, arguments)
        return answer

    def _listen(self, lines: IO[str], waiting: dict[int, Future[Any]]) -> None:
        with lines:
            for number, line in enumerate(lines):
                call_id, value, error = json.loads(line)
                self._deaths = 0 if number else self._deaths  # the first answer is of `open`
                answer = waiting.pop(call_id)
                if error is None:
                    answer.set_result(value)
                else:
                    answer.set_exception(TrackingError(error))
        with self._lock:
            self._alive = False
        for answer in waiting.values():
            answer.set_exception(RecorderDied(self._death))

    def _patiently(self, wait_for: Callable[[float], Any], timeout_s: float) -> Any:
        """Return what comes; TimeoutError once the process says nothing for too long, nor computes, as MLflow loads."""
        heartbeat = Heartbeat(timeout_s, LOOK_S)
        while True:
            with contextlib.suppress(TimeoutError, subprocess.TimeoutExpired):
                return wait_for(LOOK_S)
            if heartbeat.look(int(_computed_s(self._process.pid) / (timeout_s * LEAST_SHARE))):
                raise TimeoutError


def _computed_s(pid: int) -> float:
    import psutil  # where somebody is silent, and nowhere else

    with contextlib.suppress(psutil.Error):
        return float(sum(psutil.Process(pid).cpu_times()[:2]))  # user and system
    return 0.0


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
    _write(process, None, "load", {"database": database})
    return process


def _write(process: subprocess.Popen[str], call_id: int | None, method: str, arguments: Mapping[str, Any]) -> None:
    """Write a call into the pipe of a recorder: so few are under way at once that it is never full."""
    calls = cast(IO[str], process.stdin)
    try:
        calls.write(json.dumps([call_id, method, arguments]) + "\n")
        calls.flush()
    except (OSError, ValueError):  # it is dead, or ends now that its pipe does: who waits is answered so
        with contextlib.suppress(OSError, ValueError):
            calls.close()
