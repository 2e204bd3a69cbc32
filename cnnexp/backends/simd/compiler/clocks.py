"""Clock reads between the kernels of a training step, compiled in where a profile asks for them (`Target.clocks`).

Each thread has its clocks in its arena: the last reading, then a sum of ticks for every part. A reading gives what has
passed since the last one to a part, so the parts add up to the whole step and nothing is counted twice. A reading is
an instruction of some 20 cycles, a load and two stores, once per kernel and tile of images.
"""

from collections.abc import Callable

import numpy as np
from llvmlite import ir

from cnnexp.backends.parts import Part
from cnnexp.backends.simd.compiler import intrinsics
from cnnexp.backends.simd.compiler.emit import INDEX, Emitter, Offset, Pointer, Target

FLOATS = 2  # of a sum of ticks, 64 bits
ARM_TICKS = "cntvct_el0"  # what LLVM's intrinsic reads on 64-bit Arm only the system may


class Clocks:
    """The clocks of a plan.

    Args:
        target: reads none unless it says so.

    Attributes:
        parts: in order of their first use.
        offset: of the last reading in the arena, in floats, once `place` was called; the sums follow.
    """

    def __init__(self, target: Target) -> None:
        self.on = target.clocks
        self.parts: list[Part] = []
        self.offset = 0

    def part(self, part: Part) -> int:
        """Return the number of a part."""
        if part not in self.parts:
            self.parts.append(part)
        return self.parts.index(part)

    def place(self, allocate: Callable[[int], int]) -> None:
        """Take room in the arena, once all parts are known."""
        if self.on:
            self.offset = int(allocate(FLOATS * (1 + len(self.parts))))

    def charge(self, k: Emitter, part: int, arena: Pointer | None = None) -> None:
        """Emit a reading that gives the ticks since the last one to a part; the arena is the kernel's unless given."""
        if self.on:
            last, total = self._place(k, arena, 0), self._place(k, arena, 1 + part)
            now, builder = _ticks(k), k.builder
            builder.store(builder.add(builder.load(total), builder.sub(now, builder.load(last))), total)
            builder.store(now, last)

    def start(self, k: Emitter) -> None:
        """Emit a reading that gives the time before it to nobody."""
        if self.on:
            k.builder.store(_ticks(k), self._place(k, None, 0))

    def _place(self, k: Emitter, arena: Pointer | None, number: int) -> ir.Value:
        """Return the address of the last reading, or of a sum behind it."""
        return ((arena or k.arena) + Offset(self.offset + FLOATS * number)).value(INDEX)

    def readings(self, arenas: np.ndarray) -> np.ndarray:
        """Return a view (threads, 1 + parts), int64, of the clocks in arenas (threads, stride)."""
        return arenas[:, self.offset : self.offset + FLOATS * (1 + len(self.parts))].view(np.int64)


def available(triple: str) -> bool:
    """Whether there is a clock that a program may read on such a machine."""
    return triple.startswith(("x86_64", "aarch64", "arm64"))


def _ticks(k: Emitter) -> ir.Value:
    """Read the core's clock, whose rate is constant."""
    if k.target.has(intrinsics.READ_CLOCK):
        return k.intrinsic(intrinsics.READ_CLOCK, INDEX)
    return intrinsics.read_register(k.builder, ARM_TICKS)
