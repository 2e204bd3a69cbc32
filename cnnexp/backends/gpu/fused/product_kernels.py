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
from cnnexp.backends.gpu.kernels.index import ONE, ZERO, ConvSizes, f32, four, offset, split, u32, unsigned
from cnnexp.backends.gpu.kernels.layers import device_function
from cnnexp.backends.gpu.launch import Kernel

STEP = 8  # of the depth between two barriers
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


@dataclass(frozen=True)
class Operand:
    """How a thread loads an operand: some numbers at once that lie together, along the depth or along the side.

    Attributes:
        of_side: function (row or column): what `at` takes of it; of a row three numbers, of a column one.
        of_depth: function (place in the depth): likewise.
        at: function (array, mask, side, depth): the numbers, a tuple.
    """

    of_side: Callable[..., Any]
    of_depth: Callable[..., Any]
    at: Callable[..., Any]
    deep: int = 1
    side: int = 1

    @property
    def lanes(self) -> int:
        """Return how many threads share out a step of the depth."""
        return STEP // self.deep

    @property
    def abreast(self) -> int:
        """Return how many rows, or columns, a block loads at once."""
        return BLOCK // self.lanes * self.side


@cache
def forward(sizes: ConvSizes, has_bias: bool, relu: bool, tile: Tile) -> Kernel:
    """(x, w, w, y, pixels of y, depth, depth): y = x * w + bias, and ReLU. w ends in the biases, if there are any."""
    F, bias = u32(sizes.F), u32(sizes.K**2 * sizes.C * sizes.F)

    def finished(value, w, f):
        value = value + w[bias + f] if has_bias else value
        return value if not relu or value > ZERO else ZERO

    seen = _gathered(sizes.H, sizes.W, sizes.C, masked=False)
    left = Operand(_corner(sizes), _tap(sizes), seen, deep=_together(sizes.C))
    right = Operand(lambda f: f, lambda k: u32(k * F), lambda w, _, f, k: (w[u32(f + k)],))
    return _product(tile, sizes.F, left, right, finished)


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

    read = _read(sizes.F, masked=relu)

    def strided(dy, y, pixel, tap):
        (first, row, col), (f, a, b) = pixel, tap
        row, col, f = u32(row + a), u32(col + b), u32(f - offset(a, Q, b, F, 0))
        on_step = (row % stride == u32(0)) & (col % stride == u32(0))
        exists = on_step & (row < P * stride) & (col < Q * stride)  # without a branch, which loads would wait for
        place = u32(first + offset(u32(row // stride), Q, u32(col // stride), F, f)) if exists else u32(0)
        return read(dy, y, place, exists)

    def weight(k):
        a, b, f = split(k, K, F)
        return offset(a, K, b, u32(C * F), f)

    spread = _gathered(sizes.P, sizes.Q, sizes.F, masked=relu) if sizes.stride == 1 else strided
    right = Operand(lambda c: u32(c * F), weight, lambda w, _, c, k: (w[u32(c + k)],))
    return _product(tile, sizes.C, Operand(pixel, tap, spread, deep=_together(sizes.F)), right)


@cache
def backward_weights(sizes: ConvSizes, has_bias: bool, relu: bool, tile: Tile) -> Kernel:
    """(x, dy, y, partial, rows, pixels of y, pixels of a slice): partial gradients of the weights, then the biases.

    A row more than there are weights of a filter, which sees ones, is the biases' gradient.
    """
    F, K = u32(sizes.F), u32(sizes.K)
    gathered, read = device_function(_gathered(sizes.H, sizes.W, sizes.C, masked=False)), _read(sizes.F, masked=relu)

    def seen(x, y, tap, corner):
        values = gathered(x, y, corner, tap)
        return ones(values) if has_bias and tap[1] >= K else values

    def gradient(dy, y, f, k):
        return read(dy, y, u32(f + k), True)

    ones = device_function(lambda values: (ONE, ONE, ONE, ONE) if len(values) == 4 else (ONE,))
    left = Operand(_tap(sizes), _corner(sizes), seen, side=_together(sizes.C))
    right = Operand(lambda f: f, lambda k: u32(k * F), gradient, side=_together(sizes.F))
    return _product(tile, sizes.F, left, right)


def _together(channels: int) -> int:
    """Return how many numbers of a pixel a thread loads at once."""
    return 4 if channels % 4 == 0 else 1


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


def _gathered(high: int, wide: int, channels: int, masked: bool) -> Callable[..., Any]:
    """Return the function (x, mask, corner, tap): what a tap sees of images of `high` x `wide`; zero where `masked`.

    Numbers below 0 are large ones, outside every image.
    """
    high, wide, read = u32(high), u32(wide), _read(channels, masked)

    def gathered(x, mask, corner, tap):
        exists = (u32(corner[1] + tap[1]) < high) & (u32(corner[2] + tap[2]) < wide)
        return read(x, mask, u32(corner[0] + tap[0]) if exists else u32(0), exists)

    return gathered


@cache
def _read(channels: int, masked: bool) -> Any:
    """Return the device function (x, mask, place, exists): the numbers there; zero where `masked`, or none `exists`."""

    @device_function
    def kept(value, mask, exists):
        return value if exists & (mask > ZERO) else ZERO

    def read_four(x, mask, place, exists):
        a, b, c, d = four(x, place)
        e, f, g, h = four(mask, place) if masked else (ONE, ONE, ONE, ONE)
        return kept(a, e, exists), kept(b, f, exists), kept(c, g, exists), kept(d, h, exists)

    def read_one(x, mask, place, exists):
        return (kept(x[place], mask[place] if masked else ONE, exists),)

    return device_function(read_four if _together(channels) == 4 else read_one)


def _product(
    tile: Tile, columns: int, left: Operand, right: Operand, finished: Callable[..., Any] = lambda value, b, n: value
) -> Kernel:
    """Return the kernel (a, b, mask, out, rows, depth, deep): out[slice] (rows, columns) = finished(left @ right).

    `finished` is a function (sum, b, column); a block makes one slice of the depth, of `deep` places.
    """
    row_of, place_of, left_at = map(device_function, (left.of_side, left.of_depth, left.at))
    column_of, depth_of, right_at = map(device_function, (right.of_side, right.of_depth, right.at))
    columns_, across, step = u32(columns), u32(-(-columns // tile.columns)), u32(STEP)
    finished = device_function(finished)
    a_loads, b_loads = -(-tile.rows // left.abreast), -(-tile.columns // right.abreast)
    a_deep, a_side, b_deep, b_side = left.deep, left.side, right.deep, right.side
    a_lanes, b_lanes, a_abreast, b_abreast = (u32(v) for v in (left.lanes, right.lanes, left.abreast, right.abreast))
    a_once, b_once, high, wide, unrolled = a_deep * a_side, b_deep * b_side, tile.high, WIDE, UNROLLED // tile.high
    a_pitch, b_pitch = tile.rows + SPARE, tile.columns + SPARE
    a_line, b_line, a_half, b_half = u32(a_pitch), u32(b_pitch), u32(STEP * a_pitch), u32(STEP * b_pitch)
    a_size, b_size, totals = 2 * STEP * a_pitch, 2 * STEP * b_pitch, tile.high * WIDE
    a_next, b_next, row_size, column_size = a_loads * a_once, b_loads * b_once, 3 * a_loads, 3 * b_loads
    lanes, tile_rows, tile_columns = u32(tile.columns // WIDE), u32(tile.rows), u32(tile.columns)

    def product(a, b, mask, out, rows, depth, deep):
        a_tile = cuda.shared.array(a_size, f32, alignment=16)
        b_tile = cuda.shared.array(b_size, f32, alignment=16)
        next_a, next_b = cuda.local.array(a_next, f32), cuda.local.array(b_next, f32)
        left, right, total = cuda.local.array(high, f32), cuda.local.array(wide, f32), cuda.local.array(totals, f32)
        row, column = cuda.local.array(row_size, u32), cuda.local.array(column_size, u32)
        t = u32(cuda.threadIdx.x)
        part, block, group = split(cuda.blockIdx.x, u32((rows + tile_rows - u32(1)) // tile_rows), across)
        m0, n0 = u32(block * tile_rows), u32(group * tile_columns)
        first = u32(part * deep)
        stop = u32(min(depth, u32(first + deep)))
        # what a thread loads: of several rows and columns, its places of every step of the depth
        a_load, a_k = split(t, a_lanes)
        a_load, a_k = u32(a_load * u32(a_side)), u32(a_k * u32(a_deep))
        for j in range(a_loads):
            m = u32(min(u32(m0 + a_load + u32(j) * a_abreast), u32((rows - u32(1)) // u32(a_side) * u32(a_side))))
            row[3 * j], row[3 * j + 1], row[3 * j + 2] = row_of(m)
        b_load, b_k = split(t, b_lanes)
        b_load, b_k = u32(b_load * u32(b_side)), u32(b_k * u32(b_deep))
        for j in range(b_loads):
            n = u32(min(u32(n0 + b_load + u32(j) * b_abreast), u32(columns_ - u32(b_side))))
            column[j] = column_of(n)
        # what it multiplies: some of the tile's rows by some of its columns
        for i in range(totals):
            total[i] = ZERO
        lane_row, lane = split(t, lanes)
        a_own, b_own = u32(lane_row * u32(high)), u32(lane * u32(wide))
        a_stage, b_stage, k0 = u32(0), u32(0), first
        while k0 < u32(stop + step):
            # load a step, zeros past the end
            within = u32(k0 + a_k) < stop
            at = place_of(u32(k0 + a_k) if within else u32(0))
            for j in range(a_loads):
                values = left_at(a, mask, (row[3 * j], row[3 * j + 1], row[3 * j + 2]), at)
                for i in range(a_once):
                    next_a[j * a_once + i] = values[i] if within else ZERO
            at_b = depth_of(u32(k0 + b_k) if u32(k0 + b_k) < stop else u32(0))
            for j in range(b_loads):
                values = right_at(b, mask, column[j], at_b)
                for i in range(b_once):
                    next_b[j * b_once + i] = values[i]
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
                place = u32(a_stage + offset(a_k, a_line, u32(a_load + u32(j) * a_abreast)))
                for i in range(a_once):
                    if a_load + u32(j) * a_abreast < tile_rows:
                        a_tile[place + u32(i * a_pitch if a_deep > 1 else i)] = next_a[j * a_once + i]
            for j in range(b_loads):
                place = u32(b_stage + offset(b_k, b_line, u32(b_load + u32(j) * b_abreast)))
                for i in range(b_once):
                    if b_load + u32(j) * b_abreast < tile_columns:
                        b_tile[place + u32(i * b_pitch if b_deep > 1 else i)] = next_b[j * b_once + i]
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
