"""Which layers of a network go into which node, and what each node is of a training step."""

import math
from collections.abc import Sequence

from cnnexp import network as net
from cnnexp.backends.gpu.device import Gpu
from cnnexp.backends.gpu.fused import linear_kernels, nodes
from cnnexp.backends.gpu.fused.kernels import BLOCK
from cnnexp.backends.gpu.fused.nodes import Context, FusedNode
from cnnexp.backends.parts import BACKWARD, FOLLOWED, FORWARD, Part
from cnnexp.network import Network, Stage
from cnnexp.network.losses import Loss

MANY_CHANNELS = 16  # and filters, from which on a convolution is a product of matrices
MOST_WINDOW = 16  # S * S: accumulators of a thread
MOST_OWNED = 16  # weights of a thread in `linear_head`
MOST_HEAD_INPUTS = 4096  # its inputs are staged in shared memory


def build(context: Context, network: Network, loss: Loss) -> list[FusedNode]:
    """Return the nodes of a network, first to last, its loss in the last."""
    made: list[FusedNode] = []

    def add(node: FusedNode, stages: Sequence[Stage]) -> None:
        node.parts = parts_of(node, stages, made[-1] if made else None, context.gpu)
        made.append(node)

    def add_all(stages: Sequence[Stage], loss: Loss | None, trains: bool) -> bool:
        """Add what runs stages, and the loss after them if there is one; return whether a layer so far trains."""
        i = 0
        while i < len(stages):
            node: FusedNode
            stage, used = stages[i], 1
            fused = _fused(context, stages[i:], loss, made[-1] if made else None)
            if fused is None and not made:
                add(nodes.Gather(context, network.input_shape), ())
                continue  # what reads the data set itself may not fuse, but a layer after a gather may
            if isinstance(stage, net.ResidualStage):
                add(fork := nodes.Fork(stage, made[-1]), (stage,))
                trains = add_all(stage.stages, None, trains)
                node = nodes.Join(context, fork, made[-1])
            elif fused:
                (node, used), trains = fused, True
            elif isinstance(stage, net.FlattenStage):
                node = nodes.View(context, stage, made[-1])
            elif isinstance(stage, net.DropoutStage):
                node = nodes.PlainDropout(context, stage, made[-1], trains)
            else:
                trains = trains or bool(stage.parameters)
                node = nodes.PlainLayer(context, stage, made[-1], trains)
            add(node, stages[i : i + used])
            i += used
        return trains

    add_all(network.stages, loss, False)
    if not isinstance(made[-1], nodes.FusedHead):
        add(nodes.PlainLoss(loss, made[-1]), ())
    return made


def _fused(
    context: Context, stages: Sequence[Stage], loss: Loss | None, before: FusedNode | None
) -> tuple[FusedNode, int] | None:
    """Return a fused node for the first of `stages` and how many of them it takes; None if there is none."""
    stage, relu = stages[0], len(stages) > 1 and isinstance(stages[1].layer, net.ReLU)
    if isinstance(stage, net.ConvStage) and stage.dense:
        pool, with_relu, used = _pool_and_relu(stages)
        conv = nodes.conv_block(stage, pool, with_relu, before is None)
        plan = nodes.plan_conv(conv, context)
        few = before is None or min(conv.sizes.C, conv.sizes.F) < MANY_CHANNELS
        if plan is not None and few and (before is None or before.dy is None or plan.input_rows):
            return nodes.FusedConv(context, stage, conv, plan, before), used
        return (nodes.FusedProduct(context, stage, relu, before), 1 + relu) if before else None
    if isinstance(stage, net.NormStage) and before is not None and relu:
        return nodes.NormReLU(context, stage, before), 2
    if isinstance(stage, net.LinearStage) and before is not None:
        D, O = stage.weight.shape  # noqa: E741
        fits = D <= MOST_HEAD_INPUTS and linear_kernels.lanes_of(O) <= BLOCK and D * O <= MOST_OWNED * BLOCK
        if len(stages) == 1 and loss == Loss.SOFTMAX_CROSS_ENTROPY and fits:
            return nodes.FusedHead(context, stage, before), 1
        return nodes.FusedProduct(context, stage, relu, before), 1 + relu
    return None


def _pool_and_relu(stages: Sequence[Stage]) -> tuple[int, bool, int]:
    """Return (pool, relu, layers taken) for a convolution and what follows it."""
    pool, relu, used = 1, False, 1
    (P, Q, _) = stages[0].output_shape
    for stage in stages[1:]:
        match stage:
            case net.ElementwiseStage(layer=net.ReLU()) if not relu:
                relu = True
            case net.PoolStage(layer=net.MaxPool2d(side)) if pool == 1 and _tiles(stage, P, Q):
                pool = side
            case _:
                break
        used += 1
    return pool, relu, used


def _tiles(stage: net.PoolStage, P: int, Q: int) -> bool:
    """Return whether a pooling layer's windows lie side by side, within the map, and fit in a thread's registers."""
    (U, V, _), side = stage.output_shape, stage.window.size
    return stage.window.stride == side and side > 1 and side**2 <= MOST_WINDOW and (P // side, Q // side) == (U, V)


def parts_of(node: FusedNode, stages: Sequence[Stage], before: FusedNode | None, gpu: Gpu) -> dict[str, Part]:
    """Return the part of a step that each pass of a node is, but for a pass that launches no kernel."""
    if isinstance(node, nodes.Gather):
        return {FORWARD: Part("gather", ("batch",), "gather")}
    kernel, layers = type(node).__name__, tuple(stage.name for stage in stages)
    if isinstance(node, nodes.FusedHead | nodes.PlainLoss):
        layers = (*layers, "loss")
    forward, backward, fewer = _multiply_adds(node, stages, before is not None and before.dy is not None)
    at_once = f"up to {gpu.multiprocessors} multiprocessors" if forward else ""
    parts = {}
    if type(node).forward is not FusedNode.forward:
        parts[FORWARD] = Part(FORWARD, layers, kernel, forward, at_once)
    if type(node).backward is not FusedNode.backward and node.dy is not None:
        parts[BACKWARD] = Part(BACKWARD, layers, kernel, backward, at_once, fewer)
    return parts


def _multiply_adds(node: FusedNode, stages: Sequence[Stage], needs_dx: bool) -> tuple[int, int, str]:
    """Return those of a node's passes for one image, and why the backward pass takes fewer than its outputs have."""
    first = stages[0] if stages else None
    if isinstance(node, nodes.FusedHead):
        return 3 * stages[0].macs, 0, ""  # its gradients, too
    if isinstance(first, net.ConvStage) and not isinstance(node, nodes.PlainLayer):
        pools = [other for other in stages if isinstance(other, net.PoolStage)]
        U, V, F = pools[0].output_shape if pools else first.output_shape
        through = U * V * F * first.layer.kernel**2 * first.input_shape[2]  # one place of each window
        backward = through + (first.layer.kernel**2 * F * math.prod(first.input_shape) if needs_dx else 0)
        return through * (pools[0].window.size ** 2 if pools else 1), backward, FOLLOWED if pools else ""
    if isinstance(first, net.ConvStage | net.LinearStage):
        return first.macs, first.macs * (2 if needs_dx else 1), ""
    return 0, 0, ""
