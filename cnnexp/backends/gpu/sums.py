"""Sums over images and places, and matrix products: the same in every layerwise backend, spread over the whole GPU.

A sum is formed in two stages, in a fixed order: first per slice of what is added up, then over the slices. There are as
many slices as give each multiprocessor some blocks. No atomic addition, so two runs give the same bits.
"""

from __future__ import annotations

from functools import cache

from numba import cuda

from cnnexp.backends.gpu.kernels import ZERO, f32, u32
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


@cache
def sum_slices(has_bias: bool) -> Kernel:
    """out[i] = sum of partial[s, i] over the slices (+ bias[i % columns]): a block makes OWNERS sums, count in all."""
    owners, parts, block = u32(OWNERS), u32(THREADS // OWNERS), THREADS

    def sum_slices(partial, bias, out, slices, columns, count):
        sums = cuda.shared.array(block, f32)
        t = u32(cuda.threadIdx.x)
        i = u32(u32(cuda.blockIdx.x) * owners + t % owners)
        total = ZERO
        if i < count:
            s = u32(t // owners)
            while u32(s + u32(3) * parts) < slices:
                a, b = partial[u32(s * count + i)], partial[u32(u32(s + parts) * count + i)]
                c = partial[u32(u32(s + u32(2) * parts) * count + i)]
                d = partial[u32(u32(s + u32(3) * parts) * count + i)]
                total += (a + b) + (c + d)
                s = u32(s + u32(4) * parts)
            while s < slices:
                total += partial[u32(s * count + i)]
                s = u32(s + parts)
        sums[t] = total
        cuda.syncthreads()
        if t < owners and i < count:
            value = bias[u32(i % columns)] if has_bias else ZERO
            for part in range(parts):
                value += sums[u32(u32(part) * owners + t)]
            out[i] = value

    return Kernel(sum_slices, "void(float32[::1], float32[::1], float32[::1], uint32, uint32, uint32)", THREADS)


def sum_slices_blocks(count: int) -> int:
    """Return the blocks of `sum_slices`."""
    return -(-count // OWNERS)


@cache
def column_sums(columns: int) -> Kernel:
    """partial[s, f] = the sum of column f of dy (rows, columns) over slice s of the rows, one thread each."""
    F = u32(columns)

    def column_sums(dy, partial, rows, slices, count):
        i = u32(cuda.grid(1))
        while i < count:
            f, row, step = u32(i % F), u32(i // F), u32(slices)
            total = ZERO
            while u32(row + u32(3) * step) < rows:
                a, b = dy[u32(row * F + f)], dy[u32(u32(row + step) * F + f)]
                c, d = dy[u32(u32(row + u32(2) * step) * F + f)], dy[u32(u32(row + u32(3) * step) * F + f)]
                total += (a + b) + (c + d)
                row = u32(row + u32(4) * step)
            while row < rows:
                total += dy[u32(row * F + f)]
                row = u32(row + step)
            partial[i] = total
            i = u32(i + u32(cuda.gridsize(1)))

    return Kernel(column_sums, "void(float32[::1], float32[::1], uint32, uint32, uint32)", THREADS)


@cache
def column_products(columns: int, squares: bool) -> Kernel:
    """partial[s, c] = over slice s of the rows, the sum of (x - mean)^2, or of (x - mean) * dy; one thread each."""
    C = u32(columns)

    def term(x, mean, dy, place):
        difference = x[place] - mean
        return difference * (difference if squares else dy[place])

    term = cuda.jit(device=True)(term)

    def column_products(x, mean, dy, partial, rows, slices, count):
        i = u32(cuda.grid(1))
        while i < count:
            c, row, step = u32(i % C), u32(i // C), u32(slices)
            total, middle = ZERO, mean[c]
            while u32(row + u32(3) * step) < rows:
                p, q = term(x, middle, dy, u32(row * C + c)), term(x, middle, dy, u32(u32(row + step) * C + c))
                r = term(x, middle, dy, u32(u32(row + u32(2) * step) * C + c))
                s = term(x, middle, dy, u32(u32(row + u32(3) * step) * C + c))
                total += (p + q) + (r + s)
                row = u32(row + u32(4) * step)
            while row < rows:
                total += term(x, middle, dy, u32(row * C + c))
                row = u32(row + step)
            partial[i] = total
            i = u32(i + u32(cuda.gridsize(1)))

    arrays = ", ".join(["float32[::1]"] * 4)
    return Kernel(column_products, f"void({arrays}, uint32, uint32, uint32)", THREADS)


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
        across, down = u32((columns + side - u32(1)) // side), u32((rows + side - u32(1)) // side)
        c0 = u32(u32(u32(cuda.blockIdx.x) % across) * side)
        r0 = u32(u32(u32(u32(cuda.blockIdx.x) // across) % down) * side)
        part = u32(u32(cuda.blockIdx.x) // u32(across * down))
        total = cuda.local.array(owned, f32)
        for j in range(owned):
            total[j] = ZERO
        k0 = u32(part * deep)
        stop = u32(min(depth, u32(k0 + deep)))
        while k0 < stop:
            i = t
            while i < elements:
                # neighbours in a warp read neighbours in memory, whichever way an operand is stored
                high, low = u32(i // side), u32(i % side)
                if left_transposed:
                    r, k = u32(r0 + low), u32(k0 + high)
                    a_tile[u32(low * pitch + high)] = left[u32(k * rows + r)] if r < rows and k < stop else ZERO
                else:
                    r, k = u32(r0 + high), u32(k0 + low)
                    a_tile[u32(high * pitch + low)] = left[u32(r * depth + k)] if r < rows and k < stop else ZERO
                if right_transposed:
                    k, c = u32(k0 + low), u32(c0 + high)
                    b_tile[u32(low * pitch + high)] = right[u32(c * depth + k)] if c < columns and k < stop else ZERO
                else:
                    k, c = u32(k0 + high), u32(c0 + low)
                    b_tile[u32(high * pitch + low)] = right[u32(k * columns + c)] if c < columns and k < stop else ZERO
                i = u32(i + threads)
            cuda.syncthreads()
            for j in range(owned):
                place = u32(u32(j) * threads + t)
                row, column = u32(u32(place // side) * pitch), u32(place % side)
                for s in range(side):
                    total[j] += a_tile[u32(row + u32(s))] * b_tile[u32(u32(s) * pitch + column)]
            cuda.syncthreads()
            k0 = u32(k0 + side)
        for j in range(owned):
            place = u32(u32(j) * threads + t)
            r, c = u32(r0 + place // side), u32(c0 + place % side)
            if r < rows and c < columns:
                out[u32(u32(u32(part * rows) + r) * columns + c)] = total[j] + bias[c] if has_bias else total[j]

    arrays = "float32[::1], float32[::1], float32[::1], float32[::1]"
    return Kernel(matmul, f"void({arrays}, uint32, uint32, uint32, uint32)", THREADS)
