"""Every call that a run makes of the system fails in turn: by a full disk, a read-only one, no handle, an interruption.

A library that is preloaded counts the calls on files below the run's folder, and those that make pipes and processes
and write into pipes, and makes one of them fail, or all from there on (`faults.c`). The run must end in one line, or do
without; what it has kept must load, and the same command must then finish it with the same bits.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import itertools
import json
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cnnexp.errors import CheckpointError
from soak.commands import ROOT, SMALL, UNEXPECTED, Done, fault_of, recorded, weights

KINDS = ("open", "write", "sync", "rename", "mkdir", "unlink", "pipe", "send", "spawn")
FILES, PROCESSES = KINDS[:6], KINDS[6:]
# what the system may say to a call, and whether it goes on saying so
ERRORS = {
    "open": [
        (errno.EMFILE, False),
        (errno.ENFILE, True),
        (errno.ENOSPC, True),
        (errno.EROFS, True),
        (errno.EINTR, False),
    ],
    "write": [(errno.ENOSPC, True), (errno.EIO, False), (errno.EDQUOT, True), (errno.EINTR, False)],
    "sync": [(errno.EIO, False), (errno.ENOSPC, True), (errno.EINTR, False)],
    "rename": [(errno.ENOSPC, True), (errno.EROFS, True), (errno.EACCES, False)],
    "mkdir": [(errno.ENOSPC, True), (errno.EROFS, True), (errno.EMLINK, False)],
    "unlink": [(errno.EROFS, True), (errno.EACCES, False)],
    "pipe": [(errno.EMFILE, False), (errno.ENFILE, True)],
    "send": [(errno.EPIPE, False), (errno.EINTR, False)],
    "spawn": [(errno.EAGAIN, False), (errno.ENOMEM, True)],
}
# of CPython, which names it where a write to its resource tracker's pipe fails; tracebacks of nothing but it
TRACKER = "/multiprocessing/resource_tracker.py"
TRACKERS = re.compile(
    r"Traceback \(most recent call last\):\n"
    r'(?:  File "(?:<string>|[^"\n]*/multiprocessing/(?:resource_tracker|spawn|synchronize|util)\.py)", .*\n'
    r"(?:    .*\n)*)+(?:FileNotFoundError|KeyError|BrokenPipeError): .*\n"
)
EPOCHS, TRIAL_S = 3, 600  # a busy machine may take its time
WORDS = (*SMALL, f"trainer.epochs={EPOCHS}", "trainer.batch_size=20", "trainer.checkpoint_batches=4")


@dataclass(frozen=True)
class Fault:
    """The call that fails, counted from 1, and how."""

    kind: str
    call: int
    error: int
    stays: bool

    def __str__(self) -> str:
        return f"{self.kind} {self.call} {errno.errorcode[self.error]}{' from there on' if self.stays else ''}"


def training(folder: Path, seed: int) -> Iterator[str | None]:
    """Let the calls of a training process fail."""
    yield from _preloaded("training", folder, seed)


def storing(folder: Path, seed: int) -> Iterator[str | None]:
    """Let the calls of a recorder fail, those of its database among them; then bring its store up to the journal."""
    yield from _preloaded("storing", folder, seed)


def spawning(folder: Path, seed: int) -> Iterator[str | None]:
    """Let the pipes and processes fail that a run needs for its recorder and its workers."""
    yield from _preloaded("spawning", folder, seed)


def _preloaded(part: str, folder: Path, seed: int) -> Iterator[str | None]:
    """Run a part in a process that has the library loaded; it answers a line of JSON a trial."""
    library = folder / "faults.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    environ = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-m", __name__, part, str(folder), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
            yield f"its process ended with exit code {process.wait()}"
        finally:
            process.kill()


def _trials(
    folder: Path,
    seed: int,
    part: Callable[[Path], None],
    judge: Callable[[Path, Done], str | None],
    kinds: Sequence[str] = FILES,
) -> None:
    """Print a line for each fault of a part: once for every call of some kinds, in a random order, then again."""
    library = ctypes.CDLL(None)
    counted = (ctypes.c_long * len(KINDS))()
    calm = folder / "calm"

    def child(place: Path, fault: Fault | None) -> Done:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        return forked(place, lambda: _armed(library, place, fault, part))

    def count() -> None:
        _armed(library, calm, None, part)

    calm.mkdir(parents=True)
    done = forked(calm, count, after=lambda: library.fault_counts(counted), report=counted)
    if done.code != 0:
        _tell(f"without a fault: {done}")
        return
    calls = dict(zip(KINDS, json.loads((calm / "counts.json").read_text()), strict=True))
    faults = [
        Fault(kind, call, error, stays)
        for kind in kinds
        for call in range(1, calls[kind] + 1)
        for error, stays in ERRORS[kind]
    ]
    sys.stderr.write(f"{calls}: {len(faults)} faults\n")
    rng = random.Random(seed)
    for round_ in itertools.count():
        rng.shuffle(faults)
        for number, fault in enumerate(faults):
            place = folder / f"{round_}-{number}"
            done = without_tracker(child(place, fault))
            said = done.fault or ("unexpected: " + done.err if UNEXPECTED in done.err else None)
            wrong = said or judge(place, done)
            _tell(None if wrong is None else f"{fault}: {wrong}")
            if wrong is None:
                shutil.rmtree(place, ignore_errors=True)


def without_tracker(done: Done) -> Done:
    """Return a process as it ended, without what the loss of CPython's resource tracker has CPython itself print.

    No such tracker is dead: closing its pipe has it unlink the semaphores in use, so a new worker does not find them
    before any of our code runs in it, nor does multiprocessing at the end, nor the next tracker know their names.
    """
    return replace(done, err=TRACKERS.sub("", done.err)) if TRACKER in done.err else done


def _armed(library: Any, place: Path, fault: Fault | None, part: Callable[[Path], None]) -> None:
    kind, call, error, stays = (-1, 0, 0, False) if fault is None else (
        KINDS.index(fault.kind), fault.call, fault.error, fault.stays
    )  # fmt: skip
    library.fault_arm(f"{place}/run".encode(), kind, call, error, int(stays))
    if fault is not None and (fault.kind, fault.error) == ("send", errno.EPIPE):
        _bury_tracker()
    part(place)


def _bury_tracker() -> None:
    """Have CPython's resource tracker die when its end is waited for: it lives on where its pipe only seems broken.

    CPython waits for the end of a tracker whose pipe it found broken, and other processes keep this one going.
    """
    wait = os.waitpid

    def waitpid(pid: int, options: int) -> tuple[int, int]:
        if pid == multiprocessing.resource_tracker._resource_tracker._pid:  # type: ignore[attr-defined]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return wait(pid, options)

    os.waitpid = waitpid


def forked(
    place: Path,
    work: Callable[[], None],
    after: Callable[[], Any] = lambda: None,
    report: Any = None,
    limit_s: float = TRIAL_S,
) -> Done:
    """Do some work in a child of this process, which has everything loaded."""
    started = time.monotonic()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            for number, name in ((1, "out.txt"), (2, "err.txt")):
                os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            try:
                work()
                code = 0
            except SystemExit as left:
                code = left.code if isinstance(left.code, int) else 0
            except Exception:
                traceback.print_exc()
            after()
            if report is not None:
                (place / "counts.json").write_text(json.dumps(list(report)))
            sys.stdout.flush()
        finally:
            multiprocessing.util._exit_function()  # as at the end of a process that is no fork
            os._exit(code)
    code: int | None = None
    while time.monotonic() - started < limit_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.005)
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    out, err = ((place / name).read_text() for name in ("out.txt", "err.txt"))
    return Done(code, out, err, time.monotonic() - started)


def _tell(fault: str | None) -> None:
    sys.__stdout__.write(json.dumps(fault) + "\n")
    sys.__stdout__.flush()


def _train(place: Path, *words: str) -> None:
    from cnnexp.__main__ import main

    sys.argv = ["cnnexp", *WORDS, *(words or ("tracking=none",)), f"hydra.run.dir={place}/run", "trainer.resume=auto"]
    main()


def _train_beside(place: Path) -> None:
    """Train with a recorder and another worker."""
    _train(
        place,
        "workers=local",
        "workers.count=2",
        f"tracking.uri=sqlite:///{place}/mlflow.db",
        "tracking.experiment=soak",
    )


def _training(folder: Path, seed: int) -> None:
    _trials(folder, seed, _train, _finishes(folder, _train))


def _spawning(folder: Path, seed: int) -> None:
    finishes = _finishes(folder, _train_beside)

    def judge(place: Path, done: Done) -> str | None:
        return finishes(place, done) or fault_of(recorded(place / "mlflow.db", "soak"), EPOCHS)

    _trials(folder, seed, _train_beside, judge, PROCESSES)


def _finishes(folder: Path, train: Callable[[Path], None]) -> Callable[[Path, Done], str | None]:
    """Return what shows whether the same command finishes a run as if nothing had failed."""
    from cnnexp.app import hydra_app  # noqa: F401 - so that children have it

    done = forked(_made(folder / "whole"), lambda: train(folder / "whole"))
    assert done.code == 0, done
    wanted = weights(folder / "whole" / "run")

    def judge(place: Path, done: Done) -> str | None:
        from cnnexp.tracking.events import read_journal
        from cnnexp.training.checkpoint import find, holds_checkpoints, load

        if holds_checkpoints(place / "run"):
            try:
                load(find(place / "run"))
            except CheckpointError as error:
                return f"what was kept: {error}"
        again = forked(place, lambda: train(place))
        if again.code != 0:
            return f"then: {again}"
        journal = read_journal(place / "run")
        if journal["status"] != "FINISHED" or [e["epoch"] for e in journal["epochs"]] != list(range(1, EPOCHS + 1)):
            return f"the journal: {journal['status']}, {[e['epoch'] for e in journal['epochs']]}"
        return None if weights(place / "run") == wanted else "other weights"

    return judge


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _record(place: Path) -> None:
    """Do what the recorder of a run does, in this process, while the run's journal grows."""
    from cnnexp.errors import TrackingError, leave
    from cnnexp.tracking import store as stores

    folder = place / "journal"
    journal = folder / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("")
    try:
        store = stores.Store(f"sqlite:///{place}/run/mlflow.db", "soak")
        for line in lines:
            with journal.open("a") as file:
                file.write(line)
            with contextlib.suppress(TrackingError):  # it is tried again
                store.follow(str(folder))
        store.follow(str(folder))
    except TrackingError as error:
        leave(str(error), error.exit_code)
    finally:
        journal.write_text("".join(lines))


def _storing(folder: Path, seed: int) -> None:
    import logging

    from cnnexp.tracking import store as stores

    logging.disable(logging.CRITICAL)
    original = folder / "original"
    words = [*WORDS, f"tracking.uri=sqlite:///{original}/mlflow.db", f"hydra.run.dir={original}/run"]
    from soak.commands import run

    done = run(words, _made(original))
    assert done.code == 0, done
    stores.Store(f"sqlite:///{_made(folder / 'warm')}/mlflow.db", "warm")  # children have MLflow loaded
    gc.collect()

    def record(place: Path) -> None:
        shutil.copytree(original / "run", place / "journal", dirs_exist_ok=True)
        lines = (original / "run" / "journal.jsonl").read_text().splitlines()
        lines = [line for line in lines if json.loads(line)["event"] not in ("recorded", "stored")]
        mine = "".join(f"{line}\n" for line in lines).replace(str(original / "run"), str(place / "journal"))
        (place / "journal" / "journal.jsonl").write_text(mine)  # of a run in this folder
        _made(place / "run")
        _record(place)

    def sync(place: Path) -> None:
        run_id = stores.Store(f"sqlite:///{place}/run/mlflow.db", "soak").sync(str(place / "journal"))
        if run_id is None:
            raise ValueError("nothing was sent")

    def judge(place: Path, done: Done) -> str | None:
        again = forked(place, lambda: sync(place))
        if again.code != 0:
            return f"then: {again}"
        with contextlib.suppress(OSError):
            return fault_of(recorded(place / "run" / "mlflow.db", "soak"), EPOCHS)
        return "no store"

    _trials(folder, seed, record, judge)


if __name__ == "__main__":
    {"training": _training, "storing": _storing, "spawning": _spawning}[sys.argv[1]](
        Path(sys.argv[2]), int(sys.argv[3])
    )
