"""The nodes of a plan: layers that are computed at once, and the kernels that do it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

import numpy as np
from llvmlite import ir

from cnnexp.backends.parts import BACKWARD, FORWARD, Part
from cnnexp.backends.simd import (
    conv_channels,
    conv_events,
    conv_filters,
    conv_lanes,
    conv_sparse,
    cost,
    elementwise,
    linear,
    trace,
    transfer,
)
from cnnexp.backends.simd.conv_events import Events
from cnnexp.backends.simd.conv_filters import FilterBank
from cnnexp.backends.simd.conv_lanes import Correlation, Windows
from cnnexp.backends.simd.conv_sparse import SparseGradient
from cnnexp.backends.simd.cost import (
    Work,
    events,
    lane_gradient,
    lane_sums,
    passes,
    product_gradient,
    product_sums,
    transposition,
)
from cnnexp.backends.simd.emit import INDEX, Emitter, Kernels, Target
from cnnexp.backends.simd.layout import Grid, Image, Layout, Matrix, Ring, round_up
from cnnexp.backends.simd.product import Panels, choose_tile, chunks, most_height, tile_cycles
from cnnexp.network import ConvStage, ElementwiseStage, LeakyReLU, LinearStage, MaxPool2d, PoolStage, ReLU
from cnnexp.optimizers import Optimizer

Tensor = Grid | Matrix | Image
X = TypeVar("X", bound=Tensor)
Y = TypeVar("Y", bound=Tensor)
Pixels = TypeVar("Pixels", Grid, Image)

FOLLOWED = "only each window's maximum is followed, its place being kept"


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


class _Convolution(Node[Pixels, Pixels]):
    """Conv2d [+ ReLU] [+ MaxPool2d].

    Args:
        argmax: whether the gradients follow the max-pool's argmax, rather than all outputs.
    """

    trains = rectifies_dx = True

    def __init__(self, stage: ConvStage, rectify: bool, pool: PoolStage | None, argmax: bool = False) -> None:
        super().__init__(stage.name, (pool or stage).output_shape)
        self.stage, self.rectify, self.pool, self.argmax = stage, rectify, pool, argmax

    @property
    def window(self) -> int:
        """Pixels of the convolution in each cell of the output."""
        return self.pool.window.size**2 if self.pool else 1

    def input_ring(self) -> Ring:
        return Ring(*self.stage.window.pads)

    def gradient_ring(self, needs_dx: bool) -> Ring:
        return self._dense_ring() if needs_dx and not self.pool else Ring()

    def _dense_ring(self) -> Ring:
        """Return the room around the gradient of the full convolution that the input's gradient needs."""
        raise NotImplementedError

    @property
    def follows(self) -> bool:
        """Whether the backward pass follows each window's maximum and leaves out the rest."""
        raise NotImplementedError

    def multiply_adds(self, what: str) -> int:
        (rows, columns, _), outputs = self.shape, math.prod(self.stage.output_shape[:2])
        computed = rows * columns if self.follows and what == BACKWARD else outputs
        if self.pool and what == FORWARD:
            computed = rows * columns * self.pool.window.size**2
        passes = 2 if what == BACKWARD and self.dx else 1
        return passes * self.stage.macs * computed // outputs

    def fewer(self, what: str) -> str:
        return FOLLOWED if self.follows and what == BACKWARD else ""


class Convolution(_Convolution[Grid]):
    """Batch in lanes; see `conv_lanes`."""

    wants = makes = Grid

    @property
    def follows(self) -> bool:
        return self.sparse is not None

    def in_lanes(self, what: str, kernel: str) -> str:
        return "weights" if self.follows and what == BACKWARD else "images"

    def __init__(self, stage: ConvStage, rectify: bool, pool: PoolStage | None, argmax: bool = False) -> None:
        super().__init__(stage, rectify, pool, argmax)
        self.way = "lanes-argmax" if argmax else "lanes"

    def fits(self, target: Target) -> bool:
        """Whether the CPU's registers hold it."""
        layer, channels = self.stage.layer, self.stage.input_shape[2]
        return not self.argmax or conv_sparse.fits(layer.kernel, channels, target.registers, target.lanes)

    def may_follow(self, before: Ring | None, needs_dx: bool) -> bool:
        if not self.argmax:
            return True
        return needs_dx and self.input_ring() == before == Ring()

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        (height, width, channels), (rows, columns, filters) = self.stage.input_shape, self.stage.output_shape
        kernel, cells, window = self.stage.layer.kernel, math.prod(self.shape[:2]), self.window
        pixels, most = conv_lanes.sums_tile(target.registers)
        if self.pool:
            tile, count = min(window, pixels), cells * -(-window // pixels)
        else:
            tile, count = min(columns, pixels), rows * -(-columns // pixels)
        found = {
            "forward": lane_sums(tile, most, count, filters, kernel**2 * channels, target, 2.0 * window),
            "rectify_gradient": passes(rows * columns * filters, 2, target, target.lanes, 3),
            "rectify_dx": passes(height * width * channels, 2, target, target.lanes, 3),
            "unpool": passes(cells * filters, 4 + 3 * window, target, target.lanes, window + 1),
        }
        if self.argmax:
            moved = transposition(2 * height * width * channels, target).cycles
            run, vectors = kernel * channels, kernel * len(conv_sparse.widths(kernel * channels, target.lanes))
            held = 8 * height * width * channels
            following = events(cells, window, filters, kernel, run, 1, held, target)
            packing = 6 * kernel**2 * channels * filters / images
            tile_text = f"{vectors} vectors of a filter"
            found["sparse_backward"] = Work(following.macs, following.cycles + moved + packing, tile_text)
            return {name: found[name] for name in ("forward", "sparse_backward", "rectify_dx")}
        # rows are gone over for every row of the kernel, and by blocks of 8 filters
        held = rows * columns * filters + height * width * channels
        moved = kernel * (rows * columns * filters + height * width * channels * -(-filters // 8))
        gradient_tile, terms = conv_lanes.gradient_tile(target.registers), kernel**2 * channels
        found["weight_gradients"] = lane_gradient(
            gradient_tile, terms, filters, rows * columns, images, moved, held, target
        )
        if needs_dx:
            count = height * -(-width // pixels)
            back = lane_sums(min(width, pixels), most, count, channels, kernel**2 * filters, target, 2.0)
            flipping = 2 * kernel**2 * channels * filters / images
            found["input_gradient"] = Work(back.macs, back.cycles + flipping, back.tile)
        return found

    def _dense_ring(self) -> Ring:
        """Windows of the flipped kernel reach over its edge."""
        layer, reach = self.stage.layer, self.stage.layer.kernel - 1
        sides = []
        for pad, size, count in zip(
            self.stage.window.pads[:2], self.stage.input_shape, self.stage.output_shape, strict=False
        ):
            before, extent = max(0, reach - pad), (count - 1) * layer.stride + 1
            sides.append((before, max(0, max(0, pad - reach) + size + reach - before - extent)))
        (top, bottom), (left, right) = sides
        return Ring(top, left, bottom, right, layer.stride)

    def prepare(self, plan: Layout) -> None:
        layer, channels = self.stage.layer, self.stage.input_shape[2]
        plan.parameters.place_plain(self.stage.weight, self.stage.bias)
        windows = None
        if self.pool:
            windows = Windows(self.pool.window.size, self.pool.window.stride, plan.arena.codes(self.shape))
        self.correlation = Correlation(
            self.x, (0, 0), layer.stride, layer.kernel, channels, layer.filters, self.y, self.rectify, windows
        )
        self.sparse = self._sparse(plan, windows) if windows and self.argmax else None
        if self.sparse:
            return
        self.sums = plan.arena.allocate(conv_lanes.MOST_SUMS * plan.target.lanes)
        self.d = self.dy
        if self.pool:
            self.d = plan.arena.grid(self.stage.output_shape, self._dense_ring() if self.dx else Ring())
        if self.dx:
            self.flipped = plan.arena.allocate(self.stage.weight.size)

    def _sparse(self, plan: Layout, windows: Windows[Grid]) -> SparseGradient:
        """Return the gradient that follows the argmax."""
        layer, channels = self.stage.layer, self.stage.input_shape[2]
        scratch = conv_sparse.make_scratch(plan.arena, layer.kernel, layer.stride, self.x, self.y, windows)
        return SparseGradient(
            self.x, self.y, self.dy, self.needed_dx, layer.kernel, layer.stride, channels, layer.filters,
            windows, self.rectifies_dy, scratch,
        )  # fmt: skip

    def forward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            conv_lanes.forward(k, self.correlation, *plan.parameters.weights(k, self.stage))

        return [("forward", run)]

    def backward(self, plan: Layout) -> Kernels:
        if self.sparse:
            return self._sparse_backward(plan, self.sparse)

        def weight_gradients(k: Emitter) -> None:
            dw, db = plan.parameters.gradients(k, self.stage)
            conv_lanes.weight_gradients(k, self.correlation, self.d, dw, db, k.arena + self.sums)

        kernels: Kernels = []
        windows, dx = self.correlation.windows, self.dx
        if windows:
            kernels.append(
                ("unpool", lambda k: conv_lanes.unpool(k, windows, self.y, self.dy, self.d, self.rectifies_dy))
            )
        elif self.rectifies_dy:
            kernels.append(("rectify_gradient", lambda k: conv_lanes.rectify_gradient(k, self.y, self.dy)))
        kernels.append(("weight_gradients", weight_gradients))
        if dx:
            kernels.append(("input_gradient", lambda k: self._input_gradient(k, plan, dx)))
        return kernels

    def _sparse_backward(self, plan: Layout, sparse: SparseGradient) -> Kernels:
        def run(k: Emitter) -> None:
            weights, _ = plan.parameters.weights(k, self.stage)
            conv_sparse.backward(k, sparse, weights, *plan.parameters.gradients(k, self.stage))

        kernels: Kernels = [("sparse_backward", run)]
        if self.input_rectified:
            kernels.append(("rectify_dx", lambda k: conv_lanes.rectify_gradient(k, self.x, sparse.dx)))
        return kernels

    def _input_gradient(self, k: Emitter, plan: Layout, dx: Grid) -> None:
        layer, channels, reach = self.stage.layer, self.stage.input_shape[2], self.stage.layer.kernel - 1
        flipped = k.arena + self.flipped
        weights, _ = plan.parameters.weights(k, self.stage)
        conv_lanes.flip_weights(k, weights, flipped, layer.kernel, channels, layer.filters)
        top, left, _, _ = (max(0, pad - reach) for pad in self.stage.window.pads)
        positive = self.x if self.input_rectified else None
        back = Correlation(self.d, (top, left), 1, layer.kernel, layer.filters, channels, dx, positive=positive)
        conv_lanes.forward(k, back, flipped, None)


class ChannelConvolution(_Convolution[Image]):
    """Channels in lanes; see `conv_channels`."""

    wants = makes = Image

    @property
    def follows(self) -> bool:
        return self.events is not None

    def in_lanes(self, what: str, kernel: str) -> str:
        return "weights" if self.follows and what == BACKWARD else "channels"

    def __init__(self, stage: ConvStage, rectify: bool, pool: PoolStage | None, argmax: bool = False) -> None:
        super().__init__(stage, rectify, pool, argmax)
        self.way = "channels-argmax" if argmax else "channels"

    def fits(self, target: Target) -> bool:
        """Whether a window's sums fit the registers."""
        return self.window <= most_height(1, target.registers)

    def may_follow(self, before: Ring | None, needs_dx: bool) -> bool:
        return needs_dx or not self.argmax

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        (height, width, channels), (rows, columns, filters) = self.stage.input_shape, self.stage.output_shape
        layer, cells, window = self.stage.layer, math.prod(self.shape[:2]), self.window
        kernel, run = layer.kernel, layer.kernel * channels
        finish = 2.5 + 3.0 * (window - 1)
        found = {
            "forward": product_sums((self.shape[0], self.shape[1]), window, filters, kernel * run, target, finish),
            "gradient": passes(rows * columns * filters, 2, target, images),
            "unpool": passes(cells * filters, 4 + 3 * window, target, images, window + 1),
        }
        if self.argmax:
            vectors = -(-run // target.lanes)
            parts = -(-vectors // conv_events.most_vectors(target.registers))
            cell_rows = -(-conv_events.block_cells(target.lanes) // self.shape[1])
            step = self.pool.window.stride * layer.stride if self.pool else 1
            reach = min(height, cell_rows * step + kernel)
            held = 8 * reach * width * channels
            following = events(cells, window, filters, kernel, run, kernel * parts, held, target)
            packing = (3 * math.log2(target.lanes) + 6) * kernel * run * filters / target.lanes / images
            cleared = passes(height * width * channels, 4, target).cycles
            found["events"] = Work(following.macs, following.cycles + packing + cleared, following.tile)
            return {name: found[name] for name in ("forward", "events")}
        wide = conv_channels.panel_width((self.shape[0], self.shape[1]), window, filters, target)
        read = 4 * (height * width * channels + rows * columns * filters)
        found["weight_gradients"] = product_gradient(run, kernel, filters, wide, (rows, columns), read, target)
        if needs_dx:
            sums = [
                product_sums((p.count, q.count), 1, channels, len(p.taps) * len(q.taps) * filters, target)
                for p in conv_channels.phases(height, kernel, layer.stride, self.stage.window.pads[0])
                for q in conv_channels.phases(width, kernel, layer.stride, self.stage.window.pads[1])
            ]
            packing = (math.log2(target.lanes) + 2) * kernel * run * filters / target.lanes / images
            macs, largest = sum(part.macs for part in sums), max(sums, key=lambda part: part.macs)
            found["input_gradient"] = Work(macs, cost.total(sums) + packing, largest.tile)
        return found

    def _dense_ring(self) -> Ring:
        stage, layer = self.stage, self.stage.layer
        return conv_channels.gradient_ring(
            stage.input_shape, stage.output_shape, layer.kernel, layer.stride, stage.window.pads[:2]
        )

    def prepare(self, plan: Layout) -> None:
        stage, layer, channels, target = self.stage, self.stage.layer, self.stage.input_shape[2], plan.target
        windows, (rows, columns, _) = None, self.shape
        counts = rows, columns
        if self.pool:
            size, vectors = self.pool.window.size, -(-layer.filters // target.lanes)
            codes = plan.arena.image((*counts, vectors * target.lanes // 4))
            windows = Windows(size, self.pool.window.stride, codes)
        width = conv_channels.panel_width(counts, windows.size if windows else 1, layer.filters, target)
        panels = Panels(layer.kernel**2 * channels, layer.filters, width, target.lanes)
        plan.parameters.place(stage.weight, panels.size, panels.positions())
        plan.parameters.place_plain(stage.bias)
        self.sum = conv_channels.Sum(
            self.x, (0, 0), layer.stride, (layer.kernel, layer.kernel), self.y, (0, 0), 1, counts,
            panels, self.rectify, windows,
        )  # fmt: skip
        self.events = self._events(plan, windows) if windows and self.argmax else None
        if self.events:
            return
        self.d, ring = self.dy, self._dense_ring() if self.dx else Ring()
        if self.pool or self.dy.ring != ring:
            self.d = plan.arena.image(stage.output_shape, ring)
        if self.dx:
            positive = self.x if self.input_rectified else None
            self.gradient = conv_channels.input_gradient_of(
                self.d, self.dx, layer.kernel, layer.stride, stage.window.pads[:2], positive, target
            )
            self.packed = plan.arena.allocate(self.gradient.size)

    def _events(self, plan: Layout, windows: Windows[Image]) -> Events:
        """Return the gradient that follows the argmax."""
        return conv_events.make_events(
            plan.arena, self.sum, windows, self.dy, self.needed_dx, self.rectifies_dy, self.input_rectified
        )

    def forward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            conv_channels.forward(k, self.sum, *plan.parameters.weights(k, self.stage))

        return [("forward", run)]

    def backward(self, plan: Layout) -> Kernels:
        if self.events:
            return self._follow_events(plan, self.events)

        def weight_gradients(k: Emitter) -> None:
            dw, db = plan.parameters.gradients(k, self.stage)
            conv_channels.weight_gradients(k, self.sum, self.d, dw, db)

        kernels: Kernels = []
        windows = self.sum.windows
        if windows:
            kernels.append(
                ("unpool", lambda k: conv_channels.unpool(k, windows, self.y, self.dy, self.d, self.rectifies_dy))
            )
        elif self.rectifies_dy or self.d is not self.dy:
            positive = self.y if self.rectifies_dy else None
            kernels.append(("gradient", lambda k: conv_channels.copy_gradient(k, positive, self.dy, self.d)))
        kernels.append(("weight_gradients", weight_gradients))
        if self.dx:
            kernels.append(("input_gradient", lambda k: self._input_gradient(k, plan)))
        return kernels

    def _follow_events(self, plan: Layout, events: Events) -> Kernels:
        def run(k: Emitter) -> None:
            weights, _ = plan.parameters.weights(k, self.stage)
            conv_events.backward(k, events, weights, *plan.parameters.gradients(k, self.stage))

        return [("events", run)]

    def _input_gradient(self, k: Emitter, plan: Layout) -> None:
        layer, (weights, _) = self.stage.layer, plan.parameters.weights(k, self.stage)
        packed = k.arena + self.packed
        conv_channels.input_gradient(k, self.gradient, self.sum.panels, layer.kernel, layer.stride, weights, packed)


class FilterConvolution(Node[Matrix, Matrix]):
    """Conv2d [+ ReLU] + MaxPool2d that opens a network and leads into a linear layer, filters in lanes."""

    wants = makes = Matrix
    trains = True
    way = "filters"

    def __init__(self, stage: ConvStage, rectify: bool, pool: PoolStage) -> None:
        super().__init__(stage.name, pool.output_shape)
        self.stage, self.rectify, self.pool = stage, rectify, pool
        (height, width, channels), (top, left, bottom, right) = stage.input_shape, stage.window.pads
        self.row = (left + width + right) * channels
        self.input_size = (top + height + bottom) * self.row
        self.first = top * self.row + left * channels

    def fits(self, target: Target) -> bool:
        """Whether the filters fill vectors and a patch and a filter's accumulators fit registers."""
        layer, channels, size = self.stage.layer, self.stage.input_shape[2], self.pool.window.size
        if layer.filters % target.lanes or size > 2:
            return False
        side = conv_filters.patch_side(layer.kernel, layer.stride, size)
        # a bias's accumulator, the gradient, the places, a pixel and its permutation are in registers, too
        return layer.kernel**2 * channels + 5 <= target.registers and side * side * channels <= 64

    def may_follow(self, before: Ring | None, needs_dx: bool) -> bool:
        return before is None

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        layer, channels, size = self.stage.layer, self.stage.input_shape[2], self.pool.window.size
        cells, vectors, terms = math.prod(self.shape[:2]), layer.filters // target.lanes, layer.kernel**2 * channels
        values = conv_filters.patch_side(layer.kernel, layer.stride, size) ** 2 * channels
        permutes = conv_filters.permutes(layer.kernel, layer.stride, channels, size, target)
        # a patch that the registers do not hold is read again for each vector of filters
        loads = terms + (terms * size**2 if values + size**2 + 1 > target.registers else 0)
        sums = max(terms * size**2 / cost.MACS, loads / cost.LOADS, 4) + 1.5 * size**2 + 3
        gradient = terms if permutes else terms * size**2 / cost.MACS
        macs = cells * layer.filters * terms
        return {
            "forward": Work(
                macs * size**2, cells * (values + vectors * sums), f"{size**2} pixels x 1 vector of filters"
            ),
            "rectify_gradient": passes(cells * layer.filters, 2, target),
            "weight_gradients": Work(macs, cells * vectors * (gradient + 4), f"{terms} taps x 1 vector of filters"),
        }

    def prepare(self, plan: Layout) -> None:
        plan.parameters.place_plain(self.stage.weight, self.stage.bias)
        layer, channels, size = self.stage.layer, self.stage.input_shape[2], self.pool.window.size
        images, (rows, columns, _) = plan.arena.images, self.shape
        cells = rows * columns
        side = conv_filters.patch_side(layer.kernel, layer.stride, size)
        room = round_up(side * side * channels, plan.target.lanes)
        fits = conv_filters.permutes(layer.kernel, layer.stride, channels, size, plan.target)
        self.bank = FilterBank(
            self.x, self.row, layer.kernel, layer.stride, channels, layer.filters,
            size, self.pool.window.stride, (rows, columns), self.y,
            plan.arena.allocate(images * cells * layer.filters // 4),
            # loads reach past the last one
            plan.arena.allocate((images * cells + 1) * room) if fits else None,
            self.rectify,
        )  # fmt: skip

    @property
    def follows(self) -> bool:
        """As `Convolution.follows`."""
        return self.bank.patches is not None

    def in_lanes(self, what: str, kernel: str) -> str:
        return "filters"

    def multiply_adds(self, what: str) -> int:
        window = 1 if self.follows and what == BACKWARD else self.pool.window.size**2
        return self.stage.macs * math.prod(self.shape[:2]) * window // math.prod(self.stage.output_shape[:2])

    def fewer(self, what: str) -> str:
        return FOLLOWED if self.follows and what == BACKWARD else ""

    def forward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            with k.loop(self.shape[0]) as u:
                self.forward_row(k, plan, u)

        return [("forward", run)]

    def forward_row(self, k: Emitter, plan: Layout, u: ir.Value) -> None:
        conv_filters.forward_row(k, self.bank, *plan.parameters.weights(k, self.stage), u)

    def backward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            with k.loop(self.shape[0]) as u:
                self.weight_gradients_row(k, plan, u)

        kernels: Kernels = []
        if self.rectifies_dy:
            kernels.append(("rectify_gradient", lambda k: linear.rectify_gradient(k, self.y, self.dy)))
        return [*kernels, ("weight_gradients", run)]

    def weight_gradients_row(self, k: Emitter, plan: Layout, u: ir.Value) -> None:
        conv_filters.weight_gradients_row(k, self.bank, self.dy, *plan.parameters.gradients(k, self.stage), u)


class Dense(Node[Matrix, Matrix]):
    """Linear [+ ReLU]; `linear` explains its two forms."""

    wants = makes = Matrix
    trains = True

    def __init__(self, stage: LinearStage, rectify: bool) -> None:
        super().__init__(stage.name, stage.output_shape)
        self.stage, self.rectify = stage, rectify

    def in_lanes(self, what: str, kernel: str) -> str:
        return "weights"

    def multiply_adds(self, what: str) -> int:
        return (2 if what == BACKWARD and self.dx else 1) * self.stage.macs

    def _common_work(self, target: Target) -> dict[str, Work]:
        width = round_up(self.stage.output_shape[0], target.lanes)
        return {"rectify_gradient": passes(width, 3, target), "bias_gradients": passes(width, 1, target)}

    def backward(self, plan: Layout) -> Kernels:
        """Return what both forms begin with."""
        kernels: Kernels = []
        if self.rectifies_dy:
            kernels.append(("rectify_gradient", lambda k: linear.rectify_gradient(k, self.y, self.dy)))
        if self.stage.bias:
            kernels.append(("bias_gradients", lambda k: self._bias_gradients(k, plan)))
        return kernels

    def _bias_gradients(self, k: Emitter, plan: Layout) -> None:
        _, db = plan.parameters.gradients(k, self.stage)
        assert db is not None
        linear.bias_gradients(k, self.dy, db)


class WideDense(Dense):
    """Many outputs."""

    def in_lanes(self, what: str, kernel: str) -> str:
        return "images" if kernel == "input_gradient" else "weights"

    way = "wide"

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        features, outputs = self.stage.weight.shape
        vectors = -(-outputs // target.lanes)
        _, _, width = choose_tile((images, 1), 1, vectors, target.registers)
        sums = product_sums((images, 1), 1, outputs, features, target)
        read = 4 * images * (features + outputs)
        gradient = product_gradient(features, 1, outputs, width, (1, images), read, target)
        stored = 2 * cost.bring(features * outputs, 8 * features * outputs, target)
        back = [
            times_w * times_h * (outputs * tile_cycles(high, wide) + high * wide)
            for _, wide, times_w in chunks(-(-images // target.lanes), 4)
            for _, high, times_h in chunks(features, most_height(wide, target.registers))
        ]
        weights = Work(gradient.macs / images, (gradient.cycles + stored) / images, gradient.tile)
        found = {
            **self._common_work(target),
            "forward": Work(sums.macs / images, sums.cycles / images, sums.tile),
            "weight_gradients": weights,
            "update": weights,
        }
        if needs_dx:
            found |= {
                "dy_to_lanes": transposition(outputs, target),
                "input_gradient": Work(features * outputs, sum(back) / images, "features x vectors of images"),
                "dx_to_rows": transposition(features, target),
            }
        return found

    def prepare(self, plan: Layout) -> None:
        (features, outputs), target = self.stage.weight.shape, plan.target
        self.height, _, width = choose_tile((plan.share, 1), 1, -(-outputs // target.lanes), target.registers)
        self.panels = Panels(features, outputs, width, target.lanes)
        plan.parameters.place(self.stage.weight, self.panels.size, self.panels.positions(), plan.owns)
        plan.parameters.place_plain(self.stage.bias)
        if self.dx:
            self.dy_lanes = plan.arena.grid((1, 1, outputs))
            self.dx_lanes = plan.arena.grid((1, 1, features))

    def forward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            w, b = plan.parameters.weights(k, self.stage)
            linear.wide_forward(k, self.x, w, self.panels, b, self.y, self.rectify, self.height)

        return [("forward", run)]

    def backward(self, plan: Layout) -> Kernels:
        def input_gradient(k: Emitter) -> None:
            (w, _), groups = plan.parameters.weights(k, self.stage), plan.arena.groups
            linear.wide_input_gradient(k, w, self.panels, self.dy_lanes, self.dx_lanes, groups)

        kernels = [*super().backward(plan), *([] if plan.owns else self._weight_gradients(plan))]
        dx = self.dx
        if dx:
            kernels += [
                ("dy_to_lanes", lambda k: transfer.to_lanes(k, self.dy, self.dy_lanes)),
                ("input_gradient", input_gradient),
                ("dx_to_rows", lambda k: transfer.to_rows(k, self.dx_lanes, dx)),
            ]
        return kernels

    def _weight_gradients(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            dw, _ = plan.parameters.gradients(k, self.stage)
            linear.wide_weight_gradients(k, self.x, self.dy, self.panels, dw)

        return [("weight_gradients", run)]

    def owned_gradients(self, plan: Layout) -> Kernels:
        return self._weight_gradients(plan) if plan.owns else []

    def owned_updates(self, plan: Layout) -> list[tuple[str, Callable[[Emitter, Optimizer], None]]]:
        def run(k: Emitter, optimizer: Optimizer) -> None:
            at = plan.parameters.offset(self.stage.weight)
            linear.wide_update(k, self.x, self.dy, self.panels, at, plan.arena.stride, optimizer)

        return [("update", run)] if plan.owns else []


class SkinnyDense(Dense):
    """Few outputs. Both passes can go by parts of the features: see `FilterClassifier`."""

    rectifies_dx = True
    way = "skinny"

    def fits(self, target: Target) -> bool:
        """Whether an image's sums fit the registers."""
        return self.stage.output_shape[0] <= linear.MOST_OUTPUTS

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        features, outputs = self.stage.weight.shape
        vectors = -(-features // target.lanes)
        pair = 2 if 2 * outputs + 3 <= target.registers else 1
        sums = max(outputs / cost.MACS, 4 / pair, (outputs / pair + 1) / cost.LOADS)
        ending = round_up(outputs, target.lanes) * (math.log2(target.lanes) + 3)
        parts = len(chunks(outputs, linear.most_block(target.registers)))
        each = outputs * (1 if needs_dx else 0.75) + 2.5 * parts + 2 * outputs / images
        macs = features * outputs
        return {
            **self._common_work(target),
            "forward": Work(macs, vectors * sums + ending, f"{pair} images x {outputs} outputs"),
            "backward": Work(
                macs * (2 if needs_dx else 1),
                vectors * each,
                f"{min(outputs, linear.most_block(target.registers))} outputs",
            ),
        }

    def prepare(self, plan: Layout) -> None:
        (features, outputs), lanes = self.stage.weight.shape, plan.target.lanes
        d, o = np.mgrid[:features, :outputs]
        size = linear.skinny_size(features, outputs, lanes)
        plan.parameters.place(self.stage.weight, size, (d // lanes * outputs + o) * lanes + d % lanes)
        plan.parameters.place_plain(self.stage.bias)
        self.totals = plan.arena.allocate(plan.arena.images * outputs * lanes)

    def forward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            self.begin(k)
            self.add(k, plan, INDEX(0), self.x.width // k.lanes)
            self.end(k, plan)

        return [("forward", run)]

    def begin(self, k: Emitter) -> None:
        linear.skinny_begin(k, k.arena + self.totals, self.y.size)

    def add(self, k: Emitter, plan: Layout, first: ir.Value, vectors: int) -> None:
        weights, _ = plan.parameters.weights(k, self.stage)
        linear.skinny_add(k, self.x, weights, k.arena + self.totals, self.y.size, first, vectors)

    def end(self, k: Emitter, plan: Layout) -> None:
        _, bias = plan.parameters.weights(k, self.stage)
        linear.skinny_end(k, k.arena + self.totals, bias, self.y, self.rectify)

    def backward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            self.run_backward(k, plan, INDEX(0), self.x.width // k.lanes)

        return [*super().backward(plan), ("backward", run)]

    def run_backward(self, k: Emitter, plan: Layout, first: ir.Value, vectors: int) -> None:
        (w, _), (dw, _) = plan.parameters.weights(k, self.stage), plan.parameters.gradients(k, self.stage)
        linear.skinny_backward(k, self.x, w, self.dy, self.dx, dw, self.input_rectified, first, vectors)


class FilterClassifier(Node[Matrix, Matrix]):
    """A `FilterConvolution` and the skinny `Dense` after it, row of cells by row of cells.

    What one writes the other reads from a cache. The gradient of what lies between takes its place.
    """

    wants = makes = Matrix
    trains = True
    way = "filters-fused"

    def __init__(self, conv: FilterConvolution, dense: SkinnyDense) -> None:
        super().__init__(f"{conv.name}+{dense.name}", dense.shape)
        self.conv, self.dense, self.rectify = conv, dense, dense.rectify
        self.input_size, self.first, self.row = conv.input_size, conv.first, conv.row

    def part(self, plan: Layout, what: str, kernel: str) -> Part:
        """As `Node.part`: of the dense layer; what the convolution takes is charged to it between."""
        return self.dense.part(plan, what, kernel)

    def fits(self, target: Target) -> bool:
        """Whether each part does, and the gradient can take the place of what lies between."""
        once = self.dense.stage.weight.shape[1] <= linear.most_block(target.registers)
        return once and self.conv.fits(target) and self.dense.fits(target)

    def may_follow(self, before: Ring | None, needs_dx: bool) -> bool:
        return before is None

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        conv, dense = self.conv.work(target, images, False), self.dense.work(target, images, True)

        def joined(a: Work, b: Work) -> Work:
            return Work(a.macs + b.macs, a.cycles + b.cycles, f"{a.tile}; {b.tile}")

        return {
            **{name: dense[name] for name in ("rectify_gradient", "bias_gradients")},
            "forward": joined(conv["forward"], dense["forward"]),
            "backward": joined(conv["weight_gradients"], dense["backward"]),
        }

    def prepare(self, plan: Layout) -> None:
        conv, dense = self.conv, self.dense
        between = plan.arena.matrix(math.prod(conv.shape))
        conv.x, conv.y, conv.dy = self.x, between, between
        dense.x, dense.dx, dense.y, dense.dy = between, between, self.y, self.dy
        dense.input_rectified = conv.dy_rectified = conv.rectify
        dense.dy_rectified = self.dy_rectified
        conv.prepare(plan)
        dense.prepare(plan)
        self.row_vectors = conv.shape[1] * conv.shape[2] // plan.target.lanes

    def forward(self, plan: Layout) -> Kernels:
        conv, linear = (plan.clocks.part(node.part(plan, FORWARD, "forward")) for node in (self.conv, self.dense))

        def run(k: Emitter) -> None:
            self.dense.begin(k)
            with k.loop(self.conv.shape[0]) as u:
                plan.clocks.charge(k, linear)
                k.call("conv", lambda k, u: self.conv.forward_row(k, plan, u), u)
                plan.clocks.charge(k, conv)
                k.call("linear", lambda k, u: self.dense.add(k, plan, self._vector(k, u), self.row_vectors), u)
            self.dense.end(k, plan)

        return [("forward", run)]

    def backward(self, plan: Layout) -> Kernels:
        conv = plan.clocks.part(self.conv.part(plan, BACKWARD, "weight_gradients"))
        linear = plan.clocks.part(self.dense.part(plan, BACKWARD, "backward"))

        def run(k: Emitter) -> None:
            with k.loop(self.conv.shape[0]) as u:
                k.call("linear", lambda k, u: self.dense.run_backward(k, plan, self._vector(k, u), self.row_vectors), u)
                plan.clocks.charge(k, linear)
                k.call("conv", lambda k, u: self.conv.weight_gradients_row(k, plan, u), u)
                plan.clocks.charge(k, conv)

        return [*Dense.backward(self.dense, plan), ("backward", run)]

    def _vector(self, k: Emitter, u: ir.Value) -> ir.Value:
        """Return the first vector of row u."""
        return k.builder.mul(u, INDEX(self.row_vectors))


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
            elementwise.apply_gradient(k, derivative, self.x, self.y, self.dy, self.needed_dx)

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
            self.codes = plan.arena.grid(self.shape)
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
                elementwise.max_pool(k, self.x, self.size, self.stride, self.y, self.codes)
            else:
                elementwise.avg_pool(k, self.x, self.size, self.stride, k.arena + self.shares, self.y)

        return [("forward", run)]

    def backward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            if self.largest:
                elementwise.max_pool_gradient(k, self.codes, self.dy, self.size, self.stride, self.spread)
            else:
                elementwise.avg_pool_gradient(k, self.dy, self.size, self.stride, k.arena + self.shares, self.spread)
            elementwise.apply(k, elementwise.same, self.spread, self.needed_dx)

        return [("backward", run)]
