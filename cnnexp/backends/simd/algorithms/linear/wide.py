"""`wide`: a linear layer of many outputs; outputs in the lanes, weights in panels.

Forward pass and weight gradient are the products of `product`. The input's gradient sums over outputs, so it has the
batch in the lanes instead and broadcasts the weights, which the panels hold in runs; unless images are few.

It is the one algorithm for more outputs than `skinny` has. A convolution whose one window is the whole image, with
nothing but rows after it, is such a layer, too: LeNet-5 as published has one, and takes a third less time by it.
"""

import functools
import math

from llvmlite import ir

from cnnexp.backends.simd.algorithms import cost
from cnnexp.backends.simd.algorithms.cost import Work, product_gradient, product_sums, transposition
from cnnexp.backends.simd.algorithms.linear import product
from cnnexp.backends.simd.algorithms.linear.dense import Dense
from cnnexp.backends.simd.algorithms.linear.product import Panel, Panels, Steps, add_products, choose_tile, most_height
from cnnexp.backends.simd.algorithms.linear.sparse import FEWEST_FEATURES, Features
from cnnexp.backends.simd.algorithms.reorder import reorder
from cnnexp.backends.simd.algorithms.update import MANY_IMAGES, Rows, each_arena, own_arena, update_owned
from cnnexp.backends.simd.compiler.emit import INDEX, LINE_FLOATS, Emitter, Kernels, Sums, Target, chunks, chunks_of
from cnnexp.backends.simd.layouts import Layout, round_up
from cnnexp.optimizers import Optimizer

FEW_IMAGES = 8, 4
"""Of a tile, where a larger one would take more of them twice: MLP with GELU predicts one image in half the time."""

STEPS_AHEAD, STREAMED = 32, 2
"""Of a sum, by which weights from beyond L2 are brought near where one tile has all images, if more than `STREAMED`.
Wide MLP predicts 16 in 0.77 of the time (Xeon), one in 1.25 (Zen 4). The first of several tiles would wait for them."""

NEAR_SUMS = 256
"""Vectors of sums that stay in L1, of the input's gradient of few images."""

MEMORY_BOUND = 16
"""Images of a share whose products with a weight take no longer than memory to bring it, at 3 bytes a cycle."""


class Wide(Dense):
    """Many outputs. `few`: whether images are, so that the input's gradient has outputs in the lanes."""

    def in_lanes(self, what: str, kernel: str) -> str:
        return "images" if kernel == "backward_input" and not self.few else self.holds

    algorithm = "wide"
    whole_vectors, in_parts = False, ("forward", "backward_input")
    features: Features | None = None

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        features, outputs = self.stage.weight.shape
        vectors = -(-outputs // target.lanes)
        _, _, width = choose_tile((images, 1), 1, vectors, target.registers)
        sums = product_sums((images, 1), 1, outputs, features, target)
        read = 4 * images * (features + outputs)
        gradient = product_gradient(features, 1, outputs, width, (1, images), read, target)
        stored = 2 * cost.bring(features * outputs, 8 * features * outputs, target)
        weights = Work(gradient.macs / images, (gradient.cycles + stored) / images, gradient.tile)
        found = {
            **self._common_work(target),
            "forward": Work(sums.macs / images, sums.cycles / images, sums.tile),
            "backward_weights": weights,
            "update": weights,
        }
        if needs_dx and images <= target.lanes // 2:
            brought = cost.bring(features * outputs, 4 * features * outputs, target)
            cycles = max(brought, features * vectors * (images + 0.5))
            found["backward_input"] = Work(features * outputs, cycles / images, "a feature x vectors of outputs")
        elif needs_dx:
            back = [
                times_w * times_h * (outputs * product.tile_cycles(high, wide) + high * wide)
                for _, wide, times_w in chunks(-(-images // target.lanes), target.registers // 8)
                for _, high, times_h in chunks(features, most_height(wide, target.registers))
            ]
            found |= {
                "dy_to_lanes": transposition(outputs, target),
                "backward_input": Work(features * outputs, sum(back) / images, "features x vectors of images"),
                "dx_to_rows": transposition(features, target),
            }
        return found

    def prepare(self, plan: Layout) -> None:
        (features, outputs), target = self.stage.weight.shape, plan.target
        self.height, _, width = choose_tile((plan.share, 1), 1, -(-outputs // target.lanes), target.registers)
        beyond_l2 = plan.target.forward_only and 4 * features * outputs > target.l2_bytes
        if beyond_l2 and self.height < plan.share <= most_height(1, target.registers):
            self.height, width = plan.share, 1
        self.ahead = STEPS_AHEAD if beyond_l2 and self.height == plan.share > STREAMED else 0
        # an odd number of lines, or of rows of whole lines: the input's gradient goes from panel to panel
        together = LINE_FLOATS // math.gcd(width * target.lanes, LINE_FLOATS)
        self.panels = Panels(together * (-(-features // together) | 1), outputs, width, target.lanes)
        plan.parameters.place(self.stage.weight, self.panels.size, self.panels.views, plan.owns)
        plan.parameters.place_plain(self.stage.bias)
        self.few = plan.share <= target.lanes // 2
        # many images are predicted no faster by a list: the wide MLP by 128 in 1.07 of the time
        if self.first and features >= FEWEST_FEATURES and (self.few or not target.forward_only):
            self.features = Features(plan.arena, self.x, self.parts, self.ahead)
        if self.dx and self.few:
            self.sums = plan.arena.allocate(plan.share * features * target.lanes)
        elif self.dx:
            self.dy_lanes = plan.arena.blocked((1, 1, outputs))
            self.dx_lanes = plan.arena.blocked((1, 1, features))

    def emit_forward(self, k: Emitter, plan: Layout) -> None:
        """y = x @ weights + bias by `height` images; of a whole share the last tile has those left, else some twice."""
        (weights, bias), x, y = plan.parameters.of(self.stage, k.parameters), self.x, self.y
        times, rest = divmod(plan.share, self.height)
        whole = k.builder.icmp_signed("==", k.count, INDEX(plan.share))
        # what predicts often has few images: of these heights the one that takes the fewest rows
        heights = [self.height, *(h for h in FEW_IMAGES if h < self.height and plan.target.forward_only)]
        best, least = INDEX(self.height), k.select(whole, INDEX(0), k.scaled(k.groups(self.height), self.height))
        for height in heights[1:]:
            rows = k.scaled(k.groups(height), height)
            fewer = k.builder.icmp_signed("<", rows, least)
            best, least = k.select(fewer, INDEX(height), best), k.select(fewer, rows, least)
        # images of a tile, from tile to tile, where they stop and start
        tiles: list[tuple[int, int, ir.Value, int]] = []
        for height in heights:
            chosen = k.builder.icmp_signed("==", best, INDEX(height))
            stop = k.select(whole, INDEX(times), k.groups(height)) if height == self.height else k.groups(height)
            tiles.append((height, height, k.select(chosen, stop, INDEX(0)), 0))
        tiles += [(rest, self.height, k.select(whole, INDEX(times + 1), INDEX(0)), times)] if rest else []
        listed = self.features.look(k, k.arena) if self.features else None
        size, numbers = (listed.count, listed.place) if listed else (x.size, None)
        for panel in self.panels.each(k, self.parts):
            for height, apart, stop, start in tiles:
                with k.loop(stop, start) as tile:
                    n = k.least(k.builder.mul(tile, INDEX(apart)), k.builder.sub(k.count, INDEX(height)))
                    n = k.largest(n, INDEX(0))
                    # the sums
                    totals = [k.variables(panel.width) for _ in range(height)]
                    steps = Steps(1, size, (0, 1), (0, panel.unit), None, self.ahead, numbers)
                    places = [i * x.stride for i in range(height)]
                    add_products(k, totals, x.stored(k, n), places, panel.at(weights), steps)
                    # bias and ReLU
                    targets = k.grid(panel.outputs(y.stored(k, n)), height, y.stride, panel.width)
                    for row, target_row in zip(totals, targets, strict=True):
                        for v, (total, target) in enumerate(zip(row, target_row, strict=True)):
                            added = None if bias is None else k.load(panel.outputs(bias) + v * k.lanes)
                            k.store(k.finish(total.get(), added, self.rectify), target)

    def owns(self, plan: Layout) -> bool:
        return plan.owns

    def backward(self, plan: Layout) -> Kernels:
        kernels, dx = super().backward(plan), self.dx
        if not plan.owns:
            kernels.append(("backward_weights", lambda k: self.backward_weights(k, plan)))
        if dx and self.few:
            kernels.append(("backward_input", lambda k: self._backward_few(k, plan)))
        elif dx:
            kernels += [
                ("dy_to_lanes", lambda k: reorder(k, self.dy, self.dy_lanes)),
                ("backward_input", lambda k: self._backward_input(k, plan)),
                ("dx_to_rows", lambda k: reorder(k, self.dx_lanes, dx)),
            ]
        return kernels

    def backward_weights(self, k: Emitter, plan: Layout) -> None:
        dw, _ = plan.parameters.of(self.stage, k.gradients)
        listed = self.features.listed(k, k.arena) if self.features else None
        for panel in self.panels.each(k):
            for first, rows in panel.chunks(k, self.x.size, listed):
                lines = [panel.at(dw).at(first, panel.unit).at(row, panel.unit) for row in rows]
                with k.sums([[line + v * k.lanes for v in range(panel.width)] for line in lines]) as totals:
                    self._add_products(k, totals, panel, (INDEX(0), first, rows))

    def _add_products(self, k: Emitter, totals: Sums, panel: Panel, rows: Rows) -> None:
        """Add a tile's products to sums of dw."""
        (_, first, places), x, dy = rows, self.x, self.dy
        steps, gradient = Steps(1, k.count, (0, x.stride), (0, dy.stride)), panel.outputs(dy.stored(k, 0))
        add_products(k, totals, x.stored(k, 0).at(first), places, gradient, steps, panel.valid)

    def update(self, k: Emitter, plan: Layout, optimizer: Optimizer) -> None:
        stride, listed = plan.arena.stride, None
        if self.features and plan.share >= MANY_IMAGES:
            listed = self.features.look(k, own_arena(k, stride), lambda: each_arena(k, stride))
        runs = self.panels, 1, self.x.size, listed
        update_owned(k, plan, optimizer, self.stage.weight, runs, self._add_products)

    def _backward_few(self, k: Emitter, plan: Layout) -> None:
        """As `_backward_input`, with outputs in the lanes; features by as many as have sums that stay in L1."""
        weights, _ = plan.parameters.of(self.stage, k.parameters)
        dy, dx, lanes, row = self.dy, self.needed_dx, k.lanes, plan.share * k.lanes
        last = k.builder.sub(k.count, INDEX(1))
        most = round_up(min(NEAR_SUMS // plan.share, -(-dx.size // self.parts)), lanes)
        for first, size, *turns in k.turns(chunks_of(dx.size, most), self.parts):
            # a tile may have more images than a share
            with k.loop(k.groups(plan.share)) as group, k.loop(*turns) as t:
                images = [k.least(k.scaled(group, plan.share, n), last) for n in range(plan.share)]
                start = k.scaled(t, size, first)
                sums = (k.arena + self.sums).at(start, row)
                k.clear(sums, size * plan.share)
                # a lane's outputs, panel by panel
                for panel in self.panels.each(k):
                    gradients = [panel.outputs(dy.stored(k, n)) for n in images]
                    factors = [[k.load_part(at + v * lanes, n) for v, n in enumerate(panel.valid)] for at in gradients]
                    with k.loop(size) as d:
                        line = panel.at(weights).at(start, panel.unit).at(d, panel.unit)
                        held = [k.load_part(line + v * lanes, n) for v, n in enumerate(panel.valid)]
                        with k.sums(k.grid(sums.at(d, row), 1, 0, plan.share)) as [totals]:
                            for total, vectors in zip(totals, factors, strict=True):
                                for weight, gradient in zip(held, vectors, strict=True):
                                    k.accumulate(total, weight, gradient)
                # the lanes of a vector of features
                for block, valid in k.vectors(size):
                    at = k.builder.mul(block, INDEX(lanes))
                    for i, n in enumerate(images):
                        lines = [k.load(sums.at(at, row) + (d * row + i * lanes)) for d in range(valid)]
                        value = functools.reduce(k.add, k.transpose(lines + [k.zero()] * (lanes - valid)))
                        k.store_part(value, dx.stored(k, n).at(start).at(at), lanes if dx.dense else valid)

    def _backward_input(self, k: Emitter, plan: Layout) -> None:
        """dx[d, lane] = sum over o of weights[d, o] * dy[o, lane].

        Where few images wait for weights from beyond L2 and their dx stays in it, panel by panel, as memory holds them.
        """
        panels, dy, dx = self.panels, self.dy_lanes, self.dx_lanes
        weights, _ = plan.parameters.of(self.stage, k.parameters)
        room, registers = plan.arena.floats(dx), k.target.registers
        alone = plan.share <= MEMORY_BOUND and 4 * panels.size > k.target.l2_bytes >= 8 * room
        if alone:
            k.clear(dx.stored(k, 0), room // k.lanes)
        for kinds, turns in [([kind], kind[2]) for kind in panels.kinds] if alone else [(panels.kinds, 1)]:
            with k.loop(turns) as turn:
                # tiles of features x groups of images
                for first_group, width, group_times in chunks(plan.arena.groups, registers // 8):
                    for first, height, times in chunks(dx.shape[2], most_height(width, registers)):
                        with k.loop(times) as t, k.loop(group_times) as part:
                            d, group = k.scaled(t, height, first), k.scaled(part, width, first_group)
                            source, target = dy.stored(k, group), dx.stored(k, group).at(d, k.lanes)
                            cells = [
                                [target + (i * k.lanes + g * dx.stride) for g in range(width)] for i in range(height)
                            ]
                            with k.sums(cells, new=not alone) as totals:
                                # the weights, panel kind by panel kind
                                for vector, panel_width, panel_times in kinds:
                                    unit, panel = panel_width * k.lanes, panels.rows * panel_width * k.lanes
                                    last = (vector + (panel_times - 1) * panel_width) * k.lanes
                                    run, stride = min(unit, panels.outputs - last), unit * k.lanes
                                    steps = Steps(panel_times // turns, run, (panel, 1), (stride, k.lanes), dy.stride)
                                    rows = (weights + vector * panels.rows * k.lanes).at(turn, panel).at(d, unit)
                                    lines = (source + vector * k.lanes * k.lanes).at(turn, stride)
                                    add_products(k, totals, rows, [i * unit for i in range(height)], lines, steps)
