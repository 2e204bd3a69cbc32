"""The barrier: where the threads of a step wait for each other."""

import os

import numpy as np
from llvmlite import ir
from numba import int32, int64, njit, types, uint32

from cnnexp.backends.simd.compiler.compose import emitted
from cnnexp.backends.simd.compiler.entry import LINE
from cnnexp.backends.simd.compiler.host import host_target
from cnnexp.backends.simd.compiler.intrinsics import PAUSE, call

SPINS = 20_000
"""Turns of the waiting loop, 0.4 to 1 ms on x86, before a thread sleeps between them. The thread it waits for has lost
its core, and gets this one only if it is free: beside a process that spins, steps took 1.6 times as long where the
waiting thread merely offered its core at every turn for some ms."""

SLEEP = 0 if os.name == "nt" else 50
"""Microseconds; on Windows, whose sleep is many ms, the core is offered to others."""

pause = emitted(
    types.void, lambda b: host_target().has(PAUSE) and call(b, host_target().features, PAUSE, ir.VoidType(), [])
)
"""Tell the core that this is a waiting loop, so that another thread of the same core runs faster."""

store_release = emitted(types.void, lambda b, flags, i, value: b.store_atomic(value, b.gep(flags, [i]), "release", 8))
"""(flags, index, value): flags[index] = value, after all that this thread wrote before."""

load_acquire = emitted(int64, lambda b, flags, i: b.load_atomic(b.gep(flags, [i]), "acquire", 8))
"""(flags, index): flags[index], before all that this thread reads after."""

fetch_add = emitted(int64, lambda b, flags, i, more: b.atomic_rmw("add", b.gep(flags, [i]), more, "acq_rel"))
"""(flags, index, more): flags[index], to which it adds as one operation that no other thread gets between."""

_sleep = types.ExternalFunction("Sleep" if os.name == "nt" else "usleep", int32(uint32))
"""Give the core away for `SLEEP`."""


@njit(nogil=True)
def wait_for(flags: np.ndarray, index: int, value: int) -> None:
    """Wait until flags[index] is at least so much."""
    spins = 0
    while load_acquire(flags, index) < value:
        spins += 1
        if spins < SPINS:
            pause()
        else:
            _sleep(SLEEP)


@njit(nogil=True)
def wait(flags: np.ndarray, rank: int, threads: int) -> None:
    """Wait until every thread is here. flags: int64 (threads * LINE,), how often each thread came."""
    if threads == 1:
        return
    turn = flags[rank * LINE] + 1
    store_release(flags, rank * LINE, turn)
    for other in range(threads):
        wait_for(flags, other * LINE, turn)
