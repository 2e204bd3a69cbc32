"""From a network to kernels: which layers are fused, in which layout each works, and where its values lie.

`Plan` walks the stages, makes one node for each group of layers that is computed at once (a convolution takes in the
ReLU and the max-pool after it, a linear layer its ReLU), and asks every node for its forward and backward kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import assert_never, cast

from llvmlite import ir

from cnnexp.backends.parts import BACKWARD, FORWARD, Part
from cnnexp.backends.simd import linear, transfer
from cnnexp.backends.simd.clocks import Clocks
from cnnexp.backends.simd.emit import BYTE, FLOAT, Emitter, Kernels, Target
from cnnexp.backends.simd.layout import Arena, Grid, Image, Matrix, Parameters, Ring
from cnnexp.backends.simd.nodes import (
    Activation,
    ChannelConvolution,
    Convolution,
    FilterClassifier,
    FilterConvolution,
    Node,
    Pool,
    SkinnyDense,
    Tensor,
    ToImages,
    ToLanes,
    ToRows,
    WideDense,
)
from cnnexp.network import (
    ConvStage,
    DropoutStage,
    ElementwiseStage,
    FlattenStage,
    LinearStage,
    MaxPool2d,
    Network,
    NormStage,
    PoolStage,
    ReLU,
    ResidualStage,
    Stage,
)
from cnnexp.network.losses import Loss
from cnnexp.optimizers import Optimizer

LARGEST_WINDOW = 4
"""Side of the largest max-pool that a convolution computes along: its code has every pixel of the window in it."""

STEP = {
    "gather": Part("gather", ("batch",), "gather"),
    "loss": Part(FORWARD, ("loss",), "loss"),
    "wait": Part("wait", ("threads",), "wait"),
    "update": Part("update", ("parameters",), "update"),
}
"""The parts of a step besides the layers', by name: `wait` is for the other threads."""


class Plan:
    """A network laid out in an arena, with the kernels that run it.

    Attributes:
        nodes: first to last. share, owns: see `Layout`.
        arena, parameters: the room of activations and of parameters.
        clocks: of the parts of a step. step_parts: the numbers of those in `STEP`.
        scores, d_scores: output of the network and its gradient, one image per row.
        gather: kernels that bring images in, by the type of their pixels (`uint8`, `float32`).
        forward, backward: kernels in order.
        gradients: what adds to the gradients of owned weights, after `backward`.
        updates: what takes the step of owned weights instead, once all threads have come through `backward`.
    """

    def __init__(self, network: Network, target: Target, groups: int, share: int) -> None:
        images = groups * target.lanes
        self.target, self.share, self.owns = target, min(share, images), share <= images
        self.arena, self.parameters = Arena(target.lanes, groups), Parameters(target.lanes)
        self.clocks = Clocks(target)
        nodes = self.nodes = group_stages(network, target)
        self._allocate(network, nodes)
        for node in nodes:
            node.prepare(self)
        self.gather = {
            name: self._gather(network, nodes[0], kind) for name, kind in (("uint8", BYTE), ("float32", FLOAT))
        }
        self.scores, self.d_scores = _flat(nodes[-1].y), _flat(nodes[-1].dy)
        self.forward = self._named(FORWARD, nodes, lambda node: node.forward(self))
        trained = nodes[_first_trained(nodes) :]
        self.backward = self._named(BACKWARD, reversed(trained), lambda node: node.backward(self))
        self.gradients = self._named(BACKWARD, trained, lambda node: node.owned_gradients(self))
        self._updates = self._named(BACKWARD, trained, lambda node: node.owned_updates(self))
        self.step_parts = {name: self.clocks.part(part) for name, part in STEP.items()}
        self.clocks.place(self.arena.allocate)

    def updates(self, optimizer: Optimizer) -> Kernels:
        return [(name, functools.partial(emit, optimizer=optimizer)) for name, emit in self._updates]

    def _named(
        self, what: str, nodes: Iterable[Node], kernels_of: Callable[[Node], Sequence[tuple[str, Callable[..., None]]]]
    ) -> list[tuple[str, Callable[..., None]]]:
        """Return the kernels of the nodes under their names, each charged to its part of the step."""
        return [
            (f"{node.name}.{name}", self._clocked(emit, node.part(self, what, name)))
            for node in nodes
            for name, emit in kernels_of(node)
        ]

    def _clocked(self, emit: Callable[..., None], part: Part) -> Callable[..., None]:
        number = self.clocks.part(part)

        def run(k: Emitter, **options: Optimizer) -> None:
            emit(k, **options)
            if self.clocks.on:
                self.clocks.charge(k, number, linear.own_arena(k, self.arena.stride) if options else k.arena)

        return run

    def _allocate(self, network: Network, nodes: list[Node]) -> None:
        """Give every node its input, output and gradients."""
        flat = len(network.input_shape) == 1 or nodes[0].wants is Matrix
        shape = (math.prod(network.input_shape),) if flat else network.input_shape
        if isinstance(nodes[0], FilterConvolution | FilterClassifier):
            shape = (nodes[0].input_size,)
        x = self._tensor(Matrix if flat else nodes[0].wants or Grid, shape, nodes[0].input_ring())
        first, dx = _first_trained(nodes), cast(Tensor | None, None)
        for i, node in enumerate(nodes):
            if node.wants is Matrix:
                x, dx = _flat(x), dx and _flat(dx)
            node.x, node.dx = x, dx
            kind = node.makes or type(x)
            ring = nodes[i + 1].input_ring() if i + 1 < len(nodes) else Ring()
            node.y = self._tensor(kind, node.shape, ring)
            x, dx = node.y, None
            if i >= first:
                flat = i + 1 == len(nodes) or nodes[i + 1].wants is Matrix
                dx = node.dy = self._tensor(kind, node.shape, Ring() if flat else node.gradient_ring(i > first))
                if i + 1 < len(nodes):
                    nodes[i + 1].input_rectified = node.dy_rectified = node.rectify and nodes[i + 1].rectifies_dx

    def _tensor(self, kind: type[Tensor], shape: tuple[int, ...], ring: Ring) -> Tensor:
        if kind is Matrix:
            return self.arena.matrix(math.prod(shape))
        if kind is Image:
            return self.arena.image(shape, ring)
        return self.arena.grid(shape if len(shape) == 3 else (1, 1, *shape), ring)

    def _gather(self, network: Network, first: Node, pixel: ir.Type) -> Kernels:
        shape = network.input_shape if len(network.input_shape) == 3 else (1, 1, *network.input_shape)
        x, start, row = first.x, 0, shape[1] * shape[2]
        if isinstance(x, Grid):
            return [("gather", functools.partial(transfer.gather_lanes, y=x, pixel=pixel))]
        if isinstance(x, Image):
            start, row = x.ring.top * x.row + x.ring.left * x.column, x.row
            x = Matrix(x.offset, math.prod(shape), x.stride, x.width)
        elif isinstance(first, FilterConvolution | FilterClassifier):
            start, row = first.first, first.row
        gather = functools.partial(transfer.gather_rows, y=x, shape=shape, first=start, stride=row, pixel=pixel)
        return [("gather", gather)]


def _flat(tensor: Tensor) -> Matrix:
    """Return an image's values as a row; `group_stages` has put lanes into rows before."""
    assert not isinstance(tensor, Grid)
    return tensor.matrix if isinstance(tensor, Image) else tensor


def _first_trained(nodes: list[Node]) -> int:
    return next(i for i, node in enumerate(nodes) if node.trains)


def suits(network: Network, loss: Loss) -> bool:
    """Whether there is a kernel for every layer and for the loss."""
    if loss not in (Loss.SOFTMAX_CROSS_ENTROPY, Loss.BINARY_CROSS_ENTROPY):
        return False
    known = ConvStage | PoolStage | LinearStage | ElementwiseStage | FlattenStage
    return all(isinstance(stage, known) for stage in network.stages)


def group_stages(network: Network, target: Target) -> list[Node]:
    """Group the stages, and put a change of layout where one is needed."""
    stages, nodes = list(network.stages), list[Node]()
    layout: type[Tensor] = Grid if len(network.input_shape) == 3 else Matrix
    shape = network.input_shape
    while stages:
        names = [stage.name for stage in stages]
        stage = stages.pop(0)
        if isinstance(stage, FlattenStage):
            # rows are flat already, and in lanes only a change of layout flattens
            continue
        node = _node(stage, stages, shape, target, first=not nodes)
        node.layers = tuple(names[: len(names) - len(stages)])
        if nodes:
            layout = _change(nodes, node.name, layout, node.wants, shape)
        nodes.append(node)
        layout, shape = node.makes or layout, node.shape
    _change(nodes, "scores", layout, Matrix, shape)
    classifier = FilterClassifier.of(nodes, target)
    return [classifier, *nodes[2:]] if classifier else nodes


def _change(
    nodes: list[Node], name: str, layout: type[Tensor], wanted: type[Tensor] | None, shape: tuple[int, ...]
) -> type[Tensor]:
    """Put the nodes that change a layout into the wanted one, and return it; an image is flat already."""
    if wanted is None and layout is Image:
        wanted = Grid
    if wanted is None or wanted is layout:
        return layout
    if layout is Image and wanted is Grid:
        nodes.append(ToLanes(f"{name}.lanes", shape))
    elif layout is Grid and wanted is Image:
        nodes.append(ToImages(f"{name}.rows", shape))
    elif layout is Grid:
        nodes.append(ToRows(f"{name}.rows", (math.prod(shape),)))
    return wanted


def _node(stage: Stage, following: list[Stage], shape: tuple[int, ...], target: Target, first: bool) -> Node:
    """Return the node of a stage, taking from `following` what it computes along."""
    match stage:
        case ConvStage():
            rectify, pool = _follow(following)
            flattens = bool(following) and isinstance(following[0], FlattenStage)
            if first and flattens and pool and FilterConvolution.suits(stage, pool, target):
                return FilterConvolution(stage, rectify, pool)
            if ChannelConvolution.suits(stage, pool, target):
                return ChannelConvolution(stage, rectify, pool)
            return Convolution(stage, rectify, pool)
        case LinearStage():
            rectify = bool(following) and isinstance(following[0].layer, ReLU)
            if rectify:
                following.pop(0)
            return (SkinnyDense if stage.layer.features <= linear.MOST_OUTPUTS else WideDense)(stage, rectify)
        case PoolStage():
            return Pool(stage)
        case ElementwiseStage():
            return Activation(stage, shape)
        case FlattenStage() | DropoutStage() | NormStage() | ResidualStage():
            raise TypeError(f"{stage.name}: no node computes it; `suits` tells")
        case _:
            assert_never(stage)


def _follow(following: list[Stage]) -> tuple[bool, PoolStage | None]:
    """Take a ReLU and a max-pool, in either order, that a convolution can compute along."""
    rectify, pool = False, None
    while following:
        match following[0]:
            case ElementwiseStage(layer=ReLU()) if not rectify:
                rectify = True
            case PoolStage() as stage if pool is None and _fits_windows(stage):
                pool = stage
            case _:
                break
        following.pop(0)
    return rectify, pool


def _fits_windows(pool: PoolStage) -> bool:
    """Whether a stage is a max-pool whose windows are small, do not overlap and do not reach past the image."""
    if not isinstance(pool.layer, MaxPool2d) or pool.window.padded:
        return False
    return pool.window.size <= min(LARGEST_WINDOW, pool.window.stride)
