"""Memory is counted before it is taken: what is needed, part by part, against what this process can still have."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from cnnexp.errors import OutOfMemory

try:
    import resource
except ImportError:  # not a POSIX system
    resource = None  # type: ignore[assignment]

UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB", "EB")
CGROUPS = Path("/sys/fs/cgroup")


class Part(NamedTuple):
    """Something that takes memory."""

    what: str  # for a message, e.g. `the activations of a batch`
    bytes: int  # at least so many
    key: str  # of the config, whose lower value makes it smaller


def need(parts: Iterable[Part]) -> None:
    """Raise OutOfMemory unless this process can have the memory that all parts take together."""
    parts = list(parts)
    wanted, (there, limit) = sum(part.bytes for part in parts), available()
    if wanted > there:
        largest = max(parts, key=lambda part: part.bytes)
        needs = f"needs {wanted} bytes ({show(wanted)}) of memory, {show(largest.bytes)} of them for {largest.what}"
        raise OutOfMemory(f"{needs}; {show(there)} can be had ({limit}); lower {largest.key}")


def available() -> tuple[float, str]:
    """Return how many bytes this process can still take, and what limits them; infinite where that is unknown."""
    return min(_limits(), default=(math.inf, "no limit is known"))


def show(count: float) -> str:
    """Return e.g. `1.5 GB`."""
    unit = min(len(UNITS) - 1, max(0, (len(str(int(count))) - 1) // 3)) if math.isfinite(count) else 0
    return f"{int(count) / 1000**unit:.3g} {UNITS[unit]}"


def _limits() -> Iterator[tuple[float, str]]:
    with contextlib.suppress(OSError, KeyError, ValueError):
        yield _kilobytes(Path("/proc/meminfo"))["MemAvailable"], "MemAvailable of this machine"
    yield from _cgroups()
    if resource is not None:
        with contextlib.suppress(OSError, KeyError, ValueError):
            now = _kilobytes(Path("/proc/self/status"))
            for name, key, taken in (("RLIMIT_AS", "-v", "VmSize"), ("RLIMIT_DATA", "-d", "VmData")):
                most, _ = resource.getrlimit(getattr(resource, name))
                if most != resource.RLIM_INFINITY:
                    yield max(0, most - now[taken]), f"ulimit {key}"


def _cgroups() -> Iterator[tuple[float, str]]:
    """Yield what the control groups of this process leave, version 2 or 1, up to the root."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, place = line.split(":", 2)
            if kinds == "" or "memory" in kinds.split(","):
                root = CGROUPS / "memory" if kinds else CGROUPS
                folder = root / place.lstrip("/")
                for group in (folder, *folder.parents):
                    if group.is_relative_to(root):
                        yield from _cgroup(group)


def _cgroup(folder: Path) -> Iterator[tuple[float, str]]:
    for most, taken, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / most).read_text())  # ValueError where it is "max"
            if limit < 1 << 60:  # version 1 writes a number near 2**63 for none
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                used = int((folder / taken).read_text()) - int(stat.get(cache, 0))
                yield max(0, limit - used), f"the limit of control group {folder}"


def _kilobytes(path: Path) -> dict[str, int]:
    """Return the lines `Name:  123 kB` of a file of /proc, in bytes."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3 and words[2] == "kB"}
