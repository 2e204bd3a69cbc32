"""The layers' mathematics on a GPU that no backend does differently: one thread per output element.

Sums over images and products of matrices are in `sums`.
"""

import math
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from cnnexp.backends.gpu.kernels.index import ONE, ZERO, ConvSizes, f32, first_window, offset, split, u32, unsigned
from cnnexp.backends.gpu.launch import Kernel, kernel
from cnnexp.network import Elementwise, Maths, noise
from cnnexp.network.losses import Loss
from cnnexp.optimizers import Optimizer

LOWEST = f32(-np.inf)


@cache
def gather(D: int, block: int) -> Kernel:
    """x[n, d] = images[indices[n], d] and labels likewise; D elements per image."""
    D = u32(D)

    def gather(images, labels, indices, x, t, count):
        i = u32(cuda.grid(1))
        if i < count:
            n, d = split(i, D)
            source = u32(indices[n])
            x[i] = images[offset(source, D, d)]
            if d == u32(0):
                t[n] = labels[source]

    return Kernel(gather, "void(f4[::1], i4[::1], i8[::1], f4[::1], i4[::1], u4)", block)


device_function = cuda.jit(device=True)
MATHS = Maths(
    exp=device_function(lambda x: f32(math.exp(x))),
    tanh=device_function(lambda x: f32(math.tanh(x))),
    erf=device_function(lambda x: f32(math.erf(x))),
    maximum=device_function(lambda a, b: b if a < b else a),
    where=device_function(lambda condition, a, b: a if condition else b),
)
LOG = device_function(lambda x: LOWEST if x == ZERO else f32(math.log(x)))
LOG1P = device_function(lambda x: LOWEST if x == -ONE else f32(math.log1p(x)))


@cache
def elementwise(layer: Elementwise, block: int) -> Kernel:
    """y = the layer's rule of x: one thread per number."""
    rule = device_function(layer.rule(MATHS))

    def elementwise(x, y, count):
        i = u32(cuda.grid(1))
        if i < count:
            y[i] = rule(x[i])

    return Kernel(elementwise, "void(f4[::1], f4[::1], u4)", block)


@cache
def elementwise_backward(layer: Elementwise, block: int) -> Kernel:
    """dx = dy times the layer's derivative: one thread per number."""
    derivative = device_function(layer.derivative(MATHS))

    def elementwise_backward(x, y, dy, dx, count):
        i = u32(cuda.grid(1))
        if i < count:
            dx[i] = dy[i] * derivative(x[i], y[i])

    return Kernel(elementwise_backward, "void(f4[::1], f4[::1], f4[::1], f4[::1], u4)", block)


@kernel("void(f4[::1], f4[::1], u4, u4)")
def put(source, target, first, count):
    """target[first + i] = source[i]: one thread per number."""
    i = u32(cuda.grid(1))
    if i < count:
        target[u32(first + i)] = source[i]


@kernel("void(f4[::1], f4[::1], f4[::1], u4)")
def add(a, b, total, count):
    """total = a + b, which may be one of them: one thread per number."""
    i = u32(cuda.grid(1))
    if i < count:
        total[i] = a[i] + b[i]


mix = device_function(noise.mix)


@cache
def dropout(D: int, block: int) -> Kernel:
    """Keep, scaled, what `noise.keeps`; D numbers per image, `least` is the rate's threshold. One thread per number."""
    D = u32(D)

    def dropout(x, images, key, least, scale, y, count):
        i = u32(cuda.grid(1))
        if i < count:
            n, d = split(i, D)
            y[i] = x[i] * scale if mix(mix(key ^ images[n]) ^ mix(np.int64(d))) >= least else ZERO

    return Kernel(dropout, "void(f4[::1], i8[::1], i8, i8, f4, f4[::1], u4)", block)


@cache
def pool(sizes: ConvSizes, block: int, maximum: bool) -> Kernel:
    """One thread per (n, u, v, c): the first largest pixel of the window, or the mean of those that exist.

    A `maximum` writes its place to `argmax`; a mean ignores that.
    """
    H, W, C, S, _, stride, top, left, U, V, *_ = unsigned(sizes)

    def pool(x, y, argmax, count):
        i = u32(cuda.grid(1))
        if i < count:
            n, u, v, c = split(i, U, V, C)
            best, where, total, inside = LOWEST, u32(0), ZERO, u32(0)
            for a in range(S):
                for b in range(S):
                    row, col = offset(u, stride, a), offset(v, stride, b)  # in the padded image
                    if top <= row and row < u32(H + top) and left <= col and col < u32(W + left):
                        value = x[offset(n, H, u32(row - top), W, u32(col - left), C, c)]
                        total += value
                        inside = u32(inside + 1)
                        if value > best:
                            best, where = value, offset(a, S, b)
            y[i] = best if maximum else total / f32(inside)
            if maximum:
                argmax[i] = np.int32(where)

    return Kernel(pool, f"void(f4[::1], f4[::1], {'i4' if maximum else 'f4'}[::1], u4)", block)


@cache
def pool_backward(sizes: ConvSizes, block: int, maximum: bool) -> Kernel:
    """One thread per input pixel, which adds up what windows give it: no two threads write one element.

    A `maximum` gives all of dy to its argmax, a mean a share to each pixel that exists; it ignores `argmax`.
    """
    H, W, C, S, _, stride, top, left, U, V, *_ = unsigned(sizes)

    def pool_backward(argmax, dy, dx, count):
        i = u32(cuda.grid(1))
        if i < count:
            n, h, w, c = split(i, H, W, C)
            row, col = u32(h + top), u32(w + left)  # in the padded image
            total = ZERO
            u = first_window(row, S, stride)
            while u < U and u32(u * stride) <= row:
                high = u32(min(u32(u * stride + S), u32(H + top)) - max(u32(u * stride), top))
                v = first_window(col, S, stride)
                while v < V and u32(v * stride) <= col:
                    place = offset(n, U, u, V, v, C, c)
                    if maximum:
                        if u32(argmax[place]) == offset(u32(row - u * stride), S, u32(col - v * stride)):
                            total += dy[place]
                    else:
                        wide = u32(min(u32(v * stride + S), u32(W + left)) - max(u32(v * stride), left))
                        total += dy[place] / f32(u32(high * wide))
                    v = u32(v + 1)
                u = u32(u + 1)
            dx[i] = total

    return Kernel(pool_backward, f"void({'i4' if maximum else 'f4'}[::1], f4[::1], f4[::1], u4)", block)


def loss_rule(kind: Loss, O: int) -> Any:  # noqa: E741
    """Return the device function (scores, label, scale, d_scores): an image's loss and whether it is a hit."""
    return device_function(kind.rule(O, MATHS.exp, LOG, LOG1P))


@cache
def loss(kind: Loss, O: int, block: int) -> Kernel:  # noqa: E741
    """The rule of a loss: one thread per image."""
    rule, O = loss_rule(kind, O), u32(O)  # noqa: E741

    def loss(scores, labels, scale, d_scores, losses, hits, count):
        n = u32(cuda.grid(1))
        if n < count:
            first, end = offset(n, O, 0), offset(n, O, O)
            losses[n], hit = rule(scores[first:end], labels[n], scale, d_scores[first:end])
            hits[n] = np.uint8(1) if hit else np.uint8(0)

    return Kernel(loss, "void(f4[::1], i4[::1], f4, f4[::1], f4[::1], u1[::1], u4)", block)


@cache
def step_of(optimizer: Optimizer) -> Any:
    """Return the device function (w, g, s, t, i, rate, c0, c1): one parameter's step, g its gradient."""
    rule = device_function(optimizer.rule(sqrt=math.sqrt, maximum=max))
    slots = len(optimizer.slots)

    def step(w, g, s, t, i, rate, c0, c1):
        old_s = s[i] if slots > 0 else ZERO
        old_t = t[i] if slots > 1 else ZERO
        new_w, new_s, new_t = rule(w[i], g, old_s, old_t, rate, c0, c1)
        w[i] = new_w
        if slots > 0:
            s[i] = new_s
        if slots > 1:
            t[i] = new_t

    return device_function(step)


@cache
def update(optimizer: Optimizer, block: int) -> Kernel:
    """One optimizer step on flat buffers: one thread per parameter, every parameter of the network in one launch."""
    step = step_of(optimizer)

    def update(w, g, s, t, rate, c0, c1, count):
        i = u32(cuda.grid(1))
        if i < count:
            step(w, g[i], s, t, i, rate, c0, c1)

    return Kernel(update, "void(f4[::1], f4[::1], f4[::1], f4[::1], f4, f4, f4, u4)", block)
