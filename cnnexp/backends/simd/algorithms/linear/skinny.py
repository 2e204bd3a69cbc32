"""`skinny`: a linear layer of few outputs, as a classifier's last layer, where BLAS does badly; features in the lanes.

Weights are kept as [feature vector][output][lane]. Forward: 2 images x O accumulators, in blocks of features whose
weights stay in L1. Backward, one pass per feature vector: the weights and their gradients, O vectors each,
stay in registers while the images go by; each image costs 2 O multiply-adds, O broadcasts, one load and one store.

Gain: `one_conv` of 64 filters takes 99,012 cycles, 135,675 by `wide`.
"""

import functools
import math

import numpy as np
from llvmlite import ir

from cnnexp.backends.simd.algorithms import cost
from cnnexp.backends.simd.algorithms.cost import Work
from cnnexp.backends.simd.algorithms.linear.dense import Dense
from cnnexp.backends.simd.compiler.emit import INDEX, Emitter, Kernels, Pointer, Target, chunks
from cnnexp.backends.simd.layouts import Layout, Views, round_up

MOST_OUTPUTS = 12

SKINNY_BLOCK_FLOATS = 6144
"""Weights that stay in L1 during a forward pass of the skinny form, 24 KB."""

AHEAD = 2
"""Vectors of features before the one whose x is brought near: images lie too far apart for a CPU to foresee them."""


class Skinny(Dense):
    """Few outputs. Both passes can go by parts of the features: see `FiltersFused`."""

    whole_vectors = False
    rectifies_dx = True
    algorithm = "skinny"
    runs: tuple[int, int] | None = None
    """Where features come in runs with room behind each: the features of a run, and with its room."""

    def fits(self, target: Target) -> bool:
        """Whether an image's sums fit the registers."""
        return self.stage.output_shape[0] <= MOST_OUTPUTS

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        features, outputs = self.stage.weight.shape
        vectors = -(-features // target.lanes)
        pair = 2 if 2 * outputs + 3 <= target.registers else 1
        sums = max(outputs / cost.MACS, 4 / pair, (outputs / pair + 1) / cost.LOADS)
        ending = round_up(outputs, target.lanes) * (math.log2(target.lanes) + 3)
        parts = len(chunks(outputs, most_block(target.registers)))
        each = outputs * (1 if needs_dx else 0.75) + 2.5 * parts + 2 * outputs / images
        macs = features * outputs
        passes, block = 2 if needs_dx else 1, min(outputs, most_block(target.registers))
        return {
            **self._common_work(target),
            "forward": Work(macs, vectors * sums + ending, f"{pair} images x {outputs} outputs"),
            "backward": Work(macs * passes, vectors * each, f"{block} outputs"),
        }

    def prepare(self, plan: Layout) -> None:
        (features, outputs), lanes = self.stage.weight.shape, plan.target.lanes
        run, room = self.runs or (features, features)
        views = functools.partial(skinny_views, runs=features // run, run=run, room=room, lanes=lanes)
        size = round_up(features // run * room, lanes) * outputs
        plan.parameters.place(self.stage.weight, size, views)
        plan.parameters.place_plain(self.stage.bias)
        self.totals = plan.arena.allocate(plan.arena.images * outputs * lanes)

    def emit_forward(self, k: Emitter, plan: Layout) -> None:
        self.begin(k)
        self.add(k, plan, INDEX(0), self.x.width // k.lanes)
        self.end(k, plan)

    def begin(self, k: Emitter) -> None:
        """Begin y = x @ weights + bias: clear totals [image][output][lane], sums over the features of each lane."""
        with k.loop(k.count) as n, k.loop(self.y.size) as o:
            k.store(k.zero(), (k.arena + self.totals).at(n, self.y.size * k.lanes).at(o, k.lanes))

    def add(self, k: Emitter, plan: Layout, start: ir.Value, vectors: int) -> None:
        """Add the products of `vectors` vectors of features from `start` on."""
        (weights, _), outputs = plan.parameters.of(self.stage, k.parameters), self.y.size
        images = 2 if 2 * outputs + 3 <= k.target.registers else 1
        for first, size in k.chunks(vectors, max(1, SKINNY_BLOCK_FLOATS // (outputs * k.lanes))):
            at, pairs = k.builder.add(first, start), k.builder.udiv(k.count, INDEX(images))
            with k.loop(pairs) as pair:
                self._tile(k, weights, k.builder.mul(pair, INDEX(images)), images, at, size)
            with k.loop(k.count, start=k.builder.mul(pairs, INDEX(images))) as n:
                self._tile(k, weights, n, 1, at, size)

    def _tile(self, k: Emitter, weights: Pointer, n: ir.Value, images: int, start: ir.Value, size: int) -> None:
        """Add the products of one block of features to the totals of one or two images."""
        x, outputs, room = self.x, self.y.size, self.y.size * k.lanes
        # a weight that is loaded serves both images
        with k.sums(k.grid((k.arena + self.totals).at(n, room), images, room, outputs)) as sums:
            source, block = x.stored(k, n).at(start, k.lanes), weights.at(start, room)
            with k.loop(size) as v:
                values = [k.load(source.at(v, k.lanes) + i * x.stride) for i in range(images)]
                for o in range(outputs):
                    weight = k.load(block.at(v, room) + o * k.lanes)
                    for i in range(images):
                        k.accumulate(sums[i][o], weight, values[i])

    def end(self, k: Emitter, plan: Layout) -> None:
        """y = the totals, their lanes added up, + bias (y.width,)."""
        (_, bias), outputs = plan.parameters.of(self.stage, k.parameters), self.y.size
        with k.loop(k.count) as n:
            totals = (k.arena + self.totals).at(n, outputs * k.lanes)
            for first in range(0, outputs, k.lanes):
                rows = [k.load(totals + o * k.lanes) for o in range(first, min(first + k.lanes, outputs))]
                rows += [k.zero()] * (k.lanes - len(rows))
                terms = k.transpose(rows)
                while len(terms) > 1:
                    terms = [k.add(a, b) for a, b in zip(terms[::2], terms[1::2], strict=True)]
                value = k.finish(terms[0], k.load(bias + first) if bias else None, self.rectify)
                k.store(value, self.y.stored(k, n) + first)

    def backward(self, plan: Layout) -> Kernels:
        kernels = super().backward(plan)
        return [*kernels, ("backward", lambda k: self.run_backward(k, plan, INDEX(0), self.x.width // k.lanes))]

    def run_backward(self, k: Emitter, plan: Layout, start: ir.Value, vectors: int) -> None:
        """dw += x.T @ dy, dx = dy @ weights.T, of `vectors` vectors of features from `start` on.

        dx may be of all of x, or of those features alone.
        """
        (weights, _), (dw, _) = (plan.parameters.of(self.stage, at) for at in (k.parameters, k.gradients))
        x, dy, dx, outputs, room = self.x, self.dy, self.dx, self.dy.size, self.dy.size * k.lanes
        size = chunks(outputs, most_block(k.target.registers))[0][1]
        # a vector of features, some outputs of it
        with k.loop(k.builder.add(start, INDEX(vectors)), start=start) as v:
            for first in range(0, outputs, size):
                last = min(first + size, outputs)
                block, places = ([at.at(v, room) + o * k.lanes for o in range(first, last)] for at in (weights, dw))
                columns = [k.load(place) for place in block] if dx else []
                # all images: their part of the weights' gradient, and of dx
                with k.sums([places]) as [totals], k.loop(k.count) as n:
                    k.prefetch(x.stored(k, n).at(v, k.lanes) + AHEAD * k.lanes)
                    value = k.load(x.stored(k, n).at(v, k.lanes))
                    sums = [k.zero(), k.zero()]
                    for i in range(last - first):
                        gradient = k.splat(dy.stored(k, n) + (first + i))
                        k.accumulate(totals[i], gradient, value)
                        if dx:
                            sums[i % 2] = k.fma(gradient, columns[i], sums[i % 2])
                    # dx, added to what the outputs before have left
                    if dx:
                        target = dx.stored(k, n).at(v if dx.size == x.size else k.builder.sub(v, start), k.lanes)
                        total = k.add(*sums)
                        if first:
                            total = k.add(total, k.load(target))
                        k.store(k.where_positive(value, total) if self.input_rectified else total, target)


def skinny_views(flat: np.ndarray, packed: np.ndarray, runs: int, run: int, room: int, lanes: int) -> Views:
    """Return where the weights (D, O) of a skinny layer lie whose features are runs that take `room` each.

    See `Parameters.place`. The room is whole vectors where there is more than one.
    """
    ours, vectors = flat.reshape(runs, run, -1), round_up(room, lanes) // lanes
    theirs, whole = packed.reshape(runs, vectors, -1, lanes), run // lanes
    full = ours[:, : whole * lanes].reshape(runs, whole, lanes, ours.shape[2])
    pairs = [(full.swapaxes(2, 3), theirs[:, :whole])]
    if whole < vectors:
        pairs.append((ours[:, whole * lanes :].swapaxes(1, 2), theirs[:, whole, :, : run - whole * lanes]))
    return pairs


def most_block(registers: int) -> int:
    """Return the outputs that `run_backward` does at once; with more it reads x again."""
    return 12 if registers >= 32 else 6
