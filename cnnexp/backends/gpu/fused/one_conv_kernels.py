"""The kernels of a network of one convolution, pooling and one linear layer: see `one_conv`."""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import cuda

from cnnexp.backends.gpu.device import SIMULATED
from cnnexp.backends.gpu.fused.conv_kernels import ConvBlock, pixel_of, pooled_of
from cnnexp.backends.gpu.fused.kernels import BLOCK
from cnnexp.backends.gpu.fused.linear_kernels import lanes_of, softmax_of
from cnnexp.backends.gpu.kernels import ZERO, f32, u32, unsigned
from cnnexp.backends.gpu.launch import Kernel

IMAGES = 2 if SIMULATED else 4  # of a block, forward: a linear weight is read once for all of them
PAIR = 2  # filters of a thread, forward
AHEAD = 4  # images of a thread whose argmaxes are on their way at once, backward
COLUMNS = 4 if SIMULATED else 16  # a sum over a block goes through so many sums of BLOCK / COLUMNS


@cache
def forward(conv: ConvBlock, O: int, rows: int, filters: int, batch_size: int) -> Kernel:  # noqa: E741
    """y, argmax, and partial scores: a block takes `rows` rows of outputs of IMAGES images, `filters` filters.

    partial[part, n, o] = sum over the block's features d of y[n, d] * wt[o, d]; part = rows' number, filters' number. A
    thread makes PAIR filters at once, so that a pixel is read from shared memory for both.
    """
    H, W, C, K, F, stride, _, _, _, _ = unsigned(conv.sizes)
    S, U, V, wide, high = (u32(v) for v in (conv.pool, conv.U, conv.V, conv.wide, conv.input_rows(rows)))
    rows_, filters_, block = u32(rows), u32(filters), u32(BLOCK)
    tiles, deep = u32(-(-conv.U // rows)), u32(-(-conv.sizes.F // filters))
    image, seen = u32(H * W * C), u32(high * wide * C)
    x_size, taps, window, scores = IMAGES * int(seen), conv.sizes.K**2 * conv.sizes.C, conv.pool**2, IMAGES * O
    wide_lanes = -(-filters // PAIR)
    cells, abreast, lanes = u32(rows * conv.V), u32(wide_lanes), u32(BLOCK // wide_lanes)
    columns, sums_size = u32(COLUMNS), O * BLOCK
    D, O_, batch, pair = u32(U * V * F), u32(O), u32(batch_size), PAIR
    has_bias, input_pixel, pooled_by = conv.has_bias, pixel_of(conv), pooled_of(conv)
    weights, totals, pooled_size = PAIR * taps, PAIR * window, PAIR * IMAGES

    def forward(x, order, cursor, ahead, w, b, wt, y, argmax, partial, count):
        firsts = cuda.shared.array(IMAGES, np.uint32)  # where an image begins in the data set
        x_tile = cuda.shared.array(x_size, f32)
        sums = cuda.shared.array(sums_size, f32)
        t = u32(cuda.threadIdx.x)
        f0 = u32(u32(u32(cuda.blockIdx.x) % deep) * filters_)
        u0 = u32(u32(u32(u32(cuda.blockIdx.x) // deep) % tiles) * rows_)
        n0 = u32(u32(u32(cuda.blockIdx.x) // u32(deep * tiles)) * u32(IMAGES))
        if t < u32(IMAGES):
            firsts[t] = u32(order[u32(cursor[0] + ahead + n0 + t)] * image) if u32(n0 + t) < count else u32(0)
        cuda.syncthreads()
        i = t
        while i < u32(x_size):
            n, place = u32(i // seen), u32(i % seen)
            row = u32(u0 * S * stride + u32(u32(place // C) // wide))  # in the padded image
            col = u32(u32(place // C) % wide)
            x_tile[i] = input_pixel(x, firsts[n], row, col, u32(place % C)) if u32(n0 + n) < count else ZERO
            i = u32(i + block)
        cuda.syncthreads()
        score = cuda.local.array(scores, f32)
        for k in range(scores):
            score[k] = ZERO
        lane = u32(t % abreast)
        f = u32(f0 + lane)
        if f < F and lane < filters_ and t < u32(lanes * abreast):
            weight = cuda.local.array(weights, f32)
            total = cuda.local.array(totals, f32)
            pooled = cuda.local.array(pooled_size, f32)
            bias = cuda.local.array(pair, f32)
            active = cuda.local.array(pair, np.bool_)
            for g in range(pair):
                own = u32(f + u32(g) * abreast)
                active[g] = own < F and u32(lane + u32(g) * abreast) < filters_
                bias[g] = b[own] if has_bias and active[g] else ZERO
                for k in range(taps):
                    weight[g * taps + k] = w[u32(u32(k) * F + own)] if active[g] else ZERO
            cell = u32(t // abreast)
            while cell < cells and u32(u0 + cell // V) < U:
                feature = u32(u32(u32(u0 * V) + cell) * F + f)
                corner = u32(u32(u32(u32(cell // V) * S * stride) * wide + u32(cell % V) * S * stride) * C)
                for m in range(IMAGES):
                    for k in range(totals):
                        total[k] = ZERO
                    for a in range(K):
                        for e in range(K):
                            for c in range(C):
                                for i in range(S):
                                    for j in range(S):
                                        row = u32(u32(i) * stride + u32(a))
                                        col = u32(u32(j) * stride + u32(e))
                                        pixel = x_tile[corner + u32(u32(m) * seen + u32(row * wide + col) * C + u32(c))]
                                        for g in range(pair):
                                            tap = (a * K + e) * C + c
                                            total[(g * S + i) * S + j] += weight[g * taps + tap] * pixel
                    for g in range(pair):
                        best, where = pooled_by(total, g * window, bias[g])
                        pooled[g * IMAGES + m] = best if active[g] else ZERO
                        if u32(n0 + u32(m)) < count and active[g]:
                            place = u32(u32(n0 + u32(m)) * D + u32(feature + u32(g) * abreast))
                            y[place] = best
                            argmax[place] = np.uint8(where)
                for g in range(pair):
                    own = u32(feature + u32(g) * abreast) if active[g] else feature
                    for o in range(O):
                        weight_o = wt[own + u32(u32(o) * D)]  # not wrapped to 32 bits: one address for all o
                        for m in range(IMAGES):
                            score[m * O + o] += pooled[g * IMAGES + m] * weight_o
                cell = u32(cell + lanes)
        part = u32(u32(cuda.blockIdx.x) % u32(deep * tiles))
        for m in range(IMAGES):
            cuda.syncthreads()
            for o in range(O):
                sums[u32(u32(o) * block + t)] = score[m * O + o]
            cuda.syncthreads()
            value = ZERO
            i = t
            while i < u32(O_ * columns):
                value = ZERO
                first = u32(u32(i // columns) * block + i % columns)
                for k in range(u32(block // columns)):
                    value += sums[u32(first + u32(k) * columns)]
                sums[first] = value  # read by no other thread
                i = u32(i + block)
            cuda.syncthreads()
            if t < O_ and u32(n0 + u32(m)) < count:
                value = ZERO
                for k in range(columns):
                    value += sums[u32(u32(t * block) + u32(k))]
                partial[u32(u32(part * batch + n0 + u32(m)) * O_ + t)] = value

    arrays = "float32[::1], float32[::1], float32[::1], float32[::1], uint8[::1], float32[::1]"
    return Kernel(forward, f"void({conv.input_type}, uint32[::1], uint32[::1], uint32, {arrays}, uint32)", BLOCK)


@cache
def head(O: int, has_bias: bool, parts: int, batch_size: int) -> Kernel:  # noqa: E741
    """Scores from their parts, softmax, cross entropy, its gradient, and per block the partial gradient of the bias."""
    O_, lanes, batch, parts_ = u32(O), u32(lanes_of(O)), u32(batch_size), u32(parts)
    images, softmax = u32(BLOCK // int(lanes)), softmax_of(O)

    def head(partial, b, labels, order, cursor, ahead, scale, scores, d_scores, losses, hits, arena, b_base, count):
        score = cuda.shared.array(BLOCK, f32)
        d_score = cuda.shared.array(BLOCK, f32)
        t = u32(cuda.threadIdx.x)
        o, n = u32(t % lanes), u32(u32(cuda.blockIdx.x) * images + t // lanes)
        active = n < count and o < O_ and t < u32(images * lanes)
        if active:
            value = b[o] if has_bias else ZERO
            for part in range(parts_):
                value += partial[u32(u32(u32(part) * batch + n) * O_ + o)]
            score[t] = value
            scores[u32(n * O_ + o)] = value
        cuda.syncthreads()
        g = ZERO
        if active:
            first, place = u32(t - o), u32(cursor[0] + ahead + n)
            label = u32(labels[order[place]])
            g, loss, hit = softmax(score, first, o, label, scale)
            d_scores[u32(n * O_ + o)] = g
            if o == label:
                losses[place], hits[place] = loss, np.uint8(1) if hit else np.uint8(0)
        d_score[t] = g
        cuda.syncthreads()
        if has_bias and t < O_:
            value = ZERO
            for k in range(images):
                value += d_score[u32(u32(k) * lanes + t)]
            arena[u32(b_base + u32(cuda.blockIdx.x) * O_ + t)] = value

    signature = (
        "void(float32[::1], float32[::1], int32[::1], uint32[::1], uint32[::1], uint32, float32, float32[::1], "
        "float32[::1], float32[::1], uint8[::1], float32[::1], uint32, uint32)"
    )
    return Kernel(head, signature, BLOCK)


@cache
def backward(conv: ConvBlock, O: int, filters: int, staged: int) -> Kernel:  # noqa: E741
    """The gradient of the linear weights, whole, and of the filters, partial, one part per place (u, v).

    A block takes one place and `filters` filters; a thread one filter and every (BLOCK / filters)-th image. Images'
    patches and d_scores are staged in shared memory, `staged` images at a time. A thread asks memory for AHEAD images
    before it waits for the first.
    """
    H, W, C, K, F, stride, _, _, _, _ = unsigned(conv.sizes)
    S, U, V, filters_, block = (u32(v) for v in (conv.pool, conv.U, conv.V, filters, BLOCK))
    deep, walkers, side = u32(-(-conv.sizes.F // filters)), u32(BLOCK // filters), u32(conv.input_rows(1))
    image, patch, D = u32(H * W * C), u32(side * side * C), u32(U * V * F)
    taps, shut, staged_ = conv.sizes.K**2 * conv.sizes.C, u32(conv.shut), u32(staged)
    pitch = u32(-(-O // 4) * 4)  # so that a row of d_scores begins where four numbers are read at once
    patch_size, d_size, values = staged * int(patch), staged * int(pitch), O + taps + 1
    sums_size, size, O_ = values * BLOCK, u32(taps * int(F)), u32(O)
    has_bias, input_pixel = conv.has_bias, pixel_of(conv)

    def backward(x, order, cursor, ahead, w_linear, y, argmax, d_scores, arena, w_base, b_base, linear_base, count):
        firsts = cuda.shared.array(staged, np.uint32)  # where an image begins in the data set
        patches = cuda.shared.array(patch_size, f32)
        d_tile = cuda.shared.array(d_size, f32, alignment=16)
        sums = cuda.shared.array(sums_size, f32)
        t = u32(cuda.threadIdx.x)
        f0 = u32(u32(u32(cuda.blockIdx.x) % deep) * filters_)
        cell = u32(u32(cuda.blockIdx.x) // deep)
        row0, col0 = u32(u32(cell // V) * S * stride), u32(u32(cell % V) * S * stride)  # in the padded image
        f = u32(f0 + t % filters_)
        feature = u32(cell * F + f)
        working = f < F and t < u32(walkers * filters_)
        weight = cuda.local.array(O, f32)
        total = cuda.local.array(values, f32)
        taken = cuda.local.array(AHEAD, np.uint32)
        pooled = cuda.local.array(AHEAD, f32)
        for k in range(O):
            weight[k] = w_linear[u32(feature * O_ + u32(k))] if working else ZERO
        for k in range(values):
            total[k] = ZERO
        n0 = u32(0)
        while n0 < count:
            cuda.syncthreads()
            i = t
            while i < staged_:
                firsts[i] = u32(order[u32(cursor[0] + ahead + n0 + i)] * image) if u32(n0 + i) < count else u32(0)
                i = u32(i + block)
            i = t
            while i < u32(d_size):
                n, k = u32(i // pitch), u32(i % pitch)
                d_tile[i] = d_scores[u32(u32(n0 + n) * O_ + k)] if u32(n0 + n) < count and k < O_ else ZERO
                i = u32(i + block)
            cuda.syncthreads()
            i = t
            while i < u32(patch_size):
                n, place = u32(i // patch), u32(i % patch)
                row = u32(row0 + u32(u32(place // C) // side))
                col = u32(col0 + u32(place // C) % side)
                patches[i] = input_pixel(x, firsts[n], row, col, u32(place % C)) if u32(n0 + n) < count else ZERO
                i = u32(i + block)
            cuda.syncthreads()
            limit = u32(min(staged_, u32(count - n0)))
            m0 = u32(t // filters_) if working else limit
            while m0 < limit:
                for j in range(AHEAD):
                    m = u32(m0 + u32(j) * walkers)
                    taken[j], pooled[j] = shut, ZERO
                    if m < limit:
                        taken[j] = u32(argmax[u32(u32(n0 + m) * D + feature)])
                        pooled[j] = y[u32(u32(n0 + m) * D + feature)]
                for j in range(AHEAD):
                    where = taken[j]
                    if where < shut:
                        m = u32(m0 + u32(j) * walkers)
                        g = ZERO
                        for k in range(O):
                            d = d_tile[u32(m * pitch) + u32(k)]
                            g += d * weight[k]
                            total[k] += pooled[j] * d
                        corner = u32(m * patch + u32(u32(where // S) * stride * side + u32(where % S) * stride) * C)
                        for a in range(K):
                            for e in range(K):
                                for c in range(C):
                                    pixel = patches[corner + u32(u32(u32(a) * side + u32(e)) * C + u32(c))]
                                    total[O + (a * K + e) * C + c] += g * pixel
                        total[O + taps] += g
                m0 = u32(m0 + u32(AHEAD) * walkers)
            n0 = u32(n0 + staged_)
        for k in range(values):
            sums[u32(u32(k) * block + t)] = total[k]
        cuda.syncthreads()
        i = t
        while i < u32(u32(values) * filters_):
            # the linear gradient is (feature, o) in memory, the filters' (tap, f)
            linear = i < u32(O_ * filters_)
            k = u32(i % O_) if linear else u32(i // filters_)
            lane = u32(i // O_) if linear else u32(i % filters_)
            if u32(f0 + lane) < F:
                value = ZERO
                for z in range(walkers):
                    value += sums[u32(k * block + u32(z) * filters_ + lane)]
                if linear:
                    arena[u32(linear_base + u32(cell * F + f0 + lane) * O_ + k)] = value
                elif k < u32(O + taps):
                    arena[u32(w_base + cell * size + u32(k - O_) * F + f0 + lane)] = value
                elif has_bias:
                    arena[u32(b_base + cell * F + f0 + lane)] = value
            i = u32(i + block)

    arrays = "float32[::1], float32[::1], uint8[::1], float32[::1], float32[::1]"
    signature = f"void({conv.input_type}, uint32[::1], uint32[::1], uint32, {arrays}, uint32, uint32, uint32, uint32)"
    return Kernel(backward, signature, BLOCK)
