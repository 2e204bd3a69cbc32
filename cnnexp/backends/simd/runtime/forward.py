"""The compiled forward pass of a program that only predicts.

Threads share a job: its tiles, or where it is one tile the parts of each kernel, which all work on in the arena of the
first thread. Each takes the next part while there is one, the caller until all are done. So who wakes late helps from
then on, nobody waits for who does not come, and scores do not depend on who came.
"""

import functools
from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.dispatcher import Dispatcher

from cnnexp.backends.simd.compiler import entry
from cnnexp.backends.simd.compiler.compose import compose, emitted
from cnnexp.backends.simd.compiler.emit import BYTE, FLOAT, Emitter, Kernel
from cnnexp.backends.simd.compiler.entry import DONE, HERE, TICKETS, TURNS, Forward
from cnnexp.backends.simd.compiler.trace import exp
from cnnexp.backends.simd.layouts import NC
from cnnexp.backends.simd.lowering import Plan
from cnnexp.backends.simd.runtime.barrier import fetch_add, load_acquire, pause, store_release, wait_for

KERNEL, PARTS = 32, 48
"""The bits of a ticket where the kernel's number begins, and its parts; the next part lies below them."""

PART = (1 << KERNEL) - 1

_bytes_at, _floats_at = (
    emitted(types.CPointer(kind), lambda builder, address, to=to: builder.inttoptr(address, to.as_pointer()))
    for kind, to in ((types.uint8, BYTE), (types.float32, FLOAT))
)
"""(address): a pointer to it."""


def make_forward(plan: Plan, key: str, library: ir.Module) -> Dispatcher:
    """Return `forward`, a dispatcher as `step.make_work`'s: what one thread does of a program that only predicts."""
    compiled, images = compiler(key), plan.arena.images
    run, setup = (compose(name, plan.target, getattr(plan, name), library) for name in ("forward", "setup"))
    gather_bytes, gather_floats = gathers(plan, library)
    run_part = compose("part", plan.target, [], library, [[kernel] for kernel in plan.forward], in_parts=True)
    probabilities = functools.partial(softmax, scores=plan.scores, to=plan.scores, normalized=True)
    to_probabilities = compose("softmax", plan.target, [("softmax", probabilities)], library)
    parts = np.array([kernel.parts if isinstance(kernel, Kernel) else 1 for _, kernel in plan.forward])
    kernels, shared = len(parts), parts.max() > 1
    outputs, stride, scores_at = plan.scores.size, plan.scores.stride, int(plan.scores.offset)

    @compiled
    def begin(call: Forward, start: int, end: int, arena: np.ndarray) -> None:
        job, tile = call.job, call.order[start:end]
        if job[entry.ARE_BYTES]:
            gather_bytes(_bytes_at(job[entry.IMAGES]), tile, arena, end - start)
        else:
            gather_floats(_floats_at(job[entry.IMAGES]), tile, arena, end - start)

    @compiled
    def finish(call: Forward, start: int, end: int, arena: np.ndarray) -> None:
        if call.job[entry.PROBABILITIES]:
            to_probabilities(call.parameters, arena, arena, end - start)
        scores = _floats_at(call.job[entry.SCORES])
        for n in range(end - start):
            for o in range(outputs):
                scores[(start + n) * outputs + o] = arena[scores_at + n * stride + o]

    @compiled
    def take(call: Forward) -> bool:
        """Do a part of what is to be done, if there is one left."""
        job, mine = call.job, call.arenas[call.rank]
        ticket = load_acquire(job, TICKETS)
        if ticket & PART >= ticket >> PARTS:
            return False
        ticket = fetch_add(job, TICKETS, 1)
        part, kernel = ticket & PART, (ticket >> KERNEL) & 0xFFFF
        if part >= ticket >> PARTS:
            return False
        if kernel < kernels:
            run_part(call.parameters, mine, call.arenas[0], job[entry.COUNT], part, kernel)
        else:
            start, end = part * images, min((part + 1) * images, job[entry.COUNT])
            begin(call, start, end, mine)
            run(call.parameters, mine, mine, end - start)
            finish(call, start, end, mine)
        fetch_add(job, DONE, 1)
        return True

    @compiled
    def share(call: Forward, kernel: int, parts: int) -> None:
        """Have all threads do the parts of a kernel, or so many tiles."""
        call.job[DONE] = 0
        store_release(call.job, TICKETS, parts << PARTS | kernel << KERNEL)
        while take(call):
            pass
        wait_for(call.job, DONE, parts)

    def forward(call: Forward) -> None:
        job, arena, count = call.job, call.arenas[0], call.job[entry.COUNT]
        if call.rank:
            # help until nothing has come for a while
            spins = 0
            while spins < job[TURNS]:
                spins += 1
                if take(call):
                    spins = 0
                pause()
            store_release(job, HERE + call.rank, 0)
        elif count == 0:
            setup(call.parameters, arena, arena, 0)
        elif count <= images and shared:
            begin(call, 0, count, arena)
            for kernel in range(kernels):
                if parts[kernel] > 1:
                    share(call, kernel, parts[kernel])
                else:
                    run_part(call.parameters, arena, arena, count, 0, kernel)
            finish(call, 0, count, arena)
        else:
            share(call, kernels, (count + images - 1) // images)

    return compiled(forward)


def gathers(plan: Plan, library: ir.Module) -> list[Callable[..., None]]:
    """Return what brings a tile's images into an arena: bytes, and floats."""
    return [compose(f"gather_{pixel}", plan.target, kernels, library) for pixel, kernels in plan.gather.items()]


def softmax(k: Emitter, scores: NC, to: NC, normalized: bool) -> None:
    """Make e**(score - the largest) of each image's scores, or where `normalized` the probabilities of the classes."""
    least = k.constant(-3e38)

    def larger(a: ir.Value, b: ir.Value) -> ir.Value:
        return k.select(k.larger_of(a, b), a, b)

    with k.loop(k.count) as n:
        row, target, largest, total = scores.stored(k, n), to.stored(k, n), k.variable(least), k.variable()
        # the largest
        for v, valid in k.vectors(scores.size):
            largest.set(larger(k.load_part(row.at(v, k.lanes), valid, least), largest.get()))
        top = k.spread(k.fold(larger, largest.get()))
        # powers and sum, whole where read whole; e**-80 counts for nothing, and what is no normal number takes long
        for v, valid in k.vectors(scores.size):
            below = k.subtract(k.load_part(row.at(v, k.lanes), valid, least), top)
            value = exp(k, larger(k.constant(-80), below))
            k.store_part(value, target.at(v, k.lanes), k.lanes if normalized else valid)
            total.set(k.add(total.get(), value))
        if normalized:
            whole = k.spread(k.sum_lanes(total.get()))
            for v, _ in k.vectors(scores.size):
                k.store(k.builder.fdiv(k.load(target.at(v, k.lanes)), whole), target.at(v, k.lanes))


def compiler(key: str) -> Callable:
    """Return a decorator: Numba's, for functions whose machine code bears the key in its name.

    None gets the wrapper with which Python can call it, a fifth of the time to compile, and none counts who holds an
    array: that is what machine code would need Numba's runtime for.
    """
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False}

    def compiled(function: Callable, inline: str = "never") -> Callable:
        function.__qualname__ = f"{function.__name__}_{key}"
        return njit(nogil=True, error_model="numpy", inline=inline, **options)(function)

    return compiled
