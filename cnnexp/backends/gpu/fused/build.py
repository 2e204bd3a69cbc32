"""Which layers of a network go into which node."""

from __future__ import annotations

from collections.abc import Sequence

from cnnexp.backends.gpu.fused import linear_kernels
from cnnexp.backends.gpu.fused.kernels import BLOCK
from cnnexp.backends.gpu.fused.nodes import (
    Context,
    FusedConv,
    FusedHead,
    FusedLinear,
    FusedNode,
    Gather,
    PlainLayer,
    PlainLoss,
    conv_block,
    plan_conv,
)
from cnnexp.backends.gpu.fused.parts import parts_of
from cnnexp.network import (
    ConvStage,
    ElementwiseStage,
    FlattenStage,
    LinearStage,
    MaxPool2d,
    Network,
    PoolStage,
    ReLU,
    Stage,
)
from cnnexp.network.losses import Loss

MOST_WINDOW = 16  # S * S: accumulators of a thread
MOST_OWNED = 16  # weights of a thread in `linear_head`
MOST_HEAD_INPUTS = 4096  # its inputs are staged in shared memory


def build(context: Context, network: Network, loss: Loss) -> list[FusedNode]:
    """Return the nodes of a network, first to last, its loss in the last."""
    nodes: list[FusedNode] = []

    def add(node: FusedNode, stages: Sequence[Stage]) -> None:
        node.parts = parts_of(node, stages, nodes[-1] if nodes else None, context.gpu)
        nodes.append(node)

    stages, i, trains = network.stages, 0, False
    while i < len(stages):
        fused = _fused(context, stages[i:], loss, nodes[-1] if nodes else None)
        if fused is None and not nodes:
            add(Gather(context, network.input_shape), ())
            continue  # what reads the data set itself may not fuse, but a layer after a gather may
        trains = trains or stages[i].weight is not None
        node, used = fused or (PlainLayer(context, stages[i], nodes[-1], trains), 1)
        add(node, stages[i : i + used])
        i += used
    if not isinstance(nodes[-1], FusedHead):
        add(PlainLoss(context, loss, nodes[-1]), ())
    return nodes


def _fused(
    context: Context, stages: Sequence[Stage], loss: Loss, before: FusedNode | None
) -> tuple[FusedNode, int] | None:
    """Return a fused node for the first of `stages` and how many of them it takes; None if there is none."""
    stage = stages[0]
    if isinstance(stage, ConvStage) and stage.dense:
        pool, relu, used = _pool_and_relu(stages)
        conv = conv_block(stage, pool, relu, before is None)
        plan = plan_conv(conv, context)
        if plan is None or (before is not None and before.dy is not None and not plan.input_rows):
            return None
        return FusedConv(context, stage, conv, plan, before), used
    if isinstance(stage, LinearStage) and before is not None:
        if len(stages) == 1 and loss == Loss.SOFTMAX_CROSS_ENTROPY and _fits_head(*stage.weight.shape):
            return FusedHead(context, stage, before), 1
        relu = len(stages) > 1 and isinstance(stages[1].layer, ReLU)
        return FusedLinear(context, stage, relu, before), 1 + relu
    return None


def _fits_head(D: int, O: int) -> bool:  # noqa: E741
    return D <= MOST_HEAD_INPUTS and linear_kernels.lanes_of(O) <= BLOCK and D * O <= MOST_OWNED * BLOCK


def _pool_and_relu(stages: Sequence[Stage]) -> tuple[int, bool, int]:
    """Return (pool, relu, layers taken) for a convolution and what follows it."""
    pool, relu, used = 1, False, 1
    (P, Q, _) = stages[0].output_shape
    for stage in stages[1:]:
        match stage:
            case ElementwiseStage(layer=ReLU()) if not relu:
                relu = True
            case PoolStage(layer=MaxPool2d(side)) if pool == 1 and _tiles(stage, P, Q):
                pool = side
            case _:
                break
        used += 1
    return pool, relu, used


def _tiles(stage: PoolStage, P: int, Q: int) -> bool:
    """Return whether a pooling layer's windows lie side by side, within the map, and fit in a thread's registers."""
    (U, V, _), side = stage.output_shape, stage.window.size
    return stage.window.stride == side and side > 1 and side**2 <= MOST_WINDOW and (P // side, Q // side) == (U, V)


def suits(network: Network) -> bool:
    """Return whether there are nodes for all of the network."""
    known = ConvStage | PoolStage | LinearStage | ElementwiseStage | FlattenStage
    return all(isinstance(stage, known) for stage in network.stages)
