"""The optimizer in one pass over the parameters: the very rule of `cnnexp.optimizers`, traced: see `trace`."""

import itertools
from collections.abc import Callable, Iterator

from llvmlite import ir

from cnnexp.backends.simd.algorithms.linear.product import Listed, Panels, Places, most_height, rows_of
from cnnexp.backends.simd.compiler import trace
from cnnexp.backends.simd.compiler.emit import INDEX, LINE_FLOATS, Emitter, Pointer, chunks
from cnnexp.backends.simd.compiler.trace import Traced
from cnnexp.backends.simd.layouts import Layout
from cnnexp.network import Parameter
from cnnexp.optimizers import Optimizer

MANY_IMAGES = 64
"""Of a share, from which on an update prefetches the slots: wide MLP takes 0.94 of the time at 128, 1.09 at 16."""

Rows = tuple[ir.Value, ir.Value, Places]
"""Rows of weights: which run of them, a row of it, and how far behind it they are."""

Runs = tuple[Panels, int, int, Listed | None]
"""How weights lie in panels: so many runs of so many rows, all of which have products, or those of a list."""


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


def update_owned(k: Emitter, plan: Layout, optimizer: Optimizer, weight: Parameter, runs: Runs, add: Callable) -> None:
    """Take the optimizer's step of this thread's share of weights with x.T @ dy over all threads' images.

    The gradient is never stored. One sum goes over all threads' images: a sum for each would end in the very bits
    that workers end in, and take a fifth more time at 8 images a thread. Buffers: parameters, two slots,
    (rate, c0, c1), all threads' arenas, and int64 (2 + threads,): this thread's rank, the number of threads, and
    the images in each one's arena. add(k, sums, panel, rows) adds the products of an arena's images to the sums of
    `Rows`, if they have any.
    """
    (panels, number, size, listed), offset = runs, plan.parameters.offset(weight)
    *state, numbers, _, table = k.buffers
    rank, threads = (k.builder.load((table + i).value(INDEX)) for i in range(2))
    step, ranks = OptimizerStep(k, optimizer, numbers), (rank, k.builder.add(rank, INDEX(1)))
    for panel in panels.each(k):
        unit = panel.unit
        for first, height, times in chunks(size, most_height(panel.width, k.target.registers)):
            parts = [(INDEX(0), INDEX(times), True)]
            if listed:
                end = listed.chunks(k, first, height, times)
                parts = [(INDEX(0), end, True), (end, INDEX(times), False)]
            for start, stop, has_products in parts:
                own = [k.builder.udiv(k.builder.mul(k.builder.sub(stop, start), r), threads) for r in ranks]
                low, high = (k.builder.add(start, part) for part in own)
                with k.loop(number) as run, k.loop(high, start=low) as t:
                    row, rows = rows_of(k, k.scaled(t, height, first), height, listed)
                    states = [panel.at(buffer + offset).at(run, size * unit).at(row, unit) for buffer in state]
                    places = [[place.at(r, unit) for r in rows] for place in states]
                    # the other threads' cores have weights, too; the slots' memory answers while products take longer
                    brought = places[: 1 + len(optimizer.slots)] if plan.share >= MANY_IMAGES else places[:1]
                    for place, line in itertools.product(itertools.chain(*brought), range(0, unit, LINE_FLOATS)):
                        k.prefetch(place + line, written=True)
                    totals = [k.variables(panel.width) for _ in range(height)]
                    for _ in each_arena(k, plan.arena.stride) if has_products else ():
                        add(k, totals, panel, (run, row, rows))
                    for i, sums in enumerate(totals):
                        for v, total in enumerate(sums):
                            step.take([place[i] + v * k.lanes for place in places], total.get())


def each_arena(k: Emitter, stride: int) -> Iterator[None]:
    """Run what follows for every thread's arena and images, on the buffers of an owned weight's update."""
    *_, arenas, table = k.buffers
    with k.loop(k.builder.load((table + 1).value(INDEX))) as other:
        k.arena = arenas.at(other, stride)
        k.count = k.builder.load((table + 2).at(other).value(INDEX))
        yield


def own_arena(k: Emitter, stride: int) -> Pointer:
    """Return the arena of the thread that runs a kernel on the buffers of an owned weight's update."""
    *_, arenas, table = k.buffers
    return arenas.at(k.builder.load(table.value(INDEX)), stride)
