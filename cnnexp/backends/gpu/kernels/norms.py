"""Batch normalization on a GPU: statistics slice by slice and then of all, the same in every backend.

A slice's squares are about its own mean, and put together by Chan, Golub and LeVeque (1983): nothing large cancels.
"""

import math
from functools import cache

from numba import cuda

from cnnexp.backends.gpu.kernels.index import ONE, ZERO, f32, offset, split, u32
from cnnexp.backends.gpu.kernels.sums import AT_ONCE, THREADS, block_sum, slice_of, sum_every, sum_of
from cnnexp.backends.gpu.launch import Kernel
from cnnexp.network import BatchNorm2d

OWNERS = 2  # channels of a block that puts slices together


@sum_of
def sum_squares(given, place):
    x, mean = given
    return (x[place] - mean) * (x[place] - mean)


@cache
def moments(channels: int) -> Kernel:
    """partial[s, 0] and [s, 1] = the mean of each channel over slice s of the rows, and the sum of squares about it."""
    place, C, wide, lanes = slice_of(channels)

    def moments(x, partial, rows, deep):
        shared = cuda.shared.array(THREADS, f32)
        t = u32(cuda.threadIdx.x)
        s, c, row, stop, writes = place(t, rows, deep)
        total = block_sum(shared, t, sum_every(x, c, C, row, stop, lanes), wide, lanes)
        mean = total / f32(u32(stop - s * deep))
        squares = block_sum(shared, t, sum_squares((x, mean), c, C, row, stop, lanes), wide, lanes)
        if writes:
            partial[offset(s, 2, 0, C, c)], partial[offset(s, 2, 1, C, c)] = mean, squares

    return Kernel(moments, "void(f4[::1], f4[::1], u4, u4)", THREADS)


@cache
def statistics(layer: BatchNorm2d, channels: int) -> Kernel:
    """Put the slices of `moments` together: mean and 1 / sqrt(variance + epsilon); move the running averages.

    A block has OWNERS channels; the threads of one share out the slices.
    """
    C, owners, parts = u32(channels), u32(OWNERS), u32(THREADS // OWNERS)
    epsilon, momentum = f32(layer.epsilon), f32(layer.momentum)

    @sum_of
    def sum_means(given, s):
        partial, c, rows, deep = given
        return partial[offset(s, 2, 0, C, c)] * f32(min(deep, u32(rows - s * deep)))

    @sum_of
    def sum_about(given, s):
        partial, c, rows, deep, m = given
        apart = partial[offset(s, 2, 0, C, c)] - m
        return partial[offset(s, 2, 1, C, c)] + apart * apart * f32(min(deep, u32(rows - s * deep)))

    def statistics(partial, mean, inverse, running_mean, running_variance, rows, deep):
        shared = cuda.shared.array(THREADS, f32)
        t = u32(cuda.threadIdx.x)
        part, owner = split(t, owners)
        c = offset(cuda.blockIdx.x, owners, owner)
        slices = u32((rows + deep - u32(1)) // deep) if c < C else u32(0)
        of_all = sum_means((partial, c, rows, deep), u32(0), u32(1), part, slices, parts)
        m = block_sum(shared, t, of_all, owners, parts) / f32(rows)
        of_all = sum_about((partial, c, rows, deep, m), u32(0), u32(1), part, slices, parts)
        squares = block_sum(shared, t, of_all, owners, parts)
        if part == u32(0) and c < C:
            running_mean[c] += momentum * (m - running_mean[c])
            running_variance[c] += momentum * (squares / f32(max(u32(rows - u32(1)), u32(1))) - running_variance[c])
            mean[c], inverse[c] = m, ONE / f32(math.sqrt(squares / f32(rows) + epsilon))

    return Kernel(statistics, "void(f4[::1], f4[::1], f4[::1], f4[::1], f4[::1], u4, u4)", THREADS)


@cache
def normalize(channels: int, from_variance: bool, relu: bool, block: int) -> Kernel:
    """y = (x - mean) * inverse * w + b, `inverse` given or made from a variance, and ReLU; one thread per number."""
    C = u32(channels)

    def normalize(x, mean, inverse, w, b, epsilon, y, count):
        i = u32(cuda.grid(1))
        if i < count:
            _, c = split(i, C)
            factor = ONE / f32(math.sqrt(inverse[c] + epsilon)) if from_variance else inverse[c]
            value = (x[i] - mean[c]) * (factor * w[c]) + b[c]
            y[i] = value if not relu or value > ZERO else ZERO

    return Kernel(normalize, "void(f4[::1], f4[::1], f4[::1], f4[::1], f4[::1], f4, f4[::1], u4)", block)


@cache
def backward_sums(channels: int, relu: bool) -> Kernel:
    """partial[s] = the sum over slice s of dy * n, n being the normalized x, and partial[half + s] that of dy.

    Of dy counts what a ReLU after the layer lets through; `half` is in numbers.
    """
    place, C, wide, lanes = slice_of(channels)

    def backward_sums(x, mean, inverse, y, dy, partial, half, rows, deep):
        shared = cuda.shared.array(THREADS, f32)
        t = u32(cuda.threadIdx.x)
        s, c, row, stop, writes = place(t, rows, deep)
        m, factor = (mean[c], inverse[c]) if row < stop else (ZERO, ZERO)
        of_n, of_dy = ZERO, ZERO
        while row < stop:
            for ahead in range(AT_ONCE):  # so many loads before the first is waited for
                at = u32(row + u32(ahead) * lanes)
                i = offset(at if at < stop else row, C, c)
                value, g = x[i], dy[i]  # by no branch, which other loads would wait for
                passed = (at < stop) & (y[i] > ZERO if relu else True)
                g = g if passed else ZERO
                of_n += (value - m) * factor * g
                of_dy += g
            row = u32(row + u32(AT_ONCE) * lanes)
        of_n = block_sum(shared, t, of_n, wide, lanes)
        of_dy = block_sum(shared, t, of_dy, wide, lanes)
        if writes:
            partial[offset(s, C, c)], partial[u32(half + offset(s, C, c))] = of_n, of_dy

    return Kernel(backward_sums, f"void({'f4[::1], ' * 6}u4, u4, u4)", THREADS)


@cache
def finish_sums(channels: int) -> Kernel:
    """dw and db = what `backward_sums` left of each slice, added up: OWNERS channels by a block, as in `statistics`."""
    C, owners, parts = u32(channels), u32(OWNERS), u32(THREADS // OWNERS)

    def finish_sums(partial, dw, db, half, slices):
        shared = cuda.shared.array(THREADS, f32)
        t = u32(cuda.threadIdx.x)
        part, owner = split(t, owners)
        c = offset(cuda.blockIdx.x, owners, owner)
        stop = slices if c < C else u32(0)
        of_n = block_sum(shared, t, sum_every(partial, c, C, part, stop, parts), owners, parts)
        of_dy = block_sum(shared, t, sum_every(partial, u32(half + c), C, part, stop, parts), owners, parts)
        if part == u32(0) and c < C:
            dw[c], db[c] = of_n, of_dy

    return Kernel(finish_sums, "void(f4[::1], f4[::1], f4[::1], u4, u4)", THREADS)


@cache
def normalize_backward(channels: int, relu: bool, block: int) -> Kernel:
    """dx of `protocol`'s `batch_norm_backward`, dy being what a ReLU after it lets through; one thread per number."""
    C = u32(channels)

    def normalize_backward(x, mean, inverse, w, y, dy, dw, db, dx, count):
        i = u32(cuda.grid(1))
        if i < count:
            _, c = split(i, C)
            share = f32(C) / f32(count)
            normal, g = (x[i] - mean[c]) * inverse[c], dy[i]
            g = g if not relu or y[i] > ZERO else ZERO
            dx[i] = inverse[c] * w[c] * (g - db[c] * share - normal * (dw[c] * share))

    return Kernel(normalize_backward, f"void({'f4[::1], ' * 9}u4)", block)
