"""The optimizer in one pass over the parameters: the very rule of `cnnexp.optimizers`, traced: see `trace`."""

from __future__ import annotations

from cnnexp.backends.simd import trace
from cnnexp.backends.simd.emit import Emitter
from cnnexp.backends.simd.trace import Traced
from cnnexp.optimizers import Optimizer


def update(k: Emitter, optimizer: Optimizer) -> None:
    """Apply the rule to `count` parameters, a multiple of the lanes, and clear their gradients.

    Buffers: parameters, gradients, the two slots, and (rate, c0, c1).
    """
    parameters, gradients, first_slot, second_slot, numbers = k.buffers
    rule = optimizer.rule(trace.sqrt, trace.maximum)
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
