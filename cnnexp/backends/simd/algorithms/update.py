"""The optimizer in one pass over the parameters: the very rule of `cnnexp.optimizers`, traced: see `trace`."""

from __future__ import annotations

from llvmlite import ir

from cnnexp.backends.simd.compiler import trace
from cnnexp.backends.simd.compiler.emit import INDEX, Emitter, Pointer
from cnnexp.backends.simd.compiler.trace import Traced
from cnnexp.optimizers import Optimizer


class OptimizerStep:
    """One step of an optimizer on vectors of parameters; (rate, c0, c1) lie at `numbers`."""

    def __init__(self, k: Emitter, optimizer: Optimizer, numbers: Pointer) -> None:
        self._k, self._rule, self._slots = k, optimizer.rule(trace.sqrt, trace.maximum), len(optimizer.slots)
        self._scalars = [Traced(k, k.splat(numbers + i)) for i in range(3)]

    def take(self, places: list[Pointer], gradient: ir.Value) -> None:
        """Change the vectors at `places`, of the parameters and of two slots, by their gradient."""
        k, zero = self._k, Traced(self._k, self._k.zero())
        places = places[: 1 + self._slots]
        w, *state = (Traced(k, k.load(place)) for place in places)
        new_w, *new_state = self._rule(w, Traced(k, gradient), *[*state, zero, zero][:2], *self._scalars)
        for new, place in zip((new_w, *new_state), places, strict=False):
            k.store(new.value, place)


def update(k: Emitter, optimizer: Optimizer) -> None:
    """Apply the rule to `count` parameters, a multiple of the lanes, and clear their gradients.

    Buffers: parameters, gradients, the two slots, and (rate, c0, c1).
    """
    parameters, gradients, *slots, numbers = k.buffers
    step = OptimizerStep(k, optimizer, numbers)
    with k.loop(k.groups(k.lanes)) as i:
        gradient = gradients.at(i, k.lanes)
        step.take([buffer.at(i, k.lanes) for buffer in (parameters, *slots)], k.load(gradient))
        k.store(k.zero(), gradient)


def add(k: Emitter) -> None:
    """Add a thread's gradients, `count` of them, to another's, and clear them. Buffers: the sum, the other, unused."""
    total, other, _ = k.buffers
    with k.loop(k.groups(k.lanes)) as i:
        target, source = total.at(i, k.lanes), other.at(i, k.lanes)
        k.store(k.add(k.load(target), k.load(source)), target)
        k.store(k.zero(), source)


def own_arena(k: Emitter, stride: int) -> Pointer:
    """Return the arena of the thread that runs a kernel on the buffers of an owned weight's update."""
    *_, arenas, table = k.buffers
    return arenas.at(k.builder.load(table.value(INDEX)), stride)
