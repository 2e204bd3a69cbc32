"""Whether other work on the machine disturbed what was timed, as the kernel counts it.

Linux counts for each core the time that it was idle, and the time that a hypervisor gave to others (`/proc/stat`). What
was neither idle nor used by this process and its children went to other work. How long the run's own threads waited for
a core says nothing of others: they also wait for each other. Other systems count neither, and then nothing is claimed.
"""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cnnexp.system.cores import usable_cores
from cnnexp.training.loop import Observer

PROC = Path("/proc")
DISTURBED = 0.05  # share of the cores' time used by others from which a run is called disturbed
CROWDED = 0.25  # cores that others use beyond those that the run leaves free, from which it is, too
SHORTEST_S = 0.2  # of training that allows a verdict: the kernel counts in ticks of 0.01 s
QUIET_BUSY = 0.10  # share of the cores that others may use while a patient run begins an epoch
QUIET_LOOK_S = 0.5
IDLE_WAIT_S = 300.0  # of a patient run, all waits together


@dataclass(frozen=True)
class Interference:
    """What other processes and machines took of the time of the cores that this process may use, while it trained."""

    others: float  # share of that time, 0 .. 1
    stolen: float  # the part of it that a hypervisor gave to other machines, 0 .. 1
    load: float  # the system's load average of the last minute: of all processes, this one among them
    cores: int
    threads: int  # that the run computes with
    seconds: float  # that were watched

    def __repr__(self) -> str:
        taken = f"others {self.others:.1%}, stolen {self.stolen:.1%}"
        return f"Interference({taken}, load {self.load:.1f} on {self.cores} cores)"

    @property
    def known(self) -> bool:
        """Whether the watch was long enough for a verdict."""
        return self.seconds >= SHORTEST_S

    @property
    def disturbed(self) -> bool:
        """Whether others used cores that the run needed; False where the watch was too short to say."""
        taken = self.others * self.cores - max(0, self.cores - self.threads)
        return self.known and (self.others >= DISTURBED or taken >= CROWDED)


class Watch(Observer):
    """Watches epochs for other work on the machine; a look takes some milliseconds, outside every clock."""

    def __init__(self, threads: int, proc: Path = PROC) -> None:
        self._threads, self._proc = threads, proc
        self._since: np.ndarray | None = None
        self._watched = np.zeros(4)  # seconds, as `_look` returns them

    def start(self) -> None:
        """Begin an epoch, or go on after a wait that does not count."""
        self._since = _look(self._proc)

    def finished(self, result: object) -> None:
        """End an epoch; the next one begins at once unless `start` says later."""
        now = _look(self._proc)
        if self._since is not None and now is not None:
            self._watched += now - self._since
        self._since = now

    def interference(self) -> Interference | None:
        """Return what others took in all epochs so far, None where this system does not count it."""
        if not self._watched[0]:
            return None
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        return Interference(*_shares(self._watched), load, usable_cores(), self._threads, float(self._watched[0]))


def others_share(seconds: float = QUIET_LOOK_S, proc: Path = PROC) -> float:
    """Return the share of this process's cores that other work uses in the next seconds; 0 where nothing counts it."""
    before = _look(proc)
    time.sleep(seconds)
    after = _look(proc)
    return 0.0 if before is None or after is None else _shares(after - before)[0]


def await_quiet(limit_s: float) -> float:
    """Wait until others leave this process's cores alone, at most `limit_s`; return the seconds, a look's at least."""
    started = time.monotonic()
    while others_share() > QUIET_BUSY and time.monotonic() - started < limit_s:
        pass
    return time.monotonic() - started


def _shares(passed: np.ndarray) -> tuple[float, float]:
    """Return the shares of the cores' time that others used and that was stolen between two looks, their difference."""
    seconds, own, idle, stolen = passed.tolist()
    cores_s = max(seconds * usable_cores(), 1e-9)
    # kernels differ in whether a process's own time holds what was stolen from it; others have used at least that
    others = max((cores_s - idle - own) / cores_s, stolen / cores_s)
    return min(1.0, max(0.0, others)), min(1.0, max(0.0, stolen / cores_s))


def _look(proc: Path) -> np.ndarray | None:
    """Return seconds until now, float64 (4,): of the clock, of this process and its children, its cores' idle, stolen.

    None where they are not counted.
    """
    try:
        ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        lines = [line.split() for line in (proc / "stat").read_text().splitlines()]
        cores = [line for line in lines if line[0] in ours]  # name user nice system idle iowait irq softirq steal
        idle, stolen = sum(int(core[4]) + int(core[5]) for core in cores), sum(int(core[8]) for core in cores)
    except (AttributeError, OSError, ValueError, IndexError):
        return None
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    return np.array([time.monotonic(), _own_s(), idle * tick_s, stolen * tick_s]) if cores else None


def _own_s() -> float:
    """Return the seconds that this process and its children, the ended ones too, have computed."""
    own = time.process_time() + sum(os.times()[2:4])  # of ended children: user and system
    import psutil  # slow to import: when the first epoch begins

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            own += sum(child.cpu_times()[:2])
    return own
