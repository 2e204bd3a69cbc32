"""Kernels of convolution by one thread per output element, from global memory (castanheira section 3; chavan)."""

from __future__ import annotations

from functools import cache

from numba import cuda

from cnnexp.backends.gpu.kernels import ZERO, ConvSizes, u32, unsigned
from cnnexp.backends.gpu.launch import Kernel


@cache
def conv2d(sizes: ConvSizes, has_bias: bool, block: int) -> Kernel:
    """One thread per (n, p, q, f); neighbours in a warp differ in f, so weights coalesce and pixels broadcast."""
    H, W, C, K, F, stride, top, left, P, Q = unsigned(sizes)
    padded = sizes.padded

    def conv2d(x, w, b, y, count):
        i = u32(cuda.grid(1))
        while i < count:
            f = u32(i % F)
            q = u32(u32(i // F) % Q)
            p = u32(u32(i // u32(F * Q)) % P)
            n = u32(i // u32(F * Q * P))
            total = b[f] if has_bias else ZERO
            corner = u32(u32(u32(u32(n * H) + p * stride) * W + q * stride) * C)
            for a in range(K):
                row = u32(p * stride + u32(a))  # in the padded image
                for e in range(K):
                    col = u32(q * stride + u32(e))
                    if not padded or (top <= row and row < u32(H + top) and left <= col and col < u32(W + left)):
                        # without padding, what is added to `corner` is known when the loops are unrolled
                        pixel = corner + u32(u32(u32(a) * W + u32(e)) * C)
                        if padded:
                            pixel = u32(u32(u32(u32(n * H) + u32(row - top)) * W + u32(col - left)) * C)
                        weight = f + u32(u32(u32(u32(a) * K + u32(e)) * C) * F)
                        for c in range(C):
                            total += x[pixel + u32(c)] * w[weight + u32(u32(c) * F)]
            y[i] = total
            i = u32(i + u32(cuda.gridsize(1)))

    return Kernel(conv2d, "void(float32[::1], float32[::1], float32[::1], float32[::1], uint32)", block)


@cache
def conv2d_backward_input(sizes: ConvSizes, block: int) -> Kernel:
    """One thread per input pixel, which gathers from the outputs whose windows hold it."""
    H, W, C, K, F, stride, top, left, P, Q = unsigned(sizes)

    def conv2d_backward_input(w, dy, dx, count):
        i = u32(cuda.grid(1))
        while i < count:
            c = u32(i % C)
            col = u32(u32(u32(i // C) % W) + left)  # in the padded image
            row = u32(u32(u32(i // u32(C * W)) % H) + top)
            n = u32(i // u32(C * W * H))
            total = ZERO
            p = u32((row - K) // stride + u32(1)) if row >= K else u32(0)
            while p < P and u32(p * stride) <= row:
                q = u32((col - K) // stride + u32(1)) if col >= K else u32(0)
                while q < Q and u32(q * stride) <= col:
                    a, e = u32(row - p * stride), u32(col - q * stride)
                    weight = u32(u32(u32(a * K + e) * C + c) * F)
                    place = u32(u32(u32(n * P + p) * Q + q) * F)
                    for f in range(F):
                        total += w[u32(weight + u32(f))] * dy[u32(place + u32(f))]
                    q = u32(q + u32(1))
                p = u32(p + u32(1))
            dx[i] = total
            i = u32(i + u32(cuda.gridsize(1)))

    return Kernel(conv2d_backward_input, "void(float32[::1], float32[::1], float32[::1], uint32)", block)


@cache
def conv2d_backward_weights(sizes: ConvSizes, block: int) -> Kernel:
    """partial[s, i, j, c, f] = the gradient of weight (i, j, c, f) over images s, s + slices, ...: one thread each."""
    H, W, C, K, F, stride, top, left, P, Q = unsigned(sizes)
    padded, size = sizes.padded, u32(sizes.K * sizes.K * sizes.C * sizes.F)

    def conv2d_backward_weights(x, dy, partial, images, slices, count):
        i = u32(cuda.grid(1))
        while i < count:
            k = u32(i % size)
            f = u32(k % F)
            c = u32(u32(k // F) % C)
            e = u32(u32(k // u32(F * C)) % K)
            a = u32(k // u32(F * C * K))
            total = ZERO
            n = u32(i // size)
            while n < images:
                for p in range(P):
                    row = u32(u32(p) * stride + a)  # in the padded image
                    if not padded or (top <= row and row < u32(H + top)):
                        first = u32(u32(u32(u32(n * H) + u32(row - top)) * W) * C + c)
                        begin = u32(first + e * C)
                        place = u32(u32(u32(n * P + u32(p)) * Q) * F + f)
                        for q in range(Q):
                            col = u32(u32(q) * stride + e)
                            if not padded or (left <= col and col < u32(W + left)):
                                pixel = (
                                    first + u32(u32(col - left) * C)
                                    if padded
                                    else begin + u32(u32(q) * u32(stride * C))
                                )
                                total += x[pixel] * dy[place + u32(u32(q) * F)]
                n = u32(n + slices)
            partial[i] = total
            i = u32(i + u32(cuda.gridsize(1)))

    return Kernel(
        conv2d_backward_weights, "void(float32[::1], float32[::1], float32[::1], uint32, uint32, uint32)", block
    )
