"""Models, whose fields are the keys of their file in `conf/model/`: the papers' networks, `custom`, ONNX files."""

import logging
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from cnnexp.errors import ConfigError, NetworkError
from cnnexp.network import layers as net
from cnnexp.network import onnx_file
from cnnexp.network.elementwise import ReLU, Sigmoid
from cnnexp.network.layers import Layer, Shape
from cnnexp.network.losses import Loss, LossName
from cnnexp.network.reader import Found, read
from cnnexp.network.shapes import Network
from cnnexp.system.ranges import check_fields, check_range, ranged
from cnnexp.system.registry import Registry

log = logging.getLogger(__name__)

Padding = Literal["valid", "same", "full", "auto"] | int


@dataclass(frozen=True)
class Model:
    """Base of the models; `conf/model/<name>.yaml` explains the fields of each.

    A whole number counts something, so it is at least 1 (`padding`: 0), or a plugin's own default that is smaller. A
    model may have the fields `loss_name` and `label_smoothing`, see `Loss`; without them it has softmax cross entropy.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            value, default = getattr(self, field.name), field.default
            for number in value if isinstance(value, tuple) else (value,):
                least = 0 if field.name == "padding" else min(1, default) if isinstance(default, int) else 1
                if isinstance(number, int) and not isinstance(number, bool) and number < least:
                    raise ConfigError(f"model.{field.name}={number}: must be a whole number >= {least}")
        check_fields(self, "model")
        check_range("model.label_smoothing", getattr(self, "label_smoothing", 0.0), ">= 0 and < 1")
        try:
            _ = self.loss
        except NetworkError as error:
            raise ConfigError(f"model.{error}") from error

    def network(self, input_shape: Shape, classes: int) -> Network:
        """Return the network of inputs (H, W, C) or (D,) and classes; raise NetworkError where layers do not fit."""
        raise NotImplementedError

    def initial_state(self, network: Network, seed: int) -> dict[str, np.ndarray]:
        """Return what a run of the model's network begins with, as `Network.initial_state` does."""
        return network.initial_state(seed)

    @property
    def loss(self) -> Loss:
        return Loss(getattr(self, "loss_name", "softmax_cross_entropy"), getattr(self, "label_smoothing", 0.0))


@dataclass(frozen=True)
class OneConv(Model):
    """Castanheira's network (section 2): one convolution, one pooling layer, one linear layer."""

    filters: int = 64
    kernel: int = 3
    pool: int = 2
    padding: Padding = "valid"

    def network(self, input_shape: Shape, classes: int) -> Network:
        return _convolutional(input_shape, self, 1, net.Linear(classes))


@dataclass(frozen=True)
class TwoConvMlp(Model):
    """Garg's network: two convolutions, one pooling layer, two linear layers; without biases as the paper counts it."""

    filters: int = 8
    kernel: int = 5
    pool: int = 2
    padding: Padding = "valid"
    hidden: int = 128
    linear_bias: bool = False

    def network(self, input_shape: Shape, classes: int) -> Network:
        head = (net.Linear(self.hidden, self.linear_bias), ReLU(), net.Linear(classes, self.linear_bias))
        return _convolutional(input_shape, self, 2, *head)


@dataclass(frozen=True)
class TwoConvPool4(Model):
    """Rendon and Sanseviero's network: two small convolutions, one wide pooling layer, two linear layers."""

    filters: int = 4
    kernel: int = 2
    pool: int = 4
    padding: Padding = "same"
    hidden: int = 128

    def network(self, input_shape: Shape, classes: int) -> Network:
        return _convolutional(input_shape, self, 2, net.Linear(self.hidden), ReLU(), net.Linear(classes))


@dataclass(frozen=True)
class Knm(Model):
    """Chavan and Kulkarni's "K-N-M-10": N kernels of K x K, M hidden neurons, e.g. 5-50-100-10 (their figure 3)."""

    kernel: int = 5
    filters: int = 50
    hidden: int = 100
    pool: int = 2
    padding: Padding = "valid"

    def network(self, input_shape: Shape, classes: int) -> Network:
        return _convolutional(input_shape, self, 1, net.Linear(self.hidden), ReLU(), net.Linear(classes))


@dataclass(frozen=True)
class Ffn(Model):
    """Khandait et al.'s feed-forward network: linear layers with ReLU between them; images are flattened first."""

    hidden: tuple[int, ...] = (30,)
    loss_name: Literal["softmax_cross_entropy", "binary_cross_entropy"] = "binary_cross_entropy"

    def network(self, input_shape: Shape, classes: int) -> Network:
        flatten = (net.Flatten(),) if len(input_shape) > 1 else ()
        body = tuple(layer for width in self.hidden for layer in (net.Linear(width), ReLU()))
        head = (net.Linear(1), Sigmoid()) if self.loss.is_binary else (net.Linear(classes),)
        return Network(input_shape, (*flatten, *body, *head))


@dataclass(frozen=True)
class Custom(Model):
    """Any list of layers; the last gives an output per class, or one for `binary_cross_entropy`, then a Sigmoid."""

    layers: tuple[Layer, ...]
    loss_name: LossName = "softmax_cross_entropy"
    label_smoothing: float = 0.0

    def network(self, input_shape: Shape, classes: int) -> Network:
        return Network(input_shape, self.layers)


@dataclass(frozen=True)
class Onnx(Model):
    """A network from an ONNX file, of the layers that there are; `pretrained` begins with the file's weights."""

    path: str
    pretrained: bool = False
    loss_name: LossName = "softmax_cross_entropy"
    label_smoothing: float = 0.0

    def network(self, input_shape: Shape, classes: int) -> Network:
        found = self._read(input_shape)
        if found.dropped:
            log.info("model.path=%r: left out: %s", self.path, "; ".join(found.dropped))
        return Network(input_shape, found.layers)

    def initial_state(self, network: Network, seed: int) -> dict[str, np.ndarray]:
        return self._read(network.input_shape).state(network, seed) if self.pretrained else network.initial_state(seed)

    def _read(self, input_shape: Shape) -> Found:
        return read(onnx_file.load(self.path), input_shape)


@dataclass(frozen=True)
class ResNet(Model):
    """The residual network of He et al. (2016, section 4.2) for small images.

    A convolution, then three groups of `blocks` residual blocks of two convolutions each, then the mean of every
    channel and a linear layer: 6 * blocks + 2 layers with weights.
    """

    blocks: int = 1
    width: int = 16
    downsample: Literal["shortcut", "convolution"] = "shortcut"
    dropout: float = ranged(0.0, ">= 0 and < 1")
    label_smoothing: float = 0.0

    def network(self, input_shape: Shape, classes: int) -> Network:
        layers: list[Layer] = [*_normalized(self.width), ReLU()]
        for group in range(3):
            width, blocks = self.width * 2**group, self.blocks
            if group and self.downsample == "convolution":
                layers += [*_normalized(width, stride=2), ReLU()]
            elif group:
                halving = net.Conv2d(width, 3, 2, "floor+1", bias=False), net.BatchNorm2d()
                layers += [net.Residual((*halving, ReLU(), *_normalized(width)), "padded"), ReLU()]
                blocks -= 1
            block = net.Residual((*_normalized(width), ReLU(), *_normalized(width)))
            layers += [block, ReLU()] * blocks
        drop = (net.Dropout(self.dropout),) if self.dropout else ()
        return Network(input_shape, (*layers, net.GlobalAvgPool(), *drop, net.Linear(classes)))


@dataclass(frozen=True)
class MobileNet(Model):
    """A MobileNet (Howard et al. 2017) for small images: depthwise separable convolutions.

    A convolution, then three groups of `blocks` separable ones, each a depthwise 3 x 3 and a 1 x 1 convolution with
    batch normalization and ReLU after both, the mean of every channel, a linear layer. Groups 2 and 3 halve the image.
    """

    blocks: int = 2
    width: int = 16
    label_smoothing: float = 0.0

    def network(self, input_shape: Shape, classes: int) -> Network:
        layers, channels = [*_normalized(self.width), ReLU()], self.width
        for group in range(3):
            for block in range(self.blocks):
                stride, padding = (2, "floor+1") if group and not block else (1, "same")
                depthwise = net.Conv2d(channels, 3, stride, padding, bias=False, groups=channels)
                channels = self.width * 2 ** (group + 1)
                pointwise = net.Conv2d(channels, 1, bias=False)
                layers += [depthwise, net.BatchNorm2d(), ReLU(), pointwise, net.BatchNorm2d(), ReLU()]
        return Network(input_shape, (*layers, net.GlobalAvgPool(), net.Linear(classes)))


_KINDS: dict[str, type[Model]] = {
    **{"one_conv": OneConv, "two_conv_mlp": TwoConvMlp, "two_conv_pool4": TwoConvPool4, "knm": Knm, "ffn": Ffn},
    **{"resnet": ResNet, "mobilenet": MobileNet, "custom": Custom, "onnx": Onnx},
}
MODELS: Registry[Model] = Registry("model", _KINDS)


def _convolutional(
    input_shape: Shape, model: OneConv | TwoConvMlp | TwoConvPool4 | Knm, convolutions: int, *head: Layer
) -> Network:
    """Return as many convolutions, each with a ReLU, a pooling layer, and a head on the flat outcome."""
    conv = net.Conv2d(model.filters, model.kernel, padding=model.padding)
    pool = net.MaxPool2d(model.pool, padding="auto" if model.padding == "auto" else "valid")
    return Network(input_shape, (*(conv, ReLU()) * convolutions, pool, net.Flatten(), *head))


def _normalized(filters: int, stride: int = 1) -> tuple[Layer, ...]:
    """A convolution without bias, which the shift after it would undo, and a batch normalization."""
    return net.Conv2d(filters, 3, stride, "same", bias=False), net.BatchNorm2d()
