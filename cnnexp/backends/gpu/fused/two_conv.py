"""Two convolutions, pooling and two linear layers (garg's network, rendon's) in three kernels a step, update included.

Forward and back, a block keeps a tile of an image in shared memory, from the first convolution to the last, and no
image waits for another. What only a whole batch knows, the gradients of the linear layers' weights, `update` makes from
the layers' inputs and the gradients of their outputs. A linear layer of a few hundred thousand weights is read anew for
each tile, from the second cache; with many more, layer by layer is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cnnexp.backends.gpu import device
from cnnexp.backends.gpu.fused.kernels import transpose
from cnnexp.backends.gpu.fused.nodes import Context, Node, Product, Step
from cnnexp.backends.gpu.fused.two_conv_backward import backward
from cnnexp.backends.gpu.fused.two_conv_cut import Cut, Places
from cnnexp.backends.gpu.fused.two_conv_kernels import forward, scores
from cnnexp.backends.gpu.kernels import f32, u32
from cnnexp.network import ConvStage, LinearStage


class TwoConv(Node):
    """The whole network: forward makes the hidden outputs, in parts, backward all that follows.

    Args:
        context: what is shared; its mirror is taken for the weights of the first linear layer.
        convs: the convolutions.
        linears: the linear layers.
        cut: see `Cut`.
    """

    def __init__(self, context: Context, convs: Sequence[ConvStage], linears: Sequence[LinearStage], cut: Cut) -> None:
        batch, arena, parts = cut.batch, context.arena, cut.slices * cut.tiles
        (D, hidden), outputs = linears[0].weight.shape, cut.outputs
        features, hidden_at, d_hidden, d_scores = (arena.room(batch * n) for n in (D, hidden, hidden, outputs))
        partials = [arena.take(p, parts) for conv in convs for p in (conv.weight, conv.bias)]
        places = Places(features, hidden_at, d_hidden, d_scores, *(int(base) for base in partials))
        for linear, inputs, d_outputs in zip(linears, (features, hidden_at), (d_hidden, d_scores), strict=True):
            arena.products.append(Product(linear.weight, linear.bias, inputs, d_outputs))

        kinds = {k: replace(cut, first=replace(cut.first, from_bytes=k)) for k in (False, True)}
        self._forward = {k: forward(kind, places) for k, kind in kinds.items()}
        self._backward = {k: backward(kind, places) for k, kind in kinds.items()}
        self._scores, self._cut, self._arena = scores(cut), cut, arena
        self.y = device.empty((batch, outputs), np.float32)
        self._maps = device.to_device(np.zeros((batch, cut.first.sizes.F, *cut.map_shape), np.float32))
        self._argmax = device.empty((batch, D), np.uint8)
        self._partial = device.empty((cut.tiles, batch, hidden), np.float32)
        w1, b1, w2, b2 = (context.view(p) for conv in convs for p in (conv.weight, conv.bias))
        w3, b3, w4, b4 = (context.view(p) for linear in linears for p in (linear.weight, linear.bias))
        self._convs, self._w2, self._w3, self._head = (w1, b1, w2, b2), w2, w3, (b3, w4, b4)
        self._transpose = transpose(D, hidden)
        self._mirrored = device.empty((hidden, D), np.float32)
        context.mirror, context.mirrored = (linears[0].weight.offset, D, hidden), self._mirrored

    def forward(self, step: Step) -> None:
        self._forward[step.split.is_bytes].launch(
            step.count * self._cut.tiles,
            step.stream,
            step.split.images,
            *step.place,
            *self._convs,
            self._w3,
            self._maps,
            self._argmax,
            self._arena.memory,
            self._partial,
        )

    def backward(self, step: Step) -> None:
        split = step.split
        self._backward[split.is_bytes].launch(
            self._cut.slices * self._cut.tiles,
            step.stream,
            split.images,
            *step.place,
            split.labels,
            self._partial,
            *self._head,
            self._mirrored,
            self._w2,
            self._maps,
            self._argmax,
            f32(1.0 / step.count),
            split.losses,
            split.hits,
            self._arena.memory,
            u32(step.count),
        )

    def predict(self, step: Step) -> None:
        self.forward(step)
        self._scores.launch(step.count, step.stream, self._partial, *self._head, self.y)

    def refresh(self, stream: Any) -> None:
        self._transpose.over(self._w3.size, stream, self._w3, self._mirrored)
