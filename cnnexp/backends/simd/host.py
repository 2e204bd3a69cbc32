"""What the CPU that Numba compiles for can do."""

from __future__ import annotations

from cnnexp.backends.cache import host
from cnnexp.backends.simd import intrinsics
from cnnexp.backends.simd.emit import Target


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
    if "+avx512f" in features:
        return Target(lanes=16, registers=32, features=known)
    if "+avx" in features:
        return Target(lanes=8, registers=16, features=known)
    # NEON has 32 vector registers, SSE 16
    return Target(lanes=4, registers=32 if triple.startswith(("aarch64", "arm64")) else 16, features=known)
