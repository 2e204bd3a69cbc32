"""`batch-norm`: BatchNorm2d [+ ReLU], in either layout of images; its statistics are those of the whole batch.

The step is cut twice at each: where a batch is normalized, and where its gradient needs two sums over it. Before a cut
every tile of images leaves its part in its own arena, then all threads meet, and each adds up all parts, in their
order: see `Seam`. A tile's part of the variance is taken around the tile's own mean (Chan, Golub and LeVeque 1983), so
that nothing cancels; what rounding takes off a mean is kept beside it, as a small deviation makes it large. Whether the
ReLU let a number through follows from the input. `predict` has a scale and a shift, see `folding`, and no cut.

Where a share is many tiles, the output is not kept either: a convolution that reads it in its backward pass has it made
again just before (Chen, Xu, Zhang and Guestrin 2016), in the scratch buffer. One thread, batch 128, Zen 4: MobileNet
takes 0.85 of the time, ResNet-20 0.93; on two threads tiles take 0.57 and 0.76 of the memory. What a tile keeps for
both passes lies where other tensors lay before or will: 0.88 and 0.87 of that. Of Residuals that end with a
normalization every second sum, or two of three, is made again, for the next sum and on the way back: ResNet-56 takes
0.78 of that.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

from llvmlite import ir

from cnnexp.backends.simd.algorithms.cost import Work, passes
from cnnexp.backends.simd.algorithms.node import Node, Seam, Section
from cnnexp.backends.simd.compiler.emit import FLOAT, INDEX, INT, Emitter, Kernels, Offset, Pointer, Target, chunks
from cnnexp.backends.simd.layouts import Layout, Tensor, round_up
from cnnexp.network import NormStage

TOGETHER = 4
"""Vectors of a pixel that are taken at once: two cache lines of 8 lanes, and constants that the registers hold."""

TILES, FIRST = 1, 2
"""Where the table of a seam says how many tiles there are, and the images of each; first of all, which is meant."""


class BatchNormNode(Node[Tensor, Tensor]):
    """BatchNorm2d [+ ReLU].

    Attributes:
        table: where in the arena the rows of a number per channel lie. `own_` and the sums of dy and dy * n are of the
            tile; `rest` is the mean distance from a mean, which rounding leaves; `slope` and `level` are dx's factors.
    """

    algorithm = "batch-norm"
    trains = True
    any_image = True
    whole_vectors = False
    keeps_y = False
    stage: NormStage

    def __init__(self, stage: NormStage, rectify: bool) -> None:
        super().__init__(stage.name, stage.output_shape)
        self.stage, self.rectify = stage, rectify
        self.pixels = math.prod(self.shape[:2])

    @classmethod
    def of(cls, sections: Sequence[Section], first: bool) -> BatchNormNode | None:
        section = sections[0]
        return cls(section.stage, section.rectify) if isinstance(section.stage, NormStage) else None

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        size = math.prod(self.shape)
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
            for block in _blocks(k, self.x):
                mean = None if alone else block.constants(rows["mean"])
                scale, level = block.constants(rows["scale"]), block.constants(rows["shift"])
                for at, _ in block.pixels():
                    for u, (x, y) in enumerate(zip(block.places(at(self.x)), block.places(at(self.y)), strict=True)):
                        distance = k.subtract(k.load(x), mean[u]) if mean else k.load(x)
                        value = k.fma(distance, scale[u], level[u])
                        k.store_part(k.rectify(value) if self.rectify else value, y, block.valid[u])

        return [*([] if alone else [("statistics", self._statistics)]), ("forward", run)]

    def _statistics(self, k: Emitter) -> None:
        """Leave the tile's mean, the mean distance from it, which rounding leaves, and the sum of squared distances."""
        count = k.builder.uitofp(k.builder.mul(k.count, INDEX(self.pixels)), FLOAT)
        share = k.spread(k.builder.fdiv(FLOAT(1), count))
        for block in _blocks(k, self.x):
            totals, squares, rests = (k.variables(len(block.valid)) for _ in range(3))
            for at, inside in block.pixels():
                for total, place in zip(totals, block.places(at(self.x)), strict=True):
                    k.increase(total, inside(k.load(place)))
            block.finish(totals, k.arena + self.table["own_mean"], share)
            mean = block.constants(k.arena + self.table["own_mean"])
            for at, inside in block.pixels():
                for total, rest, middle, place in zip(squares, rests, mean, block.places(at(self.x)), strict=True):
                    distance = inside(k.subtract(k.load(place), middle))
                    k.accumulate(total, distance, distance)
                    k.increase(rest, distance)
            block.finish(squares, k.arena + self.table["own_squares"])
            block.finish(rests, k.arena + self.table["own_rest"], share)

    def backward(self, plan: Layout) -> Kernels:
        return [("sums", lambda k: self._sums(k, plan)), *(super().backward(plan) if self.dx else [])]

    def _gradient(self, k: Emitter, block: Block) -> Callable[..., list[tuple[ir.Value, ir.Value]]]:
        """Return what gives, of a pixel, the distances of x from the mean and the gradient before the ReLU."""
        mean, scale, shift = (block.constants(k.arena + self.table[name]) for name in ("mean", "scale", "shift"))

        def found(at: Callable, inside: Callable) -> list[tuple[ir.Value, ir.Value]]:
            values = []
            for u, (x, dy) in enumerate(zip(block.places(at(self.x)), block.places(at(self.dy)), strict=True)):
                distance, gradient = k.subtract(k.load(x), mean[u]), inside(k.load(dy))
                if self.rectifies_dy:
                    gradient = k.where_positive(k.fma(distance, scale[u], shift[u]), gradient)
                values.append((distance, gradient))
            return values

        return found

    def _sums(self, k: Emitter, plan: Layout) -> None:
        """Leave the tile's sums of dy and of dy * n, n being x normalized; they are the parameters' gradients."""
        rows = {name: k.arena + offset for name, offset in self.table.items()}
        for block in _blocks(k, self.x):
            gradients = self._gradient(k, block)
            sums, products = k.variables(len(block.valid)), k.variables(len(block.valid))
            for at, inside in block.pixels():
                for total, product, (distance, gradient) in zip(sums, products, gradients(at, inside), strict=True):
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
        for block in _blocks(k, self.x):
            gradients = self._gradient(k, block)
            names = ("scale", "slope", "level")
            scale, slope, level = (block.constants(k.arena + self.table[name]) for name in names)
            for at, inside in block.pixels():
                places = block.places(at(self.needed_dx))
                for u, (distance, gradient) in enumerate(gradients(at, inside)):
                    value = k.fma(scale[u], gradient, k.fma(slope[u], distance, level[u]))
                    k.store_part(inside(value), places[u], block.valid[u])

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
        size, alone = meeting.size(), k.builder.icmp_signed("==", meeting.index, INDEX(0))
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
            for name, value in values.items():
                k.store(value, (meeting.own + self.table[name]).at(channel))
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
            inverse, scale, rest = (k.load((meeting.own + self.table[name]).at(channel)) for name in names)
            factor = k.multiply(scale, share)
            slope = k.multiply(k.multiply(factor, inverse), product.get())
            level = k.subtract(k.multiply(factor, total.get()), k.multiply(slope, rest))
            for name, value in (("slope", slope), ("level", level)):
                k.store(value, (meeting.own + self.table[name]).at(channel))


class Meeting:
    """What a thread sees of the tiles when all have met. Buffers: parameters, running averages, arenas, table (int64).

    Attributes:
        index, own: which arena is written, and its address.
    """

    def __init__(self, k: Emitter, plan: Layout, pixels: int) -> None:
        self._k, self._stride, self._pixels = k, plan.arena.stride, pixels
        *_, self._arenas, self._table = k.buffers
        self.index = self._number(INDEX(0))
        self.own = self._arenas.at(self.index, self._stride)

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

    def _number(self, at: ir.Value) -> ir.Value:
        return self._k.builder.load(self._k.builder.gep(self._table.value(INDEX), [at]))


class Block:
    """Some neighbouring vectors of every pixel: of `lanes` channels each, or of one channel of `lanes` images.

    Of each vector as many lanes count as `valid` says.
    """

    def __init__(self, k: Emitter, x: Tensor, channel: ir.Value, valid: list[int]) -> None:
        self._k, self._x, self._channel, self.valid = k, x, channel, valid

    def constants(self, row: Pointer) -> list[ir.Value]:
        """Load a vector for each, from a row of a number per channel."""
        k, at = self._k, row.at(self._channel)
        return [k.splat(at + u) if self._x.lanes > 1 else k.load(at + u * k.lanes) for u in range(len(self.valid))]

    def places(self, pixel: Pointer) -> list[Pointer]:
        """Return the address of each vector of a pixel."""
        first = pixel.at(self._channel, self._x.lanes)
        return [first + u * self._k.lanes for u in range(len(self.valid))]

    def finish(self, totals: Sequence, row: Pointer, factor: ir.Value | None = None) -> None:
        """Store the sums of the channels, times a vector of one factor, if given, in a row."""
        k, at = self._k, row.at(self._channel)
        for u, total in enumerate(totals):
            value = total.get() if factor is None else k.multiply(total.get(), factor)
            if self._x.lanes > 1:
                k.builder.store(k.sum_lanes(value), (at + u).value(FLOAT), align=4)
            else:
                k.store(value, at + u * k.lanes)

    def pixels(self) -> Iterator[tuple[Callable[[Tensor], Pointer], Callable[[ir.Value], ir.Value]]]:
        """Run what follows for every pixel: with its address in a tensor, and what makes 0 of lanes with no image."""
        k, (height, width, _), lanes = self._k, self._x.shape, self._x.lanes
        with k.loop(k.groups(lanes)) as n:
            # a group's images that there are
            left = k.builder.trunc(k.builder.sub(k.count, k.builder.mul(n, INDEX(lanes))), INT)
            numbers = ir.Constant(k.indices, [INT(lane) for lane in range(k.lanes)])
            mask = k.builder.icmp_signed("<", numbers, k.spread(left))
            with k.loop(height) as p, k.loop(width) as q:
                yield (
                    lambda tensor: tensor.pixel(k, n, p, q),
                    lambda value: k.select(mask, value, k.zero()) if lanes > 1 else value,
                )


def _blocks(k: Emitter, x: Tensor) -> Iterator[Block]:
    """Run what follows for the vectors of a pixel, block by block."""
    channels, step = x.shape[2], k.lanes // x.lanes
    if channels // step:
        for first, width, times in chunks(channels // step, TOGETHER):
            with k.loop(times) as t:
                yield Block(k, x, k.scaled(t, width * step, first * step), [k.lanes] * width)
    if channels % step:
        yield Block(k, x, INDEX(channels - channels % step), [channels % step])
