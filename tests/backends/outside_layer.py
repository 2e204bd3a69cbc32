"""A user's own layers, a network of one of them, and their oracles: nothing in the package knows of them."""

from dataclasses import dataclass

import numpy as np
import reference
from commands import ROOT

from cnnexp.network import Conv2d, Flatten, Linear, Network, Residual, Structural
from cnnexp.system import registry


def network(monkeypatch):
    """Return a network whose every activation is the plugin's, one of them within a residual block."""
    registry.load(str(ROOT / "tests" / "outside.py"))
    swish = registry.added("layer")["Swish"](1.5)
    monkeypatch.setitem(reference.LAYERS, "swish", (forward, backward))
    block = Residual((Conv2d(3, 3, padding="same"), swish))
    return Network((5, 4, 2), (Conv2d(3, 2), swish, block, Flatten(), Linear(4), swish, Linear(3)))


def forward(x, layer):
    return x / (1 + np.exp(-layer["beta"] * x))


def backward(x, y, dy, layer):
    beta = layer["beta"]
    s = 1 / (1 + np.exp(-beta * x))
    return dy * (s + beta * x * s * (1 - s)), None, None


@dataclass(frozen=True)
class Unshuffle(Structural):
    """Blocks of pixels become channels, each divided by 1 and the sum of the block's squares."""

    block: int = 2

    def output_shape(self, input_shape):
        height, width, channels = input_shape
        return height // self.block, width // self.block, self.block**2 * channels

    def forward(self, x):
        blocks = self._blocks(x)
        return blocks / (1 + np.square(blocks).sum(-1, keepdims=True))

    def backward(self, x, y, dy):
        blocks = self._blocks(x)
        sums = 1 + np.square(blocks).sum(-1, keepdims=True)
        d = dy / sums - 2 * blocks * (dy * blocks).sum(-1, keepdims=True) / sums**2
        rows, columns = d.shape[1:3]
        return d.reshape(-1, rows, columns, self.block, self.block, x.shape[3]).swapaxes(2, 3).reshape(x.shape)

    def _blocks(self, x):
        rows, columns, channels = self.output_shape(x.shape[1:])
        parts = x.reshape(-1, rows, self.block, columns, self.block, x.shape[3]).swapaxes(2, 3)
        return parts.reshape(-1, rows, columns, channels)


ORACLE = lambda x, layer: Unshuffle().forward(x), lambda x, y, dy, layer: (Unshuffle().backward(x, y, dy), None, None)
"""What `reference.LAYERS` has to know of it; in float64, as the arrays given are."""
