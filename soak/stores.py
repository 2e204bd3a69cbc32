"""Stores that stop in the middle of a run, an MLflow server and a PostgreSQL database; and the password to one."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil

from cnnexp.tracking.browser import free_port
from cnnexp.tracking.events import read_journal
from soak.commands import SMALL, NotTried, Recorded, clocked, fault_of, in_memory, recorded, run

EPOCHS, EPOCH_S, TRIED_IMAGES = 60, 2.0, 20_000  # of an epoch that is tried to find how many take so long
STOPPED_S, SERVED_S = 60.0, 300.0
MOST_LONGER = 1.1  # an epoch while the store stands still, beside its neighbours
FEWEST = 5  # epochs to judge by
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
        raise NotTried(f"PostgreSQL's {', '.join(name for name, path in found.items() if path is None)} is not here")
    if importlib.util.find_spec("psycopg2") is None:
        raise NotTried("psycopg2 is not here: pip install psycopg2-binary")
    rng = random.Random(seed)
    port = free_port(5500 + rng.randrange(1000))
    data = folder / "data"
    # its server refuses to run as root
    other = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.geteuid() == 0 else []
    if other:
        os.chmod(folder, 0o777)
        os.chmod(folder.parent, 0o711)
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
    words = [*SMALL, "backend=cpu"]
    tried = [*words, "trainer.epochs=3", f"dataset.train_size={TRIED_IMAGES}", "tracking=none", "hydra.run.dir=run"]
    run(tried, folder / "tried")
    journal = read_journal(folder / "tried" / "run")
    took_ms = (journal["times_ms"][3] - journal["times_ms"][2]) * (1 - journal["metrics"].get("time/others_share", 0.0))
    words += [f"trainer.epochs={EPOCHS}", f"dataset.train_size={int(TRIED_IMAGES * EPOCH_S * 1000 / took_ms)}"]
    for trial in range(1_000_000):
        place, experiment = folder / f"{trial:05d}", f"trial {trial}"
        with in_memory() as its:
            watch = Watch(port, its, rng.randrange(4, 9))
            mine = [*words, f"tracking.uri={uri}", f"tracking.experiment={experiment}", f"hydra.run.dir={its}"]
            done = run(mine, place, meanwhile=watch)
            failed = done.fault or (f"exit code {done.code}: {done.err}" if done.code else None)
            yield failed or _fault(its, read(experiment), watch.times, watch.samples)


class Watch:
    """Has a store stand still for a while, once a run has done some epochs, and looks at the run all the while.

    Attributes:
        times: from when to when it stood still, ms.
        samples: (when, for how long until then the training thread ran or wanted to, and its children ran), ms.
    """

    def __init__(self, port: int, folder: Path, before: int) -> None:
        self._port, self._folder, self._before = port, folder, before
        self.times: list[float] = []
        self.samples: list[tuple[float, float, float]] = []

    def __call__(self, process: subprocess.Popen[str]) -> None:
        """Watch a run until it ends."""
        with contextlib.ExitStack() as stopped:
            while process.poll() is None:
                with contextlib.suppress(psutil.Error):
                    used = sum(sum(child.cpu_times()[:2]) for child in psutil.Process(process.pid).children())
                    if (seen := clocked(process.pid)) is not None:
                        self.samples.append((seen[0], seen[1] + seen[2], used * 1000))
                if not self.times and len(read_journal(self._folder)["epochs"]) >= self._before:
                    stopped.enter_context(_suspended(self._port))
                    self.times.append(time.time() * 1000)
                elif len(self.times) == 1 and time.time() * 1000 >= self.times[0] + STOPPED_S * 1000:
                    stopped.close()
                    self.times.append(time.time() * 1000)
                time.sleep(0.1)


def _fault(
    folder: Path, runs: Sequence[Recorded], times: Sequence[float], samples: Sequence[tuple[float, float, float]]
) -> str | None:
    """Return what is wrong with a run whose store stood still, and print how long its epochs took.

    Other work on the machine makes some epochs longer than others. What a store can do to one is to have it wait, the
    time in which its thread neither ran nor was kept from it by others, or to have the recorder compute. Each epoch is
    judged by the first, beyond what epochs beside wait, and all together by the second.
    """
    if fault := fault_of(runs, EPOCHS):
        return fault
    ends = [*read_journal(folder)["times_ms"].values()][:EPOCHS]
    at, active, children = zip(*samples, strict=True)
    used_ms = np.diff(np.interp(times, at, children))
    active = np.interp(ends, at, active)
    gaps, idle = np.diff(ends), np.diff(ends) - np.diff(active)
    within = np.array([times[0] <= end < times[-1] for end in ends[:-1]])
    if len(times) != 2 or min(within.sum(), (~within).sum()) < FEWEST:
        return f"{within.sum()} epochs while it stood still, {(~within).sum()} beside: too few to judge by"
    usual = np.median(gaps[~within])
    text = [
        f"{within.sum()} epochs while the store stood still (recorder {used_ms[0]:.0f} ms), {(~within).sum()} beside"
    ]
    for name, which in (("while", within), ("beside", ~within)):
        lower, middle, upper = np.quantile(gaps[which], (0.05, 0.5, 0.95)) / 1000
        longer = np.mean(gaps[which] > MOST_LONGER * usual)
        text.append(
            f"{name}: median {middle:.2f} s (5 to 95 %: {lower:.2f} to {upper:.2f}), {longer:.0%} longer than "
            f"{MOST_LONGER:g} medians, idle {np.median(idle[which]):.0f} ms (most: {idle[which].max():.0f})"
        )
    sys.stderr.write("; ".join(text) + "\n")
    longer = (idle - np.median(idle[~within])) / usual
    most = MOST_LONGER - 1
    faults = [f"epoch {e + 2} waited for {longer[e]:.0%} of one" for e in np.flatnonzero(within & (longer > most))]
    if used_ms[0] > most * (times[1] - times[0]):
        faults.append(f"the recorder computed for {used_ms[0]:.0f} ms of {times[1] - times[0]:.0f}")
    return "; ".join([*faults, *text]) if faults else None


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
