"""`winograd`: a 3 x 3 or 5 x 5 convolution, channels in the lanes, by Winograd's F(4x4, 3x3) or F(2x2, 5x5).

A *tile* of 4 x 4 outputs of a channel, or 2 x 2, sees 6 x 6 pixels. With both transformed, patch and weights, each of
36 places needs one product a channel and no place needs another, in place of 144 or 100. So a convolution is 36 matrix
products, of tiles x channels with channels x filters, between a transformation of the patches and one back (Lavin and
Gray 2016, "Fast Algorithms for Convolutional Neural Networks"). All go by blocks of tiles that stay in L2; or, where
it is the weights that do not, by pieces of those, each with the tiles of several images.

The gradient of the weights is turned round: for each place a sum over tiles of x times d, both transformed, and back.
The last tile of rows or columns that tiles do not fill lies over the one before: both store, and a gradient counts one.

Gain: many channels, see docs/benchmarks.md. By pieces VGG-11 at batch 16 takes 0.48 of the time.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import numpy as np
from llvmlite import ir

from cnnexp.backends.parts import BACKWARD, FORWARD, TRANSFORMED
from cnnexp.backends.simd.algorithms.convolution.channels import Channels, Sum, Turn, panel_width
from cnnexp.backends.simd.algorithms.cost import L3_BYTES, Work, bring, passes, product_gradient, product_sums
from cnnexp.backends.simd.algorithms.linear.product import Panel, Steps, add_products, most_height
from cnnexp.backends.simd.compiler.emit import INDEX, LINE_FLOATS, Emitter, Kernels, Pointer, Target, chunks
from cnnexp.backends.simd.layouts import NHWC, Layout, odd_lines, round_up

LINE = 6
"""Pixels in a row that a tile sees, and places of it transformed."""

PLACES = LINE**2

POINTS = (0.0, 0.75, -0.75, 1.5, -1.5)
"""Where polynomials are evaluated, besides at infinity. These are short binary fractions, and round less than the usual
ones, with 1 and 2: the gradients' errors are 1.7 times those of a direct convolution, 2.0 with 5 x 5."""

SCALES = [*(1 / math.prod(x - y for y in POINTS if y != x) for x in POINTS), 1]
OUTPUTS = {n: [*([x**i for i in range(n)] for x in POINTS), [*[0.0] * (n - 1), 1.0]] for n in range(2, LINE)}
WEIGHTS = {n: [[by * x for x in row] for by, row in zip(SCALES, OUTPUTS[n], strict=True)] for n in (3, 5)}
INPUTS = [[*np.poly([y for y in POINTS if y != x])[::-1], 0.0] for x in POINTS] + [[*np.poly(POINTS)[::-1]]]
"""A by the side of a tile, G by that of the kernel, and B transposed (Lavin and Gray, section 4; Cook and Toom)."""

CACHED_PART = 4
"""One over the part of L2 that a block's tiles take, transformed and multiplied."""

LARGE = 2
"""How much larger than L2 transformed weights must be to go by pieces."""

FEWEST_CHANNELS = 16
"""Channels of a piece of the weights, at least: so many products are added to sums that come from memory."""

Vectors = Sequence[ir.Value]
Images = tuple[ir.Value, ir.Value]  # the first, and the one past the last
Matrix = Sequence[Sequence[float]]


class Winograd(Channels):
    """3 x 3 or 5 x 5 convolution of stride 1 by Winograd's algorithm."""

    algorithm = "winograd"

    def fits(self, target: Target) -> bool:
        layer, sides = self.stage.layer, (*self.stage.input_shape[:2], *self.stage.output_shape[:2])
        tiled = not self.pool or self.pool.window.size == self.pool.window.stride == 2
        fits = super().fits(target) and layer.kernel in WEIGHTS and layer.stride == 1
        return fits and tiled and min(sides) > LINE - layer.kernel

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        (height, width, channels), filters = self.stage.input_shape, self.stage.layer.filters
        found = super().work(target, images, needs_dx)
        if "backward_weights" in found:
            found["backward_weights"] = self._tiling(target, images).gradient(self._width(target), images)
        if "backward_input" in found:
            kernel, wide = self.stage.layer.kernel, panel_width((height, width), 1, channels, target)
            packing = (math.log2(target.lanes) + 2) * kernel**2 * channels * filters / target.lanes / images
            tiling = Tiling((height, width), kernel, False, (filters, channels), target, wide, images)
            back = tiling.sums(images)
            found["backward_input"] = Work(back.macs, back.cycles + packing, back.tile)
        return found

    def forward_work(self, target: Target, images: int) -> Work:
        return self._tiling(target, images).sums(images)

    def _width(self, target: Target) -> int:
        return panel_width((self.shape[0], self.shape[1]), self.window, self.stage.layer.filters, target)

    def _tiling(self, target: Target, images: int) -> Tiling:
        sizes, kernel = (self.stage.input_shape[2], self.stage.layer.filters), self.stage.layer.kernel
        counts, pooled = (self.shape[0], self.shape[1]), self.pool is not None
        return Tiling(counts, kernel, pooled, sizes, target, self._width(target), images)

    def computed(self, what: str) -> Fraction:
        if self.follows and what == BACKWARD:
            return super().computed(what)
        passes = [self.transformed] if what == FORWARD or not self.dx else [self.transformed, self.back]
        tiles = sum(math.prod(part.tiling.counts) for part in passes)
        direct = self.stage.layer.kernel**2 * math.prod(self.stage.output_shape[:2])
        return Fraction(PLACES * tiles, direct * len(passes))

    def fewer(self, what: str) -> str:
        return super().fewer(what) or TRANSFORMED

    def prepare(self, plan: Layout) -> None:
        super().prepare(plan)
        self.transformed = WinogradPass(plan, self.sum)
        if self.dx and not self.follows:
            _, _, conv = self.phases[0]
            self.back = WinogradPass(plan, conv, after=conv.panels.rows * conv.panels.width * plan.target.lanes)

    def setup(self, plan: Layout) -> Kernels:
        at = plan.parameters.offset(self.stage.weight)
        return [("weights", lambda k: self.transformed.transform_weights(k, k.parameters + at))]

    def conv2d(self, k: Emitter, conv: Sum, weights: Pointer, bias: Pointer | None, turn: Turn | None = None) -> None:
        (self.transformed if conv is self.sum else self.back).conv2d(k, weights, bias, turn)

    def conv2d_backward_weights(self, k: Emitter, dw: Pointer) -> None:
        self.transformed.conv2d_backward_weights(k, self.d, dw)


class Tiling:
    """How a pass goes over an image, to (U, V) outputs, or to as many windows of which each is a tile.

    Attributes:
        side: of a tile of outputs. counts: rows and columns of tiles. channels, filters: C, F.
        rows: of tiles in a block. images: at most in a block, which brings the weights, or their sums, once; 1 where a
            block is part of an image.
        block: tiles of an image in a block. blocks: of an image; the last one may be smaller.
        by_panel: whether products go by pieces of the weights, `piece` channels of a panel: each is transformed, used
            for all tiles of a block of whole images, which L3 holds, and dropped. Otherwise all weights are transformed
            once, leave L2, and are read again for every block.

    Args:
        width: vectors of a panel. images: of a step, at most. parts: of a kernel that share the blocks.
    """

    def __init__(
        self,
        counts: tuple[int, int],
        kernel: int,
        pooled: bool,
        sizes: tuple[int, int],
        target: Target,
        width: int,
        images: int,
        parts: int = 1,
    ) -> None:
        self.side, (channels, filters) = LINE - kernel + 1, sizes
        cells = self.side // 2 if pooled else self.side
        self.counts = -(-counts[0] // cells), -(-counts[1] // cells)
        self.channels, self.filters, self.target = channels, filters, target
        row, held = 4 * PLACES * self.counts[1] * (channels + filters), target.l2_bytes // CACHED_PART
        self.rows = chunks(self.counts[0], max(1, min(held // row, -(-self.counts[0] // parts))))[0][1]
        self.images = max(1, 2 * held // (row * self.counts[0]))
        self.by_panel = False
        unit, self.piece = width * target.lanes, min(channels, FEWEST_CHANNELS)
        while 8 * PLACES * self.piece * unit <= held and self.piece < channels:
            self.piece *= 2
        self._taps, self._weights = kernel**2 * channels * filters, PLACES * channels * filters
        self._panel, self._piece = PLACES * channels * unit, PLACES * self.piece * unit
        self._set_block()
        if filters % target.lanes == 0 and 4 * self._weights > LARGE * target.l2_bytes:
            by_block = copy.copy(self)
            self.rows, self.by_panel = self.counts[0], True
            self._set_block()
            self.images = max(1, min(images, L3_BYTES // 2 // (4 * PLACES * self.block * channels)))
            if not self.is_faster(by_block, images):
                vars(self).update(vars(by_block))

    def is_faster(self, other: Tiling, images: int) -> bool:
        """Whether outputs take fewer cycles than another way over the same image."""
        return self.sums(images).cycles < other.sums(images).cycles

    def _set_block(self) -> None:
        self.block, self.blocks = self.rows * self.counts[1], self.counts[0] / self.rows

    def _moves(self, images: int) -> float:
        """Return the cycles of transforming a block of so many images' tiles, and of transforming back."""
        rows = round_up(self.channels, self.target.lanes) + round_up(self.filters, self.target.lanes)
        floats = PLACES * images * self.block * rows
        # what is written past a cache is read by it first
        return passes(floats, 2, self.target, streams=1 + self.by_panel).cycles

    def _weight_moves(self, images: int) -> float:
        """Return the cycles of transforming the weights, or back, for each image: once in a step, or by every block."""
        if not self.by_panel:
            return passes(self._weights, 3, self.target).cycles / images
        pieces = self._weights / self._piece * passes(self._piece, 3, self.target).cycles
        return (bring(self._taps, 4 * self._taps, self.target) + pieces) / chunks(images, self.images)[0][1]

    def _brought(self, together: int) -> float:
        """Return the cycles of bringing what a block's products take from beyond L1: weights, and by panels inputs."""
        held = self._piece if self.by_panel and not self.target.forward_only else self._weights
        inputs = PLACES * together * self.block * self.channels
        again = bring(self._weights / self._panel * inputs, 4 * inputs, self.target) if self.by_panel else 0
        return bring(self._weights, 4 * held, self.target) + again

    def sums(self, images: int) -> Work:
        """Return the work of outputs from inputs."""
        together = chunks(images, self.images)[0][1]
        pieces = -(-self.channels // self.piece) if self.by_panel else 0
        tiles = (1, together * self.block)
        product = product_sums(tiles, 1, self.filters, self.channels, self.target, 1 + 2 * pieces)
        blocks = self.blocks / together
        cycles = blocks * (max(PLACES * product.cycles, self._brought(together)) + self._moves(together))
        cycles += 0 if self.target.forward_only else self._weight_moves(images)
        macs, tile = PLACES * blocks * product.macs, f"{product.tile} for each of {PLACES} places"
        return Work(macs, cycles, tile)

    def gradient(self, width: int, images: int) -> Work:
        """Return the work of the weights' gradient, for panels of `width` vectors."""
        together = chunks(images, self.images)[0][1]
        terms = together * self.block
        held = 4 * terms * (self.channels + self.filters)
        product = product_gradient(self.channels, PLACES, self.filters, width, (1, terms), held, self.target)
        block = max(product.cycles, 2 * self._brought(together)) + self._moves(together)
        blocks = self.blocks / together
        cycles = blocks * block + self._weight_moves(images)
        return Work(blocks * product.macs, cycles, f"{product.tile} for each of {PLACES} places")


class Tile(NamedTuple):
    """A tile at run time: its image, row and column; its first output; its number in the block."""

    n: ir.Value
    u: ir.Value
    v: ir.Value
    corner: tuple[ir.Value, ir.Value]
    number: ir.Value


class WinogradPass:
    """The geometry of one pass.

    Args:
        conv: as without Winograd, stride 1, and windows of 2 x 2 if any.
        plan: whose arena's room for a kernel holds the transformed weights, or their gradient, [place][panels].
            In `predict` all threads share the weights. By panels: a piece of them, all inputs, a panel's outputs.
        after: floats of that room that hold a panel of the weights themselves, turned.

    Attributes:
        kernel: its side. tiling, by_panel: see `Tiling`. cell: pixels from window to window. sides: (U, V) in pixels.
        together: images in a block. panels: of the weights of one place (C, F). kept: where they have their room.
        inputs, outputs: so many floats into the room lie the block's tiles, [place][tile][channel] and
            [place][tile][filter].
        strides: floats from place to place of weights, inputs and outputs.
        input_row, output_row: floats of a transformed tile's channels, and of its filters.
    """

    def __init__(self, plan: Layout, conv: Sum, after: int = 0) -> None:
        arena, target, channels, filters = plan.arena, plan.target, conv.x.shape[2], conv.panels.outputs
        self.conv, self.arena, self.panels = conv, arena, replace(conv.panels, rows=channels)
        self.kernel, pooled = conv.kernel[0], conv.windows is not None
        sizes, width = (channels, filters), conv.panels.width
        self.tiling = Tiling(conv.counts, self.kernel, pooled, sizes, target, width, plan.share, conv.parts)
        self.by_panel = self.tiling.by_panel
        self.cell, self.together = 2 if conv.windows else 1, chunks(plan.share, self.tiling.images)[0][1]
        self.sides = conv.counts[0] * self.cell, conv.counts[1] * self.cell
        tiles = self.together * self.tiling.block + target.registers  # the last sums are of as many rows as all
        self.kept = plan.parameters.reserve(PLACES * odd_lines(self.panels.size)) if target.forward_only else None
        weights = odd_lines(self.panels.size)
        if self.by_panel:
            filters = width * target.lanes
            weights = weights if self.kept else odd_lines(self.tiling.piece * filters)
        self.input_row, self.output_row = (round_up(row, target.lanes) for row in (channels, filters))
        inputs, outputs = odd_lines(tiles * self.input_row), odd_lines(tiles * self.output_row)
        self.strides = weights, inputs, outputs
        self.inputs = 0 if self.kept else PLACES * weights
        self.outputs = self.inputs + PLACES * inputs
        self.after = round_up(after, LINE_FLOATS)
        arena.share(self.after + self.outputs + PLACES * outputs)

    def room(self, k: Emitter) -> Pointer:
        return k.own + self.arena.shared + self.after

    def weights(self, k: Emitter) -> Pointer:
        return k.parameters + self.kept if self.kept else self.room(k)

    def at(self, k: Emitter, place: ir.Value, bases: Sequence[Pointer] = ()) -> list[Pointer]:
        """Return where weights, inputs and outputs of a place lie: all, or those whose first place is given."""
        bases = bases or (self.weights(k), self.room(k) + self.inputs, self.room(k) + self.outputs)
        return [base.at(place, stride) for base, stride in zip(bases, self.strides, strict=False)]

    def conv2d(self, k: Emitter, weights: Pointer, bias: Pointer | None, turn: Turn | None = None) -> None:
        """Fill conv.y (and the argmax)."""
        if not (self.kept or self.by_panel):
            self.transform_weights(k, weights, turn)
        (rows, _), parts = self.tiling.counts, self.conv.parts
        add = partial(self._multiply_tiles, most=self.together * self.tiling.block, new=False)
        # some images, of them some rows of tiles
        for images in k.blocks(self.together):
            for start, block in k.chunks(rows, self.tiling.rows, 1 if self.by_panel else parts):
                self._transform_inputs(k, images, start, block)
                tiles = self._tiles(k, images, images[1], block)
                if not self.by_panel:
                    # apart from what the transformations keep in registers
                    k.call(f"products{block}", partial(self._multiply, rows=block), tiles)
                    self._transform_back(k, images, start, block, bias)
                    continue
                # a panel of filters: sums of products by pieces of its weights, each transformed before; its outputs
                for panel in self.panels.each(k, parts):
                    source = None if self.kept else self._source(panel, weights, turn)
                    k.clear(self.room(k) + self.outputs, PLACES * self.strides[2] // k.lanes)
                    for channel, size in k.chunks(self.panels.rows, self.tiling.piece):
                        if source:
                            self._transform_piece(k, panel, source, self.room(k), channel, size)
                        self._call_for_piece(k, add, tiles, panel, channel, size)
                    self._transform_back(k, images, start, block, bias, panel)

    def _call_for_piece(
        self, k: Emitter, do: Callable[..., None], tiles: ir.Value, panel: Panel, channel: ir.Value, size: int
    ) -> None:
        """Call do(k, (width, size), tiles, where weights, inputs and outputs lie) for each place of a piece, apart."""
        room, width = self.room(k), panel.width
        weights = panel.at(self.weights(k)).at(channel, panel.unit) if self.kept else room

        def run(k: Emitter, tiles: ir.Value) -> None:
            with k.loop(PLACES) as place:
                do(k, (width, size), tiles, self.at(k, place, k.buffers))

        k.call(f"piece{width}x{size}", run, tiles, (weights, (room + self.inputs).at(channel), room + self.outputs))

    def _tiles(self, k: Emitter, images: Images, n: ir.Value, rows: int) -> ir.Value:
        """Return the number of the image's first tile, where a block of so many rows has some images."""
        return k.builder.mul(k.builder.sub(n, images[0]), INDEX(rows * self.tiling.counts[1]))

    def transform_weights(self, k: Emitter, weights: Pointer, turn: Turn | None = None) -> None:
        """Fill the transformed weights."""
        for panel in self.panels.each(k):
            source, target = self._source(panel, weights, turn), panel.at(self.weights(k))
            self._transform_piece(k, panel, source, target, INDEX(0), self.panels.rows)

    def _source(self, panel: Panel, weights: Pointer, turn: Turn | None) -> Pointer:
        """Return where a panel's weights lie, once they are turned, if they are to be."""
        if turn:
            turn(panel, weights)
        return weights if turn else replace(panel, panels=self.conv.panels).at(weights)

    def _transform_piece(
        self, k: Emitter, panel: Panel, source: Pointer, target: Pointer, first: ir.Value, size: int
    ) -> None:
        """Transform a panel's weights, `size` channels from `first` on, to `target`."""
        channels, unit = self.panels.rows, panel.unit
        source = source.at(first, unit)
        # a channel, a vector of filters: the taps to 6 x 6 places
        with k.loop(size) as c, k.loop(panel.width) as v:
            taps, place = (pointer.at(c, unit).at(v, k.lanes) for pointer in (source, target))
            strides = self.kernel * channels * unit, channels * unit
            _expand_square(k, WEIGHTS[self.kernel], taps, strides, place, self.strides[0])

    def _each_tile(self, k: Emitter, images: Images, start: ir.Value, rows: int) -> Iterator[Tile]:
        """Run what follows for every tile of some rows of some images."""
        columns = self.tiling.counts[1]
        with k.loop(images[1], start=images[0]) as n:
            first = self._tiles(k, images, n, rows)
            with k.loop(rows) as a, k.loop(columns) as v:
                u, number = k.builder.add(start, a), k.builder.add(k.scaled(a, columns, 0), v)
                yield Tile(n, u, v, self._corner(k, u, v), k.builder.add(first, number))

    def _transform_inputs(self, k: Emitter, images: Images, start: ir.Value, rows: int) -> None:
        """Transform the patches of some rows of tiles of some images."""
        x = self.conv.x
        for tile in self._each_tile(k, images, start, rows):
            first = self.conv.corner(k, tile.n).at(tile.corner[0], x.row).at(tile.corner[1], x.column)
            place = (self.room(k) + self.inputs).at(tile.number, self.input_row)
            with k.loop(self.input_row // k.lanes) as c:
                patch, target = (k.opaque(pointer.at(c, k.lanes)) for pointer in (first, place))
                _expand_square(k, INPUTS, patch, (x.row, x.column), target, self.strides[1])

    def _corner(self, k: Emitter, u: ir.Value, v: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the row and column of a tile's first output."""
        corner = []
        for at, side in zip((u, v), self.sides, strict=True):
            first = k.builder.mul(at, INDEX(self.tiling.side))
            corner.append(k.least(first, INDEX(side - self.tiling.side)) if side % self.tiling.side else first)
        return corner[0], corner[1]

    def _multiply(self, k: Emitter, tiles: ir.Value, rows: int) -> None:
        """Fill the products of a block's tiles, `rows` rows an image, and of what fills up the last registers."""
        most = self.together * rows * self.tiling.counts[1]
        # one product a place: tiles x channels times channels x filters
        with k.loop(PLACES) as place:
            weights, inputs, products = self.at(k, place)
            for panel in self.panels.each(k):
                bases = panel.at(weights), inputs, panel.outputs(products)
                self._multiply_tiles(k, (panel.width, self.panels.rows), tiles, bases, most, new=True)

    def _multiply_tiles(
        self, k: Emitter, sizes: tuple[int, int], tiles: ir.Value, bases: Sequence[Pointer], most: int, new: bool
    ) -> None:
        """Fill one place's sums, or add to them; `sizes`: vectors of weights, channels. most: tiles."""
        (width, size), (weights, inputs, sums) = sizes, bases
        row, output_row, steps = self.input_row, self.output_row, Steps(1, size, (0, 1), (0, width * k.lanes))
        height = chunks(most, most_height(width, k.target.registers))[0][1]
        with k.loop(k.builder.udiv(k.builder.add(tiles, INDEX(height - 1)), INDEX(height))) as i:
            tile = k.builder.mul(i, INDEX(height))
            # all lanes: what rounds up the filters is 0
            with k.sums(k.grid(sums.at(tile, output_row), height, output_row, width), new) as totals:
                add_products(k, totals, inputs.at(tile, row), [m * row for m in range(height)], weights, steps)

    def _vectors(self, k: Emitter, tile: Tile, panel: Panel | None) -> Iterator[tuple[Panel, Pointer]]:
        """Run what follows for every vector of filters, or of those of a panel: which, and where a tile's lies."""
        row = (self.room(k) + self.outputs).at(tile.number, self.output_row)
        if panel is None:
            for one in replace(self.panels, width=1).each(k):
                yield one, k.opaque(one.outputs(row))
            return
        with k.loop(panel.width) as v:
            one = replace(panel, vector=k.builder.add(panel.vector, v), width=1, valid=[k.lanes])
            yield one, k.opaque(row.at(v, k.lanes))

    def _transform_back(
        self, k: Emitter, images: Images, start: ir.Value, rows: int, bias: Pointer | None, only: Panel | None = None
    ) -> None:
        """Store the outputs of some rows of tiles of some images: all filters, or those of a panel."""
        conv, cell, side, apart = self.conv, self.cell, self.tiling.side, self.conv.parts > 1
        # a tile, a vector of filters: 6 x 6 places to the outputs
        for tile in self._each_tile(k, images, start, rows):
            for panel, made_of in self._vectors(k, tile, only):
                made = _both_ways(k, _contract, OUTPUTS[side], _load_square(k, made_of, self.strides[2]))
                # where the last tile overlaps one that another part may do, what that one stores counts
                is_first = k.builder.icmp_signed("==", tile.corner[0], k.builder.mul(tile.u, INDEX(side)))
                # its pixels, or windows of the pool
                place = tile.n, *(k.builder.udiv(at, INDEX(cell)) for at in tile.corner)
                for i in range(0, side, cell):
                    cells = {
                        (i // cell, j // cell): [[value] for line in made[i : i + cell] for value in line[j : j + cell]]
                        for j in range(0, side, cell)
                    }
                    with k.builder.if_then(is_first) if apart and i < -self.sides[0] % side else nullcontext():
                        conv.finish(k, cells, bias, panel, place)

    def conv2d_backward_weights(self, k: Emitter, d: NHWC, dw: Pointer) -> None:
        """dw += sum over pixels of x * d, packed as the weights."""
        fill = partial(self._multiply_channels, new=True)
        # no sum yet
        if not self.by_panel:
            k.clear(self.room(k), PLACES * self.strides[0] // k.lanes)
        # some images, of them some rows of tiles
        for images in k.blocks(self.together):
            for start, block in k.chunks(self.tiling.counts[0], self.tiling.rows):
                # inputs and gradients transformed, and multiplied place by place
                self._transform_inputs(k, images, start, block)
                tiles = self._tiles(k, images, images[1], block)
                if not self.by_panel:
                    self._transform_gradient(k, d, images, start, block)
                    k.call("products", self._add_outer_products, tiles)
                    continue
                # a panel of filters: its gradients; by pieces of its weights sums of products, each transformed back
                for panel in self.panels.each(k):
                    self._transform_gradient(k, d, images, start, block, panel)
                    for channel, size in k.chunks(self.panels.rows, self.tiling.piece):
                        self._call_for_piece(k, fill, tiles, panel, channel, size)
                        self._add_piece(k, dw, panel, self.room(k), channel, size)
        # the sums transformed back, once
        for panel in () if self.by_panel else self.panels.each(k):
            self._add_piece(k, dw, panel, panel.at(self.room(k)), INDEX(0), self.panels.rows)

    def _transform_gradient(
        self, k: Emitter, d: NHWC, images: Images, start: ir.Value, rows: int, only: Panel | None = None
    ) -> None:
        """Likewise the outputs' gradients: of all filters, or those of a panel."""
        side = self.tiling.side
        for tile in self._each_tile(k, images, start, rows):
            # where a tile overlaps the one before, what that one has counted is 0
            starts = [k.builder.mul(at, INDEX(side)) for at in (tile.u, tile.v)]
            counted = [k.builder.icmp_signed("!=", *pair) for pair in zip(starts, tile.corner, strict=True)]
            for panel, target in self._vectors(k, tile, only):
                source = k.opaque(panel.outputs(d.pixel(k, tile.n, *tile.corner)))
                # the gradients to 6 x 6 places
                square = [[k.zero()] * side for _ in range(side)]
                for i, j in itertools.product(range(side), range(side)):
                    square[i][j] = k.load_part(source + (i * d.row + j * d.column), panel.valid[0])
                    for before, at, pixels in zip(counted, (i, j), self.sides, strict=True):
                        if at < -pixels % side:
                            square[i][j] = k.select(before, k.zero(), square[i][j])
                for place, value in enumerate(itertools.chain(*_both_ways(k, _expand, OUTPUTS[side], square))):
                    k.store(value, target + place * self.strides[2])

    def _add_outer_products(self, k: Emitter, tiles: ir.Value) -> None:
        """Add inputs times outputs to the sums, tile by tile."""
        # one product a place: channels x tiles times tiles x filters
        with k.loop(PLACES) as place:
            sums, inputs, outputs = self.at(k, place)
            for panel in self.panels.each(k):
                bases = panel.at(sums), inputs, panel.outputs(outputs)
                self._multiply_channels(k, (panel.width, self.panels.rows), tiles, bases, new=False)

    def _multiply_channels(
        self, k: Emitter, sizes: tuple[int, int], tiles: ir.Value, bases: Sequence[Pointer], new: bool
    ) -> None:
        """Fill one place's sums, or add to them; `sizes`: vectors of weights, channels."""
        (width, size), (sums, inputs, outputs) = sizes, bases
        unit, steps = width * k.lanes, Steps(1, tiles, (0, self.input_row), (0, self.output_row))
        for r, height in k.chunks(size, most_height(width, k.target.registers)):
            with k.sums(k.grid(sums.at(r, unit), height, unit, width), new) as totals:
                add_products(k, totals, inputs.at(r), range(height), outputs, steps)

    def _add_piece(self, k: Emitter, dw: Pointer, panel: Panel, sums: Pointer, first: ir.Value, size: int) -> None:
        """Add the sums of a panel's weights, `size` channels from `first` on, transformed back, to the gradient."""
        channels, unit = self.panels.rows, panel.unit
        target = replace(panel, panels=self.conv.panels).at(dw).at(first, unit)
        # a channel, a vector of filters: 6 x 6 places to the taps
        with k.loop(size) as c, k.loop(panel.width) as v:
            places = _load_square(k, sums.at(c, unit).at(v, k.lanes), self.strides[0])
            for i, value in enumerate(itertools.chain(*_both_ways(k, _contract, WEIGHTS[self.kernel], places))):
                tap = target.at(c, unit).at(v, k.lanes) + i * channels * unit
                k.store(k.add(k.load(tap), value), tap)


def _both_ways(
    k: Emitter, rule: Callable[[Emitter, Matrix, Vectors], Vectors], matrix: Matrix, square: Sequence[Vectors]
) -> list[Vectors]:
    """Transform every column, and then every row."""
    columns = [rule(k, matrix, column) for column in zip(*square, strict=True)]
    return [rule(k, matrix, row) for row in zip(*columns, strict=True)]


def _sum(k: Emitter, factors: Iterable[float], vectors: Iterable[ir.Value]) -> ir.Value:
    """Return the sum of factors times vectors."""
    terms = [(factor, vector) for factor, vector in zip(factors, vectors, strict=True) if factor]
    (factor, total), *rest = sorted(terms, key=lambda term: term[0] != 1)
    total = total if factor == 1 else k.multiply(k.constant(factor), total)
    for factor, vector in rest:
        total = k.fma(k.constant(factor), vector, total)
    return total


def _expand(k: Emitter, matrix: Matrix, vectors: Vectors) -> Vectors:
    """Return the matrix times the vectors; rows of x and -x share their sums of even powers, and of odd ones."""
    first, last = (_sum(k, matrix[i], vectors) for i in (0, -1))
    pairs = [[_sum(k, matrix[i][odd::2], vectors[odd::2]) for odd in (0, 1)] for i in (1, 3)]
    return [first, *(value for pair in pairs for value in (k.add(*pair), k.subtract(*pair))), last]


def _contract(k: Emitter, matrix: Matrix, vectors: Vectors) -> Vectors:
    """Return the matrix transposed times the vectors."""
    first, *among, last = vectors
    pairs = [(k.add(*pair), k.subtract(*pair)) for pair in (among[:2], among[2:])]
    columns = zip(*(matrix[i] for i in (0, 1, 3, -1)), strict=True)
    return [_sum(k, column, (first, pairs[0][i % 2], pairs[1][i % 2], last)) for i, column in enumerate(columns)]


def _expand_square(
    k: Emitter, matrix: Matrix, source: Pointer, strides: tuple[int, int], target: Pointer, stride: int
) -> None:
    """Transform every column of a square, and then every row, by loops: unrolled is as fast, and takes LLVM longer."""
    count = len(matrix[0])
    with k.loop(count) as j:
        column = source.at(j, strides[1])
        for i, value in enumerate(_expand(k, matrix, [k.load(column + i * strides[0]) for i in range(count)])):
            k.store(value, target.at(j, stride) + i * LINE * stride)
    with k.loop(LINE) as i:
        line = target.at(i, LINE * stride)
        for j, value in enumerate(_expand(k, matrix, [k.load(line + j * stride) for j in range(count)])):
            k.store(value, line + j * stride)


def _load_square(k: Emitter, pointer: Pointer, stride: int) -> list[Vectors]:
    return [[k.load(pointer + (i * LINE + j) * stride) for j in range(LINE)] for i in range(LINE)]
