"""The fused kernels of linear layers: with the ReLU that follows, or with softmax, loss and their gradients."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from cnnexp.backends.gpu.fused.kernels import BLOCK, LANES
from cnnexp.backends.gpu.kernels import ONE, ZERO, f32, u32
from cnnexp.backends.gpu.launch import Kernel

WIDE_BLOCK = 512  # threads, for the few, long sums of a layer's outputs
PER = 1  # images of a thread in `linear_backward_input`: with more, small batches leave multiprocessors idle
AHEAD = 4  # images that a thread of `linear_backward_weights` asks for before it waits for the first


@cache
def linear(D: int, O: int, has_bias: bool, relu: bool) -> Kernel:  # noqa: E741
    """y = relu(x @ w + b): a block makes LANES outputs of one image, its threads share out the D products of each."""
    D, O = u32(D), u32(O)  # noqa: E741
    lanes, parts, block = u32(LANES), u32(WIDE_BLOCK // LANES), WIDE_BLOCK
    groups = u32(-(-int(O) // LANES))

    def linear(x, w, b, y):
        sums = cuda.shared.array(block, f32)
        t = u32(cuda.threadIdx.x)
        n = u32(u32(cuda.blockIdx.x) // groups)
        o = u32(u32(u32(cuda.blockIdx.x) % groups) * lanes + t % lanes)
        total = ZERO
        if o < O:
            k = u32(t // lanes)
            while k < D:
                total += x[u32(n * D + k)] * w[u32(k * O + o)]
                k = u32(k + parts)
        sums[t] = total
        cuda.syncthreads()
        if t < lanes and o < O:
            value = b[o] if has_bias else ZERO
            for part in range(parts):
                value += sums[u32(u32(part) * lanes + t)]
            y[u32(n * O + o)] = value if not relu or value > ZERO else ZERO

    return Kernel(linear, "void(float32[::1], float32[::1], float32[::1], float32[::1])", WIDE_BLOCK)


@cache
def linear_backward_input(D: int, O: int, relu: bool) -> Kernel:  # noqa: E741
    """dx = dy @ w.T, dy only where y > 0 if the layer ends in ReLU: a block makes LANES inputs of PER * Z images.

    A tile of w goes through shared memory, since threads side by side need rows of it and memory wants columns.
    """
    D, O = u32(D), u32(O)  # noqa: E741
    lanes, Z, block = u32(LANES), u32(BLOCK // LANES), u32(BLOCK)
    chunk = u32(min(int(O), LANES))
    pitch, w_size, d_size = u32(chunk + 1), LANES * (int(chunk) + 1), PER * (BLOCK // LANES) * int(chunk)
    groups, images = u32(-(-int(D) // LANES)), u32(PER * (BLOCK // LANES))

    def linear_backward_input(w, y, dy, dx, count):
        w_tile = cuda.shared.array(w_size, f32)
        d_tile = cuda.shared.array(d_size, f32)
        t = u32(cuda.threadIdx.x)
        lane, z = u32(t % lanes), u32(t // lanes)
        k0 = u32(u32(u32(cuda.blockIdx.x) % groups) * lanes)
        n0 = u32(u32(u32(cuda.blockIdx.x) // groups) * images)
        total = cuda.local.array(PER, f32)
        for j in range(PER):
            total[j] = ZERO
        o0 = u32(0)
        while o0 < O:
            cuda.syncthreads()
            i = t
            while i < u32(lanes * chunk):
                k, o = u32(k0 + i // chunk), u32(o0 + i % chunk)
                w_tile[u32(u32(i // chunk) * pitch + i % chunk)] = w[u32(k * O + o)] if k < D and o < O else ZERO
                i = u32(i + block)
            i = t
            while i < u32(images * chunk):
                n, o = u32(n0 + i // chunk), u32(o0 + i % chunk)
                value = ZERO
                if n < count and o < O and (not relu or y[u32(n * O + o)] > ZERO):
                    value = dy[u32(n * O + o)]
                d_tile[i] = value
                i = u32(i + block)
            cuda.syncthreads()
            for o in range(chunk):
                weight = w_tile[u32(lane * pitch + u32(o))]
                for j in range(PER):
                    total[j] += weight * d_tile[u32(u32(u32(u32(j) * Z) + z) * chunk + u32(o))]
            o0 = u32(o0 + chunk)
        for j in range(PER):
            n = u32(n0 + u32(u32(j) * Z) + z)
            if n < count and u32(k0 + lane) < D:
                dx[u32(n * D + k0 + lane)] = total[j]

    signature = "void(float32[::1], float32[::1], float32[::1], float32[::1], uint32)"
    return Kernel(linear_backward_input, signature, BLOCK)


@cache
def linear_backward_weights(D: int, O: int, has_bias: bool, relu: bool, slices: int) -> Kernel:  # noqa: E741
    """Partial gradients of w and b, one thread per element and slice of the images; the bias is row D of w."""
    D, O, slices_ = u32(D), u32(O), u32(slices)  # noqa: E741
    size, rows = u32(D * O), u32(D + 1) if has_bias else u32(D)

    def linear_backward_weights(x, y, dy, arena, w_base, b_base, images, count):
        gs, values = cuda.local.array(AHEAD, f32), cuda.local.array(AHEAD, f32)
        i = u32(cuda.grid(1))
        while i < count:
            o, k, s = u32(i % O), u32(u32(i // O) % rows), u32(i // u32(O * rows))
            total = ZERO
            n = s
            while n < images:
                for j in range(AHEAD):
                    m = u32(n + u32(u32(j) * slices_))
                    some = m if m < images else n  # a load that is not needed is cheaper than a branch
                    g = dy[u32(some * O + o)]
                    if relu:
                        g = g if y[u32(some * O + o)] > ZERO else ZERO
                    gs[j] = g if m < images else ZERO
                    values[j] = x[u32(some * D + (k if k < D else u32(0)))]
                for j in range(AHEAD):
                    total += gs[j] * (values[j] if k < D else ONE)
                n = u32(n + u32(AHEAD) * slices_)
            if k < D:
                arena[u32(w_base + s * size + k * O + o)] = total
            else:
                arena[u32(b_base + s * O + o)] = total
            i = u32(i + u32(cuda.gridsize(1)))

    arrays = "float32[::1], float32[::1], float32[::1], float32[::1]"
    return Kernel(linear_backward_weights, f"void({arrays}, uint32, uint32, uint32, uint32)", BLOCK)


@cache
def softmax_of(O: int) -> Any:  # noqa: E741
    """Return the device function (score, first, o, label, scale) of one of the O scores from score[first] on.

    Its results: the gradient of score o of the cross entropy of the softmax; the loss, if o is the label; whether the
    label's is the first largest.
    """

    def softmax(score, first, o, label, scale):
        best, largest = u32(0), score[first]
        for k in range(1, O):
            if score[u32(first + u32(k))] > largest:
                best, largest = u32(k), score[u32(first + u32(k))]
        exps = ZERO
        for k in range(O):
            exps += f32(math.exp(score[u32(first + u32(k))] - largest))
        own, target = score[u32(first + o)] - largest, ONE if o == label else ZERO
        return (f32(math.exp(own)) / exps - target) * scale, f32(math.log(exps)) - own, best == label

    return cuda.jit(device=True)(softmax)


@cache
def linear_head(D: int, O: int, has_bias: bool, slices: int) -> Kernel:  # noqa: E741
    """The last linear layer, softmax, cross entropy and their gradients, a block per image of a slice.

    Writes scores, losses and hits, dx = d_scores @ w.T, and partial gradients of w and b, one per slice.
    """
    softmax = softmax_of(O)
    D, O, slices_, block = u32(D), u32(O), u32(slices), u32(BLOCK)  # noqa: E741
    lanes = u32(lanes_of(int(O)))
    parts, size = u32(BLOCK // int(lanes)), u32(D * O)
    owned = -(-int(size) // BLOCK)  # weights of a thread
    d_count, o_count = int(D), int(lanes)

    def linear_head(
        x, labels, order, cursor, ahead, w, b, scale, scores, losses, hits, dx, arena, w_base, b_base, count
    ):
        row = cuda.shared.array(d_count, f32)
        sums = cuda.shared.array(BLOCK, f32)
        score = cuda.shared.array(o_count, f32)
        d_score = cuda.shared.array(o_count, f32)
        t = u32(cuda.threadIdx.x)
        s, o = u32(cuda.blockIdx.x), u32(t % lanes)
        total = cuda.local.array(owned, f32)
        for j in range(owned):
            total[j] = ZERO
        total_b = ZERO
        n = s
        while n < count:
            cuda.syncthreads()
            k = t
            while k < D:
                row[k] = x[u32(n * D + k)]
                k = u32(k + block)
            cuda.syncthreads()
            value = ZERO
            if o < O:
                k = u32(t // lanes)
                while k < D:
                    value += row[k] * w[u32(k * O + o)]
                    k = u32(k + parts)
            sums[t] = value
            cuda.syncthreads()
            if t < O:
                value = b[t] if has_bias else ZERO
                for part in range(parts):
                    value += sums[u32(u32(part) * lanes + t)]
                score[t] = value
                scores[u32(n * O + t)] = value
            cuda.syncthreads()
            if t < O:
                place = u32(cursor[0] + ahead + n)
                label = u32(labels[order[place]])
                g, loss, hit = softmax(score, u32(0), t, label, scale)
                d_score[t] = g
                total_b += g
                if t == label:
                    losses[place], hits[place] = loss, np.uint8(1) if hit else np.uint8(0)
            cuda.syncthreads()
            k = t
            while k < D:
                value = ZERO
                for q in range(O):
                    value += d_score[q] * w[u32(k * O + u32(q))]
                dx[u32(n * D + k)] = value
                k = u32(k + block)
            for j in range(owned):
                i = u32(u32(j) * block + t)
                if i < size:
                    total[j] += row[u32(i // O)] * d_score[u32(i % O)]
            n = u32(n + slices_)
        for j in range(owned):
            i = u32(u32(j) * block + t)
            if i < size:
                arena[u32(w_base + s * size + i)] = total[j]
        if has_bias and t < O:
            arena[u32(b_base + s * O + t)] = total_b

    signature = (
        "void(float32[::1], int32[::1], uint32[::1], uint32[::1], uint32, float32[::1], float32[::1], float32, "
        "float32[::1], float32[::1], uint8[::1], float32[::1], float32[::1], uint32, uint32, uint32)"
    )
    return Kernel(linear_head, signature, BLOCK)


def lanes_of(outputs: int) -> int:
    """Return how many threads side by side serve one image's outputs: the next power of two."""
    return 1 << max(outputs - 1, 0).bit_length()
