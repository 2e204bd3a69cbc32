"""The CPU, which of its cores this process may use, and on which of them the threads of a pool begin their work."""

import contextlib
import ctypes
import functools
import os
import platform
from pathlib import Path

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def usable_cores() -> int:
    """Return the cores this process may run on: fewer than the machine has, in a container or under taskset."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def cpu_name() -> str:
    """Return the CPU's model name, or its architecture where the system does not say."""
    with contextlib.suppress(FileNotFoundError):  # Linux alone has it
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cache_sizes(folder: Path) -> dict[int, int]:
    """Return the bytes of a core's data caches by level, as Linux states them; empty elsewhere."""
    found = {}
    for index in folder.glob("index*"):
        with contextlib.suppress(OSError, ValueError):
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
            if kind != "Instruction":
                found[int(level)] = int(size.rstrip("KM")) << {"K": 10, "M": 20}.get(size[-1], 0)
    return found


class Cores:
    """The cores that the threads of a pool work on, so that no two begin a task on one.

    Linux may begin a woken thread on the core of the one that wakes it; there it waits for milliseconds while another
    core is idle. A thread that finds itself on a core of its pool moves to another, an idle one if there is one. It is
    not bound: the system may move it again, so a core that other work needs is given up.
    """

    def __init__(self) -> None:
        self._taken: dict[int, int] = {}

    def take(self, rank: int) -> None:
        """Note the core of the calling thread; a rank above 0 moves first where a lower one has noted the same."""
        core = current_core()
        if core is None:
            return
        taken = {self._taken[other] for other in range(rank) if other in self._taken}
        if core in taken and (usable := os.sched_getaffinity(0)) - taken:
            with contextlib.suppress(OSError):  # a sandbox forbids it
                os.sched_setaffinity(0, usable - taken)
                os.sched_setaffinity(0, usable)
            core = current_core() or 0
        self._taken[rank] = core


def current_core() -> int | None:
    """Return the core that the calling thread runs on, None where the system does not say."""
    core = _getcpu() if _getcpu is not None else -1
    return core if core >= 0 else None


_getcpu = getattr(ctypes.PyDLL(None), "sched_getcpu", None) if hasattr(os, "sched_setaffinity") else None
