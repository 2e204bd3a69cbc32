"""The gradient of a convolution with a max-pool after it, by following each argmax: a quarter of the work or less.

Every image has its own argmax, so images cannot share vectors here. Instead the kernel rows do: with channels last, the
patch that a cell's maximum saw is K runs of K * C floats, and so are a filter's weights. For one filter these, and as
many accumulators of their gradient, stay in registers. An *event* is a cell whose gradient g is not zero (ReLU leaves
only part of them): at its patch, dw += g * x and dx += g * w, per vector one load, one load and store, and two
multiply-adds.

For each group of `lanes` images: the input to rows; the events of every image and filter, in lists, so that the loop
over them meets no branch; the events one by one; dx back to lanes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llvmlite import ir

from cnnexp.backends.parts import BACKWARD
from cnnexp.backends.simd.algorithms.convolution.event_lists import EventLists, list_events, make_lists
from cnnexp.backends.simd.algorithms.convolution.lanes import Lanes
from cnnexp.backends.simd.algorithms.cost import Work, events, transposition
from cnnexp.backends.simd.algorithms.reorder import group_to_lanes, group_to_rows
from cnnexp.backends.simd.compiler.emit import INDEX, Emitter, Kernels, Pointer, Target
from cnnexp.backends.simd.layouts import Arena, Blocked, Layout, round_up


class LanesArgmax(Lanes):
    """Batch in lanes; gradients through the argmax of the max-pool after it alone."""

    algorithm = "lanes-argmax"
    argmax = True

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
        self.gradient = SparseGradient(
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
class SparseGradient:
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


def conv2d_backward(k: Emitter, conv: SparseGradient, weights: Pointer, dw: Pointer, db: Pointer | None) -> None:
    """dw, db += the gradient; dx = the gradient."""
    scratch, stride = conv.scratch, round_up(conv.size, k.lanes) + k.lanes
    x, dx = k.arena + scratch.x, k.arena + scratch.dx
    row = round_up(conv.run, k.lanes)
    packed, gradients = (k.arena + scratch.weights, k.arena + scratch.gradients)
    pack_weights(k, weights, packed, gradients, (conv.kernel, conv.run, conv.filters), row)
    with k.loop(k.groups(k.lanes)) as g:
        images = k.builder.sub(k.count, k.builder.mul(g, INDEX(k.lanes)))
        group_to_rows(k, conv.x.stored(k, g), x, conv.size, stride)
        list_events(k, conv.events, g, db)
        with k.loop(k.lanes) as n:
            with k.loop(stride // k.lanes) as i:
                k.store(k.zero(), dx.at(n, stride).at(i, k.lanes))
            with k.loop(conv.filters) as f:
                _follow_events(k, conv, n, f, x.at(n, stride), dx.at(n, stride))
        _store_gradient(k, conv, g, dx, stride, images)
    unpack_gradients(k, gradients, dw, (conv.kernel, conv.run, conv.filters), row)


def _store_gradient(k: Emitter, conv: SparseGradient, g: ir.Value, dx: Pointer, stride: int, images: ir.Value) -> None:
    """Turn dx to lanes, without what lies in the halo of x."""
    x = conv.x if conv.rectified else None
    if conv.x.dense and conv.dx.dense:
        group_to_lanes(k, dx, conv.dx.image(k, g), conv.size, stride, images, x.image(k, g) if x else None)
        return
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


def pack_weights(
    k: Emitter, weights: Pointer, packed: Pointer, gradients: Pointer, size: tuple[int, int, int], row: int
) -> None:
    """Copy weights, filter by filter, and clear their gradients; what lies behind a kernel's row is 0.

    Args:
        size: kernel rows, K * C, filters. row: floats from one kernel row to the next, a filter's in whole vectors.
    """
    kernel, run, filters = size
    filter_ = round_up(kernel * row, k.lanes)
    with k.loop(filters * filter_ // k.lanes) as i:
        k.store(k.zero(), packed.at(i, k.lanes))
        k.store(k.zero(), gradients.at(i, k.lanes))
    with k.loop(kernel) as i, k.loop(run) as r, k.loop(filters) as f:
        value = k.load_float(weights.at(i, run * filters).at(r, filters).at(f))
        k.store(value, packed.at(f, filter_).at(i, row).at(r))


def unpack_gradients(k: Emitter, gradients: Pointer, dw: Pointer, size: tuple[int, int, int], row: int) -> None:
    """Add to dw what lies as `pack_weights` has it."""
    kernel, run, filters = size
    filter_ = round_up(kernel * row, k.lanes)
    with k.loop(kernel) as i, k.loop(run) as r, k.loop(filters) as f:
        value = k.load_float(gradients.at(f, filter_).at(i, row).at(r))
        k.add_to(dw.at(i, run * filters).at(r, filters).at(f), value)


def _follow_events(k: Emitter, conv: SparseGradient, n: ir.Value, f: ir.Value, x: Pointer, dx: Pointer) -> None:
    """Run one image's events of one filter."""
    scratch = conv.scratch
    row, parts = round_up(conv.run, k.lanes), widths(conv.run, k.lanes)
    packed = (k.arena + scratch.weights).at(f, conv.kernel * row)
    gradients = (k.arena + scratch.gradients).at(f, conv.kernel * row)
    places = [(i, p * k.lanes, width) for i in range(conv.kernel) for p, width in enumerate(parts)]
    weights = [k.load(packed + (i * row + at), width) for i, at, width in places]
    totals = [k.variable(k.load(gradients + (i * row + at), width)) for i, at, width in places]
    with conv.events.each(k, n, f) as (value, patch):
        source, target = x.at(patch), dx.at(patch)
        for weight, total, (i, at, width) in zip(weights, totals, places, strict=True):
            factor = k.spread(value, width)
            place = i * conv.row + at
            k.accumulate(total, factor, k.load(source + place, width))
            k.store(k.fma(factor, weight, k.load(target + place, width)), target + place)
    for total, (i, at, _) in zip(totals, places, strict=True):
        k.store(total.get(), gradients + (i * row + at))
