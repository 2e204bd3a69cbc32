"""The CPU, which of its cores this process may use, and on which of them the threads of a pool begin their work."""

import contextlib
import ctypes
import functools
import os
import platform
import threading
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
    """Has the threads of a pool begin each task on a core of their own.

    Linux may begin a woken thread on the core of the one that wakes it; there it waits for milliseconds while another
    core is idle. So whoever wakes a thread says first where it may begin: not where those of a lower rank are. Once it
    has begun it is not bound: the system may move it, so a core that other work needs is given up.
    """

    def __init__(self) -> None:
        self._taken: dict[int, int] = {}
        self._usable: set[int] = set()

    def place(self, rank: int, thread: threading.Thread) -> None:
        """Have a thread that the calling one, of rank 0, is about to wake begin on none of the lower ranks' cores."""
        if rank == 1:
            core = current_core()
            self._usable = set() if core is None else os.sched_getaffinity(0)
            self._taken[0] = core or 0
        if free := self._usable - {self._taken[other] for other in range(rank) if other in self._taken}:
            _bind(thread.native_id or 0, free)

    def take(self, rank: int) -> None:
        """Note the core of the calling thread, of a rank above 0, and let it go wherever it may."""
        if self._usable:
            self._taken[rank] = current_core() or 0
            _bind(0, self._usable)


def _bind(thread: int, cores: set[int]) -> None:
    with contextlib.suppress(OSError):  # a sandbox forbids it
        os.sched_setaffinity(thread, cores)


def current_core() -> int | None:
    """Return the core that the calling thread runs on, None where the system does not say."""
    core = _getcpu() if _getcpu is not None else -1
    return core if core >= 0 else None


_getcpu = getattr(ctypes.PyDLL(None), "sched_getcpu", None) if hasattr(os, "sched_setaffinity") else None
