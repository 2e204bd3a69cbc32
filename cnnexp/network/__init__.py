"""What a network is: layer specs, inferred shapes, the losses and the papers' models."""

from cnnexp.network.layers import (
    LAYERS,
    AvgPool2d,
    Conv2d,
    Flatten,
    Layer,
    Linear,
    MaxPool2d,
    ReLU,
    Shape,
    Sigmoid,
)
from cnnexp.network.shapes import Network, Parameter, Stage

__all__ = [
    "LAYERS",
    "AvgPool2d",
    "Conv2d",
    "Flatten",
    "Layer",
    "Linear",
    "MaxPool2d",
    "Network",
    "Parameter",
    "ReLU",
    "Shape",
    "Sigmoid",
    "Stage",
]
