"""The nodes of a plan that are linear layers, on their own or with what follows them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from llvmlite import ir

from cnnexp.backends.parts import BACKWARD, FORWARD, Part
from cnnexp.backends.simd import (
    cost,
    linear,
    transfer,
)
from cnnexp.backends.simd.convolutions import FilterConvolution
from cnnexp.backends.simd.cost import (
    Work,
    passes,
    product_gradient,
    product_sums,
    transposition,
)
from cnnexp.backends.simd.emit import INDEX, Emitter, Kernels, Target
from cnnexp.backends.simd.layout import Layout, Matrix, Ring, round_up
from cnnexp.backends.simd.nodes import Node
from cnnexp.backends.simd.product import Panels, choose_tile, chunks, most_height, tile_cycles
from cnnexp.network import LinearStage
from cnnexp.optimizers import Optimizer


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
        return {"rectify_gradient": passes(width, 3, target), "backward_bias": passes(width, 1, target)}

    def backward(self, plan: Layout) -> Kernels:
        """Return what both forms begin with."""
        kernels: Kernels = []
        if self.rectifies_dy:
            kernels.append(("rectify_gradient", lambda k: linear.rectify_gradient(k, self.y, self.dy)))
        if self.stage.bias:
            kernels.append(("backward_bias", lambda k: self._backward_bias(k, plan)))
        return kernels

    def _backward_bias(self, k: Emitter, plan: Layout) -> None:
        _, db = plan.parameters.gradients(k, self.stage)
        assert db is not None
        linear.linear_backward_bias(k, self.dy, db)


class WideDense(Dense):
    """Many outputs."""

    def in_lanes(self, what: str, kernel: str) -> str:
        return "images" if kernel == "backward_input" else "weights"

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
            "backward_weights": weights,
            "update": weights,
        }
        if needs_dx:
            found |= {
                "dy_to_lanes": transposition(outputs, target),
                "backward_input": Work(features * outputs, sum(back) / images, "features x vectors of images"),
                "dx_to_rows": transposition(features, target),
            }
        return found

    def prepare(self, plan: Layout) -> None:
        (features, outputs), target = self.stage.weight.shape, plan.target
        self.height, _, width = choose_tile((plan.share, 1), 1, -(-outputs // target.lanes), target.registers)
        self.panels = Panels(features, outputs, width, target.lanes)
        plan.parameters.place(self.stage.weight, self.panels.size, self.panels.views, plan.owns)
        plan.parameters.place_plain(self.stage.bias)
        if self.dx:
            self.dy_lanes = plan.arena.grid((1, 1, outputs))
            self.dx_lanes = plan.arena.grid((1, 1, features))

    def forward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            w, b = plan.parameters.weights(k, self.stage)
            linear.linear(k, self.x, w, self.panels, b, self.y, self.rectify, self.height)

        return [("forward", run)]

    def backward(self, plan: Layout) -> Kernels:
        def backward_input(k: Emitter) -> None:
            (w, _), groups = plan.parameters.weights(k, self.stage), plan.arena.groups
            linear.linear_backward_input(k, w, self.panels, self.dy_lanes, self.dx_lanes, groups)

        kernels = [*super().backward(plan), *([] if plan.owns else self._backward_weights(plan))]
        dx = self.dx
        if dx:
            kernels += [
                ("dy_to_lanes", lambda k: transfer.to_lanes(k, self.dy, self.dy_lanes)),
                ("backward_input", backward_input),
                ("dx_to_rows", lambda k: transfer.to_rows(k, self.dx_lanes, dx)),
            ]
        return kernels

    def _backward_weights(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            dw, _ = plan.parameters.gradients(k, self.stage)
            linear.linear_backward_weights(k, self.x, self.dy, self.panels, dw)

        return [("backward_weights", run)]

    def owned_gradients(self, plan: Layout) -> Kernels:
        return self._backward_weights(plan) if plan.owns else []

    def owned_updates(self, plan: Layout) -> list[tuple[str, Callable[[Emitter, Optimizer], None]]]:
        def run(k: Emitter, optimizer: Optimizer) -> None:
            at = plan.parameters.offset(self.stage.weight)
            linear.wide_update(k, self.x, self.dy, self.panels, at, plan.arena.stride, optimizer)

        return [("update", run)] if plan.owns else []


class SkinnyDense(Dense):
    """Few outputs. Both passes can go by parts of the features: see `FilterClassifier`."""

    whole_vectors = False
    rectifies_dx = True
    way = "skinny"
    runs: tuple[int, int] | None = None
    """Where features come in runs with room behind each: the features of a run, and with its room."""

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
        run, room = self.runs or (features, features)
        views = functools.partial(linear.skinny_views, runs=features // run, run=run, room=room, lanes=lanes)
        size = linear.skinny_size(features // run * room, outputs, lanes)
        plan.parameters.place(self.stage.weight, size, views)
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

    What one writes the other reads from a cache. Of what lies between there is the gradient of a row of cells alone.
    """

    wants = makes = Matrix
    trains = True
    whole_vectors = False
    way = "filters-fused"

    def __init__(self, conv: FilterConvolution, dense: SkinnyDense) -> None:
        super().__init__(f"{conv.name}+{dense.name}", dense.shape)
        self.conv, self.dense, self.rectify = conv, dense, dense.rectify
        self.input_size, self.first, self.row = conv.input_size, conv.first, conv.row
        conv.whole = True

    def part(self, plan: Layout, what: str, kernel: str) -> Part:
        """As `Node.part`: of the dense layer; what the convolution takes is charged to it between."""
        return self.dense.part(plan, what, kernel)

    def fits(self, target: Target) -> bool:
        """Whether each part does."""
        return self.conv.fits(target) and self.dense.fits(target)

    def may_follow(self, before: Ring | None, needs_dx: bool) -> bool:
        return before is None

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
        between, d_row = (plan.arena.matrix(cells * pitch) for cells in (rows * columns, columns))
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
