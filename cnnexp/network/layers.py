"""What a layer is: frozen specs, which hold no array and run nothing.

Shapes leave out the leading number of images and are channels-last, `(H, W, C)`, the order in which castanheira
(section 4.2) flattens.
"""

from __future__ import annotations

from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Conv2d:
    """Convolve (cross-correlate) with `filters` square kernels.

    Attributes:
        filters: number of output channels, >= 1.
        kernel: side of the kernel in pixels, >= 1.
        stride: step in pixels, >= 1.
        padding: zeros around the image: `valid` (none), `same` (output side = ceil(side / stride)), `full`
            (kernel - 1 on every side), `auto` (just enough for the windows to fit), or pixels on every side.
        bias: whether a bias per filter is added.
    """

    filters: int
    kernel: int = 3
    stride: int = 1
    padding: str | int = "valid"
    bias: bool = True


@dataclass(frozen=True)
class ReLU:
    """max(x, 0), elementwise."""


@dataclass(frozen=True)
class Sigmoid:
    """1 / (1 + exp(-x)), elementwise."""


@dataclass(frozen=True)
class MaxPool2d:
    """Keep the largest value of each square window; ties go to the first in row order.

    Attributes:
        pool: side of the window in pixels, >= 1.
        stride: step in pixels; the side of the window if None.
        padding: `valid` (none) or `auto`: windows at the edge may reach past it, where they see nothing.
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
class Flatten:
    """(H, W, C) -> (H * W * C,), in row, column, channel order."""


@dataclass(frozen=True)
class Linear:
    """x @ weight + bias, to `features` outputs."""

    features: int
    bias: bool = True


Layer = Conv2d | ReLU | Sigmoid | MaxPool2d | AvgPool2d | Flatten | Linear
Pool2d = MaxPool2d | AvgPool2d
LAYERS: dict[str, type] = {cls.__name__: cls for cls in (Conv2d, ReLU, Sigmoid, MaxPool2d, AvgPool2d, Flatten, Linear)}
