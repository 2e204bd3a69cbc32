"""`winograd`: a 3 x 3 or 5 x 5 convolution, channels in the lanes, by Winograd's F(4x4, 3x3) or F(2x2, 5x5).

A *tile* of 4 x 4 outputs of a channel, or 2 x 2, sees 6 x 6 pixels. With both transformed, patch and weights, each of
36 places needs one product a channel and no place needs another, in place of 144 or 100. So a convolution is 36 matrix
products, of tiles x channels with channels x filters, between a transformation of the patches and one back (Lavin and
Gray 2016, "Fast Algorithms for Convolutional Neural Networks"). All go by blocks of tiles that stay in L2.

The gradient of the weights is the transformation turned round: a sum over tiles of x times d, both transformed, for
each place, and back once.

The last tile of rows or columns that tiles do not fill lies over the one before: what both compute is stored twice, and
counts once in a gradient.

Gain: many channels, see docs/benchmarks.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
from llvmlite import ir

from cnnexp.backends.parts import BACKWARD, FORWARD, TRANSFORMED
from cnnexp.backends.simd.algorithms.convolution.channels import Channels, Sum, panel_width
from cnnexp.backends.simd.algorithms.cost import Work, bring, passes, product_gradient, product_sums
from cnnexp.backends.simd.algorithms.linear.product import Steps, add_products, most_height
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

Vectors = Sequence[ir.Value]
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
            wide = panel_width((self.shape[0], self.shape[1]), self.window, filters, target)
            found["backward_weights"] = self._tiling(target).gradient(wide, images)
        if "backward_input" in found:
            kernel = self.stage.layer.kernel
            packing = (math.log2(target.lanes) + 2) * kernel**2 * channels * filters / target.lanes / images
            back = Tiling((height, width), kernel, False, (filters, channels), target).sums(images)
            found["backward_input"] = Work(back.macs, back.cycles + packing, back.tile)
        return found

    def forward_work(self, target: Target, images: int) -> Work:
        return self._tiling(target).sums(images)

    def _tiling(self, target: Target) -> Tiling:
        channels, filters = self.stage.input_shape[2], self.stage.layer.filters
        counts, kernel = (self.shape[0], self.shape[1]), self.stage.layer.kernel
        return Tiling(counts, kernel, self.pool is not None, (channels, filters), target)

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
            _, _, conv, _ = self.phases[0]
            self.back = WinogradPass(plan, conv, after=conv.panels.size)

    def setup(self, plan: Layout) -> Kernels:
        at = plan.parameters.offset(self.stage.weight)
        return [("weights", lambda k: self.transformed.transform_weights(k, k.parameters + at))]

    def conv2d(self, k: Emitter, conv: Sum, weights: Pointer, bias: Pointer | None) -> None:
        (self.transformed if conv is self.sum else self.back).conv2d(k, weights, bias)

    def conv2d_backward_weights(self, k: Emitter, dw: Pointer) -> None:
        self.transformed.conv2d_backward_weights(k, self.d, dw)


class Tiling:
    """How a pass goes over an image, to (U, V) outputs, or to as many windows of which each is a tile.

    Attributes:
        side: of a tile of outputs. counts: rows and columns of tiles. channels, filters: C, F.
        rows: of tiles in a block. images: at most in a block, which brings the weights, or their sums, once; 1 where a
            block is part of an image.
        block: tiles of an image in a block. blocks: of an image; the last one may be smaller.

    Args:
        parts: of a kernel that share the blocks.
    """

    def __init__(
        self, counts: tuple[int, int], kernel: int, pooled: bool, sizes: tuple[int, int], target: Target, parts: int = 1
    ) -> None:
        self.side, (channels, filters) = LINE - kernel + 1, sizes
        cells = self.side // 2 if pooled else self.side
        self.counts = -(-counts[0] // cells), -(-counts[1] // cells)
        self.channels, self.filters, self.target = channels, filters, target
        row = 4 * PLACES * self.counts[1] * (channels + filters)
        held = target.l2_bytes // CACHED_PART
        self.rows = chunks(self.counts[0], max(1, min(held // row, -(-self.counts[0] // parts))))[0][1]
        self.images = max(1, 2 * held // (row * self.counts[0]))
        self.block, self.blocks = self.rows * self.counts[1], self.counts[0] / self.rows

    def _moves(self, images: int) -> float:
        """Return the cycles of transforming a block of so many images' tiles, and of transforming back."""
        rows = round_up(self.channels, self.target.lanes) + round_up(self.filters, self.target.lanes)
        floats = PLACES * images * self.block * rows
        return passes(floats, 2, self.target, streams=1).cycles

    def _weight_moves(self, images: int) -> float:
        """Return the cycles of transforming the weights, or back, for each of the images of a step."""
        return passes(PLACES * self.channels * self.filters, 3, self.target).cycles / images

    def sums(self, images: int) -> Work:
        """Return the work of outputs from inputs."""
        together = chunks(images, self.images)[0][1]
        product = product_sums((1, together * self.block), 1, self.filters, self.channels, self.target, 1)
        weights, blocks = PLACES * self.channels * self.filters, self.blocks / together
        brought = bring(weights, 4 * weights, self.target)  # by every block
        cycles = blocks * (max(PLACES * product.cycles, brought) + self._moves(together))
        cycles += 0 if self.target.forward_only else self._weight_moves(images)
        macs, tile = PLACES * blocks * product.macs, f"{product.tile} for each of {PLACES} places"
        return Work(macs, cycles, tile)

    def gradient(self, width: int, images: int) -> Work:
        """Return the work of the weights' gradient, for panels of `width` vectors."""
        together = chunks(images, self.images)[0][1]
        terms, sums = together * self.block, PLACES * self.channels * self.filters
        held = 4 * terms * (self.channels + self.filters)
        product = product_gradient(self.channels, PLACES, self.filters, width, (1, terms), held, self.target)
        block = max(product.cycles, bring(2 * sums, 4 * sums, self.target)) + self._moves(together)
        blocks = self.blocks / together
        cycles = blocks * block + self._weight_moves(images)
        return Work(blocks * product.macs, cycles, f"{product.tile} for each of {PLACES} places")


class WinogradPass:
    """The geometry of one pass.

    Args:
        conv: as without Winograd, stride 1, and windows of 2 x 2 if any.
        plan: whose arena's room for a kernel holds the transformed weights, or their gradient, [place][panels].
            In `predict` the weights have room of their own.
        after: floats of that room that hold the weights themselves, turned.

    Attributes:
        kernel: its side. tiling: of an image in blocks. cell: pixels from window to window. sides: (U, V) in pixels.
        together: images in a block.
        panels: of the weights of one place (C, F). kept: where they have their room.
        inputs, outputs: so many floats into the room lie the block's tiles, [place][tile][channel] and
            [place][tile][filter].
        strides: floats from place to place of weights, inputs and outputs.
        input_row, output_row: floats of a transformed tile's channels, and of its filters.
    """

    def __init__(self, plan: Layout, conv: Sum, after: int = 0) -> None:
        arena, target, channels, filters = plan.arena, plan.target, conv.x.shape[2], conv.panels.outputs
        self.conv, self.arena, self.panels = conv, arena, replace(conv.panels, rows=channels)
        self.kernel, pooled = conv.kernel[0], conv.windows is not None
        self.tiling = Tiling(conv.counts, self.kernel, pooled, (channels, filters), target, conv.parts)
        self.cell, self.together = 2 if conv.windows else 1, chunks(plan.share, self.tiling.images)[0][1]
        self.sides = conv.counts[0] * self.cell, conv.counts[1] * self.cell
        tiles = self.together * self.tiling.block + target.registers  # the last sums are of as many rows as all
        weights = odd_lines(self.panels.size)
        self.input_row, self.output_row = (round_up(row, target.lanes) for row in (channels, filters))
        inputs, outputs = odd_lines(tiles * self.input_row), odd_lines(tiles * self.output_row)
        self.strides = weights, inputs, outputs
        self.kept = arena.allocate(PLACES * weights) if target.forward_only else None
        self.inputs = 0 if self.kept else PLACES * weights
        self.outputs = self.inputs + PLACES * inputs
        self.after = round_up(after, LINE_FLOATS)
        arena.share(self.after + self.outputs + PLACES * outputs)

    def room(self, k: Emitter) -> Pointer:
        return k.own + self.arena.shared + self.after

    def weights(self, k: Emitter) -> Pointer:
        return k.arena + self.kept if self.kept else self.room(k)

    def at(self, k: Emitter, place: ir.Value) -> list[Pointer]:
        """Return where weights, inputs and outputs of a place lie."""
        room = self.room(k)
        bases = self.weights(k), room + self.inputs, room + self.outputs
        return [base.at(place, stride) for base, stride in zip(bases, self.strides, strict=True)]

    def conv2d(self, k: Emitter, weights: Pointer, bias: Pointer | None) -> None:
        """Fill conv.y (and the argmax)."""
        if not self.kept:
            self.transform_weights(k, weights)
        # some images, of them some rows of tiles
        for first, last in k.blocks(self.together):
            for start, block in k.chunks(self.tiling.counts[0], self.tiling.rows, self.conv.parts):
                with k.loop(last, start=first) as n:
                    self._transform_inputs(k, n, start, block, self._tiles(k, first, n, block))
                # apart from what the transformations keep in registers
                k.call(f"products{block}", partial(self._multiply, rows=block), self._tiles(k, first, last, block))
                with k.loop(last, start=first) as n:
                    self._transform_back(k, n, start, block, self._tiles(k, first, n, block), bias)

    def _tiles(self, k: Emitter, first: ir.Value, n: ir.Value, rows: int) -> ir.Value:
        """Return the number of the image's first tile, where a block of so many rows begins with the image `first`."""
        return k.builder.mul(k.builder.sub(n, first), INDEX(rows * self.tiling.counts[1]))

    def transform_weights(self, k: Emitter, weights: Pointer) -> None:
        """Fill the transformed weights."""
        channels = self.panels.rows
        # a channel, a vector of filters: the taps to 6 x 6 places
        for panel in self.conv.panels.each(k):
            unit = panel.unit
            source, target = panel.at(weights), replace(panel, panels=self.panels).at(self.weights(k))
            with k.loop(channels) as c, k.loop(panel.width) as v:
                taps, place = (pointer.at(c, unit).at(v, k.lanes) for pointer in (source, target))
                strides = self.kernel * channels * unit, channels * unit
                _expand_square(k, WEIGHTS[self.kernel], taps, strides, place, self.strides[0])

    def _transform_inputs(self, k: Emitter, n: ir.Value, start: ir.Value, rows: int, tile: ir.Value) -> None:
        """Transform the patches of some rows of tiles, which take their places from `tile` on."""
        x, (_, columns), first = self.conv.x, self.tiling.counts, self.conv.corner(k, n)
        with k.loop(rows) as a, k.loop(columns) as v, k.loop(self.input_row // k.lanes) as c:
            top, left = self._corner(k, k.builder.add(start, a), v)
            corner = first.at(top, x.row).at(left, x.column).at(c, k.lanes)
            place = self._tile(self.room(k) + self.inputs, self.input_row, tile, a, v).at(c, k.lanes)
            _expand_square(k, INPUTS, k.opaque(corner), (x.row, x.column), k.opaque(place), self.strides[1])

    def _tile(self, first: Pointer, row: int, tile: ir.Value, a: ir.Value, v: ir.Value) -> Pointer:
        """Return where the tile (a, v) lies, `row` floats each, when (0, 0) is the tile with the number `tile`."""
        return first.at(tile, row).at(a, self.tiling.counts[1] * row).at(v, row)

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
        panels, row, output_row = self.panels, self.input_row, self.output_row
        # one product a place: tiles x channels times channels x filters
        with k.loop(PLACES) as place:
            weights, inputs, products = self.at(k, place)
            for panel in panels.each(k):
                steps = Steps(1, panels.rows, (0, 1), (0, panel.unit))
                height = chunks(most, most_height(panel.width, k.target.registers))[0][1]
                with k.loop(k.builder.udiv(k.builder.add(tiles, INDEX(height - 1)), INDEX(height))) as i:
                    tile = k.builder.mul(i, INDEX(height))
                    totals, places = [k.variables(panel.width) for _ in range(height)], [m * row for m in range(height)]
                    add_products(k, totals, inputs.at(tile, row), places, panel.at(weights), steps)
                    # all lanes: what rounds up the filters is 0
                    target = panel.outputs(products.at(tile, output_row))
                    k.store_all(totals, k.grid(target, height, output_row, panel.width))

    def _transform_back(
        self, k: Emitter, n: ir.Value, start: ir.Value, rows: int, tile: ir.Value, bias: Pointer | None
    ) -> None:
        """Store the outputs of some rows of tiles, whose places are from `tile` on."""
        conv, cell, side, apart = self.conv, self.cell, self.tiling.side, self.conv.parts > 1
        # a tile, a vector of filters: 6 x 6 places to the outputs
        with k.loop(rows) as a, k.loop(self.tiling.counts[1]) as v:
            u = k.builder.add(start, a)
            top, left = self._corner(k, u, v)
            row = self._tile(self.room(k) + self.outputs, self.output_row, tile, a, v)
            for panel in replace(self.panels, width=1).each(k):
                places = _load_square(k, k.opaque(panel.outputs(row)), self.strides[2])
                made = _both_ways(k, _contract, OUTPUTS[side], places)
                # where the last tile overlaps one that another part may do, what that one stores counts
                is_first = k.builder.icmp_signed("==", top, k.builder.mul(u, INDEX(side)))
                # its pixels, or windows of the pool
                place = n, *(k.builder.udiv(at, INDEX(cell)) for at in (top, left))
                for i in range(0, side, cell):
                    cells = {
                        (i // cell, j // cell): [[value] for line in made[i : i + cell] for value in line[j : j + cell]]
                        for j in range(0, side, cell)
                    }
                    with k.builder.if_then(is_first) if apart and i < -self.sides[0] % side else nullcontext():
                        conv.finish(k, cells, bias, panel, place)

    def conv2d_backward_weights(self, k: Emitter, d: NHWC, dw: Pointer) -> None:
        """dw += sum over pixels of x * d, packed as the weights."""
        tiling = self.tiling
        # no sum yet
        k.clear(self.room(k), PLACES * self.strides[0] // k.lanes)
        # some images, of them some rows of tiles
        for first, last in k.blocks(self.together):
            for start, block in k.chunks(tiling.counts[0], tiling.rows):
                # inputs and gradients transformed, and multiplied place by place
                with k.loop(last, start=first) as n:
                    tile = self._tiles(k, first, n, block)
                    self._transform_inputs(k, n, start, block, tile)
                    self._transform_gradient(k, d, n, start, block, tile)
                k.call("products", self._add_outer_products, self._tiles(k, first, last, block))
        # the sums transformed back, once
        self._add_weights(k, dw)

    def _transform_gradient(self, k: Emitter, d: NHWC, n: ir.Value, start: ir.Value, rows: int, tile: ir.Value) -> None:
        """Likewise the outputs' gradients."""
        side = self.tiling.side
        with k.loop(rows) as a, k.loop(self.tiling.counts[1]) as v:
            u = k.builder.add(start, a)
            corner = self._corner(k, u, v)
            # where a tile overlaps the one before, what that one has counted is 0
            starts = [k.builder.mul(at, INDEX(side)) for at in (u, v)]
            counted = [k.builder.icmp_signed("!=", *pair) for pair in zip(starts, corner, strict=True)]
            place = k.opaque(self._tile(self.room(k) + self.outputs, self.output_row, tile, a, v))
            for panel in replace(self.panels, width=1).each(k):
                source = k.opaque(panel.outputs(d.pixel(k, n, *corner)))
                # the gradients to 6 x 6 places
                square = [[k.zero()] * side for _ in range(side)]
                for i, j in itertools.product(range(side), range(side)):
                    square[i][j] = k.load_part(source + (i * d.row + j * d.column), panel.valid[0])
                    for before, at, pixels in zip(counted, (i, j), self.sides, strict=True):
                        if at < -pixels % side:
                            square[i][j] = k.select(before, k.zero(), square[i][j])
                _store_square(k, _both_ways(k, _expand, OUTPUTS[side], square), panel.outputs(place), self.strides[2])

    def _add_outer_products(self, k: Emitter, tiles: ir.Value) -> None:
        """Add inputs times outputs to the sums, tile by tile."""
        steps = Steps(1, tiles, (0, self.input_row), (0, self.output_row))
        # one product a place: channels x tiles times tiles x filters
        with k.loop(PLACES) as place:
            sums, inputs, outputs = self.at(k, place)
            for panel in self.panels.each(k):
                for r, height in panel.chunks(k, self.panels.rows):
                    target = panel.at(sums).at(r, panel.unit)
                    with k.sums(k.grid(target, height, panel.unit, panel.width)) as totals:
                        add_products(k, totals, inputs.at(r), range(height), panel.outputs(outputs), steps)

    def _add_weights(self, k: Emitter, dw: Pointer) -> None:
        """Add the sums, transformed back, to the gradient."""
        channels = self.panels.rows
        # a channel, a vector of filters: 6 x 6 places to the taps
        for panel in self.conv.panels.each(k):
            unit = panel.unit
            source, target = replace(panel, panels=self.panels).at(self.room(k)), panel.at(dw)
            with k.loop(channels) as c, k.loop(panel.width) as v:
                places = _load_square(k, source.at(c, unit).at(v, k.lanes), self.strides[0])
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


def _store_square(k: Emitter, square: Sequence[Vectors], pointer: Pointer, stride: int) -> None:
    for place, value in enumerate(itertools.chain(*square)):
        k.store(value, pointer + place * stride)
