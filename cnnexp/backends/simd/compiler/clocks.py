"""Clock reads between the kernels of a training step, compiled in where a profile asks for them (`Target.clocks`).

Each thread has its clocks in its arena: the last reading, then a sum of ticks for every part. A reading gives what has
passed since the last one to a part, so the parts add up to the whole step and nothing is counted twice. A reading is
an instruction of some 20 cycles, a load and two stores, once per kernel and tile of images.
"""

from __future__ import annotations

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
        self.on, self._target = target.clocks, target
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
            last, total = ((arena or k.arena) + Offset(self.offset + FLOATS * place) for place in (0, 1 + part))
            _charge(k.builder, self._target, last.value(INDEX), total.value(INDEX))

    def charging(self, part: int) -> Callable[[ir.IRBuilder, ir.Value], None]:
        """Return what emits as `charge` does, given an arena's first float."""

        def emit(builder: ir.IRBuilder, arena: ir.Value) -> None:
            if self.on:
                last = self._last(builder, arena)
                _charge(builder, self._target, last, builder.gep(last, [INDEX(1 + part)]))

        return emit

    def starting(self, builder: ir.IRBuilder, arena: ir.Value) -> None:
        """Emit a reading that gives the time before it to nobody."""
        if self.on:
            builder.store(_ticks(builder, self._target), self._last(builder, arena))

    def _last(self, builder: ir.IRBuilder, arena: ir.Value) -> ir.Value:
        """Return the address of the last reading."""
        return builder.bitcast(builder.gep(arena, [INDEX(self.offset)]), INDEX.as_pointer())

    def readings(self, arenas: np.ndarray) -> np.ndarray:
        """Return a view (threads, 1 + parts), int64, of the clocks in arenas (threads, stride)."""
        return arenas[:, self.offset : self.offset + FLOATS * (1 + len(self.parts))].view(np.int64)


def available(triple: str) -> bool:
    """Whether there is a clock that a program may read on such a machine."""
    return triple.startswith(("x86_64", "aarch64", "arm64"))


def _charge(builder: ir.IRBuilder, target: Target, last: ir.Value, total: ir.Value) -> None:
    now = _ticks(builder, target)
    builder.store(builder.add(builder.load(total), builder.sub(now, builder.load(last))), total)
    builder.store(now, last)


def _ticks(builder: ir.IRBuilder, target: Target) -> ir.Value:
    """Read the core's clock, whose rate is constant."""
    if target.has(intrinsics.READ_CLOCK):
        return intrinsics.call(builder, target.features, intrinsics.READ_CLOCK, INDEX, [])
    return intrinsics.read_register(builder, ARM_TICKS)
