"""The limit of a CPU's arithmetic: independent fused multiply-adds on vectors in registers; nothing is read or written.

A matrix product is no limit: on Zen 5, NumPy's reaches 43 % of this, and `cpu-simd` more.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic

from cnnexp.backends.simd.compiler.host import host_target

CHAINS = 12
"""Sums at once: two units of four cycles need 8, and AVX2 has 16 registers."""

TURNS, ROUNDS = 4_000_000, 10
"""Turns of the loop in a measurement, some 6 ms, and measurements, of which the best counts.

A limit is what the machine can do, and the core of a second thread may take a millisecond to wake.
"""


@functools.cache
def fma_loop() -> tuple[Callable[[int], float], int, int]:
    """Return (loop(turns), the multiply-adds of one turn, lanes), on vectors as wide as Numba compiles for."""
    lanes = host_target().lanes
    vector, int64 = ir.VectorType(ir.FloatType(), lanes), ir.IntType(64)

    def splat(value: float) -> ir.Constant:
        return ir.Constant(vector, [value] * lanes)

    def build(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{lanes}f32"
        )
        before, turn = builder.block, builder.append_basic_block("turn")
        builder.branch(turn)
        builder.position_at_end(turn)
        done = builder.phi(int64)
        sums = [builder.phi(vector) for _ in range(CHAINS)]
        new_sums = [builder.call(fma, [old, splat(0.999), splat(0.001)]) for old in sums]
        new_done = builder.add(done, int64(1))
        firsts = [int64(0), *(splat(chain) for chain in range(CHAINS))]
        for phi, first, new in zip([done, *sums], firsts, [new_done, *new_sums], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(new, turn)
        after = builder.append_basic_block("after")
        builder.cbranch(builder.icmp_signed("<", new_done, arguments[0]), turn, after)
        builder.position_at_end(after)
        total = functools.reduce(builder.fadd, new_sums)
        return builder.extract_element(total, ir.IntType(32)(0))

    @intrinsic
    def spin(typing_context: Any, turns: Any) -> tuple[types.Type, Callable]:
        return types.float32(types.int64), build

    @njit(nogil=True)
    def loop(turns: int) -> float:
        return spin(turns)

    return loop, lanes * CHAINS, lanes


def fma_gflops(threads: int) -> float:
    """Measure the GFLOP/s, a multiply-add being two, that threads reach together."""
    loop, per_turn, _ = fma_loop()
    loop(1)
    best_s = min(_seconds(loop, threads) for _ in range(ROUNDS))
    return 2e-9 * threads * TURNS * per_turn / best_s


def _seconds(loop: Callable[[int], float], threads: int) -> float:
    others = [threading.Thread(target=loop, args=(TURNS,)) for _ in range(threads - 1)]
    started = time.perf_counter()
    for other in others:
        other.start()
    loop(TURNS)
    for other in others:
        other.join()
    return time.perf_counter() - started
