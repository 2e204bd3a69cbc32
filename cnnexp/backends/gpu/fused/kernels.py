"""What every fused program needs beside its layers: batches gathered, gradients added up, steps taken, totals kept.

A network's images stay where they were loaded, as bytes: `order[1:]` lists the images of the steps to come, a batch
starts at `order[0] + ahead` in it. `outcomes` has (loss, hit) of each. Gradients of parameters are partial sums in an
arena; `update` adds them up in a fixed order and takes the step. Every partial sum is written at every step, by zero
where a short batch has no image for it. The layers' kernels are in the modules beside this one.
"""

from functools import cache

import numpy as np
from numba import cuda

from cnnexp.backends.gpu.kernels.index import ONE, ZERO, f32, offset, split, u32
from cnnexp.backends.gpu.kernels.layers import loss_rule, mix, step_of
from cnnexp.backends.gpu.kernels.sums import sum_every
from cnnexp.backends.gpu.launch import Kernel, kernel
from cnnexp.network.losses import Loss
from cnnexp.optimizers import Optimizer

BLOCK = 256  # threads
LANES = 32  # threads of a block side by side in memory: a warp
BYTE, BYTE_INVERSE = f32(255), f32(1 / 255)
SEGMENT = 6  # numbers in a row of `update`'s table


@cuda.jit(device=True)
def fraction(value):
    """value / 255, rounded as a division is: one step of Newton's method is exact for whole numbers up to 255."""
    value = f32(value)
    q = value * BYTE_INVERSE
    return cuda.fma(cuda.fma(-BYTE, q, value), BYTE_INVERSE, q)


@cuda.jit(device=True)
def image_at(order, ahead, n):
    """Return the n-th image of a batch: its number in the data set."""
    return u32(order[u32(order[0] + ahead + n + 1)])


@cache
def gather(D: int, from_bytes: bool) -> Kernel:
    """x[n, d] = image order[start + n], for a network that does not open with a fused convolution."""
    D, pixel = u32(D), fraction if from_bytes else f32

    def gather(images, order, ahead, x, count):
        i = u32(cuda.grid(1))
        if i < count:
            n, d = split(i, D)
            x[i] = pixel(images[offset(image_at(order, ahead, n), D, d)])

    images = "u1[::1]" if from_bytes else "f4[::1]"
    return Kernel(gather, f"void({images}, u4[::1], u4, f4[::1], u4)", BLOCK)


@cache
def dropout(D: int, batch_size: int, draws: int) -> Kernel:
    """As `layers.dropout`, where one launch serves many steps: `keys` has a row of `draws` for each that is to come.

    `shown` lists the places in the data set of the images of these steps; this layer's key is the row's `which`th.
    """
    D, batch, draws = u32(D), u32(batch_size), u32(draws)

    def dropout(x, order, ahead, shown, keys, which, least, scale, y, count):
        i = u32(cuda.grid(1))
        if i < count:
            n, d = split(i, D)
            first = u32(order[0] + ahead)
            step, _ = split(first, batch)
            key, image = np.int64(keys[offset(step, draws, which)]), np.int64(shown[u32(first + n)])
            y[i] = x[i] * scale if mix(mix(key ^ image) ^ mix(np.int64(d))) >= least else ZERO

    return Kernel(dropout, "void(f4[::1], u4[::1], u4, u4[::1], u4[::1], u4, i8, f4, f4[::1], u4)", BLOCK)


@cache
def skip(large: tuple[int, int, int], small: tuple[int, int, int], stride: int) -> Kernel:
    """y = inner + the way past a Residual's layers, from x (N, *large) to y (N, *small): one thread per number.

    That way takes every `stride`-th pixel and has zeros for the channels that x lacks.
    """
    (H, W, C), (P, Q, F), stride = map(u32, large), map(u32, small), u32(stride)

    def skip(x, inner, y, count):
        i = u32(cuda.grid(1))
        if i < count:
            n, p, q, f = split(i, P, Q, F)
            past = x[offset(n, H, u32(p * stride), W, u32(q * stride), C, f)] if f < C else ZERO
            y[i] = past + inner[i]

    return Kernel(skip, "void(f4[::1], f4[::1], f4[::1], u4)", BLOCK)


@cache
def skip_backward(large: tuple[int, int, int], small: tuple[int, int, int], stride: int) -> Kernel:
    """dx = inner + what the way past gives to it, sizes as of `skip`: one thread per number; inner may be dx or dy."""
    (H, W, C), (P, Q, F), stride = map(u32, large), map(u32, small), u32(stride)

    def skip_backward(dy, inner, dx, count):
        i = u32(cuda.grid(1))
        if i < count:
            n, h, w, c = split(i, H, W, C)
            seen = h % stride == u32(0) and w % stride == u32(0)
            past = dy[offset(n, P, u32(h // stride), Q, u32(w // stride), F, c)] if seen else ZERO
            dx[i] = inner[i] + past

    return Kernel(skip_backward, "void(f4[::1], f4[::1], f4[::1], u4)", BLOCK)


@cache
def loss(kind: Loss, O: int) -> Kernel:  # noqa: E741
    """As `layers.loss`, the mean of a batch; (loss, hit) of each image go to its place in the order."""
    rule, O = loss_rule(kind, O), u32(O)  # noqa: E741

    def loss(scores, labels, order, ahead, d_scores, outcomes, count):
        n = u32(cuda.grid(1))
        if n < count:
            label, place = labels[image_at(order, ahead, n)], u32(order[0] + ahead + n)
            first, end = offset(n, O, 0), offset(n, O, O)
            value, hit = rule(scores[first:end], label, ONE / f32(count), d_scores[first:end])
            outcomes[offset(place, 2, 0)], outcomes[offset(place, 2, 1)] = value, ONE if hit else ZERO

    return Kernel(loss, "void(f4[::1], i4[::1], u4[::1], u4, f4[::1], f4[::1], u4)", BLOCK)


@cache
def update(optimizer: Optimizer | None, batch_size: int) -> Kernel:
    """Finish every parameter's gradient and take the optimizer's step, all parameters in one launch.

    Args:
        optimizer: whose rule; None writes the gradient to `w` instead.
        batch_size: finds a step's row (rate, c0, c1) of `rates` from its place in the order.

    A block's row of `table`: first parameter, how many, where in the arena the first part of the first is, from one
    part to the next, parts, threads per parameter.
    """
    take_step = step_of(optimizer) if optimizer else None
    block, steps, batch = BLOCK, optimizer is not None, u32(batch_size)

    def update(arena, table, w, s, t, rates, order, ahead):
        sums = cuda.shared.array(block, f32)
        thread, row = u32(cuda.threadIdx.x), offset(cuda.blockIdx.x, SEGMENT, 0)
        count, base, stride = table[row + u32(1)], table[row + u32(2)], table[row + u32(3)]
        parts, threads = table[row + u32(4)], table[row + u32(5)]
        wide = u32(u32(block) // threads)
        # a thread adds up every so many of a parameter's parts
        part, lane = split(thread, wide)
        sums[thread] = sum_every(arena, u32(base + lane), stride, part, parts, threads) if lane < count else ZERO
        cuda.syncthreads()
        # the first threads add up what the others have
        g = ZERO
        if thread < wide:
            for k in range(threads):
                g += sums[offset(k, wide, thread)]
        # and take the step
        if thread < count:
            i = u32(table[row] + thread)
            if steps:
                step, _ = split(u32(order[0] + ahead), batch)
                rate, c0, c1 = rates[offset(step, 3, 0)], rates[offset(step, 3, 1)], rates[offset(step, 3, 2)]
                take_step(w, g, s, t, i, rate, c0, c1)
            else:
                w[i] = g

    return Kernel(update, "void(f4[::1], u4[::1], f4[::1], f4[::1], f4[::1], f4[::1], u4[::1], u4)", BLOCK)


@kernel("void(u4[::1], u4)")
def advance(order, by):
    """order[0] += by: the last node of a graph, so that the same graph runs the next steps when launched again."""
    if cuda.threadIdx.x == 0:
        order[0] = u32(order[0] + by)


@kernel("void(f4[::1], f4[::1], u4)")
def sum_up(outcomes, sums, count):
    """Per block of `BLOCK` images, the sum of their losses and hits: what is copied to the host after a pass."""
    losses, hits = cuda.shared.array(BLOCK, f32), cuda.shared.array(BLOCK, f32)
    t, i = u32(cuda.threadIdx.x), u32(cuda.grid(1))
    losses[t] = outcomes[offset(i, 2, 0)] if i < count else ZERO
    hits[t] = outcomes[offset(i, 2, 1)] if i < count else ZERO
    cuda.syncthreads()
    if t == 0:
        loss, hit = ZERO, ZERO
        for k in range(u32(BLOCK)):
            loss += losses[k]
            hit += hits[k]
        sums[offset(cuda.blockIdx.x, 2, 0)], sums[offset(cuda.blockIdx.x, 2, 1)] = loss, hit
