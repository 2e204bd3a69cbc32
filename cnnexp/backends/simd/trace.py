"""Rules on scalars, traced into vector instructions: an optimizer's, an elementwise layer's.

A rule uses `+ - * /`, comparisons and a few functions alone, so run once on values that record what is done to them it
emits itself, rounding where NumPy rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from llvmlite import ir

from cnnexp.backends.simd import elementwise
from cnnexp.backends.simd.emit import Emitter
from cnnexp.network import Maths
from cnnexp.network.elementwise import rational_erf, rational_tanh
from cnnexp.network.recorded import Recorded


class Traced(Recorded):
    """A vector that emits the arithmetic done to it."""

    def __init__(self, k: Emitter, value: ir.Value) -> None:
        self.k, self.value = k, value

    def apply(self, operation: str, *values: Operand) -> Traced:
        builder = self.k.builder
        emit = getattr(builder, f"f{operation}") if operation.isalpha() else partial(builder.fcmp_ordered, operation)
        return self.call(emit, *values)

    def call(self, emit: Callable, *values: Operand) -> Traced:
        """Return what an emitting function makes of values and numbers."""
        return Traced(self.k, emit(*(v.value if isinstance(v, Traced) else self.k.constant(float(v)) for v in values)))


Operand = Traced | np.float32


def sqrt(x: Traced) -> Traced:
    return x.call(x.k.sqrt, x)


def maximum(a: Traced, b: Operand) -> Traced:
    """b where a < b, else a."""
    return a.call(lambda x, y: a.k.select(a.k.builder.fcmp_ordered("<", x, y), y, x), a, b)


def _exp(x: Traced) -> Traced:
    return x.call(partial(elementwise.exp, x.k), x)


def _where(condition: Traced, a: Operand, b: Operand) -> Traced:
    return condition.call(condition.k.select, condition, a, b)


MATHS = Maths(_exp, rational_tanh(maximum), rational_erf(maximum), maximum, _where)


def emitted(rule: Callable) -> Callable[..., ir.Value]:
    """Return a rule on vectors of floats, `(k, *values) -> value`."""

    def emit(k: Emitter, *values: ir.Value) -> ir.Value:
        result = rule(*(Traced(k, value) for value in values))
        return result.value if isinstance(result, Traced) else k.constant(float(result))

    return emit
