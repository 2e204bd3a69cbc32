"""One convolution, pooling and one linear layer (castanheira's network) in three kernels a step and the update.

Forward is parallel over images: a block pools its part of some images and adds it to their scores at once, before it
leaves the registers. Backward is parallel over features: a thread owns one feature (u, v, f), holds its linear weights,
their gradients and its share of the filter's gradient in registers, and walks the batch; nothing is added up across
blocks but the filters' gradients, over places. That is the "one weird trick" of castanheira's future work (Krizhevsky
2014) within one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cnnexp.backends.gpu import device
from cnnexp.backends.gpu.device import SIMULATED
from cnnexp.backends.gpu.fused.conv_kernels import ConvBlock
from cnnexp.backends.gpu.fused.kernels import BLOCK, LANES, transpose
from cnnexp.backends.gpu.fused.linear_kernels import lanes_of
from cnnexp.backends.gpu.fused.nodes import Context, Node, Step, fitting
from cnnexp.backends.gpu.fused.one_conv_kernels import IMAGES, backward, forward, head
from cnnexp.backends.gpu.kernels import f32, u32
from cnnexp.network import ConvStage, LinearStage

FILTERS = 4 if SIMULATED else 128  # of a block, forward, at most
STAGED = 4 if SIMULATED else 128  # images staged at once, backward, at most
MOST_WEIGHTS = 32  # K * K * C: weights of a filter in a thread's registers
MOST_OUTPUTS = 16  # classes: scores of `IMAGES` images in a thread's registers


@dataclass(frozen=True)
class Plan:
    """How the kernels cut the network up.

    Attributes:
        rows, filters: of a block, forward.
        owned: filters of a block, backward.
        staged: images staged at once, backward.
    """

    rows: int
    filters: int
    owned: int
    staged: int


def plan(conv: ConvBlock, O: int, context: Context) -> Plan | None:  # noqa: E741
    """Return a plan that fits in registers and shared memory; None if the network is too large for these kernels."""
    sizes, room, batch = conv.sizes, context.shared_floats, context.batch_size
    taps = sizes.K**2 * sizes.C
    if taps > MOST_WEIGHTS or O > MOST_OUTPUTS or lanes_of(O) > BLOCK:
        return None
    filters, owned = min(sizes.F, FILTERS), min(sizes.F, LANES)
    groups = -(-batch // IMAGES) * -(-sizes.F // filters)
    fits = [
        r for r in range(1, conv.U + 1) if IMAGES * (conv.input_rows(r) * conv.wide * sizes.C + 1) + O * BLOCK <= room
    ]
    patch, sums = conv.input_rows(1) ** 2 * sizes.C, (O + taps + 1) * BLOCK
    staged = fitting(min(batch, STAGED), lambda n: n * (patch + O + 4) + sums <= room)
    if not fits or not staged:
        return None

    def rows_of_the_busiest(rows: int) -> int:
        """Return the rows that the multiprocessor with most blocks makes, and what a block costs besides."""
        return -(-groups * -(-conv.U // rows) // context.gpu.multiprocessors) * (rows + 1)

    return Plan(min(fits, key=rows_of_the_busiest), filters, owned, staged)


class OneConv(Node):
    """The whole network: forward makes the scores, the losses and their gradient, backward all others.

    Args:
        context: what is shared; its mirror is taken for the linear weights.
        stage: the convolution.
        conv: it and what follows it.
        linear: the last layer.
        cut: see `Plan`.
    """

    def __init__(self, context: Context, stage: ConvStage, conv: ConvBlock, linear: LinearStage, cut: Plan) -> None:
        (D, O), batch, arena = linear.weight.shape, context.batch_size, context.arena  # noqa: E741
        sizes, cells = conv.sizes, conv.U * conv.V
        kinds = {is_bytes: replace(conv, from_bytes=is_bytes) for is_bytes in (False, True)}
        self._forward = {k: forward(kind, O, cut.rows, cut.filters, batch) for k, kind in kinds.items()}
        self._backward = {k: backward(kind, O, cut.owned, cut.staged) for k, kind in kinds.items()}
        parts = -(-conv.U // cut.rows) * -(-sizes.F // cut.filters)
        self._forward_blocks, self._backward_blocks = parts, cells * -(-sizes.F // cut.owned)
        self._head = head(O, linear.bias is not None, parts, batch)
        self._head_blocks = -(-batch // (BLOCK // lanes_of(O)))

        self.y, self._d_scores = (device.empty((batch, O), np.float32) for _ in range(2))
        self._pooled = device.empty((batch, D), np.float32)
        self._argmax = device.empty((batch, D), np.uint8)
        self._partial = device.empty((parts, batch, O), np.float32)
        self._w, self._b = context.view(stage.weight), context.view(stage.bias)
        self._linear_w, self._linear_b = context.view(linear.weight), context.view(linear.bias)
        self._arena = arena
        self._w_base, self._b_base = arena.take(stage.weight, cells), arena.take(stage.bias, cells)
        self._linear_base = arena.take(linear.weight, 1)
        self._linear_b_base = arena.take(linear.bias, self._head_blocks)
        self._transpose = transpose(D, O)
        context.mirror, context.mirrored = (linear.weight.offset, D, O), device.empty((O, D), np.float32)
        self._mirrored = context.mirrored

    def forward(self, step: Step) -> None:
        split, count = step.split, u32(step.count)
        self._forward[split.is_bytes].launch(
            -(-step.count // IMAGES) * self._forward_blocks,
            step.stream,
            split.images,
            *step.place,
            self._w,
            self._b,
            self._mirrored,
            self._pooled,
            self._argmax,
            self._partial,
            count,
        )
        self._head.launch(
            self._head_blocks,
            step.stream,
            self._partial,
            self._linear_b,
            split.labels,
            *step.place,
            f32(1.0 / step.count),
            self.y,
            self._d_scores,
            split.losses,
            split.hits,
            self._arena.memory,
            self._linear_b_base,
            count,
        )

    def backward(self, step: Step) -> None:
        self._backward[step.split.is_bytes].launch(
            self._backward_blocks,
            step.stream,
            step.split.images,
            *step.place,
            self._linear_w,
            self._pooled,
            self._argmax,
            self._d_scores,
            self._arena.memory,
            self._w_base,
            self._b_base,
            self._linear_base,
            u32(step.count),
        )

    def refresh(self, stream: Any) -> None:
        self._transpose.over(self._linear_w.size, stream, self._linear_w, self._mirrored)
