"""Kernels of convolution whose blocks stage tiles in shared memory; how tiles cover one (chavan, section IV)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from numba import cuda

from cnnexp.backends.gpu.kernels import ZERO, ConvSizes, f32, padded_pixel, u32, unsigned
from cnnexp.backends.gpu.launch import Kernel
from cnnexp.errors import ConfigError

FILTERS = 32  # of a tile: a warp writes side by side


@cache
def conv2d(sizes: ConvSizes, turned: bool, has_bias: bool, stage_filters: bool, plan: ConvTile) -> Kernel:
    """A block makes a tile of outputs: tile x tile places of one image, `plan.filters` filters.

    It goes through the channels in chunks that fit in shared memory; a chunk's sums are added to y.

    Args:
        sizes: of the convolution that is computed.
        turned: w is stored (K,K,F,C) and read from its far corner: the gradient of the input, dy in place of x.
        has_bias: whether y starts at b.
        stage_filters: read the filters from shared memory too.
        plan: see `ConvTile`.
    """
    H, W, C, K, F, stride, _, _, P, Q = unsigned(sizes)
    image, input_pixel = u32(H * W * C), padded_pixel(sizes)
    tile, block, filters, channels = (u32(v) for v in (plan.tile, plan.block, plan.filters, plan.channels))
    side = u32(plan.side)
    across, down, deep = (u32(v) for v in plan.tiles(sizes))
    x_size, w_size = plan.x_size, plan.w_size if stage_filters else 1
    outputs = u32(plan.tile * plan.tile * plan.filters)
    last = u32(sizes.K * sizes.K - 1)

    def conv2d(x, w, b, y):
        x_tile = cuda.shared.array(x_size, f32)
        w_tile = cuda.shared.array(w_size, f32)
        group = u32(cuda.blockIdx.x)
        f0 = u32(u32(group % deep) * filters)
        q0 = u32(u32(u32(group // deep) % across) * tile)
        p0 = u32(u32(u32(group // u32(deep * across)) % down) * tile)
        n = u32(group // u32(deep * across * down))
        c0 = u32(0)
        while c0 < C:
            cuda.syncthreads()
            i = u32(cuda.threadIdx.x)
            while i < u32(x_size):
                c = u32(c0 + i % channels)
                row = u32(p0 * stride + u32(u32(i // channels) // side))  # in the padded image
                col = u32(q0 * stride + u32(u32(i // channels) % side))
                x_tile[i] = input_pixel(x, u32(n * image), row, col, c) if c < C else ZERO
                i = u32(i + block)
            if stage_filters:
                i = u32(cuda.threadIdx.x)
                while i < u32(w_size):
                    f = u32(f0 + i % filters)
                    c = u32(c0 + u32(u32(i // filters) % channels))
                    k = u32(i // u32(filters * channels))
                    source = u32(u32(u32(last - k) * F + f) * C + c) if turned else u32(u32(k * C + c) * F + f)
                    w_tile[i] = w[source] if f < F and c < C else ZERO
                    i = u32(i + block)
            cuda.syncthreads()
            o = u32(cuda.threadIdx.x)
            while o < outputs:
                f = u32(f0 + o % filters)
                row, col = u32(u32(o // filters) // tile), u32(u32(o // filters) % tile)
                p, q = u32(p0 + row), u32(q0 + col)
                if p < P and q < Q and f < F:
                    place = u32(u32(u32(n * P + p) * Q + q) * F + f)
                    total = ZERO
                    if c0 > u32(0):
                        total = y[place]
                    elif has_bias:
                        total = b[f]
                    # what is added to `corner` and `lane` is known when the loops are unrolled
                    corner, lane = u32(u32(u32(row * side) + col) * u32(stride * channels)), u32(o % filters)
                    for c in range(channels):  # outermost, so that no bit depends on how many are staged at once
                        for a in range(K):
                            for e in range(K):
                                k = u32(u32(a) * K + u32(e))
                                if stage_filters:
                                    weight = w_tile[lane + u32(u32(k * channels + u32(c)) * filters)]
                                elif u32(c0 + u32(c)) >= C:
                                    weight = ZERO
                                elif turned:
                                    weight = w[u32(u32(u32(last - k) * F + f) * C + c0 + u32(c))]
                                else:
                                    weight = w[u32(u32(u32(k * C + c0) + u32(c)) * F + f)]
                                pixel = u32(u32(u32(u32(a) * side + u32(e)) * channels) + u32(c))
                                total += x_tile[corner + pixel] * weight
                    y[place] = total
                o = u32(o + block)
            c0 = u32(c0 + channels)

    return Kernel(conv2d, "void(float32[::1], float32[::1], float32[::1], float32[::1])", plan.block)


@dataclass(frozen=True)
class ConvTile:
    """How a block of `block` threads covers a convolution.

    Attributes:
        block: threads.
        tile: side of the outputs of a block, in places.
        side: of the pixels that they see.
        filters: of a block.
        channels: staged at once.
        kernel: K.
    """

    block: int
    tile: int
    side: int
    filters: int
    channels: int
    kernel: int

    @property
    def x_size(self) -> int:
        return self.side * self.side * self.channels

    @property
    def w_size(self) -> int:
        return self.kernel * self.kernel * self.channels * self.filters

    def tiles(self, sizes: ConvSizes) -> tuple[int, int, int]:
        """Return how many tiles lie across, down, and over the filters of one image."""
        return -(-sizes.Q // self.tile), -(-sizes.P // self.tile), -(-sizes.F // self.filters)


def conv_tile(sizes: ConvSizes, block: int, tile: int, shared_bytes: int, filters: int = FILTERS) -> ConvTile:
    """Return how to cover a convolution with tiles that fit in shared memory.

    Raises:
        ConfigError: not even one channel fits.
    """
    side, filters = (tile - 1) * sizes.stride + sizes.K, min(sizes.F, filters)
    per_channel = 4 * (side * side + sizes.K * sizes.K * filters)
    if per_channel > shared_bytes:
        raise ConfigError(
            f"backend.tile={tile}: one channel of a tile for kernel {sizes.K}, stride {sizes.stride} needs "
            f"{per_channel:,} bytes of shared memory, a block has {shared_bytes:,}; use a smaller tile"
        )
    channels = min(sizes.C, shared_bytes // per_channel)
    return ConvTile(block, tile, side, filters, channels, sizes.K)


@cache
def conv2d_backward_weights(sizes: ConvSizes, rows: int, stage_dy: bool, block: int) -> Kernel:
    """As `direct.conv2d_backward_weights`, a block's pixels staged: `rows` rows of outputs of one image at a time.

    A block makes `block` weights of one slice of the images.
    """
    H, W, C, K, F, stride, _, _, P, Q = unsigned(sizes)
    image, input_pixel = u32(H * W * C), padded_pixel(sizes)
    size, rows, block = u32(sizes.K * sizes.K * sizes.C * sizes.F), u32(rows), u32(block)
    wide, groups = u32(_padded_width(sizes)), u32(-(-int(size) // int(block)))
    x_rows = u32((rows - 1) * stride + K)
    x_size, dy_size = int(x_rows * wide * C), int(rows * Q * F) if stage_dy else 1

    def conv2d_backward_weights(x, dy, partial, images, slices):
        x_tile = cuda.shared.array(x_size, f32)
        dy_tile = cuda.shared.array(dy_size, f32)
        k = u32(u32(cuda.blockIdx.x) % groups * block + u32(cuda.threadIdx.x))
        s = u32(u32(cuda.blockIdx.x) // groups)
        f = u32(k % F)
        c = u32(u32(k // F) % C)
        e = u32(u32(k // u32(F * C)) % K)
        a = u32(u32(k // u32(F * C * K)) % K)  # threads past the last weight help to stage
        total = ZERO
        n = s
        while n < images:
            p0 = u32(0)
            while p0 < P:
                cuda.syncthreads()
                i = u32(cuda.threadIdx.x)
                while i < u32(x_size):
                    row = u32(p0 * stride + u32(u32(i // C) // wide))  # in the padded image
                    col = u32(u32(i // C) % wide)
                    x_tile[i] = input_pixel(x, u32(n * image), row, col, u32(i % C))
                    i = u32(i + block)
                high = u32(min(rows, u32(P - p0)))
                first = u32(u32(u32(n * P + p0) * Q) * F)
                if stage_dy:
                    i = u32(cuda.threadIdx.x)
                    while i < u32(high * Q * F):
                        dy_tile[i] = dy[u32(first + i)]
                        i = u32(i + block)
                cuda.syncthreads()
                p = u32(0)
                while p < high:
                    pixel = u32(u32(u32(p * stride + a) * wide + e) * C + c)
                    place = u32(u32(p * Q) * F + f) if stage_dy else u32(first + u32(p * Q) * F + f)
                    for q in range(Q):
                        g = dy_tile[place + u32(u32(q) * F)] if stage_dy else dy[place + u32(u32(q) * F)]
                        total += x_tile[pixel + u32(u32(q) * u32(stride * C))] * g
                    p = u32(p + u32(1))
                p0 = u32(p0 + rows)
            n = u32(n + slices)
        if k < size:
            partial[u32(s * size + k)] = total

    return Kernel(conv2d_backward_weights, "void(float32[::1], float32[::1], float32[::1], uint32, uint32)", int(block))


def rows_that_fit(sizes: ConvSizes, stage_dy: bool, shared_bytes: int) -> int:
    """Return how many rows of outputs `conv2d_backward_weights` can stage at once; 0 if none."""
    row = 4 * _padded_width(sizes) * sizes.C  # bytes
    per_output_row = row * sizes.stride + (4 * sizes.Q * sizes.F if stage_dy else 0)
    spare = shared_bytes - 4 - row * (sizes.K - sizes.stride)  # an unused dy tile is 4 bytes
    return max(0, min(spare // per_output_row, sizes.P))


def _padded_width(sizes: ConvSizes) -> int:
    return (sizes.Q - 1) * sizes.stride + sizes.K
