"""Readings of the GPU's clock between the parts of a training step, launched where a profile asks for them.

A reading is a kernel of one thread, in a stream or a graph as any other: it gives the nanoseconds since the last one to
a part. It takes about as long as a launch does, so one step of `EVERY` has them; and two, one right after the other,
say what one costs, which is taken off every part.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cuda
from numba.cuda.extending import intrinsic

from cnnexp.backends.gpu import device
from cnnexp.backends.gpu.kernels.index import u32
from cnnexp.backends.gpu.launch import kernel
from cnnexp.backends.parts import Part

EVERY = 8
READ_CLOCK = ir.InlineAsm(ir.FunctionType(ir.IntType(64), ()), "mov.u64 $0, %globaltimer;", "=l", side_effect=True)
LAST, STEPS, READING, FIRST = range(4)  # places in memory: last reading, steps clocked, what a reading costs, parts


class GpuClocks:
    """The nanoseconds of the parts of a step, on the device."""

    def __init__(self, parts: list[Part]) -> None:
        self._places = {part: u32(FIRST + i) for i, part in enumerate(parts)}
        self._memory = device.to_device(np.zeros(FIRST + len(parts), np.int64))

    def begin(self, stream: Any) -> None:
        """Enqueue the first reading of a step."""
        begin_step(1).launch(1, stream, self._memory)
        charge(1).launch(1, stream, self._memory, u32(READING))

    def charge(self, stream: Any, part: Part) -> None:
        """Enqueue a reading that gives the time since the last one to a part."""
        charge(1).launch(1, stream, self._memory, self._places[part])

    def reset(self) -> None:
        device.copy(np.zeros(self._memory.size, np.int64), self._memory)

    def seconds(self, steps: float) -> Mapping[Part, float]:
        """Return the seconds of each part in so many steps, as in those that were clocked; nothing where none was."""
        device.synchronize()
        ticks = device.to_host(self._memory)
        if not ticks[STEPS]:
            return {}
        of_steps = {part: max(0, int(ticks[place] - ticks[READING])) for part, place in self._places.items()}
        return {part: 1e-9 * ns * steps / int(ticks[STEPS]) for part, ns in of_steps.items()}


@intrinsic
def nanoseconds(typing: Any) -> Any:
    """The time by the GPU's clock, which all multiprocessors share."""
    return cuda.types.int64(), lambda context, builder, signature, arguments: builder.call(READ_CLOCK, ())


@kernel("void(i8[::1], u4)")
def charge(ticks: Any, place: Any) -> None:
    now = nanoseconds()
    ticks[place] += now - ticks[LAST]
    ticks[LAST] = now


@kernel("void(i8[::1])")
def begin_step(ticks: Any) -> None:
    ticks[STEPS] += 1
    ticks[LAST] = nanoseconds()
