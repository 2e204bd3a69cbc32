"""Clock reads between the kernels of a training step, compiled in where a profile asks for them (`Target.clocks`).

Each thread has its clocks in its arena: the last reading, then a sum of ticks for every part. A reading gives what has
passed since the last one to a part, so the parts add up to the whole step and nothing is counted twice. A reading is
an instruction of some 20 cycles, a load and two stores, once per kernel and tile of images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cnnexp.backends.parts import Part
from cnnexp.backends.simd import intrinsics
from cnnexp.backends.simd.emit import INDEX, Emitter, Intrinsic, Pointer, Target

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
            self.offset = allocate(FLOATS * (1 + len(self.parts)))

    def charge(self, k: Emitter, part: int, arena: Pointer | None = None) -> None:
        """Emit a reading that gives the ticks since the last one to a part.

        Args:
            arena: the thread's, where it is not the kernel's.
        """
        if self.on:
            clocks = (arena or k.arena) + self.offset
            _charge(k.builder, self._target, clocks.value(INDEX), part)

    def charging(self, part: int) -> Callable[..., Any]:
        """Return a function of an arena for `@njit` code that does as `charge`."""
        on, target, offset = self.on, self._target, self.offset

        @intrinsic
        def charge(typing: Any, arena: types.Type) -> Intrinsic:
            return types.void(arena), _on_array(
                lambda b, clocks: _charge(b, target, clocks, part) if on else None, offset
            )

        return charge

    def starting(self) -> Callable[..., Any]:
        """Return a function of an arena for `@njit` code that reads the clock and gives the time before to nobody."""
        on, target, offset = self.on, self._target, self.offset

        @intrinsic
        def start(typing: Any, arena: types.Type) -> Intrinsic:
            return types.void(arena), _on_array(
                lambda b, clocks: b.store(_ticks(b, target), clocks) if on else None, offset
            )

        return start

    def readings(self, arenas: np.ndarray) -> np.ndarray:
        """Return a view (threads, 1 + parts), int64, of the clocks in arenas (threads, stride)."""
        return arenas[:, self.offset : self.offset + FLOATS * (1 + len(self.parts))].view(np.int64)


def available(triple: str) -> bool:
    """Whether there is a clock that a program may read on such a machine."""
    return triple.startswith(("x86_64", "aarch64", "arm64"))


def _on_array(emit: Callable[[ir.IRBuilder, ir.Value], object], offset: int) -> Callable[..., ir.Value]:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        clocks = builder.bitcast(builder.gep(array.data, [INDEX(offset)]), INDEX.as_pointer())
        emit(builder, clocks)
        return context.get_dummy_value()

    return codegen


def _charge(builder: ir.IRBuilder, target: Target, clocks: ir.Value, part: int) -> None:
    now, last = _ticks(builder, target), builder.load(clocks)
    total = builder.gep(clocks, [INDEX(1 + part)])
    builder.store(builder.add(builder.load(total), builder.sub(now, last)), total)
    builder.store(now, clocks)


def _ticks(builder: ir.IRBuilder, target: Target) -> ir.Value:
    """Read the core's clock, whose rate is constant."""
    if target.has(intrinsics.READ_CLOCK):
        return intrinsics.call(builder, target.features, intrinsics.READ_CLOCK, INDEX, [])
    return intrinsics.read_register(builder, ARM_TICKS)
