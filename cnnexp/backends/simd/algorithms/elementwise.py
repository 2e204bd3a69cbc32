"""`elementwise`: an elementwise layer on its own, where no layer next to it takes it in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

from cnnexp.backends.simd.algorithms.cost import Work, passes
from cnnexp.backends.simd.algorithms.node import Node, Section
from cnnexp.backends.simd.compiler.emit import Emitter, Pointer, Target
from cnnexp.backends.simd.compiler.trace import MATHS, emitted
from cnnexp.backends.simd.layouts import NC, Layout, Tensor, vectors
from cnnexp.network import ElementwiseStage, LeakyReLU, ReLU


class ElementwiseNode(Node[Tensor, Tensor]):
    """An elementwise layer where nothing takes it in."""

    algorithm, whole_vectors, in_parts = "elementwise", False, ("forward",)

    @classmethod
    def of(cls, sections: Sequence[Section], first: bool) -> ElementwiseNode | None:
        stage = sections[0].stage
        return cls(stage) if isinstance(stage, ElementwiseStage) else None

    def __init__(self, stage: ElementwiseStage) -> None:
        super().__init__(stage.name, stage.output_shape)
        self.layer, self.any_image = stage.layer, len(self.shape) == 3

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        # an exponential takes some twenty instructions, a comparison two
        each = passes(math.prod(self.shape), 4 if isinstance(self.layer, ReLU | LeakyReLU) else 25, target)
        return {"forward": each, "backward": each}

    def emit_forward(self, k: Emitter, plan: Layout) -> None:
        """y = rule(x)."""
        rule = emitted(self.layer.rule(MATHS))
        for (x, y), valid in vectors(k, self.x, self.y, parts=self.parts):
            k.store_part(rule(k, k.load(x)), y, valid)

    def emit_backward(self, k: Emitter, plan: Layout) -> None:
        """dx = dy * derivative(x, y)."""
        derivative = emitted(self.layer.derivative(MATHS))
        for (x, y, dy, dx), valid in vectors(k, self.x, self.y, self.dy, self.needed_dx):
            k.store_part(k.multiply(k.load(dy), derivative(k, k.load(x), k.load(y))), dx, valid)


def copy_gradient(k: Emitter, y: Tensor | None, dy: Tensor, d: Tensor) -> None:
    """d = dy, 0 wherever ReLU gave y = 0; d may be dy. Of rows whole vectors, see `to_rows`."""
    tensors: tuple[Tensor, ...] = (dy, d) if y is None else (dy, d, y)
    if all(type(tensor) is NC for tensor in tensors):
        tensors = tuple(replace(tensor, shape=(cast(NC, tensor).width,)) for tensor in tensors)
    pass_gradient(k, vectors(k, *tensors))


def pass_gradient(k: Emitter, places: Iterable[tuple[list[Pointer], int]]) -> None:
    """Copy vectors from the first of their places to the second, 0 wherever the third, if there is one, is not > 0."""
    for (source, target, *positive), valid in places:
        value = k.finish(k.load(source), positive=positive[0] if positive else None)
        # LLVM, if it knew that both are one, would make a masked store, which AMD's AVX2 takes 12 cycles for
        k.store_part(value, k.opaque(target) if positive else target, valid)
