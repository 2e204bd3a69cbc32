"""A network is data: an input shape and a tuple of layer specs.

Nothing here holds an array of images or runs anything. `Network` infers every shape when it is made and raises
`NetworkError` where layers do not fit, so a backend only ever sees networks that can run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, assert_never, cast

import numpy as np

from cnnexp.errors import NetworkError
from cnnexp.network import layers as net
from cnnexp.network.elementwise import Elementwise
from cnnexp.network.layers import LAYERS, Layer, Pool, Shape
from cnnexp.system.ranges import FLOAT32, in_float32

PADDINGS = ("valid", "same", "full", "auto", "floor")
POOL_PADDINGS = ("valid", "auto", "floor")
L = TypeVar("L", bound=Layer)


@dataclass(frozen=True)
class Parameter:
    """One weight or bias: where it lies in the flat buffer and how it is initialized."""

    name: str  # e.g. `conv1.weight`
    shape: Shape  # Conv2d weight (K, K, C, F), Linear weight (D, O), bias (F,) or (O,)
    offset: int  # index of its first element in the flat buffer
    fan_in: int  # inputs that feed one output of the layer; bounds the initial values
    start: float | None = None  # the initial value of all its elements; None where they are drawn

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def view(self, flat: Any) -> Any:
        """Return this parameter's part of `flat`, shaped; a view, for NumPy and device arrays alike."""
        return flat[self.offset : self.offset + self.size].reshape(self.shape)


@dataclass(frozen=True)
class Window:
    """How square windows slide over an image, all worked out, in pixels: no backend does it again."""

    size: int  # of a side
    stride: int
    top: int = 0  # rows, and on the other sides columns, outside the image that windows reach into, >= 0
    left: int = 0
    bottom: int = 0
    right: int = 0
    dilation: int = 1  # step within a window, of `size` taps then

    @property
    def pads(self) -> tuple[int, int, int, int]:
        """(top, left, bottom, right)."""
        return self.top, self.left, self.bottom, self.right

    @property
    def padded(self) -> bool:
        """Whether any window reaches outside the image."""
        return any(self.pads)


@dataclass(frozen=True)
class Placed(Generic[L]):
    """A layer in its place: what comes in, what goes out, what it holds."""

    layer: L
    name: str  # kind and ordinal, e.g. `conv1`, `relu2`, and `residual1.conv1` of a layer inside another
    input_shape: Shape  # without the number of images
    output_shape: Shape
    weight: Parameter | None = None  # a BatchNorm2d's scale
    bias: Parameter | None = None  # a BatchNorm2d's shift
    running: tuple[Parameter, ...] = ()  # a BatchNorm2d's mean and variance, in the flat buffer of running averages
    stages: tuple[Stage, ...] = ()  # of the layers that it holds, first to last

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, {_by(self.input_shape)} to {_by(self.output_shape)})"

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Its own and those of the layers that it holds, in their order in the flat buffer."""
        own = tuple(p for p in (self.weight, self.bias) if p is not None)
        return own + tuple(p for stage in self.stages for p in stage.parameters)

    @property
    def macs(self) -> int:
        """Multiply-adds of one forward pass of one image."""
        return sum(stage.macs for stage in self.stages)

    def multiply_adds(self, what: str, needs_dx: bool = True) -> int:
        """Return those of one image's pass, `forward` or `backward`, that computes every output; see `macs`."""
        return self.macs * (2 if what == "backward" and needs_dx else 1)


@dataclass(frozen=True, repr=False)
class ConvStage(Placed[net.Conv2d]):
    """A Conv2d in its place, with how its kernel slides over the image."""

    window: Window = field(kw_only=True)
    weight: Parameter = field(kw_only=True)

    @property
    def dense(self) -> bool:
        """Whether every filter sees all channels, and the kernel's taps are neighbours."""
        return self.layer.groups == self.layer.dilation == 1

    @property
    def macs(self) -> int:
        return math.prod(self.output_shape[:2]) * self.weight.size


@dataclass(frozen=True, repr=False)
class PoolStage(Placed[Pool]):
    """A pooling layer in its place, with its windows; a GlobalAvgPool's one holds the image."""

    window: Window = field(kw_only=True)


@dataclass(frozen=True, repr=False)
class LinearStage(Placed[net.Linear]):
    """A Linear in its place."""

    weight: Parameter = field(kw_only=True)

    @property
    def macs(self) -> int:
        return self.weight.size


@dataclass(frozen=True, repr=False)
class NormStage(Placed[net.BatchNorm2d]):
    """A BatchNorm2d in its place."""

    weight: Parameter = field(kw_only=True)
    bias: Parameter = field(kw_only=True)


class ElementwiseStage(Placed[Elementwise]):
    """An elementwise layer in its place."""


class DropoutStage(Placed[net.Dropout]):
    """A Dropout in its place."""


class FlattenStage(Placed[net.Flatten]):
    """A Flatten in its place."""


@dataclass(frozen=True, repr=False)
class ResidualStage(Placed[net.Residual]):
    """A Residual in its place, with the windows of one pixel that its shortcut takes, None where it takes all."""

    window: Window | None = None


class StructuralStage(Placed[net.Structural]):
    """A plugin's structural layer in its place."""


_Plain = ElementwiseStage | DropoutStage | FlattenStage | StructuralStage
Stage = ConvStage | PoolStage | LinearStage | NormStage | ResidualStage | _Plain
"""A layer in its place. Who matches on stages matches on all of these: mypy holds it by `assert_never`."""


def walk(stages: Iterable[Stage]) -> Iterator[Stage]:
    """Yield the stages and those inside them, each after what it holds."""
    for stage in stages:
        yield from walk(stage.stages)
        yield stage


@dataclass(frozen=True)
class Network:
    """An input shape, (H, W, C) for images, (D,) for points, and layers that fit it, first to last.

    Raises:
        NetworkError: a layer does not fit, with its position, the shape there and what would fit.
    """

    input_shape: Shape
    layers: tuple[Layer, ...]
    stages: tuple[Stage, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_shape", tuple(self.input_shape))
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "stages", infer_stages(self.input_shape, self.layers))
        if not self.parameters:
            raise NetworkError("model.layers: nothing to train; add at least one Conv2d or Linear layer")

    @property
    def output_shape(self) -> Shape:
        return self.stages[-1].output_shape

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(p for stage in self.stages for p in stage.parameters)

    @property
    def parameter_count(self) -> int:
        return sum(p.size for p in self.parameters)

    @property
    def running(self) -> tuple[Parameter, ...]:
        """The running averages of its layers, e.g. `batchnorm1.mean`, in their order in a flat buffer of their own."""
        return tuple(average for stage in walk(self.stages) for average in stage.running)

    @property
    def running_count(self) -> int:
        return sum(average.size for average in self.running)

    def summary(self) -> str:
        """Return a table of the layers: name, output shape, parameters and multiply-adds for one image."""
        rows = [("layer", "output", "parameters", "multiply-adds"), ("input", _by(self.input_shape), "", "")]
        for stage in self.stages:
            counts = sum(p.size for p in stage.parameters), stage.macs
            size, macs = (f"{count:,}" if count else "" for count in counts)
            rows.append((stage.name, _by(stage.output_shape), size, macs))
        rows.append(("all", "", f"{self.parameter_count:,}", f"{sum(stage.macs for stage in self.stages):,}"))
        return "\n".join(f"{name:<16}{shape:<16}{size:>12}{macs:>16}".rstrip() for name, shape, size, macs in rows)

    def __repr__(self) -> str:
        ends = f"{_by(self.input_shape)} to {_by(self.output_shape)}"
        return f"Network({ends}, {len(self.layers)} layers, {self.parameter_count:,} parameters)"

    @property
    def draws(self) -> bool:
        """Whether a training step draws random numbers."""
        return any(isinstance(stage.layer, net.Dropout) for stage in walk(self.stages))

    def initial_state(self, seed: int) -> dict[str, np.ndarray]:
        """Return what a run begins with, as `Program.restore` takes it.

        `parameters`; `running`, where layers keep running averages; `seed`, where a step draws random numbers.
        """
        return {"parameters": self.initial_parameters(seed), **self.initial_rest(seed)}

    def initial_rest(self, seed: int) -> dict[str, np.ndarray]:
        """Return `initial_state` without the parameters; running averages (flat float32) are means 0, variances 1."""
        rest = {}
        if self.running:
            rest["running"] = np.concatenate([np.full(p.size, p.start, np.float32) for p in self.running])
        if self.draws:
            rest["seed"] = np.asarray(seed, np.int64)
        return rest

    def initial_parameters(self, seed: int) -> np.ndarray:
        """Draw the flat float32 parameters, U(-1/sqrt(fan_in), 1/sqrt(fan_in)): PyTorch's rule for these layers.

        Scales of a BatchNorm2d are 1 and shifts 0. Seed and shapes alone decide, so every backend begins with the same.
        """
        rng = np.random.default_rng(seed)
        flat = np.empty(self.parameter_count, np.float32)
        for p in self.parameters:
            bound = 1.0 / math.sqrt(p.fan_in)
            p.view(flat)[...] = rng.uniform(-bound, bound, p.shape) if p.start is None else p.start
        return flat


def window_count(size: int, window: int, stride: int, padding: str | int) -> tuple[int, int] | None:
    """Return (padding before, number of windows) along one axis, or None where they give no whole number."""
    if padding == "same":
        count = math.ceil(size / stride)
        return max((count - 1) * stride + window - size, 0) // 2, count
    if padding == "auto":
        missing = max(window - size, 0) or -(size - window) % stride
        return missing // 2, (size + missing - window) // stride + 1
    before = _before(window, padding)
    room = size + 2 * before - window
    if room < 0 or (room % stride and not _floors(padding)):
        return None
    return before, room // stride + 1


def _by(shape: Shape) -> str:
    return " x ".join(map(str, shape))


def _before(window: int, padding: str | int) -> int:
    if _floors(padding):
        return int(str(padding)[len("floor+") :] or 0)
    return {"valid": 0, "full": window - 1}[padding] if isinstance(padding, str) else padding


def _floors(padding: object) -> bool:
    """Whether it is `floor`, or `floor+2` with a number of pixels."""
    return isinstance(padding, str) and re.fullmatch(r"floor(\+[0-9]{1,6})?", padding) is not None


def infer_stages(input_shape: Shape, layers: tuple[Layer, ...]) -> tuple[Stage, ...]:
    """Return layers in their places; raise NetworkError where they do not fit."""
    if len(input_shape) not in (1, 3) or not all(_whole(n, 1) for n in input_shape):
        raise NetworkError(f"input shape {input_shape}: must be (height, width, channels) or (features,), each >= 1")
    if not layers:
        raise NetworkError("model.layers: empty; add at least one Conv2d or Linear layer")
    return _Builder().stages(layers, input_shape)


class _Builder:
    """Puts layers in their places, giving out the room in the flat buffer as it goes."""

    def __init__(self) -> None:
        self._taken = {"parameters": 0, "running": 0}  # of the flat buffers

    def stages(self, layers: tuple[Layer, ...], shape: Shape, place: str = "", prefix: str = "") -> tuple[Stage, ...]:
        """Return the stages of layers on an input; `place` and `prefix` say which layer holds them."""
        stages: list[Stage] = []
        ordinals: dict[str, int] = {}
        for i, layer in enumerate(layers):
            here = f"{place}{i}"
            if not isinstance(layer, Layer):
                raise NetworkError(f"layer {here}: {layer!r} is not a layer; legal: {', '.join(LAYERS)}")
            kind = type(layer).__name__.lower().removesuffix("2d")
            ordinals[kind] = ordinals.get(kind, 0) + 1
            name = f"{prefix}{kind}{ordinals[kind]}"
            stages.append(self._stage(layer, name, here, shape))
            shape = stages[-1].output_shape
        return tuple(stages)

    def _stage(self, layer: Layer, name: str, position: str, shape: Shape) -> Stage:
        where = f"layer {position} ({name})"
        if len(shape) != 3 and isinstance(layer, net.Conv2d | Pool | net.BatchNorm2d):
            kind = type(layer).__name__
            raise NetworkError(f"{where}: {kind} needs an image (height, width, channels) but gets {shape}")
        match layer:
            case net.Conv2d(filters, kernel, stride, padding, has_bias, groups, dilation):
                _check_whole(where, filters=filters, kernel=kernel, stride=stride, groups=groups, dilation=dilation)
                if shape[2] % groups or filters % groups:
                    must = f"must divide the {shape[2]} channels and the {filters} filters"
                    raise NetworkError(f"{where}: groups={groups}; {must}")
                window, (p, q) = _slide(where, shape, dilation * (kernel - 1) + 1, stride, padding, "kernel")
                window, seen = replace(window, size=kernel, dilation=dilation), shape[2] // groups
                weights = self._weights(name, (kernel, kernel, seen, filters), kernel * kernel * seen, has_bias)
                return ConvStage(layer, name, shape, (p, q, filters), window=window, **weights)
            case net.MaxPool2d(pool, stride, padding) | net.AvgPool2d(pool, stride, padding):
                step = pool if stride is None else stride
                _check_whole(where, pool=pool, stride=step)
                window, (u, v) = _slide_pool(where, shape, pool, step, padding)
                return PoolStage(layer, name, shape, (u, v, shape[2]), window=window)
            case net.GlobalAvgPool():
                height, width, channels = shape
                side = max(height, width)  # one window over all: what lies outside the image does not count
                window = Window(side, 1, 0, 0, side - height, side - width)
                return PoolStage(layer, name, shape, (channels,), window=window)
            case net.Flatten():
                return FlattenStage(layer, name, shape, (math.prod(shape),))
            case net.Linear(features, has_bias):
                if len(shape) != 1:
                    raise NetworkError(f"{where}: Linear needs a flat input but gets {shape}; put Flatten before it")
                _check_whole(where, features=features)
                weights = self._weights(name, (shape[0], features), shape[0], has_bias)
                return LinearStage(layer, name, shape, (features,), **weights)
            case Elementwise():
                return ElementwiseStage(layer, name, shape, shape)
            case net.Dropout(rate):
                _check_number(where, "rate", rate, 0 <= rate < 1, ">= 0 and < 1")
                return DropoutStage(layer, name, shape, shape)
            case net.BatchNorm2d(momentum, epsilon):
                _check_number(where, "momentum", momentum, 0 < momentum <= 1, "> 0 and <= 1")
                _check_number(where, "epsilon", epsilon, 0 < epsilon < math.inf, "> 0")
                by_channel = shape[2:]
                scale = self._take(f"{name}.weight", by_channel, start=1.0)
                shift = self._take(f"{name}.bias", by_channel, start=0.0)
                mean = self._take(f"{name}.mean", by_channel, start=0.0, buffer="running")
                variance = self._take(f"{name}.variance", by_channel, start=1.0, buffer="running")
                return NormStage(layer, name, shape, shape, weight=scale, bias=shift, running=(mean, variance))
            case net.Residual(layers, shortcut):
                if not layers:
                    raise NetworkError(f"{where}: Residual holds no layers; give it at least one")
                inner = self.stages(layers, shape, f"{position}.", f"{name}.")
                made = inner[-1].output_shape
                return ResidualStage(layer, name, shape, made, stages=inner, window=_skip(where, shortcut, shape, made))
            case net.Structural():
                return StructuralStage(layer, name, shape, _given_shape(where, layer, shape))
            case _:
                assert_never(layer)

    def _weights(self, name: str, shape: Shape, fan_in: int, has_bias: bool) -> dict[str, Any]:
        weight = self._take(f"{name}.weight", shape, fan_in)
        return {"weight": weight, "bias": self._take(f"{name}.bias", shape[-1:], fan_in) if has_bias else None}

    def _take(
        self, name: str, shape: Shape, fan_in: int = 1, start: float | None = None, buffer: str = "parameters"
    ) -> Parameter:
        parameter = Parameter(name, shape, self._taken[buffer], fan_in, start)
        self._taken[buffer] += parameter.size
        return parameter


def _slide_pool(where: str, shape: Shape, pool: int, stride: int, padding: str | int) -> tuple[Window, Shape]:
    if padding not in POOL_PADDINGS and not _floors(padding):
        raise NetworkError(f"{where}: padding={padding!r}; pooling allows 'valid', 'auto', 'floor' or 'floor+PIXELS'")
    window, counts = _slide(where, shape, pool, stride, padding, "pool")
    for before, count, size in zip((window.top, window.left), counts, shape[:2], strict=True):
        if before >= pool or (count - 1) * stride - before >= size:
            why = f"padding={padding} puts a window of pool={pool}, stride={stride} wholly outside the image"
            raise NetworkError(f"{where}: {why}; use stride <= pool and less padding, or padding=valid")
    return window, counts


def _slide(where: str, shape: Shape, window: int, stride: int, padding: str | int, noun: str) -> tuple[Window, Shape]:
    """Return how windows slide over an image, and how many there are down and across."""
    if not (padding in PADDINGS or _floors(padding) if isinstance(padding, str) else _whole(padding, 0)):
        legal = f"{', '.join(PADDINGS)}, floor+PIXELS"
        raise NetworkError(f"{where}: padding={padding!r}; legal: {legal}, or a whole number >= 0")
    fits = []
    for axis, size in zip(("height", "width"), shape[:2], strict=True):
        if (fit := window_count(size, window, stride, padding)) is None:
            before = _before(window, padding)
            padded = size + 2 * before
            if window > padded:
                larger = f"{noun} {window} is larger than its padded input, {axis} {padded}"
                raise NetworkError(f"{where}: {larger}; use a {noun} of at most {padded}, or padding=auto")
            quotient = f"({size} + 2*{before} - {window}) / {stride} + 1 = {(padded - window) / stride + 1:g}"
            instead = "padding=auto, which pads just enough, or padding=floor, which leaves the rest out"
            why = f"{axis} {quotient} is not a whole number of windows; change {noun} or stride, or use {instead}"
            raise NetworkError(f"{where}: {why}")
        before, count = fit
        fits.append((before, count, max((count - 1) * stride + window - before - size, 0)))
    befores, counts, afters = zip(*fits, strict=True)
    return Window(window, stride, *befores, *afters), counts


def _given_shape(where: str, layer: net.Structural, shape: Shape) -> Shape:
    given = layer.output_shape(shape)
    if not (isinstance(given, tuple) and len(given) in (1, 3) and all(_whole(n, 1) for n in given)):
        raise NetworkError(f"{where}: output_shape({shape}) gives {given!r}; must be (H, W, C) or (D,), each >= 1")
    return given


def _skip(where: str, shortcut: str, shape: Shape, made: Shape) -> Window | None:
    """Return the windows of a Residual's shortcut, from an input of a shape to what its layers make of it."""
    if shortcut == "identity" and made == shape:
        return None
    if shortcut == "padded" and len(shape) == len(made) == 3 and made[2] >= shape[2]:
        stride = max(-(-size // count) for size, count in zip(shape[:2], made[:2], strict=True))
        if all(-(-size // stride) == count for size, count in zip(shape[:2], made[:2], strict=True)):
            return Window(1, stride)
    legal = {
        "identity": "they must give back the shape they take, or shortcut=padded have it fitted",
        "padded": "for shortcut=padded they must give every n-th of its rows and columns, and no fewer channels",
    }
    if shortcut not in legal:
        raise NetworkError(f"{where}: shortcut={shortcut!r}; legal: {', '.join(legal)}")
    fits = legal[shortcut]
    raise NetworkError(f"{where}: Residual adds its input, {shape}, to what its layers make of it, {made}; {fits}")


def _check_whole(where: str, **values: object) -> None:
    for key, value in values.items():
        if not _whole(value, 1):
            raise NetworkError(f"{where}: {key}={value!r}; must be a whole number >= 1")


def _check_number(where: str, key: str, value: object, legal: bool, description: str) -> None:
    if isinstance(value, bool) or not legal:
        raise NetworkError(f"{where}: {key}={value!r}; must be {description}")
    if not in_float32(cast(float, value)):
        raise NetworkError(f"{where}: {key}={value!r}; must be {FLOAT32}")


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
