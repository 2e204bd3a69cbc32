"""The network that `predict` computes: no Dropout, and every BatchNorm2d that follows a Conv2d in its weights and bias.

With running averages, y = (x - mean) / sqrt(variance + epsilon) * weight + bias is one scale and one shift per channel
(Jacob et al. 2018, section 3.2); a BatchNorm2d anywhere else keeps its place and has just these two as parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from cnnexp.network.layers import Conv2d, Dropout, Layer, Residual
from cnnexp.network.shapes import Network, NormStage, Stage


@dataclass(frozen=True)
class Folded:
    """A network without what does nothing in `predict`; `sources`: stages with parameters, and what is folded in."""

    network: Network
    sources: list[tuple[Stage, list[NormStage]]] = field(compare=False)

    @classmethod
    def of(cls, network: Network) -> Self:
        sources: list[tuple[Stage, list[NormStage]]] = []
        return cls(Network(network.input_shape, _fold(network.stages, sources)), sources)

    def parameters(self, state: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the flat float32 parameters, given `parameters` and `running` of a state of the whole network.

        What is folded is computed in float64. A NormStage's are scale and shift: its running averages count no more.
        """
        flat, folded, at = state["parameters"], np.empty(self.network.parameter_count, np.float32), 0
        for stage, norms in self.sources:
            own = [parameter.view(flat) for parameter in stage.parameters]
            if isinstance(stage, NormStage):
                own, norms = [np.ones(stage.weight.size)], [stage, *norms]
            for norm in norms:
                mean, variance = (average.view(state["running"]).astype(np.float64) for average in norm.running)
                scale = norm.weight.view(flat) / np.sqrt(variance + norm.layer.epsilon)
                shift = own[1] if len(own) > 1 else 0.0
                own = [own[0] * scale, (shift - mean) * scale + norm.bias.view(flat)]
            for array in own:
                folded[at : at + array.size], at = array.ravel(), at + array.size
        return folded


def _fold(stages: Sequence[Stage], sources: list[tuple[Stage, list[NormStage]]]) -> tuple[Layer, ...]:
    """Return the layers that stay, adding to the sources."""
    layers: list[Layer] = []
    for stage in stages:
        before = layers[-1] if layers else None
        if isinstance(stage, NormStage) and isinstance(before, Conv2d):
            sources[-1][1].append(stage)
            layers[-1] = replace(before, bias=True)
        elif isinstance(stage.layer, Residual):
            layers.append(replace(stage.layer, layers=_fold(stage.stages, sources)))
        elif not isinstance(stage.layer, Dropout) or (stage is stages[-1] and not layers):  # a Residual holds a layer
            layers.append(stage.layer)
            if stage.parameters:
                sources.append((stage, []))
    return tuple(layers)
