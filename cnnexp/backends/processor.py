"""What the CPU is and how many of its cores may be used."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

from cnnexp.errors import ConfigError


def usable_cores() -> int:
    """Return the cores this process may run on: fewer than the machine has, in a container or under taskset."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resolve_threads(threads: int | None) -> int:
    """Return `threads`, or every usable core for None; ConfigError outside 1..cores."""
    cores = usable_cores()
    if threads is None:
        return cores
    if not 1 <= threads <= cores:
        raise ConfigError(f"backend.threads={threads}: must be 1 to {cores}, the cores this process may use, or null")
    return threads


@functools.cache
def cpu_name() -> str:
    """Return the CPU's model name, or its architecture where the system does not tell."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
