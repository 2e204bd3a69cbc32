"""What the CPU that Numba compiles for can do."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path

from cnnexp.backends.cache import host
from cnnexp.backends.simd.compiler import intrinsics
from cnnexp.backends.simd.compiler.emit import Target
from cnnexp.system.cores import CACHES, cache_sizes

USUAL = {1: 32 << 10, 2: 1 << 20}
ASKED = {1: "SC_LEVEL1_DCACHE_SIZE", 2: "SC_LEVEL2_CACHE_SIZE"}
"""By level."""


def host_target() -> Target:
    """Return what kernels for this CPU are shaped for."""
    triple, _, listed = host()
    return target_of(triple, listed)


def target_of(triple: str, listed: str) -> Target:
    """Return the widest vectors of a CPU, see `host`, and the registers that hold them; LLVM takes 4 lanes on any."""
    features, known = set(listed.split(",")), intrinsics.known_features(triple, listed)
    caches = cache_bytes(2), cache_bytes(1)
    if "+avx512f" in features:
        return Target(16, 32, known, *caches)
    if "+avx" in features:
        return Target(8, 16, known, *caches)
    # NEON has 32 vector registers, SSE 16
    return Target(4, 32 if triple.startswith(("aarch64", "arm64")) else 16, known, *caches)


@functools.cache
def cache_bytes(level: int, folder: Path = CACHES) -> int:
    """Return the bytes of a core's L1 or L2 data cache as Linux or the C library states, else a usual size."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return cache_sizes(folder).get(level) or os.sysconf(ASKED[level]) or USUAL[level]
    return USUAL[level]
