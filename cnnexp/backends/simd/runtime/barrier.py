"""The barrier: where the threads of a step wait for each other."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from llvmlite import ir
from numba import int32, int64, njit, types, uint32
from numba.extending import intrinsic

from cnnexp.backends.simd.compiler.compose import Intrinsic
from cnnexp.backends.simd.compiler.entry import LINE
from cnnexp.backends.simd.compiler.host import host_target
from cnnexp.backends.simd.compiler.intrinsics import PAUSE, call

SPINS = 20_000
"""Turns of the waiting loop, 0.4 to 1 ms on x86, before a thread sleeps between them.

The thread it waits for has lost its core, and gets this one only if it is free: beside a process that spins, steps took
1.6 times as long where the waiting thread merely offered its core at every turn for some ms.
"""

SLEEP = 0 if os.name == "nt" else 50
"""Microseconds; on Windows, whose sleep is many ms, the core is offered to others."""


@intrinsic
def _store_release(typing: Any, flags: types.Type, index: types.Type, value: types.Type) -> Intrinsic:
    """flags[index] = value, after all that this thread wrote before."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        place = builder.gep(array.data, [arguments[1]])
        builder.store_atomic(arguments[2], place, "release", 8)
        return context.get_dummy_value()

    return types.void(flags, int64, int64), codegen


@intrinsic
def _load_acquire(typing: Any, flags: types.Type, index: types.Type) -> Intrinsic:
    """flags[index], before all that this thread reads after."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.load_atomic(builder.gep(array.data, [arguments[1]]), "acquire", 8)

    return int64(flags, int64), codegen


@intrinsic
def fetch_add(typing: Any, numbers: types.Type, more: types.Type) -> Intrinsic:
    """Return numbers[0] and add to it, as one operation that no other thread gets between."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.atomic_rmw("add", array.data, arguments[1], "monotonic")

    return int64(numbers, int64), codegen


@intrinsic
def _pause(typing: Any) -> Intrinsic:
    """Tell the core that this is a waiting loop, so that another thread of the same core runs faster."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        target = host_target()
        if target.has(PAUSE):
            call(builder, target.features, PAUSE, ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), codegen


_sleep = types.ExternalFunction("Sleep" if os.name == "nt" else "usleep", int32(uint32))
"""Give the core away for `SLEEP`."""


@njit(nogil=True)
def wait(flags: np.ndarray, rank: int, threads: int) -> None:
    """Wait until every thread is here. flags: int64 (threads * LINE,), how often each thread came."""
    if threads == 1:
        return
    turn = flags[rank * LINE] + 1
    _store_release(flags, rank * LINE, turn)
    for other in range(threads):
        spins = 0
        while _load_acquire(flags, other * LINE) < turn:
            spins += 1
            if spins < SPINS:
                _pause()
            else:
                _sleep(SLEEP)
