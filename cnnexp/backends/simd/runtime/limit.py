"""The limit of a CPU's arithmetic: independent fused multiply-adds on vectors in registers; nothing is read or written.

A matrix product is no limit: on Zen 5, NumPy's reaches 47 % of this, and `cpu-simd` more.
"""

import functools
import timeit
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit

from cnnexp.backends.simd.compiler.compose import compose
from cnnexp.backends.simd.compiler.emit import Emitter
from cnnexp.backends.simd.compiler.host import host_target

CHAINS = 12
"""Sums at once: two units of four cycles need 8, and AVX2 has 16 registers."""

TURNS, ROUNDS = 4_000_000, 10
"""Turns of the loop in a measurement, some 6 ms, and measurements, of which the best counts. A limit is what the
machine can do, and the core of a second thread may take a millisecond to wake."""


@functools.cache
def fma_loop() -> tuple[Callable[[int], float], int, int]:
    """Return (loop(turns), the multiply-adds of one turn, lanes), on vectors as wide as Numba compiles for."""
    lanes = (target := host_target()).lanes

    def emit(k: Emitter) -> None:
        # from what LLVM cannot know: it leaves out a sum that begins at 1, as that one never changes
        chains = [k.variable(k.add(k.load(k.arena), k.constant(chain))) for chain in range(CHAINS)]
        with k.loop(k.count):
            for total in chains:
                total.set(k.fma(total.get(), k.constant(0.999), k.constant(0.001)))
        k.store(functools.reduce(k.add, [total.get() for total in chains]), k.arena)

    run = compose("fma", target, [("fma", emit)])

    @njit(nogil=True)
    def loop(turns: int) -> float:
        total = np.zeros(lanes, np.float32)
        run(total, total, total, turns)
        return total[0]

    return loop, lanes * CHAINS, lanes


def fma_gflops(threads: int) -> float:
    """Measure the GFLOP/s, a multiply-add being two, that threads reach together."""
    loop, per_turn, _ = fma_loop()
    loop(1)
    with ThreadPoolExecutor(threads) as pool:
        best_s = min(timeit.repeat(lambda: list(pool.map(loop, [TURNS] * threads)), number=1, repeat=ROUNDS))
    return 2e-9 * threads * TURNS * per_turn / best_s
