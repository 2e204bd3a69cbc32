"""`python`: naive loops in plain Python, a number at a time: the papers' "naive convolution".

Layers read nested lists and compute in Python's floats; results are rounded to float32 where they are stored. It is for
seeing how slow that is, and for reading: nothing here is clever.
"""

import math
from typing import Any

import numpy as np

from cnnexp.backends.processor import Array, HostOps, SequentialBackend
from cnnexp.backends.protocol import Update
from cnnexp.network import Elementwise, Maths, Window
from cnnexp.network.losses import Loss
from cnnexp.network.noise import mix, threshold
from cnnexp.optimizers import Optimizer


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


MATHS = Maths(_exp, math.tanh, math.erf, lambda a, b: b if a < b else a, lambda condition, a, b: a if condition else b)


class PythonOps(HostOps):
    """`Ops` (see `protocol`) on NumPy arrays that serve as storage alone."""

    def gather(self, images: Array, labels: Array, indices: Array, x: Array, t: Array) -> None:
        for n, index in enumerate(indices):
            x[n], t[n] = images[index], labels[index]

    def conv2d(self, x: Array, w: Array, b: Array | None, window: Window, y: Array) -> None:
        (_, height, width, channels), (*_, seen, filters) = x.shape, w.shape
        images, weights = x.tolist(), w.tolist()
        bias = [0.0] * filters if b is None else b.tolist()
        for n, p, q, f in np.ndindex(y.shape):
            total, first = bias[f], f * channels // seen // filters * seen
            for i, j, row, column in _taps(p, q, window, height, width):
                for c in range(seen):
                    total += images[n][row][column][first + c] * weights[i][j][c][f]
            y[n, p, q, f] = total

    def conv2d_backward(
        self, x: Array, w: Array, dy: Array, window: Window, dx: Array | None, dw: Array, db: Array | None
    ) -> None:
        (_, height, width, channels), (*_, seen, filters) = x.shape, w.shape
        images, weights, d_outputs = x.tolist(), w.tolist(), dy.tolist()
        d_images, d_weights, d_bias = _zeros(x), _zeros(w), [0.0] * filters
        for n, p, q, f in np.ndindex(dy.shape):
            d_output, first = d_outputs[n][p][q][f], f * channels // seen // filters * seen
            d_bias[f] += d_output
            for i, j, row, column in _taps(p, q, window, height, width):
                for c in range(seen):
                    d_weights[i][j][c][f] += images[n][row][column][first + c] * d_output
                    if dx is not None:
                        d_images[n][row][column][first + c] += weights[i][j][c][f] * d_output
        _store(d_images, dx)
        _store(d_weights, dw)
        _store(d_bias, db)

    def elementwise(self, layer: Elementwise, x: Array, y: Array) -> None:
        rule = layer.rule(MATHS)
        _store([rule(value) for value in x.ravel().tolist()], y)

    def elementwise_backward(self, layer: Elementwise, x: Array, y: Array, dy: Array, dx: Array) -> None:
        derivative = layer.derivative(MATHS)
        triples = zip(x.ravel().tolist(), y.ravel().tolist(), dy.ravel().tolist(), strict=True)
        _store([d_output * derivative(value, result) for value, result, d_output in triples], dx)

    def max_pool(self, x: Array, window: Window, y: Array, saved: Array) -> None:
        images, (_, height, width, _) = x.tolist(), x.shape
        for n, u, v, c in np.ndindex(y.shape):
            largest, argmax = -math.inf, 0
            for i, j, row, column in _taps(u, v, window, height, width):
                value = images[n][row][column][c]
                if value > largest:
                    largest, argmax = value, i * window.size + j
            y[n, u, v, c], saved[n, u, v, c] = largest, argmax

    def max_pool_backward(self, saved: Array, dy: Array, window: Window, dx: Array) -> None:
        stride, top, left = window.stride, window.top, window.left
        places, d_outputs, d_images = saved.tolist(), dy.tolist(), _zeros(dx)
        for n, u, v, c in np.ndindex(dy.shape):
            i, j = divmod(places[n][u][v][c], window.size)
            d_images[n][u * stride + i - top][v * stride + j - left][c] += d_outputs[n][u][v][c]
        _store(d_images, dx)

    def avg_pool(self, x: Array, window: Window, y: Array) -> None:
        images, (_, height, width, _) = x.tolist(), x.shape
        for n, u, v, c in np.ndindex(y.shape):
            total, places = 0.0, _taps(u, v, window, height, width)
            for _, _, row, column in places:
                total += images[n][row][column][c]
            y[n, u, v, c] = total / len(places)

    def avg_pool_backward(self, dy: Array, window: Window, dx: Array) -> None:
        (_, height, width, _), d_outputs, d_images = dx.shape, dy.tolist(), _zeros(dx)
        for n, u, v, c in np.ndindex(dy.shape):
            places = _taps(u, v, window, height, width)
            for _, _, row, column in places:
                d_images[n][row][column][c] += d_outputs[n][u][v][c] / len(places)
        _store(d_images, dx)

    def add(self, a: Array, b: Array, total: Array) -> None:
        _store([p + q for p, q in zip(a.ravel().tolist(), b.ravel().tolist(), strict=True)], total)

    def dropout(self, x: Array, images: Array, key: int, rate: float, y: Array) -> None:
        least, scale, rows = threshold(rate), 1 / (1 - rate), x.reshape(len(x), -1).tolist()
        for image, row in zip(images.tolist(), rows, strict=True):
            start = mix(key ^ image)
            row[:] = [value * scale if mix(start ^ mix(d)) >= least else 0.0 for d, value in enumerate(row)]
        _store(rows, y)

    def _sum_channels(self, x: Array) -> Array:
        return np.array([sum(x[..., c].ravel().tolist()) for c in range(x.shape[3])])

    def _sum_products(self, x: Array, x_mean: Array, y: Array, y_mean: Array) -> Array:
        sums = []
        for c, (a, b) in enumerate(zip(x_mean.tolist(), y_mean.tolist(), strict=True)):
            pairs = zip(x[..., c].ravel().tolist(), y[..., c].ravel().tolist(), strict=True)
            sums.append(sum((p - a) * (q - b) for p, q in pairs))
        return np.array(sums)

    def _normalize(self, x: Array, mean: Array, scale: Array, shift: Array, y: Array) -> None:
        for c, (m, s, t) in enumerate(zip(mean.tolist(), scale.tolist(), shift.tolist(), strict=True)):
            _store([(value - m) * s + t for value in x[..., c].ravel().tolist()], y[..., c])

    def _normalize_backward(
        self, x: Array, dy: Array, mean: Array, scale: Array, mean_dy: Array, factor: Array, dx: Array
    ) -> None:
        for c, (m, s, mean_d, f) in enumerate(zip(*(a.tolist() for a in (mean, scale, mean_dy, factor)), strict=True)):
            pairs = zip(x[..., c].ravel().tolist(), dy[..., c].ravel().tolist(), strict=True)
            _store([s * (d - mean_d - (value - m) * f) for value, d in pairs], dx[..., c])

    def linear(self, x: Array, w: Array, b: Array | None, y: Array) -> None:
        rows, weights = x.tolist(), w.tolist()
        bias = [0.0] * w.shape[1] if b is None else b.tolist()
        for n, o in np.ndindex(y.shape):
            total = bias[o]
            for d in range(w.shape[0]):
                total += rows[n][d] * weights[d][o]
            y[n, o] = total

    def linear_backward(self, x: Array, w: Array, dy: Array, dx: Array | None, dw: Array, db: Array | None) -> None:
        rows, weights, d_outputs = x.tolist(), w.tolist(), dy.tolist()
        d_rows, d_weights, d_bias = _zeros(x), _zeros(w), [0.0] * w.shape[1]
        for n, o in np.ndindex(dy.shape):
            d_bias[o] += d_outputs[n][o]
            for d in range(w.shape[0]):
                d_weights[d][o] += rows[n][d] * d_outputs[n][o]
                if dx is not None:
                    d_rows[n][d] += weights[d][o] * d_outputs[n][o]
        _store(d_rows, dx)
        _store(d_weights, dw)
        _store(d_bias, db)

    def loss(
        self, loss: Loss, scores: Array, labels: Array, scale: float, d_scores: Array, losses: Array, hits: Array
    ) -> None:
        log, log1p = (lambda x: math.log(x) if x else -math.inf), (lambda x: math.log1p(x) if x != -1 else -math.inf)
        rule = loss.rule(scores.shape[1], _exp, log, log1p)
        for n, (row, label) in enumerate(zip(scores.tolist(), labels.tolist(), strict=True)):
            d_row = [0.0] * len(row)
            losses[n], hits[n] = rule(row, label, scale, d_row)
            d_scores[n] = d_row

    def updater(self, optimizer: Optimizer) -> Update:
        rule = optimizer.rule(math.sqrt, max)

        def update(w: Array, g: Array, slots: tuple[Array, ...], rate: float, step: int) -> None:
            constants = optimizer.constants(step)
            for i in range(len(w)):
                s, t = (*(slot[i] for slot in slots), np.float32(0), np.float32(0))[:2]
                new = rule(w[i], g[i], s, t, np.float32(rate), *constants)
                for old, value in zip((w, *slots), new, strict=False):
                    old[i] = value

        return update


def _taps(p: int, q: int, window: Window, height: int, width: int) -> list[tuple[int, int, int, int]]:
    """Return the places (i, j) of the window at (p, q) that lie inside the image, with their (row, column) there."""
    rows = [(i, p * window.stride + i * window.dilation - window.top) for i in range(window.size)]
    columns = [(j, q * window.stride + j * window.dilation - window.left) for j in range(window.size)]
    return [(i, j, r, c) for i, r in rows for j, c in columns if 0 <= r < height and 0 <= c < width]


def _zeros(like: np.ndarray) -> Any:
    return np.zeros(like.shape).tolist()


def _store(values: list, target: np.ndarray | None) -> None:
    """Round a list, nested or flat, into a float32 array, if there is one."""
    if target is not None:
        target[...] = np.array(values, np.float32).reshape(target.shape)


class Python(SequentialBackend):
    """Plain Python on one thread: the slowest, and the plainest to read."""

    name = "python"
    ops = PythonOps
