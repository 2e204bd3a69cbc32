"""The last linear layer with softmax, loss and their gradients, in one kernel."""

import math
from functools import cache

from numba import cuda

from cnnexp.backends.gpu.fused.kernels import BLOCK, image_at
from cnnexp.backends.gpu.kernels.index import ONE, ZERO, f32, offset, split, u32
from cnnexp.backends.gpu.launch import Kernel


@cache
def linear_head(D: int, O: int, has_bias: bool, slices: int) -> Kernel:  # noqa: E741
    """The last linear layer, softmax, cross entropy and their gradients, a block per image of a slice.

    w is (D + 1, O) where there is a bias, its last row, else (D, O). Writes scores; (loss, hit) of each place in the
    order; dx = d_scores @ w.T; and partial gradients of w, one per slice.
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
