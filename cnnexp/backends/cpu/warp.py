"""Images seen through a map of their coordinates, one pass over each: what augmentation computes.

No sum is reordered and no multiply-add fused here, so that a CPU with other instructions makes the same images.
"""

from __future__ import annotations

import functools

import numba
import numpy as np
from numba.core.dispatcher import Dispatcher

from cnnexp.backends.cpu.dispatchers import load_or_compile, signature_of
from cnnexp.network import noise

OPTIONS = {"error_model": "numpy", "nogil": True}
task = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)
mix = task(noise.mix)
HALF = np.float32(2.0**-31)  # of the numbers of 32 bits, with their sign


@task
def displace(key, image, table, taps, drawn, turned, fields):
    """Fill fields (W,2*H), transposed, down then across: numbers from -1 to 1 drawn by `noise`, blurred both ways.

    table (2*H*W,), uint32, is `mix` of 0, 1, ...; taps (R+1,) weigh half a pixel and its neighbours on either side,
    zeros beyond the edge; drawn (2*R+H,2*W) and turned (2*R+W,2*H) have them in their first and last R rows.
    """
    width, height, reach = fields.shape[0], fields.shape[1] // 2, len(taps) - 1
    row = mix(key ^ image)
    for i in range(height):
        for part in range(2):
            line = drawn[reach + i, part * width : (part + 1) * width]
            first = (part * height + i) * width
            for j in range(width):
                line[j] = np.float32(np.int32(mix(row ^ table[first + j]))) * HALF
    down = blur(drawn, taps, np.empty((height, 2 * width), np.float32))
    for i in range(height):
        for j in range(width):
            turned[reach + j, i], turned[reach + j, height + i] = down[i, j], down[i, width + j]
    blur(turned, taps, fields)


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
def sample(image, matrix, fields, alpha, rounding, out):
    """out[i,j] = image at matrix @ (i + alpha * fields[j,i], j + alpha * fields[j,H+i], 1), bilinear, 0 outside.

    image (H+3,W+3,C) has one row and column of zeros before and two after it; rounding is 0.5 for bytes, else 0.
    """
    height, width, channels = out.shape
    pixels, one = image.reshape(-1), np.float32(1)
    bottom, end, line = np.float32(height + 1), np.float32(width + 1), channels * (width + 3)
    (a, b, c), (d, e, f) = matrix
    for i in range(height):
        for j in range(width):
            p = np.float32(i) + alpha * fields[j, i]
            q = np.float32(j) + alpha * fields[j, height + i]
            # 1 for the zeros before the image; a place further out sees zeros as well
            y = min(max(a * p + b * q + (c + one), np.float32(0)), bottom)
            x = min(max(d * p + e * q + (f + one), np.float32(0)), end)
            top, left = np.int32(y), np.int32(x)
            low, right = y - np.float32(top), x - np.float32(left)
            at = np.uint64(top * line + left * channels)  # unsigned: Numba looks for no index from the end
            for _ in range(channels):
                above = pixels[at] * (one - right) + pixels[at + np.uint64(channels)] * right
                below = pixels[at + np.uint64(line)] * (one - right)
                below += pixels[at + np.uint64(line + channels)] * right
                out[i, j, _] = above * (one - low) + below * low + rounding
                at += np.uint64(1)


@numba.njit(**OPTIONS)
def warp(images, places, matrices, boxes, key, table, taps, alpha, rounding, out):
    """Fill out (N,H,W,C) with the images at `places` (int64 (N,)), each seen through its map.

    matrices (N,2,3), alpha and rounding: see `sample`; key, table and taps: see `displace`, which nothing is where
    `taps` is empty; boxes (N,4): rows from .. to, columns from .. to that are 0 in the end.
    """
    count, height, width, channels = out.shape
    image = np.zeros((height + 3, width + 3, channels), np.float32)
    fields, edges = np.zeros((width, 2 * height), np.float32), max(0, 2 * len(taps) - 2)
    drawn, turned = np.zeros((edges + height, 2 * width), np.float32), np.zeros((edges + width, 2 * height), np.float32)
    for n in range(count):
        image[1 : height + 1, 1 : width + 1] = images[places[n]]
        if len(taps):
            displace(key, places[n], table, taps, drawn, turned, fields)
        sample(image, matrices[n], fields, alpha, rounding, out[n])
        top, bottom, left, right = boxes[n]
        out[n, top:bottom, left:right] = 0


@functools.cache
def compiled(kind: str) -> Dispatcher:
    """Return `warp`, compiled for images of a kind: `uint8` or `float32`."""
    images = {"uint8": "u1[:,:,:,::1]", "float32": "f4[:,:,:,::1]"}[kind]
    signature = f"void({images}, i8[::1], f4[:,:,::1], i8[:,::1], i8, u4[::1], f4[::1], f4, f4, {images})"
    return load_or_compile(lambda key: numba.njit(**OPTIONS)(warp.py_func), signature_of(signature), "warp", kind)
