"""`depthwise`: a convolution of one filter a channel, channels in the vector lanes: any stride and dilation.

Each channel is multiplied by its own weights, so nothing is summed over channels. Register tile of a sum: neighbouring
pixels of a row, so that a weight is loaded once for all of them, and what several of them see once for a row of the
kernel. Channels are the inner loop, as they are in memory.

The gradient of the input is the same sum, over the taps that see a pixel; with a stride, pixels whose place modulo the
stride is the same have the same taps, as in `channels`. The weights' gradient stays in registers along a row of pixels.

Gain: MobileNet (`model=mobilenet`, 32 x 32, batch 16, two threads) trains 1,837 images/s by it, 411 by `lanes` (one run
after the other, Zen 3, AVX2), which takes one filter at a time, as no two see the same.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Self

from cnnexp.backends.simd.algorithms.convolution.base import ConvolutionNode, Geometry, Phase, seen_by
from cnnexp.backends.simd.algorithms.cost import Work, bring, passes
from cnnexp.backends.simd.algorithms.node import Section
from cnnexp.backends.simd.compiler.emit import INDEX, Emitter, Pointer, Target, chunks
from cnnexp.backends.simd.layouts import NHWC, Layout, padded_rows, round_up
from cnnexp.network import ConvStage

MOST_SIDE = 7
"""Of a kernel, whose taps are all in the code."""

MOST_PIXELS, GRADIENT_PIXELS = 8, 4
"""Of a tile of sums, and of one of the weights' gradient."""


class Depthwise(ConvolutionNode[NHWC]):
    """Conv2d [+ ReLU] with as many groups as channels and filters."""

    input_layout = output_layout = NHWC
    whole_vectors, in_parts = False, ("forward",)
    algorithm, holds, any_taps = "depthwise", "channels", True

    @classmethod
    def of(cls, sections: Sequence[Section], first: bool) -> Self | None:
        node = super().of(sections, first)
        if node is None or node.pool or node.stage.layer.kernel > MOST_SIDE:
            return None
        return node if node.stage.layer.groups == node.shape[2] == node.stage.input_shape[2] > 1 else None

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        outputs, inputs = math.prod(self.shape), math.prod(self.stage.input_shape)
        macs, moved = float(self.stage.macs), bring(outputs + inputs, 4 * images * (outputs + inputs), target)
        pixels, side = chunks(self.shape[1], MOST_PIXELS)[0][1], self.stage.layer.kernel
        each = Work(macs, max(0.7 * macs / target.lanes, moved), f"{pixels} pixels")
        found = {"forward": each, "gradient": passes(outputs, 2, target, images)}
        found["backward_weights"] = Work(macs, 1.3 * each.cycles, f"{_rows(side, target)} x {side} taps")
        return found | ({"backward_input": each} if needs_dx else {})

    def prepare_forward(self, plan: Layout) -> None:
        taps, self.row = self.stage.layer.kernel**2, round_up(self.shape[2], plan.target.lanes)
        views = functools.partial(padded_rows, rows=taps, row=self.row)
        plan.parameters.place(self.stage.weight, taps * self.row, views)
        plan.parameters.place_plain(self.stage.bias)

    def emit_forward(self, k: Emitter, plan: Layout) -> None:
        phases = forward(self.stage, 0), forward(self.stage, 1)
        parameters = plan.parameters.of(self.stage, k.parameters)
        self._add_taps(k, Geometry(x=self.x, y=self.y, rectify=self.rectify), phases, parameters)

    def backward_input(self, k: Emitter, plan: Layout) -> None:
        weights, _ = plan.parameters.of(self.stage, k.parameters)
        conv = Geometry(x=self.d, y=self.needed_dx, positive=self.x if self.input_rectified else None)
        for phases in itertools.product(seen_by(self.stage, 0), seen_by(self.stage, 1)):
            self._add_taps(k, conv, phases, (weights, None))

    def _tap(self, weights: Pointer, i: int, j: int) -> Pointer:
        return weights + (i * self.stage.layer.kernel + j) * self.row

    def _add_taps(
        self, k: Emitter, conv: Geometry[NHWC], phases: tuple[Phase, Phase], parameters: tuple[Pointer, Pointer | None]
    ) -> None:
        """Fill the pixels of a phase down and one across with the sums of what the taps see, the bias added."""
        x, y, (weights, bias), (down, across) = conv.x, conv.y, parameters, phases
        # an image, a row, a tile of its pixels, a vector of them
        with k.loop(k.count) as n, k.loop(*k.turns([(0, 1, down.count)], self.parts)[0][2:]) as u:
            source, p = x.pixel(k, n, 0, 0).at(u, down.stride * x.row), down.at(k, u)
            for v, size in k.chunks(across.count, MOST_PIXELS):
                corner = source.at(v, across.stride * x.column)
                for vector, valid in k.vectors(y.shape[2]):
                    c = k.builder.mul(vector, INDEX(k.lanes))
                    at, sums = corner.at(c), [k.zero() for _ in range(size)]
                    # a row of the kernel: each pixel that is seen goes to all sums that it is in
                    for i, down_by in down.taps:
                        taps = [k.load(self._tap(weights, i, j).at(c)) for j, _ in across.taps]
                        for place, uses in across.seen(size):
                            value = k.load(at + (down_by * x.row + place * x.column))
                            for j, m in uses:
                                sums[m] = k.fma(value, taps[j], sums[m])
                    for m, total in enumerate(sums):
                        q = across.at(k, v, m)
                        added = None if bias is None else k.load(bias.at(c))
                        positive = conv.positive.pixel(k, n, p, q).at(c) if conv.positive else None
                        value = k.finish(total, added, conv.rectify, positive)
                        k.store_part(value, y.pixel(k, n, p, q).at(c), valid)

    def backward_weights(self, k: Emitter, plan: Layout) -> None:
        (dw, db), x, d = plan.parameters.of(self.stage, k.gradients), self.x, self.d
        down, across = forward(self.stage, 0), forward(self.stage, 1)
        step = _rows(len(down.taps), k.target)
        for start in range(0, len(down.taps), step):
            # some rows of the kernel and, with the first, the bias: an image, a row of pixels, a vector of channels
            rows, bias = down.taps[start : start + step], [] if start or db is None else [db]
            with k.loop(k.count) as n, k.loop(down.count) as p:
                corner, gradient = x.pixel(k, n, 0, 0).at(p, down.stride * x.row), d.pixel(k, n, p, 0)
                for vector, valid in k.vectors(self.shape[2]):
                    c = k.builder.mul(vector, INDEX(k.lanes))
                    places = [[self._tap(dw, i, j).at(c) for j, _ in across.taps] for i, _ in rows]
                    with k.sums([*places, [place.at(c) for place in bias]]) as (*totals, of_bias):
                        for q, size in k.chunks(across.count, GRADIENT_PIXELS):
                            at, seen = gradient.at(q, d.column).at(c), corner.at(q, across.stride * x.column).at(c)
                            values = [k.load_part(at + m * d.column, valid) for m in range(size)]
                            for total, value in itertools.product(of_bias, values):
                                k.increase(total, value)
                            for row, (_, down_by) in zip(totals, rows, strict=True):
                                for place, uses in across.seen(size):
                                    pixel = k.load(seen + (down_by * x.row + place * x.column))
                                    for j, m in uses:
                                        k.accumulate(row[j], pixel, values[m])


def _rows(side: int, target: Target) -> int:
    """Return the rows of a kernel whose gradient the registers hold, beside a tile of dy and a pixel."""
    return max(1, min(side, (target.registers - GRADIENT_PIXELS - 2) // side))


def forward(stage: ConvStage, axis: int) -> Phase:
    """Return the output's pixels, of what they see in the input."""
    window, pad = stage.window, stage.window.pads[axis]
    taps = tuple((t, t * window.dilation - pad) for t in range(window.size))
    return Phase(0, 1, stage.output_shape[axis], window.stride, taps)
