"""Which layers of a network go into which node."""

from __future__ import annotations

from collections.abc import Sequence

from cnnexp import network as net
from cnnexp.backends.gpu.fused import linear_kernels, nodes
from cnnexp.backends.gpu.fused.kernels import BLOCK
from cnnexp.backends.gpu.fused.nodes import Context, FusedNode
from cnnexp.backends.gpu.fused.parts import parts_of
from cnnexp.network import Network, Stage
from cnnexp.network.losses import Loss

MOST_WINDOW = 16  # S * S: accumulators of a thread
MOST_OWNED = 16  # weights of a thread in `linear_head`
MOST_HEAD_INPUTS = 4096  # its inputs are staged in shared memory


def build(context: Context, network: Network, loss: Loss) -> list[FusedNode]:
    """Return the nodes of a network, first to last, its loss in the last."""
    made: list[FusedNode] = []

    def add(node: FusedNode, stages: Sequence[Stage]) -> None:
        node.parts = parts_of(node, stages, made[-1] if made else None, context.gpu)
        made.append(node)

    stages, i, trains = network.stages, 0, False
    while i < len(stages):
        fused = _fused(context, stages[i:], loss, made[-1] if made else None)
        if fused is None and not made:
            add(nodes.Gather(context, network.input_shape), ())
            continue  # what reads the data set itself may not fuse, but a layer after a gather may
        trains = trains or stages[i].weight is not None
        node, used = fused or (nodes.PlainLayer(context, stages[i], made[-1], trains), 1)
        add(node, stages[i : i + used])
        i += used
    if not isinstance(made[-1], nodes.FusedHead):
        add(nodes.PlainLoss(context, loss, made[-1]), ())
    return made


def _fused(
    context: Context, stages: Sequence[Stage], loss: Loss, before: FusedNode | None
) -> tuple[FusedNode, int] | None:
    """Return a fused node for the first of `stages` and how many of them it takes; None if there is none."""
    stage = stages[0]
    if isinstance(stage, net.ConvStage) and stage.dense:
        pool, relu, used = _pool_and_relu(stages)
        conv = nodes.conv_block(stage, pool, relu, before is None)
        plan = nodes.plan_conv(conv, context)
        if plan is None or (before is not None and before.dy is not None and not plan.input_rows):
            return None
        return nodes.FusedConv(context, stage, conv, plan, before), used
    if isinstance(stage, net.LinearStage) and before is not None:
        if len(stages) == 1 and loss == Loss.SOFTMAX_CROSS_ENTROPY and _fits_head(*stage.weight.shape):
            return nodes.FusedHead(context, stage, before), 1
        relu = len(stages) > 1 and isinstance(stages[1].layer, net.ReLU)
        return nodes.FusedLinear(context, stage, relu, before), 1 + relu
    return None


def _fits_head(D: int, O: int) -> bool:  # noqa: E741
    return D <= MOST_HEAD_INPUTS and linear_kernels.lanes_of(O) <= BLOCK and D * O <= MOST_OWNED * BLOCK


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


def suits(network: Network) -> bool:
    """Return whether there are nodes for all of the network."""
    known = net.ConvStage | net.PoolStage | net.LinearStage | net.ElementwiseStage | net.FlattenStage
    return all(isinstance(stage, known) for stage in network.stages)
