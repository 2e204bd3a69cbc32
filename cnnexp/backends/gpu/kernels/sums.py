"""Sums over images and places, and matrix products: the same in every layerwise backend, spread over the whole GPU.

A sum is formed in two stages, in a fixed order: first per slice of what is added up, then over the slices. There are as
many slices as give each multiprocessor some blocks. No atomic addition, so two runs give the same bits.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from cnnexp.backends.gpu.kernels.index import ZERO, f32, offset, split, u32
from cnnexp.backends.gpu.launch import Kernel

THREADS = 256  # of a block
MOST = 32  # threads that share out one sum's slices
BLOCKS = 4  # of a multiprocessor
AT_ONCE = 4  # loads that a thread begins before it adds up
SIDE = 16  # of a tile of a matrix product: THREADS elements


def sum_threads(slices: int) -> int:
    """Return how many threads share out the slices of one sum: four slices each, to begin with."""
    return min(MOST, 1 << (-(-slices // AT_ONCE) - 1).bit_length())


def tiles(rows: int, columns: int) -> int:
    """Return into how many squares `matmul` cuts a product."""
    return -(-rows // SIDE) * -(-columns // SIDE)


def deep(multiprocessors: int, rows: int, columns: int, depth: int) -> int:
    """Return how many products of an element `matmul` adds up in one block, a multiple of SIDE."""
    parts = min(-(-BLOCKS * multiprocessors // tiles(rows, columns)), -(-depth // (AT_ONCE * SIDE)))
    return -(-depth // (max(parts, 1) * SIDE)) * SIDE


def sum_of(term):
    """Return the device function (given, first, stride, part, parts, step): the sum of `term(given, place)`.

    Places are those of every `step`-th of some parts from one on; a part lies `stride` behind the one before.
    """
    term = cuda.jit(device=True)(term)

    def sum_every(given, first, stride, part, parts, step):
        total, apart = ZERO, u32(step * stride)
        while u32(part + 3 * step) < parts:  # begins four loads before it waits for the first
            i = offset(part, stride, first)
            a, b = term(given, i), term(given, u32(i + apart))
            c, d = term(given, u32(i + 2 * apart)), term(given, u32(i + 3 * apart))
            total += (a + b) + (c + d)
            part = u32(part + 4 * step)
        while part < parts:
            total += term(given, offset(part, stride, first))
            part = u32(part + step)
        return total

    return cuda.jit(device=True)(sum_every)


sum_every = sum_of(lambda partial, place: partial[place])


@cache
def sum_slices(has_bias: bool, relu: bool, threads: int) -> Kernel:
    """out[i] = the sum of partial[s, i] over the slices (+ bias[i % columns]), and ReLU, count in all.

    So many `threads` of a block share out each of its sums.
    """
    owners, parts, block = u32(THREADS // threads), u32(threads), THREADS

    def sum_slices(partial, bias, out, slices, columns, count):
        sums = cuda.shared.array(block, f32)
        t = u32(cuda.threadIdx.x)
        s, owner = split(t, owners)
        i = offset(cuda.blockIdx.x, owners, owner)
        # a thread adds up every so many of a sum's slices
        sums[t] = sum_every(partial, i, count, s, slices, parts) if i < count else ZERO
        cuda.syncthreads()
        # the first threads add up what the others have
        if t < owners and i < count:
            value = bias[u32(i % columns)] if has_bias else ZERO
            for part in range(parts):
                value += sums[offset(part, owners, t)]
            out[i] = value if not relu or value > ZERO else ZERO

    return Kernel(sum_slices, "void(f4[::1], f4[::1], f4[::1], u4, u4, u4)", THREADS)


@dataclass(frozen=True)
class Columns:
    """How blocks make sums of columns, each over a slice of the rows: of THREADS columns at most."""

    columns: int
    rows: int
    deep: int  # rows of a slice, but for the last

    @property
    def wide(self) -> int:
        return min(self.columns, THREADS)

    @property
    def lanes(self) -> int:
        """Return how many threads share out the rows of a column."""
        return THREADS // self.wide

    @property
    def groups(self) -> int:
        return -(-self.columns // self.wide)

    @property
    def slices(self) -> int:
        return -(-self.rows // self.deep)

    @property
    def blocks(self) -> int:
        return self.groups * self.slices


def columns_of(multiprocessors: int, rows: int, columns: int) -> Columns:
    """Return how to cut sums of columns so that all multiprocessors have blocks."""
    one = Columns(columns, rows, rows)
    slices = min(-(-BLOCKS * multiprocessors // one.groups), -(-rows // (AT_ONCE * one.lanes)))
    return Columns(columns, rows, -(-rows // max(slices, 1)))


@cache
def slice_of(columns: int) -> tuple[Any, np.uint32, np.uint32, np.uint32]:
    """Return a device function, the columns, those of a block, and how many lanes of threads add up each.

    The function (t, rows, deep) returns a thread's slice and column, the first of its rows and the end of the slice,
    and whether it writes the sum; a thread without a column has no rows.
    """
    cut = Columns(columns, 1, 1)
    C, wide, groups, lanes = u32(columns), u32(cut.wide), u32(cut.groups), u32(cut.lanes)

    def place(t, rows, deep):
        s, group = split(cuda.blockIdx.x, groups)
        lane, own = split(t, wide)
        c, first = offset(group, wide, own), u32(s * deep)
        stop = u32(min(rows, u32(first + deep)))
        works = lane < lanes and c < C
        return s, c, u32(first + lane) if works else stop, stop, works and lane == u32(0)

    return cuda.jit(device=True)(place), C, wide, lanes


@cuda.jit(device=True)
def block_sum(shared, t, value, wide, lanes):
    """Return the sum of what the lanes of thread t's column have, in their order."""
    cuda.syncthreads()
    shared[t] = value
    cuda.syncthreads()
    total, own = ZERO, u32(t % wide)
    for lane in range(lanes):
        total += shared[offset(lane, wide, own)]
    return total


@cache
def column_sums(columns: int) -> Kernel:
    """partial[s, c] = the sum of column c of dy over slice s, of `deep` rows."""
    place, C, wide, lanes = slice_of(columns)

    def column_sums(dy, partial, rows, deep):
        shared = cuda.shared.array(THREADS, f32)
        t = u32(cuda.threadIdx.x)
        s, c, row, stop, writes = place(t, rows, deep)
        value = block_sum(shared, t, sum_every(dy, c, C, row, stop, lanes), wide, lanes)
        if writes:
            partial[offset(s, C, c)] = value

    return Kernel(column_sums, "void(f4[::1], f4[::1], u4, u4)", THREADS)


@cache
def matmul(left_transposed: bool, right_transposed: bool, has_bias: bool) -> Kernel:
    """out[part] (rows, columns) = left @ right (+ bias), over `deep` products of each part, a multiple of SIDE.

    A block makes a square of elements, a thread one, from operands staged in shared memory square by square. left is
    (rows, depth), or (depth, rows) if transposed; right (depth, columns), or (columns, depth).
    """
    side, pitch = u32(SIDE), u32(SIDE + 1)
    size = SIDE * (SIDE + 1)  # one word more per row: columns fall into different banks

    def matmul(left, right, bias, out, rows, columns, depth, deep):
        a_tile = cuda.shared.array(size, f32)
        b_tile = cuda.shared.array(size, f32)
        high, low = split(u32(cuda.threadIdx.x), side)
        down, across = u32((rows + side - 1) // side), u32((columns + side - 1) // side)
        part, tile_row, tile_column = split(cuda.blockIdx.x, down, across)
        r0, c0 = u32(tile_row * side), u32(tile_column * side)
        total, k0 = ZERO, u32(part * deep)
        stop = u32(min(depth, u32(k0 + deep)))
        while k0 < stop:
            # stage a square of each operand: neighbours in a warp read neighbours in memory, however it is stored
            r, k = (u32(r0 + low), u32(k0 + high)) if left_transposed else (u32(r0 + high), u32(k0 + low))
            place = offset(k, rows, r) if left_transposed else offset(r, depth, k)
            value = left[place] if r < rows and k < stop else ZERO
            a_tile[offset(low, pitch, high) if left_transposed else offset(high, pitch, low)] = value
            c, k = (u32(c0 + high), u32(k0 + low)) if right_transposed else (u32(c0 + low), u32(k0 + high))
            place = offset(c, depth, k) if right_transposed else offset(k, columns, c)
            value = right[place] if c < columns and k < stop else ZERO
            b_tile[offset(low, pitch, high) if right_transposed else offset(high, pitch, low)] = value
            cuda.syncthreads()
            # multiply them
            for s in range(side):
                total += a_tile[offset(high, pitch, s)] * b_tile[low + offset(s, pitch, 0)]
            cuda.syncthreads()
            k0 = u32(k0 + side)
        # write the part's sums
        r, c = u32(r0 + high), u32(c0 + low)
        if r < rows and c < columns:
            out[offset(part, rows, r, columns, c)] = total + bias[c] if has_bias else total

    return Kernel(matmul, "void(f4[::1], f4[::1], f4[::1], f4[::1], u4, u4, u4, u4)", THREADS)
