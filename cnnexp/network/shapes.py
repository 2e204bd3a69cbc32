"""A network is data: an input shape and a tuple of layer specs.

Nothing here holds an array of images or runs anything. `Network` infers every shape when it is made and raises
`NetworkError` where layers do not fit, so a backend only ever sees networks that can run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from cnnexp.errors import NetworkError
from cnnexp.network.layers import LAYERS, AvgPool2d, Conv2d, Flatten, Layer, Linear, MaxPool2d, ReLU, Shape, Sigmoid

PADDINGS = ("valid", "same", "full", "auto")


@dataclass(frozen=True)
class Parameter:
    """One weight or bias: where it lies in the flat buffer and how it is initialized.

    Attributes:
        name: e.g. `conv1.weight`.
        shape: Conv2d weight (K, K, C, F), Linear weight (D, O), bias (F,) or (O,).
        offset: index of its first element in the flat buffer.
        fan_in: inputs that feed one output of the layer; bounds the initial values.
    """

    name: str
    shape: Shape
    offset: int
    fan_in: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def view(self, flat):
        """Return this parameter's part of `flat`, shaped; a view, for NumPy and device arrays alike."""
        return flat[self.offset : self.offset + self.size].reshape(self.shape)


@dataclass(frozen=True)
class Stage:
    """A layer in its place: what comes in, what goes out, what it holds.

    Attributes:
        layer: the spec.
        name: kind and ordinal, e.g. `conv1`, `relu2`, `linear1`.
        input_shape, output_shape: without the number of images.
        pads: rows above and columns left of the image that windows may reach into; what is needed below and to the
            right follows from the output shape.
        weight, bias: its parameters, or None.
    """

    layer: Layer
    name: str
    input_shape: Shape
    output_shape: Shape
    pads: tuple[int, int] = (0, 0)
    weight: Parameter | None = None
    bias: Parameter | None = None

    @property
    def macs(self) -> int:
        """Multiply-adds of one forward pass of one image."""
        if isinstance(self.layer, Conv2d):
            kernel, _, channels, _ = self.weight.shape
            return math.prod(self.output_shape) * kernel * kernel * channels
        return self.weight.size if self.weight else 0


@dataclass(frozen=True)
class Network:
    """An input shape and layers that fit it.

    Args:
        input_shape: (H, W, C) for images, (D,) for points.
        layers: the layer specs, first to last.

    Raises:
        NetworkError: a layer does not fit, with its position, the shape there and what would fit.
    """

    input_shape: Shape
    layers: tuple[Layer, ...]
    stages: tuple[Stage, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_shape", tuple(self.input_shape))
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "stages", _infer(self.input_shape, self.layers))
        if not self.parameters:
            raise NetworkError("model.layers: nothing to train; add at least one Conv2d or Linear layer")

    @property
    def output_shape(self) -> Shape:
        return self.stages[-1].output_shape

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(p for s in self.stages for p in (s.weight, s.bias) if p is not None)

    @property
    def parameter_count(self) -> int:
        return sum(p.size for p in self.parameters)

    def initial_parameters(self, seed: int) -> np.ndarray:
        """Draw the flat float32 parameters, U(-1/sqrt(fan_in), 1/sqrt(fan_in)): PyTorch's rule for these layers.

        The draw depends on the seed and the shapes alone, so it is the same on every backend.
        """
        rng = np.random.default_rng(seed)
        flat = np.empty(self.parameter_count, np.float32)
        for p in self.parameters:
            bound = 1.0 / math.sqrt(p.fan_in)
            p.view(flat)[...] = rng.uniform(-bound, bound, p.shape)
        return flat


def window_count(size: int, window: int, stride: int, padding: str | int) -> tuple[int, int] | None:
    """Return (padding before, number of windows) along one axis, or None where they give no whole number."""
    if padding == "same":
        count = math.ceil(size / stride)
        return max((count - 1) * stride + window - size, 0) // 2, count
    if padding == "auto":
        missing = max(window - size, 0) or -(size - window) % stride
        return missing // 2, (size + missing - window) // stride + 1
    before = {"valid": 0, "full": window - 1}[padding] if isinstance(padding, str) else padding
    room = size + 2 * before - window
    return None if room < 0 or room % stride else (before, room // stride + 1)


def _infer(input_shape: Shape, layers: tuple[Layer, ...]) -> tuple[Stage, ...]:
    if len(input_shape) not in (1, 3) or not all(_whole(n, 1) for n in input_shape):
        raise NetworkError(f"input shape {input_shape}: must be (height, width, channels) or (features,), each >= 1")
    if not layers:
        raise NetworkError("model.layers: empty; add at least one Conv2d or Linear layer")
    stages: list[Stage] = []
    ordinals: dict[str, int] = {}
    shape, offset = input_shape, 0
    for position, layer in enumerate(layers):
        if type(layer) not in LAYERS.values():
            raise NetworkError(f"layer {position}: {layer!r} is not a layer; legal: {', '.join(LAYERS)}")
        kind = _KINDS[type(layer)]
        ordinals[kind] = ordinals.get(kind, 0) + 1
        name = f"{kind}{ordinals[kind]}"
        stage = _stage(layer, name, f"layer {position} ({name})", shape, offset)
        offset += sum(p.size for p in (stage.weight, stage.bias) if p)
        stages.append(stage)
        shape = stage.output_shape
    return tuple(stages)


_KINDS: dict[type, str] = {
    Conv2d: "conv",
    ReLU: "relu",
    Sigmoid: "sigmoid",
    MaxPool2d: "maxpool",
    AvgPool2d: "avgpool",
    Flatten: "flatten",
    Linear: "linear",
}


def _stage(layer: Layer, name: str, where: str, shape: Shape, offset: int) -> Stage:
    match layer:
        case Conv2d(filters, kernel, stride, padding, has_bias):
            _need_image(where, shape, "Conv2d")
            _check_whole(where, filters=filters, kernel=kernel, stride=stride)
            pads, (p, q) = _slide(where, shape, kernel, stride, padding, "kernel")
            channels = shape[2]
            fan_in = kernel * kernel * channels
            weight, bias = _weights(name, (kernel, kernel, channels, filters), fan_in, offset, has_bias)
            return Stage(layer, name, shape, (p, q, filters), pads, weight, bias)
        case MaxPool2d(pool, stride, padding) | AvgPool2d(pool, stride, padding):
            _need_image(where, shape, type(layer).__name__)
            _check_whole(where, pool=pool, stride=pool if stride is None else stride)
            if padding not in ("valid", "auto"):
                raise NetworkError(f"{where}: padding={padding!r}; pooling allows 'valid' or 'auto'")
            pads, (u, v) = _slide(where, shape, pool, stride or pool, padding, "pool")
            for before, count, size in zip(pads, (u, v), shape[:2], strict=True):
                if before >= pool or (count - 1) * (stride or pool) - before >= size:
                    raise NetworkError(
                        f"{where}: padding=auto puts a window wholly outside the image, as stride {stride} is larger "
                        f"than pool {pool}; use stride <= pool, or sizes that fit with padding=valid"
                    )
            return Stage(layer, name, shape, (u, v, shape[2]), pads)
        case Flatten():
            return Stage(layer, name, shape, (math.prod(shape),))
        case Linear(features, has_bias):
            if len(shape) != 1:
                raise NetworkError(f"{where}: Linear needs a flat input but gets {shape}; put Flatten before it")
            _check_whole(where, features=features)
            weight, bias = _weights(name, (shape[0], features), shape[0], offset, has_bias)
            return Stage(layer, name, shape, (features,), (0, 0), weight, bias)
        case _:
            return Stage(layer, name, shape, shape)


def _weights(name: str, shape: Shape, fan_in: int, offset: int, has_bias: bool):
    weight = Parameter(f"{name}.weight", shape, offset, fan_in)
    bias = Parameter(f"{name}.bias", shape[-1:], offset + weight.size, fan_in) if has_bias else None
    return weight, bias


def _slide(where: str, shape: Shape, window: int, stride: int, padding: str | int, noun: str):
    if not (padding in PADDINGS if isinstance(padding, str) else _whole(padding, 0)):
        raise NetworkError(f"{where}: padding={padding!r}; legal: {', '.join(PADDINGS)}, or a whole number >= 0")
    fits = []
    for axis, size in zip(("height", "width"), shape[:2], strict=True):
        fit = window_count(size, window, stride, padding)
        if fit is None:
            before = {"valid": 0, "full": window - 1}[padding] if isinstance(padding, str) else padding
            padded = size + 2 * before
            if window > padded:
                raise NetworkError(
                    f"{where}: {noun} {window} is larger than its padded input, {axis} {padded}; "
                    f"use a {noun} of at most {padded}, or padding=auto"
                )
            raise NetworkError(
                f"{where}: {axis} ({size} + 2*{before} - {window}) / {stride} + 1 = "
                f"{(padded - window) / stride + 1:g} is not a whole number of windows; "
                f"change {noun} or stride, or use padding=auto, which pads just enough"
            )
        fits.append(fit)
    (top, p), (left, q) = fits
    return (top, left), (p, q)


def _need_image(where: str, shape: Shape, kind: str) -> None:
    if len(shape) != 3:
        raise NetworkError(f"{where}: {kind} needs an image (height, width, channels) but gets {shape}")


def _check_whole(where: str, **values: object) -> None:
    for key, value in values.items():
        if not _whole(value, 1):
            raise NetworkError(f"{where}: {key}={value!r}; must be a whole number >= 1")


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
