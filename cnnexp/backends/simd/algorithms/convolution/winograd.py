"""`winograd`: a 3 x 3 convolution, channels in the lanes, by Winograd's F(2x2, 3x3): 16 products in place of 36.

Four outputs of a channel, a *tile* of 2 x 2, see 4 x 4 pixels. With both transformed, patch and weights, each of 16
places needs one product a channel and no place needs another, so a convolution is 16 matrix products, of tiles x
channels with channels x filters, between a transformation of the patches and one back (Lavin and Gray 2016, "Fast
Algorithms for Convolutional Neural Networks"). All go by blocks of tiles that stay in L2.

The gradient of the weights is the transformation turned round: a sum over tiles of x times d, both transformed, for
each place, and back once.

An image of an odd number of rows or columns has its last tile lie over the one before: what both compute is stored
twice, and counts once in a gradient.

Gain: many channels. All kernels of `strided` take 1.92 million cycles an image for 2.45 by `channels`; see
docs/benchmarks.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction

from llvmlite import ir

from cnnexp.backends.parts import BACKWARD, FORWARD, TRANSFORMED
from cnnexp.backends.simd.algorithms.convolution.channels import Channels, Sum, panel_width
from cnnexp.backends.simd.algorithms.cost import Work, bring, passes, product_gradient, product_sums
from cnnexp.backends.simd.algorithms.linear.product import Steps, add_products
from cnnexp.backends.simd.compiler.emit import INDEX, LINE_FLOATS, Emitter, Kernels, Pointer, Target, chunks
from cnnexp.backends.simd.layouts import NHWC, Arena, Layout, odd_lines, round_up

PLACES = 16
"""Of a transformed tile."""

CACHED_PART = 4
"""One over the part of L2 that a block's tiles take, transformed and multiplied."""

Vectors = Sequence[ir.Value]


class Winograd(Channels):
    """3 x 3 convolution of stride 1 by Winograd's algorithm."""

    algorithm = "winograd"

    def fits(self, target: Target) -> bool:
        layer, sides = self.stage.layer, (*self.stage.input_shape[:2], *self.stage.output_shape[:2])
        tiled = not self.pool or self.pool.window.size == self.pool.window.stride == 2
        return super().fits(target) and layer.kernel == 3 and layer.stride == 1 and tiled and min(sides) > 1

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        (height, width, channels), filters = self.stage.input_shape, self.stage.layer.filters
        found = super().work(target, images, needs_dx)
        if "backward_weights" in found:
            wide = panel_width((self.shape[0], self.shape[1]), self.window, filters, target)
            found["backward_weights"] = self._tiling(target).gradient(wide, images)
        if "backward_input" in found:
            packing = (math.log2(target.lanes) + 2) * 9 * channels * filters / target.lanes / images
            back = Tiling((height, width), False, filters, channels, target).sums(images)
            found["backward_input"] = Work(back.macs, back.cycles + packing, back.tile)
        return found

    def forward_work(self, target: Target, images: int) -> Work:
        return self._tiling(target).sums(images)

    def _tiling(self, target: Target) -> Tiling:
        channels, filters = self.stage.input_shape[2], self.stage.layer.filters
        return Tiling((self.shape[0], self.shape[1]), self.pool is not None, channels, filters, target)

    def computed(self, what: str) -> Fraction:
        if self.follows and what == BACKWARD:
            return super().computed(what)
        passes = [self.transformed] if what == FORWARD or not self.dx else [self.transformed, self.back]
        tiles = sum(math.prod(part.tiling.counts) for part in passes)
        return Fraction(PLACES * tiles, 9 * math.prod(self.stage.output_shape[:2]) * len(passes))

    def fewer(self, what: str) -> str:
        return super().fewer(what) or TRANSFORMED

    def prepare(self, plan: Layout) -> None:
        super().prepare(plan)
        self.transformed = WinogradPass(plan.arena, self.sum, plan.target)
        if self.dx and not self.follows:
            _, _, conv, _ = self.phases[0]
            self.back = WinogradPass(plan.arena, conv, plan.target, after=conv.panels.size)

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
        counts: rows and columns of tiles. channels, filters: C, F.
        rows: of tiles in a block. images: in a block of the weights' gradient, whose sums go to memory and back once a
            block; one where a block is part of an image.
        block: tiles of an image in a block. blocks: of an image; the last one may be smaller.

    Args:
        parts: of a kernel that share the blocks.
    """

    def __init__(
        self, counts: tuple[int, int], pooled: bool, channels: int, filters: int, target: Target, parts: int = 1
    ) -> None:
        self.counts = counts if pooled else (-(-counts[0] // 2), -(-counts[1] // 2))
        self.channels, self.filters, self.target = channels, filters, target
        row = 4 * PLACES * self.counts[1] * (channels + filters)
        held = target.l2_bytes // CACHED_PART
        self.rows = chunks(self.counts[0], max(1, min(held // row, -(-self.counts[0] // parts))))[0][1]
        self.images = max(1, 2 * held // (row * self.counts[0]))
        self.block, self.blocks = self.rows * self.counts[1], self.counts[0] / self.rows

    def _moves(self, images: int) -> float:
        """Return the cycles of transforming a block of so many images' tiles, and of transforming back."""
        floats = PLACES * images * self.block * (self.channels + self.filters)
        return passes(floats, 2, self.target, streams=1).cycles

    def _weight_moves(self, images: int) -> float:
        """Return the cycles of transforming the weights, or back, for each of the images of a step."""
        return passes(PLACES * self.channels * self.filters, 3, self.target).cycles / images

    def sums(self, images: int) -> Work:
        """Return the work of outputs from inputs."""
        product = product_sums((1, self.block), 1, self.filters, self.channels, self.target, 1)
        weights = PLACES * self.channels * self.filters
        brought = bring(weights, 4 * weights, self.target)  # by every block
        cycles = self.blocks * (max(PLACES * product.cycles, brought) + self._moves(1))
        cycles += 0 if self.target.forward_only else self._weight_moves(images)
        macs, tile = PLACES * self.blocks * product.macs, f"{product.tile} for each of {PLACES} places"
        return Work(macs, cycles, tile)

    def gradient(self, width: int, images: int) -> Work:
        """Return the work of the weights' gradient, for panels of `width` vectors."""
        together = min(images, self.images)
        terms, sums = together * self.block, PLACES * self.channels * self.filters
        held = 4 * terms * (self.channels + self.filters)
        product = product_gradient(self.channels, PLACES, self.filters, width, (1, terms), held, self.target)
        block = product.cycles + self._moves(together) + bring(2 * sums, 4 * sums, self.target)
        blocks = self.blocks / together
        cycles = blocks * block + self._weight_moves(images)
        return Work(blocks * product.macs, cycles, f"{product.tile} for each of {PLACES} places")


class WinogradPass:
    """The geometry of one pass.

    Args:
        conv: as without Winograd, 3 x 3 taps, stride 1, and windows of 2 x 2 if any.
        arena: whose room for a kernel holds the transformed weights, or their gradient, [place][panels].
            In `predict` the weights have room of their own.
        after: floats of that room that hold the weights themselves, turned.

    Attributes:
        tiling: how it goes over an image. panels: of the weights of one place (C, F). kept: where they have their room.
        inputs, outputs: so many floats into the room lie the block's tiles, [place][tile][channel] and
            [place][tile][filter].
        strides: floats from place to place of weights, inputs and outputs.
        input_row, output_row: floats of a transformed tile's channels, and of its filters.
    """

    def __init__(self, arena: Arena, conv: Sum, target: Target, after: int = 0) -> None:
        channels, filters = conv.x.shape[2], conv.panels.outputs
        self.conv, self.arena, self.panels = conv, arena, replace(conv.panels, rows=channels)
        self.tiling = Tiling(conv.counts, conv.windows is not None, channels, filters, target, conv.parts)
        tiles = self.tiling.images * self.tiling.block
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
        with k.loop(k.count) as n:
            for start, block in k.chunks(self.tiling.counts[0], self.tiling.rows, self.conv.parts):
                self._transform_inputs(k, n, start, block, INDEX(0))
                self._multiply(k, block)
                self._transform_back(k, n, start, block, bias)

    def transform_weights(self, k: Emitter, weights: Pointer) -> None:
        """Fill the transformed weights."""
        channels, half = self.panels.rows, k.constant(0.5)

        def rule(taps: Vectors) -> Vectors:
            ends, middle = k.multiply(half, k.add(taps[0], taps[2])), k.multiply(half, taps[1])
            return taps[0], k.add(ends, middle), k.subtract(ends, middle), taps[2]

        for panel in self.conv.panels.each(k):
            unit = panel.unit
            target = replace(panel, panels=self.panels).at(self.weights(k))
            with k.loop(channels) as c:
                for v in range(panel.width):
                    corner = panel.at(weights).at(c, unit) + v * k.lanes
                    taps = [[k.load(corner + (i * 3 + j) * channels * unit) for j in range(3)] for i in range(3)]
                    _store_square(k, _both_ways(rule, taps), target.at(c, unit) + v * k.lanes, self.strides[0])

    def _transform_inputs(self, k: Emitter, n: ir.Value, start: ir.Value, rows: int, tile: ir.Value) -> None:
        """Transform the patches of some rows of tiles, which take their places from `tile` on."""
        x, (_, columns), first = self.conv.x, self.tiling.counts, self.conv.corner(k, n)

        def rule(d: Vectors) -> Vectors:
            return k.subtract(d[0], d[2]), k.add(d[1], d[2]), k.subtract(d[2], d[1]), k.subtract(d[1], d[3])

        with k.loop(rows) as a, k.loop(columns) as v, k.loop(self.input_row // k.lanes) as c:
            top, left = self._corner(k, k.builder.add(start, a), v)
            corner = first.at(top, x.row).at(left, x.column).at(c, k.lanes)
            patch = [[k.load(corner + (i * x.row + j * x.column)) for j in range(4)] for i in range(4)]
            place = self._tile(self.room(k) + self.inputs, self.input_row, tile, a, v).at(c, k.lanes)
            _store_square(k, _both_ways(rule, patch), place, self.strides[1])

    def _tile(self, first: Pointer, row: int, tile: ir.Value, a: ir.Value, v: ir.Value) -> Pointer:
        """Return where the tile (a, v) lies, `row` floats each, when (0, 0) is the tile with the number `tile`."""
        return first.at(tile, row).at(a, self.tiling.counts[1] * row).at(v, row)

    def _corner(self, k: Emitter, u: ir.Value, v: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the row and column of a tile's first output."""
        corner = []
        for at, count in zip((u, v), self.conv.counts, strict=True):
            first = k.builder.mul(at, INDEX(2))
            if count % 2 and not self.conv.windows:
                first = k.least(first, INDEX(count - 2))
            corner.append(first)
        return corner[0], corner[1]

    def _multiply(self, k: Emitter, rows: int) -> None:
        """Fill the products of some rows of tiles."""
        panels, row, output_row = self.panels, self.input_row, self.output_row
        # one product a place: tiles x channels times channels x filters
        with k.loop(PLACES) as place:
            weights, inputs, products = self.at(k, place)
            for panel in panels.each(k):
                steps = Steps(1, panels.rows, (0, 1), (0, panel.unit))
                for tile, height in panel.chunks(k, rows * self.tiling.counts[1]):
                    totals, places = [k.variables(panel.width) for _ in range(height)], [m * row for m in range(height)]
                    add_products(k, totals, inputs.at(tile, row), places, panel.at(weights), steps)
                    # all lanes: what rounds up the filters is 0
                    target = panel.outputs(products.at(tile, output_row))
                    k.store_all(totals, k.grid(target, height, output_row, panel.width))

    def _transform_back(self, k: Emitter, n: ir.Value, start: ir.Value, rows: int, bias: Pointer | None) -> None:
        """Store the outputs of some rows of tiles."""
        conv = self.conv

        def rule(m: Vectors) -> Vectors:
            return k.add(m[0], k.add(m[1], m[2])), k.subtract(k.subtract(m[1], m[2]), m[3])

        # a tile, a vector of filters: 4 x 4 places to 2 x 2 outputs
        with k.loop(rows) as a, k.loop(self.tiling.counts[1]) as v:
            u = k.builder.add(start, a)
            top, left = self._corner(k, u, v)
            row = self._tile(self.room(k) + self.outputs, self.output_row, INDEX(0), a, v)
            for panel in replace(self.panels, width=1).each(k):
                source, stride = panel.outputs(row), self.strides[2]
                square = [[k.load(source + (i * 4 + j) * stride) for j in range(4)] for i in range(4)]
                tile = _both_ways(rule, square)
                # a window of the pool, or four pixels
                if conv.windows:
                    conv.finish(k, [[value] for line in tile for value in line], bias, panel, (n, u, v))
                    continue
                # where the last tile overlaps one that another part may do, what that one stores counts
                apart = conv.parts > 1 and conv.counts[0] % 2
                is_first = k.builder.icmp_signed("==", top, k.builder.mul(u, INDEX(2)))
                for i, line in enumerate(tile):
                    with k.builder.if_then(is_first) if apart and not i else nullcontext():
                        for j, value in enumerate(line):
                            place = k.builder.add(top, INDEX(i)), k.builder.add(left, INDEX(j))
                            conv.finish(k, [[value]], bias, panel, (n, *place))

    def conv2d_backward_weights(self, k: Emitter, d: NHWC, dw: Pointer) -> None:
        """dw += sum over pixels of x * d, packed as the weights."""
        tiling, columns = self.tiling, self.tiling.counts[1]
        # no sum yet
        k.clear(self.room(k), PLACES * self.strides[0] // k.lanes)
        # some images, of them some rows of tiles
        for first, last in k.blocks(tiling.images):
            for start, block in k.chunks(tiling.counts[0], tiling.rows):
                # inputs and gradients transformed, and multiplied place by place
                with k.loop(last, start=first) as n:
                    tile = k.builder.mul(k.builder.sub(n, first), INDEX(block * columns))
                    self._transform_inputs(k, n, start, block, tile)
                    self._transform_gradients(k, d, n, start, block, tile)
                self._add_outer_products(k, k.builder.mul(k.builder.sub(last, first), INDEX(block * columns)))
        # the sums transformed back, once
        self._add_weights(k, dw)

    def _transform_gradients(
        self, k: Emitter, d: NHWC, n: ir.Value, start: ir.Value, rows: int, tile: ir.Value
    ) -> None:
        """Transform the outputs' gradients of some rows of tiles, which take their places from `tile` on."""

        def rule(d: Vectors) -> Vectors:
            return d[0], k.add(d[0], d[1]), k.subtract(d[0], d[1]), k.subtract(k.zero(), d[1])

        with k.loop(rows) as a, k.loop(self.tiling.counts[1]) as v:
            u = k.builder.add(start, a)
            corner = self._corner(k, u, v)
            # where a tile overlaps the one before, what that one has counted is 0
            counted = [
                k.builder.icmp_signed("!=", k.builder.mul(at, INDEX(2)), first)
                for at, first in zip((u, v), corner, strict=True)
            ]
            place = self._tile(self.room(k) + self.outputs, self.output_row, tile, a, v)
            for panel in replace(self.panels, width=1).each(k):
                source = panel.outputs(d.pixel(k, n, *corner))
                # 2 x 2 gradients to 4 x 4 places
                square = [
                    [k.load_part(source + (i * d.row + j * d.column), panel.valid[0]) for j in range(2)]
                    for i in range(2)
                ]
                if self.conv.counts[0] % 2:
                    square[0] = [k.select(counted[0], k.zero(), value) for value in square[0]]
                if self.conv.counts[1] % 2:
                    square = [[k.select(counted[1], k.zero(), row[0]), row[1]] for row in square]
                _store_square(k, _both_ways(rule, square), panel.outputs(place), self.strides[2])

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
        channels, half = self.panels.rows, k.constant(0.5)

        def rule(m: Vectors) -> Vectors:
            ends = k.multiply(half, k.add(m[1], m[2]))
            return k.add(m[0], ends), k.multiply(half, k.subtract(m[1], m[2])), k.add(ends, m[3])

        # a channel, a vector of filters: 4 x 4 places to 3 x 3 taps
        for panel in self.conv.panels.each(k):
            unit = panel.unit
            source = replace(panel, panels=self.panels).at(self.room(k))
            with k.loop(channels) as c:
                for v in range(panel.width):
                    corner, stride = source.at(c, unit) + v * k.lanes, self.strides[0]
                    square = [[k.load(corner + (i * 4 + j) * stride) for j in range(4)] for i in range(4)]
                    target = panel.at(dw).at(c, unit) + v * k.lanes
                    for i, row in enumerate(_both_ways(rule, square)):
                        for j, value in enumerate(row):
                            place = target + (i * 3 + j) * channels * unit
                            k.store(k.add(k.load(place), value), place)


def _both_ways(rule: Callable[[Vectors], Vectors], square: Sequence[Vectors]) -> list[Vectors]:
    """Apply a rule to every column, and then to every row."""
    columns = [rule(column) for column in zip(*square, strict=True)]
    return [rule(row) for row in zip(*columns, strict=True)]


def _store_square(k: Emitter, square: Sequence[Vectors], pointer: Pointer, stride: int) -> None:
    for place, value in enumerate(value for row in square for value in row):
        k.store(value, pointer + place * stride)
