"""`elementwise`: an elementwise layer on its own, where no layer next to it takes it in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from llvmlite import ir

from cnnexp.backends.simd.algorithms.cost import Work, passes
from cnnexp.backends.simd.algorithms.node import Node, Section
from cnnexp.backends.simd.compiler.emit import Emitter, Kernels, Pointer, Target
from cnnexp.backends.simd.compiler.trace import MATHS, emitted
from cnnexp.backends.simd.layouts import NC, Blocked, Layout
from cnnexp.network import ElementwiseStage, LeakyReLU, ReLU

Map = Callable[[Emitter, ir.Value], ir.Value]


class ElementwiseNode(Node[Blocked | NC, Blocked | NC]):
    """An elementwise layer where nothing takes it in."""

    algorithm = "elementwise"

    @classmethod
    def of(cls, sections: Sequence[Section], first: bool) -> ElementwiseNode | None:
        stage = sections[0].stage
        return cls(stage, stage.input_shape) if isinstance(stage, ElementwiseStage) else None

    def __init__(self, stage: ElementwiseStage, shape: tuple[int, ...]) -> None:
        super().__init__(stage.name, shape)
        self.layer = stage.layer

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

            def one(x: Pointer, y: Pointer, dy: Pointer, dx: Pointer) -> None:
                k.store(k.multiply(k.load(dy), derivative(k, k.load(x), k.load(y))), dx)

            _each(k, (self.x, self.y, self.dy, self.needed_dx), one)

        return [("backward", run)]


def same(k: Emitter, x: ir.Value) -> ir.Value:
    return x


def apply(k: Emitter, function: Map, x: Blocked | NC, y: Blocked | NC) -> None:
    """y = function(x); what rounds up rows stays 0."""
    if not isinstance(x, NC) or not isinstance(y, NC) or not x.size % k.lanes:
        _each(k, (x, y), lambda a, b: k.store(function(k, k.load(a)), b))
        return
    with k.loop(k.count) as n:
        for i, valid in k.vectors(x.size):
            value = function(k, k.load(x.stored(k, n).at(i, k.lanes)))
            k.store(k.first_lanes(value, valid), y.stored(k, n).at(i, k.lanes))


def _each(k: Emitter, arrays: tuple, body: Callable) -> None:
    """Call the body with the address of every vector of arrays of the same shape."""
    if isinstance(arrays[0], NC):
        with k.loop(k.count) as n, k.loop(arrays[0].width // k.lanes) as i:
            body(*(a.stored(k, n).at(i, k.lanes) for a in arrays))
        return
    rows, columns, channels = arrays[0].shape
    with k.loop(k.groups(k.lanes)) as g, k.loop(rows) as p, k.loop(columns) as q, k.loop(channels) as c:
        body(*(a.pixel(k, g, p, q).at(c, a.lanes) for a in arrays))


def rectify_gradient(k: Emitter, y: Blocked | NC, dy: Blocked | NC) -> None:
    """dy = 0 wherever ReLU gave 0, in place."""
    _each(k, (dy, y), lambda at, positive: k.store(k.where_positive(k.load(positive), k.load(at)), at))
