"""What every fused program needs beside its layers: batches gathered, gradients added up, steps taken, totals kept.

A network's images stay where they were loaded, as bytes: `order` lists the images of the steps to come,
`cursor[0] + ahead` is where a batch starts in it. Gradients of parameters are partial sums in an arena; `update` adds
them up in a fixed order and takes the step. Every partial sum is written at every step, by zero where a short batch has
no image for it. The layers' kernels are in `conv_kernels` and `linear_kernels`.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from cnnexp.backends.gpu.kernels import ZERO, f32, u32
from cnnexp.backends.gpu.launch import Kernel
from cnnexp.optimizers import Optimizer

BLOCK = 256  # threads
LANES = 32  # threads of a block side by side in memory: a warp
BYTE, BYTE_INVERSE = f32(255), f32(1 / 255)
SEGMENT = 6  # numbers in a row of `update`'s table


def _fraction(value):
    """value / 255, rounded as a division is: one step of Newton's method is exact for whole numbers up to 255."""
    value = f32(value)
    q = value * BYTE_INVERSE
    return cuda.fma(cuda.fma(-BYTE, q, value), BYTE_INVERSE, q)


def _as_it_is(value):
    return f32(value)


fraction, as_it_is = cuda.jit(device=True)(_fraction), cuda.jit(device=True)(_as_it_is)


def sum_threads(parts: int) -> int:
    """Return how many threads of `update` share out the parts of one parameter: four parts each, to begin with."""
    threads = 1
    while 4 * threads < parts and threads < BLOCK // 8:
        threads *= 2
    return threads


@cache
def gather(D: int, from_bytes: bool) -> Kernel:
    """x[n, d] = image order[start + n], for a network that does not open with a fused convolution."""
    D, pixel = u32(D), fraction if from_bytes else as_it_is

    def gather(images, order, cursor, ahead, x, count):
        i = u32(cuda.grid(1))
        while i < count:
            x[i] = pixel(images[u32(order[u32(cursor[0] + ahead + i // D)] * D + i % D)])
            i = u32(i + u32(cuda.gridsize(1)))

    images = "uint8[::1]" if from_bytes else "float32[::1]"
    return Kernel(gather, f"void({images}, uint32[::1], uint32[::1], uint32, float32[::1], uint32)", BLOCK)


@cache
def gather_labels() -> Kernel:
    """t[n] = label of image order[start + n], for a loss that is not fused."""

    def gather_labels(labels, order, cursor, ahead, t, count):
        i = u32(cuda.grid(1))
        while i < count:
            t[i] = labels[order[u32(cursor[0] + ahead + i)]]
            i = u32(i + u32(cuda.gridsize(1)))

    return Kernel(gather_labels, "void(int32[::1], uint32[::1], uint32[::1], uint32, int32[::1], uint32)", BLOCK)


@cache
def keep_losses() -> Kernel:
    """Put a batch's losses and hits in their places, for a loss that is not fused."""

    def keep_losses(batch_losses, batch_hits, cursor, ahead, losses, hits, count):
        i = u32(cuda.grid(1))
        while i < count:
            losses[u32(cursor[0] + ahead + i)] = batch_losses[i]
            hits[u32(cursor[0] + ahead + i)] = batch_hits[i]
            i = u32(i + u32(cuda.gridsize(1)))

    arrays = "float32[::1], uint8[::1], uint32[::1], uint32, float32[::1], uint8[::1]"
    return Kernel(keep_losses, f"void({arrays}, uint32)", BLOCK)


@cache
def sum_of_parts() -> Any:
    """Return the device function (arena, table, row, sums): the sum of one parameter's partial gradients."""
    block = BLOCK

    def sum_of_parts(arena, table, row, sums):
        t = u32(cuda.threadIdx.x)
        base, stride = u32(table[u32(row + u32(2))]), u32(table[u32(row + u32(3))])
        parts, threads = u32(table[u32(row + u32(4))]), u32(table[u32(row + u32(5))])
        wide = u32(u32(block) // threads)
        total = ZERO
        if u32(t % wide) < u32(table[u32(row + u32(1))]):
            part, place, step = u32(t // wide), u32(base + t % wide), u32(threads * stride)
            while u32(part + u32(3) * threads) < parts:  # begins four loads before it waits for the first
                i = u32(place + part * stride)
                a, b = arena[i], arena[u32(i + step)]
                c, d = arena[u32(i + u32(2) * step)], arena[u32(i + u32(3) * step)]
                total += (a + b) + (c + d)
                part = u32(part + u32(4) * threads)
            while part < parts:
                total += arena[u32(place + part * stride)]
                part = u32(part + threads)
        sums[t] = total
        cuda.syncthreads()
        value = ZERO
        if t < wide:
            for s in range(threads):
                value += sums[u32(u32(s) * wide + t)]
        return value

    return cuda.jit(device=True)(sum_of_parts)


@cache
def update(optimizer: Optimizer | None, batch_size: int) -> Kernel:
    """Finish every parameter's gradient and take the optimizer's step, all parameters in one launch.

    Args:
        optimizer: whose rule; None writes the gradient to `w` instead.
        batch_size: finds a step's row (rate, c0, c1) of `rates` from its place in the order.

    A block's row of `table`: first parameter, how many, where in the arena the first part of the first is, from one
    part to the next, parts, threads per parameter.
    """
    rule = cuda.jit(device=True)(optimizer.rule(sqrt=math.sqrt, maximum=max)) if optimizer else None
    slots = len(optimizer.slots) if optimizer else 0
    block, steps, batch, sum_parts = BLOCK, optimizer is not None, u32(batch_size), sum_of_parts()

    def update(arena, table, w, s, t, rates, cursor, ahead):
        sums = cuda.shared.array(block, f32)
        lane, row = u32(cuda.threadIdx.x), u32(u32(cuda.blockIdx.x) * u32(SEGMENT))
        g = sum_parts(arena, table, row, sums)
        if lane < u32(table[u32(row + u32(1))]):
            i = u32(table[row] + lane)
            if steps:
                step = u32(u32(cursor[0] + ahead) // batch * u32(3))
                old_s = s[i] if slots > 0 else ZERO
                old_t = t[i] if slots > 1 else ZERO
                rate, c0, c1 = rates[step], rates[u32(step + u32(1))], rates[u32(step + u32(2))]
                new_w, new_s, new_t = rule(w[i], g, old_s, old_t, rate, c0, c1)
                w[i] = new_w
                if slots > 0:
                    s[i] = new_s
                if slots > 1:
                    t[i] = new_t
            else:
                w[i] = g

    arrays = ", ".join(["float32[::1]"] * 4)
    return Kernel(update, f"void(float32[::1], uint32[::1], {arrays}, uint32[::1], uint32)", BLOCK)


@cache
def advance() -> Kernel:
    """cursor[0] += by: the last node of a graph, so that the same graph runs the next steps when launched again."""

    def advance(cursor, by):
        if cuda.threadIdx.x == 0:
            cursor[0] = u32(cursor[0] + by)

    return Kernel(advance, "void(uint32[::1], uint32)", 1)


@cache
def sum_up() -> Kernel:
    """Per block of `BLOCK` images, the sum of their losses and hits: what is copied to the host after a pass."""
    block = BLOCK

    def sum_up(losses, hits, loss_sums, hit_sums, count):
        some_losses = cuda.shared.array(block, f32)
        some_hits = cuda.shared.array(block, np.uint32)
        t, i = u32(cuda.threadIdx.x), u32(cuda.grid(1))
        some_losses[t] = losses[i] if i < count else ZERO
        some_hits[t] = u32(hits[i]) if i < count else u32(0)
        cuda.syncthreads()
        if t == u32(0):
            loss, hit = ZERO, u32(0)
            for k in range(block):
                loss += some_losses[k]
                hit = u32(hit + some_hits[k])
            loss_sums[u32(cuda.blockIdx.x)] = loss
            hit_sums[u32(cuda.blockIdx.x)] = hit

    return Kernel(sum_up, "void(float32[::1], uint8[::1], float32[::1], uint32[::1], uint32)", BLOCK)
