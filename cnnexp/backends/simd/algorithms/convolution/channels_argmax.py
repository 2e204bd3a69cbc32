"""`channels-argmax`: `channels`, with gradients through the argmax of the max-pool after it; see `argmax_gradient`.

A filter's weights do not fit the registers, so a part of a run stays there, with its gradient, while the events of a
block of cells go by; the block's part of x and dx stays in L1. For each image: the events of a block of cells, in a
list for every filter; for each part of the runs and each filter the events one by one; then dx from where it was added
up, which has x's halo.

Gain: many channels before a max-pool. For the second convolution of `two_conv_mlp` 151,215 cycles an image for all
kernels, 270,689 by `channels` (`python -m benchmarks.kernels --algorithms`, Zen 3, AVX2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from cnnexp.backends.parts import BACKWARD
from cnnexp.backends.simd.algorithms.convolution.argmax_gradient import EventList, alive
from cnnexp.backends.simd.algorithms.convolution.base import Windows
from cnnexp.backends.simd.algorithms.convolution.channels import Channels, Sum
from cnnexp.backends.simd.algorithms.cost import Work, events, passes
from cnnexp.backends.simd.algorithms.linear.product import Panel
from cnnexp.backends.simd.compiler.emit import INDEX, Emitter, Kernels, Pointer, Target, chunks
from cnnexp.backends.simd.layouts import NHWC, Arena, Layout, round_up

BLOCK = 16
"""Cells of a block, at least a vector of them."""


class ChannelsArgmax(Channels):
    """Channels in lanes; gradients through the argmax of the max-pool after it alone."""

    algorithm = "channels-argmax"
    argmax = True

    def in_lanes(self, what: str, kernel: str) -> str:
        return "weights" if what == BACKWARD else "channels"

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        (height, width, channels), filters = self.stage.input_shape, self.stage.layer.filters
        layer, cells = self.stage.layer, math.prod(self.shape[:2])
        kernel, run = layer.kernel, layer.kernel * channels
        vectors = -(-run // target.lanes)
        parts = -(-vectors // most_vectors(target.registers))
        cell_rows = -(-block_cells(target.lanes) // self.shape[1])
        step = self.pool.window.stride * layer.stride if self.pool else 1
        reach = min(height, cell_rows * step + kernel)
        held = 8 * reach * width * channels
        following = events(cells, self.window, filters, kernel, run, kernel * parts, held, target)
        packing = (3 * math.log2(target.lanes) + 6) * kernel * run * filters / target.lanes / images
        cleared = passes(height * width * channels, 4, target).cycles
        backward = Work(following.macs, following.cycles + packing + cleared, following.tile)
        return {"forward": self.forward_work(target, images), "backward": backward}

    def prepare(self, plan: Layout) -> None:
        self.prepare_forward(plan)
        windows = self.sum.windows
        assert windows is not None
        self.events = make_gradient(
            plan.arena, self.sum, windows, self.dy, self.needed_dx, self.rectifies_dy, self.input_rectified
        )

    def backward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            weights, _ = plan.parameters.weights(k, self.stage)
            conv2d_backward(k, self.events, weights, *plan.parameters.gradients(k, self.stage))

        return [("backward", run)]


@dataclass(frozen=True)
class ChannelsGradient:
    """The geometry.

    Attributes:
        conv: the forward geometry. windows: its max-pool. dy, dx: gradients of the pooled output and of the input.
        rectify: whether a ReLU was applied that dy does not know of. positive: whether dx is that of a ReLU's input.
        filters, kernel, channels: F, K, C.
        values, places, counts: lists [filter][cell of a block], and how long they are.
        sums: of dx, an image as x. weights, gradients: [kernel row][filter][K * C, rounded up].
        cells: for each cell where its gradient, its output, its argmax and its first patch lie, four integers.
    """

    conv: Sum
    windows: Windows[NHWC]
    dy: NHWC
    dx: NHWC
    rectify: bool
    positive: bool
    values: int
    places: int
    counts: int
    sums: int
    weights: int
    gradients: int
    cells: int

    @property
    def filters(self) -> int:
        return self.conv.panels.outputs

    @property
    def kernel(self) -> int:
        return self.conv.kernel[0]

    @property
    def run(self) -> int:
        return self.kernel * self.conv.x.shape[2]


def block_cells(lanes: int) -> int:
    return max(BLOCK, lanes)


def most_vectors(registers: int) -> int:
    """Return the vectors of weights that stay in registers: each has a gradient, and there are two values more."""
    return (registers - 3) // 2


def make_gradient(
    arena: Arena, conv: Sum, windows: Windows[NHWC], dy: NHWC, dx: NHWC, rectify: bool, positive: bool
) -> ChannelsGradient:
    """Return the geometry, with room in the arena."""
    lanes, filters, x = arena.lanes, round_up(conv.panels.outputs, arena.lanes), conv.x
    cells = block_cells(lanes)
    packed = conv.kernel[0] * filters * round_up(conv.kernel[1] * x.shape[2], lanes)
    return ChannelsGradient(
        conv, windows, dy, dx, rectify, positive,
        values=arena.allocate(filters * cells),
        places=arena.allocate(filters * cells),
        counts=arena.allocate(2 * filters),
        sums=arena.allocate(x.stride),
        weights=arena.allocate(packed),
        gradients=arena.allocate(packed),
        cells=arena.constants(_cell_table(conv, windows, dy, lanes).view(np.float32)),
    )  # fmt: skip


def _cell_table(conv: Sum, windows: Windows[NHWC], dy: NHWC, lanes: int) -> np.ndarray:
    """Return the table of cells, int32 (U * V, 4); neighbours in a block's list are no neighbours in space."""
    rows, columns = conv.counts
    size, reach = block_cells(lanes), 1 + -(-conv.kernel[1] // (windows.stride * conv.stride))
    order = np.concatenate(
        [
            block[start::reach]
            for block in np.split(np.arange(rows * columns), range(size, rows * columns, size))
            for start in range(reach)
        ]
    )
    u, v = order // columns, order % columns

    def place(image: NHWC, step: int, first: tuple[int, int]) -> np.ndarray:
        return (u * step + first[0]) * image.row + (v * step + first[1]) * image.column

    step = windows.stride * conv.stride
    halos = [(image.halo.top, image.halo.left) for image in (dy, conv.y, windows.argmax)]
    parts = [place(image, 1, halo) for image, halo in zip((dy, conv.y, windows.argmax), halos, strict=True)]
    return np.stack([*parts, place(conv.x, step, conv.origin)], axis=1).astype(np.int32)


def conv2d_backward(k: Emitter, events: ChannelsGradient, weights: Pointer, dw: Pointer, db: Pointer | None) -> None:
    """dw, db += the gradient, packed as the weights; dx = the gradient."""
    conv, cells = events.conv, events.conv.counts[0] * events.conv.counts[1]
    size = block_cells(k.lanes)
    sums, gradients = k.arena + events.sums, k.arena + events.gradients
    _turn(k, events, weights, k.arena + events.weights, back=False)
    with k.loop(events.kernel * round_up(events.filters, k.lanes) * round_up(events.run, k.lanes) // k.lanes) as i:
        k.store(k.zero(), gradients.at(i, k.lanes))
    with k.loop(k.count) as n:
        with k.loop(conv.x.stride // k.lanes) as i:
            k.store(k.zero(), sums.at(i, k.lanes))
        with k.loop(cells // size) as b:
            _block(k, events, n, k.builder.mul(b, INDEX(size)), size, db)
        if cells % size:
            _block(k, events, n, INDEX(cells // size * size), cells % size, db)
        _copy(k, events, n)
    _turn(k, events, dw, gradients, back=True)


def _block(k: Emitter, events: ChannelsGradient, n: ir.Value, first: ir.Value, cells: int, db: Pointer | None) -> None:
    """Do `cells` cells from the first on."""
    _list(k, events, n, first, cells, db)
    _follow(k, events, n)


def _list(k: Emitter, events: ChannelsGradient, n: ir.Value, first: ir.Value, cells: int, db: Pointer | None) -> None:
    """Fill the lists of a block of cells."""
    size, windows = block_cells(k.lanes), events.windows
    values, places, counts = (k.arena + at for at in (events.values, events.places, events.counts))
    table = (k.arena + events.cells).at(first, 4)
    images = [(k.arena + image.offset).at(n, image.stride) for image in (events.dy, events.conv.y, windows.argmax)]
    unit, x = events.conv.stride, events.conv.x

    # a vector of filters, its cells a vector at a time
    def vector(fv: ir.Value, valid: int) -> None:
        total, found = k.variable(), [k.variable(INDEX(0)) for _ in range(k.lanes)]
        for start in range(0, cells, k.lanes):
            gradients, patches = [k.zero()] * k.lanes, [k.zero()] * k.lanes
            for cell in range(min(k.lanes, cells - start)):
                entry = table + 4 * (start + cell)
                at = [k.builder.sext(k.load_int(entry + i), INDEX) for i in range(4)]
                # a cell: its gradient, 0 where ReLU gave 0, and the patch that its maximum saw
                value = k.load_part(images[0].at(at[0]).at(fv, k.lanes), valid)
                if events.rectify:
                    value = k.where_positive(k.load(images[1].at(at[1]).at(fv, k.lanes)), value)
                code = k.load_bytes(images[2].at(at[2]).at(fv, k.lanes // 4))
                shift = windows.shift(k, code, unit * x.row, unit * x.column)
                place = k.builder.add(shift, k.spread(k.load_int(entry + 3)))
                total.set(k.add(total.get(), value))
                gradients[cell], patches[cell] = value, k.as_floats(place)
            # cells to the lanes, and behind each filter's list those that are events
            for f, (mask, value, place) in enumerate(alive(k, gradients, patches)):
                if f >= valid:
                    break
                row = f * size
                lists = [(value, (values + row).at(fv, k.lanes * size)), (place, (places + row).at(fv, k.lanes * size))]
                found[f].set(k.append(mask, found[f].get(), lists))
        # how many there are; and the bias
        for f in range(valid):
            k.builder.store(found[f].get(), (counts + 2 * f).at(fv, 2 * k.lanes).value(INDEX), align=4)
        if db is not None:
            target = db.at(fv, k.lanes)
            k.store(k.add(k.load(target), total.get()), target)

    with k.loop(events.filters // k.lanes) as fv:
        vector(fv, k.lanes)
    if events.filters % k.lanes:
        vector(INDEX(events.filters // k.lanes), events.filters % k.lanes)


def _follow(k: Emitter, events: ChannelsGradient, n: ir.Value) -> None:
    """Run the listed events: part of the runs by part, filter by filter."""
    size, vectors = block_cells(k.lanes), -(-events.run // k.lanes)
    row = vectors * k.lanes
    x, sums = events.conv.x.stored(k, n), k.arena + events.sums
    # a part of a kernel row that the registers hold, and a filter
    for first, width, times in chunks(vectors, most_vectors(k.target.registers)):
        with k.loop(events.kernel) as i, k.loop(times) as t, k.loop(events.filters) as f:
            at = k.builder.add(k.builder.mul(t, INDEX(width * k.lanes)), INDEX(first * k.lanes))
            packed, gradient = (
                (k.arena + part).at(i, round_up(events.filters, k.lanes) * row).at(f, row).at(at)
                for part in (events.weights, events.gradients)
            )
            source, target = x.at(i, events.conv.x.row).at(at), sums.at(i, events.conv.x.row).at(at)
            # its events of this block
            values, places = ((k.arena + part).at(f, size) for part in (events.values, events.places))
            count = k.builder.load((k.arena + events.counts).at(f, 2).value(INDEX), align=4)
            vectors_at = [v * k.lanes for v in range(width)]
            EventList(count, values, places).follow(
                k, [(start, k.lanes) for start in vectors_at], (source, target),
                [packed + start for start in vectors_at], [gradient + start for start in vectors_at],
            )  # fmt: skip


def _copy(k: Emitter, events: ChannelsGradient, n: ir.Value) -> None:
    """dx = what was added up, 0 where x is not positive if so asked."""
    x, dx = events.conv.x, events.dx
    rows, columns, channels = dx.shape
    run = columns * channels
    start = x.halo.top * x.row + x.halo.left * x.column
    # row by row, without the halo
    with k.loop(rows) as p:
        line = [(k.arena + events.sums + start).at(p, x.row), x.pixel(k, n, p, INDEX(0)), dx.pixel(k, n, p, INDEX(0))]

        def vector(i: ir.Value, valid: int, line: list[Pointer] = line) -> None:
            source, positive, target = (pointer.at(i, k.lanes) for pointer in line)
            value = k.load(source)
            k.store_part(k.where_positive(k.load(positive), value) if events.positive else value, target, valid)

        with k.loop(run // k.lanes) as i:
            vector(i, k.lanes)
        if run % k.lanes:
            vector(INDEX(run // k.lanes), run % k.lanes)


def _turn(k: Emitter, events: ChannelsGradient, panelled: Pointer, packed: Pointer, back: bool) -> None:
    """packed[i, f, j] = panelled[(i, j), f], what rounds up a run 0; or, back, add the former to the latter."""
    panels, run = events.conv.panels, events.run
    row = round_up(run, k.lanes)
    # a panel of filters, a kernel row of it
    for panel in panels.each(k):
        unit = panel.width * k.lanes
        with k.loop(events.kernel) as i:
            column = panel.at(panelled).at(i, run * unit)
            place = packed.at(i, round_up(events.filters, k.lanes) * row)
            place = place.at(k.builder.mul(panel.vector, INDEX(k.lanes)), row)

            def block(
                at: ir.Value,
                valid: int,
                column: Pointer = column,
                place: Pointer = place,
                panel: Panel = panel,
                unit: int = unit,
            ) -> None:
                # blocks of lanes x lanes, transposed there or back
                for v in range(panel.width):
                    lines = column.at(at, unit) + v * k.lanes
                    turned = place.at(at) + v * k.lanes * row
                    if back:
                        rows = k.transpose([k.load(turned + f * row) for f in range(k.lanes)])
                        for j, value in enumerate(rows[:valid]):
                            k.store(k.add(k.load(lines + j * unit), value), lines + j * unit)
                    else:
                        rows = [k.load(lines + j * unit) if j < valid else k.zero() for j in range(k.lanes)]
                        for f, value in enumerate(k.transpose(rows)):
                            k.store(value, turned + f * row)

            with k.loop(run // k.lanes) as j:
                block(k.builder.mul(j, INDEX(k.lanes)), k.lanes)
            if run % k.lanes:
                block(INDEX(run // k.lanes * k.lanes), run % k.lanes)
