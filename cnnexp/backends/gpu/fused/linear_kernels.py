"""The fused kernels of linear layers: with the ReLU that follows, or with softmax, loss and their gradients.

w is (D + 1, O) where there is a bias, its last row, else (D, O).
"""

from __future__ import annotations

import math
from functools import cache

from numba import cuda

from cnnexp.backends.gpu.fused.kernels import BLOCK, LANES, image_at
from cnnexp.backends.gpu.kernels.index import ONE, ZERO, f32, offset, split, u32
from cnnexp.backends.gpu.launch import Kernel

WIDE_BLOCK = 512  # threads, for the few, long sums of a layer's outputs
AHEAD, FAR_AHEAD = 4, 8  # products of a sum whose factors a thread asks for at once: where threads are few, more
OWNED = 4  # inputs of a thread of `linear_backward_weights`


@cache
def linear(D: int, O: int, has_bias: bool, relu: bool, images: int) -> Kernel:  # noqa: E741
    """y = relu(x @ w + b): a block makes up to LANES outputs of some images, its threads share out the products."""
    lanes = u32(min(lanes_of(O), LANES))
    parts, block, size = u32(WIDE_BLOCK // int(lanes)), u32(WIDE_BLOCK), images * WIDE_BLOCK
    D, O, Z, groups = u32(D), u32(O), u32(images), u32(-(-O // int(lanes)))  # noqa: E741

    def linear(x, w, y, count):
        sums = cuda.shared.array(size, f32)
        total, weights = cuda.local.array(images, f32), cuda.local.array(FAR_AHEAD, f32)
        t = u32(cuda.threadIdx.x)
        image_group, group = split(cuda.blockIdx.x, groups)
        part, lane = split(t, lanes)
        n0, o = u32(image_group * Z), offset(group, lanes, lane)
        for z in range(images):
            total[z] = ZERO
        # a thread's share of the products: a weight that it has loaded serves all images
        if o < O:
            k = part
            while u32(k + u32((FAR_AHEAD - 1) * parts)) < D:
                for j in range(FAR_AHEAD):
                    weights[j] = w[offset(k, O, o) + offset(j, parts, 0, O, 0)]
                for z in range(images):
                    n = n0 + u32(z) if n0 + u32(z) < count else n0  # a load too many is cheaper than a branch
                    for j in range(FAR_AHEAD):
                        total[z] += x[offset(n, D, k) + offset(j, parts, 0)] * weights[j]
                k = u32(k + u32(FAR_AHEAD * parts))
            while k < D:
                for z in range(images):
                    n = n0 + u32(z) if n0 + u32(z) < count else n0
                    total[z] += x[offset(n, D, k)] * w[offset(k, O, o)]
                k = u32(k + parts)
        for z in range(images):
            sums[offset(z, block, t)] = total[z]
        cuda.syncthreads()
        # their sum, bias and ReLU
        z, lane = split(t, lanes)
        n, o = u32(n0 + z), offset(group, lanes, lane)
        if z < Z and n < count and o < O:
            value = w[offset(D, O, o)] if has_bias else ZERO
            for part in range(parts):
                value += sums[offset(z, parts, part, lanes, lane)]
            y[offset(n, O, o)] = value if not relu or value > ZERO else ZERO

    return Kernel(linear, "void(f4[::1], f4[::1], f4[::1], u4)", WIDE_BLOCK)


@cache
def linear_backward_input(D: int, O: int, relu: bool, images: int) -> Kernel:  # noqa: E741
    """dx = dy @ w.T, dy only where y > 0 if the layer ends in ReLU: a block makes LANES inputs of Z images.

    A tile of w goes through shared memory, since threads side by side need rows of it and memory wants columns. A
    thread makes one input of some `images`.
    """
    rows = u32(BLOCK // LANES)
    D, O, Z = u32(D), u32(O), u32(rows * u32(images))  # noqa: E741
    lanes, block = u32(LANES), u32(BLOCK)
    chunk = u32(min(int(O), LANES))
    pitch, w_size, d_size = u32(chunk + 1), LANES * (int(chunk) + 1), int(Z) * int(chunk)
    groups = u32(-(-int(D) // LANES))

    def linear_backward_input(w, y, dy, dx, count):
        w_tile = cuda.shared.array(w_size, f32)
        d_tile = cuda.shared.array(d_size, f32)
        total = cuda.local.array(images, f32)
        t = u32(cuda.threadIdx.x)
        row, lane = split(t, lanes)
        image_group, group = split(cuda.blockIdx.x, groups)
        n0, k0, o0 = u32(image_group * Z), u32(group * lanes), u32(0)
        for z in range(images):
            total[z] = ZERO
        while o0 < O:
            # stage a tile of w
            cuda.syncthreads()
            i = t
            while i < u32(lanes * chunk):
                wide, column = split(i, chunk)
                k, o = u32(k0 + wide), u32(o0 + column)
                w_tile[offset(wide, pitch, column)] = w[offset(k, O, o)] if k < D and o < O else ZERO
                i = u32(i + block)
            # stage the gradients of the images
            i = t
            while i < u32(Z * chunk):
                z, column = split(i, chunk)
                n, o = u32(n0 + z), u32(o0 + column)
                value = ZERO
                if n < count and o < O and (not relu or y[offset(n, O, o)] > ZERO):
                    value = dy[offset(n, O, o)]
                d_tile[i] = value
                i = u32(i + block)
            cuda.syncthreads()
            # multiply them
            for o in range(chunk):
                weight = w_tile[offset(lane, pitch, o)]
                for z in range(images):
                    total[z] += weight * d_tile[offset(row, chunk, o) + offset(z, rows, 0, chunk, 0)]
            o0 = u32(o0 + chunk)
        k = u32(k0 + lane)
        for z in range(images):
            n = offset(z, rows, u32(n0 + row))
            if n < count and k < D:
                dx[offset(n, D, k)] = total[z]

    return Kernel(linear_backward_input, "void(f4[::1], f4[::1], f4[::1], f4[::1], u4)", BLOCK)


@cache
def linear_backward_weights(D: int, O: int, has_bias: bool, relu: bool, slices: int) -> Kernel:  # noqa: E741
    """partial[s], as w: its gradient over the images s, s + slices, ...; a thread makes OWNED inputs' of an output.

    Threads side by side have outputs side by side, so that what they write is one piece.
    """
    rows, far = u32(D + has_bias), u32(-(-(D + has_bias) // OWNED))
    D, O, slices_ = u32(D), u32(O), u32(slices)  # noqa: E741

    def linear_backward_weights(x, y, dy, partial, images, count):
        total, inputs = cuda.local.array(OWNED, f32), cuda.local.array(OWNED, u32)
        i = u32(cuda.grid(1))
        if i < count:
            s, k0, o = split(i, far, O)
            total_b = ZERO
            for j in range(OWNED):
                k = offset(j, far, k0)
                total[j], inputs[j] = ZERO, k if k < D else u32(0)
            n = s
            while n < images:
                # some images at a time, so that their loads are under way together; the bias has 1 for its input
                for a in range(AHEAD):
                    m = u32(n + a * slices_)
                    some = m if m < images else n  # a load that is not needed is cheaper than a branch
                    g = dy[offset(some, O, o)]
                    if relu:
                        g = g if y[offset(some, O, o)] > ZERO else ZERO
                    g = g if m < images else ZERO
                    total_b += g
                    for j in range(OWNED):
                        total[j] += g * x[offset(some, D, inputs[j])]
                n = u32(n + AHEAD * slices_)
            for j in range(OWNED):
                k = offset(j, far, k0)
                if k < rows:
                    partial[offset(s, rows, k, O, o)] = total[j] if k < D else total_b

    return Kernel(linear_backward_weights, "void(f4[::1], f4[::1], f4[::1], f4[::1], u4, u4)", BLOCK)


@cache
def linear_head(D: int, O: int, has_bias: bool, slices: int) -> Kernel:  # noqa: E741
    """The last linear layer, softmax, cross entropy and their gradients, a block per image of a slice.

    Writes scores; (loss, hit) of each place in the order; dx = d_scores @ w.T; and partial gradients of w, one per
    slice.
    """
    lanes, owned = u32(lanes_of(O)), -(-D * O // BLOCK)  # weights of a thread
    parts, rows = u32(BLOCK // int(lanes)), u32(D + has_bias)
    d_count, o_count, outputs = D, int(lanes), O
    D, O, size, slices_, block = u32(D), u32(O), u32(D * O), u32(slices), u32(BLOCK)  # noqa: E741

    def linear_head(x, labels, order, ahead, w, scores, outcomes, dx, partial, count):
        row, sums = cuda.shared.array(d_count, f32), cuda.shared.array(BLOCK, f32)
        score, d_score = cuda.shared.array(o_count, f32), cuda.shared.array(o_count, f32)
        t, s = u32(cuda.threadIdx.x), u32(cuda.blockIdx.x)
        first, o = split(t, lanes)
        total = cuda.local.array(owned, f32)
        for j in range(owned):
            total[j] = ZERO
        total_b, scale = ZERO, ONE / f32(count)
        n = s
        while n < count:
            # stage the image's inputs
            cuda.syncthreads()
            k = t
            while k < D:
                row[k] = x[offset(n, D, k)]
                k = u32(k + block)
            cuda.syncthreads()
            # its scores: a thread's share of the products, then their sum
            value = ZERO
            if o < O:
                k = first
                while k < D:
                    value += row[k] * w[offset(k, O, o)]
                    k = u32(k + parts)
            sums[t] = value
            cuda.syncthreads()
            if t < O:
                value = w[offset(D, O, t)] if has_bias else ZERO
                for part in range(parts):
                    value += sums[offset(part, lanes, t)]
                score[t] = value
                scores[offset(n, O, t)] = value
            cuda.syncthreads()
            # softmax and the gradient of a score; the label's thread has the loss, and whether it is the first largest
            if t < O:
                label = u32(labels[image_at(order, ahead, n)])
                best, largest, exps = u32(0), score[0], ZERO
                for q in range(1, outputs):
                    if score[u32(q)] > largest:
                        best, largest = u32(q), score[u32(q)]
                for q in range(outputs):
                    exps += f32(math.exp(score[u32(q)] - largest))
                own, target = score[t] - largest, ONE if t == label else ZERO
                g = (f32(math.exp(own)) / exps - target) * scale
                d_score[t] = g
                total_b += g
                if t == label:
                    place = u32(order[0] + ahead + n)
                    outcomes[offset(place, 2, 0)] = f32(math.log(exps)) - own
                    outcomes[offset(place, 2, 1)] = ONE if best == label else ZERO
            cuda.syncthreads()
            # the gradients of the inputs, and of the weights that the thread owns
            k = t
            while k < D:
                value = ZERO
                for q in range(O):
                    value += d_score[q] * w[offset(k, O, q)]
                dx[offset(n, D, k)] = value
                k = u32(k + block)
            for j in range(owned):
                i = offset(j, block, t)
                if i < size:
                    k, q = split(i, O)
                    total[j] += row[k] * d_score[q]
            n = u32(n + slices_)
        for j in range(owned):
            i = offset(j, block, t)
            if i < size:
                partial[offset(s, rows, 0, O, i)] = total[j]
        if has_bias and t < O:
            partial[offset(s, rows, D, O, t)] = total_b

    return Kernel(linear_head, f"void(f4[::1], i4[::1], u4[::1], u4, {'f4[::1], ' * 5}u4)", BLOCK)


def lanes_of(outputs: int) -> int:
    """Return how many threads side by side serve one image's outputs: the next power of two."""
    return 1 << max(outputs - 1, 0).bit_length()
