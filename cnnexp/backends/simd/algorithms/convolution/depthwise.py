"""`depthwise`: a convolution of one filter a channel, in either layout of images: any stride and dilation.

A vector holds `lanes` channels of a pixel, or a channel of `lanes` images; each is multiplied by the weight of its
channel, and nothing is summed over channels. Register tile of a sum: neighbouring pixels of a row, so that a weight is
loaded once for all of them, and what several of them see once for a row of the kernel. Channels are the inner loop, as
they are in memory.

The gradient of the input is the same sum, over the taps that see a pixel; with a stride, pixels whose place modulo the
stride is the same have the same taps, as in `channels`. The gradient of the weights keeps rows of the kernel in
registers along a row of pixels.

MEASURED
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from llvmlite import ir

from cnnexp.backends.simd.algorithms.convolution import channels, lanes
from cnnexp.backends.simd.algorithms.cost import Work, bring, passes
from cnnexp.backends.simd.algorithms.linear.product import chunks
from cnnexp.backends.simd.algorithms.node import Node, Section
from cnnexp.backends.simd.compiler.emit import INDEX, Emitter, Kernels, Pointer, Target
from cnnexp.backends.simd.layouts import NHWC, Blocked, Halo, Layout, padded_rows, round_up
from cnnexp.network import ConvStage

Pixels = Blocked | NHWC

MOST_TAPS = 49
"""Of a kernel, all of which are in the code."""

MOST_PIXELS, GRADIENT_PIXELS = 8, 4
"""Of a tile of sums, and of one of the weights' gradient."""


class Depthwise(Node[Pixels, Pixels]):
    """Conv2d [+ ReLU] with as many groups as channels and filters."""

    algorithm = "depthwise"
    trains = rectifies_dx = any_image = True
    whole_vectors = False
    stage: ConvStage

    def __init__(self, stage: ConvStage, rectify: bool) -> None:
        super().__init__(stage.name, stage.output_shape)
        self.stage, self.rectify, self.kernel = stage, rectify, stage.layer.kernel

    @classmethod
    def of(cls, sections: Sequence[Section], first: bool) -> Self | None:
        stage, layer = sections[0].stage, sections[0].stage.layer
        if not isinstance(stage, ConvStage) or sections[0].pool or layer.kernel**2 > MOST_TAPS:
            return None
        one_each = layer.groups == layer.filters == stage.input_shape[2] > 1
        return cls(stage, sections[0].rectify) if one_each else None

    def in_lanes(self, what: str, kernel: str) -> str:
        return "images" if isinstance(self.x, Blocked) else "channels"

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        outputs, inputs = math.prod(self.shape), math.prod(self.stage.input_shape)
        macs, moved = float(self.stage.macs), bring(outputs + inputs, 4 * images * (outputs + inputs), target)
        pixels = chunks(self.shape[1], MOST_PIXELS)[0][1]
        each = Work(macs, max(0.7 * macs / target.lanes, moved), f"{pixels} pixels")
        found = {"forward": each, "gradient": passes(outputs, 2, target, images)}
        found["backward_weights"] = Work(macs, 1.3 * each.cycles, f"{self._rows(target)} x {self.kernel} taps")
        return found | ({"backward_input": each} if needs_dx else {})

    def _rows(self, target: Target) -> int:
        """Return the rows of the kernel whose gradient the registers hold, beside a tile of dy and a pixel."""
        return max(1, min(self.kernel, (target.registers - GRADIENT_PIXELS - 2) // self.kernel))

    def _along(self, axis: int) -> Axis:
        stage = self.stage
        window, pad = stage.window, stage.window.pads[axis]
        return Axis(self.kernel, window.stride, window.dilation, pad, stage.input_shape[axis], self.shape[axis])

    def input_halo(self) -> Halo:
        return Halo(*self.stage.window.pads)

    def gradient_halo(self, needs_dx: bool) -> Halo:
        (top, bottom), (left, right) = (self._along(axis).room() if needs_dx else (0, 0) for axis in range(2))
        return Halo(top, left, bottom, right)

    def prepare(self, plan: Layout) -> None:
        taps, size = self.kernel**2, self.shape[2]
        self.row = round_up(size, plan.target.lanes)
        views = functools.partial(padded_rows, rows=taps, row=self.row)
        plan.parameters.place(self.stage.weight, taps * self.row, views)
        plan.parameters.place_plain(self.stage.bias)
        self.d, halo = self.dy, self.gradient_halo(self.dx is not None)
        if isinstance(self.dy, NHWC) and self.dy.halo != halo:
            self.d = plan.arena.nhwc(self.shape, halo)
        if isinstance(self.x, Blocked):
            self.sums = plan.arena.allocate((taps + 1) * size * plan.target.lanes)

    def forward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            weights, bias = plan.parameters.weights(k, self.stage)

            def finish(value: ir.Value, vector: Vector, _: Place) -> ir.Value:
                value = value if bias is None else k.add(value, vector.weight(bias))
                return k.rectify(value) if self.rectify else value

            add_taps(
                k, (self.x, self.y), (self._along(0).forward(), self._along(1).forward()), self._tap(weights), finish
            )

        return [("forward", run)]

    def _tap(self, weights: Pointer) -> Tap:
        return lambda i, j: weights + (i * self.kernel + j) * self.row

    def backward(self, plan: Layout) -> Kernels:
        kernels: Kernels = []
        if self.rectifies_dy or self.d is not self.dy:
            kernels.append(("gradient", self._gradient))
        kernels.append(("backward_weights", lambda k: self._backward_weights(k, plan)))
        if self.dx is not None:
            kernels.append(("backward_input", lambda k: self._backward_input(k, plan)))
        return kernels

    def _gradient(self, k: Emitter) -> None:
        """Take the ReLU's gradient, and put room around it."""
        match self.y, self.dy, self.d:
            case Blocked() as y, Blocked() as dy, _:
                lanes.rectify_gradient(k, y, dy)
            case NHWC() as y, NHWC() as dy, NHWC() as d:
                channels.copy_gradient(k, y if self.rectifies_dy else None, dy, d)

    def _backward_input(self, k: Emitter, plan: Layout) -> None:
        tap = self._tap(plan.parameters.weights(k, self.stage)[0])

        def finish(value: ir.Value, vector: Vector, at: Place) -> ir.Value:
            return k.where_positive(k.load(vector.of(at(self.x))), value) if self.input_rectified else value

        for phases in itertools.product(self._along(0).backward(), self._along(1).backward()):
            add_taps(k, (self.d, self.needed_dx), phases, tap, finish)

    def _backward_weights(self, k: Emitter, plan: Layout) -> None:
        dw, db = plan.parameters.gradients(k, self.stage)
        tap, phases, size = self._tap(dw), (self._along(0).forward(), self._along(1).forward()), self.shape[2]
        if not isinstance(self.x, Blocked):
            self._add_gradients(k, phases, tap, db)
            return
        # images in lanes: a vector for each weight and bias, whose lanes are added up at the end
        taps, sums = self.kernel**2, k.arena + self.sums
        with k.loop((taps + 1) * size) as i:
            k.store(k.zero(), sums.at(i, k.lanes))
        of_bias = sums + taps * size * k.lanes
        self._add_gradients(k, phases, lambda i, j: sums + (i * self.kernel + j) * size * k.lanes, db and of_bias)
        with k.loop(size) as c:
            with k.loop(taps) as t:
                k.add_to(dw.at(t, self.row).at(c), k.sum_lanes(k.load(sums.at(t, size * k.lanes).at(c, k.lanes))))
            if db is not None:
                k.add_to(db.at(c), k.sum_lanes(k.load(of_bias.at(c, k.lanes))))

    def _add_gradients(self, k: Emitter, phases: tuple[Phase, Phase], tap: Tap, db: Pointer | None) -> None:
        """Add to vectors of the weights' gradient at tap(i, j), and of the bias's, channel by channel as in a pixel."""
        (down, across), x, d = phases, self.x, self.d
        for first, high, times in chunks(self.kernel, self._rows(k.target)):
            for start in range(first, first + high * times, high):
                rows, with_bias = down.taps[start : start + high], db is not None and not start
                with images(k, d) as n, k.loop(down.count) as p:
                    corner, gradient = pixel(k, x, n).at(p, down.stride * x.row), pixel(k, d, n).at(p, d.row)
                    for vector in vectors(k, d):
                        places = [[vector.of(tap(i, j)) for j, _ in across.taps] for i, _ in rows]
                        bias = [[vector.of(db)]] if db is not None and with_bias else []
                        with k.sums(places + bias) as totals:
                            for first_q, size, count in chunks(across.count, GRADIENT_PIXELS):
                                with k.loop(count) as t:
                                    q = k.builder.add(k.builder.mul(t, INDEX(size)), INDEX(first_q))
                                    at = vector.of(gradient.at(q, d.column))
                                    values = [k.load_part(at + m * d.column, vector.valid) for m in range(size)]
                                    for total in totals[-1] if bias else ():
                                        for value in values:
                                            total.set(k.add(total.get(), value))
                                    seen = vector.of(corner.at(q, across.stride * x.column))
                                    for row, (_, down_by) in zip(totals, rows, strict=False):
                                        for place, uses in across.seen(size):
                                            value = k.load(seen + (down_by * x.row + place * x.column))
                                            for j, m in uses:
                                                k.accumulate(row[j], value, values[m])


@dataclass(frozen=True)
class Phase:
    """Pixels along one axis, first, first + step, ..., that the same taps make.

    Attributes:
        count: of the pixels. stride: from what one of them sees to what the next one does.
        taps: which, and the place of what the first pixel sees through it.
    """

    first: int
    step: int
    count: int
    stride: int
    taps: tuple[tuple[int, int], ...]

    def seen(self, pixels: int) -> list[tuple[int, list[tuple[int, int]]]]:
        """Return the places that so many neighbours see, each with (the number in `taps`, which neighbour)."""
        found: dict[int, list[tuple[int, int]]] = {}
        for number, (_, place) in enumerate(self.taps):
            for m in range(pixels):
                found.setdefault(place + m * self.stride, []).append((number, m))
        return sorted(found.items())


@dataclass(frozen=True)
class Axis:
    """A convolution along one axis, of `size` pixels to `count`."""

    kernel: int
    stride: int
    dilation: int
    pad: int
    size: int
    count: int

    def forward(self) -> Phase:
        taps = tuple((t, t * self.dilation - self.pad) for t in range(self.kernel))
        return Phase(0, 1, self.count, self.stride, taps)

    def backward(self) -> list[Phase]:
        """Return the phases of the input, made of the output's gradient."""
        found = []
        for first in range(min(self.stride, self.size)):
            places = ((t, first + self.pad - t * self.dilation) for t in range(self.kernel))
            taps = tuple((t, place // self.stride) for t, place in places if place % self.stride == 0)
            found.append(Phase(first, self.stride, len(range(first, self.size, self.stride)), 1, taps))
        return found

    def room(self) -> tuple[int, int]:
        """Return the room that the output's gradient needs before and after it."""
        places = [(place, place + phase.count - 1) for phase in self.backward() for _, place in phase.taps]
        before, after = min(place for place, _ in places), max(place for _, place in places)
        return max(0, -before), max(0, after - self.count + 1)


@dataclass(frozen=True)
class Vector:
    """A vector of every pixel at run time: from `channel` on, of whose lanes the first `valid` count."""

    k: Emitter
    of_images: bool
    channel: ir.Value
    valid: int

    def of(self, pixel: Pointer) -> Pointer:
        """Return its address in a pixel."""
        return pixel.at(self.channel, self.k.lanes if self.of_images else 1)

    def weight(self, row: Pointer) -> ir.Value:
        """Load it from a row of a number per channel."""
        at = row.at(self.channel)
        return self.k.splat(at) if self.of_images else self.k.load(at)


Tap = Callable[[int, int], Pointer]
"""Where the row of a tap's numbers lies."""

Place = Callable[[Pixels], Pointer]
"""The address of the pixel that is made, in a tensor of the same shape."""


def images(k: Emitter, x: Pixels):  # type: ignore[no-untyped-def]
    """Run the block for every image, or every group of as many as there are lanes."""
    return k.loop(k.groups(k.lanes) if isinstance(x, Blocked) else k.count)


def pixel(k: Emitter, x: Pixels, n: ir.Value) -> Pointer:
    """Return the address of an image's first pixel."""
    return x.pixel(k, n, 0, 0)


def vectors(k: Emitter, x: Pixels) -> Iterator[Vector]:
    """Run the code for every vector of a pixel."""
    of_images, (*_, size) = isinstance(x, Blocked), x.shape
    step = 1 if of_images else k.lanes
    if size // step:
        with k.loop(size // step) as v:
            yield Vector(k, of_images, k.builder.mul(v, INDEX(step)), k.lanes)
    if size % step:
        yield Vector(k, of_images, INDEX(size - size % step), size % step)


def add_taps(
    k: Emitter,
    tensors: tuple[Pixels, Pixels],
    phases: tuple[Phase, Phase],
    tap: Tap,
    finish: Callable[[ir.Value, Vector, Place], ir.Value],
) -> None:
    """Fill the pixels of a phase down and one across with the sums of what the taps see.

    Args:
        tensors: that is seen, and that is filled. tap: gives the weights. finish: makes of a sum what is stored.
    """
    (x, y), (down, across) = tensors, phases

    def number(phase: Phase, i: ir.Value, more: int = 0) -> ir.Value:
        return k.builder.add(k.builder.mul(i, INDEX(phase.step)), INDEX(phase.first + more * phase.step))

    # an image, a row, a tile of its pixels, a vector of them
    with images(k, y) as n, k.loop(down.count) as u:
        source, p = pixel(k, x, n).at(u, down.stride * x.row), number(down, u)
        for first, size, times in chunks(across.count, MOST_PIXELS):
            with k.loop(times) as t:
                v = k.builder.add(k.builder.mul(t, INDEX(size)), INDEX(first))
                corner = source.at(v, across.stride * x.column)
                for vector in vectors(k, y):
                    at, sums = vector.of(corner), [k.zero() for _ in range(size)]
                    # a row of the kernel: each pixel that is seen goes to all sums that it is in
                    for i, down_by in down.taps:
                        weights = [vector.weight(tap(i, j)) for j, _ in across.taps]
                        for place, uses in across.seen(size):
                            value = k.load(at + (down_by * x.row + place * x.column))
                            for j, m in uses:
                                sums[m] = k.fma(value, weights[j], sums[m])
                    for m, total in enumerate(sums):
                        q = number(across, v, m)
                        place_of = functools.partial(lambda q, tensor: tensor.pixel(k, n, p, q), q)
                        k.store_part(finish(total, vector, place_of), vector.of(place_of(y)), vector.valid)
