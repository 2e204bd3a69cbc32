"""`channels-argmax`: `channels`, with gradients through the argmax of the max-pool after it; see `argmax_gradient`.

A filter's weights do not fit the registers, so a part of a run stays there, with its gradient, while the events of a
block of cells go by; the block's part of x and dx stays in L1. For each image: the events of a block of cells, in a
list for every filter; for each part of the runs and each filter the events; then dx from its sums, which have a halo.

Gain: many channels before a max-pool. The second convolution of `two_conv_mlp` takes 151,215 cycles for 270,689.
"""

import math
from dataclasses import replace

import numpy as np
from llvmlite import ir

from cnnexp.backends.simd.algorithms.convolution.argmax_gradient import EventLists, list_events, spread_out
from cnnexp.backends.simd.algorithms.convolution.channels import Channels
from cnnexp.backends.simd.algorithms.cost import Work, events, passes
from cnnexp.backends.simd.algorithms.elementwise import pass_gradient
from cnnexp.backends.simd.compiler.emit import INDEX, Emitter, Pointer, Target, chunks
from cnnexp.backends.simd.layouts import Layout, round_up, vectors_of

BLOCK = 16
"""Cells of a block, at least a vector of them."""


class ChannelsArgmax(Channels):
    """Channels in lanes; gradients through the argmax of the max-pool after it alone.

    Attributes:
        block: cells of one. events: of those. row: floats from one packed kernel row to the next.
        dx_sums: where in the arena dx is added up, an image as x.
        packed, gradients: likewise the weights', [kernel row][filter][K * C, rounded up].
    """

    algorithm, follows = "channels-argmax", True

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        (height, width, channels), filters = self.stage.input_shape, self.stage.layer.filters
        layer, cells, kernel, run = self.stage.layer, math.prod(self.shape[:2]), self.stage.layer.kernel, self.run
        parts = -(-run // (target.lanes * most_vectors(target.registers)))
        cell_rows = -(-max(BLOCK, target.lanes) // self.shape[1])
        step = self.pool.window.stride * layer.stride if self.pool else 1
        reach = min(height, cell_rows * step + kernel)
        held = 8 * reach * width * channels
        following = events(cells, self.window, filters, kernel, run, kernel * parts, held, target)
        packing = (3 * math.log2(target.lanes) + 6) * kernel * run * filters / target.lanes / images
        cleared = passes(height * width * channels, 4, target).cycles
        backward = Work(following.macs, following.cycles + packing + cleared, following.tile)
        return {"forward": self.forward_work(target, images), "backward": backward}

    def prepare_backward(self, plan: Layout) -> None:
        arena, lanes, conv, windows = plan.arena, plan.arena.lanes, self.sum, self.windows
        assert windows is not None
        (rows, columns), size = conv.counts, max(BLOCK, lanes)
        self.block, self.row = size, round_up(self.run, lanes)
        blocks = np.split(np.arange(rows * columns), range(size, rows * columns, size))
        order = spread_out(blocks, 1 + -(-conv.kernel[1] // (windows.stride * conv.stride)))
        self.events = EventLists(arena, self, windows, conv.x, conv.stride, order, size)
        packed = conv.kernel[0] * round_up(conv.panels.outputs, lanes) * self.row
        self.dx_sums = arena.allocate(conv.x.stride)
        self.packed, self.gradients = arena.allocate(packed), arena.allocate(packed)

    def emit_backward(self, k: Emitter, plan: Layout) -> None:
        """dw, db += the gradient, packed as the weights; dx = the gradient."""
        (weights, _), (dw, db) = (plan.parameters.of(self.stage, at) for at in (k.parameters, k.gradients))
        conv, cells, size = self.sum, self.sum.counts[0] * self.sum.counts[1], self.block
        sums, gradients = k.arena + self.dx_sums, k.arena + self.gradients
        self._turn(k, weights, k.arena + self.packed, back=False)
        filters = round_up(conv.panels.outputs, k.lanes)
        k.clear(gradients, conv.kernel[0] * filters * self.row // k.lanes)
        with k.loop(k.count) as n:
            k.clear(sums, conv.x.stride // k.lanes)
            with k.loop(cells // size) as b:
                list_events(k, self.events, n, k.builder.mul(b, INDEX(size)), size, db)
                self._follow(k, n)
            if cells % size:
                list_events(k, self.events, n, INDEX(cells // size * size), cells % size, db)
                self._follow(k, n)
            # dx: what was added up, 0 where x is not positive if so asked
            placed = (replace(conv.x, offset=self.dx_sums), INDEX(0)), (self.needed_dx, n), (conv.x, n)
            pass_gradient(k, vectors_of(k, *placed[: 3 if self.input_rectified else 2]))
        self._turn(k, dw, gradients, back=True)

    def _follow(self, k: Emitter, n: ir.Value) -> None:
        """Run the listed events: part of the runs by part, filter by filter."""
        row, conv, filters = self.row, self.sum, self.sum.panels.outputs
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
                starts = range(0, width * k.lanes, k.lanes)
                parts = [(start, k.lanes, packed + start, gradient + start) for start in starts]
                self.events.of(k, f).follow(k, parts, operands)

    def _turn(self, k: Emitter, panelled: Pointer, packed: Pointer, back: bool) -> None:
        """packed[i, f, j] = panelled[(i, j), f], what rounds up a run 0; or, back, add the former to the latter."""
        panels, run, row = self.sum.panels, self.run, self.row
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


def most_vectors(registers: int) -> int:
    """Return the vectors of weights that stay in registers: each has a gradient, and there are two values more."""
    return (registers - 3) // 2
