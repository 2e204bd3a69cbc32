"""`numpy`: matrix operations, one product per kernel offset; no Numba (garg's "matrix operations")."""

import functools
import itertools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

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
        groups = x.shape[3] // w.shape[2]
        y[...] = 0 if b is None else b
        for at, patch in zip(np.ndindex(w.shape[:2]), patches(pad(x, window), window, y.shape[1:3]), strict=True):
            by_group(y, groups)[...] += by_group(patch, groups) @ by_group(w[at], groups)

    def conv2d_backward(
        self, x: Array, w: Array, dy: Array, window: Window, dx: Array | None, dw: Array, db: Array | None
    ) -> None:
        groups = x.shape[3] // w.shape[2]
        d_groups = by_group(dy, groups)
        for at, patch in zip(np.ndindex(w.shape[:2]), patches(pad(x, window), window, dy.shape[1:3]), strict=True):
            by_group(dw[at], groups)[...] = by_group(patch, groups).swapaxes(1, 2) @ d_groups
        if db is not None:
            dy.sum(axis=(0, 1, 2), out=db)
        if dx is not None:
            d_patches = (d_groups @ by_group(w[at], groups).swapaxes(1, 2) for at in np.ndindex(w.shape[:2]))
            roll((part.swapaxes(0, 1).reshape(*dy.shape[:3], -1) for part in d_patches), window, dy.shape[1:3], dx)

    def elementwise(self, layer: Elementwise, x: Array, y: Array) -> None:
        y[...] = layer.rule(MATHS)(x)

    def elementwise_backward(self, layer: Elementwise, x: Array, y: Array, dy: Array, dx: Array) -> None:
        np.multiply(dy, layer.derivative(MATHS)(x, y), out=dx)

    def max_pool(self, x: Array, window: Window, y: Array, saved: Array) -> None:
        places = saved[: len(x)]
        y[...] = -np.inf
        places[...] = 0
        for place, value in enumerate(patches(pad(x, window, -np.inf), window, y.shape[1:3])):
            larger = value > y
            np.copyto(places, place, where=larger)
            np.copyto(y, value, where=larger)

    def max_pool_backward(self, saved: Array, dy: Array, window: Window, dx: Array) -> None:
        parts = (dy * (saved[: len(dy)] == place) for place in range(window.size**2))
        roll(parts, window, dy.shape[1:3], dx)

    def avg_pool(self, x: Array, window: Window, y: Array) -> None:
        if _is_whole(x, window):
            x.mean(axis=(1, 2), keepdims=True, out=y)
            return
        y[...] = 0
        for patch in patches(pad(x, window), window, y.shape[1:3]):
            y += patch
        y /= _inside(x.shape, window, y.shape[1:3])

    def avg_pool_backward(self, dy: Array, window: Window, dx: Array) -> None:
        if _is_whole(dx, window):
            dx[...] = dy / np.float32(dx.shape[1] * dx.shape[2])
            return
        share = dy / _inside(dx.shape, window, dy.shape[1:3])
        roll([share] * window.size**2, window, dy.shape[1:3], dx)

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


def patches(padded: np.ndarray, window: Window, out: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Yield the view (N,*out,C) of the pixels at each offset (i, j) of every window, row by row."""
    stride, (rows, columns) = window.stride, out
    for i, j in itertools.product(range(0, window.size * window.dilation, window.dilation), repeat=2):
        yield padded[:, i : i + (rows - 1) * stride + 1 : stride, j : j + (columns - 1) * stride + 1 : stride]


def roll(parts: Iterable[np.ndarray], window: Window, out: tuple[int, ...], x: np.ndarray) -> None:
    """Fill x (N,H,W,C) with the sums of the parts (N,*out,C) of each offset that go to a pixel: col2im."""
    (images, height, width, channels), (top, left, bottom, right) = x.shape, window.pads
    padded = np.zeros((images, top + height + bottom, left + width + right, channels), np.float32)
    for patch, part in zip(patches(padded, window, out), parts, strict=True):
        patch += part
    x[...] = padded[:, top : top + height, left : left + width]


def by_group(a: np.ndarray, groups: int) -> np.ndarray:
    """Return (...,C) by groups of channels, (groups,R,C/groups), of R places: a view of what is contiguous."""
    return a.reshape(-1, groups, a.shape[-1] // groups).swapaxes(0, 1)


def _is_whole(x: np.ndarray, window: Window) -> bool:
    """Return whether the one window is the image: of a long one, what a square reaches beside it is most of it."""
    return not window.top and not window.left and window.size >= max(x.shape[1:3])


def _inside(shape: tuple[int, ...], window: Window, out: tuple[int, ...]) -> np.ndarray:
    """Return how many pixels of each window lie inside the image, float32 (1,*out,1)."""
    ones = np.ones((1, shape[1], shape[2], 1), np.float32)
    return np.sum(list(patches(pad(ones, window), window, out)), axis=0)


_thread_pools = functools.cache(threadpoolctl.ThreadpoolController)


def one_blas_thread() -> AbstractContextManager[object]:
    """Return a context in which BLAS uses one thread: what a backend calls its threads are all that it uses."""
    return _thread_pools().limit(limits=1, user_api="blas")


class Numpy(SequentialBackend):
    """Matrix operations on one thread."""

    name = "numpy"
    ops = NumpyOps

    def scope(self) -> AbstractContextManager[object]:
        return one_blas_thread()
