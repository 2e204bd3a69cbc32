"""`batch-norm`: BatchNorm2d [+ ReLU] [+ MaxPool2d], in either layout of images; its statistics are the whole batch's.

The step is cut twice at each: where a batch is normalized, and where its gradient needs two sums over it. Before a cut
every tile of images leaves its part in its own arena, then all threads meet, and each adds up all parts, in their
order: see `Seam`. A tile's part of the variance is taken around its own mean (Chan, Golub and LeVeque 1983), in one
pass that subtracts the mean of its first row: if that is a part f of the numbers, its mean is at most sqrt(1 / f)
deviations off, so at most 1 / f roundings add up. The rounding error of a mean is kept beside it: a small deviation
magnifies it. Whether the ReLU let a number through follows from the input. `predict` has no cut, see `folding`.

Where a share is many tiles, the output is not kept either: a convolution that reads it in its backward pass has it made
again just before (Chen, Xu, Zhang and Guestrin 2016), in the scratch buffer; kept tensors take each other's room in
turn. Of Residuals that end with a normalization every second sum, or two of three, is made again, for the next sum and
on the way back. MobileNet takes 0.85 of the time, and 0.57 of the memory, ResNet-56 0.78 of it (batch 128, Zen 4).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from llvmlite import ir

from cnnexp.backends.simd.algorithms.cost import Work, passes
from cnnexp.backends.simd.algorithms.node import Node, Seam, Section
from cnnexp.backends.simd.compiler.emit import FLOAT, INDEX, INT, Emitter, Kernels, Offset, Pointer, Target, chunks
from cnnexp.backends.simd.layouts import Layout, Tensor, round_up
from cnnexp.network import NormStage, PoolStage

TOGETHER = 4
"""Vectors that are taken at once: two cache lines of 8 lanes, and sums and constants that the registers hold."""

SHARE, SHARES, TILES, AHEAD, BEFORE, FIRST = range(6)
"""Where the table of a step with seams says what is meant: a meeting's share, how many there are, how many tiles, the
floats from a tile's arena to that of the share's next one, the share's images in tiles before it, and those of each."""


class BatchNormNode(Node[Tensor, Tensor]):
    """BatchNorm2d [+ ReLU] [+ MaxPool2d], whose windows tile the image: which pixel was the largest is found again.

    Attributes:
        pixels: of an image. window: S where it pools, else 0.
        table: where in the arena the rows of a number per channel lie. `own_` and the sums of dy and dy * n are of the
            tile; `rest` is the mean distance from a mean, which rounding leaves; `slope` and `level` are dx's factors.
    """

    algorithm, whole_vectors = "batch-norm", False
    trains = any_image = True
    keeps_y = False
    stage: NormStage

    def __init__(self, stage: NormStage, rectify: bool, pool: PoolStage | None) -> None:
        super().__init__(stage.name, (pool or stage).output_shape)
        self.stage, self.rectify = stage, rectify
        self.pixels, self.window = math.prod(stage.output_shape[:2]), pool.window.size if pool else 0

    @classmethod
    def of(cls, sections: Sequence[Section], first: bool) -> BatchNormNode | None:
        section = sections[0]
        return cls(section.stage, section.rectify, section.pool) if isinstance(section.stage, NormStage) else None

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        size = math.prod(self.stage.output_shape)
        found = {
            "statistics": passes(size, 4, target, images, 1),
            "forward": passes(size, 4, target, images),
            "sums": passes(size, 6, target, images),
        }
        return found | ({"backward": passes(size, 7, target, images, 3)} if needs_dx else {})

    def prepare(self, plan: Layout) -> None:
        plan.parameters.place_plain(self.stage.weight, self.stage.bias)
        self.row = round_up(self.shape[2], plan.target.lanes)
        tile, batch = ("own_mean", "own_rest", "own_squares", "sum", "product"), ("mean", "rest", "inverse", "scale")
        self.table = {name: plan.arena.allocate(self.row) for name in (*tile, *batch, "shift", "slope", "level")}

    def forward(self, plan: Layout) -> Kernels:
        alone = plan.target.forward_only

        def run(k: Emitter) -> None:
            rows = {name: k.arena + at for name, at in self.table.items()}
            if alone:
                parameters = ("scale", self.stage.weight), ("shift", self.stage.bias)
                rows |= {name: k.parameters + plan.parameters.offset(parameter) for name, parameter in parameters}
            for block in self._blocks(k):
                mean = None if alone else block.constants(rows["mean"])
                scale, level = block.constants(rows["scale"]), block.constants(rows["shift"])
                for pixels in block.pixels():
                    values = []
                    for u, x in enumerate(pixels.places(self.x)):
                        distance = k.subtract(k.load(x), mean[u]) if mean else k.load(x)
                        values.append(k.fma(distance, scale[u], level[u]))
                    if self.window:
                        values, _ = block.maxima(values)
                    for value, y, valid in zip(values, pixels.places(self.y), block.valid, strict=False):
                        k.store_part(k.finish(value, rectify=self.rectify), y, valid)

        return [*([] if alone else [("statistics", self._statistics)]), ("forward", run)]

    def _statistics(self, k: Emitter) -> None:
        """Leave the tile's mean, the mean distance from it, which rounding leaves, and the sum of squared distances."""
        mean, rest, squares = (k.arena + self.table[name] for name in ("own_mean", "own_rest", "own_squares"))
        images = k.least(k.count, INDEX(self.x.lanes)), k.count  # where the first row is, and all
        numbers = max(1, self.window) * self.x.shape[1], self.pixels
        counts = [k.builder.uitofp(k.scaled(n, number), FLOAT) for n, number in zip(images, numbers, strict=True)]
        row, share = (k.spread(k.builder.fdiv(FLOAT(1), count)) for count in counts)
        for block in self._blocks(k):
            # the mean of the first row, then distances from it
            totals, distances, products = (k.variables(len(block.valid)) for _ in range(3))
            for pixels in block.pixels(first_row=True):
                for total, place in zip(totals, pixels.places(self.x), strict=True):
                    k.increase(total, pixels.inside(k.load(place)))
            block.finish(totals, mean, row)
            middles = block.constants(mean)
            for pixels in block.pixels():
                for u, place in enumerate(pixels.places(self.x)):
                    distance = pixels.inside(k.subtract(k.load(place), middles[u]))
                    k.increase(distances[u], distance)
                    k.accumulate(products[u], distance, distance)
            block.finish(distances, rest, share)
            block.finish(products, squares)
        # per channel, in vectors: both around the tile's own mean
        for vector, _ in k.vectors(self.shape[2]):
            channel = k.builder.mul(vector, INDEX(k.lanes))
            near, distance, product = (k.load(at.at(channel)) for at in (mean, rest, squares))
            own = k.add(near, distance)
            k.store(own, mean.at(channel))
            k.store(k.subtract(distance, k.subtract(own, near)), rest.at(channel))
            less = k.multiply(k.multiply(distance, distance), k.spread(counts[1]))
            k.store(k.rectify(k.subtract(product, less)), squares.at(channel))

    def backward(self, plan: Layout) -> Kernels:
        return [("sums", lambda k: self._sums(k, plan)), *(super().backward(plan) if self.dx else [])]

    def _gradient(self, k: Emitter, block: Block, whole: bool) -> Callable[[Pixels], list[tuple[ir.Value, ir.Value]]]:
        """Return what gives, of pixels, the distances of x from the mean and the gradient before the ReLU.

        Args:
            whole: or of a window's pixels only of the largest, as the others have no gradient.
        """
        mean, scale, shift = (block.constants(k.arena + self.table[name]) for name in ("mean", "scale", "shift"))

        def found(pixels: Pixels) -> list[tuple[ir.Value, ir.Value]]:
            distances = [k.subtract(k.load(x), mean[u]) for u, x in enumerate(pixels.places(self.x))]
            values = [k.fma(distance, scale[u], shift[u]) for u, distance in enumerate(distances)]
            gradients = [pixels.inside(k.load(dy)) for dy in pixels.places(self.dy)]
            if self.window:
                values, marks = block.maxima(values, None if whole else distances)
            if self.rectifies_dy:
                gradients = [k.where_positive(value, dy) for value, dy in zip(values, gradients, strict=True)]
            if self.window and whole:
                gradients = [
                    k.select(k.equal(where, code), dy, k.zero())
                    for code in range(self.window**2)
                    for where, dy in zip(marks, gradients, strict=True)
                ]
            return list(zip(marks if self.window and not whole else distances, gradients, strict=True))

        return found

    def _sums(self, k: Emitter, plan: Layout) -> None:
        """Leave the tile's sums of dy and of dy * n, n being x normalized; they are the parameters' gradients."""
        rows = {name: k.arena + offset for name, offset in self.table.items()}
        for block in self._blocks(k):
            gradients = self._gradient(k, block, whole=False)
            sums, products = (k.variables(block.vectors if self.window else len(block.valid)) for _ in range(2))
            for pixels in block.pixels():
                for total, product, (distance, gradient) in zip(sums, products, gradients(pixels), strict=True):
                    k.increase(total, gradient)
                    k.accumulate(product, distance, gradient)
            block.finish(sums, rows["sum"])
            block.finish(products, rows["product"])
        # per channel, in vectors
        for vector, valid in k.vectors(self.shape[2]):
            channel = k.builder.mul(vector, INDEX(k.lanes))
            names = ("product", "sum", "rest", "inverse")
            product, total, rest, inverse = (k.load(rows[name].at(channel)) for name in names)
            product = k.multiply(k.subtract(product, k.multiply(rest, total)), inverse)
            k.store(product, rows["product"].at(channel))
            for parameter, value in ((self.stage.weight, product), (self.stage.bias, total)):
                place = (k.gradients + plan.parameters.offset(parameter)).at(channel)
                k.store_part(k.add(k.load(place), value), place, valid)

    def emit_backward(self, k: Emitter, plan: Layout) -> None:
        """dx = scale * dy + slope * (x - mean) + level."""
        for block in self._blocks(k):
            gradients = self._gradient(k, block, whole=True)
            names = ("scale", "slope", "level")
            scale, slope, level = (block.constants(k.arena + self.table[name]) for name in names)
            for pixels in block.pixels():
                places = pixels.places(self.needed_dx)
                for u, (distance, gradient) in enumerate(gradients(pixels)):
                    value = k.fma(scale[u], gradient, k.fma(slope[u], distance, level[u]))
                    k.store_part(pixels.inside(value), places[u], block.valid[u])

    def _blocks(self, k: Emitter) -> Iterator[Block]:
        """Run what follows for the vectors of a pixel, block by block."""
        (_, width, channels), step = self.x.shape, k.lanes // self.x.lanes
        most = k.target.registers // (4 * self.window**2) if self.window else TOGETHER
        for first, size, times in chunks(channels // step, most) if channels // step else []:
            window = (self.window, self.window) if self.window else (1, math.gcd(TOGETHER // size, width))
            with k.loop(times) as t:
                yield Block(k, self.x, window, k.scaled(t, size * step, first * step), [k.lanes] * size)
        if channels % step:
            window = (max(1, self.window),) * 2
            yield Block(k, self.x, window, INDEX(channels - channels % step), [channels % step])

    # what all threads do when they have met

    def seams(self, plan: Layout) -> Sequence[Seam]:
        """Return the forward pass's, before the batch is normalized, and the backward pass's, before dx."""
        if plan.target.forward_only:
            return ()
        forward = Seam(f"{self.name}.statistics", lambda k: self._meet(k, plan))
        return forward, Seam(f"{self.name}.sums", lambda k: self._meet_backward(k, plan))

    def _meet(self, k: Emitter, plan: Layout) -> None:
        """Take mean and variance of the batch; the first tile's thread moves the running averages.

        Buffers: parameters, running averages, all arenas, the seam's table.
        """
        layer, epsilon = self.stage.layer, self.stage.layer.epsilon
        meeting = Meeting(k, plan, self.pixels)
        size, alone = meeting.size(), k.builder.icmp_signed("==", meeting.share, INDEX(0))
        unbiased = k.builder.fsub(size, FLOAT(1))
        unbiased = k.builder.select(k.builder.fcmp_ordered("<", unbiased, FLOAT(1)), FLOAT(1), unbiased)
        for vector, valid in k.vectors(self.shape[2]):
            channel = k.builder.mul(vector, INDEX(k.lanes))
            total, squares, rest = k.variables(3)
            with meeting.tiles() as (arena, weight):
                mean = k.load((arena + self.table["own_mean"]).at(channel))
                k.accumulate(total, mean, k.spread(weight))
            middle = k.multiply(total.get(), k.spread(k.builder.fdiv(FLOAT(1), size)))
            with meeting.tiles() as (arena, weight):
                distance = k.subtract(k.load((arena + self.table["own_mean"]).at(channel)), middle)
                k.increase(squares, k.load((arena + self.table["own_squares"]).at(channel)))
                k.accumulate(squares, k.multiply(distance, distance), k.spread(weight))
                left = k.add(distance, k.load((arena + self.table["own_rest"]).at(channel)))
                k.accumulate(rest, left, k.spread(weight))
            variance, left = (k.multiply(t.get(), k.spread(k.builder.fdiv(FLOAT(1), size))) for t in (squares, rest))
            inverse = k.builder.fdiv(k.constant(1), k.sqrt(k.add(variance, k.constant(epsilon))))
            parameters = (k.parameters + plan.parameters.offset(p) for p in (self.stage.weight, self.stage.bias))
            weight, bias = (k.load(parameter.at(channel)) for parameter in parameters)
            scale = k.multiply(inverse, weight)
            shift = k.subtract(bias, k.multiply(left, scale))
            values = {"mean": middle, "rest": left, "inverse": inverse, "scale": scale, "shift": shift}
            meeting.store({self.table[name]: value for name, value in values.items()}, channel)
            with k.builder.if_then(alone):
                spread = k.multiply(squares.get(), k.spread(k.builder.fdiv(FLOAT(1), unbiased)))
                for average, value in zip(self.stage.running, (middle, spread), strict=True):
                    place = (k.gradients + Offset(average.offset)).at(channel)
                    old = k.load(place)
                    moved = k.fma(k.constant(layer.momentum), k.subtract(value, old), old)
                    k.store_part(moved, place, valid)

    def _meet_backward(self, k: Emitter, plan: Layout) -> None:
        """Make dx's factors of the sums over the batch. Buffers: as `_meet`."""
        meeting = Meeting(k, plan, self.pixels)
        share = k.spread(k.builder.fdiv(FLOAT(-1), meeting.size()))
        for vector, _ in k.vectors(self.shape[2]):
            channel = k.builder.mul(vector, INDEX(k.lanes))
            total, product = k.variables(2)
            with meeting.tiles() as (arena, _):
                for variable, name in ((total, "sum"), (product, "product")):
                    k.increase(variable, k.load((arena + self.table[name]).at(channel)))
            names = ("inverse", "scale", "rest")
            inverse, scale, rest = (k.load((meeting.first + self.table[name]).at(channel)) for name in names)
            factor = k.multiply(scale, share)
            slope = k.multiply(k.multiply(factor, inverse), product.get())
            level = k.subtract(k.multiply(factor, total.get()), k.multiply(slope, rest))
            meeting.store({self.table["slope"]: slope, self.table["level"]: level}, channel)


class Meeting:
    """What a share sees of the tiles when all have met. Buffers: parameters, running averages, arenas, table (int64).

    Attributes:
        share, first: its number, and the arena of its first tile.
    """

    def __init__(self, k: Emitter, plan: Layout, pixels: int) -> None:
        self._k, self._stride, self._pixels = k, plan.arena.stride, pixels
        *_, self._arenas, self._table = k.buffers
        self.share = self._number(INDEX(SHARE))
        self.first = self._arenas.at(self.share, self._stride)

    def size(self) -> ir.Value:
        """Return the numbers of a channel in the batch."""
        total = self._k.variable(FLOAT(0))
        with self.tiles() as (_, weight):
            total.set(self._k.builder.fadd(total.get(), weight))
        return total.get()

    @contextlib.contextmanager
    def tiles(self) -> Iterator[tuple[Pointer, ir.Value]]:
        """Run the block for every tile that has images, in order, with its arena and its numbers of a channel."""
        builder = self._k.builder
        with self._k.loop(self._number(INDEX(TILES))) as tile:
            images = self._number(builder.add(tile, INDEX(FIRST)))
            with builder.if_then(builder.icmp_signed(">", images, INDEX(0))):
                numbers = builder.mul(images, INDEX(self._pixels))
                yield self._arenas.at(tile, self._stride), builder.uitofp(numbers, FLOAT)

    def store(self, values: dict[Offset, ir.Value], channel: ir.Value) -> None:
        """Store values of a vector of channels in the rows of all tiles of the share."""
        shares, tiles = (self._number(INDEX(at)) for at in (SHARES, TILES))
        with self._k.loop(self._k.builder.udiv(tiles, shares)) as i:
            arena = self.first.at(self._k.builder.mul(i, shares), self._stride)
            for row, value in values.items():
                self._k.store(value, (arena + row).at(channel))

    def _number(self, at: ir.Value) -> ir.Value:
        return self._k.builder.load(self._k.builder.gep(self._table.value(INDEX), [at]))


class Block:
    """Some neighbouring vectors of every pixel: of `lanes` channels each, or of one channel of `lanes` images.

    Some pixels are taken at once: a window's, or where the vectors are few as many as keep sums from waiting.

    Attributes:
        window: pixels at once, down and across. valid: how many lanes count of each vector, pixel by pixel.
    """

    def __init__(self, k: Emitter, x: Tensor, window: tuple[int, int], channel: ir.Value, valid: list[int]) -> None:
        self.k, self.x, self.window, self.channel, self.vectors = k, x, window, channel, len(valid)
        self.valid = valid * math.prod(window)

    def constants(self, row: Pointer) -> list[ir.Value]:
        """Load a vector for each, from a row of a number per channel."""
        k, at = self.k, row.at(self.channel)
        found = [k.splat(at + u) if self.x.lanes > 1 else k.load(at + u * k.lanes) for u in range(self.vectors)]
        return found * math.prod(self.window)

    def maxima(
        self, values: Sequence[ir.Value], marks: Sequence[ir.Value] | None = None
    ) -> tuple[list[ir.Value], list[ir.Value]]:
        """Return the largest of every vector's pixels, and its mark: which pixel it was, unless others are given."""
        k, size = self.k, self.vectors
        marks = marks or [k.integers(code) for code in range(math.prod(self.window)) for _ in range(size)]
        pairs = list(zip(values, marks, strict=True))
        found = [k.first_maximum(pairs[u::size]) for u in range(size)]
        return [value for value, _ in found], [mark for _, mark in found]

    def finish(self, totals: Sequence, row: Pointer, factor: ir.Value | None = None) -> None:
        """Store the sums of the channels, times a vector of one factor, if given, in a row."""
        k, at = self.k, row.at(self.channel)
        for u in range(self.vectors):
            value = functools.reduce(k.add, [total.get() for total in totals[u :: self.vectors]])
            value = value if factor is None else k.multiply(value, factor)
            if self.x.lanes > 1:
                k.builder.store(k.sum_lanes(value), (at + u).value(FLOAT), align=4)
            else:
                k.store(value, at + u * k.lanes)

    def pixels(self, first_row: bool = False) -> Iterator[Pixels]:
        """Run what follows for all pixels, or those of the first row, as many at once as are in a window."""
        k, lanes = self.k, self.x.lanes
        height, width = (count // size for count, size in zip(self.x.shape, self.window, strict=False))
        with k.loop(1 if first_row else k.groups(lanes)) as n:
            # a group's images that there are
            left = k.builder.trunc(k.builder.sub(k.count, k.builder.mul(n, INDEX(lanes))), INT)
            numbers = ir.Constant(k.indices, [INT(lane) for lane in range(k.lanes)])
            mask = k.builder.icmp_signed("<", numbers, k.spread(left))
            with k.loop(1 if first_row else height) as u, k.loop(width) as v:
                yield Pixels(self, (n, u, v), mask)


@dataclass(frozen=True)
class Pixels:
    """The pixels of a window at run time.

    Attributes:
        at: image, row and column of the window. mask: lanes with an image.
    """

    block: Block
    at: tuple[ir.Value, ir.Value, ir.Value]
    mask: ir.Value

    def places(self, tensor: Tensor) -> list[Pointer]:
        """Return the address of each vector of each pixel in an image, or of the one pixel that is left of a window."""
        block, k, (n, u, v) = self.block, self.block.k, self.at
        rows, columns = block.window if tensor.shape == block.x.shape else (1, 1)
        first = tensor.pixel(k, n, k.scaled(u, rows), k.scaled(v, columns)).at(block.channel, block.x.lanes)
        return [
            first + ((i * tensor.row + j * tensor.column) * tensor.halo.step + vector * k.lanes)
            for i, j, vector in itertools.product(range(rows), range(columns), range(block.vectors))
        ]

    def inside(self, value: ir.Value) -> ir.Value:
        """Return a vector with 0 in lanes that have no image."""
        k = self.block.k
        return k.select(self.mask, value, k.zero()) if self.block.x.lanes > 1 else value
