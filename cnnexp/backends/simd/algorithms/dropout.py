"""`dropout`: a Dropout on its own. What it drops is the arithmetic of `noise`, traced into vector instructions.

A number's draw is mix(row ^ mix(element)), its image's row is mix(key ^ image). A kernel before the forward pass makes
the rows of a tile, a table holds the elements' part, and the rest is a dozen instructions for a vector. The backward
pass makes the mask again: to keep it would take longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from llvmlite import ir

from cnnexp.backends.simd.algorithms.cost import Work, passes
from cnnexp.backends.simd.algorithms.elementwise import copy_gradient
from cnnexp.backends.simd.algorithms.node import Node, Section
from cnnexp.backends.simd.compiler.emit import INDEX, INT, Emitter, Target
from cnnexp.backends.simd.layouts import NC, Blocked, Layout, Tensor, round_up, runs
from cnnexp.network import DropoutStage
from cnnexp.network.noise import mix, threshold

KEYS = 3
"""Where in a step's numbers the layers' keys begin, 32 bits each."""


class DropoutNode(Node[Tensor, Tensor]):
    """A Dropout; in `predict` it copies.

    Attributes:
        rows: where in the arena the images' rows lie, 32-bit integers.
        table: where mix(element) lies for every number of an image, in row, column, channel order.
    """

    algorithm = "dropout"
    rectifies_dx = any_image = True
    keeps_y = whole_vectors = False

    @classmethod
    def of(cls, sections: Sequence[Section], first: bool) -> DropoutNode | None:
        section = sections[0]
        return cls(section.stage, section.flattened) if isinstance(section.stage, DropoutStage) else None

    def __init__(self, stage: DropoutStage, flattened: bool) -> None:
        super().__init__(stage.name, stage.output_shape)
        self.least = threshold(stage.layer.rate)
        self.scale = float(np.float32(1 / (1 - stage.layer.rate)))
        if flattened or len(self.shape) == 1:
            self.input_layout = self.output_layout = NC  # what follows works on rows

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        each = passes(math.prod(self.shape), 16, target)
        return {"forward": each, "backward": each}

    def prepare(self, plan: Layout) -> None:
        arena = plan.arena
        images = round_up(arena.images, arena.lanes)
        self.rows = arena.allocate(images)
        elements = np.arange(round_up(math.prod(self.shape), arena.lanes), dtype=np.int64)
        self.table = arena.constants(mix(elements).astype(np.uint32).view(np.float32))

    def draw(self, k: Emitter, number: int) -> None:
        """Make a tile's rows, of the `number`-th layer that draws. Buffers: a step's numbers, order int64, arena."""
        numbers, order, arena = k.buffers
        key = k.load_int(numbers + (KEYS + number))
        with k.loop(k.count) as n:
            image = k.builder.trunc(k.builder.load(order.at(n).value(INDEX)), INT)
            row = mix(_Bits(k.builder, k.builder.xor(key, image))).value
            k.builder.store(row, (arena + self.rows).at(n).value(INT))

    def emit_forward(self, k: Emitter, plan: Layout) -> None:
        if plan.target.forward_only:
            copy_gradient(k, None, self.x, self.y)
        else:
            self._mask(k, self.x, self.y)

    def emit_backward(self, k: Emitter, plan: Layout) -> None:
        self._mask(k, self.dy, self.needed_dx, self.x if self.input_rectified else None)

    def _mask(self, k: Emitter, x: Tensor, y: Tensor, positive: Tensor | None = None) -> None:
        """y = x scaled where it is kept, else 0; also 0 where `positive`, if given, is not."""
        rows, table, arrays = k.arena + self.rows, k.arena + self.table, [x, y, *([positive] if positive else [])]
        in_lanes = isinstance(x, Blocked)
        # an image's row, or a group's
        with k.loop(k.groups(x.lanes)) as n:
            row = k.as_integers(k.load(rows.at(n, k.lanes))) if in_lanes else k.spread(k.load_int(rows.at(n)))
            # a vector of the image's elements, or an element of the group's
            for starts, first, size in runs(k, *((array, n) for array in arrays)):
                for v, valid in k.vectors(size * x.lanes):
                    at = table.at(first)
                    element = k.spread(k.load_int(at.at(v))) if in_lanes else k.as_integers(k.load(at.at(v, k.lanes)))
                    source, target, *zeros = (start.at(v, k.lanes) for start in starts)
                    value = k.multiply(k.load(source), k.constant(self.scale))
                    if self.least:
                        draw = mix(_Bits(k.builder, k.builder.xor(row, element))).value
                        kept = k.builder.icmp_unsigned(">", draw, k.integers(self.least - 1))  # it may take 33 bits
                        value = k.select(kept, value, k.zero())
                    for place in zeros:
                        value = k.where_positive(k.load(place), value)
                    k.store_part(value, target, valid)


class _Bits:
    """32-bit integers, one or a vector of them, that emit what `noise.mix` does to them."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.builder, self.value = builder, value

    def __rshift__(self, places: int) -> _Bits:
        return _Bits(self.builder, self.builder.lshr(self.value, self._constant(places)))

    def __xor__(self, other: _Bits) -> _Bits:
        return _Bits(self.builder, self.builder.xor(self.value, other.value))

    def __mul__(self, number: int) -> _Bits:
        return _Bits(self.builder, self.builder.mul(self.value, self._constant(number)))

    def __and__(self, mask: int) -> _Bits:
        return self  # of a product 32 bits are all there are

    def _constant(self, number: int) -> ir.Constant:
        kind = self.value.type
        return ir.Constant(kind, [INT(number)] * kind.count) if isinstance(kind, ir.VectorType) else INT(number)
