"""Command lines of cnnexp in processes of their own, which are killed when a trial says so, and what they leave."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, cast

from cnnexp.training.checkpoint import find, load

ROOT = Path(__file__).resolve().parents[1]
INSTANT_S, MEMORY = 0.005, Path("/dev/shm")
LIMIT_S = 600.0  # what takes longer on a busy machine hangs
UNEXPECTED = "unexpected "  # what nobody has explained; CPython's tracker dies "unexpectedly"
# as where the package is installed: outputs/ is in the working folder
PROGRAM = """
from cnnexp.measuring import environment
environment.checkout = lambda: None
from cnnexp.__main__ import main
main()
"""
# a second of training at most: what is tried is the way around it
SMALL = ("experiment=smoke", "backend=numpy", "trainer.baseline=null", "trainer.progress=false")
ALWAYS = ("train/loss", "test/loss", "test/accuracy", "time/epoch_s")  # metrics of every epoch


@dataclass(frozen=True)
class Done:
    """How a process ended; `code` is None where it hung and was killed for that."""

    code: int | None
    out: str
    err: str
    seconds: float

    @property
    def fault(self) -> str | None:
        """What no command may do, whatever it was asked: hang, show a traceback, die of a signal, be long-winded."""
        if self.code is None:
            return f"hung for {self.seconds:.0f} s"
        if "Traceback" in self.out + self.err:
            return f"a traceback: {self.err[-300:]}"
        if self.code < 0:
            return f"died of {signal.Signals(-self.code).name}: {self.err[-300:]}"
        if self.code and sum(line.startswith("cnnexp: error: ") for line in self.err.splitlines()) != 1:
            return f"exit code {self.code} with {self.err[-300:]!r}"
        return None


def run(
    words: Sequence[str],
    folder: Path,
    kill_after_s: float | None = None,
    meanwhile: Callable[[subprocess.Popen[str]], None] = lambda process: None,
    limit_s: float = LIMIT_S,
    program: str = PROGRAM,
) -> Done:
    """Run a command line in a folder.

    Args:
        words: of it.
        folder: to work in; made here.
        kill_after_s: seconds until SIGKILL; None lets it end.
        meanwhile: called with the process once it runs, in a thread; it must end once the process has.
        limit_s: seconds until it counts as hung.
        program: the Python that runs it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("out.txt", "err.txt"):  # a child that outlives a killed run writes on into that one's
        (folder / name).unlink(missing_ok=True)
    command = [sys.executable, "-P", "-c", program, *words]
    started = time.monotonic()
    with (
        (folder / "out.txt").open("w+") as out,
        (folder / "err.txt").open("w+") as err,
        subprocess.Popen(command, stdout=out, stderr=err, cwd=folder, env=_environ(), text=True) as process,
    ):
        code: int | None = None
        with ThreadPoolExecutor(1) as threads:
            beside = threads.submit(meanwhile, process)
            try:
                code = process.wait(limit_s if kill_after_s is None else kill_after_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                process.kill()
                ended = process.wait()
        seconds = time.monotonic() - started
        beside.result()
        out.seek(0)
        err.seek(0)
        return Done(code if kill_after_s is None else ended, out.read(), err.read(), seconds)


def _environ() -> dict[str, str]:
    """Return the environment of a process that finds this package, wherever it runs."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


class NotTried(Exception):
    """What a part needs is not installed here."""


def chunks(
    module: str, words: Sequence[str], seed: int, size: int, environ: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str | None]:
    """Yield what a module of the soak tries, in processes of `size` trials each.

    Args:
        module: `python -m MODULE *words SEED COUNT` prints a line of JSON for each trial: null, or what did not hold.
        words: its first arguments.
        seed: of the part; every process has one of its own.
        size: trials of one process.
        environ: set for them.
    """
    for slice_ in range(seed * 1_000_000, (seed + 1) * 1_000_000):
        command = [sys.executable, "-P", "-m", module, *words, str(slice_), str(size)]
        with (
            tempfile.TemporaryFile("w+") as err,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=err, text=True, cwd=ROOT, env={**_environ(), **environ}
            ) as process,
        ):
            try:
                yield from map(json.loads, cast(IO[str], process.stdout))
                code = process.wait()
            finally:
                process.kill()  # nobody wants its other trials
            err.seek(0)
            if code:
                yield f"seed {slice_}: its process ended with exit code {code}: {err.read()[-300:]}"


@contextlib.contextmanager
def in_memory() -> Iterator[Path]:
    """Give a folder where no epoch waits for a disk, for as long as the block runs."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        yield Path(folder)


def clocked(pid: int) -> tuple[float, float, float] | None:
    """Return when this was, and for how long until then a process's first thread has run, and wanted to run, in ms.

    None where the process is gone, or where this thread was kept from looking at one moment.
    """
    now = time.time()
    with contextlib.suppress(OSError, ValueError):
        ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
        if time.time() - now < INSTANT_S:
            return now * 1000, int(ran) / 1e6, int(waited) / 1e6
    return None


def weights(folder: Path) -> str:
    """Return the SHA-256 of all that the last checkpoint of a run's folder holds of its program."""
    state = load(find(folder)).state
    return hashlib.sha256(b"".join(name.encode() + state[name].tobytes() for name in sorted(state))).hexdigest()


@dataclass(frozen=True)
class Recorded:
    """A run as a store has it: by metric, the steps and values in their order."""

    id: str
    status: str
    metrics: dict[str, list[tuple[int, float]]]


def recorded(store: Path | str, experiment: str) -> list[Recorded]:
    """Return the runs of an experiment, read without MLflow: of an sqlite file, or of a PostgreSQL database."""
    if isinstance(store, Path):
        database, mark = sqlite3.connect(f"file:{store}?mode=ro", uri=True, timeout=60), "?"
    else:
        import psycopg2

        database, mark = psycopg2.connect(store), "%s"
    with contextlib.closing(database), contextlib.closing(database.cursor()) as cursor:
        query = "SELECT run_uuid, status FROM runs JOIN experiments USING (experiment_id) WHERE experiments.name = "
        cursor.execute(query + mark, (experiment,))
        found = []
        for run_id, status in cursor.fetchall():
            metrics: dict[str, list[tuple[int, float]]] = {}
            query = f"SELECT key, step, value FROM metrics WHERE run_uuid = {mark} ORDER BY step, timestamp"
            cursor.execute(query, (run_id,))
            for key, step, value in cursor.fetchall():
                metrics.setdefault(key, []).append((step, value))
            found.append(Recorded(run_id, status, metrics))
    return found


def fault_of(runs: Sequence[Recorded], epochs: int) -> str | None:
    """Return what is wrong with runs that should be one, FINISHED, with every epoch once."""
    if len(runs) != 1:
        return f"{len(runs)} MLflow runs: {[run.status for run in runs]}"
    if runs[0].status != "FINISHED":
        return f"the MLflow run is {runs[0].status}"
    for name in ALWAYS:
        steps = [step for step, _ in runs[0].metrics.get(name, [])]
        if steps != list(range(1, epochs + 1)):
            return f"{name} has the epochs {steps}"
    return None
