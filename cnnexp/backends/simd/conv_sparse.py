"""The gradient of a convolution with a max-pool after it, by following each argmax: a quarter of the work or less.

Every image has its own argmax, so images cannot share vectors here. Instead the kernel rows do: with channels last, the
patch that a cell's maximum saw is K runs of K * C floats, and so are a filter's weights. For one filter these, and as
many accumulators of their gradient, stay in registers. An *event* is a cell whose gradient g is not zero (ReLU leaves
only part of them): at its patch, dw += g * x and dx += g * w, per vector one load, one load and store, and two
multiply-adds.

For each group of `lanes` images: the input to rows; the events of every image and filter, in lists, so that the loop
over them meets no branch; the events one by one; dx back to lanes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from cnnexp.backends.simd.conv_lanes import Windows
from cnnexp.backends.simd.emit import INDEX, Emitter, Pointer, Variable
from cnnexp.backends.simd.layout import Arena, Grid, round_up
from cnnexp.backends.simd.transfer import group_to_lanes, group_to_rows


@dataclass(frozen=True)
class Scratch:
    """Room in the arena, for one group of images.

    Attributes:
        x, dx: [image][values of the input with its ring, rounded up].
        values, places: [image][filter][cells, rounded up], the events' gradients and the places of their patches.
        counts: [image][filter], how many events.
        weights, gradients: [filter][kernel row][K * C, rounded up].
        cells: two integers per cell: where it lies in the pooled grid, and the place of its first patch.
    """

    x: int
    dx: int
    values: int
    places: int
    counts: int
    weights: int
    gradients: int
    cells: int


@dataclass(frozen=True)
class SparseGradient:
    """The geometry.

    Attributes:
        x: input grid, its ring wide enough for every window. y, dy: pooled output and its gradient, without a ring.
        dx: gradient of x.
        kernel, stride, channels, filters: K, step, C, F. windows: the max-pool.
        rectify: whether a ReLU was applied that dy does not know of. rectified: x is a ReLU's output, and dx to be the
            gradient of that ReLU's input.
        scratch: room.
    """

    x: Grid
    y: Grid
    dy: Grid
    dx: Grid
    kernel: int
    stride: int
    channels: int
    filters: int
    windows: Windows[Grid]
    rectify: bool
    rectified: bool
    scratch: Scratch

    @property
    def size(self) -> int:
        """Floats of one image of the input, its ring with it."""
        return self.x.group // self.x.lanes

    @property
    def row(self) -> int:
        """Floats of one of its rows."""
        return self.x.row // self.x.lanes

    @property
    def cells(self) -> int:
        return self.y.shape[0] * self.y.shape[1]

    @property
    def run(self) -> int:
        return self.kernel * self.channels


def widths(run: int, lanes: int) -> list[int]:
    """Cut a run of floats into vectors: as many whole ones as fit, then the smallest power of 2 that holds the rest."""
    rest = run % lanes
    return [lanes] * (run // lanes) + ([1 << (rest - 1).bit_length()] if rest else [])


def fits(kernel: int, channels: int, registers: int, lanes: int) -> bool:
    """Whether a filter's weights and their gradients fit the registers."""
    return 2 * kernel * len(widths(kernel * channels, lanes)) + 2 <= registers


def make_scratch(arena: Arena, kernel: int, stride: int, x: Grid, y: Grid, windows: Windows[Grid]) -> Scratch:
    lanes, (rows, columns, filters) = arena.lanes, y.shape
    channels = x.shape[2]
    size, cells = round_up(x.group // lanes, lanes) + lanes, round_up(rows * columns, lanes)
    packed = filters * kernel * round_up(kernel * channels, lanes)
    step = windows.stride * stride
    u, v = _spread_out(rows, columns, -(-(kernel + stride * windows.size) // step))
    table = np.stack([(u * columns + v) * filters, u * step * x.row // lanes + v * step * channels], axis=1)
    return Scratch(
        x=arena.allocate(lanes * size),
        dx=arena.allocate(lanes * size),
        values=arena.allocate(lanes * filters * cells),
        places=arena.allocate(lanes * filters * cells),
        counts=arena.allocate(2 * lanes * filters),
        weights=arena.allocate(packed),
        gradients=arena.allocate(packed),
        cells=arena.constants(table.astype(np.int32).view(np.float32)),
    )


def _spread_out(rows: int, columns: int, reach: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the cells, column by column, in an order in which neighbours in time are no neighbours in space.

    A load that overlaps a store still on its way waits for it; rows `reach` apart share no pixel.
    """
    u = [row for start in range(min(reach, rows)) for row in range(start, rows, reach)]
    return np.tile(u, columns), np.repeat(np.arange(columns), rows)


def conv2d_backward(k: Emitter, conv: SparseGradient, weights: Pointer, dw: Pointer, db: Pointer | None) -> None:
    """dw, db += the gradient; dx = the gradient."""
    scratch, stride = conv.scratch, round_up(conv.size, k.lanes) + k.lanes
    x, dx = k.arena + scratch.x, k.arena + scratch.dx
    _pack_weights(k, conv, weights)
    with k.loop(k.groups(k.lanes)) as g:
        images = k.builder.sub(k.count, k.builder.mul(g, INDEX(k.lanes)))
        group_to_rows(k, conv.x.stored(k, g), x, conv.size, stride)
        _list_events(k, conv, g, db)
        with k.loop(k.lanes) as n:
            with k.loop(stride // k.lanes) as i:
                k.store(k.zero(), dx.at(n, stride).at(i, k.lanes))
            with k.loop(conv.filters) as f:
                _follow_events(k, conv, n, f, x.at(n, stride), dx.at(n, stride))
        _store_gradient(k, conv, g, dx, stride, images)
    _unpack_gradients(k, conv, dw)


def _store_gradient(k: Emitter, conv: SparseGradient, g: ir.Value, dx: Pointer, stride: int, images: ir.Value) -> None:
    """Turn dx to lanes, without what lies in the ring of x."""
    x = conv.x if conv.rectified else None
    if conv.x.dense and conv.dx.dense:
        group_to_lanes(k, dx, conv.dx.image(k, g), conv.size, stride, images, x.image(k, g) if x else None)
        return
    height, width, channels = conv.x.shape
    first = dx + (conv.x.ring.top * conv.row + conv.x.ring.left * channels)
    with k.loop(height) as p:
        source, target = first.at(p, conv.row), conv.dx.pixel(k, g, p, INDEX(0))
        if conv.dx.ring.step == 1:
            positive = x.pixel(k, g, p, INDEX(0)) if x else None
            group_to_lanes(k, source, target, width * channels, stride, images, positive)
        else:
            with k.loop(width) as q:
                one = target.at(q, conv.dx.ring.step * conv.dx.column)
                positive = x.pixel(k, g, p, q) if x else None
                group_to_lanes(k, source.at(q, channels), one, channels, stride, images, positive)


def _pack_weights(k: Emitter, conv: SparseGradient, weights: Pointer) -> None:
    """Copy the weights, and clear their gradients; what rounds up a run is 0."""
    packed, gradients = k.arena + conv.scratch.weights, k.arena + conv.scratch.gradients
    row = round_up(conv.run, k.lanes)
    with k.loop(conv.filters * conv.kernel * row // k.lanes) as i:
        k.store(k.zero(), packed.at(i, k.lanes))
        k.store(k.zero(), gradients.at(i, k.lanes))
    with k.loop(conv.kernel) as i, k.loop(conv.run) as r, k.loop(conv.filters) as f:
        value = k.load_float(weights.at(i, conv.run * conv.filters).at(r, conv.filters).at(f))
        k.store(value, packed.at(f, conv.kernel * row).at(i, row).at(r))


def _unpack_gradients(k: Emitter, conv: SparseGradient, dw: Pointer) -> None:
    gradients, row = k.arena + conv.scratch.gradients, round_up(conv.run, k.lanes)
    with k.loop(conv.kernel) as i, k.loop(conv.run) as r, k.loop(conv.filters) as f:
        value = k.load_float(gradients.at(f, conv.kernel * row).at(i, row).at(r))
        k.add_to(dw.at(i, conv.run * conv.filters).at(r, conv.filters).at(f), value)


def _list_events(k: Emitter, conv: SparseGradient, g: ir.Value, db: Pointer | None) -> None:
    """Fill the lists of events of a group: blocks of cells, turned from lanes to rows and compressed."""
    scratch, room = conv.scratch, round_up(conv.cells, k.lanes)
    values, places, counts = (k.arena + at for at in (scratch.values, scratch.places, scratch.counts))
    table = k.arena + scratch.cells
    with k.loop(conv.filters) as f:
        total = k.variable()
        with k.loop(k.lanes) as n:
            k.builder.store(INDEX(0), counts.at(n, 2 * conv.filters).at(f, 2).value(INDEX), align=4)

        def block(first: ir.Value, valid: int, f: ir.Value = f, total: Variable = total) -> None:
            gradients, patches = [], []
            for i in range(k.lanes):
                if i >= valid:
                    gradients.append(k.zero())
                    patches.append(k.zero())
                    continue
                gradient, patch = _cell(k, conv, g, f, table.at(first, 2) + 2 * i)
                total.set(k.add(total.get(), gradient))
                gradients.append(gradient)
                patches.append(k.as_floats(patch))
            rows = zip(k.transpose(gradients), k.transpose(patches), strict=True)
            for n, (gradient, patch) in enumerate(rows):
                alive = k.builder.fcmp_unordered("!=", gradient, k.zero())
                counter = (counts + 2 * n * conv.filters).at(f, 2).value(INDEX)
                first_event = n * conv.filters * room
                lists = [(gradient, (values + first_event).at(f, room)), (patch, (places + first_event).at(f, room))]
                count = k.append(alive, k.builder.load(counter, align=4), lists)
                k.builder.store(count, counter, align=4)

        with k.loop(conv.cells // k.lanes) as b:
            block(k.builder.mul(b, INDEX(k.lanes)), k.lanes)
        if conv.cells % k.lanes:
            block(INDEX(conv.cells // k.lanes * k.lanes), conv.cells % k.lanes)
        if db is not None:
            k.add_to(db.at(f), k.sum_lanes(total.get()))


def _cell(k: Emitter, conv: SparseGradient, g: ir.Value, f: ir.Value, entry: Pointer) -> tuple[ir.Value, ir.Value]:
    """Return a cell's gradient, 0 where ReLU gave 0, and the place of the patch that each image's maximum saw."""
    where, first = (k.builder.sext(k.load_int(entry + i), INDEX) for i in range(2))
    argmax = conv.windows.argmax
    value = k.load(conv.dy.image(k, g).at(where, k.lanes).at(f, k.lanes))
    if conv.rectify:
        value = k.where_positive(k.load(conv.y.image(k, g).at(where, k.lanes).at(f, k.lanes)), value)
    code = k.load_bytes(argmax.image(k, g).at(where, argmax.lanes).at(f, argmax.lanes))
    shift = conv.windows.shift(k, code, conv.stride * conv.row, conv.stride * conv.channels)
    return value, k.builder.add(shift, k.spread(k.builder.trunc(first, ir.IntType(32))))


def _follow_events(k: Emitter, conv: SparseGradient, n: ir.Value, f: ir.Value, x: Pointer, dx: Pointer) -> None:
    """Run one image's events of one filter."""
    scratch, room = conv.scratch, round_up(conv.cells, k.lanes)
    row, parts = round_up(conv.run, k.lanes), widths(conv.run, k.lanes)
    packed = (k.arena + scratch.weights).at(f, conv.kernel * row)
    gradients = (k.arena + scratch.gradients).at(f, conv.kernel * row)
    places = [(i, p * k.lanes, width) for i in range(conv.kernel) for p, width in enumerate(parts)]
    weights = [k.load(packed + (i * row + at), width) for i, at, width in places]
    totals = [k.variable(k.load(gradients + (i * row + at), width)) for i, at, width in places]
    start = k.builder.add(k.builder.mul(n, INDEX(conv.filters)), f)
    count = k.builder.load((k.arena + scratch.counts).at(start, 2).value(INDEX), align=4)
    values = (k.arena + scratch.values).at(start, room)
    patches = (k.arena + scratch.places).at(start, room)
    with k.loop(count) as event:
        value = k.load_float(values.at(event))
        patch = k.builder.sext(k.load_int(patches.at(event)), INDEX)
        source, target = x.at(patch), dx.at(patch)
        for weight, total, (i, at, width) in zip(weights, totals, places, strict=True):
            factor = k.spread(value, width)
            place = i * conv.row + at
            k.accumulate(total, factor, k.load(source + place, width))
            k.store(k.fma(factor, weight, k.load(target + place, width)), target + place)
    for total, (i, at, _) in zip(totals, places, strict=True):
        k.store(total.get(), gradients + (i * row + at))
