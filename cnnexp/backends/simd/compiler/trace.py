"""Rules on scalars, traced into vector instructions: an optimizer's, an elementwise layer's.

A rule uses `+ - * /`, comparisons and a few functions alone, so run once on values that record what is done to them it
emits itself: an optimizer's rounding where NumPy rounds, a layer's with a product and a sum in one instruction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
from llvmlite import ir

from cnnexp.backends.simd.compiler.emit import Emitter
from cnnexp.network import Maths
from cnnexp.network.elementwise import rational_erf, rational_tanh
from cnnexp.network.recorded import Recorded


class Traced(Recorded):
    """A vector that emits the arithmetic done to it."""

    flags: tuple[str, ...] = ()

    def __init__(self, k: Emitter, value: ir.Value) -> None:
        self.k, self.value = k, value

    def apply(self, operation: str, *values: Operand) -> Traced:
        builder = self.k.builder
        if not operation.isalpha():
            return self.call(partial(builder.fcmp_ordered, operation), *values)
        return self.call(partial(getattr(builder, f"f{operation}"), flags=self.flags), *values)

    def call(self, emit: Callable, *values: Operand) -> Traced:
        """Return what an emitting function makes of values and numbers."""
        given = (v.value if isinstance(v, Traced) else self.k.constant(float(v)) for v in values)
        return type(self)(self.k, emit(*given))


class Contracted(Traced):
    """A vector whose products and sums may be fused: rounded once."""

    flags = ("contract",)


Operand = Traced | np.float32

MAGIC = 1.5 * 2**23


def exp(k: Emitter, x: ir.Value) -> ir.Value:
    """e**x, relative error below 1e-7 where the result is no denormal; infinity where it is too large; a NaN stays one.

    x = n log 2 + r: n by rounding (adding 1.5 * 2**23 leaves n in the low bits), log 2 in two parts (Cody and Waite
    1980), e**r by Taylor's polynomial of degree 7 for |r| <= 0.35, 2**n in two factors, as it may be a denormal, each
    by writing its exponent. e**-104 is 0, e**89 infinity.
    """
    # within what a float holds
    x = k.select(k.builder.fcmp_ordered("<", x, k.constant(-104)), k.constant(-104), x)
    x = k.select(k.builder.fcmp_ordered(">", x, k.constant(89)), k.constant(89), x)
    # n and r
    magic = k.constant(MAGIC)
    rounded = k.fma(x, k.constant(float(np.float32(1 / math.log(2)))), magic)
    n = k.builder.fsub(rounded, magic)
    high = 0.693359375
    low = float(np.float32(math.log(2) - high))
    r = k.fma(n, k.constant(-low), k.fma(n, k.constant(-high), x))
    # e**r
    total = k.constant(float(np.float32(1 / math.factorial(7))))
    for degree in range(6, -1, -1):
        total = k.fma(total, r, k.constant(float(np.float32(1 / math.factorial(degree)))))
    # times 2**n
    exponent = k.builder.sub(k.builder.bitcast(rounded, k.indices), k.integers(int(np.float32(MAGIC).view(np.int32))))
    half = k.builder.ashr(exponent, k.integers(1))
    for part in (half, k.builder.sub(exponent, half)):
        bits = k.builder.shl(k.builder.add(part, k.integers(127)), k.integers(23))
        total = k.multiply(total, k.builder.bitcast(bits, k.vector))
    return total


def sqrt(x: Traced) -> Traced:
    return x.call(x.k.sqrt, x)


def maximum(a: Traced, b: Operand) -> Traced:
    """b where a < b, else a."""
    return a.call(lambda x, y: a.k.select(a.k.builder.fcmp_ordered("<", x, y), y, x), a, b)


def _exp(x: Traced) -> Traced:
    return x.call(partial(exp, x.k), x)


def _where(condition: Traced, a: Operand, b: Operand) -> Traced:
    return condition.call(condition.k.select, condition, a, b)


MATHS = Maths(_exp, rational_tanh(maximum), rational_erf(maximum), maximum, _where)


def emitted(rule: Callable) -> Callable[..., ir.Value]:
    """Return a layer's rule on vectors of floats, `(k, *values) -> value`."""

    def emit(k: Emitter, *values: ir.Value) -> ir.Value:
        result = rule(*(Contracted(k, value) for value in values))
        return result.value if isinstance(result, Traced) else k.constant(float(result))

    return emit
