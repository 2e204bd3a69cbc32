"""The fused kernels of a convolution: with bias, max-pool and ReLU in one pass, and back through the argmax alone.

A convolution never writes its full map: bias, max-pool and ReLU follow in registers, and one byte per pooled value says
where it came from, `argmax` = row * S + column of the window, or S * S where ReLU made it 0. The gradient then goes
through that one place alone (castanheira, section 2.2.2).
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from cnnexp.backends.gpu.fused.kernels import BLOCK, fraction, image_at
from cnnexp.backends.gpu.kernels.index import ZERO, ConvSizes, f32, offset, padded_pixel, split, u32, unsigned
from cnnexp.backends.gpu.launch import Kernel

ACROSS = 4  # pixels of a row that one thread makes in `conv2d_backward_input`
MOST_SUMS = 32  # accumulators of a thread
FILTERS, CHANNELS = 2, 4  # of a thread: with more, small networks leave multiprocessors idle


@dataclass(frozen=True)
class ConvBlock:
    """A convolution with what follows it in registers."""

    sizes: ConvSizes
    pool: int  # S, side and step of the max-pool after it; 1 if there is none
    relu: bool  # whether a ReLU is before or after the pooling (the same thing, as max and ReLU commute)
    has_bias: bool
    from_order: bool  # its input is the data set, read through `order`; else the layer before, image by image
    from_bytes: bool  # the data set holds bytes

    @property
    def U(self) -> int:  # noqa: N802
        return self.sizes.P // self.pool

    @property
    def V(self) -> int:  # noqa: N802
        return self.sizes.Q // self.pool

    def input_rows(self, rows: int) -> int:
        """Return the rows of the padded image under `rows` rows of pooled outputs."""
        return (rows * self.pool - 1) * self.sizes.stride + self.sizes.K


@cache
def reading(conv: ConvBlock) -> tuple[str, Any, Any]:
    """Return the type of what the convolution reads, as in a signature, its `padded_pixel`, and a device function.

    That returns for (order, ahead, n) where the n-th image of the batch begins.
    """
    size, from_order = u32(conv.sizes.H * conv.sizes.W * conv.sizes.C), conv.from_order

    def first(order, ahead, n):
        return u32(image_at(order, ahead, n) * size) if from_order else u32(n * size)

    kind, number = ("u1[::1]", fraction) if conv.from_bytes else ("f4[::1]", f32)
    return kind, padded_pixel(conv.sizes, number), cuda.jit(device=True)(first)


@cache
def conv2d(conv: ConvBlock, rows: int, filters: int) -> Kernel:
    """A block makes `rows` rows of pooled outputs of one image, `filters` filters; a thread one (u, v) of several.

    Pixels lie channel by channel in shared memory, so that threads side by side read different banks; what a thread
    reads serves all its filters. w ends in the biases, if there are any.
    """
    _, _, C, K, F, stride, *_ = unsigned(conv.sizes)
    S, U, V, wide, high = (u32(v) for v in (conv.pool, conv.U, conv.V, conv.sizes.wide, conv.input_rows(rows)))
    together = filters_together(conv, filters)
    lanes = -(-filters // together)  # threads that share a place
    pitch, lanes_, abreast = u32(lanes * together), u32(lanes), u32(BLOCK // lanes)
    rows_, filters_, block = u32(rows), u32(filters), u32(BLOCK)
    tiles, deep = u32(-(-conv.U // rows)), u32(-(-conv.sizes.F // filters))
    x_seen, w_seen = u32(high * wide * C), u32(K * K * C * pitch)
    x_size, w_size = in_fours(int(x_seen)), in_fours(int(w_seen))
    cells, bias = u32(rows * conv.V), u32(K * K * C * F)
    (kind, input_pixel, first_pixel), has_bias, relu = reading(conv), conv.has_bias, conv.relu
    window, totals, inactive = conv.pool**2, together * conv.pool**2, u32(conv.pool**2)

    def conv2d(x, order, ahead, w, y, argmax):
        x_tile = cuda.shared.array(x_size, f32, alignment=16)
        w_tile = cuda.shared.array(w_size, f32, alignment=16)
        t = u32(cuda.threadIdx.x)
        n, tile, group = split(cuda.blockIdx.x, tiles, deep)
        u0, f0 = u32(tile * rows_), u32(group * filters_)
        # stage the pixels under the rows
        first = first_pixel(order, ahead, n)
        i = t
        while i < u32(x_size):
            row, col, c = split(i, wide, C)
            value = input_pixel(x, first, offset(u0, u32(S * stride), row), col, c) if i < x_seen else ZERO
            x_tile[offset(c, high, row, wide, col) if i < x_seen else i] = value
            i = u32(i + block)
        # stage the filters
        i = t
        while i < u32(w_size):
            k, f = split(i, pitch)
            f = u32(f0 + f)
            w_tile[i] = w[offset(k, F, f)] if i < w_seen and f < F else ZERO
            i = u32(i + block)
        cuda.syncthreads()
        total = cuda.local.array(totals, f32)
        weight = cuda.local.array(together, f32)
        cell, lane = split(t, lanes_)
        own = u32(lane * u32(together))
        cell = cell if cell < abreast else cells
        while cell < cells and cell < u32(u32(U - u0) * V):
            # the sums of a window's places, for some filters
            for k in range(totals):
                total[k] = ZERO
            u, v = split(cell, V)
            corner = offset(u32(u * S * stride), wide, u32(v * S * stride))
            for c in range(C):
                for a in range(K):
                    for e in range(K):
                        for g in range(together):
                            weight[g] = w_tile[own + offset(a, K, e, C, c, pitch, g)]
                        for i in range(S):
                            for j in range(S):
                                seen = offset(c, high, offset(i, stride, a), wide, offset(j, stride, e))
                                for g in range(together):
                                    total[(g * S + i) * S + j] += weight[g] * x_tile[corner + seen]
            # the largest of the window, bias, ReLU
            for g in range(together):
                lane = u32(own + g)
                f = u32(f0 + lane)
                if f < F and lane < filters_:
                    best, where, shift = total[g * window], u32(0), w[bias + f] if has_bias else ZERO
                    for k in range(1, window):
                        if total[g * window + k] > best:
                            best, where = total[g * window + k], u32(k)
                    best += shift
                    if relu and not best > ZERO:
                        best, where = ZERO, inactive
                    place = offset(n, U, u32(u0 + u), V, v, F, f)
                    y[place] = best
                    argmax[place] = np.uint8(where)
            cell = u32(cell + abreast)

    return Kernel(conv2d, f"void({kind}, u4[::1], u4, f4[::1], f4[::1], u1[::1])", BLOCK)


def filters_together(conv: ConvBlock, filters: int) -> int:
    """Return how many filters a thread of `conv2d` makes at once, their sums in registers."""
    return max(1, min(filters, FILTERS, MOST_SUMS // conv.pool**2))


def in_fours(size: int) -> int:
    """Return a size of shared memory that ends where four numbers read at once do."""
    return -(-size // 4) * 4


@cache
def conv2d_backward_weights(conv: ConvBlock, rows: int, pairs: int, slices: int) -> Kernel:
    """Partial gradients of filters and biases, through the argmax alone: a thread owns K * K weights of one (c, f).

    A block takes `rows` rows of pooled outputs of the images of one slice, and `pairs` pairs (c, f); its threads share
    out the places of a pair and add up in shared memory. partial[part] is as w of `conv2d`, part = slice, rows' number.
    """
    _, _, C, K, F, stride, *_ = unsigned(conv.sizes)
    S, U, V, wide = u32(conv.pool), u32(conv.U), u32(conv.V), u32(conv.sizes.wide)
    rows_, pairs_, slices_, block = u32(rows), u32(pairs), u32(slices), u32(BLOCK)
    splits, pair_groups = u32(-(-conv.U // rows)), u32(-(-conv.sizes.C * conv.sizes.F // pairs))
    x_size, cells = conv.input_rows(rows) * conv.sizes.wide * conv.sizes.C, u32(rows * conv.V)
    taps, sums, groups = conv.sizes.K**2, (conv.sizes.K**2 + 1) * BLOCK, u32(BLOCK // pairs)
    inactive, all_pairs, has_bias = u32(conv.pool**2), u32(C * F), conv.has_bias
    size = u32(taps * all_pairs + F * has_bias)
    kind, input_pixel, first_pixel = reading(conv)

    def conv2d_backward_weights(x, order, ahead, dy, argmax, partial, count):
        x_tile = cuda.shared.array(x_size, f32)
        shared_sums = cuda.shared.array(sums, f32)
        t = u32(cuda.threadIdx.x)
        s, pair_group, row_group = split(cuda.blockIdx.x, pair_groups, splits)
        group, lane = split(t, pairs_)
        u0, pair = u32(row_group * rows_), offset(pair_group, pairs_, lane)
        c, f = split(pair, F)
        total = cuda.local.array(taps, f32)
        for k in range(taps):
            total[k] = ZERO
        total_b = ZERO
        n = s
        while n < count:
            # stage the pixels under the rows
            first = first_pixel(order, ahead, n)
            cuda.syncthreads()
            i = t
            while i < u32(x_size):
                row, col, channel = split(i, wide, C)
                x_tile[i] = input_pixel(x, first, offset(u0, u32(S * stride), row), col, channel)
                i = u32(i + block)
            cuda.syncthreads()
            # follow the maximum of each window of the thread
            if pair < all_pairs and group < groups:
                cell = group
                while cell < cells and u32(u0 + cell // V) < U:
                    u, v = split(cell, V)
                    place = offset(n, U, u32(u0 + u), V, v, F, f)
                    # without a branch, since some thread of a warp takes it anyway, and it would put off the load of dy
                    where, g = u32(argmax[place]), dy[place]
                    active = where < inactive
                    g, (i, j) = g if active else ZERO, split(where if active else u32(0), S)
                    corner = offset(u32(offset(u, S, i) * stride), wide, u32(offset(v, S, j) * stride), C, c)
                    for a in range(K):
                        for e in range(K):
                            total[a * K + e] += g * x_tile[corner + offset(a, wide, e, C, 0)]
                    total_b += g
                    cell = u32(cell + groups)
            n = u32(n + slices_)
        # add up what the threads of a pair have
        for k in range(taps):
            shared_sums[offset(k, block, t)] = total[k]
        shared_sums[offset(taps, block, t)] = total_b
        cuda.syncthreads()
        i = t
        while i < u32((taps + 1) * pairs_):
            k, lane = split(i, pairs_)
            owner = offset(pair_group, pairs_, lane)
            # the biases' come after the weights'; the first channel's threads have them
            if owner < all_pairs and (k < u32(taps) or (has_bias and owner < F)):
                value = ZERO
                for g in range(groups):
                    value += shared_sums[offset(k, block, offset(g, pairs_, lane))]
                partial[offset(offset(s, splits, row_group), size, offset(k, all_pairs, owner))] = value
            i = u32(i + block)

    return Kernel(conv2d_backward_weights, f"void({kind}, u4[::1], u4, f4[::1], u1[::1], f4[::1], u4)", BLOCK)


@cache
def conv2d_backward_input(conv: ConvBlock, rows: int) -> Kernel:
    """A block makes `rows` rows of dx of one image, for stride 1; a thread `ACROSS` neighbours of several channels.

    The gradient is spread to the convolution's map in shared memory, and convolved with the flipped filters.
    """
    H, W, C, K, F, _, top, left, P, Q, *_ = unsigned(conv.sizes)
    S, U, V, rows_ = u32(conv.pool), u32(conv.U), u32(conv.V), u32(rows)
    together = min(conv.sizes.C, CHANNELS)
    groups = u32(-(-conv.sizes.C // together))
    pitch = u32(int(groups) * together)  # of a row of weights
    across, quads = u32(ACROSS), u32(-(-conv.sizes.W // ACROSS))
    high, broad = u32(rows + conv.sizes.K - 1), u32(in_fours(int(quads) * ACROSS + conv.sizes.K - 1))
    d_seen, w_seen = u32(F * high * broad), u32(K * K * F * pitch)
    d_size, w_size = in_fours(int(d_seen)), in_fours(int(w_seen))
    tiles, items, last = u32(-(-conv.sizes.H // rows)), u32(rows * int(quads * groups)), u32(conv.sizes.K - 1)
    block, seen, totals = u32(BLOCK), ACROSS + conv.sizes.K - 1, ACROSS * together

    def conv2d_backward_input(w, dy, argmax, dx):
        d_tile = cuda.shared.array(d_size, f32, alignment=16)
        w_tile = cuda.shared.array(w_size, f32, alignment=16)
        t = u32(cuda.threadIdx.x)
        n, tile = split(cuda.blockIdx.x, tiles)
        h0 = u32(tile * rows_)
        # stage the gradients, each at the place of its window's maximum
        i = t
        while i < u32(d_size):
            row, col, f = split(i, broad, F)
            p, q = u32(h0 + row + top), u32(col + left)  # and K - 1, so that they are not negative
            value = ZERO
            if i < d_seen and last <= p and u32(p - last) < P and last <= q and u32(q - last) < Q:
                (u, i_p), (v, i_q) = split(u32(p - last), S), split(u32(q - last), S)
                place = offset(n, U, u, V, v, F, f)
                if u32(argmax[place]) == offset(i_p, S, i_q):
                    value = dy[place]
            d_tile[offset(f, high, row, broad, col) if i < d_seen else i] = value
            i = u32(i + block)
        # stage the filters, flipped
        i = t
        while i < u32(w_size):
            k, f, c = split(i, F, pitch)
            value = ZERO
            if c < C and i < w_seen:
                value = w[offset(u32(K * K - 1 - k), C, c, F, f)]
            w_tile[i] = value
            i = u32(i + block)
        cuda.syncthreads()
        # convolve them
        total = cuda.local.array(totals, f32)
        d = cuda.local.array(seen, f32)
        item = t
        while item < items:
            row, quad, group = split(item, quads, groups)
            h, c0 = u32(h0 + row), u32(group * u32(together))
            corner = offset(row, broad, u32(quad * across))
            for j in range(totals):
                total[j] = ZERO
            for f in range(F):
                for a in range(K):
                    for j in range(seen):
                        d[j] = d_tile[corner + offset(f, high, a, broad, j)]
                    for e in range(K):
                        for g in range(together):
                            weight = w_tile[c0 + offset(a, K, e, F, f, pitch, g)]
                            for j in range(ACROSS):
                                total[g * ACROSS + j] += weight * d[j + e]
            for j in range(ACROSS):
                col = offset(quad, across, j)
                for g in range(together):
                    c = u32(c0 + g)
                    if h < H and col < W and c < C:
                        dx[offset(n, H, h, W, col, C, c)] = total[g * ACROSS + j]
            item = u32(item + block)

    return Kernel(conv2d_backward_input, "void(f4[::1], f4[::1], u1[::1], f4[::1])", BLOCK)
