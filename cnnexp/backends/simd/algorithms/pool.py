"""`pool`: a max-pool or an average pool on its own, the batch in the lanes; any window, stride and padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from llvmlite import ir

from cnnexp.backends.simd.algorithms.cost import Work, passes
from cnnexp.backends.simd.algorithms.elementwise import apply, same
from cnnexp.backends.simd.algorithms.node import Node, Section
from cnnexp.backends.simd.compiler.emit import INDEX, INT, Emitter, Kernels, Pointer, Target
from cnnexp.backends.simd.layouts import Blocked, Halo, Layout
from cnnexp.network import MaxPool2d, PoolStage

Place = Callable[[Blocked], Pointer]


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
        return [("forward", self._max if self.largest else self._average)]

    def backward(self, plan: Layout) -> Kernels:
        return [("backward", self._backward)]

    @contextmanager
    def _windows(self, k: Emitter, seen: Blocked) -> Iterator[tuple[Pointer, Place, ir.Value]]:
        """Run the block for every vector of the output.

        Yields where its window begins in what is seen; the address of a vector of the output's shape; and 1 / the
        number of the window's pixels inside the image, in all lanes, where a mean is taken.
        """
        rows, columns, channels = self.y.shape
        with k.loop(k.groups(k.lanes)) as g, k.loop(rows) as u, k.loop(columns) as v:
            share = k.zero() if self.largest else k.splat((k.arena + self.shares).at(u, columns).at(v))
            with k.loop(channels) as c:
                corner = seen.stored(k, g).at(u, self.stride * seen.row).at(v, self.stride * seen.column)
                yield corner.at(c, seen.lanes), lambda tensor: tensor.pixel(k, g, u, v).at(c, tensor.lanes), share

    @contextmanager
    def _pixels(self, k: Emitter, seen: Blocked, corner: Pointer) -> Iterator[tuple[Pointer, ir.Value]]:
        """Run the block for every pixel of a window: its address, and in all lanes its number."""
        with k.loop(self.size) as i, k.loop(self.size) as j:
            code = k.builder.trunc(k.builder.add(k.builder.mul(i, INDEX(self.size)), j), INT)
            yield corner.at(i, seen.row).at(j, seen.column), k.spread(code)

    def _max(self, k: Emitter) -> None:
        """y = the largest of each window, argmax = its place, a 32-bit integer; x's halo holds -inf: it never wins."""
        with self._windows(k, self.x) as (corner, place, _):
            best, where = k.variable(k.constant(-math.inf)), k.variable(k.integers(0))
            with self._pixels(k, self.x, corner) as (at, code):
                value = k.load(at)
                larger = k.larger(value, best.get())
                best.set(k.select(larger, value, best.get()))
                where.set(k.select(larger, code, where.get()))
            k.store(best.get(), place(self.y))
            k.store(k.as_floats(where.get()), place(self.argmax))

    def _average(self, k: Emitter) -> None:
        """y = the mean of each window's pixels inside the image."""
        with self._windows(k, self.x) as (corner, place, share):
            total = k.variable()
            with self._pixels(k, self.x, corner) as (at, _):
                k.increase(total, k.load(at))
            k.store(k.multiply(total.get(), share), place(self.y))

    def _backward(self, k: Emitter) -> None:
        """dx = dy added at each window's argmax, or its shares at every pixel; what lands in x's halo is not used."""
        spread = self.spread
        with k.loop(k.groups(k.lanes)) as g:
            k.clear(spread.stored(k, g), spread.stride // spread.lanes)
        with self._windows(k, spread) as (corner, place, share):
            value = k.load(place(self.dy))
            if self.largest:
                where = k.as_integers(k.load(place(self.argmax)))
            else:
                value = k.multiply(value, share)
            with self._pixels(k, spread, corner) as (at, code):
                here = k.select(k.builder.icmp_signed("==", where, code), value, k.zero()) if self.largest else value
                k.store(k.add(k.load(at), here), at)
        apply(k, same, spread, self.needed_dx)
