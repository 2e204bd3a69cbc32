"""What the CPU that Numba compiles for can do."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path

from cnnexp.backends.cache import host
from cnnexp.backends.simd import intrinsics
from cnnexp.backends.simd.emit import Target

USUAL_CACHE = 1 << 20


def host_target() -> Target:
    """Return what kernels for this CPU are shaped for."""
    triple, _, listed = host()
    return target_of(triple, listed)


def target_of(triple: str, listed: str) -> Target:
    """Return the widest vectors of a CPU and how many registers hold them; any CPU has 4 lanes for all that LLVM cares.

    Args:
        triple, listed: see `host`.
    """
    features, known = set(listed.split(",")), intrinsics.known_features(triple, listed)
    cache = second_cache()
    if "+avx512f" in features:
        return Target(16, 32, known, cache)
    if "+avx" in features:
        return Target(8, 16, known, cache)
    # NEON has 32 vector registers, SSE 16
    return Target(4, 32 if triple.startswith(("aarch64", "arm64")) else 16, known, cache)


@functools.cache
def second_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Return the bytes of the second cache as Linux or the C library tells, else as most cores have today."""
    for index in sorted(folder.glob("index*")):
        with contextlib.suppress(OSError, ValueError):
            if (index / "level").read_text().strip() == "2":
                size = (index / "size").read_text().strip()
                return int(size.rstrip("KM")) << {"K": 10, "M": 20}.get(size[-1], 0)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_LEVEL2_CACHE_SIZE") or USUAL_CACHE
    return USUAL_CACHE
