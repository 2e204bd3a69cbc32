"""What a layer is: frozen specs, which hold no array and run nothing.

Shapes leave out the leading number of images and are channels-last, `(H, W, C)`, as castanheira (section 4.2) flattens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from cnnexp.network.elementwise import KINDS as ELEMENTWISE
from cnnexp.network.elementwise import Elementwise
from cnnexp.system.registry import Registry

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Conv2d:
    """Convolve (cross-correlate) with `filters` square kernels.

    Attributes:
        filters: number of output channels, >= 1.
        kernel: side of the kernel in pixels, >= 1.
        stride: step in pixels, >= 1.
        padding: zeros around the image: `valid` (none), `same` (output side = ceil(side / stride)), `full` (all but one
            pixel of what the kernel covers, on every side), `auto` (just enough for the windows to fit), `floor` (none,
            and what does not fill a window is left out, as in PyTorch and Keras), or pixels on every side;
            `floor+PIXELS` is both, as PyTorch's `padding=PIXELS`.
        bias: whether a bias per filter is added.
        groups: parts of the channels, each seen by a part of the filters alone; divides both. One a channel: depthwise.
        dilation: step in pixels from tap to tap of the kernel, >= 1.
    """

    filters: int
    kernel: int = 3
    stride: int = 1
    padding: str | int = "valid"
    bias: bool = True
    groups: int = 1
    dilation: int = 1


@dataclass(frozen=True)
class MaxPool2d:
    """Keep the largest value of each square window; ties go to the first in row order.

    Attributes:
        pool: side of the window in pixels, >= 1.
        stride: step in pixels; the side of the window if None.
        padding: `valid` (none), `auto` (windows at the edge may reach past it, where they see nothing), or `floor`
            (none, and what does not fill a window is left out, as in PyTorch and Keras); `floor+PIXELS` adds as many
            pixels on every side, where windows see nothing.
    """

    pool: int
    stride: int | None = None
    padding: str | int = "valid"


@dataclass(frozen=True)
class AvgPool2d:
    """Average each square window over the pixels that exist; attributes as `MaxPool2d`."""

    pool: int
    stride: int | None = None
    padding: str | int = "valid"


@dataclass(frozen=True)
class GlobalAvgPool:
    """(H, W, C) -> (C,), the mean of every channel (Lin et al. 2014)."""


@dataclass(frozen=True)
class Flatten:
    """(H, W, C) -> (H * W * C,), in row, column, channel order."""


@dataclass(frozen=True)
class Linear:
    """x @ weight + bias, to `features` outputs."""

    features: int
    bias: bool = True


@dataclass(frozen=True)
class Dropout:
    """In training, zero each number with probability `rate` and divide the others by 1 - rate (Srivastava et al. 2014).

    See `noise` for which. In `predict` it does nothing.

    Attributes:
        rate: 0 <= rate < 1.
    """

    rate: float = 0.5


@dataclass(frozen=True)
class BatchNorm2d:
    """Normalize every channel of an image, then scale and shift it (Ioffe and Szegedy 2015, algorithms 1 and 2).

    Training takes mean and variance of the batch, and leaves a running average of both, of the variance the unbiased
    one, as PyTorch does; `predict` takes those. Workers each take those of their own share of the batch.

    Attributes:
        momentum: weight of the newest batch in the running averages, 0 < momentum <= 1.
        epsilon: added to the variance, > 0.
    """

    momentum: float = 0.1
    epsilon: float = 1e-5


@dataclass(frozen=True)
class Residual:
    """x + f(x), f being `layers` one after another (He et al. 2016).

    Attributes:
        shortcut: what is added to f(x): `identity`, x itself, whose shape f gives back; `padded`, as many pixels of x
            as f has, every n-th, and zeros for the channels that f adds: option A of the paper.
    """

    layers: tuple[Layer, ...]
    shortcut: str = "identity"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))


@dataclass(frozen=True)
class Structural:
    """Base of the layers that plugins bring and that are no rule on one number: NumPy on the images of a batch.

    What comes of an image follows from that image alone. There are no parameters. `cpu-simd` and the GPU's backends
    compute it on the host, between their own kernels.

    Attributes:
        surrogate: whether the backward pass is meant to be another function's.
    """

    surrogate: ClassVar[bool] = False

    def output_shape(self, input_shape: Shape) -> Shape:
        """Return the shape that it gives, (H, W, C) or (D,); raise NetworkError where it does not fit."""
        raise NotImplementedError

    def forward(self, x: np.ndarray) -> np.ndarray:
        """Return what comes of a batch x, both float32 with the images first; x is not to change."""
        raise NotImplementedError

    def backward(self, x: np.ndarray, y: np.ndarray, dy: np.ndarray) -> np.ndarray:
        """Return dx, given the gradient of y."""
        raise NotImplementedError


Pool = MaxPool2d | AvgPool2d | GlobalAvgPool
Layer = Conv2d | Elementwise | Pool | Flatten | Linear | Dropout | BatchNorm2d | Residual | Structural
"""What stands in a network."""

_KINDS = (Conv2d, *ELEMENTWISE, MaxPool2d, AvgPool2d, GlobalAvgPool, Flatten, Linear, Dropout, BatchNorm2d, Residual)
LAYERS: Registry[Layer] = Registry("layer", {cls.__name__: cls for cls in _KINDS})
"""By the name that a config gives, the class's own; a plugin may add elementwise and structural layers."""


def describe_layer(layer: Layer) -> dict[str, Any]:
    """Return a layer as plain values: its `type`, then its fields."""
    values = {f.name: getattr(layer, f.name) for f in fields(layer)}
    if isinstance(layer, Residual):
        values["layers"] = [describe_layer(inner) for inner in layer.layers]
    return {"type": type(layer).__name__, **values}


def make_layer(described: Mapping[str, Any]) -> Layer:
    """Return the layer that `describe_layer` described.

    Raises:
        KeyError, TypeError: it is not as written there.
        ConfigError: it is of a type that nobody has registered.
    """
    values = {name: value for name, value in described.items() if name != "type"}
    if "layers" in values:
        values["layers"] = tuple(make_layer(inner) for inner in values["layers"])
    return LAYERS.find(described["type"], "a layer's type")(**values)
