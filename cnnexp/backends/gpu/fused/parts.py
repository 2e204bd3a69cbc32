"""What each node of a fused program is of a training step: its layers, and the multiply-adds that its kernels take."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cnnexp.backends.gpu.device import Gpu
from cnnexp.backends.gpu.fused.nodes import FusedHead, FusedNode, Gather, PlainLayer
from cnnexp.backends.parts import BACKWARD, FOLLOWED, FORWARD, Part
from cnnexp.network import ConvStage, FlattenStage, LinearStage, PoolStage, Stage


def parts_of(node: FusedNode, stages: Sequence[Stage], before: FusedNode | None, gpu: Gpu) -> dict[str, Part]:
    """Return the part of a step that each pass of a node is; nothing of a pass that launches no kernel.

    Args:
        stages: that the node computes; the gather and the loss alone compute none.
    """
    if isinstance(node, Gather):
        return {FORWARD: Part("gather", ("batch",), "gather")}
    layers = tuple(stage.name for stage in stages if not isinstance(stage, FlattenStage))
    forward, backward, fewer = _multiply_adds(node, stages, before is not None and before.dy is not None)
    at_once = f"up to {gpu.multiprocessors} multiprocessors" if forward else ""
    kernel = type(node).__name__
    if not layers:
        return {} if stages else {FORWARD: Part(FORWARD, ("loss",), kernel)}
    loss = ("loss",) if isinstance(node, FusedHead) else ()  # in the kernel that makes the scores
    parts = {FORWARD: Part(FORWARD, (*layers, *loss), kernel, forward, at_once)}
    if not isinstance(node, FusedHead) and node.dy is not None:
        parts[BACKWARD] = Part(BACKWARD, layers, kernel, backward, at_once, fewer)
    return parts


def _multiply_adds(node: FusedNode, stages: Sequence[Stage], needs_dx: bool) -> tuple[int, int, str]:
    """Return those of a node's passes for one image, and why the backward pass takes fewer than its outputs have."""
    first = stages[0] if stages else None
    if isinstance(node, FusedHead):
        return 3 * stages[0].macs, 0, ""  # its gradients, too
    if isinstance(first, ConvStage) and not isinstance(node, PlainLayer):
        pools = [other for other in stages if isinstance(other, PoolStage)]
        U, V, F = pools[0].output_shape if pools else first.output_shape
        through = U * V * F * first.layer.kernel**2 * first.input_shape[2]  # one place of each window
        backward = through + (first.layer.kernel**2 * F * math.prod(first.input_shape) if needs_dx else 0)
        return through * (pools[0].window.size ** 2 if pools else 1), backward, FOLLOWED if pools else ""
    if isinstance(first, ConvStage | LinearStage):
        return first.macs, first.macs * (2 if needs_dx else 1), ""
    return 0, 0, ""
