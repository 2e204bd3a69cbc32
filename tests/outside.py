"""A plugin as a user would write it, one of each kind: nothing in the package knows of it."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cnnexp import Dataset, Flatten, Linear, Network, Split, register
from cnnexp.backends.layerwise import LayerwiseProgram
from cnnexp.backends.plain.numpy import NumpyOps
from cnnexp.backends.processor import SequentialBackend
from cnnexp.datasets import Source
from cnnexp.network import Elementwise
from cnnexp.network.models import Model
from cnnexp.optimizers import Optimizer


@register("optimizer", "sign")
@dataclass(frozen=True)
class Sign(Optimizer):
    """Step by the sign of the gradient (Bernstein et al. 2018)."""

    lr: float = 0.001

    def rule(self, sqrt=np.sqrt, maximum=np.maximum):
        zero, least, decay = np.float32(0), np.float32(1e-12), np.float32(self.weight_decay)

        def rule(w, g, s, t, rate, c0, c1):
            g = g + decay * w
            return w - rate * g / maximum(maximum(g, zero - g), least), s, t

        return rule


@register("layer", "Swish")
@dataclass(frozen=True)
class Swish(Elementwise):
    """x * sigmoid(beta * x) (Ramachandran et al. 2017)."""

    beta: float = 1.0

    def rule(self, maths):
        exp, beta, one = maths.exp, np.float32(self.beta), np.float32(1)

        def swish(x):
            return x / (one + exp(-beta * x))

        return swish

    def derivative(self, maths):
        exp, beta, one = maths.exp, np.float32(self.beta), np.float32(1)

        def swish_derivative(x, y):
            s = one / (one + exp(-beta * x))
            return s + beta * x * s * (one - s)

        return swish_derivative


@register("model", "wide")
@dataclass(frozen=True)
class Wide(Model):
    """One hidden layer, of units of the plugin's own."""

    hidden: int = 24

    def network(self, input_shape, classes):
        return Network(input_shape, (Flatten(), Linear(self.hidden), Swish(1.5), Linear(classes)))


@register("dataset", "stripes")
@dataclass(frozen=True)
class Stripes(Source):
    """Upright or lying stripes."""

    name: ClassVar[str] = "stripes"
    side: int = 6

    def load(self) -> Dataset:
        images = np.zeros((60, self.side, self.side, 1), np.uint8)
        images[::2, ::2], images[1::2, :, ::2] = 255, 255
        labels = np.arange(60, dtype=np.int32) % 2
        train, test = Split(images[:40], labels[:40]), Split(images[40:], labels[40:])
        return Dataset(self.name, train, test, None, ("lying", "upright"), source="made here", sha256="0" * 64)


@register("backend", "mine")
@dataclass(frozen=True)
class Mine(SequentialBackend):
    """NumPy's, under a name of its own."""

    name: ClassVar[str] = "mine"

    def compile(self, network, loss, optimizer, batch_size):
        return LayerwiseProgram(NumpyOps(), network, loss, optimizer, batch_size)
