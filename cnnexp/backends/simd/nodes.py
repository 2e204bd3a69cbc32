"""The nodes of a plan: layers that are computed at once, and the kernels that do it.

Here are what all of them have, and the small ones; `convolutions` and `dense` hold those that do most of the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

import numpy as np

from cnnexp.backends.parts import Part
from cnnexp.backends.simd import (
    elementwise,
    trace,
    transfer,
)
from cnnexp.backends.simd.cost import (
    Work,
    passes,
    transposition,
)
from cnnexp.backends.simd.emit import Emitter, Kernels, Target
from cnnexp.backends.simd.layout import Grid, Image, Layout, Matrix, Ring
from cnnexp.network import ElementwiseStage, LeakyReLU, MaxPool2d, PoolStage, ReLU
from cnnexp.optimizers import Optimizer

Tensor = Grid | Matrix | Image
X = TypeVar("X", bound=Tensor)
Y = TypeVar("Y", bound=Tensor)


class Node(Generic[X, Y]):
    """Layers computed at once.

    Attributes:
        name: of its kernels, and of the first layer.
        shape: of its output, without the images.
        layers: the names of all that it computes; none where it changes a layout.
        x, y: input and output, given by the plan.
        dy: gradient of y, given where the node goes backward. dx: of x, None where it is not needed.
        input_rectified: x is a ReLU's output, and dx to be the gradient of that ReLU's input.
        dy_rectified: dy already is the gradient of what its own ReLU takes in: the node after it saw to that.
    """

    layers: tuple[str, ...] = ()
    x: X
    y: Y
    dy: Y
    dx: X | None = None
    input_rectified = False
    dy_rectified = False
    way = "alone"
    """How it computes, where there are several ways; see `ways`."""
    wants: type[Tensor] | None = None
    """The layout of the input, `Grid`, `Matrix` or `Image`; None for either, and the output is of the same."""
    makes: type[Tensor] | None = None
    """The layout of the output."""
    trains: ClassVar[bool] = False
    """Whether it has parameters."""
    rectify = False
    """Whether it has taken in a ReLU."""
    whole_vectors: ClassVar[bool] = True
    """Whether its kernels go by vectors of images, and may write a whole one where a tile has fewer images."""
    rectifies_dx: ClassVar[bool] = False
    """Whether it can see to a ReLU before it when it stores dx."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name, self.shape = name, shape

    @property
    def needed_dx(self) -> X:
        """dx, of a node that the gradient of one before it comes through."""
        assert self.dx is not None
        return self.dx

    @property
    def rectifies_dy(self) -> bool:
        """Whether its ReLU's gradient is still to be taken."""
        return self.rectify and not self.dy_rectified

    def fits(self, target: Target) -> bool:
        """Whether the CPU's registers hold it."""
        return True

    def may_follow(self, before: Ring | None, needs_dx: bool) -> bool:
        """Whether it can come after a node.

        Args:
            before: the room around that node's dy, None where it is the network's input. needs_dx: of its own.
        """
        return True

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        """Return what each kernel, by its name, does for an image.

        Args:
            images: of a tile. needs_dx: whether the gradient of its input is needed.
        """
        raise NotImplementedError

    def input_ring(self) -> Ring:
        """Return the room that its input needs around it."""
        return Ring()

    def gradient_ring(self, needs_dx: bool) -> Ring:
        """Return the room around dy that it needs."""
        return Ring()

    def prepare(self, plan: Layout) -> None:
        """Allocate what else it needs, once x, y, dy, dx are known."""

    def forward(self, plan: Layout) -> Kernels:
        raise NotImplementedError

    def backward(self, plan: Layout) -> Kernels:
        raise NotImplementedError

    def owned_gradients(self, plan: Layout) -> Kernels:
        """Return what adds to the gradients of weights that threads own; `Plan` tells when."""
        return []

    def owned_updates(self, plan: Layout) -> list[tuple[str, Callable[[Emitter, Optimizer], None]]]:
        """Return what takes the step of weights that threads own."""
        return []

    def part(self, plan: Layout, what: str, kernel: str) -> Part:
        """Return what a kernel of a pass is of the training step."""
        held = self.in_lanes(what, kernel)
        at_once = f"{plan.target.lanes} {held}" if held else ""
        return Part(what, self.layers or (self.name,), kernel, self.multiply_adds(what), at_once, self.fewer(what))

    def in_lanes(self, what: str, kernel: str) -> str:
        """Return what a vector of a kernel holds many of, e.g. `filters`; empty where nothing is multiplied."""
        return ""

    def multiply_adds(self, what: str) -> int:
        """Return those of a pass over one image, at most."""
        return 0

    def fewer(self, what: str) -> str:
        """Return why a pass takes fewer multiply-adds than its layers have outputs for, empty where it does not."""
        return ""


class ToRows(Node[Grid, Matrix]):
    """Changes layout, from lanes to rows."""

    wants, makes = Grid, Matrix

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        return _change_work(math.prod(self.shape), target)

    def prepare(self, plan: Layout) -> None:
        if self.dx:
            self.dense = self.dx if self.dx.dense else plan.arena.grid(self.dx.shape)

    def forward(self, plan: Layout) -> Kernels:
        return [("forward", lambda k: transfer.to_rows(k, self.x, self.y))]

    def backward(self, plan: Layout) -> Kernels:
        dx = self.needed_dx
        kernels: Kernels = [("backward", lambda k: transfer.to_lanes(k, self.dy, self.dense))]
        if self.dense is not dx:
            kernels.append(("copy", lambda k: elementwise.apply(k, elementwise.same, self.dense, dx)))
        return kernels


class ToImages(Node[Grid, Image]):
    """Changes layout, from lanes to images in rows."""

    wants, makes = Grid, Image

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        return _change_work(math.prod(self.shape), target)

    def forward(self, plan: Layout) -> Kernels:
        return [("forward", lambda k: transfer.to_image(k, self.x, self.y))]

    def backward(self, plan: Layout) -> Kernels:
        return [("backward", lambda k: transfer.from_image(k, self.dy, self.needed_dx))]


class ToLanes(Node[Image, Grid]):
    """Changes layout, from images in rows to lanes."""

    wants, makes = Image, Grid

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        return _change_work(math.prod(self.shape), target)

    def forward(self, plan: Layout) -> Kernels:
        return [("forward", lambda k: transfer.from_image(k, self.x, self.y))]

    def backward(self, plan: Layout) -> Kernels:
        return [("backward", lambda k: transfer.to_image(k, self.dy, self.needed_dx))]


def _change_work(floats: int, target: Target) -> dict[str, Work]:
    turned = transposition(floats, target)
    return {"forward": turned, "backward": turned, "copy": passes(floats, 1, target)}


class Activation(Node[Grid | Matrix, Grid | Matrix]):
    """An elementwise layer where nothing takes it in."""

    def __init__(self, stage: ElementwiseStage, shape: tuple[int, ...]) -> None:
        super().__init__(stage.name, shape)
        self.layer = stage.layer

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        # an exponential takes some twenty instructions, a comparison two
        each = passes(math.prod(self.shape), 4 if isinstance(self.layer, ReLU | LeakyReLU) else 25, target)
        return {"forward": each, "backward": each}

    def forward(self, plan: Layout) -> Kernels:
        rule = trace.emitted(self.layer.rule(trace.MATHS))
        return [("forward", lambda k: elementwise.apply(k, rule, self.x, self.y))]

    def backward(self, plan: Layout) -> Kernels:
        derivative = trace.emitted(self.layer.derivative(trace.MATHS))

        def run(k: Emitter) -> None:
            elementwise.apply_backward(k, derivative, self.x, self.y, self.dy, self.needed_dx)

        return [("backward", run)]


class Pool(Node[Grid, Grid]):
    """MaxPool2d or AvgPool2d where no convolution takes it in."""

    wants = makes = Grid

    def __init__(self, stage: PoolStage) -> None:
        super().__init__(stage.name, stage.output_shape)
        self.stage, self.size, self.stride = stage, stage.window.size, stage.window.stride
        self.largest = isinstance(stage.layer, MaxPool2d)

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        each = passes(math.prod(self.shape), 3 * self.size**2, target)
        kept = passes(math.prod(self.stage.input_shape), 3, target)
        return {"forward": each, "backward": Work(0.0, each.cycles + kept.cycles)}

    def input_ring(self) -> Ring:
        return Ring(*self.stage.window.pads, value=-math.inf if self.largest else 0.0)

    def prepare(self, plan: Layout) -> None:
        if self.largest:
            self.argmax = plan.arena.grid(self.shape)
        else:
            self.shares = plan.arena.constants((1 / self._inside()).astype(np.float32))
        if self.dx:
            ring = self.input_ring()
            self.spread = plan.arena.grid(self.dx.shape, Ring(ring.top, ring.left, ring.bottom, ring.right))

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
                elementwise.max_pool(k, self.x, self.size, self.stride, self.y, self.argmax)
            else:
                elementwise.avg_pool(k, self.x, self.size, self.stride, k.arena + self.shares, self.y)

        return [("forward", run)]

    def backward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            if self.largest:
                elementwise.max_pool_backward(k, self.argmax, self.dy, self.size, self.stride, self.spread)
            else:
                elementwise.avg_pool_backward(k, self.dy, self.size, self.stride, k.arena + self.shares, self.spread)
            elementwise.apply(k, elementwise.same, self.spread, self.needed_dx)

        return [("backward", run)]
