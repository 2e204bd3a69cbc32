"""`residual`: where a Residual begins, and the sum [+ ReLU] where it ends.

Where it begins nothing is computed on the way forward: its layers read the same tensor that the sum reads again. On
the way back the gradient that comes past the layers is added there to theirs, in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from llvmlite import ir

from cnnexp.backends.simd.algorithms.cost import Work, passes
from cnnexp.backends.simd.algorithms.elementwise import copy_gradient
from cnnexp.backends.simd.algorithms.node import Node, Section
from cnnexp.backends.simd.compiler.emit import INDEX, Emitter, Kernels, Pointer, Target
from cnnexp.backends.simd.layouts import NC, Layout, Tensor, vectors
from cnnexp.network import ResidualStage

Function = Callable[[list[Pointer]], ir.Value]


class Split(Node[Tensor, Tensor]):
    """Where a Residual begins; `sum` is where it ends."""

    algorithm = "residual"
    any_image = rectifies_dx = True
    whole_vectors = False
    sum: Sum

    @classmethod
    def of(cls, sections: Sequence[Section], first: bool) -> Split | None:
        section = sections[0]
        return cls(section.stage) if isinstance(section.stage, ResidualStage) and section.opens else None

    def __init__(self, stage: ResidualStage) -> None:
        super().__init__(f"{stage.name}.split", stage.input_shape)
        if len(self.shape) == 1:
            self.input_layout = self.output_layout = NC

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        return {"backward": passes(math.prod(self.shape), 3, target, images)}

    def forward(self, plan: Layout) -> Kernels:
        return []

    def emit_backward(self, k: Emitter, plan: Layout) -> None:
        dx, end = self.needed_dx, self.sum
        past = [end.y] if end.rectifies_dy else []

        def add(places: list[Pointer]) -> ir.Value:
            value = k.finish(k.load(places[1]), positive=places[2] if past else None)
            return k.add(k.load(places[0]), value)

        if end.step:
            tensors = [(dx, end.step), (end.dy, 1), *((y, 1) for y in past), (dx, end.step)]
            _each_nth(k, tensors, (0, self.shape[2]), add)
            if self.input_rectified:
                copy_gradient(k, self.x, dx, dx)
            return
        before = [self.x] if self.input_rectified else []
        for (*places, place), valid in vectors(k, dx, end.dy, *past, *before, dx):
            k.store_part(k.finish(add(places), positive=places[-1] if before else None), place, valid)


class Sum(Node[Tensor, Tensor]):
    """Where a Residual ends.

    Attributes:
        split: where it begins; the sum has that tensor's layout.
        step: from pixel to pixel of what a padded shortcut takes; 0 of an identity.
    """

    algorithm, any_image = "residual", True
    whole_vectors = keeps_x = False
    split: Split

    @classmethod
    def of(cls, sections: Sequence[Section], first: bool) -> Sum | None:
        section = sections[0]
        if not isinstance(section.stage, ResidualStage) or section.opens:
            return None
        return cls(section.stage, section.rectify)

    def __init__(self, stage: ResidualStage, rectify: bool) -> None:
        super().__init__(stage.name, stage.output_shape)
        self.rectify, self.step = rectify, stage.window.stride if stage.window else 0

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        each = passes(math.prod(self.shape), 3, target, images, 3)
        return {"forward": each, "backward": each}

    def emit_forward(self, k: Emitter, plan: Layout) -> None:
        def add(places: list[Pointer]) -> ir.Value:
            return k.finish(k.load(places[0]), k.load(places[1]) if len(places) > 1 else None, self.rectify)

        if not self.step:
            for (*places, place), valid in vectors(k, self.x, self.split.x, self.y):
                k.store_part(add(places), place, valid)
            return
        x, y, channels = (self.x, 1), (self.y, 1), self.split.shape[2]
        _each_nth(k, (x, (self.split.x, self.step), y), (0, channels), add)
        if self.shape[2] > channels:
            _each_nth(k, (x, y), (channels, self.shape[2] - channels), add)

    def backward(self, plan: Layout) -> Kernels:
        return [] if self.dx is self.dy else super().backward(plan)

    def emit_backward(self, k: Emitter, plan: Layout) -> None:
        copy_gradient(k, self.y if self.rectifies_dy else None, self.dy, self.needed_dx)


def _each_nth(k: Emitter, tensors: Sequence[tuple[Tensor, int]], channels: tuple[int, int], function: Function) -> None:
    """Fill the last tensor with function(addresses in the others), vector by vector.

    Of each (tensor, n) every n-th row and column counts, and of `channels` so many from the first on.
    """
    (first, count), lanes = channels, tensors[0][0].lanes
    rows, columns, _ = next(tensor.shape for tensor, step in tensors if step == 1)
    with k.loop(k.groups(lanes)) as n, k.loop(rows) as p, k.loop(columns) as q:
        pixels = [tensor.pixel(k, n, *(k.builder.mul(i, INDEX(step)) for i in (p, q))) for tensor, step in tensors]
        for v, valid in k.vectors(count * lanes):
            *places, place = ((pixel + first * lanes).at(v, k.lanes) for pixel in pixels)
            k.store_part(function(places), place, valid)
