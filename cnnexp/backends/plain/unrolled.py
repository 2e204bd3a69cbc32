"""`unrolled`: a convolution as one matrix product over unrolled windows, im2col (Chellapilla et al. 2006, garg)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cnnexp.backends.plain.numpy import Numpy, NumpyOps, by_group, pad, pixels, unpad
from cnnexp.backends.processor import Array
from cnnexp.network import Window


class UnrolledOps(NumpyOps):
    """`NumpyOps` with its convolution unrolled: K*K times the memory of the image, for one large product."""

    def conv2d(self, x: Array, w: Array, b: Array | None, window: Window, y: Array) -> None:
        y[...] = _joined(_columns(unroll(x, window, y.shape[1:3]), w) @ _matrices(w, x), y.shape)
        if b is not None:
            y += b

    def conv2d_backward(
        self, x: Array, w: Array, dy: Array, window: Window, dx: Array | None, dw: Array, db: Array | None
    ) -> None:
        columns, matrices = unroll(x, window, dy.shape[1:3]), _matrices(w, x)
        d_groups = by_group(dy, len(matrices))  # (G,N*P*Q,F/G)
        dw[...] = _joined(_columns(columns, w).swapaxes(1, 2) @ d_groups, dw.shape)
        if db is not None:
            dy.sum(axis=(0, 1, 2), out=db)
        if dx is not None:
            d_columns = d_groups @ matrices.swapaxes(1, 2)  # (G,N*P*Q,K*K*C/G)
            parts = d_columns.reshape(*d_columns.shape[:2], -1, w.shape[2]).transpose(1, 2, 0, 3)
            roll(parts.reshape(columns.shape), window, dx)


def _columns(columns: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return unrolled windows (N,P,Q,K,K,C) as matrices of each group's channels (G,N*P*Q,K*K*C/G)."""
    parts = columns.reshape(math.prod(columns.shape[:3]), w.shape[0] ** 2, -1, w.shape[2]).transpose(2, 0, 1, 3)
    return parts.reshape(*parts.shape[:2], -1)


def _matrices(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return weights (K,K,C/G,F) as matrices of each group (G,K*K*C/G,F/G)."""
    return by_group(w, x.shape[3] // w.shape[2])


def _joined(parts: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return (G,R,F/G) with the groups' filters side by side, in a shape (...,F)."""
    return parts.swapaxes(0, 1).reshape(shape)


def unroll(x: np.ndarray, window: Window, out: tuple[int, ...]) -> np.ndarray:
    """Return the windows of x (N,H,W,C) side by side, (N,P,Q,K,K,C): im2col."""
    padded = pad(x, window)
    columns = np.empty((len(x), *out, window.size, window.size, x.shape[3]), np.float32)
    for i, j in np.ndindex(window.size, window.size):
        columns[:, :, :, i, j] = pixels(padded, i, j, window, out)
    return columns


def roll(columns: np.ndarray, window: Window, x: np.ndarray) -> None:
    """Fill x (N,H,W,C) with the sums of the window elements (N,P,Q,K,K,C) that were taken from each pixel: col2im."""
    padded = np.zeros_like(pad(x, window))
    for i, j in np.ndindex(window.size, window.size):
        pixels(padded, i, j, window, columns.shape[1:3])[...] += columns[:, :, :, i, j]
    x[...] = unpad(padded, window, x.shape)


@dataclass(frozen=True)
class Unrolled(Numpy):
    """im2col and one matrix product per convolution, on one thread."""

    name: ClassVar[str] = "unrolled"
    ops: ClassVar[type[NumpyOps]] = UnrolledOps
