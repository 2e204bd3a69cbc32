"""What algorithms share whose gradients follow the argmax of a max-pool: a quarter of the multiply-adds or less.

Of a window's outputs only the largest has a gradient. An *event* is a cell of the pooled output whose gradient g is not
zero; behind a ReLU only part of them are. With channels last, the patch that its maximum saw is K runs of K * C floats,
and so are the weights of its filter. There dw += g * x and dx += g * w: per vector of the patch one load, one load and
store, and two multiply-adds. Every image has its own argmax, so images share no vectors here; the patch lies in them.

Events are listed by filter, so that the loop over them meets no branch, and weights and their gradients stay in
registers while the events of a filter go by. Neighbours in a list are no neighbours in space: a load that overlaps a
store still on its way waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from cnnexp.backends.simd.algorithms.convolution.base import Windows
from cnnexp.backends.simd.compiler.emit import INDEX, Emitter, Pointer
from cnnexp.backends.simd.layouts import Arena, Blocked, round_up


@dataclass(frozen=True)
class EventList:
    """The events of a filter at run time.

    Attributes:
        count: how many, 64 bits. values: their gradients. places: where their patches begin, 32-bit integers.
    """

    count: ir.Value
    values: Pointer
    places: Pointer

    @contextmanager
    def each(self, k: Emitter) -> Iterator[tuple[ir.Value, ir.Value]]:
        """Run the block for every event: its gradient, and the place of its patch."""
        with k.loop(self.count) as event:
            yield k.load_float(self.values.at(event)), k.builder.sext(k.load_int(self.places.at(event)), INDEX)

    def follow(
        self,
        k: Emitter,
        parts: list[tuple[int, int]],
        operands: tuple[Pointer, Pointer],
        weights: list[Pointer],
        gradients: list[Pointer],
    ) -> None:
        """Add every event's part to dx and to the gradient of the weights.

        Args:
            parts: of a patch that are followed at once, (where it begins, its floats), a vector each.
            operands: x and dx. weights, gradients: of each part.
        """
        widths = [width for _, width in parts]
        loaded = [k.load(weight, width) for weight, width in zip(weights, widths, strict=True)]
        totals = [k.variable(k.load(gradient, width)) for gradient, width in zip(gradients, widths, strict=True)]
        with self.each(k) as (value, patch):
            x, dx = (operand.at(patch) for operand in operands)
            factors = {width: k.spread(value, width) for width in dict.fromkeys(widths)}
            for weight, total, (at, width) in zip(loaded, totals, parts, strict=True):
                k.accumulate(total, factors[width], k.load(x + at, width))
                k.store(k.fma(factors[width], weight, k.load(dx + at, width)), dx + at)
        for total, gradient in zip(totals, gradients, strict=True):
            k.store(total.get(), gradient)


def alive(
    k: Emitter, gradients: list[ir.Value], patches: list[ir.Value]
) -> Iterator[tuple[ir.Value, ir.Value, ir.Value]]:
    """Transpose blocks of cells, and yield for each row (mask of its events, gradients, places of their patches)."""
    for gradient, patch in zip(k.transpose(gradients), k.transpose(patches), strict=True):
        yield k.builder.fcmp_unordered("!=", gradient, k.zero()), gradient, patch


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
    windows: Windows
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

    def of(self, k: Emitter, n: ir.Value, f: ir.Value) -> EventList:
        """Return the events of image n and filter f."""
        room = round_up(self.count, k.lanes)
        start = k.builder.add(k.builder.mul(n, INDEX(self.filters)), f)
        count = k.builder.load((k.arena + self.counts).at(f, 2 * k.lanes).at(n, 2).value(INDEX), align=4)
        return EventList(count, *((k.arena + at).at(start, room) for at in (self.values, self.places)))


def make_lists(
    arena: Arena, y: Blocked, dy: Blocked, windows: Windows, rectify: bool, down: int, right: int, reach: int
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
    """Return the cells, column by column, in an order in which neighbours are no neighbours in space.

    Rows `reach` apart share no pixel.
    """
    u = [row for start in range(min(reach, rows)) for row in range(start, rows, reach)]
    return np.tile(u, columns), np.repeat(np.arange(columns), rows)


def list_events(k: Emitter, lists: EventLists, g: ir.Value, db: Pointer | None) -> None:
    """Fill the lists of a group: blocks of cells, turned from lanes to rows and compressed. Add up db."""
    room = round_up(lists.count, k.lanes)
    values, places, counts = (k.arena + at for at in (lists.values, lists.places, lists.counts))
    table = k.arena + lists.cells
    # a filter: no image has an event yet
    with k.loop(lists.filters) as f:
        total = k.variable()
        counters = counts.at(f, 2 * k.lanes)
        for half in range(2):
            k.store(k.zero(), counters + half * k.lanes)
        for block, valid in k.vectors(lists.count):
            # a vector of cells, of all images of the group; past the last cell there are none
            first = k.builder.mul(block, INDEX(k.lanes))
            gradients, patches = [k.zero()] * k.lanes, [k.zero()] * k.lanes
            for i in range(valid):
                gradients[i], patch = _cell(k, lists, g, f, table.at(first, 2) + 2 * i)
                k.increase(total, gradients[i])
                patches[i] = k.as_floats(patch)
            # cells to the lanes, and behind each image's list those that are events
            for n, (mask, gradient, patch) in enumerate(alive(k, gradients, patches)):
                counter = (counters + 2 * n).value(INDEX)
                first_event = n * lists.filters * room
                found = [(gradient, (values + first_event).at(f, room)), (patch, (places + first_event).at(f, room))]
                count = k.append(mask, k.builder.load(counter, align=4), found)
                k.builder.store(count, counter, align=4)

        # the bias
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


def pack_weights(
    k: Emitter, weights: Pointer, packed: Pointer, gradients: Pointer, size: tuple[int, int, int], row: int
) -> None:
    """Copy weights, filter by filter, and clear their gradients; what lies behind a kernel's row is 0.

    Args:
        size: kernel rows, K * C, filters. row: floats from one kernel row to the next, a filter's in whole vectors.
    """
    kernel, run, filters = size
    filter_ = round_up(kernel * row, k.lanes)
    with k.loop(filters * filter_ // k.lanes) as i:
        k.store(k.zero(), packed.at(i, k.lanes))
        k.store(k.zero(), gradients.at(i, k.lanes))
    with k.loop(kernel) as i, k.loop(run) as r, k.loop(filters) as f:
        value = k.load_float(weights.at(i, run * filters).at(r, filters).at(f))
        k.store(value, packed.at(f, filter_).at(i, row).at(r))


def unpack_gradients(k: Emitter, gradients: Pointer, dw: Pointer, size: tuple[int, int, int], row: int) -> None:
    """Add to dw what lies as `pack_weights` has it."""
    kernel, run, filters = size
    filter_ = round_up(kernel * row, k.lanes)
    with k.loop(kernel) as i, k.loop(run) as r, k.loop(filters) as f:
        value = k.load_float(gradients.at(f, filter_).at(i, row).at(r))
        k.add_to(dw.at(i, run * filters).at(r, filters).at(f), value)
