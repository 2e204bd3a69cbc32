"""The optimizer in one pass over the parameters: the very rule of `cnnexp.optimizers`, traced into vector instructions.

A rule uses `+ - * /`, sqrt and maximum alone, so run once on values that record what is done to them it emits itself,
rounding where NumPy rounds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llvmlite import ir

from cnnexp.backends.simd.emit import Emitter
from cnnexp.optimizers import Optimizer


class Traced:
    """A vector that emits the arithmetic done to it."""

    __array_ufunc__ = None  # so that numpy.float32 * Traced comes to Traced

    def __init__(self, k: Emitter, value: ir.Value) -> None:
        self.k, self.value = k, value

    def apply(self, operation: Callable, *others: Traced | np.float32) -> Traced:
        values = [o.value if isinstance(o, Traced) else self.k.constant(float(o)) for o in others]
        return Traced(self.k, operation(*values))

    def __add__(self, other):
        return self.apply(self.k.builder.fadd, self, other)

    def __sub__(self, other):
        return self.apply(self.k.builder.fsub, self, other)

    def __mul__(self, other):
        return self.apply(self.k.builder.fmul, self, other)

    def __truediv__(self, other):
        return self.apply(self.k.builder.fdiv, self, other)

    def __radd__(self, other):
        return self.apply(self.k.builder.fadd, other, self)

    def __rsub__(self, other):
        return self.apply(self.k.builder.fsub, other, self)

    def __rmul__(self, other):
        return self.apply(self.k.builder.fmul, other, self)

    def __rtruediv__(self, other):
        return self.apply(self.k.builder.fdiv, other, self)

    def __neg__(self):
        return self.apply(self.k.builder.fneg, self)


def _sqrt(x: Traced) -> Traced:
    return x.apply(x.k.sqrt, x)


def _maximum(a: Traced, b: Traced) -> Traced:
    return a.apply(lambda x, y: a.k.select(a.k.larger(x, y), x, y), a, b)


def update(k: Emitter, optimizer: Optimizer) -> None:
    """Apply the rule to `count` parameters, a multiple of the lanes, and clear their gradients.

    Buffers: parameters, gradients, the two slots, and (rate, c0, c1).
    """
    parameters, gradients, first_slot, second_slot, numbers = k.buffers
    rule = optimizer.rule(_sqrt, _maximum)
    scalars = [Traced(k, k.splat(numbers + i)) for i in range(3)]
    slots = [first_slot, second_slot][: len(optimizer.slots)]
    zero = Traced(k, k.zero())
    with k.loop(k.groups(k.lanes)) as i:
        places = [buffer.at(i, k.lanes) for buffer in (parameters, gradients, *slots)]
        w, g, *state = (Traced(k, k.load(place)) for place in places)
        new_w, *new_state = rule(w, g, *[*state, zero, zero][:2], *scalars)
        for new, place in zip((new_w, zero, *new_state), places, strict=False):
            k.store(new.value, place)


def add(k: Emitter) -> None:
    """Add a thread's gradients, `count` of them, to another's, and clear them. Buffers: the sum, the other, unused."""
    total, other, _ = k.buffers
    with k.loop(k.groups(k.lanes)) as i:
        target, source = total.at(i, k.lanes), other.at(i, k.lanes)
        k.store(k.add(k.load(target), k.load(source)), target)
        k.store(k.zero(), source)
