"""What the CPU that Numba compiles for can do."""

from __future__ import annotations

from numba.core.registry import cpu_target

from cnnexp.backends.cpu_simd.emit import Target


def host() -> tuple[str, str, str]:
    """Return what Numba compiles for: (target triple, CPU name, features as `+avx2,-sse4a,...`)."""
    return cpu_target.target_context.codegen().magic_tuple()


def host_target() -> Target:
    """Return the widest vectors of this CPU and how many registers hold them."""
    triple, _, listed = host()
    features = set(listed.split(","))
    if "+avx512f" in features:
        return Target(lanes=16, registers=32, permutes=True)
    if "+avx" in features:
        return Target(lanes=8, registers=16)
    # NEON has 32 vector registers, SSE 16
    return Target(lanes=4, registers=32 if triple.startswith(("aarch64", "arm64")) else 16)
