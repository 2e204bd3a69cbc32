"""What all convolutions have in common."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Generic, Self, TypeVar, cast

from llvmlite import ir

from cnnexp.backends.parts import BACKWARD, FORWARD
from cnnexp.backends.simd.algorithms.elementwise import copy_gradient
from cnnexp.backends.simd.algorithms.node import Node, Section
from cnnexp.backends.simd.compiler.emit import INDEX, Emitter, Kernels, Pointer
from cnnexp.backends.simd.layouts import NHWC, Blocked, Halo, Layout, Tensor
from cnnexp.network import ConvStage, PoolStage

Pixels = TypeVar("Pixels", Blocked, NHWC)

LEAST_OUTSIDE = 1 / 8
"""Part of the rows that kernels read for which leaving them out pays: bounds known at run time cost some 5 %."""


@dataclass(frozen=True)
class Windows:
    """Max-pool windows that do not overlap and lie inside the image, fused into a convolution.

    Attributes:
        size: S. stride: >= S. argmax: bytes, where each argmax goes (row * S + column), in the pooled shape.
    """

    size: int
    stride: int
    argmax: Tensor


@dataclass(frozen=True, kw_only=True)
class Geometry(Generic[Pixels]):
    """One pass of a convolution, forward or to the input's gradient.

    Attributes:
        x: source, its halo wide enough for every window. origin: stored (row, column) of x where the first window
            starts. stride: stored pixels from window to window.
        y: target, of the pooled shape with `windows`. rectify: whether ReLU is applied. windows: the max-pool fused
            into it, or None.
        positive: a tensor of y's shape: y is 0 where it is not positive; None for y as it is. Not with `windows`.
    """

    x: Pixels
    origin: tuple[int, int] = (0, 0)
    stride: int = 1
    y: Pixels
    rectify: bool = False
    windows: Windows | None = None
    positive: Pixels | None = None

    def corner(self, k: Emitter, n: ir.Value) -> Pointer:
        """Return the address where the first window starts."""
        return self.x.stored(k, n) + (self.origin[0] * self.x.row + self.origin[1] * self.x.column)

    def rows_inside(
        self, k: Emitter, kernel: int, row: ir.Value, stride: int, count: int, reach: int = 0
    ) -> tuple[ir.Value, ir.Value]:
        """Return the first row of a kernel that sees the image, and the end of those; the others see zeros around it.

        A 5 x 5 kernel's gradient on 10 x 10 outputs has two rows of seven less to read, LeNet-5's step 6 %.

        Args:
            row: of the output. stride: stored rows from one of its `count` rows to the next.
            reach: rows from this kernel to that of the last pixel that is computed along.
        """
        halo, origin = self.x.halo, self.origin[0]
        top, bottom = halo.top, halo.top + (self.x.shape[0] - 1) * halo.step + 1
        outside = sum(not top <= origin + r * stride + i < bottom for r in range(count) for i in range(kernel))
        if outside < LEAST_OUTSIDE * count * kernel:
            return INDEX(0), INDEX(kernel)
        first = k.scaled(row, stride, origin)
        low, high = k.builder.sub(INDEX(top - reach), first), k.builder.sub(INDEX(bottom), first)
        high = k.least(high, INDEX(kernel))
        return k.builder.select(k.builder.icmp_signed(">", low, INDEX(0)), low, INDEX(0)), high


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

    @property
    def start(self) -> int:
        """The least place that the first pixel sees; negative ones lie in the halo."""
        return self.taps[-1][1] if self.taps else 0

    def at(self, k: Emitter, i: ir.Value, more: int = 0) -> ir.Value:
        """Return the place of a pixel, counted from 0, or of one of its neighbours."""
        return k.scaled(i, self.step, self.first + more * self.step)

    def seen(self, pixels: int) -> list[tuple[int, list[tuple[int, int]]]]:
        """Return the places that so many neighbours see, each with (the number in `taps`, which neighbour)."""
        found: dict[int, list[tuple[int, int]]] = {}
        for (number, (_, place)), m in itertools.product(enumerate(self.taps), range(pixels)):
            found.setdefault(place + m * self.stride, []).append((number, m))
        return sorted(found.items())


def seen_by(stage: ConvStage, axis: int) -> list[Phase]:
    """Return the input's pixels, of what they see in the output's gradient."""
    window, size, found = stage.window, stage.input_shape[axis], []
    for first in range(min(window.stride, size)):
        places = ((t, first + window.pads[axis] - t * window.dilation) for t in range(window.size))
        taps = tuple((t, place // window.stride) for t, place in places if place % window.stride == 0)
        found.append(Phase(first, window.stride, len(range(first, size, window.stride)), 1, taps))
    return found


class ConvolutionNode(Node[Pixels, Pixels]):
    """Conv2d [+ ReLU] [+ MaxPool2d]."""

    trains = rectifies_dx = True
    stage: ConvStage
    any_taps: ClassVar[bool] = False
    """Whether it computes groups and dilation."""

    windows: Windows | None = None
    """Those of the pool, once it is prepared."""
    d: Pixels
    """Gradient of the convolution's own output."""

    def __init__(self, stage: ConvStage, rectify: bool, pool: PoolStage | None) -> None:
        super().__init__(stage.name, (pool or stage).output_shape)
        self.stage, self.rectify, self.pool = stage, rectify, pool
        self.keeps_y = rectify or pool is not None
        self.window = pool.window.size**2 if pool else 1
        """Pixels of the convolution in each cell of the output."""
        self.run = stage.layer.kernel * stage.input_shape[2]
        """Floats of a kernel row."""
        self.seen = min(1.0, ((stage.output_shape[0] - 1) * stage.layer.stride + 1) / stage.input_shape[0])
        """Part of the input's rows that the rows of the output, put apart by the stride, reach from first to last."""

    @classmethod
    def of(cls, sections: Sequence[Section], first: bool) -> Self | None:
        stage, pool = sections[0].stage, sections[0].pool
        if not isinstance(stage, ConvStage) or not (stage.dense or cls.any_taps):
            return None
        return None if cls.follows and not (pool and pool.window.size > 1) else cls(stage, sections[0].rectify, pool)

    def may_follow(self, needs_dx: bool) -> bool:
        return needs_dx or not self.follows

    def input_halo(self) -> Halo:
        return Halo(*self.stage.window.pads)

    def gradient_halo(self, needs_dx: bool) -> Halo:
        return self._dense_halo() if needs_dx and not self.pool else Halo()

    def _dense_halo(self) -> Halo:
        """Return the room around the gradient of the full convolution that the input's gradient needs."""
        sides = []
        for axis, count in enumerate(self.stage.output_shape[:2]):
            places = [(at, at + p.count) for p in seen_by(self.stage, axis) for _, at in p.taps] + [(0, count)]
            sides.append((-min(at for at, _ in places), max(end for _, end in places) - count))  # no taps, no room
        (top, bottom), (left, right) = sides
        return Halo(top, left, bottom, right)

    def prepare(self, plan: Layout) -> None:
        self.prepare_forward(plan)
        if not plan.target.forward_only:
            self.prepare_backward(plan)

    def prepare_forward(self, plan: Layout) -> None:
        """Allocate what the forward pass needs."""
        raise NotImplementedError

    def prepare_backward(self, plan: Layout) -> None:
        """Allocate what the backward pass needs besides: first of all `d`, unless it is dy itself."""
        self.d, halo = self.dy, self._dense_halo() if self.dx else Halo()
        if self.pool or self.dy.halo != halo:
            make = plan.arena.blocked if self.input_layout is Blocked else plan.arena.nhwc
            self.d = cast(Pixels, make(self.stage.output_shape, halo))

    def backward(self, plan: Layout) -> Kernels:
        if self.follows:
            return super().backward(plan)
        kernels: Kernels = []
        if windows := self.windows:
            kernels.append(("unpool", lambda k: unpool(k, windows, self.y, self.dy, self.d, self.rectifies_dy)))
        elif self.rectifies_dy or self.d is not self.dy:
            positive = self.y if self.rectifies_dy else None
            kernels.append(("gradient", lambda k: copy_gradient(k, positive, self.dy, self.d)))
        if not self.owns(plan):
            kernels.append(("backward_weights", lambda k: self.backward_weights(k, plan)))
        elif self.stage.bias:
            kernels.append(("backward_bias", lambda k: self.backward_bias(k, plan)))
        if self.dx:
            kernels.append(("backward_input", lambda k: self.backward_input(k, plan)))
        return kernels

    def backward_bias(self, k: Emitter, plan: Layout) -> None:
        raise NotImplementedError

    def backward_input(self, k: Emitter, plan: Layout) -> None:
        raise NotImplementedError

    def in_lanes(self, what: str, kernel: str) -> str:
        return "weights" if self.follows and what == BACKWARD else self.holds

    def computed(self, what: str) -> Fraction:
        cells, outputs = math.prod(self.shape[:2]), math.prod(self.stage.output_shape[:2])
        if self.follows and what == BACKWARD:
            return Fraction(cells, outputs)
        return Fraction(cells * self.window if what == FORWARD else outputs, outputs)


def unpool(k: Emitter, windows: Windows, y: Tensor, dy: Tensor, d: Tensor, rectified: bool) -> None:
    """d = dy at each window's argmax, else 0, and 0 wherever ReLU gave 0. Pixels in no window keep their zero."""
    (rows, columns, channels), step = y.shape, d.halo.step
    # a cell, a vector of it
    with k.loop(k.groups(y.lanes)) as n, k.loop(rows) as u, k.loop(columns) as v:
        for f, valid in k.vectors(channels * y.lanes):
            value = k.load(dy.pixel(k, n, u, v).at(f, k.lanes))
            if rectified:
                value = k.where_positive(k.load(y.pixel(k, n, u, v).at(f, k.lanes)), value)
            where = k.load_bytes(windows.argmax.pixel(k, n, u, v).at(f, k.lanes // 4))
            corner = d.pixel(k, n, 0, 0).at(u, windows.stride * step * d.row).at(v, windows.stride * step * d.column)
            corner = corner.at(f, k.lanes)
            for code, (i, j) in enumerate(itertools.product(range(windows.size), repeat=2)):
                here = k.select(k.equal(where, code), value, k.zero())
                k.store_part(here, corner + (i * d.row + j * d.column) * step, valid)
