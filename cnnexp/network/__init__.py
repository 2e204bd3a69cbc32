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
    Structural,
)
from cnnexp.network.shapes import (
    ConvStage,
    DropoutStage,
    ElementwiseStage,
    FlattenStage,
    LinearStage,
    Network,
    NormStage,
    Parameter,
    PoolStage,
    ResidualStage,
    Stage,
    StructuralStage,
    Window,
)
