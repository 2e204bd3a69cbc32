"""What each node of a fused program is of a training step: its layers, and the multiply-adds that its kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from cnnexp.backends.gpu.device import Gpu
from cnnexp.backends.gpu.fused.nodes import FusedHead, Gather, Node, PlainLayer
from cnnexp.backends.gpu.fused.one_conv import OneConv
from cnnexp.backends.gpu.fused.two_conv import TwoConv
from cnnexp.backends.parts import BACKWARD, FOLLOWED, FORWARD, Part
from cnnexp.network import ConvStage, FlattenStage, LinearStage, MaxPool2d, PoolStage, Stage


def parts_of(node: Node, stages: Sequence[Stage], before: Node | None, gpu: Gpu) -> dict[str, Part]:
    """Return the part of a step that each pass of a node is; nothing of a pass that launches no kernel.

    Args:
        node: its own parts are not known yet.
        stages: that it computes; the gather and the loss alone compute none.
        before: the node before it.
        gpu: that it runs on.
    """
    if isinstance(node, Gather):
        return {FORWARD: Part("gather", ("batch",), "gather")}
    layers = tuple(stage.name for stage in stages if not isinstance(stage, FlattenStage))
    forward, backward, fewer = _multiply_adds(node, stages, before is not None and before.dy is not None)
    at_once = f"up to {gpu.multiprocessors} multiprocessors" if forward else ""
    kernel = type(node).__name__
    if not layers:
        return {} if stages else {FORWARD: Part(FORWARD, ("loss",), kernel)}
    loss = ("loss",) if isinstance(node, FusedHead | OneConv | TwoConv) else ()  # in the kernel that makes the scores
    begun = layers[:-1] if isinstance(node, TwoConv) else (*layers, *loss)  # the scores come with the gradients there
    parts = {FORWARD: Part(FORWARD, begun, kernel, forward, at_once)}
    if not isinstance(node, FusedHead) and (node.dy is not None or isinstance(node, OneConv | TwoConv)):
        parts[BACKWARD] = Part(BACKWARD, (*layers, *loss), kernel, backward, at_once, fewer)
    return parts


def _multiply_adds(node: Node, stages: Sequence[Stage], needs_dx: bool) -> tuple[int, int, str]:
    """Return those of a node's passes for one image, and why the backward pass takes fewer than its outputs have."""
    forward = backward = 0
    fewer = ""
    for i, stage in enumerate(stages):
        if isinstance(stage, ConvStage) and not isinstance(node, PlainLayer):
            own = takewhile(lambda other: not isinstance(other, ConvStage), stages[i + 1 :])
            pools = [other for other in own if isinstance(other, PoolStage) and isinstance(other.layer, MaxPool2d)]
            U, V, F = pools[0].output_shape if pools else stage.output_shape
            through = U * V * F * stage.layer.kernel**2 * stage.input_shape[2]  # one place of each window
            forward += through * (pools[0].window.size ** 2 if pools else 1)
            backward += through + (stage.layer.kernel**2 * F * _size(stage) if needs_dx or i else 0)
            fewer = FOLLOWED if pools else fewer
        elif isinstance(stage, LinearStage) and isinstance(node, TwoConv):  # `update` makes the weights' gradients
            last = stage is stages[-1]
            forward += 0 if last else stage.macs
            backward += stage.macs * (2 if last else 1)
        elif isinstance(stage, ConvStage | LinearStage):
            inside = isinstance(node, OneConv)  # of the node: what comes before it is pooled there
            forward += stage.macs
            backward += stage.macs * (2 if needs_dx or inside else 1)
    if isinstance(node, FusedHead):
        return 3 * forward, 0, ""  # its gradients, too
    return forward, backward, fewer


def _size(stage: ConvStage) -> int:
    H, W, C = stage.input_shape
    return H * W * C
