"""`cpu`: the layers as sequential loops, compiled by Numba."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cnnexp.backends.processor import Array, HostOps, SequentialBackend, need_compiler
from cnnexp.backends.protocol import Update
from cnnexp.network import Elementwise, Window
from cnnexp.network.losses import Loss
from cnnexp.network.noise import threshold
from cnnexp.optimizers import Optimizer

if TYPE_CHECKING:
    from cnnexp.backends.cpu import kernels

NO_VECTOR = np.empty(0, np.float32)
NO_MATRIX = np.empty((0, 0), np.float32)


class CpuOps(HostOps):
    """`Ops` (see `protocol`) on NumPy arrays, by the kernels of `kernels`, each compiled when first called."""

    parallel = False

    def __init__(self) -> None:
        need_compiler()
        global kernels
        from cnnexp.backends.cpu import kernels  # brings Numba: not before something is compiled

    def to_device(self, array: np.ndarray) -> Array:
        return np.require(array, requirements=["C", "W"])

    def gather(self, images: Array, labels: Array, indices: Array, x: Array, t: Array) -> None:
        self._run(kernels.gather, _rows(images), labels, indices, _rows(x), t)

    def conv2d(self, x: Array, w: Array, b: Array | None, window: Window, y: Array) -> None:
        b = NO_VECTOR if b is None else b
        if _is_dense(x, w, window):
            self._run(kernels.conv2d, x, reversed_rows(w), b, *_corner(window), y)
        else:
            self._run(kernels.grouped_conv2d, x, w, b, window.dilation, *_corner(window), y)

    def conv2d_backward(
        self, x: Array, w: Array, dy: Array, window: Window, dx: Array | None, dw: Array, db: Array | None
    ) -> None:
        (side, _, channels, filters), blocks = w.shape, min(len(x), kernels.BLOCKS)
        d_bias = np.zeros((blocks, filters), np.float32)
        dx = np.empty((len(x), 0, 0, 0), np.float32) if dx is None else dx
        if _is_dense(x, w, window):
            d_rows = np.zeros((blocks, side, channels, side * filters), np.float32)
            self._run(kernels.conv2d_backward, x, reversed_rows(w), dy, *_corner(window), dx, d_rows, d_bias)
            dw[...] = d_rows.sum(axis=0).reshape(side, channels, side, filters).swapaxes(1, 2)[:, ::-1]
        else:
            d_weights, at = np.zeros((blocks, *w.shape), np.float32), (window.dilation, *_corner(window))
            self._run(kernels.grouped_conv2d_backward, x, w, dy, *at, dx, d_weights, d_bias)
            d_weights.sum(axis=0, out=dw)
        if db is not None:
            d_bias.sum(axis=0, out=db)

    def elementwise(self, layer: Elementwise, x: Array, y: Array) -> None:
        self._run(kernels.elementwise(layer), _rows(x), _rows(y))

    def elementwise_backward(self, layer: Elementwise, x: Array, y: Array, dy: Array, dx: Array) -> None:
        self._run(kernels.elementwise_backward(layer), _rows(x), _rows(y), _rows(dy), _rows(dx))

    def max_pool(self, x: Array, window: Window, y: Array, saved: Array) -> None:
        self._run(kernels.max_pool, x, window.size, *_corner(window), y, saved[: len(x)])

    def max_pool_backward(self, saved: Array, dy: Array, window: Window, dx: Array) -> None:
        self._run(kernels.max_pool_backward, saved[: len(dx)], dy, window.size, *_corner(window), dx)

    def avg_pool(self, x: Array, window: Window, y: Array) -> None:
        self._run(kernels.avg_pool, x, window.size, *_corner(window), y)

    def avg_pool_backward(self, dy: Array, window: Window, dx: Array) -> None:
        self._run(kernels.avg_pool_backward, dy, window.size, *_corner(window), dx)

    def add(self, a: Array, b: Array, total: Array) -> None:
        self._run(kernels.add, _rows(a), _rows(b), _rows(total))

    def dropout(self, x: Array, images: Array, key: int, rate: float, y: Array) -> None:
        self._run(kernels.dropout, _rows(x), images, key, threshold(rate), np.float32(1 / (1 - rate)), _rows(y))

    def _sum_channels(self, x: Array) -> Array:
        return self._sums(kernels.sum_channels, _pixels(x))

    def _sum_products(self, x: Array, x_mean: Array, y: Array, y_mean: Array) -> Array:
        return self._sums(kernels.sum_products, _pixels(x), x_mean, _pixels(y), y_mean)

    def _normalize(self, x: Array, mean: Array, scale: Array, shift: Array, y: Array) -> None:
        self._run(kernels.normalize, _pixels(x), mean, scale, shift, _pixels(y))

    def _normalize_backward(
        self, x: Array, dy: Array, mean: Array, scale: Array, mean_dy: Array, factor: Array, dx: Array
    ) -> None:
        self._run(kernels.normalize_backward, _pixels(x), _pixels(dy), mean, scale, mean_dy, factor, _pixels(dx))

    def _sums(self, kernel: kernels.Kernel, *arguments: np.ndarray) -> np.ndarray:
        """Return sums over pixels (C,), float64: those of blocks of them, added in order."""
        pixels, channels = arguments[0].shape
        partial = np.zeros((min(pixels, kernels.BLOCKS), channels))
        self._run(kernel, *arguments, partial)
        return partial.sum(axis=0)

    def linear(self, x: Array, w: Array, b: Array | None, y: Array) -> None:
        transposed = np.empty(w.shape[::-1], np.float32)
        self._run(kernels.linear, x, w, transposed, NO_VECTOR if b is None else b, y)

    def linear_backward(self, x: Array, w: Array, dy: Array, dx: Array | None, dw: Array, db: Array | None) -> None:
        self._run(kernels.linear_backward, x, w, dy, NO_MATRIX if dx is None else dx, dw)
        if db is not None:
            dy.sum(axis=0, out=db)

    def loss(
        self, loss: Loss, scores: Array, labels: Array, scale: float, d_scores: Array, losses: Array, hits: Array
    ) -> None:
        kernels.loss(loss, scores.shape[1]).compiled(False)(scores, labels, np.float32(scale), d_scores, losses, hits)

    def updater(self, optimizer: Optimizer) -> Update:
        compiled = kernels.compile_update(optimizer)

        def update(w: Array, g: Array, slots: tuple[Array, ...], rate: float, step: int) -> None:
            s, t = (*slots, NO_VECTOR, NO_VECTOR)[:2]
            compiled(w, g, s, t, np.float32(rate), *optimizer.constants(step))

        return update

    def _run(self, kernel: kernels.Kernel, *arguments: Any) -> None:
        kernel.compiled(self.parallel)(*arguments)


def reversed_rows(w: np.ndarray) -> np.ndarray:
    """Return w (K,K,C,F) as rows (K,C,K*F), the columns of each row reversed.

    A pixel at column s meets the output columns s - K + 1 .. s, with the weights' columns running backwards: reversed,
    a row of weights lies beside the outputs it feeds, and one contiguous loop over K*F covers them all.
    """
    return np.ascontiguousarray(w[:, ::-1].swapaxes(1, 2)).reshape(w.shape[0], w.shape[2], -1)


def _is_dense(x: np.ndarray, w: np.ndarray, window: Window) -> bool:
    """Whether every filter sees all channels, and the kernel's taps are neighbours."""
    return x.shape[3] == w.shape[2] and window.dilation == 1


def _corner(window: Window) -> tuple[int, int, int]:
    """Return (stride, top, left): where windows are; those past the other edges are seen by the arrays' shapes."""
    return window.stride, window.top, window.left


def _rows(array: np.ndarray) -> np.ndarray:
    """Return (N, ...) as (N, D), a view."""
    return array.reshape(array.shape[0], -1)


def _pixels(array: np.ndarray) -> np.ndarray:
    """Return (N,H,W,C) as (N*H*W, C), a view."""
    return array.reshape(-1, array.shape[3])


class Cpu(SequentialBackend):
    """Numba on one thread: the baseline of every speedup."""

    name = "cpu"
    ops = CpuOps
