"""`filters-fused`: a first convolution with filters in the lanes, and the linear layer of few outputs after it.

Gain: many filters: `one_conv` of 256 takes 346,203 cycles, 381,046 by `filters`; of 64 no less.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from cnnexp.backends.parts import BACKWARD, FORWARD, Part
from cnnexp.backends.simd.algorithms.convolution.filters import Filters
from cnnexp.backends.simd.algorithms.cost import Work
from cnnexp.backends.simd.algorithms.linear.dense import Dense
from cnnexp.backends.simd.algorithms.linear.skinny import Skinny
from cnnexp.backends.simd.algorithms.node import Node, Section
from cnnexp.backends.simd.compiler.emit import INDEX, Emitter, Kernels, Target
from cnnexp.backends.simd.layouts import NC, NHWC, Halo, Layout


class FiltersFused(Node[NHWC, NC]):
    """A `Filters` and the skinny `Dense` after it, row of cells by row of cells.

    What one writes the other reads from a cache. Of what lies between there is the gradient of a row of cells alone.
    """

    input_layout, output_layout = NHWC, NC
    trains = True
    whole_vectors = False
    algorithm, spans = "filters-fused", 2

    def __init__(self, conv: Filters, dense: Skinny) -> None:
        super().__init__(f"{conv.name}+{dense.name}", dense.shape)
        self.conv, self.dense, self.rectify = conv, dense, dense.rectify
        conv.whole = True

    @classmethod
    def of(cls, sections: Sequence[Section], first: bool) -> FiltersFused | None:
        conv, dense = Filters.of(sections, first), Skinny.of(sections[1:], False)
        if conv is None or dense is None:
            return None
        conv.layers, dense.layers = sections[0].names, sections[1].names
        return cls(conv, dense)

    def input_halo(self) -> Halo:
        return self.conv.input_halo()

    def part(self, plan: Layout, what: str, kernel: str) -> Part:
        """As `Node.part`: of the dense layer; what the convolution takes is charged to it between."""
        return self.dense.part(plan, what, kernel)

    def fits(self, target: Target) -> bool:
        """Whether each part does."""
        return self.conv.fits(target) and self.dense.fits(target)

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        conv, dense = self.conv.work(target, images, False), self.dense.work(target, images, True)
        filled = self.conv.pitch(target.lanes) / self.conv.shape[2]

        def joined(a: Work, b: Work) -> Work:
            return Work(a.macs + b.macs, a.cycles + filled * b.cycles, f"{a.tile}; {b.tile}")

        return {
            **{name: dense[name] for name in ("rectify_gradient", "backward_bias")},
            "forward": joined(conv["forward"], dense["forward"]),
            "backward": joined(conv["backward_weights"], dense["backward"]),
        }

    def prepare(self, plan: Layout) -> None:
        conv, dense = self.conv, self.dense
        rows, columns, filters = conv.shape
        pitch = conv.pitch(plan.target.lanes)
        between, d_row = (plan.arena.nc(cells * pitch) for cells in (rows * columns, columns))
        dense.runs = filters, pitch
        conv.x, conv.y, conv.dy = self.x, between, d_row
        dense.x, dense.dx, dense.y, dense.dy = between, d_row, self.y, self.dy
        dense.input_rectified = conv.dy_rectified = conv.rectify
        dense.dy_rectified = self.dy_rectified
        conv.prepare(plan)
        dense.prepare(plan)
        self.row_vectors = columns * pitch // plan.target.lanes

    def forward(self, plan: Layout) -> Kernels:
        conv, linear = (plan.clocks.part(node.part(plan, FORWARD, "forward")) for node in (self.conv, self.dense))

        def run(k: Emitter) -> None:
            self.dense.begin(k)
            with k.loop(self.conv.shape[0]) as u:
                plan.clocks.charge(k, linear)
                k.call("conv", lambda k, u: self.conv.conv2d_row(k, plan, u), u)
                plan.clocks.charge(k, conv)
                k.call("linear", lambda k, u: self.dense.add(k, plan, self._vector(k, u), self.row_vectors), u)
            self.dense.end(k, plan)

        return [("forward", run)]

    def backward(self, plan: Layout) -> Kernels:
        conv = plan.clocks.part(self.conv.part(plan, BACKWARD, "backward_weights"))
        linear = plan.clocks.part(self.dense.part(plan, BACKWARD, "backward"))

        def run(k: Emitter) -> None:
            with k.loop(self.conv.shape[0]) as u:
                k.call("linear", lambda k, u: self.dense.run_backward(k, plan, self._vector(k, u), self.row_vectors), u)
                plan.clocks.charge(k, linear)
                k.call("conv", lambda k, u: self.conv.conv2d_backward_weights_row(k, plan, u), u)
                plan.clocks.charge(k, conv)

        return [*Dense.backward(self.dense, plan), ("backward", run)]

    def _vector(self, k: Emitter, u: ir.Value) -> ir.Value:
        """Return the first vector of row u."""
        return k.builder.mul(u, INDEX(self.row_vectors))
