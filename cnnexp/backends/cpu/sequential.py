"""`cpu`: the layers as sequential loops, compiled by Numba."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cnnexp.backends.cpu import kernels
from cnnexp.backends.layerwise import LayerwiseProgram
from cnnexp.backends.processor import SequentialBackend
from cnnexp.backends.protocol import Update
from cnnexp.network import Network
from cnnexp.network.losses import Loss
from cnnexp.optimizers import Optimizer

LOSSES = {
    Loss.SOFTMAX_CROSS_ENTROPY: kernels.softmax_cross_entropy,
    Loss.BINARY_CROSS_ENTROPY: kernels.binary_cross_entropy,
}
NO_VECTOR = np.empty(0, np.float32)
NO_MATRIX = np.empty((0, 0), np.float32)


class CpuOps:
    """`Ops` (see `protocol`) on NumPy arrays, by the kernels of `kernels`, each compiled when first called.

    Args:
        parallel: compile the kernels for threads.
    """

    def __init__(self, parallel: bool) -> None:
        self._parallel = parallel

    def empty(self, shape, dtype):
        return np.full(shape, 0, dtype)

    def to_device(self, array):
        return np.require(array, requirements="CW")

    def to_host(self, array):
        return array.copy()

    def copy(self, source, target):
        target[...] = source

    def gather(self, images, labels, indices, x, t):
        self._run(kernels.gather, _rows(images), labels, indices, _rows(x), t)

    def conv2d(self, x, w, b, stride, pads, y):
        self._run(kernels.conv2d, x, self._reversed(w), NO_VECTOR if b is None else b, stride, *pads, y)

    def conv2d_backward(self, x, w, dy, stride, pads, dx, dw, db):
        side, _, channels, filters = w.shape
        blocks = min(len(x), kernels.BLOCKS)
        d_rows = np.zeros((blocks, side, channels, side * filters), np.float32)
        d_bias = np.zeros((blocks, filters), np.float32)
        dx = np.empty((len(x), 0, 0, 0), np.float32) if dx is None else dx
        self._run(kernels.conv2d_backward, x, self._reversed(w), dy, stride, *pads, dx, d_rows, d_bias)
        kernels.sum_blocks.compiled(False)(d_rows, d_bias, dw, NO_VECTOR if db is None else db)

    def relu(self, x, y):
        self._run(kernels.relu, _rows(x), _rows(y))

    def relu_backward(self, y, dy, dx):
        self._run(kernels.relu_backward, _rows(y), _rows(dy), _rows(dx))

    def sigmoid(self, x, y):
        self._run(kernels.sigmoid, _rows(x), _rows(y))

    def sigmoid_backward(self, y, dy, dx):
        self._run(kernels.sigmoid_backward, _rows(y), _rows(dy), _rows(dx))

    def max_pool(self, x, size, stride, pads, y, argmax):
        self._run(kernels.max_pool, x, size, stride, *pads, y, argmax)

    def max_pool_backward(self, argmax, dy, size, stride, pads, dx):
        self._run(kernels.max_pool_backward, argmax, dy, size, stride, *pads, dx)

    def avg_pool(self, x, size, stride, pads, y):
        self._run(kernels.avg_pool, x, size, stride, *pads, y)

    def avg_pool_backward(self, dy, size, stride, pads, dx):
        self._run(kernels.avg_pool_backward, dy, size, stride, *pads, dx)

    def linear(self, x, w, b, y):
        turned = np.empty(w.shape[::-1], np.float32)
        self._run(kernels.linear, x, w, turned, NO_VECTOR if b is None else b, y)

    def linear_backward(self, x, w, dy, dx, dw, db):
        self._run(kernels.linear_backward, x, w, dy, NO_MATRIX if dx is None else dx, dw)
        if db is not None:
            kernels.sum_rows.compiled(False)(dy, db)

    def loss(self, loss: Loss, scores, labels, scale, d_scores, losses, hits):
        LOSSES[loss].compiled(False)(scores, labels, np.float32(scale), d_scores, losses, hits)

    def updater(self, optimizer: Optimizer) -> Update:
        compiled = kernels.compile_update(optimizer)

        def update(w, g, slots, rate, step):
            s, t = (*slots, NO_VECTOR, NO_VECTOR)[:2]
            compiled(w, g, s, t, np.float32(rate), *optimizer.constants(step))

        return update

    def _reversed(self, w: np.ndarray) -> np.ndarray:
        """Return w (K,K,C,F) by rows (K,C,K*F), see `kernels.reverse_rows`."""
        side, _, channels, filters = w.shape
        rows = np.empty((side, channels, side * filters), np.float32)
        kernels.reverse_rows.compiled(False)(w, rows)
        return rows

    def _run(self, kernel: kernels.Kernel, *arguments) -> None:
        kernel.compiled(self._parallel)(*arguments)


def _rows(array: np.ndarray) -> np.ndarray:
    """Return (N, ...) as (N, D), a view."""
    return array.reshape(array.shape[0], -1)


@dataclass(frozen=True)
class Cpu(SequentialBackend):
    """Numba on one thread: the baseline of every speedup."""

    name: ClassVar[str] = "cpu"

    def compile(self, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int) -> LayerwiseProgram:
        return LayerwiseProgram(CpuOps(parallel=False), network, loss, optimizer, batch_size)
