"""What both linear algorithms have in common."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from cnnexp.backends.simd.algorithms.cost import Work, passes
from cnnexp.backends.simd.algorithms.elementwise import copy_gradient
from cnnexp.backends.simd.algorithms.node import Node, Section
from cnnexp.backends.simd.compiler.emit import Emitter, Kernels, Target
from cnnexp.backends.simd.layouts import NC, Layout, round_up
from cnnexp.network import ConvStage, DropoutStage, ElementwiseStage, Linear, LinearStage


class Dense(Node[NC, NC]):
    """Linear [+ ReLU]."""

    input_layout = output_layout = NC
    holds = "weights"
    trains = True
    stage: LinearStage

    def __init__(self, stage: LinearStage, rectify: bool, first: bool = False) -> None:
        super().__init__(stage.name, stage.output_shape)
        self.stage, self.rectify, self.first = stage, rectify, first

    @classmethod
    def of(cls, sections: Sequence[Section], first: bool) -> Self | None:
        stage = sections[0].stage if sections else None
        if isinstance(stage, ConvStage) and _goes_flat(sections):
            stage = _as_linear(stage)
        return cls(stage, sections[0].rectify, first) if isinstance(stage, LinearStage) else None

    def _common_work(self, target: Target) -> dict[str, Work]:
        width = round_up(self.stage.output_shape[0], target.lanes)
        return {"rectify_gradient": passes(width, 3, target), "backward_bias": passes(width, 1, target)}

    def backward(self, plan: Layout) -> Kernels:
        """Return what both forms begin with."""
        kernels: Kernels = []
        if self.rectifies_dy:
            kernels.append(("rectify_gradient", lambda k: copy_gradient(k, self.y, self.dy, self.dy)))
        if self.stage.bias:
            kernels.append(("backward_bias", lambda k: self._backward_bias(k, plan)))
        return kernels

    def _backward_bias(self, k: Emitter, plan: Layout) -> None:
        """db += the sum of dy over images."""
        _, db = plan.parameters.of(self.stage, k.gradients)
        assert db is not None
        with k.loop(self.dy.width // k.lanes) as v, k.sums([[db.at(v, k.lanes)]]) as [[total]], k.loop(k.count) as n:
            k.increase(total, k.load(self.dy.stored(k, n).at(v, k.lanes)))


def _as_linear(stage: ConvStage) -> ConvStage | LinearStage:
    """Return a convolution whose one window is the whole image as the linear layer that it is."""
    (height, width, channels), size = stage.input_shape, stage.window.size
    if not stage.dense or stage.window.padded or not height == width == size:
        return stage
    filters = stage.layer.filters
    weight = replace(stage.weight, shape=(height * width * channels, filters))
    layer, shapes = Linear(filters, stage.layer.bias), (weight.shape[:1], (filters,))
    return LinearStage(layer, stage.name, *shapes, bias=stage.bias, weight=weight)


def _goes_flat(sections: Sequence[Section]) -> bool:
    """Whether nothing but what is elementwise comes between the first section and a `Flatten`."""
    flat = next((i for i, section in enumerate(sections) if section.flattened), len(sections))
    between = [stage for section in sections[: flat + 1] for stage in section.stages][1:]
    return flat < len(sections) and all(isinstance(stage, ElementwiseStage | DropoutStage) for stage in between)
