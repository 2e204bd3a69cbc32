"""`unrolled`: a convolution as one matrix product over unrolled windows, im2col (Chellapilla et al. 2006, garg)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cnnexp.backends.layerwise import LayerwiseProgram
from cnnexp.backends.plain.numpy import NumpyOps, one_blas_thread, pad, pixels, unpad
from cnnexp.backends.processor import Array, SequentialBackend
from cnnexp.network import Network, Window
from cnnexp.network.losses import Loss
from cnnexp.optimizers import Optimizer


class UnrolledOps(NumpyOps):
    """`NumpyOps` with its convolution unrolled: K*K times the memory of the image, for one large product."""

    def conv2d(self, x: Array, w: Array, b: Array | None, window: Window, y: Array) -> None:
        filters = w.shape[3]
        columns = unroll(x, window, y.shape[1:3])
        flat_y = y.reshape(-1, filters)
        np.matmul(columns.reshape(len(flat_y), -1), w.reshape(-1, filters), out=flat_y)
        if b is not None:
            y += b

    def conv2d_backward(
        self, x: Array, w: Array, dy: Array, window: Window, dx: Array | None, dw: Array, db: Array | None
    ) -> None:
        filters = w.shape[3]
        flat_dy = dy.reshape(-1, filters)  # (N*P*Q, F)
        columns = unroll(x, window, dy.shape[1:3])
        np.matmul(columns.reshape(len(flat_dy), -1).T, flat_dy, out=dw.reshape(-1, filters))
        if db is not None:
            flat_dy.sum(axis=0, out=db)
        if dx is not None:
            d_columns = (flat_dy @ w.reshape(-1, filters).T).reshape(columns.shape)
            roll(d_columns, window, dx)


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
class Unrolled(SequentialBackend):
    """im2col and one matrix product per convolution, on one thread."""

    name: ClassVar[str] = "unrolled"

    def compile(self, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int) -> LayerwiseProgram:
        return LayerwiseProgram(UnrolledOps(), network, loss, optimizer, batch_size, scope=one_blas_thread)
