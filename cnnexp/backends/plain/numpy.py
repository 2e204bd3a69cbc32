"""`numpy`: matrix operations, one product per kernel offset; no Numba (garg's "matrix operations")."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import threadpoolctl

from cnnexp.backends.processor import Array, HostOps, SequentialBackend
from cnnexp.backends.protocol import Update
from cnnexp.network import Elementwise, Maths, Window
from cnnexp.network.elementwise import rational_erf
from cnnexp.network.losses import Loss, compute
from cnnexp.network.noise import keeps
from cnnexp.optimizers import Optimizer

MATHS = Maths(np.exp, np.tanh, rational_erf(np.maximum), np.maximum, np.where)


class NumpyOps(HostOps):
    """`Ops` (see `protocol`) on NumPy arrays.

    A window's (row, column) offset is the outer loop: each of the K*K offsets is one strided slice of the padded
    image and one matrix product over all images and places, so the inner work is BLAS.
    """

    def gather(self, images: Array, labels: Array, indices: Array, x: Array, t: Array) -> None:
        np.take(images, indices, axis=0, out=x)
        np.take(labels, indices, out=t)

    def conv2d(self, x: Array, w: Array, b: Array | None, window: Window, y: Array) -> None:
        padded, groups = pad(x, window), x.shape[3] // w.shape[2]
        y[...] = 0 if b is None else b
        for i, j in np.ndindex(w.shape[:2]):
            patch = by_group(pixels(padded, i, j, window, y.shape[1:3]), groups)
            by_group(y, groups)[...] += patch @ by_group(w[i, j], groups)

    def conv2d_backward(
        self, x: Array, w: Array, dy: Array, window: Window, dx: Array | None, dw: Array, db: Array | None
    ) -> None:
        out, padded, groups = dy.shape[1:3], pad(x, window), x.shape[3] // w.shape[2]
        d_groups, d_padded = by_group(dy, groups), None if dx is None else np.zeros_like(padded)
        for i, j in np.ndindex(w.shape[:2]):
            patch = by_group(pixels(padded, i, j, window, out), groups)
            by_group(dw[i, j], groups)[...] = patch.swapaxes(1, 2) @ d_groups
            if d_padded is not None:
                d_patch = d_groups @ by_group(w[i, j], groups).swapaxes(1, 2)
                pixels(d_padded, i, j, window, out)[...] += d_patch.swapaxes(0, 1).reshape(*dy.shape[:3], -1)
        if db is not None:
            dy.sum(axis=(0, 1, 2), out=db)
        if dx is not None and d_padded is not None:
            dx[...] = unpad(d_padded, window, x.shape)

    def elementwise(self, layer: Elementwise, x: Array, y: Array) -> None:
        y[...] = layer.rule(MATHS)(x)

    def elementwise_backward(self, layer: Elementwise, x: Array, y: Array, dy: Array, dx: Array) -> None:
        np.multiply(dy, layer.derivative(MATHS)(x, y), out=dx)

    def max_pool(self, x: Array, window: Window, y: Array, saved: Array) -> None:
        padded, places = pad(x, window, -np.inf), saved[: len(x)]
        y[...] = -np.inf
        places[...] = 0
        for i, j in np.ndindex(window.size, window.size):
            value = pixels(padded, i, j, window, y.shape[1:3])
            larger = value > y
            np.copyto(places, i * window.size + j, where=larger)
            np.copyto(y, value, where=larger)

    def max_pool_backward(self, saved: Array, dy: Array, window: Window, dx: Array) -> None:
        d_padded, places = np.zeros_like(pad(dx, window)), saved[: len(dy)]
        for i, j in np.ndindex(window.size, window.size):
            pixels(d_padded, i, j, window, dy.shape[1:3])[...] += dy * (places == i * window.size + j)
        dx[...] = unpad(d_padded, window, dx.shape)

    def avg_pool(self, x: Array, window: Window, y: Array) -> None:
        padded = pad(x, window)
        y[...] = 0
        for i, j in np.ndindex(window.size, window.size):
            y += pixels(padded, i, j, window, y.shape[1:3])
        y /= _inside(x.shape, window, y.shape[1:3])

    def avg_pool_backward(self, dy: Array, window: Window, dx: Array) -> None:
        share = dy / _inside(dx.shape, window, dy.shape[1:3])
        d_padded = np.zeros_like(pad(dx, window))
        for i, j in np.ndindex(window.size, window.size):
            pixels(d_padded, i, j, window, dy.shape[1:3])[...] += share
        dx[...] = unpad(d_padded, window, dx.shape)

    def add(self, a: Array, b: Array, total: Array) -> None:
        np.add(a, b, out=total)

    def dropout(self, x: Array, images: Array, key: int, rate: float, y: Array) -> None:
        kept = keeps(key, rate, images, x[0].size).reshape(x.shape)
        np.multiply(x, kept * np.float32(1 / (1 - rate)), out=y)

    def linear(self, x: Array, w: Array, b: Array | None, y: Array) -> None:
        np.matmul(x, w, out=y)
        if b is not None:
            y += b

    def linear_backward(self, x: Array, w: Array, dy: Array, dx: Array | None, dw: Array, db: Array | None) -> None:
        np.matmul(x.T, dy, out=dw)
        if db is not None:
            dy.sum(axis=0, out=db)
        if dx is not None:
            np.matmul(dy, w.T, out=dx)

    def loss(
        self, loss: Loss, scores: Array, labels: Array, scale: float, d_scores: Array, losses: Array, hits: Array
    ) -> None:
        compute(loss, scores, labels, np.float32(scale), d_scores, losses, hits)

    def updater(self, optimizer: Optimizer) -> Update:
        return optimizer.apply


def pad(x: np.ndarray, window: Window, value: float = 0.0) -> np.ndarray:
    """Return x (N,H,W,C) with `value` around it, as far as windows reach."""
    if not window.padded:
        return x
    top, left, bottom, right = window.pads
    return np.pad(x, ((0, 0), (top, bottom), (left, right), (0, 0)), constant_values=value)


def unpad(padded: np.ndarray, window: Window, shape: tuple[int, ...]) -> np.ndarray:
    """Return the view of `padded` that `pad` was given, of shape (N,H,W,C)."""
    return padded[:, window.top : window.top + shape[1], window.left : window.left + shape[2]]


def pixels(padded: np.ndarray, i: int, j: int, window: Window, out: tuple[int, ...]) -> np.ndarray:
    """Return the view (N,*out,C) of the pixels at offset (i, j) of every window."""
    stride, (rows, columns) = window.stride, out
    i, j = i * window.dilation, j * window.dilation
    return padded[:, i : i + (rows - 1) * stride + 1 : stride, j : j + (columns - 1) * stride + 1 : stride]


def by_group(a: np.ndarray, groups: int) -> np.ndarray:
    """Return (...,C) by groups of channels, (groups,R,C/groups), of R places: a view of what is contiguous."""
    return a.reshape(-1, groups, a.shape[-1] // groups).swapaxes(0, 1)


def _inside(shape: tuple[int, ...], window: Window, out: tuple[int, ...]) -> np.ndarray:
    """Return how many pixels of each window lie inside the image, float32 (1,*out,1)."""
    ones = np.ones((1, shape[1], shape[2], 1), np.float32)
    padded, count = pad(ones, window), np.zeros((1, *out, 1), np.float32)
    for i, j in np.ndindex(window.size, window.size):
        count += pixels(padded, i, j, window, out)
    return count


@functools.cache
def _thread_pools() -> threadpoolctl.ThreadpoolController:
    return threadpoolctl.ThreadpoolController()


def one_blas_thread() -> AbstractContextManager[object]:
    """Return a context in which BLAS uses one thread: what a backend calls its threads are all that it uses."""
    return _thread_pools().limit(limits=1, user_api="blas")


@dataclass(frozen=True)
class Numpy(SequentialBackend):
    """Matrix operations on one thread."""

    name: ClassVar[str] = "numpy"
    ops: ClassVar[type[NumpyOps]] = NumpyOps

    def scope(self) -> AbstractContextManager[object]:
        return one_blas_thread()
