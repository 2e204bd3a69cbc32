"""Stores that stop in the middle of a run, an MLflow server and a PostgreSQL database; and the password to one."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from cnnexp.tracking.browser import free_port
from cnnexp.tracking.events import read_journal
from soak.commands import SMALL, Recorded, fault_of, recorded, run

EPOCHS, EPOCH_IMAGES = 120, 6000
STOPPED_S, SERVED_S = 60.0, 300.0
MOST_LONGER = 1.1  # an epoch while the store stands still, beside its neighbours
STORE = "mlflow.db"
POSTGRES = ("initdb", "postgres", "createdb", "psql")


def outage(folder: Path, seed: int) -> Iterator[str | None]:
    """Stop an MLflow server for a minute in the middle of a run; all metrics must be there at the end."""
    rng = random.Random(seed)
    with _mlflow(folder, rng) as port:
        store = folder / STORE
        yield from _stopped(folder, f"http://127.0.0.1:{port}", port, lambda name: recorded(store, name), rng)


def passwords(folder: Path, seed: int) -> Iterator[str | None]:
    """Look for the password of an MLflow server's address in all that runs, sweeps and `sync` write, the server too."""
    rng = random.Random(seed)
    with _mlflow(folder, rng) as port:
        for trial in itertools.count():
            password, place = f"pw{rng.getrandbits(64):016x}", folder / f"{trial:05d}"
            address = f"tracking.uri=http://me:{password}@127.0.0.1:{port}"
            words = [*SMALL, "trainer.epochs=1", "tracking.experiment=secret", address]
            commands = [[*words, "hydra.run.dir=run"], [*words, "-m", "model.filters=1,2"], ["sync", ".", address]]
            done = [run(words, place) for words in commands]
            faults = [one.fault or f"exit code {one.code}: {one.err}" for one in done if one.code != 0]
            files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
            faults += [f"it is in {path}" for path in files if password.encode() in path.read_bytes()]
            runs = [run for run in recorded(folder / STORE, "secret") if "train/loss" in run.metrics]
            if len(runs) != 3 * (trial + 1):
                faults.append(f"{len(runs)} runs are recorded")
            faults += ["it is on the screen"] if any(password in one.out + one.err for one in done) else []
            yield "; ".join(faults) or None


def postgres(folder: Path, seed: int) -> Iterator[str | None]:
    """Stop a PostgreSQL server for a minute in the middle of a run; needs its programs, and psycopg2."""
    found = {name: shutil.which(name) for name in POSTGRES}
    if None in found.values():
        yield f"not tried: PostgreSQL's {', '.join(name for name, path in found.items() if path is None)} is not here"
        return
    rng = random.Random(seed)
    port = free_port(5500 + rng.randrange(1000))
    data = folder / "data"
    # its server refuses to run as root
    other = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.geteuid() == 0 else []
    if other:
        os.chmod(folder, 0o777)
    subprocess.run([*other, "initdb", "-D", data, "-A", "trust", "-U", "soak"], check=True, capture_output=True)
    with _served([*other, "postgres", "-D", str(data), "-p", str(port), "-k", str(data)], port, folder):
        subprocess.run(["createdb", "-h", "127.0.0.1", "-p", str(port), "-U", "soak", "soak"], check=True)
        place = f"://soak@127.0.0.1:{port}/soak"
        yield from _stopped(
            folder, f"postgresql+psycopg2{place}", port, lambda name: recorded(f"postgresql{place}", name), rng
        )


def _stopped(
    folder: Path, uri: str, port: int, read: Callable[[str], list[Recorded]], rng: random.Random
) -> Iterator[str | None]:
    """Run trainings whose store stands still for a while, and judge each."""
    words = [*SMALL, f"trainer.epochs={EPOCHS}", f"dataset.train_size={EPOCH_IMAGES}", f"tracking.uri={uri}"]
    for trial in range(1_000_000):
        place, experiment = folder / f"{trial:05d}", f"trial {trial}"
        before = rng.randrange(2, 20)
        times: list[float] = []

        mine = [*words, f"tracking.experiment={experiment}", "hydra.run.dir=run"]
        stop = functools.partial(_stop, port, place / "run", before, times)
        done = run(mine, place, meanwhile=stop)
        failed = done.fault or (f"exit code {done.code}: {done.err}" if done.code else None)
        yield failed or _fault(place, read(experiment), times)


def _stop(port: int, folder: Path, before: int, times: list[float], process: subprocess.Popen[str]) -> None:
    """Have a store stand still for a while once a run has done some epochs; note from when to when."""
    while process.poll() is None and len(read_journal(folder)["epochs"]) < before:
        time.sleep(0.2)
    with _suspended(port):
        times.append(time.time() * 1000)
        time.sleep(STOPPED_S)
        times.append(time.time() * 1000)


def _fault(place: Path, runs: Sequence[Recorded], times: Sequence[float]) -> str | None:
    if fault := fault_of(runs, EPOCHS):
        return fault
    journal = read_journal(place / "run")
    ends = [journal["times_ms"][epoch] for epoch in range(1, EPOCHS + 1)]
    gaps = [(end, after - end) for end, after in itertools.pairwise(ends)]
    within = [gap for end, gap in gaps if times[0] <= end < times[1]]
    beside = [gap for end, gap in gaps if not times[0] <= end < times[1]]
    ratio = statistics.median(within) / statistics.median(beside) if within and beside else float("nan")
    told = f"{len(within)} epochs while it stood still, of {ratio:.2f} the others' seconds (medians)"
    sys.stderr.write(f"{told}\n")
    return None if within and ratio <= MOST_LONGER else told


@contextlib.contextmanager
def _mlflow(folder: Path, rng: random.Random) -> Iterator[int]:
    """Run an MLflow server, whose store is in a folder, until the block ends; return its port."""
    port = free_port(5100 + rng.randrange(1000))
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder / STORE}"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--artifacts-destination", str(folder / "artifacts")]
    with _served([*command, "--workers", "1"], port, folder):
        yield port


@contextlib.contextmanager
def _served(command: Sequence[str], port: int, folder: Path) -> Iterator[None]:
    """Run a server until the block ends."""
    with (folder / "server.txt").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, start_new_session=True)
    ends = time.monotonic() + SERVED_S
    try:
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                break
            if server.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"no server: {(folder / 'server.txt').read_text()[-500:]}")
            time.sleep(0.2)
        yield
    finally:
        for process in _family(server.pid):
            with contextlib.suppress(psutil.Error):
                process.kill()
        server.wait()


@contextlib.contextmanager
def _suspended(port: int) -> Iterator[None]:
    """Have whoever listens on a port stand still, with all children."""
    owners = {c.pid for c in psutil.net_connections("tcp") if c.laddr.port == port and c.status == "LISTEN" and c.pid}
    stopped = {process for pid in owners for process in _family(pid)}
    try:
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        yield
    finally:
        for process in stopped:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)


def _family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []
