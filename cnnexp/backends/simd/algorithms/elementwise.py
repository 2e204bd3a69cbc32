"""`elementwise`: an elementwise layer on its own, where no layer next to it takes it in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from llvmlite import ir

from cnnexp.backends.simd.algorithms.cost import Work, passes
from cnnexp.backends.simd.algorithms.node import Node, Section, Tensor
from cnnexp.backends.simd.compiler.emit import INDEX, Emitter, Kernels, Pointer, Target
from cnnexp.backends.simd.compiler.trace import MATHS, emitted
from cnnexp.backends.simd.layouts import Blocked, Halo, Layout
from cnnexp.network import ElementwiseStage, LeakyReLU, ReLU

Map = Callable[[Emitter, ir.Value], ir.Value]


class ElementwiseNode(Node[Tensor, Tensor]):
    """An elementwise layer where nothing takes it in."""

    algorithm = "elementwise"

    @classmethod
    def of(cls, sections: Sequence[Section], first: bool) -> ElementwiseNode | None:
        stage = sections[0].stage
        return cls(stage, stage.input_shape) if isinstance(stage, ElementwiseStage) else None

    def __init__(self, stage: ElementwiseStage, shape: tuple[int, ...]) -> None:
        super().__init__(stage.name, shape)
        self.layer, self.any_image = stage.layer, len(shape) == 3

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        # an exponential takes some twenty instructions, a comparison two
        each = passes(math.prod(self.shape), 4 if isinstance(self.layer, ReLU | LeakyReLU) else 25, target)
        return {"forward": each, "backward": each}

    def forward(self, plan: Layout) -> Kernels:
        rule = emitted(self.layer.rule(MATHS))
        return [("forward", lambda k: apply(k, rule, self.x, self.y))]

    def backward(self, plan: Layout) -> Kernels:
        derivative = emitted(self.layer.derivative(MATHS))

        def run(k: Emitter) -> None:
            """dx = dy * derivative(x, y)."""

            def one(places: list[Pointer], valid: int, *_: object) -> None:
                x, y, dy = (k.load(place) for place in places[:3])
                k.store_part(k.multiply(dy, derivative(k, x, y)), places[3], valid)

            each(k, (self.x, self.y, self.dy, self.needed_dx), one)

        return [("backward", run)]


def same(k: Emitter, x: ir.Value) -> ir.Value:
    return x


def apply(k: Emitter, function: Map, x: Tensor, y: Tensor) -> None:
    """y = function(x)."""
    each(k, (x, y), lambda places, valid, *_: k.store_part(function(k, k.load(places[0])), places[1], valid))


def rectify_gradient(k: Emitter, y: Tensor, dy: Tensor) -> None:
    """dy = 0 wherever ReLU gave 0, in place."""

    def mask(places: list[Pointer], valid: int, *_: object) -> None:
        k.store_part(k.where_positive(k.load(places[0]), k.load(places[1])), places[1], valid)

    each(k, (y, dy), mask)


def each(
    k: Emitter, tensors: Sequence[Tensor], body: Callable[..., object], begin: Callable[[ir.Value], object] = id
) -> None:
    """Call body(places, valid, element, begun) for every vector of tensors of one shape and kind of layout.

    Halos, and what rounds up rows, stay as they are.

    Args:
        body: of a vector it takes the addresses in the tensors, how many lanes count, the number of the first value in
            its image, and what `begin` returned.
        begin: called with the number of an image, or of a group of images in the lanes, before its vectors.
    """
    if isinstance(tensors[0], Blocked):
        rows, columns, channels = tensors[0].shape
        with k.loop(k.groups(k.lanes)) as n:
            begun = begin(n)
            with k.loop(rows) as p, k.loop(columns) as q, k.loop(channels) as c:
                pixel = k.builder.add(k.builder.mul(p, INDEX(columns)), q)
                element = k.builder.add(k.builder.mul(pixel, INDEX(channels)), c)
                body([t.pixel(k, n, p, q).at(c, k.lanes) for t in tensors], k.lanes, element, begun)
        return
    # row by row where there is room around any
    images = any(tensor.halo != Halo() for tensor in tensors)
    rows = tensors[0].shape[0] if images else 1
    run = tensors[0].size // rows
    with k.loop(k.count) as n:
        begun = begin(n)
        with k.loop(rows) as p:
            starts = [t.pixel(k, n, p, 0) if images else t.stored(k, n) for t in tensors]
            for v, valid in k.vectors(run):
                element = k.builder.add(k.builder.mul(p, INDEX(run)), k.builder.mul(v, INDEX(k.lanes)))
                body([start.at(v, k.lanes) for start in starts], valid, element, begun)
