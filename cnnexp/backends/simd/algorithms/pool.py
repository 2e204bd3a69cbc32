"""`pool`: a max-pool or an average pool on its own, in either layout of images; any window, stride and padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from llvmlite import ir

from cnnexp.backends.simd.algorithms.cost import Work, passes
from cnnexp.backends.simd.algorithms.elementwise import copy_gradient
from cnnexp.backends.simd.algorithms.node import Node, Section
from cnnexp.backends.simd.compiler.emit import INDEX, INT, Emitter, Kernels, Pointer, Target
from cnnexp.backends.simd.layouts import Blocked, Halo, Layout, Tensor
from cnnexp.network import MaxPool2d, PoolStage

Place = Callable[[Tensor], Pointer]


class Pool(Node[Tensor, Tensor]):
    """MaxPool2d or AvgPool2d where no convolution takes it in."""

    stage: PoolStage
    algorithm, any_image = "pool", True
    keeps_x = keeps_y = whole_vectors = False

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
        pads = self.stage.window.pads
        return Halo(*pads, value=-math.inf if self.largest and any(pads) else 0.0)

    def prepare(self, plan: Layout) -> None:
        room = plan.arena.blocked if isinstance(self.y, Blocked) else plan.arena.nhwc
        if self.largest:
            self.argmax = room(self.shape)
        else:
            self.shares = plan.arena.constants((1 / self._inside()).astype(np.float32))
        if self.dx:
            self.spread, pads = self.dx, self.stage.window.pads
            if any(pads) or self.dx.halo.step > 1:  # what lands outside the image needs room
                self.spread = room(self.dx.shape, Halo(*pads))

    def _inside(self) -> np.ndarray:
        """Return how many pixels of each window lie inside the image, (U, V)."""
        counts, stage = [], self.stage
        for pad, size, count in zip(stage.window.pads[:2], stage.input_shape, self.y.shape, strict=False):
            first = np.arange(count) * self.stride - pad
            counts.append(np.minimum(first + self.size, size) - np.maximum(first, 0))
        return np.multiply.outer(*counts)

    def forward(self, plan: Layout) -> Kernels:
        return [("forward", self._max if self.largest else self._average)]

    def _windows(self, k: Emitter, seen: Tensor) -> Iterator[tuple[Pointer, Place, ir.Value, int]]:
        """Run what follows for every vector of the output.

        Yields where its window begins in what is seen; the address of a vector of the output's shape; 1 / the number
        of the window's pixels inside the image, in all lanes, where a mean is taken; and how many lanes count.
        """
        (rows, columns, channels), window = self.y.shape, self.stage.window
        with k.loop(k.groups(seen.lanes)) as n, k.loop(rows) as u, k.loop(columns) as v:
            share = k.zero() if self.largest else k.splat((k.arena + self.shares).at(u, columns).at(v))
            first = seen.pixel(k, n, 0, 0) + -(window.top * seen.row + window.left * seen.column)
            corner = first.at(u, self.stride * seen.row).at(v, self.stride * seen.column)
            for c, valid in k.vectors(channels * seen.lanes):

                def place(tensor: Tensor, c: ir.Value = c) -> Pointer:
                    return tensor.pixel(k, n, u, v).at(c, k.lanes)

                yield corner.at(c, k.lanes), place, share, valid

    def _pixels(self, k: Emitter, seen: Tensor, corner: Pointer) -> Iterator[tuple[Pointer, ir.Value]]:
        """Run what follows for every pixel of a window: its address, and in all lanes its number."""
        with k.loop(self.size) as i, k.loop(self.size) as j:
            code = k.builder.trunc(k.builder.add(k.builder.mul(i, INDEX(self.size)), j), INT)
            yield corner.at(i, seen.row).at(j, seen.column), k.spread(code)

    def _max(self, k: Emitter) -> None:
        """y = the largest of each window, argmax = its place, a 32-bit integer; x's halo holds -inf: it never wins."""
        for corner, place, _, valid in self._windows(k, self.x):
            best, where = k.variable(k.constant(-math.inf)), k.variable(k.integers(0))
            for at, code in self._pixels(k, self.x, corner):
                value = k.load(at)
                larger = k.builder.fcmp_unordered(">", value, best.get())  # or either is NaN
                best.set(k.select(larger, value, best.get()))
                where.set(k.select(larger, code, where.get()))
            k.store_part(best.get(), place(self.y), valid)
            k.store_part(k.as_floats(where.get()), place(self.argmax), valid)

    def _average(self, k: Emitter) -> None:
        """y = the mean of each window's pixels inside the image."""
        for corner, place, share, valid in self._windows(k, self.x):
            total = k.variable()
            for at, _ in self._pixels(k, self.x, corner):
                k.increase(total, k.load(at))
            k.store_part(k.multiply(total.get(), share), place(self.y), valid)

    def emit_backward(self, k: Emitter, plan: Layout) -> None:
        """dx = dy added at each window's argmax, or its shares at every pixel; what lands in a halo is not used."""
        spread, dx = self.spread, self.needed_dx
        (height, width, _), (rows, columns, _) = dx.shape, self.y.shape
        # where every pixel is in one window, each is stored once; else all begin at 0
        tiled = self.size == self.stride and (rows * self.size, columns * self.size) == (height, width)
        if not tiled:
            with k.loop(k.groups(spread.lanes)) as n:
                k.clear(spread.stored(k, n), spread.stride // k.lanes)
        for corner, place, share, valid in self._windows(k, spread):
            value, where = k.load(place(self.dy)), None
            if self.largest:
                where = k.as_integers(k.load(place(self.argmax)))
            else:
                value = k.multiply(value, share)
            for at, code in self._pixels(k, spread, corner):
                here = k.select(k.builder.icmp_signed("==", where, code), value, k.zero()) if where else value
                k.store_part(here if tiled else k.add(k.load(at), here), at, valid)
        if spread is not dx:
            copy_gradient(k, None, spread, dx)
