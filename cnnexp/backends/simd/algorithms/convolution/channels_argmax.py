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
from dataclasses import replace

import numpy as np
from llvmlite import ir

from cnnexp.backends.simd.algorithms.convolution.argmax_gradient import EventList, alive
from cnnexp.backends.simd.algorithms.convolution.channels import Channels
from cnnexp.backends.simd.algorithms.cost import Work, events, passes
from cnnexp.backends.simd.algorithms.elementwise import pass_gradient
from cnnexp.backends.simd.compiler.emit import INDEX, Emitter, Kernels, Pointer, Target, chunks
from cnnexp.backends.simd.layouts import Layout, Tensor, round_up, vectors_of

BLOCK = 16
"""Cells of a block, at least a vector of them."""


class ChannelsArgmax(Channels):
    """Channels in lanes; gradients through the argmax of the max-pool after it alone.

    Attributes, where room in the arena lies:
        values, places, counts: lists [filter][cell of a block], and how long they are.
        dx_sums: of dx, an image as x. packed, gradients: of the weights, [kernel row][filter][K * C, rounded up].
        cells: for each cell where its gradient, its output, its argmax and its first patch lie, four integers.
    """

    algorithm = "channels-argmax"
    argmax = True

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
        arena, lanes, conv = plan.arena, plan.arena.lanes, self.sum
        cells, filters = block_cells(lanes), round_up(conv.panels.outputs, lanes)
        packed = conv.kernel[0] * filters * self._row(lanes)
        self.values, self.places, self.counts = (arena.allocate(filters * floats) for floats in (cells, cells, 2))
        self.dx_sums, self.packed, self.gradients = (
            arena.allocate(floats) for floats in (conv.x.stride, packed, packed)
        )
        self.cells = arena.constants(self._cell_table(lanes).view(np.float32))

    def _row(self, lanes: int) -> int:
        """Floats from one packed kernel row to the next."""
        return round_up(self._run, lanes)

    def _cell_table(self, lanes: int) -> np.ndarray:
        """Return the table of cells, int32 (U * V, 4); neighbours in a block's list are no neighbours in space."""
        conv, windows = self.sum, self.sum.windows
        assert windows is not None
        (rows, columns), step = conv.counts, windows.stride * conv.stride
        size, reach = block_cells(lanes), 1 + -(-conv.kernel[1] // step)
        blocks = np.split(np.arange(rows * columns), range(size, rows * columns, size))
        order = np.concatenate([block[start::reach] for block in blocks for start in range(reach)])
        u, v = order // columns, order % columns

        def place(image: Tensor, step: int, first: tuple[int, int]) -> np.ndarray:
            return (u * step + first[0]) * image.row + (v * step + first[1]) * image.column

        parts = [place(image, 1, (image.halo.top, image.halo.left)) for image in (self.dy, conv.y, windows.argmax)]
        return np.stack([*parts, place(conv.x, step, conv.origin)], axis=1).astype(np.int32)

    def backward(self, plan: Layout) -> Kernels:
        return [("backward", lambda k: self._backward(k, plan))]

    def _backward(self, k: Emitter, plan: Layout) -> None:
        """dw, db += the gradient, packed as the weights; dx = the gradient."""
        (weights, _), (dw, db) = plan.parameters.weights(k, self.stage), plan.parameters.gradients(k, self.stage)
        conv, cells, size = self.sum, self.sum.counts[0] * self.sum.counts[1], block_cells(k.lanes)
        sums, gradients = k.arena + self.dx_sums, k.arena + self.gradients
        self._turn(k, weights, k.arena + self.packed, back=False)
        filters = round_up(conv.panels.outputs, k.lanes)
        k.clear(gradients, conv.kernel[0] * filters * self._row(k.lanes) // k.lanes)
        with k.loop(k.count) as n:
            k.clear(sums, conv.x.stride // k.lanes)
            with k.loop(cells // size) as b:
                self._list(k, n, k.builder.mul(b, INDEX(size)), size, db)
                self._follow(k, n)
            if cells % size:
                self._list(k, n, INDEX(cells // size * size), cells % size, db)
                self._follow(k, n)
            self._copy(k, n)
        self._turn(k, dw, gradients, back=True)

    def _list(self, k: Emitter, n: ir.Value, first: ir.Value, cells: int, db: Pointer | None) -> None:
        """Fill the lists of a block of cells from the first on."""
        size, conv, windows = block_cells(k.lanes), self.sum, self.sum.windows
        assert windows is not None
        values, places, counts = (k.arena + at for at in (self.values, self.places, self.counts))
        table = (k.arena + self.cells).at(first, 4)
        images = [(k.arena + image.offset).at(n, image.stride) for image in (self.dy, conv.y, windows.argmax)]
        # a vector of filters, its cells a vector at a time
        for fv, valid in k.vectors(conv.panels.outputs):
            total, found = k.variable(), [k.variable(INDEX(0)) for _ in range(k.lanes)]
            for start in range(0, cells, k.lanes):
                gradients, patches = [k.zero()] * k.lanes, [k.zero()] * k.lanes
                for cell in range(min(k.lanes, cells - start)):
                    entry = table + 4 * (start + cell)
                    at = [k.builder.sext(k.load_int(entry + i), INDEX) for i in range(4)]
                    # a cell: its gradient, 0 where ReLU gave 0, and the patch that its maximum saw
                    value = k.load_part(images[0].at(at[0]).at(fv, k.lanes), valid)
                    if self.rectifies_dy:
                        value = k.where_positive(k.load(images[1].at(at[1]).at(fv, k.lanes)), value)
                    code = k.load_bytes(images[2].at(at[2]).at(fv, k.lanes // 4))
                    shift = windows.shift(k, code, conv.stride * conv.x.row, conv.stride * conv.x.column)
                    place = k.builder.add(shift, k.spread(k.load_int(entry + 3)))
                    k.increase(total, value)
                    gradients[cell], patches[cell] = value, k.as_floats(place)
                # cells to the lanes, and behind each filter's list those that are events
                for f, (mask, *event) in zip(range(valid), alive(k, gradients, patches), strict=False):
                    rooms = ((room + f * size).at(fv, k.lanes * size) for room in (values, places))
                    lists = list(zip(event, rooms, strict=True))
                    found[f].set(k.append(mask, found[f].get(), lists))
            # how many there are; and the bias
            for f in range(valid):
                k.builder.store(found[f].get(), (counts + 2 * f).at(fv, 2 * k.lanes).value(INDEX), align=4)
            if db is not None:
                target = db.at(fv, k.lanes)
                k.store(k.add(k.load(target), total.get()), target)

    def _follow(self, k: Emitter, n: ir.Value) -> None:
        """Run the listed events: part of the runs by part, filter by filter."""
        size, row, conv = block_cells(k.lanes), self._row(k.lanes), self.sum
        filters = conv.panels.outputs
        x, sums = conv.x.stored(k, n), k.arena + self.dx_sums
        # a part of a kernel row that the registers hold, and a filter
        for first, width, times in chunks(row // k.lanes, most_vectors(k.target.registers)):
            with k.loop(conv.kernel[0]) as i, k.loop(times) as t, k.loop(filters) as f:
                at = k.scaled(t, width * k.lanes, first * k.lanes)
                packed, gradient = (
                    (k.arena + part).at(i, round_up(filters, k.lanes) * row).at(f, row).at(at)
                    for part in (self.packed, self.gradients)
                )
                operands = x.at(i, conv.x.row).at(at), sums.at(i, conv.x.row).at(at)
                # its events of this block
                values, places = ((k.arena + part).at(f, size) for part in (self.values, self.places))
                count = k.builder.load((k.arena + self.counts).at(f, 2).value(INDEX), align=4)
                starts = [v * k.lanes for v in range(width)]
                EventList(count, values, places).follow(
                    k, [(start, k.lanes) for start in starts], operands,
                    [packed + start for start in starts], [gradient + start for start in starts],
                )  # fmt: skip

    def _copy(self, k: Emitter, n: ir.Value) -> None:
        """dx = what was added up, 0 where x is not positive if so asked."""
        x = self.sum.x
        placed = (replace(x, offset=self.dx_sums), INDEX(0)), (self.needed_dx, n), (x, n)
        pass_gradient(k, vectors_of(k, *placed[: 3 if self.input_rectified else 2]))

    def _turn(self, k: Emitter, panelled: Pointer, packed: Pointer, back: bool) -> None:
        """packed[i, f, j] = panelled[(i, j), f], what rounds up a run 0; or, back, add the former to the latter."""
        panels, run, row = self.sum.panels, self._run, self._row(k.lanes)
        # a panel of filters, a kernel row of it, blocks of lanes x lanes, transposed there or back
        for panel in panels.each(k):
            unit = panel.unit
            with k.loop(self.sum.kernel[0]) as i:
                column = panel.at(panelled).at(i, run * unit)
                place = packed.at(i, round_up(panels.outputs, k.lanes) * row)
                place = place.at(k.builder.mul(panel.vector, INDEX(k.lanes)), row)
                for number, valid in k.vectors(run):
                    at = k.builder.mul(number, INDEX(k.lanes))
                    for v in range(panel.width):
                        lines, turned = column.at(at, unit) + v * k.lanes, place.at(at) + v * k.lanes * row
                        if back:
                            rows = k.transpose([k.load(turned + f * row) for f in range(k.lanes)])
                            for j, value in enumerate(rows[:valid]):
                                k.store(k.add(k.load(lines + j * unit), value), lines + j * unit)
                        else:
                            rows = [k.load(lines + j * unit) if j < valid else k.zero() for j in range(k.lanes)]
                            for f, value in enumerate(k.transpose(rows)):
                                k.store(value, turned + f * row)


def block_cells(lanes: int) -> int:
    return max(BLOCK, lanes)


def most_vectors(registers: int) -> int:
    """Return the vectors of weights that stay in registers: each has a gradient, and there are two values more."""
    return (registers - 3) // 2
