"""What algorithms share whose gradients follow the argmax of a max-pool: a quarter of the multiply-adds or less.

Of a window's outputs only the largest has a gradient. An *event* is a cell of the pooled output whose gradient g is not
zero; behind a ReLU only part of them are. With channels last, the patch that its maximum saw is K runs of K * C floats,
and so are the weights of its filter. There dw += g * x and dx += g * w: per vector of the patch one load, one load and
store, and two multiply-adds. Every image has its own argmax, so images share no vectors here; the patch lies in them.

Events are listed by filter, so that the loop over them meets no branch, and weights and their gradients stay in
registers while the events of a filter go by. Neighbours in a list are none in space: no load waits for a store.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir

from cnnexp.backends.simd.algorithms.convolution.base import Windows
from cnnexp.backends.simd.algorithms.node import Node
from cnnexp.backends.simd.algorithms.reorder import to_rows
from cnnexp.backends.simd.compiler.emit import INDEX, Emitter, Pointer
from cnnexp.backends.simd.layouts import NHWC, Arena, Blocked, Tensor, round_up


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
            yield k.load_float(self.values.at(event)), k.load_index(self.places.at(event))

    def follow(
        self, k: Emitter, parts: list[tuple[int, int, Pointer, Pointer]], operands: tuple[Pointer, Pointer]
    ) -> None:
        """Add every event's part to dx and to the gradient of the weights.

        Args:
            parts: of a patch that are followed at once, a vector each: where it begins, its floats, and where its
                weights and their gradient lie.
            operands: x and dx.
        """
        weights = [k.load(place, width) for _, width, place, _ in parts]
        totals = [k.variable(k.load(place, width)) for _, width, _, place in parts]
        with self.each(k) as (value, patch):
            x, dx = (operand.at(patch) for operand in operands)
            factors = {width: k.spread(value, width) for width in dict.fromkeys(width for _, width, *_ in parts)}
            for weight, total, (at, width, *_) in zip(weights, totals, parts, strict=True):
                k.accumulate(total, factors[width], k.load(x + at, width))
                k.store(k.fma(factors[width], weight, k.load(dx + at, width)), dx + at)
        for total, (*_, place) in zip(totals, parts, strict=True):
            k.store(total.get(), place)


class EventLists:
    """The events of an image, or of a group of them: a list for every lane of a pooled cell, and what they come from.

    With the batch in lanes, list f * lanes + n is that of filter f and image n.

    Args:
        node: whose output, pooled by `windows`, has the events.
        x: where the patches lie, an image a row. stride: of the convolution in it.
        order: in which cells, row * columns + column, come into the lists. room: cells of a list.

    Attributes:
        rectify: whether a ReLU was applied that dy does not know of.
        values, places: where in the arena lists of the events' gradients lie, and of the places of their patches.
        counts: likewise how many events a list has, 64 bits.
        cells: likewise, for each cell, where its gradient, its output, its argmax and its first patch lie.
    """

    def __init__(
        self, arena: Arena, node: Node[Any, Any], windows: Windows, x: Tensor, stride: int, order: np.ndarray, room: int
    ) -> None:
        self.y, self.dy, self.windows, self.rectify = node.y, node.dy, windows, node.rectifies_dy
        self.x, self.stride, self.room = x, stride, room
        (_, columns, filters), lanes = node.y.shape, arena.lanes
        u, v = order // columns, order % columns

        def places(image: Tensor) -> np.ndarray:
            return (u + image.halo.top) * image.row + (v + image.halo.left) * image.column

        step = windows.stride * stride
        images = [places(image) for image in (node.dy, node.y, windows.argmax)]
        patches = u * step * x.row + v * step * x.column
        lists = round_up(filters * node.y.lanes, lanes)
        self.values, self.places, self.counts = (arena.allocate(lists * each) for each in (room, room, 2))
        self.cells = arena.constants(np.stack([*images, patches], axis=1).astype(np.int32).view(np.float32))

    def of(self, k: Emitter, number: ir.Value) -> EventList:
        """Return the events of a list."""
        count = k.builder.load((k.arena + self.counts).at(number, 2).value(INDEX), align=4)
        return EventList(count, *((k.arena + at).at(number, self.room) for at in (self.values, self.places)))


def group_lists(arena: Arena, node: Node[Any, Any], windows: Windows, x: Tensor, stride: int, reach: int) -> EventLists:
    """Return lists of all cells, column by column; rows `reach` apart share no pixel."""
    rows, columns, _ = node.shape
    order = spread_out(np.arange(rows * columns).reshape(rows, columns).T, reach)
    return EventLists(arena, node, windows, x, stride, order, round_up(rows * columns, arena.lanes))


def image_rows(arena: Arena, x: Blocked) -> NHWC:
    """Return room for the images of a group of x, each with its halo, and a vector behind it."""
    stride = round_up(x.stride // arena.lanes, arena.lanes) + arena.lanes
    return NHWC(arena.allocate(arena.lanes * stride), x.shape, stride, halo=x.halo)


def list_group(k: Emitter, lists: EventLists, x: Blocked, g: ir.Value, db: Pointer | None) -> None:
    """Turn a group of x to rows, where patches lie, and list its events."""
    to_rows(k, x.stored(k, g), lists.x.stored(k, 0), x.stride // k.lanes, lists.x.stride, INDEX(k.lanes))
    list_events(k, lists, g, INDEX(0), math.prod(lists.y.shape[:2]), db)


def spread_out(parts: Iterable[np.ndarray], reach: int) -> np.ndarray:
    """Return cells part by part, in an order in which neighbours are no neighbours in space.

    Args:
        reach: cells apart in a part from which on patches have no pixel in common.
    """
    return np.concatenate([part[start::reach] for part in parts for start in range(reach)])


def list_events(k: Emitter, lists: EventLists, n: ir.Value, first: ir.Value, count: int, db: Pointer | None) -> None:
    """List the events of an image, or a group: of a block of cells, turned to the lanes and compressed. Add up db."""
    values, places, counts = (k.arena + at for at in (lists.values, lists.places, lists.counts))
    images = [image.stored(k, n) for image in (lists.dy, lists.y, lists.windows.argmax)]
    table, (*_, filters), in_lanes = (k.arena + lists.cells).at(first, 4), lists.y.shape, lists.y.lanes
    # a vector of a cell: its lists have no event yet
    for c, valid in k.vectors(filters * in_lanes):
        total, counters = k.variable(), counts.at(c, 2 * k.lanes)
        for half in range(2):
            k.store(k.zero(), counters + half * k.lanes)
        for block, cells in k.vectors(count):
            # a vector of cells; past the last cell there are none
            entries = table.at(block, 4 * k.lanes)
            gradients, patches = [k.zero()] * k.lanes, [k.zero()] * k.lanes
            for i in range(cells):
                gradients[i], patch = _cell(k, lists, images, (c, valid), entries + 4 * i)
                k.increase(total, gradients[i])
                patches[i] = k.as_floats(patch)
            # cells to the lanes, and behind each list those that are events
            rows = zip(range(valid), k.transpose(gradients), k.transpose(patches), strict=False)
            for lane, gradient, patch in rows:
                counter, mask = (counters + 2 * lane).value(INDEX), k.builder.fcmp_unordered("!=", gradient, k.zero())
                lines = ((room + lane * lists.room).at(c, k.lanes * lists.room) for room in (values, places))
                found = list(zip((gradient, patch), lines, strict=True))
                k.builder.store(k.append(mask, k.builder.load(counter, align=4), found), counter, align=4)
        # the bias
        if db is not None and in_lanes > 1:
            k.add_to(db.at(c), k.sum_lanes(total.get()))
        elif db is not None:
            target = db.at(c, k.lanes)
            k.store(k.add(k.load(target), total.get()), target)


def _cell(
    k: Emitter, lists: EventLists, images: list[Pointer], vector: tuple[ir.Value, int], entry: Pointer
) -> tuple[ir.Value, ir.Value]:
    """Return a cell's gradient, 0 where ReLU gave 0, and the place of the patch that each maximum saw.

    Args:
        images: gradient, output and argmax. vector: of the cell, and the lanes of it that count.
    """
    (c, valid), at = vector, [k.load_index(entry + i) for i in range(4)]
    value = k.load_part(images[0].at(at[0]).at(c, k.lanes), valid)
    if lists.rectify:
        value = k.where_positive(k.load(images[1].at(at[1]).at(c, k.lanes)), value)
    code = k.load_bytes(images[2].at(at[2]).at(c, k.lanes // 4))
    # from a window's first pixel to the one of the code; the division by S is exact up to the largest window there is
    size, down, right = lists.windows.size, lists.stride * lists.x.row, lists.stride * lists.x.column
    row = k.builder.lshr(k.builder.mul(code, k.integers(-(-256 // size))), k.integers(8))
    along = k.builder.mul(code, k.integers(right))
    shift = k.builder.add(along, k.builder.mul(row, k.integers(down - size * right)))
    return value, k.builder.add(shift, k.spread(k.load_int(entry + 3)))


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
