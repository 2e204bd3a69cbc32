"""What a network is: layer specs, inferred shapes, the losses and the papers' models."""

from cnnexp.network.elementwise import GELU, Elementwise, LeakyReLU, Maths, ReLU, Sigmoid, Tanh
from cnnexp.network.layers import (
    LAYERS,
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAvgPool,
    Layer,
    Linear,
    MaxPool2d,
    Residual,
    Shape,
)
from cnnexp.network.shapes import Network, Parameter, Stage, Window

__all__ = [
    "GELU",
    "LAYERS",
    "AvgPool2d",
    "BatchNorm2d",
    "Conv2d",
    "Dropout",
    "Elementwise",
    "Flatten",
    "GlobalAvgPool",
    "Layer",
    "LeakyReLU",
    "Linear",
    "Maths",
    "MaxPool2d",
    "Network",
    "Parameter",
    "ReLU",
    "Residual",
    "Shape",
    "Sigmoid",
    "Stage",
    "Tanh",
    "Window",
]
