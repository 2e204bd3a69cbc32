"""Whether other work on the machine disturbed what was timed, as the kernel tells it.

Linux keeps, for each thread, the time that it ran and the time that it was ready to run and waited for a core
(`/proc/PID/task/TID/schedstat`), and for each core the time that a hypervisor took (`/proc/stat`). On a quiet machine a
thread hardly waits, however many times its passes vary for reasons of their own. Other systems tell neither, and then
nothing is claimed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cnnexp.backends.processor import usable_cores

PROC = Path("/proc")
DISTURBED = 0.05  # share of the time, waited or stolen, from which a run is called disturbed
QUIET_BUSY = 0.10  # share of the cores that others may use while a patient run begins an epoch
QUIET_LOOK_S = 0.5
PATIENCE_S = 300.0  # of a patient run, all waits together


@dataclass(frozen=True)
class Interference:
    """What others took of the time while a run trained.

    Attributes:
        waited: share of the time in which its threads wanted a core that they waited for one, 0 .. 1.
        stolen: share of the cores' time that a hypervisor gave to others, 0 .. 1.
        load: the system's load average of the last minute: of all processes, this one among them.
        cores: that this process may use.
    """

    waited: float
    stolen: float
    load: float
    cores: int

    def __repr__(self) -> str:
        taken = f"waited {self.waited:.1%}, stolen {self.stolen:.1%}"
        return f"Interference({taken}, load {self.load:.1f} on {self.cores} cores)"

    @property
    def disturbed(self) -> bool:
        return max(self.waited, self.stolen) >= DISTURBED


class Watch:
    """Watches training passes for other work on the machine.

    Args:
        proc: where the kernel tells.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._total = [0] * 4

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Watch the block, which is to begin and end outside the clock of who times it: asking takes a millisecond."""
        before = _counts(self._proc)
        yield
        after = _counts(self._proc)
        if before is not None and after is not None:
            self._total = [t + max(0, b - a) for t, a, b in zip(self._total, before, after, strict=True)]

    def interference(self) -> Interference | None:
        """Return what has disturbed all blocks so far together, None where this system does not tell."""
        ran, waited, stolen, passed = self._total
        if not ran:
            return None
        return Interference(waited / (ran + waited), stolen / passed if passed else 0.0, _load(), usable_cores())


def await_quiet(
    limit_s: float = PATIENCE_S,
    busy: Callable[[], float] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Wait until others leave this process's cores alone; return the seconds waited, at least one look.

    Args:
        limit_s: go on after so many seconds, quiet or not.
        busy: looks, for a while, and returns the share of the cores that others use.
        clock: returns seconds.
    """
    started = clock()
    while (busy or others_share)() > QUIET_BUSY and clock() - started < limit_s:
        pass
    return clock() - started


class Patience:
    """Waits for a quiet machine, `PATIENCE_S` in all.

    Args:
        wanted: False never waits.

    Attributes:
        left_s: seconds that it may still wait.
    """

    def __init__(self, wanted: bool) -> None:
        self.left_s = PATIENCE_S if wanted else 0.0

    def wait(self) -> None:
        """Wait until others leave the cores alone, as long as patience lasts."""
        if self.left_s > 0:
            self.left_s -= await_quiet(self.left_s)


def others_share(seconds: float = QUIET_LOOK_S, proc: Path = PROC) -> float:
    """Return the share of this process's cores that other work uses in the next seconds; 0 where nothing tells."""
    before, own, started = _cores_ticks(proc), time.process_time(), time.monotonic()
    time.sleep(seconds)
    after = _cores_ticks(proc)
    if before is None or after is None:
        return 0.0
    own, cores_s = time.process_time() - own, (time.monotonic() - started) * usable_cores()
    busy_s = (after[0] - before[0]) / os.sysconf("SC_CLK_TCK")
    return min(1.0, max(0.0, (busy_s - own) / cores_s))


def _counts(proc: Path) -> list[int] | None:
    """Return (ns that the threads ran, ns that they waited, ticks stolen from their cores, ticks of these cores)."""
    ran = waited = 0
    try:
        for thread in (proc / "self" / "task").iterdir():
            try:
                now_ran, now_waited, _ = (thread / "schedstat").read_text().split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile
            ran, waited = ran + int(now_ran), waited + int(now_waited)
    except (OSError, ValueError):
        return None
    ticks = _cores_ticks(proc)
    return None if ticks is None or not ran else [ran, waited, *ticks[1:]]


def _cores_ticks(proc: Path) -> tuple[int, int, int] | None:
    """Return the ticks, over the cores that this process may use: (busy or stolen, stolen, all)."""
    busy = stolen = passed = 0
    try:
        wanted = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        for line in (proc / "stat").read_text().splitlines():
            name, *columns = line.split()
            if name in wanted:
                user, nice, system, idle, waiting, irq, soft, steal = map(int, columns[:8])
                stolen += steal
                busy += user + nice + system + irq + soft + steal
                passed += user + nice + system + idle + waiting + irq + soft + steal
    except (AttributeError, OSError, ValueError):
        return None
    return (busy, stolen, passed) if passed else None


def _load() -> float:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
