"""From a network to kernels: which layers are fused, in which layout each works, and where its values lie.

`Plan` walks the stages, makes one node for each group of layers that is computed at once (a convolution takes in the
ReLU and the max-pool after it, a linear layer its ReLU), and asks every node for its forward and backward kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from llvmlite import ir

from cnnexp.backends.cpu_simd import conv_filters, conv_lanes, conv_sparse, elementwise, linear, transfer
from cnnexp.backends.cpu_simd.conv_filters import FilterBank
from cnnexp.backends.cpu_simd.conv_lanes import Correlation, Windows
from cnnexp.backends.cpu_simd.conv_sparse import SparseGradient
from cnnexp.backends.cpu_simd.emit import BYTE, FLOAT, Emitter, Kernels, Pointer, Target
from cnnexp.backends.cpu_simd.layout import Arena, Grid, Matrix, Ring, round_up
from cnnexp.network import AvgPool2d, Conv2d, Flatten, Linear, MaxPool2d, Network, Parameter, ReLU, Sigmoid, Stage

Tensor = Grid | Matrix

LARGEST_WINDOW = 4
"""Side of the largest max-pool that a convolution computes along: its code has every pixel of the window in it."""


class Parameters:
    """Where every parameter lies in this backend's own flat buffer, rounded up to vectors where a kernel likes it so.

    Attributes:
        size: of the buffer, in floats.
        positions: int64 (parameter_count,), the place of every element of the network's flat buffer.
    """

    def __init__(self, lanes: int) -> None:
        self.lanes, self.size = lanes, 0
        self._offsets: dict[str, int] = {}
        self._parts: list[tuple[int, np.ndarray]] = []

    def place(self, parameter: Parameter, size: int, positions: np.ndarray) -> None:
        """Give a parameter `size` floats, its elements at `positions` in them."""
        self._offsets[parameter.name] = self.size
        self._parts.append((parameter.offset, self.size + positions.ravel()))
        self.size += round_up(size, 16)

    def place_plain(self, parameter: Parameter) -> None:
        self.place(parameter, round_up(parameter.size, self.lanes), np.arange(parameter.size))

    @property
    def positions(self) -> np.ndarray:
        return np.concatenate([positions for _, positions in sorted(self._parts, key=lambda part: part[0])])

    def weight(self, k: Emitter, parameter: Parameter) -> Pointer:
        return k.parameters + self._offsets[parameter.name]

    def gradient(self, k: Emitter, parameter: Parameter) -> Pointer:
        return k.gradients + self._offsets[parameter.name]


@dataclass
class Node:
    """Layers computed at once.

    Attributes:
        name: of its kernels.
        shape: of its output, without the images.
        x, y: input and output. dy, dx: their gradients, None where they are not needed.
        input_rectified: x is a ReLU's output, and dx to be the gradient of that ReLU's input.
        dy_rectified: dy already is the gradient of what its own ReLU takes in: the node after it saw to that.
    """

    name: str
    shape: tuple[int, ...]
    x: Tensor = field(init=False)
    y: Tensor = field(init=False)
    dy: Tensor | None = field(init=False, default=None)
    dx: Tensor | None = field(init=False, default=None)
    input_rectified: bool = field(init=False, default=False)
    dy_rectified: bool = field(init=False, default=False)

    wants = None
    """The layout of the input, `Grid` or `Matrix`; None for either, and the output is of the same."""
    makes = None
    """The layout of the output."""
    trains = False
    """Whether it has parameters."""
    rectify = False
    """Whether it has taken in a ReLU."""
    rectifies_dx = False
    """Whether it can see to a ReLU before it when it stores dx."""

    @property
    def rectifies_dy(self) -> bool:
        """Whether its ReLU's gradient is still to be taken."""
        return self.rectify and not self.dy_rectified

    def input_ring(self) -> Ring:
        """Return the room that its input needs around it."""
        return Ring()

    def gradient_ring(self, needs_dx: bool) -> Ring:
        """Return the room around dy that it needs."""
        return Ring()

    def prepare(self, plan: Plan) -> None:
        """Allocate what else it needs, once x, y, dy, dx are known."""

    def forward(self, plan: Plan) -> Kernels:
        raise NotImplementedError

    def backward(self, plan: Plan) -> Kernels:
        raise NotImplementedError


class Convolution(Node):
    """Conv2d [+ ReLU] [+ MaxPool2d], batch in lanes."""

    wants = makes = Grid
    trains = rectifies_dx = True

    def __init__(self, stage: Stage, rectify: bool, pool: Stage | None) -> None:
        super().__init__(stage.name, (pool or stage).output_shape)
        self.stage, self.rectify, self.pool = stage, rectify, pool

    def input_ring(self) -> Ring:
        layer, (height, width, _), (top, left) = self.stage.layer, self.stage.input_shape, self.stage.pads
        rows, columns, _ = self.stage.output_shape
        bottom = (rows - 1) * layer.stride + layer.kernel - top - height
        right = (columns - 1) * layer.stride + layer.kernel - left - width
        return Ring(top, left, max(bottom, 0), max(right, 0))

    def gradient_ring(self, needs_dx: bool) -> Ring:
        return Ring() if self.pool else self._dense_ring(needs_dx)

    def _dense_ring(self, needs_dx: bool) -> Ring:
        """The room around the gradient of the full convolution: windows of the flipped kernel reach over its edge."""
        if not needs_dx:
            return Ring()
        layer, reach = self.stage.layer, self.stage.layer.kernel - 1
        sides = []
        for pad, size, count in zip(self.stage.pads, self.stage.input_shape, self.stage.output_shape, strict=False):
            before, extent = max(0, reach - pad), (count - 1) * layer.stride + 1
            sides.append((before, max(0, max(0, pad - reach) + size + reach - before - extent)))
        (top, bottom), (left, right) = sides
        return Ring(top, left, bottom, right, layer.stride)

    def prepare(self, plan: Plan) -> None:
        layer, channels = self.stage.layer, self.stage.input_shape[2]
        plan.parameters.place_plain(self.stage.weight)
        if self.stage.bias:
            plan.parameters.place_plain(self.stage.bias)
        windows = None
        if self.pool:
            size = self.pool.layer.pool
            windows = Windows(size, self.pool.layer.stride or size, plan.arena.codes(self.shape))
        self.correlation = Correlation(
            self.x, (0, 0), layer.stride, layer.kernel, channels, layer.filters, self.y, self.rectify, windows
        )
        self.sparse = self._sparse(plan, windows)
        if self.sparse:
            return
        self.sums = plan.arena.allocate(conv_lanes.MOST_SUMS * plan.target.lanes)
        self.d = self.dy
        if self.pool:
            self.d = plan.arena.grid(self.stage.output_shape, self._dense_ring(self.dx is not None))
        if self.dx:
            self.flipped = plan.arena.allocate(self.stage.weight.size)

    def _sparse(self, plan: Plan, windows: Windows | None) -> SparseGradient | None:
        """Return the gradient that follows the argmax, where it pays."""
        layer, channels, target = self.stage.layer, self.stage.input_shape[2], plan.target
        if windows is None or self.dx is None or windows.size < 2 or not (self.x.dense and self.dx.dense):
            return None
        if not conv_sparse.suits(layer.kernel, channels, target.registers, target.lanes):
            return None
        scratch = conv_sparse.make_scratch(plan.arena, layer.kernel, layer.stride, self.x, self.y, windows)
        return SparseGradient(
            self.x, self.y, self.dy, self.dx, layer.kernel, layer.stride, channels, layer.filters,
            windows, self.rectifies_dy, scratch,
        )  # fmt: skip

    def forward(self, plan: Plan) -> Kernels:
        weight, bias, place = self.stage.weight, self.stage.bias, plan.parameters.weight
        return [
            (
                "forward",
                lambda k: conv_lanes.forward(k, self.correlation, place(k, weight), bias and place(k, bias)),
            )
        ]

    def backward(self, plan: Plan) -> Kernels:
        stage, place = self.stage, plan.parameters.gradient
        kernels: Kernels = []
        if self.sparse:
            kernels.append(("sparse_backward", lambda k: self._sparse_backward(k, plan)))
            if self.input_rectified:
                kernels.append(("rectify_dx", lambda k: conv_lanes.rectify_gradient(k, self.x, self.dx)))
            return kernels
        if self.pool:
            windows = self.correlation.windows
            kernels.append(
                ("unpool", lambda k: conv_lanes.unpool(k, windows, self.y, self.dy, self.d, self.rectifies_dy))
            )
        elif self.rectifies_dy:
            kernels.append(("rectify_gradient", lambda k: conv_lanes.rectify_gradient(k, self.y, self.dy)))
        kernels.append(
            (
                "weight_gradients",
                lambda k: conv_lanes.weight_gradients(
                    k,
                    self.correlation,
                    self.d,
                    place(k, stage.weight),
                    stage.bias and place(k, stage.bias),
                    k.arena + self.sums,
                ),
            )
        )
        if self.dx:
            kernels.append(("input_gradient", lambda k: self._input_gradient(k, plan)))
        return kernels

    def _sparse_backward(self, k: Emitter, plan: Plan) -> None:
        weight, bias, parameters = self.stage.weight, self.stage.bias, plan.parameters
        dw, db = parameters.gradient(k, weight), bias and parameters.gradient(k, bias)
        conv_sparse.backward(k, self.sparse, parameters.weight(k, weight), dw, db)

    def _input_gradient(self, k: Emitter, plan: Plan) -> None:
        layer, channels, reach = self.stage.layer, self.stage.input_shape[2], self.stage.layer.kernel - 1
        flipped = k.arena + self.flipped
        weights = plan.parameters.weight(k, self.stage.weight)
        conv_lanes.flip_weights(k, weights, flipped, layer.kernel, channels, layer.filters)
        origin = tuple(max(0, pad - reach) for pad in self.stage.pads)
        positive = self.x if self.input_rectified else None
        back = Correlation(self.d, origin, 1, layer.kernel, layer.filters, channels, self.dx, positive=positive)
        conv_lanes.forward(k, back, flipped, None)


class FilterConvolution(Node):
    """Conv2d [+ ReLU] + MaxPool2d that opens a network and leads into a linear layer, filters in lanes."""

    wants = makes = Matrix
    trains = True

    def __init__(self, stage: Stage, rectify: bool, pool: Stage) -> None:
        super().__init__(stage.name, pool.output_shape)
        self.stage, self.rectify, self.pool = stage, rectify, pool
        layer, (height, width, channels), (top, left) = stage.layer, stage.input_shape, stage.pads
        rows, columns, _ = stage.output_shape
        stored = [
            max((count - 1) * layer.stride + layer.kernel, size + pad)
            for count, size, pad in ((rows, height, top), (columns, width, left))
        ]
        self.row = stored[1] * channels
        self.input_size = stored[0] * self.row
        self.first = top * self.row + left * channels

    @staticmethod
    def suits(stage: Stage, pool: Stage | None, target: Target) -> bool:
        """Whether the filters fill vectors and a patch and a filter's accumulators fit registers."""
        layer, channels = stage.layer, stage.input_shape[2]
        if pool is None or layer.filters % target.lanes or target.registers < 32:
            return False
        size = pool.layer.pool
        side = conv_filters.patch_side(layer.kernel, layer.stride, size)
        return layer.kernel**2 * channels <= 25 and size * size <= 4 and side * side * channels <= 64

    def prepare(self, plan: Plan) -> None:
        plan.parameters.place_plain(self.stage.weight)
        if self.stage.bias:
            plan.parameters.place_plain(self.stage.bias)
        layer, channels, size = self.stage.layer, self.stage.input_shape[2], self.pool.layer.pool
        images, cells = plan.arena.images, self.shape[0] * self.shape[1]
        side = conv_filters.patch_side(layer.kernel, layer.stride, size)
        fits = plan.target.permutes and side * side * channels <= plan.target.lanes
        self.bank = FilterBank(
            self.x, self.row, layer.kernel, layer.stride, channels, layer.filters,
            size, self.pool.layer.stride or size, self.shape[:2], self.y,
            plan.arena.allocate(images * cells * layer.filters // 4),
            plan.arena.allocate((images * cells + 1) * plan.target.lanes) if fits else None,  # loads reach past the last
            self.rectify,
        )  # fmt: skip

    def forward(self, plan: Plan) -> Kernels:
        weight, bias, place = self.stage.weight, self.stage.bias, plan.parameters.weight
        return [("forward", lambda k: conv_filters.forward(k, self.bank, place(k, weight), bias and place(k, bias)))]

    def backward(self, plan: Plan) -> Kernels:
        weight, bias, place = self.stage.weight, self.stage.bias, plan.parameters.gradient
        kernels: Kernels = []
        if self.rectifies_dy:
            kernels.append(("rectify_gradient", lambda k: linear.rectify_gradient(k, self.y, self.dy)))

        def run(k: Emitter) -> None:
            conv_filters.weight_gradients(k, self.bank, self.dy, place(k, weight), bias and place(k, bias))

        return [*kernels, ("weight_gradients", run)]


class Dense(Node):
    """Linear [+ ReLU]; `linear` explains its two forms."""

    wants = makes = Matrix
    trains = True

    def __init__(self, stage: Stage, rectify: bool) -> None:
        super().__init__(stage.name, stage.output_shape)
        self.stage, self.rectify = stage, rectify
        self.skinny = self.rectifies_dx = stage.weight.shape[1] <= linear.MOST_OUTPUTS

    def prepare(self, plan: Plan) -> None:
        (features, outputs), lanes = self.stage.weight.shape, plan.target.lanes
        d, o = np.mgrid[:features, :outputs]
        if self.skinny:
            size = linear.skinny_size(features, outputs, lanes)
            plan.parameters.place(self.stage.weight, size, (d // lanes * outputs + o) * lanes + d % lanes)
            self.totals = plan.arena.allocate(plan.arena.images * outputs * lanes)
        else:
            plan.parameters.place(self.stage.weight, features * self.y.stride, d * self.y.stride + o)
            if self.dx:
                self.dy_lanes = plan.arena.grid((1, 1, outputs))
                self.dx_lanes = plan.arena.grid((1, 1, features))
        if self.stage.bias:
            plan.parameters.place_plain(self.stage.bias)

    def forward(self, plan: Plan) -> Kernels:
        weight, bias, place = self.stage.weight, self.stage.bias, plan.parameters.weight

        def run(k: Emitter) -> None:
            w, b = place(k, weight), bias and place(k, bias)
            if self.skinny:
                linear.skinny_forward(k, self.x, w, b, self.y, k.arena + self.totals, self.rectify)
            else:
                linear.wide_forward(k, self.x, w, b, self.y, self.rectify)

        return [("forward", run)]

    def backward(self, plan: Plan) -> Kernels:
        weight, bias, parameters = self.stage.weight, self.stage.bias, plan.parameters
        kernels: Kernels = []
        if self.rectifies_dy:
            kernels.append(("rectify_gradient", lambda k: linear.rectify_gradient(k, self.y, self.dy)))
        if bias:
            kernels.append(
                ("bias_gradients", lambda k: linear.bias_gradients(k, self.dy, parameters.gradient(k, bias)))
            )
        if self.skinny:
            kernels.append(("backward", lambda k: self._skinny_backward(k, parameters)))
            return kernels
        kernels.append(
            (
                "weight_gradients",
                lambda k: linear.wide_weight_gradients(k, self.x, self.dy, parameters.gradient(k, weight)),
            )
        )
        if self.dx:
            kernels += [
                ("dy_to_lanes", lambda k: transfer.to_lanes(k, self.dy, self.dy_lanes)),
                (
                    "input_gradient",
                    lambda k: linear.wide_input_gradient(
                        k, parameters.weight(k, weight), self.y.stride, self.dy_lanes, self.dx_lanes
                    ),
                ),
                ("dx_to_rows", lambda k: transfer.to_rows(k, self.dx_lanes, self.dx)),
            ]
        return kernels

    def _skinny_backward(self, k: Emitter, parameters: Parameters) -> None:
        weight = self.stage.weight
        w, dw = parameters.weight(k, weight), parameters.gradient(k, weight)
        linear.skinny_backward(k, self.x, w, self.dy, self.dx, dw, self.input_rectified)


class ToRows(Node):
    """Changes layout, from lanes to rows."""

    wants, makes = Grid, Matrix

    def prepare(self, plan: Plan) -> None:
        self.dense = self.dx
        if self.dx and not self.dx.dense:
            self.dense = plan.arena.grid(self.dx.shape)

    def forward(self, plan: Plan) -> Kernels:
        return [("forward", lambda k: transfer.to_rows(k, self.x, self.y))]

    def backward(self, plan: Plan) -> Kernels:
        kernels: Kernels = [("backward", lambda k: transfer.to_lanes(k, self.dy, self.dense))]
        if self.dense is not self.dx:
            kernels.append(("copy", lambda k: elementwise.apply(k, elementwise.same, self.dense, self.dx)))
        return kernels


class Activation(Node):
    """ReLU or Sigmoid where nothing takes it in."""

    def __init__(self, stage: Stage, shape: tuple[int, ...]) -> None:
        super().__init__(stage.name, shape)
        sigmoid = isinstance(stage.layer, Sigmoid)
        self.function = elementwise.sigmoid if sigmoid else elementwise.relu
        self.gradient = elementwise.sigmoid_gradient if sigmoid else elementwise.relu_gradient

    def forward(self, plan: Plan) -> Kernels:
        return [("forward", lambda k: elementwise.apply(k, self.function, self.x, self.y))]

    def backward(self, plan: Plan) -> Kernels:
        return [("backward", lambda k: elementwise.apply_gradient(k, self.gradient, self.y, self.dy, self.dx))]


class Pool(Node):
    """MaxPool2d or AvgPool2d where no convolution takes it in."""

    wants = makes = Grid

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage.name, stage.output_shape)
        self.stage, self.size = stage, stage.layer.pool
        self.stride = stage.layer.stride or self.size
        self.largest = isinstance(stage.layer, MaxPool2d)

    def input_ring(self) -> Ring:
        (height, width, _), (top, left), (rows, columns, _) = (
            self.stage.input_shape,
            self.stage.pads,
            self.stage.output_shape,
        )
        bottom = (rows - 1) * self.stride + self.size - top - height
        right = (columns - 1) * self.stride + self.size - left - width
        return Ring(top, left, max(bottom, 0), max(right, 0), value=-math.inf if self.largest else 0.0)

    def prepare(self, plan: Plan) -> None:
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
        for pad, size, count in zip(self.stage.pads, self.stage.input_shape, self.stage.output_shape, strict=False):
            first = np.arange(count) * self.stride - pad
            counts.append(np.minimum(first + self.size, size) - np.maximum(first, 0))
        return np.multiply.outer(*counts[:2])

    def forward(self, plan: Plan) -> Kernels:
        def run(k: Emitter) -> None:
            if self.largest:
                elementwise.max_pool(k, self.x, self.size, self.stride, self.y, self.codes)
            else:
                elementwise.avg_pool(k, self.x, self.size, self.stride, k.arena + self.shares, self.y)

        return [("forward", run)]

    def backward(self, plan: Plan) -> Kernels:
        def run(k: Emitter) -> None:
            if self.largest:
                elementwise.max_pool_gradient(k, self.codes, self.dy, self.size, self.stride, self.spread)
            else:
                elementwise.avg_pool_gradient(k, self.dy, self.size, self.stride, k.arena + self.shares, self.spread)
            elementwise.apply(k, elementwise.same, self.spread, self.dx)

        return [("backward", run)]


class Plan:
    """A network laid out in an arena, with the kernels that run it.

    Attributes:
        nodes: first to last.
        arena, parameters: the room of activations and of parameters.
        scores, d_scores: output of the network and its gradient, one image per row.
        gather: kernels that bring images in, by the type of their pixels (`uint8`, `float32`).
        forward, backward: kernels in order.
    """

    def __init__(self, network: Network, target: Target, groups: int) -> None:
        self.target = target
        self.arena, self.parameters = Arena(target.lanes, groups), Parameters(target.lanes)
        nodes = self.nodes = group_stages(network, target)
        self._allocate(network, nodes)
        for node in nodes:
            node.prepare(self)
        self.gather = {
            name: self._gather(network, nodes[0], kind) for name, kind in (("uint8", BYTE), ("float32", FLOAT))
        }
        self.scores, self.d_scores = nodes[-1].y, nodes[-1].dy
        self.forward = _named((node, node.forward(self)) for node in nodes)
        trained = nodes[_first_trained(nodes) :]
        self.backward = _named((node, node.backward(self)) for node in reversed(trained))

    def _allocate(self, network: Network, nodes: list[Node]) -> None:
        """Give every node its input, output and gradients."""
        flat = len(network.input_shape) == 1 or nodes[0].wants is Matrix
        shape = (math.prod(network.input_shape),) if flat else network.input_shape
        if isinstance(nodes[0], FilterConvolution):
            shape = (nodes[0].input_size,)
        x = self._tensor(Matrix if flat else Grid, shape, nodes[0].input_ring())
        first, dx = _first_trained(nodes), None
        for i, node in enumerate(nodes):
            node.x, node.dx = x, dx
            kind = node.makes or type(x)
            ring = nodes[i + 1].input_ring() if i + 1 < len(nodes) else Ring()
            node.y = self._tensor(kind, node.shape, ring)
            if i >= first:
                in_place = False
                if i + 1 < len(nodes):
                    nodes[i + 1].input_rectified = node.dy_rectified = node.rectify and nodes[i + 1].rectifies_dx
                    in_place = self._overwrites(node, nodes[i + 1])
                node.dy = node.y if in_place else self._tensor(kind, node.shape, node.gradient_ring(i > first))
            x, dx = node.y, node.dy

    def _overwrites(self, node: Node, following: Node) -> bool:
        """Whether the gradient of a node's output may take the output's place."""
        if not (isinstance(node, FilterConvolution) and isinstance(following, Dense) and following.skinny):
            return False
        return linear.can_overwrite(following.stage.weight.shape[1], self.target.registers)

    def _tensor(self, kind: type, shape: tuple[int, ...], ring: Ring) -> Tensor:
        if kind is Matrix:
            return self.arena.matrix(math.prod(shape))
        return self.arena.grid(shape if len(shape) == 3 else (1, 1, *shape), ring)

    def _gather(self, network: Network, first: Node, pixel: ir.Type) -> Kernels:
        shape = network.input_shape if len(network.input_shape) == 3 else (1, 1, *network.input_shape)
        x, start, row = first.x, 0, shape[1] * shape[2]
        if isinstance(x, Grid):
            return [("gather", lambda k: transfer.gather_lanes(k, x, pixel))]
        if isinstance(first, FilterConvolution):
            start, row = first.first, first.row
        return [("gather", lambda k: transfer.gather_rows(k, x, shape, start, row, pixel))]


def _named(parts) -> Kernels:
    return [(f"{node.name}.{name}", emit) for node, kernels in parts for name, emit in kernels]


def _first_trained(nodes: list[Node]) -> int:
    return next(i for i, node in enumerate(nodes) if node.trains)


def group_stages(network: Network, target: Target) -> list[Node]:
    """Group the stages, and put a change of layout where one is needed."""
    stages, nodes = list(network.stages), []
    layout = Grid if len(network.input_shape) == 3 else Matrix
    shape = network.input_shape
    while stages:
        stage = stages.pop(0)
        if isinstance(stage.layer, Flatten):
            # rows are flat already, and in lanes only a change of layout flattens
            continue
        node = _node(stage, stages, shape, target, first=not nodes)
        if node.wants is Matrix and layout is Grid and nodes:
            nodes.append(ToRows(f"{node.name}.rows", (math.prod(shape),)))
        nodes.append(node)
        layout, shape = node.makes or layout, node.shape
    if layout is Grid:
        nodes.append(ToRows("scores", (math.prod(shape),)))
    return nodes


def _node(stage: Stage, following: list[Stage], shape: tuple[int, ...], target: Target, first: bool) -> Node:
    """Return the node of a stage, taking from `following` what it computes along."""
    match stage.layer:
        case Conv2d():
            rectify, pool = _follow(stage, following)
            flattens = bool(following) and isinstance(following[0].layer, Flatten)
            if first and flattens and FilterConvolution.suits(stage, pool, target):
                return FilterConvolution(stage, rectify, pool)
            return Convolution(stage, rectify, pool)
        case Linear():
            rectify = bool(following) and isinstance(following[0].layer, ReLU)
            if rectify:
                following.pop(0)
            return Dense(stage, rectify)
        case MaxPool2d() | AvgPool2d():
            return Pool(stage)
        case _:
            return Activation(stage, shape)


def _follow(stage: Stage, following: list[Stage]) -> tuple[bool, Stage | None]:
    """Take a ReLU and a max-pool, in either order, that a convolution can compute along."""
    rectify, pool = False, None
    while following:
        if isinstance(following[0].layer, ReLU) and not rectify:
            rectify = True
        elif pool is None and _fits_windows(following[0], stage.output_shape):
            pool = following[0]
        else:
            break
        following.pop(0)
    return rectify, pool


def _fits_windows(pool: Stage, shape: tuple[int, ...]) -> bool:
    """Whether a stage is a max-pool whose windows are small, do not overlap and do not reach past the image."""
    if not isinstance(pool.layer, MaxPool2d) or pool.layer.pool > LARGEST_WINDOW or pool.pads != (0, 0):
        return False
    size, stride = pool.layer.pool, pool.layer.stride or pool.layer.pool
    inside = all((count - 1) * stride + size <= side for count, side in zip(pool.output_shape[:2], shape, strict=False))
    return stride >= size and inside
