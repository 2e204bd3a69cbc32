"""Kernels of convolution whose blocks stage tiles in shared memory; how tiles cover one (chavan, section IV)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from numba import cuda

from cnnexp.backends.gpu.kernels.index import ZERO, ConvSizes, f32, offset, padded_pixel, split, u32, unsigned
from cnnexp.backends.gpu.launch import Kernel
from cnnexp.errors import ConfigError

FILTERS = 32  # of a tile: a warp writes side by side


@cache
def conv2d(sizes: ConvSizes, flipped: bool, has_bias: bool, stage_filters: bool, plan: ConvTile) -> Kernel:
    """A block makes a tile of outputs: tile x tile places of one image, `plan.filters` filters.

    It goes through the channels in chunks that fit in shared memory; a chunk's sums are added to y.

    Args:
        flipped: w is stored (K,K,F,C) and read from its far corner: the gradient of the input, dy in place of x.
        has_bias: whether y starts at b.
        stage_filters: read the filters from shared memory too.
    """
    H, W, C, K, F, stride, _, _, P, Q, *_ = unsigned(sizes)
    image, input_pixel = u32(H * W * C), padded_pixel(sizes)
    tile, block, filters, channels = (u32(v) for v in (plan.tile, plan.block, plan.filters, plan.channels))
    side, last = u32(plan.side), u32(sizes.K * sizes.K - 1)
    across, down, deep = (u32(v) for v in plan.tiles(sizes))
    x_size = plan.side**2 * plan.channels
    w_size = sizes.K**2 * plan.channels * plan.filters if stage_filters else 1
    outputs = u32(plan.tile * plan.tile * plan.filters)

    @cuda.jit(device=True)
    def weight_place(k, c, f):
        return offset(u32(last - k), F, f, C, c) if flipped else offset(k, C, c, F, f)

    def conv2d(x, w, b, y):
        x_tile = cuda.shared.array(x_size, f32)
        w_tile = cuda.shared.array(w_size, f32)
        n, tile_p, tile_q, group = split(cuda.blockIdx.x, down, across, deep)
        p0, q0, f0 = u32(tile_p * tile), u32(tile_q * tile), u32(group * filters)
        c0 = u32(0)
        while c0 < C:
            # stage the pixels that the tile sees
            cuda.syncthreads()
            i = u32(cuda.threadIdx.x)
            while i < u32(x_size):
                row, col, c = split(i, side, channels)
                row, col, c = offset(p0, stride, row), offset(q0, stride, col), u32(c0 + c)  # in the padded image
                x_tile[i] = input_pixel(x, u32(n * image), row, col, c) if c < C else ZERO
                i = u32(i + block)
            # stage the filters
            if stage_filters:
                i = u32(cuda.threadIdx.x)
                while i < u32(w_size):
                    k, c, f = split(i, channels, filters)
                    c, f = u32(c0 + c), u32(f0 + f)
                    w_tile[i] = w[weight_place(k, c, f)] if f < F and c < C else ZERO
                    i = u32(i + block)
            cuda.syncthreads()
            # add what these channels give to the outputs of this thread
            o = u32(cuda.threadIdx.x)
            while o < outputs:
                row, col, lane = split(o, tile, filters)
                p, q, f = u32(p0 + row), u32(q0 + col), u32(f0 + lane)
                if p < P and q < Q and f < F:
                    place = offset(n, P, p, Q, q, F, f)
                    total = ZERO
                    if c0 > 0:
                        total = y[place]
                    elif has_bias:
                        total = b[f]
                    # what is added to `corner` and `lane` is known when the loops are unrolled
                    corner = offset(u32(row * stride), side, u32(col * stride), channels, 0)
                    for c in range(channels):  # outermost, so that no bit depends on how many are staged at once
                        for a in range(K):
                            for e in range(K):
                                k = offset(a, K, e)
                                weight = ZERO
                                if stage_filters:
                                    weight = w_tile[lane + offset(k, channels, c, filters, 0)]
                                elif u32(c0 + c) < C:
                                    weight = w[weight_place(k, u32(c0 + c), f)]
                                total += x_tile[corner + offset(a, side, e, channels, c)] * weight
                    y[place] = total
                o = u32(o + block)
            c0 = u32(c0 + channels)

    return Kernel(conv2d, "void(f4[::1], f4[::1], f4[::1], f4[::1])", plan.block)


@dataclass(frozen=True)
class ConvTile:
    """How a block of threads covers a convolution."""

    block: int  # threads
    tile: int  # side of the square of a block's outputs, in places
    side: int  # of the square of pixels that they see
    filters: int  # of a block
    channels: int  # staged at once

    def tiles(self, sizes: ConvSizes) -> tuple[int, int, int]:
        """Return how many tiles lie across, down, and over the filters of one image."""
        return -(-sizes.Q // self.tile), -(-sizes.P // self.tile), -(-sizes.F // self.filters)


def conv_tile(sizes: ConvSizes, block: int, tile: int, shared_bytes: int, filters: int = FILTERS) -> ConvTile:
    """Return how to cover a convolution with tiles that fit in shared memory; ConfigError if not one channel does."""
    side, filters = (tile - 1) * sizes.stride + sizes.K, min(sizes.F, filters)
    per_channel = 4 * (side * side + sizes.K * sizes.K * filters)
    if per_channel > shared_bytes:
        raise ConfigError(
            f"backend.tile={tile}: one channel of a tile for kernel {sizes.K}, stride {sizes.stride} needs "
            f"{per_channel:,} bytes of shared memory, a block has {shared_bytes:,}; use a smaller tile"
        )
    channels = min(sizes.C, shared_bytes // per_channel)
    return ConvTile(block, tile, side, filters, channels)


@cache
def conv2d_backward_weights(sizes: ConvSizes, rows: int, stage_dy: bool, block: int) -> Kernel:
    """As `direct.conv2d_backward_weights`, a block's pixels staged: `rows` rows of outputs of one image at a time.

    A block makes `block` weights of one slice of the images.
    """
    H, W, C, K, F, stride, _, _, P, Q, *_ = unsigned(sizes)
    image, input_pixel = u32(H * W * C), padded_pixel(sizes)
    size, rows, block = u32(sizes.K * sizes.K * sizes.C * sizes.F), u32(rows), u32(block)
    wide, groups = u32(sizes.wide), u32(-(-int(size) // int(block)))
    x_size = int(((rows - 1) * stride + K) * wide * C)
    dy_size = int(rows * Q * F) if stage_dy else 1

    def conv2d_backward_weights(x, dy, partial, images, slices):
        x_tile = cuda.shared.array(x_size, f32)
        dy_tile = cuda.shared.array(dy_size, f32)
        t = u32(cuda.threadIdx.x)
        s, group = split(cuda.blockIdx.x, groups)
        k = offset(group, block, t)
        a, e, c, f = split(k, K, C, F)
        a = u32(a % K)  # threads past the last weight help to stage
        total = ZERO
        n = s
        while n < images:
            p0 = u32(0)
            while p0 < P:
                # stage the pixels under some rows of outputs
                cuda.syncthreads()
                i = t
                while i < u32(x_size):
                    row, col, channel = split(i, wide, C)
                    x_tile[i] = input_pixel(x, u32(n * image), offset(p0, stride, row), col, channel)
                    i = u32(i + block)
                # stage their gradients
                high = u32(min(rows, u32(P - p0)))
                first = offset(n, P, p0, Q, 0, F, 0)
                if stage_dy:
                    i = t
                    while i < u32(high * Q * F):
                        dy_tile[i] = dy[u32(first + i)]
                        i = u32(i + block)
                cuda.syncthreads()
                # add up what they give to the thread's weight
                p = u32(0)
                while p < high:
                    pixel = offset(offset(p, stride, a), wide, e, C, c)
                    place = offset(p, Q, 0, F, f)
                    if not stage_dy:
                        place = u32(first + place)
                    for q in range(Q):
                        there = place + offset(q, F, 0)
                        g = dy_tile[there] if stage_dy else dy[there]
                        total += x_tile[pixel + offset(q, stride, 0, C, 0)] * g
                    p = u32(p + 1)
                p0 = u32(p0 + rows)
            n = u32(n + slices)
        if k < size:
            partial[offset(s, size, k)] = total

    return Kernel(conv2d_backward_weights, "void(f4[::1], f4[::1], f4[::1], u4, u4)", int(block))


def rows_that_fit(sizes: ConvSizes, stage_dy: bool, shared_bytes: int) -> int:
    """Return how many rows of outputs `conv2d_backward_weights` can stage at once; 0 if none."""
    row = 4 * sizes.wide * sizes.C  # bytes
    per_output_row = row * sizes.stride + (4 * sizes.Q * sizes.F if stage_dy else 0)
    spare = shared_bytes - 4 - row * (sizes.K - sizes.stride)  # an unused dy tile is 4 bytes
    return max(0, min(spare // per_output_row, sizes.P))
