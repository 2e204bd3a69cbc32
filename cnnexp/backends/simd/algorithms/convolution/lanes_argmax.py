"""`lanes-argmax`: `lanes`, with gradients through the argmax of the max-pool after it; see `argmax_gradient`.

For one filter the weights of a whole patch, and as many sums of their gradient, stay in registers. For each group of
`lanes` images: the input to rows; the events of every image and filter, in lists; the events one by one; dx back to
lanes.

Gain: few channels before a max-pool. For the second convolution of `two_conv_pool4` 21,522 cycles an image for all
kernels, 25,330 by `lanes` (`python -m benchmarks.kernels --algorithms`, Zen 3, AVX2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llvmlite import ir

from cnnexp.backends.parts import BACKWARD
from cnnexp.backends.simd.algorithms.convolution.argmax_gradient import (
    EventLists,
    list_events,
    make_lists,
    pack_weights,
    unpack_gradients,
)
from cnnexp.backends.simd.algorithms.convolution.lanes import Lanes
from cnnexp.backends.simd.algorithms.cost import Work, events, transposition
from cnnexp.backends.simd.algorithms.reorder import group_to_lanes, group_to_rows
from cnnexp.backends.simd.compiler.emit import INDEX, Emitter, Kernels, Pointer, Target
from cnnexp.backends.simd.layouts import Arena, Blocked, Layout, round_up


class LanesArgmax(Lanes):
    """Batch in lanes; gradients through the argmax of the max-pool after it alone."""

    algorithm = "lanes-argmax"
    argmax, any_taps = True, False

    def in_lanes(self, what: str, kernel: str) -> str:
        return "weights" if what == BACKWARD else "images"

    def fits(self, target: Target) -> bool:
        """Whether a filter's weights and their gradients fit the registers."""
        layer, channels = self.stage.layer, self.stage.input_shape[2]
        return 2 * layer.kernel * len(widths(layer.kernel * channels, target.lanes)) + 2 <= target.registers

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        (height, width, channels), filters = self.stage.input_shape, self.stage.layer.filters
        kernel, cells = self.stage.layer.kernel, math.prod(self.shape[:2])
        moved = transposition(2 * height * width * channels, target).cycles
        run, vectors = kernel * channels, kernel * len(widths(kernel * channels, target.lanes))
        held = 8 * height * width * channels
        following = events(cells, self.window, filters, kernel, run, 1, held, target)
        packing = 6 * kernel**2 * channels * filters / images
        backward = Work(following.macs, following.cycles + moved + packing, f"{vectors} vectors of a filter")
        return {"forward": self.forward_work(target), "backward": backward}

    def prepare(self, plan: Layout) -> None:
        self.prepare_forward(plan)
        layer, channels, windows = self.stage.layer, self.stage.input_shape[2], self.correlation.windows
        assert windows is not None
        lists = make_lists(
            plan.arena, self.y, self.dy, windows, self.rectifies_dy,
            down=layer.stride * self.x.row // self.x.lanes, right=layer.stride * channels,
            reach=-(-(layer.kernel + layer.stride * windows.size) // (windows.stride * layer.stride)),
        )  # fmt: skip
        scratch = make_scratch(plan.arena, layer.kernel, self.x, layer.filters)
        self.gradient = LanesGradient(
            self.x, self.needed_dx, layer.kernel, channels, layer.filters, lists, self.input_rectified, scratch
        )

    def backward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            weights, _ = plan.parameters.weights(k, self.stage)
            conv2d_backward(k, self.gradient, weights, *plan.parameters.gradients(k, self.stage))

        return [("backward", run)]


@dataclass(frozen=True)
class Scratch:
    """Room in the arena, for one group of images.

    Attributes:
        x, dx: [image][values of the input with its halo, rounded up].
        weights, gradients: [filter][kernel row][K * C, rounded up].
    """

    x: int
    dx: int
    weights: int
    gradients: int


@dataclass(frozen=True)
class LanesGradient:
    """The geometry.

    Attributes:
        x: input, its halo wide enough for every window. dx: its gradient.
        kernel, channels, filters: K, C, F. events: of the output.
        rectified: x is a ReLU's output, and dx to be the gradient of that ReLU's input.
        scratch: room.
    """

    x: Blocked
    dx: Blocked
    kernel: int
    channels: int
    filters: int
    events: EventLists
    rectified: bool
    scratch: Scratch

    @property
    def size(self) -> int:
        """Floats of one image of the input, its halo with it."""
        return self.x.group // self.x.lanes

    @property
    def row(self) -> int:
        """Floats of one of its rows."""
        return self.x.row // self.x.lanes

    @property
    def run(self) -> int:
        return self.kernel * self.channels


def widths(run: int, lanes: int) -> list[int]:
    """Cut a run of floats into vectors: as many whole ones as fit, then the smallest power of 2 that holds the rest."""
    rest = run % lanes
    return [lanes] * (run // lanes) + ([1 << (rest - 1).bit_length()] if rest else [])


def make_scratch(arena: Arena, kernel: int, x: Blocked, filters: int) -> Scratch:
    lanes, channels = arena.lanes, x.shape[2]
    size = round_up(x.group // lanes, lanes) + lanes
    packed = filters * kernel * round_up(kernel * channels, lanes)
    return Scratch(
        x=arena.allocate(lanes * size),
        dx=arena.allocate(lanes * size),
        weights=arena.allocate(packed),
        gradients=arena.allocate(packed),
    )


def conv2d_backward(k: Emitter, conv: LanesGradient, weights: Pointer, dw: Pointer, db: Pointer | None) -> None:
    """dw, db += the gradient; dx = the gradient."""
    scratch, stride = conv.scratch, round_up(conv.size, k.lanes) + k.lanes
    x, dx = k.arena + scratch.x, k.arena + scratch.dx
    row = round_up(conv.run, k.lanes)
    packed, gradients = (k.arena + scratch.weights, k.arena + scratch.gradients)
    # weights by filter; no gradient yet
    pack_weights(k, weights, packed, gradients, (conv.kernel, conv.run, conv.filters), row)
    # a group: its input to rows, its events to lists
    with k.loop(k.groups(k.lanes)) as g:
        images = k.builder.sub(k.count, k.builder.mul(g, INDEX(k.lanes)))
        group_to_rows(k, conv.x.stored(k, g), x, conv.size, stride)
        list_events(k, conv.events, g, db)
        # image by image, filter by filter
        with k.loop(k.lanes) as n:
            with k.loop(stride // k.lanes) as i:
                k.store(k.zero(), dx.at(n, stride).at(i, k.lanes))
            with k.loop(conv.filters) as f:
                _follow_events(k, conv, n, f, x.at(n, stride), dx.at(n, stride))
        # dx back to lanes, and the gradients of the weights to where they belong
        _store_gradient(k, conv, g, dx, stride, images)
    unpack_gradients(k, gradients, dw, (conv.kernel, conv.run, conv.filters), row)


def _store_gradient(k: Emitter, conv: LanesGradient, g: ir.Value, dx: Pointer, stride: int, images: ir.Value) -> None:
    """Turn dx to lanes, without what lies in the halo of x."""
    x = conv.x if conv.rectified else None
    # no halo on either side: all at once
    if conv.x.dense and conv.dx.dense:
        group_to_lanes(k, dx, conv.dx.image(k, g), conv.size, stride, images, x.image(k, g) if x else None)
        return
    # else row by row, or pixel by pixel where dx has room between them
    height, width, channels = conv.x.shape
    first = dx + (conv.x.halo.top * conv.row + conv.x.halo.left * channels)
    with k.loop(height) as p:
        source, target = first.at(p, conv.row), conv.dx.pixel(k, g, p, INDEX(0))
        if conv.dx.halo.step == 1:
            positive = x.pixel(k, g, p, INDEX(0)) if x else None
            group_to_lanes(k, source, target, width * channels, stride, images, positive)
        else:
            with k.loop(width) as q:
                one = target.at(q, conv.dx.halo.step * conv.dx.column)
                positive = x.pixel(k, g, p, q) if x else None
                group_to_lanes(k, source.at(q, channels), one, channels, stride, images, positive)


def _follow_events(k: Emitter, conv: LanesGradient, n: ir.Value, f: ir.Value, x: Pointer, dx: Pointer) -> None:
    """Run one image's events of one filter."""
    row = round_up(conv.run, k.lanes)
    parts = [(i, p * k.lanes, w) for i in range(conv.kernel) for p, w in enumerate(widths(conv.run, k.lanes))]
    packed, gradients = (
        [(k.arena + at).at(f, conv.kernel * row) + (i * row + start) for i, start, _ in parts]
        for at in (conv.scratch.weights, conv.scratch.gradients)
    )
    places = [(i * conv.row + start, width) for i, start, width in parts]
    conv.events.of(k, n, f).follow(k, places, (x, dx), packed, gradients)
