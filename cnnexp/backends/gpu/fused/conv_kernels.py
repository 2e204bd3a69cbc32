"""The fused kernels of a convolution: with bias, max-pool and ReLU in one pass, and back through the argmax alone.

A convolution never writes its full map: bias, max-pool and ReLU follow in registers, and one byte per pooled value says
where it came from, `argmax` = row * S + column of the window, or S * S where ReLU shut it off. The gradient then goes
through that one place alone (castanheira, section 2.2.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from cnnexp.backends.gpu.fused.kernels import BLOCK, as_it_is, fraction
from cnnexp.backends.gpu.kernels import ZERO, ConvSizes, f32, padded_pixel, u32, unsigned
from cnnexp.backends.gpu.launch import Kernel

ACROSS = 4  # pixels of a row that one thread makes in `conv2d_backward_input`
MOST_SUMS = 32  # accumulators of a thread
FILTERS, CHANNELS = 2, 4  # of a thread: with more, small networks leave multiprocessors idle


@dataclass(frozen=True)
class ConvBlock:
    """A convolution with what follows it in registers.

    Attributes:
        sizes: of the convolution.
        pool: S, side and step of the max-pool after it; 1 if there is none.
        relu: whether a ReLU is before or after the pooling (the same thing, as max and ReLU commute).
        has_bias: of the convolution.
        from_order: its input is the data set, read through `order`; else the layer before, image by image.
        from_bytes: the data set holds bytes.
    """

    sizes: ConvSizes
    pool: int
    relu: bool
    has_bias: bool
    from_order: bool
    from_bytes: bool

    @property
    def U(self) -> int:  # noqa: N802
        return self.sizes.P // self.pool

    @property
    def V(self) -> int:  # noqa: N802
        return self.sizes.Q // self.pool

    @property
    def wide(self) -> int:
        """Columns of the padded image that windows see."""
        return (self.sizes.Q - 1) * self.sizes.stride + self.sizes.K

    def input_rows(self, rows: int) -> int:
        """Return the rows of the padded image under `rows` rows of pooled outputs."""
        return (rows * self.pool - 1) * self.sizes.stride + self.sizes.K

    @property
    def shut(self) -> int:
        """What stands for the argmax of a window that ReLU shut off."""
        return self.pool**2

    @property
    def input_type(self) -> str:
        return "uint8[::1]" if self.from_bytes else "float32[::1]"


def pixel_of(conv: ConvBlock) -> Any:
    """Return `padded_pixel` of what the convolution reads."""
    return padded_pixel(conv.sizes, fraction if conv.from_bytes else as_it_is)


@cache
def pooled_of(conv: ConvBlock) -> Any:
    """Return the device function (total, first, bias): the largest of a window's sums with bias and ReLU; argmax."""
    window, relu, shut = conv.pool**2, conv.relu, u32(conv.shut)

    def pooled(total, first, bias):
        best, where = total[first], u32(0)
        for k in range(1, window):
            if total[first + k] > best:
                best, where = total[first + k], u32(k)
        best += bias
        if relu and not best > ZERO:
            best, where = ZERO, shut
        return best, where

    return cuda.jit(device=True)(pooled)


@cache
def conv2d(conv: ConvBlock, rows: int, filters: int) -> Kernel:
    """A block makes `rows` rows of pooled outputs of one image, `filters` filters; a thread one (u, v) of several.

    Pixels lie channel by channel in shared memory, so that threads side by side read different banks; what a thread
    reads serves all its filters.
    """
    H, W, C, K, F, stride, _, _, _, _ = unsigned(conv.sizes)
    S, U, V, wide, high = u32(conv.pool), u32(conv.U), u32(conv.V), u32(conv.wide), u32(conv.input_rows(rows))
    together = filters_together(conv, filters)
    lanes, pitch = u32(-(-filters // together)), u32(-(-filters // together) * together)  # of a row of weights
    rows_, filters_, block, abreast = u32(rows), u32(filters), u32(BLOCK), u32(BLOCK // int(lanes))
    tiles, deep = u32(-(-conv.U // rows)), u32(-(-conv.sizes.F // filters))
    x_seen, w_seen = int(high * wide * C), conv.sizes.K**2 * conv.sizes.C * int(pitch)
    x_size, w_size = in_fours(x_seen), in_fours(w_seen)
    image, cells = u32(H * W * C), u32(rows * conv.V)
    input_pixel, pooled, from_order, has_bias = pixel_of(conv), pooled_of(conv), conv.from_order, conv.has_bias
    window, totals = conv.pool**2, together * conv.pool**2

    def conv2d(x, order, cursor, ahead, w, b, y, argmax):
        x_tile = cuda.shared.array(x_size, f32, alignment=16)
        w_tile = cuda.shared.array(w_size, f32, alignment=16)
        t = u32(cuda.threadIdx.x)
        f0 = u32(u32(u32(cuda.blockIdx.x) % deep) * filters_)
        u0 = u32(u32(u32(u32(cuda.blockIdx.x) // deep) % tiles) * rows_)
        n = u32(u32(cuda.blockIdx.x) // u32(deep * tiles))
        first = u32(n * image)
        if from_order:
            first = u32(order[u32(cursor[0] + ahead + n)] * image)
        i = t
        while i < u32(x_size):
            c, place = u32(i % C), u32(i // C)
            row, col = u32(u0 * S * stride + place // wide), u32(place % wide)  # in the padded image
            value = input_pixel(x, first, row, col, c) if i < u32(x_seen) else ZERO
            x_tile[u32(u32(c * u32(high * wide)) + place) if i < u32(x_seen) else i] = value
            i = u32(i + block)
        i = t
        while i < u32(w_size):
            k, f = u32(i // pitch), u32(f0 + i % pitch)
            w_tile[i] = w[u32(k * F + f)] if i < u32(w_seen) and f < F else ZERO
            i = u32(i + block)
        cuda.syncthreads()
        own = u32(u32(t % lanes) * u32(together))
        cell = u32(t // lanes)
        total = cuda.local.array(totals, f32)
        weight = cuda.local.array(together, f32)
        while cell < cells and cell < u32(u32(U - u0) * V) and u32(t // lanes) < abreast:
            for k in range(totals):
                total[k] = ZERO
            corner = u32(u32(u32(cell // V) * S * stride) * wide + u32(cell % V) * S * stride)
            for c in range(C):
                for a in range(K):
                    for e in range(K):
                        tap = u32(u32(u32(u32(a) * K + u32(e)) * C + u32(c)) * pitch)
                        for g in range(together):
                            weight[g] = w_tile[own + u32(tap + u32(g))]
                        for i in range(S):
                            for j in range(S):
                                row, col = u32(u32(i) * stride + u32(a)), u32(u32(j) * stride + u32(e))
                                pixel = x_tile[corner + u32(u32(u32(c) * high + row) * wide + col)]
                                for g in range(together):
                                    total[(g * S + i) * S + j] += weight[g] * pixel
            for g in range(together):
                f = u32(f0 + own + u32(g))
                if f < F and u32(own + u32(g)) < filters_:
                    best, where = pooled(total, g * window, b[f] if has_bias else ZERO)
                    place = u32(u32(u32(u32(n * U + u0) * V) + cell) * F + f)
                    y[place] = best
                    argmax[place] = np.uint8(where)
            cell = u32(cell + abreast)

    arrays = "float32[::1], float32[::1], float32[::1], uint8[::1]"
    return Kernel(conv2d, f"void({conv.input_type}, uint32[::1], uint32[::1], uint32, {arrays})", BLOCK)


def filters_together(conv: ConvBlock, filters: int) -> int:
    """Return how many filters a thread of `conv2d` makes at once, their sums in registers."""
    return max(1, min(filters, FILTERS, MOST_SUMS // conv.pool**2))


def in_fours(size: int) -> int:
    """Return a size of shared memory that ends where four numbers read at once do."""
    return -(-size // 4) * 4


@cache
def conv2d_backward_weights(conv: ConvBlock, rows: int, pairs: int, slices: int) -> Kernel:
    """Partial gradients of the weights, through the argmax alone: a thread owns the K * K weights of one (c, f).

    A block takes `rows` rows of pooled outputs of the images of one slice, and `pairs` pairs (c, f); its threads share
    out the places of a pair and add up in shared memory. part = slice * splits + rows' number.
    """
    H, W, C, K, F, stride, _, _, _, _ = unsigned(conv.sizes)
    S, U, V, wide = u32(conv.pool), u32(conv.U), u32(conv.V), u32(conv.wide)
    rows_, pairs_, slices_, block = u32(rows), u32(pairs), u32(slices), u32(BLOCK)
    splits, pair_groups = u32(-(-conv.U // rows)), u32(-(-conv.sizes.C * conv.sizes.F // pairs))
    x_size, image, cells = conv.input_rows(rows) * conv.wide * conv.sizes.C, u32(H * W * C), u32(rows * conv.V)
    taps, sums, groups = conv.sizes.K**2, (conv.sizes.K**2 + 1) * BLOCK, u32(BLOCK // pairs)
    size, shut, all_pairs = u32(taps * int(C * F)), u32(conv.shut), u32(C * F)
    from_order, has_bias, input_pixel = conv.from_order, conv.has_bias, pixel_of(conv)

    def conv2d_backward_weights(x, order, cursor, ahead, dy, argmax, arena, w_base, b_base, count):
        x_tile = cuda.shared.array(x_size, f32)
        shared_sums = cuda.shared.array(sums, f32)
        t = u32(cuda.threadIdx.x)
        u0 = u32(u32(u32(cuda.blockIdx.x) % splits) * rows_)
        pair = u32(u32(u32(u32(cuda.blockIdx.x) // splits) % pair_groups) * pairs_ + t % pairs_)
        s = u32(u32(cuda.blockIdx.x) // u32(splits * pair_groups))
        c, f, group = u32(pair // F), u32(pair % F), u32(t // pairs_)
        total = cuda.local.array(taps, f32)
        for k in range(taps):
            total[k] = ZERO
        total_b = ZERO
        n = s
        while n < count:
            first = u32(n * image)
            if from_order:
                first = u32(order[u32(cursor[0] + ahead + n)] * image)
            cuda.syncthreads()
            i = t
            while i < u32(x_size):
                row = u32(u0 * S * stride + u32(u32(i // C) // wide))  # in the padded image
                col = u32(u32(i // C) % wide)
                x_tile[i] = input_pixel(x, first, row, col, u32(i % C))
                i = u32(i + block)
            cuda.syncthreads()
            if pair < all_pairs and group < groups:
                cell = group
                while cell < cells and u32(u0 + cell // V) < U:
                    place = u32(u32(u32(u32(n * U + u0) * V) + cell) * F + f)
                    where = u32(argmax[place])
                    if where < shut:
                        g = dy[place]
                        row = u32(u32(u32(cell // V) * S + where // S) * stride)
                        col = u32(u32(u32(cell % V) * S + where % S) * stride)
                        corner = u32(u32(row * wide + col) * C + c)
                        for a in range(K):
                            for e in range(K):
                                total[a * K + e] += g * x_tile[corner + u32(u32(a) * wide + u32(e)) * C]
                        total_b += g
                    cell = u32(cell + groups)
            n = u32(n + slices_)
        for k in range(taps):
            shared_sums[u32(u32(k) * block + t)] = total[k]
        shared_sums[u32(u32(taps) * block + t)] = total_b
        cuda.syncthreads()
        part = u32(s * splits + u32(cuda.blockIdx.x) % splits)
        i = t
        while i < u32(u32(taps + 1) * pairs_):
            k, lane = u32(i // pairs_), u32(i % pairs_)
            owner = u32(pair - t % pairs_ + lane)
            if owner < all_pairs:
                value = ZERO
                for g in range(groups):
                    value += shared_sums[u32(k * block + u32(g) * pairs_ + lane)]
                if k < u32(taps):
                    arena[u32(w_base + part * size + k * all_pairs + owner)] = value
                elif has_bias and owner < F:
                    arena[u32(b_base + part * F + owner)] = value
            i = u32(i + block)

    signature = (
        f"void({conv.input_type}, uint32[::1], uint32[::1], uint32, float32[::1], uint8[::1], float32[::1], uint32, "
        "uint32, uint32)"
    )
    return Kernel(conv2d_backward_weights, signature, BLOCK)


@cache
def conv2d_backward_input(conv: ConvBlock, rows: int) -> Kernel:
    """A block makes `rows` rows of dx of one image, for stride 1; a thread `ACROSS` neighbours of several channels.

    The gradient is spread to the convolution's map in shared memory, and convolved with the turned filters.
    """
    H, W, C, K, F, _, top, left, P, Q = unsigned(conv.sizes)
    S, U, V, rows_ = u32(conv.pool), u32(conv.U), u32(conv.V), u32(rows)
    together = min(conv.sizes.C, CHANNELS)
    groups = u32(-(-conv.sizes.C // together))
    pitch = u32(int(groups) * together)  # of a row of weights
    across, quads = u32(ACROSS), u32(-(-conv.sizes.W // ACROSS))
    high, broad = u32(rows + conv.sizes.K - 1), u32(in_fours(int(quads) * ACROSS + conv.sizes.K - 1))
    d_size, w_size = in_fours(int(F * high * broad)), in_fours(conv.sizes.K**2 * conv.sizes.F * int(pitch))
    tiles, items, last = u32(-(-conv.sizes.H // rows)), u32(rows * int(quads * groups)), u32(conv.sizes.K - 1)
    block, seen, totals = u32(BLOCK), ACROSS + conv.sizes.K - 1, ACROSS * together

    def conv2d_backward_input(w, dy, argmax, dx):
        d_tile = cuda.shared.array(d_size, f32, alignment=16)
        w_tile = cuda.shared.array(w_size, f32, alignment=16)
        t = u32(cuda.threadIdx.x)
        h0 = u32(u32(u32(cuda.blockIdx.x) % tiles) * rows_)
        n = u32(u32(cuda.blockIdx.x) // tiles)
        i = t
        while i < u32(d_size):
            f = u32(i % F)
            # p and q plus K - 1, so that they are not negative
            q = u32(u32(u32(i // F) % broad) + left)
            p = u32(u32(h0 + u32(u32(i // F) // broad)) + top)
            value = ZERO
            if i < u32(F * high * broad) and last <= p and u32(p - last) < P and last <= q and u32(q - last) < Q:
                p, q = u32(p - last), u32(q - last)
                place = u32(u32(u32(n * U + p // S) * V + q // S) * F + f)
                if u32(argmax[place]) == u32(u32(p % S) * S + q % S):
                    value = dy[place]
            d_tile[u32(f * u32(high * broad) + i // F) if i < u32(F * high * broad) else i] = value
            i = u32(i + block)
        i = t
        while i < u32(w_size):
            c, f, k = u32(i % pitch), u32(u32(i // pitch) % F), u32(i // u32(pitch * F))
            value = ZERO
            if c < C and k < u32(K * K):
                value = w[u32(u32(u32(u32(K * K - u32(1) - k) * C) + c) * F + f)]
            w_tile[i] = value
            i = u32(i + block)
        cuda.syncthreads()
        total = cuda.local.array(totals, f32)
        d = cuda.local.array(seen, f32)
        item = t
        while item < items:
            group, quad = u32(item % groups), u32(u32(item // groups) % quads)
            row = u32(u32(item // groups) // quads)
            c0 = u32(group * u32(together))
            for j in range(totals):
                total[j] = ZERO
            for f in range(F):
                for a in range(K):
                    corner = u32(u32(u32(f) * high + row + u32(a)) * broad + quad * across)
                    for j in range(seen):
                        d[j] = d_tile[corner + u32(j)]
                    for e in range(K):
                        tap = u32(u32(u32(u32(a) * K + u32(e)) * F + u32(f)) * pitch)
                        for g in range(together):
                            weight = w_tile[c0 + u32(tap + u32(g))]
                            for j in range(ACROSS):
                                total[g * ACROSS + j] += weight * d[j + e]
            h = u32(h0 + row)
            for j in range(ACROSS):
                col = u32(quad * across + u32(j))
                for g in range(together):
                    if h < H and col < W and u32(c0 + u32(g)) < C:
                        dx[u32(u32(u32(u32(n * H + h) * W + col) * C + c0) + u32(g))] = total[g * ACROSS + j]
            item = u32(item + block)

    return Kernel(conv2d_backward_input, "void(float32[::1], float32[::1], uint8[::1], float32[::1])", BLOCK)
