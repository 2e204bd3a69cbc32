"""A convolution of many channels, or a linear layer, as a product of matrices gathered as they are staged.

The matrix of all windows ("im2col") is never in memory (Chetlur et al. 2014, cuDNN, section 3.2). Each pass is one:

    forward            rows pixels of y, columns filters, depth the taps and channels of a window
    of the input       rows pixels of x, columns channels, depth the taps and filters
    of the weights     rows taps and channels, columns filters, depth the pixels of y

Where that makes few blocks the depth is cut into slices, whose products are added up. A linear layer is a convolution
of images of one pixel. A block loads `STEP` of the depth of both operands while it multiplies the `STEP` before, which
it has staged in shared memory; a thread keeps its sums in registers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import cuda

from cnnexp.backends.gpu.kernels.index import ONE, ZERO, ConvSizes, f32, four, offset, put_four, split, u32, unsigned
from cnnexp.backends.gpu.kernels.layers import device_function
from cnnexp.backends.gpu.launch import Kernel

THREADS = 128  # of a block
STEP = 16  # of the depth between two barriers
LEAST = 4  # steps of a slice
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
        return THREADS // (self.columns // WIDE) * self.high

    def blocks(self, rows: int, columns: int) -> int:
        return -(-rows // self.rows) * -(-columns // self.columns)


@dataclass(frozen=True)
class Cut:
    """How a product is cut into blocks: into tiles, and into slices of the depth."""

    tile: Tile
    columns: int
    depth: int
    deep: int  # places of a slice

    @property
    def slices(self) -> int:
        return -(-self.depth // self.deep)

    def blocks(self, rows: int) -> int:
        """Return how many make a product of so many rows."""
        return self.tile.blocks(rows, self.columns) * self.slices


def cut(rows: int, columns: int, depth: int, blocks: int, channels: int) -> Cut:
    """Return how to cut a product so that there are about so many `blocks`, if slices are not to be too short.

    High tiles serve more products by a number that is staged, where there are blocks enough and few rows too many.
    Narrow ones have many rows, which take too many registers where the left operand's `channels` are loaded one by one.
    """
    most = max(1, depth // (LEAST * STEP))  # slices
    wide = 16 if columns <= 16 and _together(channels) > 1 else 32 if columns <= 32 else 64
    low, tile = Tile(wide, 4), Tile(wide, 8)
    padded, least = (-(-rows // one.rows) * one.rows for one in (tile, low))
    if 6 * padded > 7 * least or 4 * most * tile.blocks(rows, columns) < 3 * blocks:
        tile = low
    slices = max(1, min(most, blocks // tile.blocks(rows, columns)))
    return Cut(tile, columns, depth, -(-depth // (slices * STEP)) * STEP)


@dataclass(frozen=True)
class Operand:
    """How a thread loads an operand: some numbers at once that lie together, along the depth or along the side.

    Attributes:
        of_side: function (row or column): what `at` takes of it; of a row three numbers, of a column one.
        of_depth: function (place in the depth): likewise.
        at: function (array, mask, side, depth): the numbers, a tuple.
        deep, side: how many numbers.
        along: whether threads side by side go along the depth, as the operand lies in memory; else along the side.
    """

    of_side: Callable[..., Any]
    of_depth: Callable[..., Any]
    at: Callable[..., Any]
    along: bool
    deep: int = 1
    side: int = 1

    def place(self) -> tuple[Any, int]:
        """Return the device function (thread): the first row, or column, and place of a step that a thread loads.

        And how many rows, or columns, a block loads at once.
        """
        lanes, deep, side, along = u32(STEP // self.deep), u32(self.deep), u32(self.side), self.along
        abreast = u32(THREADS // (STEP // self.deep))

        def place(t):
            load, k = split(t, lanes)
            if not along:
                k, load = split(t, abreast)
            return u32(load * side), u32(k * deep)

        return device_function(place), int(abreast) * self.side


@cache
def forward(sizes: ConvSizes, has_bias: bool, relu: bool, aligned: bool, tile: Tile) -> Kernel:
    """(x, w, w, y, pixels of y, depth, deep): y = x * w + bias, and ReLU. w ends in the biases, if there are any.

    It may be `aligned` to four numbers, here and below.
    """
    F, together = u32(sizes.F), _together(sizes.F) if aligned else 1
    seen = _gathered(sizes.H, sizes.W, sizes.C, masked=False)
    left = Operand(_corner(sizes), _tap(sizes), seen, True, deep=_together(sizes.C))
    right = Operand(lambda f: f, lambda k: u32(k * F), _weights(together), False, side=together)
    biases = sizes.K**2 * sizes.C * sizes.F if has_bias else None
    return _product(tile, sizes.F, left, right, _together(sizes.F) == 4, biases, relu)


@cache
def backward_input(sizes: ConvSizes, relu: bool, aligned: bool, tile: Tile) -> Kernel:
    """(dy, w, y, dx, pixels of x, depth, deep): dx, from dy where y was left by the ReLU."""
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
    together = _together(sizes.F) if aligned else 1
    right = Operand(lambda c: u32(c * F), weight, _weights(together), True, deep=together)
    gradient = Operand(pixel, tap, spread, True, deep=_together(sizes.F))
    return _product(tile, sizes.C, gradient, right, _together(sizes.C) == 4)


@cache
def backward_weights(sizes: ConvSizes, has_bias: bool, relu: bool, tile: Tile) -> Kernel:
    """(x, dy, y, partial, rows, pixels of y, deep): partial gradients of the weights, then the biases.

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
    left = Operand(_tap(sizes), _corner(sizes), seen, False, side=_together(sizes.C))
    right = Operand(lambda f: f, lambda k: u32(k * F), gradient, False, side=_together(sizes.F))
    return _product(tile, sizes.F, left, right)


def _together(channels: int) -> int:
    """Return how many numbers of a pixel a thread loads at once."""
    return 4 if channels % 4 == 0 else 1


def _weights(together: int) -> Callable[..., Any]:
    """Return the function (w, mask, side, depth): so many weights that lie together."""
    if together == 4:
        return lambda w, _, f, k: four(w, u32(f + k))
    return lambda w, _, f, k: (w[u32(f + k)],)


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
    tile: Tile,
    columns: int,
    left: Operand,
    right: Operand,
    fours: bool = False,
    bias: int | None = None,
    relu: bool = False,
) -> Kernel:
    """Return the kernel (a, b, mask, out, rows, depth, deep): out[slice] (rows, columns) = left @ right, and ReLU.

    A block makes one slice of the depth, of `deep` places. Sums may be written in `fours`; `bias` begins there in b.
    """
    row_of, place_of, left_at = map(device_function, (left.of_side, left.of_depth, left.at))
    column_of, depth_of, right_at = map(device_function, (right.of_side, right.of_depth, right.at))
    columns_, across, step = u32(columns), u32(-(-columns // tile.columns)), u32(STEP)
    has_bias, first_bias = bias is not None, u32(bias or 0)
    (a_first, a_abreast), (b_first, b_abreast) = left.place(), right.place()
    a_loads, b_loads = -(-tile.rows // a_abreast), -(-tile.columns // b_abreast)
    a_deep, a_side, b_deep, b_side = left.deep, left.side, right.deep, right.side
    a_abreast, b_abreast = u32(a_abreast), u32(b_abreast)
    a_once, b_once, high, wide, unrolled = a_deep * a_side, b_deep * b_side, tile.high, WIDE, UNROLLED // tile.high
    a_pitch, b_pitch = tile.rows + SPARE, tile.columns + SPARE
    a_line, b_line, a_half, b_half = u32(a_pitch), u32(b_pitch), u32(STEP * a_pitch), u32(STEP * b_pitch)
    a_size, b_size, totals = 2 * STEP * a_pitch, 2 * STEP * b_pitch, tile.high * WIDE
    a_next, b_next, row_size, column_size = a_loads * a_once, b_loads * b_once, 3 * a_loads, 3 * b_loads
    lanes, tile_rows, tile_columns = u32(tile.columns // WIDE), u32(tile.rows), u32(tile.columns)

    @device_function
    def write(out, place, n, values):
        if fours:
            if n < columns_:
                put_four(out, place, values[0], values[1], values[2], values[3])
        else:
            for j in range(wide):
                if u32(n + u32(j)) < columns_:
                    out[u32(place + u32(j))] = values[j]

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
        a_load, a_k = a_first(t)
        for j in range(a_loads):
            m = u32(min(u32(m0 + a_load + u32(j) * a_abreast), u32((rows - u32(1)) // u32(a_side) * u32(a_side))))
            row[3 * j], row[3 * j + 1], row[3 * j + 2] = row_of(m)
        b_load, b_k = b_first(t)
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
        # write the sums, with bias and ReLU
        n = u32(n0 + b_own)
        for j in range(wide):
            right[j] = b[first_bias + u32(min(u32(n + u32(j)), u32(columns_ - u32(1))))] if has_bias else ZERO
        for i in range(high):
            m = u32(m0 + a_own + u32(i))
            for j in range(wide):
                value = total[i * wide + j] + right[j]
                left[j] = value if not relu or value > ZERO else ZERO
            if m < rows:
                write(out, offset(part, rows, m, columns_, n), n, (left[0], left[1], left[2], left[3]))

    return Kernel(product, "void(f4[::1], f4[::1], f4[::1], f4[::1], u4, u4, u4)", THREADS)
