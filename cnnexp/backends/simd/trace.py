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


class Traced:
    """A vector that emits the arithmetic done to it."""

    __array_ufunc__ = None  # so that numpy.float32 * Traced comes to Traced

    def __init__(self, k: Emitter, value: ir.Value) -> None:
        self.k, self.value = k, value

    def apply(self, operation: Callable, *others: Operand) -> Traced:
        values = [o.value if isinstance(o, Traced) else self.k.constant(float(o)) for o in others]
        return Traced(self.k, operation(*values))

    def __add__(self, other: Operand) -> Traced:
        return self.apply(self.k.builder.fadd, self, other)

    def __sub__(self, other: Operand) -> Traced:
        return self.apply(self.k.builder.fsub, self, other)

    def __mul__(self, other: Operand) -> Traced:
        return self.apply(self.k.builder.fmul, self, other)

    def __truediv__(self, other: Operand) -> Traced:
        return self.apply(self.k.builder.fdiv, self, other)

    def __radd__(self, other: Operand) -> Traced:
        return self.apply(self.k.builder.fadd, other, self)

    def __rsub__(self, other: Operand) -> Traced:
        return self.apply(self.k.builder.fsub, other, self)

    def __rmul__(self, other: Operand) -> Traced:
        return self.apply(self.k.builder.fmul, other, self)

    def __rtruediv__(self, other: Operand) -> Traced:
        return self.apply(self.k.builder.fdiv, other, self)

    def __neg__(self) -> Traced:
        return self.apply(self.k.builder.fneg, self)

    def __lt__(self, other: Operand) -> Traced:
        return self.apply(partial(self.k.builder.fcmp_ordered, "<"), self, other)

    def __le__(self, other: Operand) -> Traced:
        return self.apply(partial(self.k.builder.fcmp_ordered, "<="), self, other)

    def __gt__(self, other: Operand) -> Traced:
        return self.apply(partial(self.k.builder.fcmp_ordered, ">"), self, other)

    def __ge__(self, other: Operand) -> Traced:
        return self.apply(partial(self.k.builder.fcmp_ordered, ">="), self, other)


Operand = Traced | np.float32


def sqrt(x: Traced) -> Traced:
    return x.apply(x.k.sqrt, x)


def maximum(a: Traced, b: Operand) -> Traced:
    """b where a < b, else a."""
    return a.apply(lambda x, y: a.k.select(a.k.builder.fcmp_ordered("<", x, y), y, x), a, b)


def _exp(x: Traced) -> Traced:
    return x.apply(partial(elementwise.exp, x.k), x)


def _where(condition: Traced, a: Operand, b: Operand) -> Traced:
    return condition.apply(condition.k.select, condition, a, b)


MATHS = Maths(_exp, rational_tanh(maximum), rational_erf(maximum), maximum, _where)


def emitted(rule: Callable) -> Callable[..., ir.Value]:
    """Return a rule on vectors of floats, `(k, *values) -> value`."""

    def emit(k: Emitter, *values: ir.Value) -> ir.Value:
        result = rule(*(Traced(k, value) for value in values))
        return result.value if isinstance(result, Traced) else k.constant(float(result))

    return emit
