"""`pool`: a max-pool or an average pool on its own, the batch in the lanes; any window, stride and padding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cnnexp.backends.simd.algorithms.cost import Work, passes
from cnnexp.backends.simd.algorithms.elementwise import apply, same
from cnnexp.backends.simd.algorithms.node import Node, Section
from cnnexp.backends.simd.compiler.emit import INDEX, INT, Emitter, Kernels, Pointer, Target
from cnnexp.backends.simd.layouts import Blocked, Halo, Layout
from cnnexp.network import MaxPool2d, PoolStage


class Pool(Node[Blocked, Blocked]):
    """MaxPool2d or AvgPool2d where no convolution takes it in."""

    input_layout = output_layout = Blocked
    stage: PoolStage
    algorithm = "pool"

    @classmethod
    def of(cls, sections: Sequence[Section], first: bool) -> Pool | None:
        stage = sections[0].stage
        return cls(stage) if isinstance(stage, PoolStage) else None

    def __init__(self, stage: PoolStage) -> None:
        super().__init__(stage.name, stage.output_shape)
        self.stage, self.size, self.stride = stage, stage.window.size, stage.window.stride
        self.largest = isinstance(stage.layer, MaxPool2d)

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        each = passes(math.prod(self.shape), 3 * self.size**2, target)
        kept = passes(math.prod(self.stage.input_shape), 3, target)
        return {"forward": each, "backward": Work(0.0, each.cycles + kept.cycles)}

    def input_halo(self) -> Halo:
        return Halo(*self.stage.window.pads, value=-math.inf if self.largest else 0.0)

    def prepare(self, plan: Layout) -> None:
        if self.largest:
            self.argmax = plan.arena.blocked(self.shape)
        else:
            self.shares = plan.arena.constants((1 / self._inside()).astype(np.float32))
        if self.dx:
            halo = self.input_halo()
            self.spread = plan.arena.blocked(self.dx.shape, Halo(halo.top, halo.left, halo.bottom, halo.right))

    def _inside(self) -> np.ndarray:
        """Return how many pixels of each window lie inside the image, (U, V)."""
        counts = []
        (rows, columns, _), window = self.y.shape, self.stage.window
        height, width, _ = self.stage.input_shape
        for pad, size, count in ((window.top, height, rows), (window.left, width, columns)):
            first = np.arange(count) * self.stride - pad
            counts.append(np.minimum(first + self.size, size) - np.maximum(first, 0))
        return np.multiply.outer(*counts)

    def forward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            if self.largest:
                max_pool(k, self.x, self.size, self.stride, self.y, self.argmax)
            else:
                avg_pool(k, self.x, self.size, self.stride, k.arena + self.shares, self.y)

        return [("forward", run)]

    def backward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            if self.largest:
                max_pool_backward(k, self.argmax, self.dy, self.size, self.stride, self.spread)
            else:
                avg_pool_backward(k, self.dy, self.size, self.stride, k.arena + self.shares, self.spread)
            apply(k, same, self.spread, self.needed_dx)

        return [("backward", run)]


def max_pool(k: Emitter, x: Blocked, size: int, stride: int, y: Blocked, argmax: Blocked) -> None:
    """y = the largest of each window, argmax = its place, a 32-bit integer; x's halo holds -inf, so it never wins."""
    rows, columns, channels = y.shape
    with k.loop(k.groups(k.lanes)) as g, k.loop(rows) as u, k.loop(columns) as v, k.loop(channels) as c:
        corner = x.stored(k, g).at(u, stride * x.row).at(v, stride * x.column).at(c, x.lanes)
        best, where = k.variable(k.constant(-math.inf)), k.variable(k.integers(0))
        with k.loop(size) as i, k.loop(size) as j:
            value = k.load(corner.at(i, x.row).at(j, x.column))
            code = k.builder.trunc(k.builder.add(k.builder.mul(i, INDEX(size)), j), INT)
            larger = k.larger(value, best.get())
            best.set(k.select(larger, value, best.get()))
            where.set(k.select(larger, k.spread(code), where.get()))
        k.store(best.get(), y.pixel(k, g, u, v).at(c, y.lanes))
        k.store(k.as_floats(where.get()), argmax.pixel(k, g, u, v).at(c, argmax.lanes))


def max_pool_backward(k: Emitter, argmax: Blocked, dy: Blocked, size: int, stride: int, dx: Blocked) -> None:
    """dx = dy added at each window's argmax. dx has the halo that x has; what lands in it is not used."""
    _clear(k, dx)
    rows, columns, channels = dy.shape
    with k.loop(k.groups(k.lanes)) as g, k.loop(rows) as u, k.loop(columns) as v, k.loop(channels) as c:
        corner = dx.stored(k, g).at(u, stride * dx.row).at(v, stride * dx.column).at(c, dx.lanes)
        value = k.load(dy.pixel(k, g, u, v).at(c, dy.lanes))
        where = k.as_integers(k.load(argmax.pixel(k, g, u, v).at(c, argmax.lanes)))
        with k.loop(size) as i, k.loop(size) as j:
            code = k.builder.trunc(k.builder.add(k.builder.mul(i, INDEX(size)), j), INT)
            here = k.builder.icmp_signed("==", where, k.spread(code))
            at = corner.at(i, dx.row).at(j, dx.column)
            k.store(k.add(k.load(at), k.select(here, value, k.zero())), at)


def avg_pool(k: Emitter, x: Blocked, size: int, stride: int, shares: Pointer, y: Blocked) -> None:
    """y = the mean of each window's pixels inside the image; `shares` (U, V) holds 1 / their number."""
    rows, columns, channels = y.shape
    with k.loop(k.groups(k.lanes)) as g, k.loop(rows) as u, k.loop(columns) as v:
        share = k.splat(shares.at(u, columns).at(v))
        with k.loop(channels) as c:
            corner = x.stored(k, g).at(u, stride * x.row).at(v, stride * x.column).at(c, x.lanes)
            total = k.variable()
            with k.loop(size) as i, k.loop(size) as j:
                total.set(k.add(total.get(), k.load(corner.at(i, x.row).at(j, x.column))))
            k.store(k.multiply(total.get(), share), y.pixel(k, g, u, v).at(c, y.lanes))


def avg_pool_backward(k: Emitter, dy: Blocked, size: int, stride: int, shares: Pointer, dx: Blocked) -> None:
    """dx = each window's share of dy, added up; dx has the halo that x has."""
    _clear(k, dx)
    rows, columns, channels = dy.shape
    with k.loop(k.groups(k.lanes)) as g, k.loop(rows) as u, k.loop(columns) as v:
        share = k.splat(shares.at(u, columns).at(v))
        with k.loop(channels) as c:
            corner = dx.stored(k, g).at(u, stride * dx.row).at(v, stride * dx.column).at(c, dx.lanes)
            value = k.multiply(k.load(dy.pixel(k, g, u, v).at(c, dy.lanes)), share)
            with k.loop(size) as i, k.loop(size) as j:
                at = corner.at(i, dx.row).at(j, dx.column)
                k.store(k.add(k.load(at), value), at)


def _clear(k: Emitter, x: Blocked) -> None:
    with k.loop(k.groups(k.lanes)) as g:
        k.clear(x.stored(k, g), x.group // x.lanes)
