"""Sums over images and places, and matrix products: the same in every layerwise backend, spread over the whole GPU.

A sum is formed in two stages, in a fixed order: first per slice of what is added up, then over the slices. There are as
many slices as give each multiprocessor some blocks. No atomic addition, so two runs give the same bits.
"""

from __future__ import annotations

from functools import cache

from numba import cuda

from cnnexp.backends.gpu.kernels.index import ZERO, f32, offset, split, u32
from cnnexp.backends.gpu.launch import Kernel

THREADS = 256  # of a block
OWNERS = 8  # sums of a block in `sum_slices`: a sector of memory
BLOCKS = 4  # of a multiprocessor
AT_ONCE = 4  # loads that a thread begins before it adds up
SIDE = 16  # of a tile of a matrix product


def slices(multiprocessors: int, rows: int, size: int) -> int:
    """Return into how many slices to cut a sum over `rows` of `size` numbers, a thread each, so that all have work."""
    wanted = -(-BLOCKS * multiprocessors * THREADS // size)
    return max(1, min(wanted, -(-rows // AT_ONCE)))


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
def sum_slices(has_bias: bool) -> Kernel:
    """out[i] = sum of partial[s, i] over the slices (+ bias[i % columns]): a block makes OWNERS sums, count in all."""
    owners, parts, block = u32(OWNERS), u32(THREADS // OWNERS), THREADS

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
            out[i] = value

    return Kernel(sum_slices, "void(f4[::1], f4[::1], f4[::1], u4, u4, u4)", THREADS)


@cache
def column_sums(columns: int, of: str) -> Kernel:
    """partial[s, c] = the sum over slice s of the rows of "dy", "(x - mean) dy" or "(x - mean)^2"; one thread each."""
    C, is_centred, is_square = u32(columns), of != "dy", of == "(x - mean)^2"

    def term(given, place):
        x, mean, dy = given
        if not is_centred:
            return dy[place]
        difference = x[place] - mean
        return difference * (difference if is_square else dy[place])

    sum_rows = sum_of(term)

    def column_sums(x, mean, dy, partial, rows, slices, count):
        i = u32(cuda.grid(1))
        if i < count:
            row, c = split(i, C)
            given = x, mean[c] if is_centred else ZERO, dy
            partial[i] = sum_rows(given, c, C, row, rows, slices)

    return Kernel(column_sums, "void(f4[::1], f4[::1], f4[::1], f4[::1], u4, u4, u4)", THREADS)


@cache
def matmul(left_transposed: bool, right_transposed: bool, has_bias: bool) -> Kernel:
    """out[part] (rows, columns) = left @ right (+ bias), over `deep` products of each part, a multiple of SIDE.

    A block makes a square of elements from operands staged in shared memory square by square. left is (rows, depth), or
    (depth, rows) if transposed; right (depth, columns), or (columns, depth).
    """
    side, threads, pitch = u32(SIDE), u32(THREADS), u32(SIDE + 1)
    size = SIDE * (SIDE + 1)  # one word more per row: columns fall into different banks
    owned = SIDE**2 // THREADS  # elements of a thread
    elements = u32(SIDE**2)

    def matmul(left, right, bias, out, rows, columns, depth, deep):
        a_tile = cuda.shared.array(size, f32)
        b_tile = cuda.shared.array(size, f32)
        t = u32(cuda.threadIdx.x)
        down, across = u32((rows + side - 1) // side), u32((columns + side - 1) // side)
        part, tile_row, tile_column = split(cuda.blockIdx.x, down, across)
        r0, c0 = u32(tile_row * side), u32(tile_column * side)
        total = cuda.local.array(owned, f32)
        for j in range(owned):
            total[j] = ZERO
        k0 = u32(part * deep)
        stop = u32(min(depth, u32(k0 + deep)))
        while k0 < stop:
            # stage a square of each operand: neighbours in a warp read neighbours in memory, however it is stored
            i = t
            while i < elements:
                high, low = split(i, side)
                r, k = (u32(r0 + low), u32(k0 + high)) if left_transposed else (u32(r0 + high), u32(k0 + low))
                place = offset(k, rows, r) if left_transposed else offset(r, depth, k)
                value = left[place] if r < rows and k < stop else ZERO
                a_tile[offset(low, pitch, high) if left_transposed else offset(high, pitch, low)] = value
                c, k = (u32(c0 + high), u32(k0 + low)) if right_transposed else (u32(c0 + low), u32(k0 + high))
                place = offset(c, depth, k) if right_transposed else offset(k, columns, c)
                value = right[place] if c < columns and k < stop else ZERO
                b_tile[offset(low, pitch, high) if right_transposed else offset(high, pitch, low)] = value
                i = u32(i + threads)
            cuda.syncthreads()
            # multiply them
            for j in range(owned):
                row, column = split(offset(j, threads, t), side)
                for s in range(side):
                    total[j] += a_tile[offset(row, pitch, s)] * b_tile[column + offset(s, pitch, 0)]
            cuda.syncthreads()
            k0 = u32(k0 + side)
        # write the part's sums
        for j in range(owned):
            row, column = split(offset(j, threads, t), side)
            r, c = u32(r0 + row), u32(c0 + column)
            if r < rows and c < columns:
                out[offset(part, rows, r, columns, c)] = total[j] + bias[c] if has_bias else total[j]

    return Kernel(matmul, "void(f4[::1], f4[::1], f4[::1], f4[::1], u4, u4, u4, u4)", THREADS)
