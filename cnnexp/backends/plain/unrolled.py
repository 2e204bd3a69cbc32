"""`unrolled`: a convolution as one matrix product over unrolled windows, im2col (Chellapilla et al. 2006, garg)."""

import math

import numpy as np

from cnnexp.backends.plain.numpy import Numpy, NumpyOps, by_group, pad, patches, roll
from cnnexp.backends.processor import Array
from cnnexp.network import Window


class UnrolledOps(NumpyOps):
    """`NumpyOps` with its convolution unrolled: K*K times the memory of the image, for one large product."""

    def conv2d(self, x: Array, w: Array, b: Array | None, window: Window, y: Array) -> None:
        matrices = by_group(w, x.shape[3] // w.shape[2])  # (G,K*K*C/G,F/G)
        y[...] = (_columns(unroll(x, window, y.shape[1:3]), w) @ matrices).swapaxes(0, 1).reshape(y.shape)
        if b is not None:
            y += b

    def conv2d_backward(
        self, x: Array, w: Array, dy: Array, window: Window, dx: Array | None, dw: Array, db: Array | None
    ) -> None:
        columns, groups = unroll(x, window, dy.shape[1:3]), x.shape[3] // w.shape[2]
        d_groups = by_group(dy, groups)  # (G,N*P*Q,F/G)
        dw[...] = (_columns(columns, w).swapaxes(1, 2) @ d_groups).swapaxes(0, 1).reshape(dw.shape)
        if db is not None:
            dy.sum(axis=(0, 1, 2), out=db)
        if dx is not None:
            d_columns = d_groups @ by_group(w, groups).swapaxes(1, 2)  # (G,N*P*Q,K*K*C/G)
            parts = d_columns.reshape(*d_columns.shape[:2], -1, w.shape[2]).transpose(2, 1, 0, 3)
            roll(parts.reshape(-1, *dy.shape[:3], x.shape[3]), window, dy.shape[1:3], dx)


def _columns(columns: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return unrolled windows (N,P,Q,K*K,C) as matrices of each group's channels (G,N*P*Q,K*K*C/G)."""
    parts = columns.reshape(math.prod(columns.shape[:3]), columns.shape[3], -1, w.shape[2]).transpose(2, 0, 1, 3)
    return parts.reshape(*parts.shape[:2], -1)


def unroll(x: np.ndarray, window: Window, out: tuple[int, ...]) -> np.ndarray:
    """Return the windows of x (N,H,W,C) side by side, (N,P,Q,K*K,C): im2col."""
    return np.stack(list(patches(pad(x, window), window, out)), axis=3)


class Unrolled(Numpy):
    """im2col and one matrix product per convolution, on one thread."""

    name = "unrolled"
    ops = UnrolledOps
