"""`wide`: a linear layer of many outputs; outputs in the lanes, weights in panels.

Forward pass and weight gradient are the products of `product`. The input's gradient sums over outputs, so it has the
batch in the lanes instead and broadcasts the weights, which the panels hold in runs.

It is the one algorithm for more outputs than `skinny` has. A convolution whose one window is the whole image, with
nothing but rows after it, is such a layer, too: LeNet-5 as published has one, and takes a third less time by it.
"""

from __future__ import annotations

from collections.abc import Callable

from cnnexp.backends.simd.algorithms import cost, update
from cnnexp.backends.simd.algorithms.cost import Work, product_gradient, product_sums, transposition
from cnnexp.backends.simd.algorithms.linear.dense import Dense
from cnnexp.backends.simd.algorithms.linear.product import (
    Panels,
    Steps,
    add_products,
    choose_tile,
    chunks,
    most_height,
    tile_cycles,
)
from cnnexp.backends.simd.algorithms.reorder import to_lanes, to_rows
from cnnexp.backends.simd.compiler.emit import INDEX, Emitter, Kernels, Pointer, Target
from cnnexp.backends.simd.layouts import LINE_FLOATS, NC, Blocked, Layout
from cnnexp.optimizers import Optimizer


class Wide(Dense):
    """Many outputs."""

    def in_lanes(self, what: str, kernel: str) -> str:
        return "images" if kernel == "backward_input" else "weights"

    algorithm = "wide"

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
            self.dy_lanes = plan.arena.blocked((1, 1, outputs))
            self.dx_lanes = plan.arena.blocked((1, 1, features))

    def forward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            w, b = plan.parameters.weights(k, self.stage)
            linear(k, self.x, w, self.panels, b, self.y, self.rectify, self.height)

        return [("forward", run)]

    def backward(self, plan: Layout) -> Kernels:
        def backward_input(k: Emitter) -> None:
            (w, _), groups = plan.parameters.weights(k, self.stage), plan.arena.groups
            linear_backward_input(k, w, self.panels, self.dy_lanes, self.dx_lanes, groups)

        kernels = [*super().backward(plan), *([] if plan.owns else self._backward_weights(plan))]
        dx = self.dx
        if dx:
            kernels += [
                ("dy_to_lanes", lambda k: to_lanes(k, self.dy, self.dy_lanes)),
                ("backward_input", backward_input),
                ("dx_to_rows", lambda k: to_rows(k, self.dx_lanes, dx)),
            ]
        return kernels

    def _backward_weights(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            dw, _ = plan.parameters.gradients(k, self.stage)
            linear_backward_weights(k, self.x, self.dy, self.panels, dw)

        return [("backward_weights", run)]

    def owned_gradients(self, plan: Layout) -> Kernels:
        return self._backward_weights(plan) if plan.owns else []

    def owned_updates(self, plan: Layout) -> list[tuple[str, Callable[[Emitter, Optimizer], None]]]:
        def run(k: Emitter, optimizer: Optimizer) -> None:
            at = plan.parameters.offset(self.stage.weight)
            wide_update(k, self.x, self.dy, self.panels, at, plan.arena.stride, optimizer)

        return [("update", run)] if plan.owns else []


def linear(
    k: Emitter, x: NC, weights: Pointer, panels: Panels, bias: Pointer | None, y: NC, rectify: bool, height: int
) -> None:
    """y = x @ weights + bias, by tiles of `height` images; the last ends with the last image, and may do some twice."""
    for panel in panels.each(k):
        unit = panel.width * k.lanes
        # the last tile ends with the last image
        with k.loop(k.groups(height)) as tile:
            n = k.builder.mul(tile, INDEX(height))
            last = k.builder.sub(k.count, INDEX(height))
            n = k.builder.select(k.builder.icmp_signed("<", n, last), n, last)
            n = k.builder.select(k.builder.icmp_signed("<", n, INDEX(0)), INDEX(0), n)
            # the sums
            totals = [k.variables(panel.width) for _ in range(height)]
            steps = Steps(1, x.size, (0, 1), (0, unit))
            places = [i * x.stride for i in range(height)]
            add_products(k, totals, x.stored(k, n), places, panel.at(weights), steps, [k.lanes] * panel.width)
            target = panel.outputs(y.stored(k, n))
            # bias and ReLU
            for i, row in enumerate(totals):
                for v, total in enumerate(row):
                    value = total.get()
                    if bias is not None:
                        value = k.add(value, k.load(panel.outputs(bias) + v * k.lanes))
                    k.store(k.rectify(value) if rectify else value, target + (i * y.stride + v * k.lanes))


def linear_backward_weights(k: Emitter, x: NC, dy: NC, panels: Panels, dw: Pointer) -> None:
    """dw += x.T @ dy, in panels as the weights."""
    for panel in panels.each(k):
        unit = panel.width * k.lanes
        for first, height, times in chunks(x.size, most_height(panel.width, k.target.registers)):
            with k.loop(times) as t:
                d = k.builder.add(k.builder.mul(t, INDEX(height)), INDEX(first))
                target = panel.at(dw).at(d, unit)
                places = [[target + (i * unit + v * k.lanes) for v in range(panel.width)] for i in range(height)]
                with k.sums(places) as totals:
                    steps = Steps(1, k.count, (0, x.stride), (0, dy.stride))
                    source, gradient = x.stored(k, 0).at(d), panel.outputs(dy.stored(k, 0))
                    add_products(k, totals, source, list(range(height)), gradient, steps, panel.valid)


def wide_update(k: Emitter, x: NC, dy: NC, panels: Panels, offset: int, arena: int, optimizer: Optimizer) -> None:
    """Take the optimizer's step of this thread's share of the weights with x.T @ dy over all threads' images.

    The gradient is never stored. One sum goes over all threads' images: a sum for each would end in the very bits that
    workers end in, and take a fifth more time at 8 images a thread. Buffers: parameters, two slots, (rate, c0, c1), all
    threads' arenas, and int64 (2 + threads,): this thread's rank, the number of threads, and the images in each one's
    arena.

    Args:
        offset: of the weights in the parameters. arena: floats from arena to arena.
    """
    *state, numbers, arenas, table = k.buffers
    rank, threads = (k.builder.load((table + i).value(INDEX)) for i in range(2))
    step = update.OptimizerStep(k, optimizer, numbers)
    for panel in panels.each(k):
        unit = panel.width * k.lanes
        for first, height, times in chunks(x.size, most_height(panel.width, k.target.registers)):
            low, high = (
                k.builder.udiv(k.builder.mul(INDEX(times), r), threads) for r in (rank, k.builder.add(rank, INDEX(1)))
            )
            with k.loop(high, start=low) as t:
                d = k.builder.add(k.builder.mul(t, INDEX(height)), INDEX(first))
                places = [panel.at(buffer + offset).at(d, unit) for buffer in state]
                for line in range(0, height * unit, LINE_FLOATS):  # the other threads' cores have them, too
                    k.prefetch(places[0] + line, written=True)
                totals = [k.variables(panel.width) for _ in range(height)]
                with k.loop(threads) as other:
                    count = k.builder.load((table + 2).at(other).value(INDEX))
                    steps = Steps(1, count, (0, x.stride), (0, dy.stride))
                    source = (arenas + x.offset).at(other, arena).at(d)
                    gradient = panel.outputs((arenas + dy.offset).at(other, arena))
                    add_products(k, totals, source, list(range(height)), gradient, steps, panel.valid)
                for i, row in enumerate(totals):
                    for v, total in enumerate(row):
                        step.take([place + (i * unit + v * k.lanes) for place in places], total.get())


def linear_backward_input(k: Emitter, weights: Pointer, panels: Panels, dy: Blocked, dx: Blocked, groups: int) -> None:
    """dx[d, lane] = sum over o of weights[d, o] * dy[o, lane], `groups` groups of lanes.

    Args:
        dy: (1, 1, O). dx: any shape of D values without a halo.
    """
    features = dx.group // dx.lanes
    # tiles of features x groups of images
    for first_group, width, group_times in chunks(groups, 4):
        for first, height, times in chunks(features, most_height(width, k.target.registers)):
            with k.loop(times) as t, k.loop(group_times) as part:
                d = k.builder.add(k.builder.mul(t, INDEX(height)), INDEX(first))
                group = k.builder.add(k.builder.mul(part, INDEX(width)), INDEX(first_group))
                source, target = dy.image(k, group), dx.image(k, group)
                totals = [k.variables(width) for _ in range(height)]
                # the weights, panel kind by panel kind
                for vector, panel_width, panel_times in panels.kinds:
                    unit, panel = panel_width * k.lanes, panels.rows * panel_width * k.lanes
                    outputs = min(unit, panels.outputs - (vector + (panel_times - 1) * panel_width) * k.lanes)
                    steps = Steps(panel_times, outputs, (panel, 1), (unit * k.lanes, k.lanes), dy.group)
                    rows = (weights + vector * panels.rows * k.lanes).at(d, unit)
                    lines = source + vector * k.lanes * k.lanes
                    places = [i * unit for i in range(height)]
                    add_products(k, totals, rows, places, lines, steps, [k.lanes] * width)
                for i, row in enumerate(totals):
                    for g, total in enumerate(row):
                        k.store(total.get(), target.at(d, k.lanes) + (i * k.lanes + g * dx.group))
