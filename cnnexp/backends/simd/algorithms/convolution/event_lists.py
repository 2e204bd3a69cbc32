"""Lists of the events of a max-pool: the cells whose gradient is not zero, and where each one's maximum saw the input.

Every image has its own, so they are found with the batch in the lanes and turned to rows, image by image.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from cnnexp.backends.simd.algorithms.convolution.base import Windows
from cnnexp.backends.simd.compiler.emit import INDEX, Emitter, Pointer, Variable
from cnnexp.backends.simd.layouts import Arena, Blocked, round_up


@dataclass(frozen=True)
class EventLists:
    """The events of one group of images, by image and filter, and what they are found from.

    Attributes:
        y, dy: pooled output and its gradient, without a halo. windows: the max-pool.
        rectify: whether a ReLU was applied that dy does not know of.
        down, right: floats between the patches of neighbouring rows and columns, before the pool.
        values, places: room, [image][filter][cells, rounded up]: the events' gradients and the places of their patches.
        counts: room, [filter][image], 64 bits: how many events.
        cells: room, two integers per cell: where it lies in the pooled output, and the place of its first patch.
    """

    y: Blocked
    dy: Blocked
    windows: Windows[Blocked]
    rectify: bool
    down: int
    right: int
    values: int
    places: int
    counts: int
    cells: int

    @property
    def filters(self) -> int:
        return self.y.shape[2]

    @property
    def count(self) -> int:
        """How many cells there are."""
        return self.y.shape[0] * self.y.shape[1]

    @contextmanager
    def each(self, k: Emitter, n: ir.Value, f: ir.Value) -> Iterator[tuple[ir.Value, ir.Value]]:
        """Run the block for every event of image n and filter f: its gradient, and the place of its patch."""
        room = round_up(self.count, k.lanes)
        start = k.builder.add(k.builder.mul(n, INDEX(self.filters)), f)
        count = k.builder.load((k.arena + self.counts).at(f, 2 * k.lanes).at(n, 2).value(INDEX), align=4)
        values, places = ((k.arena + at).at(start, room) for at in (self.values, self.places))
        with k.loop(count) as event:
            yield k.load_float(values.at(event)), k.builder.sext(k.load_int(places.at(event)), INDEX)


def make_lists(
    arena: Arena, y: Blocked, dy: Blocked, windows: Windows[Blocked], rectify: bool, down: int, right: int, reach: int
) -> EventLists:
    """Return lists with room; see `EventLists`.

    Args:
        reach: cells apart from which on patches have no pixel in common.
    """
    lanes, (rows, columns, filters) = arena.lanes, y.shape
    room = lanes * filters * round_up(rows * columns, lanes)
    u, v = _spread_out(rows, columns, reach)
    step = windows.stride
    table = np.stack([(u * columns + v) * filters, u * step * down + v * step * right], axis=1)
    return EventLists(
        y, dy, windows, rectify, down, right,
        values=arena.allocate(room),
        places=arena.allocate(room),
        counts=arena.allocate(2 * lanes * filters),
        cells=arena.constants(table.astype(np.int32).view(np.float32)),
    )  # fmt: skip


def _spread_out(rows: int, columns: int, reach: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the cells, column by column, in an order in which neighbours in time are no neighbours in space.

    A load that overlaps a store still on its way waits for it; rows `reach` apart share no pixel.
    """
    u = [row for start in range(min(reach, rows)) for row in range(start, rows, reach)]
    return np.tile(u, columns), np.repeat(np.arange(columns), rows)


def list_events(k: Emitter, lists: EventLists, g: ir.Value, db: Pointer | None) -> None:
    """Fill the lists of a group: blocks of cells, turned from lanes to rows and compressed. Add up db."""
    room = round_up(lists.count, k.lanes)
    values, places, counts = (k.arena + at for at in (lists.values, lists.places, lists.counts))
    table = k.arena + lists.cells
    with k.loop(lists.filters) as f:
        total = k.variable()
        counters = counts.at(f, 2 * k.lanes)
        for half in range(2):
            k.store(k.zero(), counters + half * k.lanes)

        def block(
            first: ir.Value, valid: int, f: ir.Value = f, total: Variable = total, counters: Pointer = counters
        ) -> None:
            gradients, patches = [], []
            for i in range(k.lanes):
                if i >= valid:
                    gradients.append(k.zero())
                    patches.append(k.zero())
                    continue
                gradient, patch = _cell(k, lists, g, f, table.at(first, 2) + 2 * i)
                total.set(k.add(total.get(), gradient))
                gradients.append(gradient)
                patches.append(k.as_floats(patch))
            rows = zip(k.transpose(gradients), k.transpose(patches), strict=True)
            for n, (gradient, patch) in enumerate(rows):
                alive = k.builder.fcmp_unordered("!=", gradient, k.zero())
                counter = (counters + 2 * n).value(INDEX)
                first_event = n * lists.filters * room
                found = [(gradient, (values + first_event).at(f, room)), (patch, (places + first_event).at(f, room))]
                count = k.append(alive, k.builder.load(counter, align=4), found)
                k.builder.store(count, counter, align=4)

        with k.loop(lists.count // k.lanes) as b:
            block(k.builder.mul(b, INDEX(k.lanes)), k.lanes)
        if lists.count % k.lanes:
            block(INDEX(lists.count // k.lanes * k.lanes), lists.count % k.lanes)
        if db is not None:
            k.add_to(db.at(f), k.sum_lanes(total.get()))


def _cell(k: Emitter, lists: EventLists, g: ir.Value, f: ir.Value, entry: Pointer) -> tuple[ir.Value, ir.Value]:
    """Return a cell's gradient, 0 where ReLU gave 0, and the place of the patch that each image's maximum saw."""
    where, first = (k.builder.sext(k.load_int(entry + i), INDEX) for i in range(2))
    argmax = lists.windows.argmax
    value = k.load(lists.dy.image(k, g).at(where, k.lanes).at(f, k.lanes))
    if lists.rectify:
        value = k.where_positive(k.load(lists.y.image(k, g).at(where, k.lanes).at(f, k.lanes)), value)
    code = k.load_bytes(argmax.image(k, g).at(where, argmax.lanes).at(f, argmax.lanes))
    shift = lists.windows.shift(k, code, lists.down, lists.right)
    return value, k.builder.add(shift, k.spread(k.builder.trunc(first, ir.IntType(32))))
