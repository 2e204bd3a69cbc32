"""The layers as loops that Numba compiles, for one thread or several from the same source.

Each kernel is a thin loop over tasks: images, or blocks whose number depends on the shapes alone. A task is a function
of its own, compiled once for both ways, and what tasks sum up is added in their order. So results depend neither on the
number of threads nor on which of them took a task.

Arguments are those of `protocol.Ops`, with a window as its numbers and an empty array where Ops has None.
"""

import functools
import math
import types
import zlib
from typing import Any

import numba
import numpy as np
from numba import prange

from cnnexp.backends.cache import fingerprint
from cnnexp.backends.cpu.dispatchers import load_or_compile
from cnnexp.network import Elementwise, Maths, noise
from cnnexp.network.losses import Loss
from cnnexp.optimizers import Optimizer

# Sums may be reordered, multiply-adds fused; NaN and infinity keep their meaning, so a diverged loss is seen.
OPTIONS = {"fastmath": {"contract", "reassoc", "nsz", "arcp"}, "error_model": "numpy", "nogil": True}

BLOCKS = 32  # most partial weight gradients of a convolution: bounds their memory, and how many threads can share it
FEATURES = 128  # features of a linear layer that one task sums gradients for

batch, image, matrix, vector = "f4[:,:,:,::1]", "f4[:,:,::1]", "f4[:,::1]", "f4[::1]"
doubles = "f8[:,::1]"
ZERO, ONE = np.float32(0), np.float32(1)

# a function that only kernels call: no wrappers to call it from Python or C, which would take as long to compile
task = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)


class Kernel:
    """A function to be compiled when first asked for, with one signature, sequentially or parallel.

    The linker goes by names, so each way of compiling has a name of its own, and each name a single signature. Compiled
    code is kept by `cache`, not by Numba's, which reads what is damaged, or anybody's, as if it were whole.

    Args:
        name: of this one among others of the same function, and of their rules; the function's own if None.
        rules: the scalar functions that it calls in this one alone, by its names for them.
    """

    def __init__(self, function: types.FunctionType, signature: str, name: str | None = None, **rules: Any) -> None:
        self._function, self._signature, self._name = function, signature, name or function.__qualname__
        for rule in rules.values():
            rule.__qualname__ = f"rule_of_{name}"
        self._rules = {called: numba.njit(rule, **OPTIONS) for called, rule in rules.items()}
        self.compiled = functools.cache(self._compile)

    def _compile(self, parallel: bool):
        source = self._function
        twin = types.FunctionType(source.__code__, {**source.__globals__, **self._rules}, source.__name__)
        twin.__qualname__ = f"{self._name}_{'parallel' if parallel else 'sequential'}"
        dispatcher = numba.njit(parallel=parallel, **OPTIONS)(twin)
        return load_or_compile(lambda key: dispatcher, self._signature, "cpu", twin.__qualname__)


def kernel(*arguments: str):
    """Make a `Kernel` of the decorated function, with these argument types and no result."""
    return lambda function: Kernel(function, f"void({', '.join(arguments)})")


@task
def conv2d_image(x, rows, b, stride, top, left, y):
    """Convolve one image: x (H,W,C), rows (K,C,K*F) as of `sequential.reversed_rows`, y (P,Q,F)."""
    height, width, channels = x.shape
    side, filters = rows.shape[0], y.shape[2]
    # outputs of one row at stride 1, from the first column that any pixel reaches to the last
    line = np.empty((width + side - 1) * filters, np.float32)
    for p in range(y.shape[0]):
        # every pixel of the rows under the window, times its weights, to all the outputs that it reaches
        line[:] = ZERO
        for i in range(max(0, top - p * stride), min(side, height + top - p * stride)):
            pixels = x[p * stride + i - top]
            for s in range(width):
                reached = line[s * filters : (s + side) * filters]
                for c in range(channels):
                    value, weights = pixels[s, c], rows[i, c]
                    for k in range(reached.size):
                        reached[k] += value * weights[k]
        # every stride-th of them is an output; one whose window lies beside the image has the bias alone
        for q in range(y.shape[1]):
            column, outputs = q * stride - left + side - 1, y[p, q]
            if 0 <= column < width + side - 1:
                reached = line[column * filters : (column + 1) * filters]
                for f in range(filters):
                    outputs[f] = reached[f]
            else:
                outputs[:] = ZERO
            for f in range(b.size):
                outputs[f] += b[f]


@kernel(batch, image, vector, "i8", "i8", "i8", batch)
def conv2d(x, rows, b, stride, top, left, y):
    for n in prange(x.shape[0]):
        conv2d_image(x[n], rows, b, stride, top, left, y[n])


@task
def conv2d_backward_image(x, rows, dy, stride, top, left, dx, d_rows, db):
    """Add one image's gradients to d_rows (K,C,K*F) and db (F,), and fill dx (H,W,C) unless it is empty."""
    height, width, channels = x.shape
    side, filters = rows.shape[0], dy.shape[2]
    line = np.empty((width + side - 1) * filters, np.float32)  # as in `conv2d_image`
    dx[:] = ZERO
    for p in range(dy.shape[0]):
        # a row of dy, spread to the columns of stride 1, and its part of the bias's gradient
        line[:] = ZERO
        for q in range(dy.shape[1]):
            column, d_outputs = q * stride - left + side - 1, dy[p, q]
            for f in range(filters):
                db[f] += d_outputs[f]
            if 0 <= column < width + side - 1:
                reached = line[column * filters : (column + 1) * filters]
                for f in range(filters):
                    reached[f] = d_outputs[f]
        # every pixel of the rows under the window: its part of the weights' gradient, then its own gradient
        for i in range(max(0, top - p * stride), min(side, height + top - p * stride)):
            row = p * stride + i - top
            for s in range(width):
                reached = line[s * filters : (s + side) * filters]
                for c in range(channels):
                    value, d_weights = x[row, s, c], d_rows[i, c]
                    for k in range(reached.size):
                        d_weights[k] += value * reached[k]
                if dx.size:
                    for c in range(channels):
                        total, weights = ZERO, rows[i, c]
                        for k in range(reached.size):
                            total += weights[k] * reached[k]
                        dx[row, s, c] += total


@kernel(batch, image, batch, "i8", "i8", "i8", batch, batch, matrix)
def conv2d_backward(x, rows, dy, stride, top, left, dx, d_rows, d_bias):
    """Fill dx (N,H,W,C), or nothing of it if it is (N,0,0,0); add up d_rows (B,K,C,K*F) and d_bias (B,F) by block."""
    images, blocks = x.shape[0], d_rows.shape[0]
    for block in prange(blocks):
        for n in range(block * images // blocks, (block + 1) * images // blocks):
            conv2d_backward_image(x[n], rows, dy[n], stride, top, left, dx[n], d_rows[block], d_bias[block])


@kernel(batch, batch, vector, "i8", "i8", "i8", "i8", batch)
def grouped_conv2d(x, w, b, dilation, stride, top, left, y):
    """Convolve each group of filters with its channels: x (N,H,W,C), w (K,K,C/G,F), b (F,) or empty, y (N,P,Q,F)."""
    side, _, seen, filters = w.shape
    each = filters * seen // x.shape[3]
    for n in prange(x.shape[0]):
        for p in range(y.shape[1]):
            for q in range(y.shape[2]):
                outputs = y[n, p, q]
                for f in range(filters):
                    outputs[f] = b[f] if b.size else ZERO
                # every tap inside the image, and of it a group, its channels, its filters
                for i in range(side):
                    row = p * stride + i * dilation - top
                    for j in range(side):
                        column = q * stride + j * dilation - left
                        if 0 <= row < x.shape[1] and 0 <= column < x.shape[2]:
                            for g in range(filters // each):
                                for c in range(seen):
                                    value = x[n, row, column, g * seen + c]
                                    for f in range(g * each, (g + 1) * each):
                                        outputs[f] += value * w[i, j, c, f]


@kernel(batch, batch, batch, "i8", "i8", "i8", "i8", batch, "f4[:,:,:,:,::1]", matrix)
def grouped_conv2d_backward(x, w, dy, dilation, stride, top, left, dx, d_weights, d_bias):
    """As `conv2d_backward`, the weights' gradients (B,K,K,C/G,F) by block."""
    side, _, seen, filters = w.shape
    each, blocks = filters * seen // x.shape[3], d_weights.shape[0]
    for block in prange(blocks):
        for n in range(block * x.shape[0] // blocks, (block + 1) * x.shape[0] // blocks):
            dx[n] = ZERO
            for p in range(dy.shape[1]):
                for q in range(dy.shape[2]):
                    for f in range(filters):
                        d_bias[block, f] += dy[n, p, q, f]
                    # as above: the weights' gradient, then the pixel's own
                    for i in range(side):
                        row = p * stride + i * dilation - top
                        for j in range(side):
                            column = q * stride + j * dilation - left
                            if 0 <= row < x.shape[1] and 0 <= column < x.shape[2]:
                                for c in range(x.shape[3]):
                                    value, total = x[n, row, column, c], ZERO
                                    for f in range(c // seen * each, (c // seen + 1) * each):
                                        d_weights[block, i, j, c % seen, f] += value * dy[n, p, q, f]
                                        total += w[i, j, c % seen, f] * dy[n, p, q, f]
                                    if dx.size:
                                        dx[n, row, column, c] += total


@task
def copy_row(source, target):
    for d in range(target.size):
        target[d] = source[d]


@kernel(matrix, "i4[::1]", "i8[::1]", matrix, "i4[::1]")
def gather(images, labels, indices, x, t):
    for n in prange(indices.size):
        t[n] = labels[indices[n]]
        copy_row(images[indices[n]], x[n])


@numba.njit(**OPTIONS)
def _maximum(a, b):
    return b if a < b else a


@numba.njit(**OPTIONS)
def _where(condition, a, b):
    return a if condition else b


MATHS = Maths(math.exp, math.tanh, math.erf, _maximum, _where)


def _apply(x, y):
    for n in prange(x.shape[0]):
        for d in range(x.shape[1]):
            y[n, d] = rule(x[n, d])  # noqa: F821 - bound by Kernel


def _apply_backward(x, y, dy, dx):
    for n in prange(x.shape[0]):
        for d in range(x.shape[1]):
            dx[n, d] = dy[n, d] * derivative(x[n, d], y[n, d])  # noqa: F821 - bound by Kernel


@functools.cache
def elementwise(layer: Elementwise) -> Kernel:
    """Return the kernel `(x, y)` of a layer, on (N,D)."""
    name = f"elementwise_{fingerprint(layer)}"
    return Kernel(_apply, f"void({matrix}, {matrix})", name, rule=layer.rule(MATHS))


@functools.cache
def elementwise_backward(layer: Elementwise) -> Kernel:
    """Return the kernel `(x, y, dy, dx)` of a layer, on (N,D)."""
    name, arguments = f"elementwise_backward_{fingerprint(layer)}", ", ".join([matrix] * 4)
    return Kernel(_apply_backward, f"void({arguments})", name, derivative=layer.derivative(MATHS))


@kernel(matrix, matrix, matrix)
def add(a, b, total):
    for n in prange(a.shape[0]):
        for d in range(a.shape[1]):
            total[n, d] = a[n, d] + b[n, d]


mix = task(noise.mix)


@kernel(matrix, "i8[::1]", "i8", "i8", "f4", matrix)
def dropout(x, images, key, least, scale, y):
    """Keep, scaled, what `noise.keeps`; `least` is the rate's threshold."""
    for n in prange(x.shape[0]):
        start = mix(key ^ images[n])
        for d in range(x.shape[1]):
            y[n, d] = x[n, d] * scale if mix(start ^ mix(d)) >= least else ZERO


@kernel(matrix, doubles)
def sum_channels(x, partial):
    """partial[b] += the pixels of block b of x (R,C): one of B parts of the pixels."""
    pixels, blocks = x.shape[0], partial.shape[0]
    for block in prange(blocks):
        for r in range(block * pixels // blocks, (block + 1) * pixels // blocks):
            for c in range(x.shape[1]):
                partial[block, c] += x[r, c]


@kernel(matrix, vector, matrix, vector, doubles)
def sum_products(x, x_mean, y, y_mean, partial):
    """As `sum_channels`, of (x - x_mean) * (y - y_mean)."""
    pixels, blocks = x.shape[0], partial.shape[0]
    for block in prange(blocks):
        for r in range(block * pixels // blocks, (block + 1) * pixels // blocks):
            for c in range(x.shape[1]):
                partial[block, c] += (x[r, c] - x_mean[c]) * (y[r, c] - y_mean[c])


@kernel(matrix, vector, vector, vector, matrix)
def normalize(x, mean, scale, shift, y):
    for r in prange(x.shape[0]):
        for c in range(x.shape[1]):
            y[r, c] = (x[r, c] - mean[c]) * scale[c] + shift[c]


@kernel(matrix, matrix, vector, vector, vector, vector, matrix)
def normalize_backward(x, dy, mean, scale, mean_dy, factor, dx):
    for r in prange(x.shape[0]):
        for c in range(x.shape[1]):
            dx[r, c] = scale[c] * (dy[r, c] - mean_dy[c] - (x[r, c] - mean[c]) * factor[c])


@task
def max_pool_image(x, size, stride, top, left, y, argmax):
    height, width, channels = x.shape
    for u in range(y.shape[0]):
        row = u * stride - top
        for v in range(y.shape[1]):
            column = v * stride - left
            largest, offsets = y[u, v], argmax[u, v]
            # the window's pixels inside the image, in row order; all channels at once
            largest[:] = -np.inf
            offsets[:] = 0
            for i in range(max(0, -row), min(size, height - row)):
                for j in range(max(0, -column), min(size, width - column)):
                    pixels, offset = x[row + i, column + j], np.int32(i * size + j)
                    for c in range(channels):
                        larger = pixels[c] > largest[c]
                        largest[c] = pixels[c] if larger else largest[c]
                        offsets[c] = offset if larger else offsets[c]


@kernel(batch, "i8", "i8", "i8", "i8", batch, "i4[:,:,:,::1]")
def max_pool(x, size, stride, top, left, y, argmax):
    for n in prange(x.shape[0]):
        max_pool_image(x[n], size, stride, top, left, y[n], argmax[n])


@task
def max_pool_backward_image(argmax, dy, size, stride, top, left, dx):
    dx[:] = ZERO
    for u in range(dy.shape[0]):
        for v in range(dy.shape[1]):
            for c in range(dy.shape[2]):
                row, column = divmod(argmax[u, v, c], size)
                dx[u * stride - top + row, v * stride - left + column, c] += dy[u, v, c]


@kernel("i4[:,:,:,::1]", batch, "i8", "i8", "i8", "i8", batch)
def max_pool_backward(argmax, dy, size, stride, top, left, dx):
    for n in prange(dx.shape[0]):
        max_pool_backward_image(argmax[n], dy[n], size, stride, top, left, dx[n])


@task
def avg_pool_image(x, size, stride, top, left, y):
    height, width, channels = x.shape
    for u in range(y.shape[0]):
        first_row, last_row = max(0, u * stride - top), min(height, u * stride - top + size)
        for v in range(y.shape[1]):
            first_column, last_column = max(0, v * stride - left), min(width, v * stride - left + size)
            for c in range(channels):
                total = ZERO
                for row in range(first_row, last_row):
                    for column in range(first_column, last_column):
                        total += x[row, column, c]
                y[u, v, c] = total / np.float32((last_row - first_row) * (last_column - first_column))


@kernel(batch, "i8", "i8", "i8", "i8", batch)
def avg_pool(x, size, stride, top, left, y):
    for n in prange(x.shape[0]):
        avg_pool_image(x[n], size, stride, top, left, y[n])


@task
def avg_pool_backward_image(dy, size, stride, top, left, dx):
    height, width, channels = dx.shape
    dx[:] = ZERO
    for u in range(dy.shape[0]):
        first_row, last_row = max(0, u * stride - top), min(height, u * stride - top + size)
        for v in range(dy.shape[1]):
            first_column, last_column = max(0, v * stride - left), min(width, v * stride - left + size)
            inside = np.float32((last_row - first_row) * (last_column - first_column))
            for row in range(first_row, last_row):
                for column in range(first_column, last_column):
                    for c in range(channels):
                        dx[row, column, c] += dy[u, v, c] / inside


@kernel(batch, "i8", "i8", "i8", "i8", batch)
def avg_pool_backward(dy, size, stride, top, left, dx):
    for n in prange(dx.shape[0]):
        avg_pool_backward_image(dy[n], size, stride, top, left, dx[n])


@task
def transpose(w, first, last, transposed):
    """transposed (O,D) = transpose of w (D,O), for the features first .. last - 1."""
    for o in range(w.shape[1]):
        for d in range(first, last):
            transposed[o, d] = w[d, o]


@task
def linear_row(x, transposed, b, y):
    for o in range(y.size):
        total, weights = ZERO, transposed[o]
        for d in range(x.size):
            total += x[d] * weights[d]
        y[o] = total + b[o] if b.size else total


@kernel(matrix, matrix, matrix, vector, matrix)
def linear(x, w, transposed, b, y):
    """y = x @ w + b; transposed (O,D) is scratch for the transpose of w: the inner loop runs over the many features."""
    features = w.shape[0]
    for block in prange((features + FEATURES - 1) // FEATURES):
        transpose(w, block * FEATURES, min((block + 1) * FEATURES, features), transposed)
    for n in prange(x.shape[0]):
        linear_row(x[n], transposed, b, y[n])


@task
def linear_backward_features(x, w, dy, first, last, dx, dw):
    """Fill dw (D,O), and dx (N,D) unless it is empty, for the features first .. last - 1."""
    outputs, count = dy.shape[1], last - first
    transposed, dw_transposed = np.empty((outputs, count), np.float32), np.zeros((outputs, count), np.float32)
    # these features' weights, so that all inner loops run over features
    for o in range(outputs):
        for d in range(count):
            transposed[o, d] = w[first + d, o]
    # image by image: the weights' gradient, then that of the inputs
    for n in range(x.shape[0]):
        inputs = x[n, first:last]
        for o in range(outputs):
            d_output, total = dy[n, o], dw_transposed[o]
            for d in range(count):
                total[d] += d_output * inputs[d]
        if dx.size:
            d_inputs = dx[n, first:last]
            d_inputs[:] = ZERO
            for o in range(outputs):
                d_output, weights = dy[n, o], transposed[o]
                for d in range(count):
                    d_inputs[d] += d_output * weights[d]
    # back to the weights' layout
    for d in range(count):
        for o in range(outputs):
            dw[first + d, o] = dw_transposed[o, d]


@kernel(matrix, matrix, matrix, matrix, matrix)
def linear_backward(x, w, dy, dx, dw):
    features = x.shape[1]
    for block in prange((features + FEATURES - 1) // FEATURES):
        linear_backward_features(x, w, dy, block * FEATURES, min((block + 1) * FEATURES, features), dx, dw)


def _losses(scores, labels, scale, d_scores, losses, hits):
    for n in range(scores.shape[0]):
        losses[n], hits[n] = rule(scores[n], labels[n], scale, d_scores[n])  # noqa: F821 - bound by Kernel


@functools.cache
def loss(kind: Loss, outputs: int) -> Kernel:
    """Return the kernel `(scores, labels, scale, d_scores, losses, hits)` of a loss, on (N,O)."""
    name = f"{kind.name}_{kind.label_smoothing}_{outputs}_{zlib.crc32(repr(kind.class_weights).encode())}"
    rule = kind.rule(outputs, math.exp, math.log, math.log1p)
    return Kernel(_losses, f"void({matrix}, i4[::1], f4, {matrix}, {vector}, u1[::1])", name, rule=rule)


@functools.cache
def compile_update(optimizer: Optimizer):
    """Compile an optimizer's rule into `update(w, g, s, t, rate, c0, c1)`, in place; unused slots are empty arrays.

    One thread does it for both ways: it takes far less than the gradients, even of the smallest batch.
    """
    rule = numba.njit(optimizer.rule(np.sqrt, max), **OPTIONS)
    slots = len(optimizer.slots)

    @numba.njit(**OPTIONS)
    def update(w, g, s, t, rate, c0, c1):
        for i in range(w.size):
            old_s = s[i] if slots > 0 else ZERO
            old_t = t[i] if slots > 1 else ZERO
            new_w, new_s, new_t = rule(w[i], g[i], old_s, old_t, rate, c0, c1)
            w[i] = new_w
            if slots > 0:
                s[i] = new_s
            if slots > 1:
                t[i] = new_t

    def make(key: str):
        rule.py_func.__qualname__, update.py_func.__qualname__ = f"rule_{key}", f"update_{key}"
        return update

    return load_or_compile(make, f"void({', '.join([vector] * 4)}, f4, f4, f4)", "cpu update", optimizer)
