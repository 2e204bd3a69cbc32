"""Images seen through a map of their coordinates, one pass over each: what augmentation computes.

No sum is reordered and no multiply-add fused here, so that a CPU with other instructions makes the same images.
"""

import functools

import numba
import numpy as np
from numba.core.dispatcher import Dispatcher

from cnnexp.backends.cpu.dispatchers import load_or_compile
from cnnexp.network import noise

OPTIONS = {"error_model": "numpy", "nogil": True}
task = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)
mix = task(noise.mix)
HALF = np.float32(2.0**-31)  # of the numbers of 32 bits, with their sign


@task
def displace(key, image, table, taps, across, down, fields):
    """Fill fields (H,2*W), down then across: numbers from -1 to 1 drawn by `noise`, blurred both ways.

    table (2*H*W,), uint32, is `mix` of 0, 1, ...; taps (R+1,) weigh half a pixel and its neighbours on either side,
    zeros beyond the edge; across (2*R+W,2*H) and down (2*R+H,2*W) have them in their first and last R rows.
    """
    height, width, reach = fields.shape[0], fields.shape[1] // 2, len(taps) - 1
    row, flat = mix(key ^ image), fields.reshape(-1)
    for element in range(len(flat)):
        flat[element] = np.float32(np.int32(mix(row ^ table[element]))) * HALF
    for i in range(2 * height):
        for j in range(width):
            across[reach + j, i] = flat[i * width + j]
    blurred = blur(across, taps, np.empty((width, 2 * height), np.float32))
    for i in range(height):
        for j in range(width):
            down[reach + i, j], down[reach + i, width + j] = blurred[j, i], blurred[j, height + i]
    blur(down, taps, fields)


@task
def blur(rows, taps, out):
    """Return out (N,M): each row the weighted sum of its neighbours; it is row n + R of `rows` (2*R+N,M)."""
    reach = len(taps) - 1
    for n in range(out.shape[0]):
        line = out[n]
        line[:] = 0
        for k in range(reach + 1):
            tap, above, below = taps[k], rows[reach + n - k], rows[reach + n + k]
            for j in range(out.shape[1]):
                line[j] += tap * (above[j] + below[j])
    return out


@task
def sample(image, matrix, fields, alpha, rounding, places, parts, out):
    """out[i,j] = image at matrix @ (i + alpha * fields[i,j], j + alpha * fields[i,W+j], 1), bilinear, 0 outside.

    image (H+3,W+3,C) has one row and column of zeros before and two after it; rounding is 0.5 for bytes, else 0; places
    (H*W,), int32, and parts (6,H*W) are room. What LLVM makes vectors of has loops of its own.
    """
    height, width, channels = out.shape
    one, pixels, shown, low, right = np.float32(1), image.reshape(-1), out.reshape(-1), parts[4], parts[5]
    bottom, end, line = np.float32(height + 1), np.float32(width + 1), np.int32(channels * (width + 3))
    (a, b, c), (d, e, f) = matrix
    for i in range(height):
        at, lows, rights = places[i * width :], low[i * width :], right[i * width :]
        for j in range(width):
            p = np.float32(i) + alpha * fields[i, j]
            q = np.float32(j) + alpha * fields[i, width + j]
            # 1 for the zeros before the image; a place further out sees zeros as well
            y = min(max(a * p + b * q + (c + one), np.float32(0)), bottom)
            x = min(max(d * p + e * q + (f + one), np.float32(0)), end)
            top, left = np.int32(y), np.int32(x)
            at[j] = top * line + left * np.int32(channels)
            lows[j], rights[j] = y - np.float32(top), x - np.float32(left)
    for channel in range(channels):
        for n in range(height * width):
            at_n = np.uint64(places[n] + channel)  # unsigned: Numba looks for no index from the end
            parts[0, n], parts[1, n] = pixels[at_n], pixels[at_n + np.uint64(channels)]
            at_n += np.uint64(line)
            parts[2, n], parts[3, n] = pixels[at_n], pixels[at_n + np.uint64(channels)]
        for n in range(height * width):
            above = parts[0, n] * (one - right[n]) + parts[1, n] * right[n]
            below = parts[2, n] * (one - right[n]) + parts[3, n] * right[n]
            shown[n * channels + channel] = above * (one - low[n]) + below * low[n] + rounding


@numba.njit(**OPTIONS)
def warp(images, places, matrices, boxes, key, table, taps, alpha, rounding, out):
    """Fill out (N,H,W,C) with the images at `places` (int64 (N,)), each seen through its map.

    matrices (N,2,3), alpha and rounding: see `sample`; key, table and taps: see `displace`, which nothing is where
    `taps` is empty; boxes (N,4): rows from .. to, columns from .. to that are 0 in the end.
    """
    count, height, width, channels = out.shape
    image = np.zeros((height + 3, width + 3, channels), np.float32)
    fields, edges = np.zeros((height, 2 * width), np.float32), max(0, 2 * len(taps) - 2)
    across, down = np.zeros((edges + width, 2 * height), np.float32), np.zeros((edges + height, 2 * width), np.float32)
    room = np.empty(height * width, np.int32), np.empty((6, height * width), np.float32)
    for n in range(count):
        image[1 : height + 1, 1 : width + 1] = images[places[n]]
        if len(taps):
            displace(key, places[n], table, taps, across, down, fields)
        sample(image, matrices[n], fields, alpha, rounding, *room, out[n])
        top, bottom, left, right = boxes[n]
        out[n, top:bottom, left:right] = 0


@functools.cache
def compiled(kind: str) -> Dispatcher:
    """Return `warp`, compiled for images of a kind: `uint8` or `float32`."""
    images = {"uint8": "u1[:,:,:,::1]", "float32": "f4[:,:,:,::1]"}[kind]
    signature = f"void({images}, i8[::1], f4[:,:,::1], i8[:,::1], i8, u4[::1], f4[::1], f4, f4, {images})"
    return load_or_compile(lambda key: numba.njit(**OPTIONS)(warp.py_func), signature, "warp", kind)
