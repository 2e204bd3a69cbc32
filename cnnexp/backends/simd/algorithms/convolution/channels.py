"""`channels`: a convolution with channels in the vector lanes, one image at a time: many channels, packed weights.

Images lie channels-last with their padding around them, so the windows' rows are runs of K * C floats and a convolution
is a matrix product (see `product`) whose rows overlap in memory: nothing is copied. Register tile: some neighbouring
pixels times a panel of filters; before a max-pool those of whole windows: maximum, bias, ReLU happen in registers.

The gradient of the input is the same product on weights turned round and transposed. With a stride, pixels whose place
modulo the stride is the same are seen by the same taps: each such phase is a convolution of its own with fewer taps,
and no zeros are put between the gradients.

Gain: many channels, or few images. By it rather than `lanes` for the first convolution, LeNet-5 at batch 1 takes
172,267 cycles for 275,424, Keras's MNIST convnet 535,821 for 1,039,797.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from llvmlite import ir

from cnnexp.backends.simd.algorithms.convolution.base import ConvolutionNode, Geometry, Phase, Windows, seen_by
from cnnexp.backends.simd.algorithms.cost import HEAVY, Work, passes, product_gradient, product_sums
from cnnexp.backends.simd.algorithms.linear.product import Panel, Panels, Steps, add_products, choose_tile, most_height
from cnnexp.backends.simd.algorithms.update import Rows, update_owned
from cnnexp.backends.simd.compiler.emit import INDEX, Emitter, Pointer, Sums, Target
from cnnexp.backends.simd.layouts import NHWC, Layout
from cnnexp.optimizers import Optimizer

CACHED_PART = (3, 4)
"""Part of L1 that x and d of a weight gradient's pieces may take."""

LEAST_TERMS = 48
"""Terms that a tile adds to its sums before they go back to memory, at least."""

Turn = Callable[[Panel, Pointer], None]
"""Fills a panel of turned weights at an address."""

Cells = dict[tuple[int, int], list[list[ir.Value]]]
"""The sums of each cell, pixel by pixel and vector by vector, by how many rows and columns from a first one it is."""


class Channels(ConvolutionNode[NHWC]):
    """Channels in lanes."""

    input_layout = output_layout = NHWC
    whole_vectors, in_parts = False, ("forward",)
    algorithm = holds = "channels"

    def fits(self, target: Target) -> bool:
        """Whether a window's sums fit the registers."""
        return self.window <= most_height(1, target.registers)

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        (height, width, channels), (rows, columns, filters) = self.stage.input_shape, self.stage.output_shape
        kernel, run, cells, window = self.stage.layer.kernel, self.run, math.prod(self.shape[:2]), self.window
        wide = panel_width((self.shape[0], self.shape[1]), window, filters, target)
        read = 4 * (height * width * channels + rows * columns * filters)
        found = {
            "forward": self.forward_work(target, images),
            "gradient": passes(rows * columns * filters, 2, target, images),
            "unpool": passes(cells * filters, 4 + 3 * window, target, images, window + 1),
            "backward_weights": product_gradient(run, kernel, filters, wide, (rows, columns), read, target),
        }
        if self.stage.bias and leave_l2(self.stage.weight.size, target):
            found["backward_bias"] = passes(rows * columns * filters, 1, target, images)
        if needs_dx:
            sums = [
                product_sums((p.count, q.count), 1, channels, len(p.taps) * len(q.taps) * filters, target)
                for p, q in itertools.product(seen_by(self.stage, 0), seen_by(self.stage, 1))
            ]
            packing = (math.log2(target.lanes) + 2) * kernel * run * filters / target.lanes / images
            macs, cycles = sum(part.macs for part in sums), sum(part.cycles for part in sums)
            tile = max(sums, key=lambda part: part.macs).tile
            found["backward_input"] = Work(macs * self.seen, cycles * self.seen + packing, tile)
        return found

    def forward_work(self, target: Target, images: int) -> Work:
        layer, channels = self.stage.layer, self.stage.input_shape[2]
        cells, finish = (self.shape[0], self.shape[1]), 2.5 + 3.0 * (self.window - 1)
        return product_sums(cells, self.window, layer.filters, layer.kernel**2 * channels, target, finish)

    def prepare_backward(self, plan: Layout) -> None:
        super().prepare_backward(plan)
        d, dx, target, positive = self.d, self.dx, plan.target, self.x if self.input_rectified else None
        if not dx:
            return
        # the phases of dx: rows, columns and the sum
        channels, filters, self.phases = dx.shape[2], d.shape[2], list[tuple[Phase, Phase, Sum]]()
        for rows, columns in itertools.product(seen_by(self.stage, 0), seen_by(self.stage, 1)):
            taps, counts = (len(rows.taps), len(columns.taps)), (rows.count, columns.count)
            width = panel_width(counts, 1, channels, target)
            panels = Panels(taps[0] * taps[1] * filters, channels, width, target.lanes)
            origin, first = (d.halo.top + rows.start, d.halo.left + columns.start), (rows.first, columns.first)
            conv = Sum(taps, counts, panels, first, rows.step, x=d, origin=origin, y=dx, positive=positive)
            self.phases.append((rows, columns, conv))
            plan.arena.share(panels.rows * width * target.lanes if leave_l2(panels.size, target) else panels.size)

    def prepare_forward(self, plan: Layout) -> None:
        stage, layer, channels, target = self.stage, self.stage.layer, self.stage.input_shape[2], plan.target
        counts = self.shape[0], self.shape[1]
        if self.pool:
            argmax = plan.arena.nhwc((*counts, -(-layer.filters // target.lanes) * target.lanes // 4))
            self.windows = Windows(self.pool.window.size, self.pool.window.stride, argmax)
        width = panel_width(counts, self.window, layer.filters, target)
        panels = Panels(layer.kernel**2 * channels, layer.filters, width, target.lanes)
        plan.parameters.place(stage.weight, panels.size, panels.views, self.owns(plan))
        plan.parameters.place_plain(stage.bias)
        self.sum = Sum(
            (layer.kernel, layer.kernel), counts, panels,
            x=self.x, stride=layer.stride, y=self.y, rectify=self.rectify, windows=self.windows,
            parts=self.parts,
        )  # fmt: skip

    def emit_forward(self, k: Emitter, plan: Layout) -> None:
        self.conv2d(k, self.sum, *plan.parameters.of(self.stage, k.parameters))

    def conv2d(self, k: Emitter, conv: Sum, weights: Pointer, bias: Pointer | None, turn: Turn | None = None) -> None:
        """Fill conv.y (and the argmax). `turn`: fills weights that are not there yet."""
        x, panels = conv.x, conv.panels
        size, cell = (conv.windows.size, conv.windows.stride) if conv.windows else (1, 1)
        rows, columns, _ = choose_tile(conv.counts, size * size, -(-panels.outputs // k.lanes), k.target.registers)
        taps, run = conv.kernel[0], conv.kernel[1] * x.shape[2]
        parts = 1 if leave_l2(panels.size, k.target) else conv.parts
        # an image and a panel of filters, a tile of cells
        for n, panel, here in _by_images(k, panels, conv.parts, weights, turn):
            source = conv.corner(k, n)
            for u, height, v, width in k.tiles((conv.counts[0], rows), (conv.counts[1], columns), parts):
                # the rows of the kernel that some window of the tile has in the image
                reach = ((height - 1) * cell + size - 1) * conv.stride
                low, high = conv.rows_inside(k, taps, u, cell * conv.stride, conv.counts[0], reach)
                steps = Steps(k.builder.sub(high, low), run, (x.row, 1), (run * panel.unit, panel.unit))
                # every pixel of the tile's cells, as the place of its window
                cells = list(itertools.product(range(height), range(width)))
                places = [
                    ((a * cell + i) * x.row + (b * cell + j) * x.column) * conv.stride
                    for (a, b), i, j in itertools.product(cells, range(size), range(size))
                ]
                # the sums
                totals = [k.variables(panel.width) for _ in places]
                at = source.at(u, cell * conv.stride * x.row).at(v, cell * conv.stride * x.column).at(low, x.row)
                add_products(k, totals, at, places, here.at(low, run * panel.unit), steps)
                # each cell: its maximum, bias and ReLU
                values = [[total.get() for total in row] for row in totals]
                windows = [values[first : first + size * size] for first in range(0, len(values), size * size)]
                conv.finish(k, dict(zip(cells, windows, strict=True)), bias, panel, (n, u, v))

    def backward_weights(self, k: Emitter, plan: Layout) -> None:
        dw, db = plan.parameters.of(self.stage, k.gradients)
        self.conv2d_backward_weights(k, dw)
        if db is not None and not self.owns(plan):
            self.backward_bias(k, plan)

    def conv2d_backward_weights(self, k: Emitter, dw: Pointer) -> None:
        """dw[r, f] += sum over pixels of x * d, packed as the weights.

        By pieces of x and d that stay in L1 while all tiles of dw go over them: some images, or some rows of one. Fewer
        rows than give a tile `LEAST_TERMS` terms are not worth loading and storing its sums.
        """
        conv, d, x, panels, run = self.sum, self.d, self.x, self.sum.panels, self.run
        rows, columns, _ = d.shape
        cache = k.target.l2_bytes if leave_l2(panels.size, k.target) else k.target.l1_bytes
        held = cache * CACHED_PART[0] // CACHED_PART[1]
        block, most_rows = 1, max(held // (4 * (conv.stride * x.row + d.row)), -(-LEAST_TERMS // columns))
        if most_rows >= rows:
            block, most_rows = max(1, held // (4 * (x.stride + d.stride))), rows
        for first, last in k.blocks(block):
            for p, piece in k.chunks(rows, most_rows):
                # tiles of dw: some rows of a kernel row's run, a panel of filters
                for panel in panels.each(k):
                    most = most_height(panel.width, k.target.registers)
                    for i, _, r, height in k.tiles((conv.kernel[0], 1), (run, most)):
                        target = panel.at(dw).at(i, run * panel.unit).at(r, panel.unit)
                        # the piece's part of the sums
                        places = k.grid(target, height, panel.unit, panel.width)
                        with k.sums(places) as totals:
                            self._add_products(k, totals, panel, (i, r, range(height)), (first, last, p, piece))

    def _add_products(self, k: Emitter, totals: Sums, panel: Panel, taps: Rows, piece: Sequence = ()) -> None:
        """Add the products of a piece, all if none is given, to sums of dw: its images' ends, first row and rows."""
        conv, x, d, (i, r, places) = self.sum, self.x, self.d, taps
        first, last, p, count = piece or (INDEX(0), k.count, INDEX(0), d.shape[0])
        steps = Steps(count, d.shape[1], (conv.stride * x.row, conv.stride * x.column), (d.row, d.column))
        with k.loop(last, start=first) as n:
            corner = conv.corner(k, n).at(p, conv.stride * x.row).at(i, x.row).at(r)
            gradient = panel.outputs(d.pixel(k, n, p, INDEX(0)))
            add_products(k, totals, corner, places, gradient, steps, panel.valid)

    def owns(self, plan: Layout) -> bool:
        """Whether weights leave L2, and outweigh what a thread's images bring to their gradient."""
        floats, weights = math.prod(self.stage.input_shape) + math.prod(self.stage.output_shape), self.stage.weight.size
        large = leave_l2(weights, plan.target) and weights > HEAVY * plan.share * floats
        return self.algorithm == "channels" and plan.owns and large and not plan.target.forward_only

    def update(self, k: Emitter, plan: Layout, optimizer: Optimizer) -> None:
        runs = self.sum.panels, self.stage.layer.kernel, self.run, None
        update_owned(k, plan, optimizer, self.stage.weight, runs, self._add_products)

    def backward_bias(self, k: Emitter, plan: Layout) -> None:
        """db += the sum of d over pixels."""
        (_, db), d, (rows, columns, _) = plan.parameters.of(self.stage, k.gradients), self.d, self.d.shape
        assert db is not None
        for panel in self.sum.panels.each(k):
            places = k.grid(panel.outputs(db), 1, 0, panel.width)
            with k.sums(places) as [totals], k.loop(k.count) as n, k.loop(rows) as p, k.loop(columns) as q:
                at = panel.outputs(d.pixel(k, n, p, q))
                for v, (total, valid) in enumerate(zip(totals, panel.valid, strict=True)):
                    k.increase(total, k.load_part(at + v * k.lanes, valid))

    def backward_input(self, k: Emitter, plan: Layout) -> None:
        weights, _ = plan.parameters.of(self.stage, k.parameters)
        for rows, columns, conv in self.phases:
            if rows.taps and columns.taps:
                turn = functools.partial(self._turn_panel, k, (rows, columns), weights)
                self.conv2d(k, conv, k.arena + plan.arena.shared, None, turn)
            else:
                conv.clear(k)

    def _turn_panel(
        self, k: Emitter, phases: tuple[Phase, Phase], weights: Pointer, target: Panel, packed: Pointer
    ) -> None:
        """packed[(a, b, f), c] = weights[(rows[a], columns[b], c), f], panels to a panel; the last tap is first."""
        source, kernel, stride = self.sum.panels, self.stage.layer.kernel, self.stage.layer.stride
        filters, channels, other_unit = source.outputs, target.panels.outputs, target.unit
        rows, columns = phases[0].taps, phases[1].taps
        for panel in source.each(k):
            unit = panel.unit
            with k.loop(len(rows)) as a, k.loop(len(columns)) as b:
                # a tap, and blocks of lanes x lanes of it
                corner = panel.at(weights) + (rows[-1][0] * kernel + columns[-1][0]) * channels * unit
                corner = corner.at(a, -stride * kernel * channels * unit).at(b, -stride * channels * unit)
                corner = corner.at(k.builder.mul(target.vector, INDEX(k.lanes)), unit)
                place = packed.at(a, len(columns) * filters * other_unit).at(b, filters * other_unit)
                place = place.at(k.builder.mul(panel.vector, INDEX(k.lanes)), other_unit)
                blocks = itertools.product(enumerate(panel.valid), enumerate(target.valid))
                for (vector, valid), (part, inside) in blocks:
                    block = corner + (part * k.lanes * unit + vector * k.lanes)
                    turned = place + (vector * k.lanes * other_unit + part * k.lanes)
                    turn = functools.partial(_turn, rows=(inside, unit), turned=(valid, other_unit))
                    k.call("turn", turn, k.count, (block, turned))


def _turn(k: Emitter, _: ir.Value, rows: tuple[int, int], turned: tuple[int, int]) -> None:
    """Transpose a block, the first buffer, of so many rows so many floats apart, to the second buffer."""
    lines = [k.load(k.buffers[0] + i * rows[1]) if i < rows[0] else k.zero() for i in range(k.lanes)]
    for i, value in enumerate(k.transpose(lines)[: turned[0]]):
        k.store(value, k.buffers[1] + i * turned[1])


@dataclass(frozen=True)
class Sum(Geometry[NHWC]):
    """y[n, first + step * (u, v), f] = sum over taps and channels of x * w.

    Attributes:
        kernel: (rows, columns) of taps. counts: (U, V), how many pixels of y are written. first, step: which.
        panels: of the weights (rows * columns * C, F). parts: that share the rows of pixels, see `Emitter.turns`.
    """

    kernel: tuple[int, int]
    counts: tuple[int, int]
    panels: Panels
    first: tuple[int, int] = (0, 0)
    step: int = 1
    parts: int = 1

    def finish(self, k: Emitter, cells: Cells, bias: Pointer | None, panel: Panel, place: Sequence[ir.Value]) -> None:
        """Store pixels, or the maximum of each window and where it was; the first at the place (n, u, v)."""
        y, windows, positive = self.y, self.windows, self.positive
        target = k.opaque(panel.outputs(self.pixel(k, y, place)))
        mask = k.opaque(panel.outputs(self.pixel(k, positive, place))) if positive else None
        for (a, b), window in cells.items():
            down, right = a * self.step, b * self.step
            for vector, valid in enumerate(panel.valid):
                value, at = window[0][vector], vector * k.lanes
                # the maximum of the window, and which pixel it was
                if windows:
                    value, where = k.first_maximum([(row[vector], k.integers(code)) for code, row in enumerate(window)])
                    code = windows.argmax.pixel(k, *place) + (windows.argmax.apart(a, b) + vector * (k.lanes // 4))
                    k.store_bytes(where, code.at(panel.vector, k.lanes // 4))
                # what follows the sum, and no lane past the last filter
                added = None if bias is None else k.load(panel.outputs(bias) + at)
                masked = mask + (positive.apart(down, right) + at) if mask and positive else None
                k.store_part(k.finish(value, added, self.rectify, masked), target + (y.apart(down, right) + at), valid)

    def clear(self, k: Emitter) -> None:
        """Fill what no window sees with zeros."""
        with k.loop(k.count) as n, k.loop(self.counts[0]) as u, k.loop(self.counts[1]) as v:
            place = self.pixel(k, self.y, (n, u, v))
            for f, valid in k.vectors(self.y.shape[2]):
                k.store_part(k.zero(), place.at(f, k.lanes), valid)

    def pixel(self, k: Emitter, image: NHWC, place: Sequence[ir.Value]) -> Pointer:
        """Return the address in an image of y's shape of the pixel that the sum at (n, u, v) makes."""
        n, *at = place
        row, column = (k.scaled(i, self.step, first) for i, first in zip(at, self.first, strict=True))
        return image.pixel(k, n, row, column)


def leave_l2(weights: int, target: Target) -> bool:
    """Whether so many must come from beyond L2 every time that they are gone over."""
    return 4 * weights > target.l2_bytes


def _by_images(
    k: Emitter, panels: Panels, parts: int, weights: Pointer, turn: Turn | None
) -> Iterator[tuple[ir.Value, Panel, Pointer]]:
    """Run what follows for every image and panel: which, and where its weights lie, which may be to turn before.

    Weights that leave L2 go by panels, which parts share, of all images; turned panels all lie in one place.
    """
    if leave_l2(panels.size, k.target):
        for panel in panels.each(k, parts):
            if turn:
                turn(panel, weights)
            with k.loop(k.count) as n:
                yield n, panel, weights if turn else panel.at(weights)
        return
    if turn:
        for panel in panels.each(k):
            turn(panel, panel.at(weights))
    with k.loop(k.count) as n:
        for panel in panels.each(k):
            yield n, panel, panel.at(weights)


def panel_width(counts: tuple[int, int], pixels: int, filters: int, target: Target) -> int:
    """Return the vectors of a panel of weights that serves (U, V) cells of so many pixels best."""
    return choose_tile(counts, pixels, -(-filters // target.lanes), target.registers)[2]
