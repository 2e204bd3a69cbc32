"""A convolution of many channels as a product of matrices, whose operands are gathered as they are staged.

The matrix of all windows ("im2col") is never in memory (Chetlur et al. 2014, cuDNN, section 3.2). Each pass is one:

    forward            rows pixels of y, columns filters, depth the taps and channels of a window
    of the input       rows pixels of x, columns channels, depth the taps and filters
    of the weights     rows taps and channels, columns filters, depth the pixels of y, cut into slices

A block loads `STEP` of the depth of both operands while it multiplies the `STEP` before, which it has staged in shared
memory; a thread keeps its sums in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import cuda

from cnnexp.backends.gpu.fused.kernels import BLOCK
from cnnexp.backends.gpu.kernels.index import ONE, ZERO, ConvSizes, f32, offset, split, u32, unsigned
from cnnexp.backends.gpu.kernels.layers import device_function
from cnnexp.backends.gpu.launch import Kernel

STEP = 8  # of the depth between two barriers
ABREAST = BLOCK // STEP  # rows, or columns, that a block loads at once
SPARE = 4  # words more per line of a tile: lines fall into different banks, and four words still lie together
WIDE = 4  # columns of a thread
UNROLLED = 16  # rows of `WIDE` products between two tests for the end of a step


@dataclass(frozen=True)
class Tile:
    """What a block makes of a product; a thread makes `high` x `WIDE` elements of it."""

    columns: int
    high: int

    @property
    def rows(self) -> int:
        return BLOCK // (self.columns // WIDE) * self.high

    def blocks(self, rows: int, columns: int) -> int:
        return -(-rows // self.rows) * -(-columns // self.columns)


def tile_of(rows: int, columns: int, enough: int) -> Tile:
    """Return the largest tile that leaves `enough` blocks, and is not much wider than the product."""
    wide = 16 if columns <= 16 else 32 if columns <= 32 else 64
    large = Tile(wide, 8)
    return large if wide > 16 and large.blocks(rows, columns) >= enough else Tile(wide, 4)


def deep(depth: int, slices: int) -> int:
    """Return the depth of each of so many slices."""
    return -(-depth // (slices * STEP)) * STEP


@cache
def forward(sizes: ConvSizes, has_bias: bool, relu: bool, tile: Tile) -> Kernel:
    """(x, w, w, y, pixels of y, depth, depth): y = x * w + bias, and ReLU. w ends in the biases, if there are any."""
    F, bias = u32(sizes.F), u32(sizes.K**2 * sizes.C * sizes.F)

    def weight(w, _, k, f):
        return w[offset(k, F, f)]

    def finished(value, w, f):
        value = value + w[bias + f] if has_bias else value
        return value if not relu or value > ZERO else ZERO

    gathered = _gathered(sizes.H, sizes.W, masked=False)
    return _product(tile, sizes.F, _corner(sizes), _tap(sizes), gathered, weight, finished)


@cache
def backward_input(sizes: ConvSizes, relu: bool, tile: Tile) -> Kernel:
    """(dy, w, y, dx, pixels of x, depth, depth): dx, from dy where y was left by the ReLU."""
    H, W, C, K, F, stride, top, left, P, Q, *_ = unsigned(sizes)

    def pixel(m):
        n, h, w = split(m, H, W)
        row, col = u32(h + top), u32(w + left)
        return offset(offset(n, P, row), Q, col, F, 0) if stride == u32(1) else offset(n, P * Q * F, 0), row, col

    def tap(k):
        a, b, f = split(k, K, F)
        return u32(f - offset(a, Q, b, F, 0)), u32(0 - a), u32(0 - b)

    def strided(dy, y, pixel, tap):
        (first, row, col), (f, a, b) = pixel, tap
        row, col = u32(row + a), u32(col + b)
        on_step = (row % stride == u32(0)) & (col % stride == u32(0))
        exists = on_step & (row < P * stride) & (col < Q * stride)  # without a branch, which loads would wait for
        place = offset(u32(row // stride), Q, u32(col // stride), F, u32(f - offset(a, Q, b, F, 0)))
        place = u32(first + place) if exists else u32(0)
        value = dy[place]
        if relu:
            value = value if y[place] > ZERO else ZERO
        return value if exists else ZERO

    def weight(w, _, k, c):
        a, b, f = split(k, K, F)
        return w[offset(a, K, b, C, c, F, f)]

    gathered = _gathered(sizes.P, sizes.Q, masked=relu) if sizes.stride == 1 else strided
    return _product(tile, sizes.C, pixel, tap, gathered, weight, _unchanged)


@cache
def backward_weights(sizes: ConvSizes, has_bias: bool, relu: bool, tile: Tile) -> Kernel:
    """(x, dy, y, partial, rows, pixels of y, pixels of a slice): partial gradients of the weights, then the biases.

    A row more than there are weights of a filter, which sees ones, is the biases' gradient.
    """
    F, K, gathered = u32(sizes.F), u32(sizes.K), device_function(_gathered(sizes.H, sizes.W, masked=False))

    def gathered_or_one(x, y, tap, corner):
        value = gathered(x, y, corner, tap)
        return ONE if has_bias and tap[1] >= K else value

    def gradient(dy, y, k, f):
        place = offset(k, F, f)
        value = dy[place]
        if relu:
            value = value if y[place] > ZERO else ZERO
        return value

    return _product(tile, sizes.F, _tap(sizes), _corner(sizes), gathered_or_one, gradient, _unchanged)


def _unchanged(value, b, n):
    return value


def _corner(sizes: ConvSizes) -> Callable[..., Any]:
    """Return the function of a pixel of y: where its window begins in x, row and column: all below 0 in the padding."""
    H, W, C, _, _, stride, top, left, P, Q, *_ = unsigned(sizes)

    def corner(m):
        n, p, q = split(m, P, Q)
        row, col = u32(p * stride - top), u32(q * stride - left)
        return offset(offset(n, H, row), W, col, C, 0), row, col

    return corner


def _tap(sizes: ConvSizes) -> Callable[..., Any]:
    """Return the function of a tap and channel: how far from where a window begins it lies, in x, rows and columns."""
    W, C, K = u32(sizes.W), u32(sizes.C), u32(sizes.K)

    def tap(k):
        a, b, c = split(k, K, C)
        return offset(a, W, b, C, c), a, b

    return tap


def _gathered(high: int, wide: int, masked: bool) -> Callable[..., Any]:
    """Return the function (x, mask, corner, tap): what a tap sees of images of `high` x `wide`; zero where `masked`.

    Numbers below 0 are large ones, outside every image.
    """
    high, wide = u32(high), u32(wide)

    def gathered(x, mask, corner, tap):
        exists = (u32(corner[1] + tap[1]) < high) & (u32(corner[2] + tap[2]) < wide)
        place = u32(corner[0] + tap[0]) if exists else u32(0)
        value = x[place]
        if masked:
            value = value if mask[place] > ZERO else ZERO
        return value if exists else ZERO

    return gathered


def _product(
    tile: Tile,
    columns: int,
    row_of: Any,
    place_of: Any,
    left_at: Any,
    right_at: Any,
    finished: Any,
) -> Kernel:
    """Return the kernel (a, b, mask, out, rows, depth, deep): out[slice] (rows, columns) = finished(left @ right).

    Args:
        row_of, place_of: functions (index): what `left_at` takes of a row, three numbers, and of a place in the depth.
        left_at: function (a, mask, row, place): an element of the left operand.
        right_at: function (b, mask, place's index, column): an element of the right one.
        finished: function (sum, b, column): what is written.

    A block makes one slice of the depth, of `deep` places.
    """
    row_of, place_of, left_at, right_at, finished = map(
        device_function, (row_of, place_of, left_at, right_at, finished)
    )
    columns_, across, step, abreast = u32(columns), u32(-(-columns // tile.columns)), u32(STEP), u32(ABREAST)
    a_loads, b_loads, high, wide = -(-tile.rows // ABREAST), -(-tile.columns // ABREAST), tile.high, WIDE
    unrolled = UNROLLED // high
    a_pitch, b_pitch = tile.rows + SPARE, tile.columns + SPARE
    a_line, b_line, a_half, b_half = u32(a_pitch), u32(b_pitch), u32(STEP * a_pitch), u32(STEP * b_pitch)
    a_size, b_size, totals, row_size = 2 * STEP * a_pitch, 2 * STEP * b_pitch, tile.high * WIDE, 3 * a_loads
    lanes, tile_rows, tile_columns = u32(tile.columns // WIDE), u32(tile.rows), u32(tile.columns)

    def product(a, b, mask, out, rows, depth, deep):
        a_tile = cuda.shared.array(a_size, f32, alignment=16)
        b_tile = cuda.shared.array(b_size, f32, alignment=16)
        next_a, next_b = cuda.local.array(a_loads, f32), cuda.local.array(b_loads, f32)
        left, right, total = cuda.local.array(high, f32), cuda.local.array(wide, f32), cuda.local.array(totals, f32)
        row = cuda.local.array(row_size, u32)
        t = u32(cuda.threadIdx.x)
        part, block, group = split(cuda.blockIdx.x, u32((rows + tile_rows - u32(1)) // tile_rows), across)
        m0, n0 = u32(block * tile_rows), u32(group * tile_columns)
        first = u32(part * deep)
        stop = u32(min(depth, u32(first + deep)))
        # what a thread loads is one place of each step of the depth, of several rows and columns
        load, k = split(t, step)
        for j in range(a_loads):
            m = u32(min(u32(m0 + load + u32(j) * abreast), u32(rows - u32(1))))
            row[3 * j], row[3 * j + 1], row[3 * j + 2] = row_of(m)
        # what it multiplies is some of the tile's rows by some of its columns
        for i in range(totals):
            total[i] = ZERO
        lane_row, lane = split(t, lanes)
        a_own, b_own = u32(lane_row * u32(high)), u32(lane * u32(wide))
        a_stage, b_stage, k0 = u32(0), u32(0), first
        while k0 < u32(stop + step):
            # load a step, zeros past the end
            within = u32(k0 + k) < stop
            place = u32(k0 + k) if within else u32(0)
            at = place_of(place)
            for j in range(a_loads):
                value = left_at(a, mask, (row[3 * j], row[3 * j + 1], row[3 * j + 2]), at)
                next_a[j] = value if within else ZERO
            for j in range(b_loads):
                n = u32(min(u32(n0 + load + u32(j) * abreast), u32(columns_ - u32(1))))
                next_b[j] = right_at(b, mask, place, n)
            # multiply the one before, which is staged
            if k0 > first:
                a_at, b_at = u32(a_stage + a_own), u32(b_stage + b_own)
                a_end = u32(a_at + a_half)
                while a_at < a_end:
                    for s in range(unrolled):
                        for i in range(high):
                            left[i] = a_tile[a_at + u32(s * a_pitch + i)]
                        for j in range(wide):
                            right[j] = b_tile[b_at + u32(s * b_pitch + j)]
                        for i in range(high):
                            for j in range(wide):
                                total[i * wide + j] += left[i] * right[j]
                    a_at, b_at = u32(a_at + u32(unrolled) * a_line), u32(b_at + u32(unrolled) * b_line)
            # stage what was loaded, where nobody reads
            a_stage, b_stage = u32(a_half - a_stage), u32(b_half - b_stage)
            for j in range(a_loads):
                a_tile[a_stage + offset(k, a_line, u32(load + u32(j) * abreast))] = next_a[j]
            for j in range(b_loads):
                if u32(load + u32(j) * abreast) < tile_columns:
                    b_tile[b_stage + offset(k, b_line, u32(load + u32(j) * abreast))] = next_b[j]
            cuda.syncthreads()
            k0 = u32(k0 + step)
        # write the sums
        for i in range(high):
            m = u32(m0 + a_own + u32(i))
            for j in range(wide):
                n = u32(n0 + b_own + u32(j))
                if m < rows and n < columns_:
                    out[offset(part, rows, m, columns_, n)] = finished(total[i * wide + j], b, n)

    return Kernel(product, "void(f4[::1], f4[::1], f4[::1], f4[::1], u4, u4, u4)", BLOCK)
