"""Kernels of convolution by one thread per output element, from global memory (castanheira section 3; chavan)."""

from functools import cache

from numba import cuda

from cnnexp.backends.gpu.kernels.index import ZERO, ConvSizes, first_window, offset, split, u32, unsigned
from cnnexp.backends.gpu.launch import Kernel


@cache
def conv2d(sizes: ConvSizes, has_bias: bool, block: int) -> Kernel:
    """One thread per (n, p, q, f); neighbours in a warp differ in f, so weights coalesce and pixels broadcast."""
    H, W, C, K, F, stride, top, left, P, Q, groups, dilation = unsigned(sizes)
    seen, each = u32(C // groups), u32(F // groups)  # channels and filters of a group
    padded, grouped = sizes.padded, sizes.groups > 1

    def conv2d(x, w, b, y, count):
        i = u32(cuda.grid(1))
        if i < count:
            n, p, q, f = split(i, P, Q, F)
            total = b[f] if has_bias else ZERO
            first = u32(f // each * seen) if grouped else u32(0)  # of the channels that the filter sees
            corner = offset(n, H, u32(p * stride), W, u32(q * stride), C, first)
            for a in range(K):
                row = offset(p, stride, u32(a * dilation))  # in the padded image
                for e in range(K):
                    col = offset(q, stride, u32(e * dilation))
                    if not padded or (top <= row and row < u32(H + top) and left <= col and col < u32(W + left)):
                        # without padding, what is added to `corner` is known when the loops are unrolled
                        pixel = corner + offset(u32(a * dilation), W, u32(e * dilation), C, 0)
                        if padded:
                            pixel = offset(n, H, u32(row - top), W, u32(col - left), C, first)
                        for c in range(seen):
                            total += x[pixel + offset(c)] * w[f + offset(a, K, e, seen, c, F, 0)]
            y[i] = total

    return Kernel(conv2d, "void(f4[::1], f4[::1], f4[::1], f4[::1], u4)", block)


@cache
def conv2d_backward_input(sizes: ConvSizes, block: int) -> Kernel:
    """One thread per input pixel, which gathers from the outputs whose windows hold it."""
    grouped, reach = sizes.groups > 1, u32((sizes.K - 1) * sizes.dilation + 1)
    H, W, C, K, F, stride, top, left, P, Q, groups, dilation = unsigned(sizes)
    seen, each = u32(C // groups), u32(F // groups)  # channels and filters of a group

    def conv2d_backward_input(w, dy, dx, count):
        i = u32(cuda.grid(1))
        if i < count:
            n, h, v, c = split(i, H, W, C)
            row, col = u32(h + top), u32(v + left)  # in the padded image
            total = ZERO
            first = u32(c // seen * each) if grouped else u32(0)  # of the filters that see the channel
            own = u32(c % seen) if grouped else c
            p = first_window(row, reach, stride)
            while p < P and u32(p * stride) <= row:
                q = first_window(col, reach, stride)
                while q < Q and u32(q * stride) <= col:
                    a, e = u32(row - p * stride), u32(col - q * stride)  # taps, where dilation divides them
                    if a % dilation == 0 and e % dilation == 0:
                        weight = offset(u32(a // dilation), K, u32(e // dilation), seen, own, F, first)
                        place = offset(n, P, p, Q, q, F, first)
                        for f in range(each):
                            total += w[weight + offset(f)] * dy[place + offset(f)]
                    q = u32(q + 1)
                p = u32(p + 1)
            dx[i] = total

    return Kernel(conv2d_backward_input, "void(f4[::1], f4[::1], f4[::1], u4)", block)


@cache
def conv2d_backward_weights(sizes: ConvSizes, block: int) -> Kernel:
    """partial[s, a, e, c, f] = the gradient of weight (a, e, c, f) over every `slices`-th row of outputs from s on.

    One thread each; `rows` are those of all images.
    """
    H, W, C, K, F, stride, top, left, P, Q, groups, dilation = unsigned(sizes)
    seen, each = u32(C // groups), u32(F // groups)  # channels and filters of a group
    padded, grouped = sizes.padded, sizes.groups > 1

    def conv2d_backward_weights(x, dy, partial, rows, slices, count):
        i = u32(cuda.grid(1))
        if i < count:
            s, a, e, c, f = split(i, K, K, seen, F)
            channel = offset(u32(f // each), seen, c) if grouped else c
            down, right = u32(a * dilation), u32(e * dilation)
            total = ZERO
            while s < rows:
                n, p = split(s, P)
                row = offset(p, stride, down)  # in the padded image
                if not padded or (top <= row and row < u32(H + top)):
                    first = offset(n, H, u32(row - top), W, 0, C, channel)
                    begin = offset(right, C, first)
                    place = offset(s, Q, 0, F, f)
                    for q in range(Q):
                        col = offset(q, stride, right)
                        if not padded or (left <= col and col < u32(W + left)):
                            # without padding, what is added to `begin` is known when the loop is unrolled
                            pixel = begin + offset(q, stride, 0, C, 0)
                            if padded:
                                pixel = offset(u32(col - left), C, first)
                            total += x[pixel] * dy[place + offset(q, F, 0)]
                s = u32(s + slices)
            partial[i] = total

    return Kernel(conv2d_backward_weights, "void(f4[::1], f4[::1], f4[::1], u4, u4, u4)", block)
