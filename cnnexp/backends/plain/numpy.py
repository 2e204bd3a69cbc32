"""`numpy`: matrix operations, one product per kernel offset; no Numba (garg's "matrix operations")."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import threadpoolctl

from cnnexp.backends.layerwise import LayerwiseProgram
from cnnexp.backends.processor import SequentialBackend
from cnnexp.backends.protocol import Update
from cnnexp.network import Network
from cnnexp.network.losses import FUNCTIONS, Loss
from cnnexp.optimizers import Optimizer


class NumpyOps:
    """`Ops` (see `protocol`) on NumPy arrays.

    A window's (row, column) offset is the outer loop: each of the K*K offsets is one strided slice of the padded
    image and one matrix product over all images and places, so the inner work is BLAS.
    """

    def empty(self, shape, dtype):
        return np.full(shape, 0, dtype)

    def to_device(self, array):
        return array

    def to_host(self, array):
        return array.copy()

    def copy(self, source, target):
        target[...] = source

    def gather(self, images, labels, indices, x, t):
        np.take(images, indices, axis=0, out=x)
        np.take(labels, indices, out=t)

    def conv2d(self, x, w, b, stride, pads, y):
        kernel = w.shape[0]
        padded = pad(x, kernel, stride, pads, y.shape[1:3])
        y[...] = 0 if b is None else b
        for i in range(kernel):
            for j in range(kernel):
                y += window(padded, i, j, stride, y.shape[1:3]) @ w[i, j]

    def conv2d_backward(self, x, w, dy, stride, pads, dx, dw, db):
        kernel, out = w.shape[0], dy.shape[1:3]
        padded = pad(x, kernel, stride, pads, out)
        flat_dy = dy.reshape(-1, dy.shape[3])  # (N*P*Q, F)
        for i in range(kernel):
            for j in range(kernel):
                patch = window(padded, i, j, stride, out).reshape(-1, x.shape[3])  # (N*P*Q, C)
                np.matmul(patch.T, flat_dy, out=dw[i, j])
        if db is not None:
            flat_dy.sum(axis=0, out=db)
        if dx is not None:
            d_padded = np.zeros_like(padded)
            for i in range(kernel):
                for j in range(kernel):
                    window(d_padded, i, j, stride, out)[...] += dy @ w[i, j].T
            dx[...] = unpad(d_padded, pads, x.shape)

    def relu(self, x, y):
        np.maximum(x, 0, out=y)

    def relu_backward(self, y, dy, dx):
        np.multiply(dy, y > 0, out=dx)

    def sigmoid(self, x, y):
        # exp of -|x| only, so neither branch overflows
        e = np.exp(-np.abs(x))
        y[...] = np.where(x >= 0, 1, e) / (1 + e)

    def sigmoid_backward(self, y, dy, dx):
        np.multiply(dy, y * (1 - y), out=dx)

    def max_pool(self, x, size, stride, pads, y, argmax):
        padded = pad(x, size, stride, pads, y.shape[1:3], -np.inf)
        y[...] = -np.inf
        argmax[...] = 0
        for i in range(size):
            for j in range(size):
                value = window(padded, i, j, stride, y.shape[1:3])
                larger = value > y
                np.copyto(argmax, i * size + j, where=larger)
                np.copyto(y, value, where=larger)

    def max_pool_backward(self, argmax, dy, size, stride, pads, dx):
        d_padded = np.zeros_like(pad(dx, size, stride, pads, dy.shape[1:3]))
        for i in range(size):
            for j in range(size):
                window(d_padded, i, j, stride, dy.shape[1:3])[...] += dy * (argmax == i * size + j)
        dx[...] = unpad(d_padded, pads, dx.shape)

    def avg_pool(self, x, size, stride, pads, y):
        padded = pad(x, size, stride, pads, y.shape[1:3])
        y[...] = 0
        for i in range(size):
            for j in range(size):
                y += window(padded, i, j, stride, y.shape[1:3])
        y /= _inside(x.shape, size, stride, pads, y.shape[1:3])

    def avg_pool_backward(self, dy, size, stride, pads, dx):
        share = dy / _inside(dx.shape, size, stride, pads, dy.shape[1:3])
        d_padded = np.zeros_like(pad(dx, size, stride, pads, dy.shape[1:3]))
        for i in range(size):
            for j in range(size):
                window(d_padded, i, j, stride, dy.shape[1:3])[...] += share
        dx[...] = unpad(d_padded, pads, dx.shape)

    def linear(self, x, w, b, y):
        np.matmul(x, w, out=y)
        if b is not None:
            y += b

    def linear_backward(self, x, w, dy, dx, dw, db):
        np.matmul(x.T, dy, out=dw)
        if db is not None:
            dy.sum(axis=0, out=db)
        if dx is not None:
            np.matmul(dy, w.T, out=dx)

    def loss(self, loss: Loss, scores, labels, scale, d_scores, losses, hits):
        FUNCTIONS[loss](scores, labels, np.float32(scale), d_scores, losses, hits)

    def updater(self, optimizer: Optimizer) -> Update:
        return optimizer.apply


def pad(x, size, stride, pads, out, value=0.0):
    """Return x (N,H,W,C) with `value` around it, so that every one of the `out` windows lies inside."""
    (top, left), (_, height, width, _) = pads, x.shape
    below = max((out[0] - 1) * stride + size - top - height, 0)
    right = max((out[1] - 1) * stride + size - left - width, 0)
    if not (top or left or below or right):
        return x
    return np.pad(x, ((0, 0), (top, below), (left, right), (0, 0)), constant_values=value)


def unpad(padded, pads, shape):
    """Return the view of `padded` that `pad` was given, of shape (N,H,W,C)."""
    top, left = pads
    return padded[:, top : top + shape[1], left : left + shape[2]]


def window(padded, i, j, stride, out):
    """Return the view (N,*out,C) of the pixels at offset (i, j) of every window."""
    return padded[:, i : i + (out[0] - 1) * stride + 1 : stride, j : j + (out[1] - 1) * stride + 1 : stride]


def _inside(shape, size, stride, pads, out):
    """Return how many pixels of each window lie inside the image, float32 (1,*out,1)."""
    ones = np.ones((1, shape[1], shape[2], 1), np.float32)
    padded, count = pad(ones, size, stride, pads, out), np.zeros((1, *out, 1), np.float32)
    for i in range(size):
        for j in range(size):
            count += window(padded, i, j, stride, out)
    return count


@functools.cache
def _thread_pools() -> threadpoolctl.ThreadpoolController:
    return threadpoolctl.ThreadpoolController()


def one_blas_thread():
    """Return a context in which BLAS uses one thread: what a backend calls its threads are all that it uses."""
    return _thread_pools().limit(limits=1, user_api="blas")


@dataclass(frozen=True)
class Numpy(SequentialBackend):
    """Matrix operations on one thread."""

    name: ClassVar[str] = "numpy"

    def compile(self, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int) -> LayerwiseProgram:
        return LayerwiseProgram(NumpyOps(), network, loss, optimizer, batch_size, scope=one_blas_thread)
