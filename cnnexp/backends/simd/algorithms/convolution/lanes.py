"""`lanes`: a convolution with the batch in the vector lanes: any shape, any number of filters, full vectors.

Layout [group][row][column][channel][lane]. A kernel row of one pixel is a contiguous run of K * C vectors, and its
weights (K, K, C, F) a run of K * C * F floats, so every convolution is K runs.

Register tile of the forward pass: 4 pixels x up to 6 filters of accumulators; per (channel, tap) 4 loads of x and one
broadcast per filter feed 4 multiply-adds each, 8 loads per 16 multiply-adds with 4 filters. Where a max-pool follows,
the 4 pixels are those of its window, so maximum, argmax, bias and ReLU happen in registers and the full convolution is
never stored. The gradient of the input is the same kernel on flipped weights. Groups or dilation make it K * K runs.

Gain: few channels, batches that fill the lanes. By it rather than `channels` for the first convolution
`two_conv_pool4` takes 18,376 cycles for 43,100, `two_conv_mlp` 155,879 for 174,888.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from llvmlite import ir

from cnnexp.backends.parts import FORWARD
from cnnexp.backends.simd.algorithms import cost
from cnnexp.backends.simd.algorithms.convolution.base import ConvolutionNode, Geometry, Windows
from cnnexp.backends.simd.algorithms.cost import Work, lane_sums, passes
from cnnexp.backends.simd.compiler.emit import INDEX, Emitter, Pointer, Target, chunks, chunks_of
from cnnexp.backends.simd.layouts import Blocked, Halo, Layout, Tensor

MOST_SUMS = 256
"""Vectors of sums that lie in L1 beside what is summed: 16 KB of AVX-512's."""

CACHED_VECTORS = 448
"""Vectors of one piece of a row, of x and d together: 28 KB of AVX-512's."""


class Lanes(ConvolutionNode[Blocked]):
    """Batch in lanes."""

    input_layout = output_layout = Blocked
    algorithm, holds, any_taps = "lanes", "images", True

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        (height, width, channels), (rows, columns, filters) = self.stage.input_shape, self.stage.output_shape
        kernel, cells, window = self.stage.layer.kernel, math.prod(self.shape[:2]), self.window
        groups, (pixels, most) = self.stage.layer.groups, sums_tile(target.registers)
        found = {
            "forward": self.forward_work(target),
            "gradient": passes(rows * columns * filters, 2, target, target.lanes, 3),
            "unpool": passes(cells * filters, 4 + 3 * window, target, target.lanes, window + 1),
        }
        found["backward_weights"] = self._gradient_work(target, images)
        if needs_dx:
            count = height * -(-width // pixels)
            taps = kernel**2 * filters // groups
            back = lane_sums(min(width, pixels), min(most, channels // groups), count, channels, taps, target, 2.0)
            flipping = 2 * self.stage.weight.size / images
            found["backward_input"] = Work(back.macs * self.seen, back.cycles * self.seen + flipping, back.tile)
        return found

    def _gradient_work(self, target: Target, images: int) -> Work:
        """Return the work of the weights' gradient: a tile of taps x filters, along pixels."""
        (height, width, channels), (rows, columns, filters) = self.stage.input_shape, self.stage.output_shape
        kernel, groups, pixels = self.stage.layer.kernel, self.stage.layer.groups, rows * columns
        held, terms = pixels * filters + height * width * channels, kernel**2 * channels // groups
        moved, tile = held, (terms, whole_width(terms, filters, target.registers) if self.stage.dense else 0)
        if not tile[1]:
            # rows are gone over for every row of the kernel, and by blocks of 8 filters
            moved = kernel * (pixels * filters + height * width * channels * -(-filters // 8))
            taps, wide = gradient_tile(target.registers)
            tile = (min(taps, channels // groups), min(wide, filters // groups)) if groups > 1 else (taps, wide)
        cycles = sum(
            times_r * times_f * max(high * wide / cost.MACS, (high + wide) / cost.LOADS, 4)
            for _, high, times_r in chunks(terms, tile[0])
            for _, wide, times_f in chunks(filters, tile[1])
        )
        cycles *= 1.15 * pixels / target.lanes
        # the lanes are added up once for all images
        cycles += terms * filters * (2 * math.log2(target.lanes) + 3) / images
        cycles += cost.bring(moved, 4 * held * target.lanes, target)
        return Work(float(terms * filters * pixels), cycles, f"{tile[0]} taps x {tile[1]} filters")

    def forward_work(self, target: Target) -> Work:
        rows, columns, filters = self.stage.output_shape
        pixels, most = sums_tile(target.registers)
        if self.pool:
            tile = math.prod(window_part(self.pool.window.size, min(filters, most), target.registers))
            count = math.prod(self.shape[:2]) * self.window // tile
        else:
            tile, count = min(columns, pixels), rows * -(-columns // pixels)
        terms, most = self.stage.weight.size // filters, min(most, filters // self.stage.layer.groups)
        sums = lane_sums(tile, most, count, filters, terms, target, 2.0 * self.window)
        # without the pixels that fill a row's last tile
        return replace(sums, macs=float(self.multiply_adds(FORWARD)))

    @property
    def _reach(self) -> int:
        """How far the last tap is from the first, in pixels."""
        return (self.stage.layer.kernel - 1) * self.stage.layer.dilation

    def _dense_halo(self) -> Halo:
        """Windows of the flipped kernel reach over its edge."""
        stage, stride, reach, sides = self.stage, self.stage.layer.stride, self._reach, []
        for pad, size, count in zip(stage.window.pads[:2], stage.input_shape, stage.output_shape, strict=False):
            before, extent = max(0, reach - pad), (count - 1) * stride + 1
            sides.append((before, max(0, max(0, pad - reach) + size + reach - before - extent)))
        (top, bottom), (left, right) = sides
        return Halo(top, left, bottom, right, stride)

    def prepare_backward(self, plan: Layout) -> None:
        super().prepare_backward(plan)
        self.sums = plan.arena.allocate(MOST_SUMS * plan.target.lanes)
        if self.dx:
            self.flipped = plan.arena.allocate(self.stage.weight.size)

    def prepare_forward(self, plan: Layout) -> None:
        layer, channels = self.stage.layer, self.stage.input_shape[2]
        plan.parameters.place_plain(self.stage.weight, self.stage.bias)
        if self.pool:
            self.windows = Windows(self.pool.window.size, self.pool.window.stride, plan.arena.argmax(self.shape))
        self.correlation = Correlation(
            layer.kernel, channels, layer.filters, layer.groups, layer.dilation,
            x=self.x, stride=layer.stride, y=self.y, rectify=self.rectify, windows=self.windows,
        )  # fmt: skip

    def emit_forward(self, k: Emitter, plan: Layout) -> None:
        self.correlation.conv2d(k, *plan.parameters.of(self.stage, k.parameters))

    def backward_weights(self, k: Emitter, plan: Layout) -> None:
        """dw[i,j,c,f] += sum over pixels and lanes of x * d; db likewise.

        Register tile: 6 (tap, channel) x 4 filters of accumulators, along a piece of a row; 10 loads feed 24
        multiply-adds. All tiles of a block of taps and filters go along one piece before the next, so that x and d come
        from the first cache, as do the sums that wait there meanwhile. Lanes are added up once per tile of images.

        Of the smallest kernels a tile holds all taps, and the bias, so that d is read once.
        """
        (dw, db), sums = plan.parameters.of(self.stage, k.gradients), k.arena + self.sums
        conv, x = self.correlation, self.x
        (runs, run), each = conv.runs, conv.filters // conv.groups
        # the smallest kernels: all taps in one tile
        width = whole_width(conv.kernel * run, conv.filters, k.target.registers)
        if width and runs == conv.groups == 1:
            self._whole_kernel(k, width, dw, db)
            return
        # the others by blocks of filters, runs of kernel rows and blocks of taps
        for first_filter, filters, filter_blocks in chunks(each, 8):
            for first_tap, taps, tap_blocks in chunks(run, MOST_SUMS // filters):
                with (
                    conv.each_group(k) as e, k.loop(filter_blocks) as filter_block,
                    k.loop(conv.kernel) as i, k.loop(runs) as j, k.loop(tap_blocks) as tap_block,
                ):  # fmt: skip
                    r, f = k.scaled(tap_block, taps, first_tap), k.scaled(filter_block, filters, first_filter)
                    f = k.builder.add(k.builder.mul(e, INDEX(each)), f)
                    place = k.builder.add(k.builder.mul(i, INDEX(runs)), j)
                    # where the taps lie in x, from the corner of a window
                    across = k.scaled(k.builder.add(k.scaled(e, run), r), x.lanes)
                    down = k.builder.add(k.scaled(i, conv.dilation * x.row), k.scaled(j, conv.dilation * x.column))
                    target = dw.at(place, run * conv.filters).at(r, conv.filters).at(f)
                    self._weight_block(k, (k.builder.add(down, across), f), (taps, filters), target, sums)
        if db is not None:
            self._backward_bias(k, db)

    def _whole_kernel(self, k: Emitter, width: int, dw: Pointer, db: Pointer | None) -> None:
        """Add to dw and db, `width` filters at a time."""
        conv, d, x = self.correlation, self.d, self.x
        rows, columns, _ = d.shape
        offsets = [i * x.row + r * x.lanes for i in range(conv.kernel) for r in range(self.run)]
        for f, filters in k.chunks(conv.filters, width):
            totals, sums = [k.variables(filters) for _ in offsets], k.variables(filters)
            # along all pixels: one load of each filter's gradient serves all taps, and the bias
            with k.loop(k.groups(k.lanes)) as g, k.loop(rows) as p, k.loop(columns) as q:
                source = conv.corner(k, g).at(p, conv.stride * x.row).at(q, conv.stride * x.column)
                gradient = d.pixel(k, g, p, q).at(f, d.lanes)
                gradients = [k.load(gradient + j * k.lanes) for j in range(filters)]
                for offset, row in zip(offsets, totals, strict=True):
                    value = k.load(source + offset)
                    for total, gradient_ in zip(row, gradients, strict=True):
                        k.accumulate(total, value, gradient_)
                for total, gradient_ in zip(sums, gradients, strict=True):
                    k.increase(total, gradient_)
            # lanes added up
            for tap, row in enumerate(totals):
                k.add_lanes(row, dw.at(f) + tap * conv.filters)
            if db is not None:
                k.add_lanes(sums, db.at(f))

    def _weight_block(
        self, k: Emitter, first: tuple[ir.Value, ir.Value], size: tuple[int, int], dw: Pointer, sums: Pointer
    ) -> None:
        """Add to a block of dw, some taps of some filters.

        Args:
            first: where the first tap lies, from the corner of a window; and the first filter. size: taps, filters.
            dw: of the first tap and filter. sums: room for `MOST_SUMS` vectors.
        """
        conv, d, x, (seen, f), (taps, filters) = self.correlation, self.d, self.x, first, size
        rows, columns, _ = d.shape
        most_columns = max(4, CACHED_VECTORS // (conv.stride * conv.channels + filters))
        most_taps, most_filters = gradient_tile(k.target.registers)
        x_step, d_step = conv.stride * x.column, d.halo.step * d.column
        # no sum yet
        k.clear(sums, taps * filters)
        # row by row of all images, a piece of it at a time
        with k.loop(k.groups(k.lanes)) as g, k.loop(rows) as p:
            source = conv.corner(k, g).at(seen).at(p, conv.stride * x.row)
            gradient = d.pixel(k, g, p, 0).at(f, d.lanes)
            for q, piece in k.chunks(columns, most_columns):
                # all tiles of the block along this piece
                for tap, height, column, width in k.tiles((taps, most_taps), (filters, most_filters)):
                    of_x, of_d = source.at(q, x_step).at(tap, x.lanes), gradient.at(q, d_step).at(column, d.lanes)
                    corner = sums.at(tap, filters * k.lanes).at(column, k.lanes)
                    places = k.grid(corner, height, filters * k.lanes, width)
                    with k.sums(places) as totals, k.loop(piece) as pixel:
                        gradients = [k.load(of_d.at(pixel, d_step) + j * k.lanes) for j in range(width)]
                        for t, row in enumerate(totals):
                            value = k.load(of_x.at(pixel, x_step) + t * k.lanes)
                            for total, gradient_ in zip(row, gradients, strict=True):
                                k.accumulate(total, value, gradient_)
        # lanes added up
        with k.loop(taps) as t, k.loop(filters) as j:
            total = k.load(sums.at(t, filters * k.lanes).at(j, k.lanes))
            k.add_to(dw.at(t, conv.filters).at(j), k.sum_lanes(total))

    def _backward_bias(self, k: Emitter, db: Pointer) -> None:
        d, (rows, columns, channels) = self.d, self.d.shape
        for f, size in k.chunks(channels, 8):
            totals = k.variables(size)
            with k.loop(k.groups(k.lanes)) as g, k.loop(rows) as p, k.loop(columns) as q:
                at = d.pixel(k, g, p, q).at(f, d.lanes)
                for j, total in enumerate(totals):
                    k.increase(total, k.load(at + j * d.lanes))
            k.add_lanes(totals, db.at(f))

    def backward_input(self, k: Emitter, plan: Layout) -> None:
        layer, channels = self.stage.layer, self.stage.input_shape[2]
        flipped = k.arena + self.flipped
        weights, _ = plan.parameters.of(self.stage, k.parameters)
        self.correlation.flip_weights(k, weights, flipped)
        top, left, _, _ = (max(0, pad - self._reach) for pad in self.stage.window.pads)
        back = Correlation(
            layer.kernel, layer.filters, channels, layer.groups, layer.dilation,
            x=self.d, origin=(top, left), y=self.needed_dx, positive=self.x if self.input_rectified else None,
        )  # fmt: skip
        back.conv2d(k, flipped, None)


@dataclass(frozen=True)
class Correlation(Geometry[Blocked]):
    """y = cross-correlation of x with weights.

    Attributes:
        kernel, channels, filters: K, C, F. groups: of channels and filters. dilation: stored pixels from tap to tap.
    """

    kernel: int
    channels: int
    filters: int
    groups: int = 1
    dilation: int = 1

    @property
    def runs(self) -> tuple[int, int]:
        """How many runs of how many values of x a row of the kernel is."""
        if self.groups == self.dilation == 1:
            return 1, self.kernel * self.channels
        return self.kernel, self.channels // self.groups

    def each_group(self, k: Emitter) -> AbstractContextManager[ir.Value]:
        """Run the block for every group of filters."""
        return k.loop(self.groups) if self.groups > 1 else nullcontext(INDEX(0))

    def conv2d(self, k: Emitter, weights: Pointer, bias: Pointer | None) -> None:
        """Fill y (and the argmax)."""
        pixels, most_filters = sums_tile(k.target.registers)
        (rows, columns, _), each = self.y.shape, self.filters // self.groups
        step = self.stride * (self.windows.stride if self.windows else 1)
        with k.loop(k.groups(k.lanes)) as g:
            # a group of images, a row, a tile of pixels (or a cell of the pool), some filters
            source = self.corner(k, g)
            with k.loop(rows) as row:
                inside = INDEX(0), INDEX(self.kernel)
                if not self.windows and self.dilation == 1:
                    inside = self.rows_inside(k, self.kernel, row, self.stride, rows)
                for first, width, count in [(0, 1, columns)] if self.windows else chunks_of(columns, pixels):
                    with k.loop(count) as tile:
                        column = k.scaled(tile, width, first)
                        corner = source.at(row, step * self.x.row).at(column, step * self.x.column)
                        for first_filter, filters, times in chunks(each, most_filters):
                            with self.each_group(k) as e, k.loop(times) as t:
                                f = k.builder.add(k.builder.mul(e, INDEX(each)), k.scaled(t, filters, first_filter))
                                w, b = weights.at(f), bias.at(f) if bias else None
                                seen = corner.at(e, self.channels // self.groups * self.x.lanes)
                                at = Tile(seen, w, b, g, row, column, f, filters, inside)
                                if self.windows:
                                    self._pooled(k, self.windows, at)
                                else:
                                    self._plain(k, at, width)

    def _plain(self, k: Emitter, tile: Tile, pixels: int) -> None:
        """Convolve `pixels` neighbours of one row with the filters, and store them."""
        totals = self._dot(k, tile, [(0, i) for i in range(pixels)])
        for i in range(pixels):
            target = tile.at(k, self.y) + i * self.y.column * self.y.halo.step
            positive = tile.at(k, self.positive) + i * self.positive.column if self.positive else None
            for j, value in enumerate(totals[i]):
                bias = None if tile.bias is None else k.splat(tile.bias + j)
                value = k.finish(value, bias, self.rectify, positive + j * k.lanes if positive else None)
                k.store(value, target + j * self.y.lanes)

    def _pooled(self, k: Emitter, windows: Windows, tile: Tile) -> None:
        """Convolve one pooling window with the filters, and store its maxima and where they were.

        Part by part in a loop: LLVM would put off the maxima of parts in a row, and keep every sum till then.
        """
        size, argmax = windows.size, windows.argmax
        rows, columns = window_part(size, tile.filters, k.target.registers)
        parts, across = size * size // (rows * columns), size // columns
        pixels = [(i, j) for i in range(rows) for j in range(columns)]

        # the sums of a part of the window, their maximum and which pixel it was
        def part(corner: Pointer) -> list[tuple[ir.Value, ir.Value]]:
            totals = self._dot(k, replace(tile, corner=corner), pixels)
            codes = [k.integers(i * size + j) for i, j in pixels]
            return [k.first_maximum(list(zip(values, codes, strict=True))) for values in zip(*totals, strict=True)]

        # the first part, and each one more against the largest so far
        found = [[k.variable(value) for value in pair] for pair in part(tile.corner)]
        if parts > 1:
            with k.loop(parts, start=1) as number:
                row, column = k.builder.udiv(number, INDEX(across)), k.builder.urem(number, INDEX(across))
                corner = tile.corner.at(row, self.stride * self.x.row).at(column, columns * self.stride * self.x.column)
                first = k.spread(k.builder.trunc(k.builder.mul(number, INDEX(columns)), ir.IntType(32)))
                for (best, where), (value, code) in zip(found, part(corner), strict=True):
                    pair = k.first_maximum([(best.get(), where.get()), (value, k.builder.add(code, first))])
                    best.set(pair[0])
                    where.set(pair[1])
        # bias, ReLU, and the argmax as a byte
        target, code_target = tile.at(k, self.y), tile.at(k, argmax)
        for j, (best, where) in enumerate(found):
            bias = None if tile.bias is None else k.splat(tile.bias + j)
            k.store(k.finish(best.get(), bias, self.rectify), target + j * self.y.lanes)
            k.store_bytes(where.get(), code_target + j * argmax.lanes)

    def _dot(self, k: Emitter, tile: Tile, pixels: list[tuple[int, int]]) -> list[list[ir.Value]]:
        """Return the sums over kernel and channels, [pixel][filter]; pixels are (row, column), by the stride."""
        x, (runs, run), filters = self.x, self.runs, tile.filters
        places = [(i * x.row + j * x.column) * self.stride for i, j in pixels]
        totals = [k.variables(filters) for _ in pixels]

        # some taps: each pixel is loaded once for all filters, each weight once for all pixels
        def taps(source: Pointer, weights: Pointer, count: int) -> None:
            for r in range(count):
                values = [k.load(source + (place + r * x.lanes)) for place in places]
                for f in range(filters):
                    weight = k.splat(weights + (r * self.filters + f))
                    for p, value in enumerate(values):
                        k.accumulate(totals[p][f], weight, value)

        # a row of the kernel, in runs of at most 8 taps if it is long
        low, high = tile.inside
        with k.loop(high, start=low) as i, k.loop(runs) if runs > 1 else nullcontext(INDEX(0)) as j:
            source, weights = tile.corner.at(i, self.dilation * x.row), tile.weights.at(i, runs * run * self.filters)
            source, weights = source.at(j, self.dilation * x.column), weights.at(j, run * self.filters)
            for first, size, count in chunks_of(run, 8 if run > 16 else run):
                with k.loop(count) as c:
                    at = (source + first * x.lanes).at(c, size * x.lanes)
                    taps(at, (weights + first * self.filters).at(c, size * self.filters), size)
        return [[total.get() for total in row] for row in totals]

    def flip_weights(self, k: Emitter, weights: Pointer, flipped: Pointer) -> None:
        """flipped[K-1-i, K-1-j, f, c] = weights[i, j, c, f], group by group: the kernel of the input's gradient."""
        taps, seen, each = self.kernel**2, self.channels // self.groups, self.filters // self.groups
        with k.loop(taps) as tap:
            source = weights.at(tap, seen * self.filters)
            target = flipped.at(k.builder.sub(INDEX(taps - 1), tap), each * self.channels)
            with self.each_group(k) as e, k.loop(seen) as c, k.loop(each) as f:
                value = k.load_float(source.at(c, self.filters).at(e, each).at(f))
                k.store(value, target.at(f, self.channels).at(e, seen).at(c))


@dataclass(frozen=True)
class Tile:
    """Some filters at one place of the output, at run time.

    Attributes:
        corner: of the window in the input. weights, bias: of the first filter.
        group, row, column: the place. first, filters: which filters, and how many.
        inside: the first row of the kernel that sees the image, and the end of those.
    """

    corner: Pointer
    weights: Pointer
    bias: Pointer | None
    group: ir.Value
    row: ir.Value
    column: ir.Value
    first: ir.Value
    filters: int
    inside: tuple[ir.Value, ir.Value]

    def at(self, k: Emitter, tensor: Tensor) -> Pointer:
        """Return the address of the first filter in a tensor of the output's shape."""
        return tensor.pixel(k, self.group, self.row, self.column).at(self.first, tensor.lanes)


def sums_tile(registers: int) -> tuple[int, int]:
    """Return the pixels and filters of the forward pass's tile."""
    return (4, 6) if registers >= 32 else (2, 4)


def window_part(size: int, filters: int, registers: int) -> tuple[int, int]:
    """Return rows and columns of the parts of a pooling window whose sums, pixels and a weight fit the registers."""
    parts = [(size, size), *((1, columns) for columns in range(size, 0, -1) if size % columns == 0)]
    return next(part for part in parts if math.prod(part) * (filters + 1) < registers)


def gradient_tile(registers: int) -> tuple[int, int]:
    """Return the taps and filters of the weight gradient's tile."""
    return (6, 4) if registers >= 32 else (3, 3)


def whole_width(taps: int, filters: int, registers: int) -> int:
    """Return the filters of a tile of the weight gradient with all taps in it, 0 if two tiles do not hold them all."""
    width = min(filters, (registers - 1) // (taps + 2))
    return width if filters <= 2 * width else 0
