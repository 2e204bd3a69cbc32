"""What the CPU that Numba compiles for can do."""

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
    features = listed.split(",")
    lanes = 16 if "+avx512f" in features else 8 if "+avx" in features else 4
    registers = 32 if lanes == 16 or triple.startswith(("aarch64", "arm64")) else 16  # AVX-512 and NEON have 32
    return Target(lanes, registers, intrinsics.known_features(triple, listed), cache_bytes(2), cache_bytes(1))


@functools.cache
def cache_bytes(level: int, folder: Path = CACHES) -> int:
    """Return the bytes of a core's L1 or L2 data cache as Linux or the C library states, else a usual size."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return cache_sizes(folder).get(level) or os.sysconf(ASKED[level]) or USUAL[level]
    return USUAL[level]
