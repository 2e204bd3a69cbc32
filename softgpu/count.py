"""What kernels did, counted by the engine, and what that costs at least on a named GPU: a model, never a time."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from softgpu import driver
from softgpu.assembler import CLASSES
from softgpu.gpus import ISSUES_PER_CYCLE, SECTOR_BYTES, SHARED_BYTES_PER_CYCLE, GpuModel

ARITHMETIC_CYCLES, SPECIAL_CYCLES = 4, 20
# what ptxas cannot leave out; whole numbers, moves and comparisons it folds into addresses and constants
CERTAIN = {"fma", "float", "load", "store", "shared load", "shared store", "atomic", "barrier"}


@dataclass(frozen=True)
class Class:
    """Instructions of one kind: by warps, by threads, sectors of global memory, turns of shared memory."""

    warps: int
    threads: int
    sectors: int
    wavefronts: int


@dataclass(frozen=True)
class KernelCount:
    """What one kernel did in all its launches.

    Attributes:
        blocks: of all launches.
        read_sectors, written_sectors: different ones of 32 bytes within a launch, added up over launches.
        chain: loads from global memory that a block waits for one after another, added up over blocks.
        longest_chain: of one block.
        cycles: a block's, alone on a multiprocessor, if nothing holds it up but results that it waits for; of all
            blocks together.
        longest_cycles: of one block.
        divergent: branches at which a warp split.
        classes: by `assembler.CLASSES`.
    """

    name: str
    registers: int
    shared_bytes: int
    launches: int
    blocks: int
    block_threads: int
    read_sectors: int
    written_sectors: int
    chain: int
    longest_chain: int
    cycles: int
    longest_cycles: int
    divergent: int
    classes: dict[str, Class]

    @property
    def short_name(self) -> str:
        """The Python function's name: the last part of what Numba makes of it, "_ZN6cnnexp...6conv2dB4v12..."."""
        part, rest = self.name, self.name.removeprefix("_ZN")
        while found := re.match(r"\d+", rest):
            part = rest[found.end() : found.end() + int(found[0])]
            rest = rest[found.end() + len(part) :]
        return part

    @property
    def multiply_adds(self) -> int:
        return self.classes["fma"].threads

    @property
    def instructions(self) -> int:
        """By threads, moves left out."""
        return sum(found.threads for name, found in self.classes.items() if name != "other")

    @property
    def requested_bytes(self) -> int:
        """What goes between multiprocessors and caches: whole sectors."""
        return SECTOR_BYTES * sum(self.classes[name].sectors for name in ("load", "store", "atomic"))

    @property
    def different_bytes(self) -> int:
        """What has to come from memory or the second cache, and go there, at least."""
        return SECTOR_BYTES * (self.read_sectors + self.written_sectors)

    @property
    def bank_conflicts(self) -> float:
        """Turns per access to shared memory, 1 where no two lanes are in each other's way."""
        accesses = [self.classes[name] for name in ("shared load", "shared store")]
        return sum(found.wavefronts for found in accesses) / max(sum(found.warps for found in accesses), 1)


@contextmanager
def counting(gpu: GpuModel) -> Iterator[list[KernelCount]]:
    """Count what is launched within; the list is filled at the end."""
    latency = {
        **dict.fromkeys(CLASSES, ARITHMETIC_CYCLES),
        **dict.fromkeys(("special",), SPECIAL_CYCLES),
        **dict.fromkeys(("load", "atomic"), gpu.load_cycles),
        **dict.fromkeys(("shared load", "local"), gpu.shared_cycles),
        "other": 0,
    }
    numbers = (ctypes.c_uint32 * len(CLASSES))(*(latency[name] for name in CLASSES))
    library = driver()
    library.softgpu_counts.restype = ctypes.c_char_p
    found: list[KernelCount] = []
    library.softgpu_count(1, numbers, gpu.cached_cycles)
    yield found
    for row in json.loads(library.softgpu_counts()):
        classes = {name: Class(*numbers) for name, numbers in zip(CLASSES, row.pop("classes"), strict=True)}
        found.append(KernelCount(**row, classes=classes))
    library.softgpu_count(0, None, 0)


@dataclass(frozen=True)
class Cost:
    """What a kernel's launches take on a GPU, microseconds, all of them together.

    Attributes:
        parts: what each resource needs: "multiply-add", "memory", "shared memory" and "issue" at least; "latency" of
            results that are waited for, blocks taking turns; "all instructions" as the PTX has them, of which ptxas
            makes fewer.
        resident: blocks on a multiprocessor.
    """

    parts: dict[str, float]
    resident: int

    @property
    def bound_us(self) -> float:
        """No GPU of these numbers is faster."""
        return max(self.parts[name] for name in ("multiply-add", "memory", "shared memory", "issue"))

    @property
    def model_us(self) -> float:
        """What is likely, if every resource but the scarcest is free."""
        return max(self.parts.values())

    @property
    def bound_by(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])


def cost(kernel: KernelCount, gpu: GpuModel) -> Cost:
    """Return what a kernel costs on a GPU.

    A multiprocessor with one block more than the others decides: work is taken to be the same in all blocks.
    """
    grid = kernel.blocks / kernel.launches
    on_busiest = -(-grid // gpu.multiprocessors)
    share = on_busiest / grid  # of a launch's work, on that multiprocessor
    cycles_us = 1e-3 / gpu.clock_ghz
    classes = kernel.classes
    floats = classes["fma"].warps + classes["float"].warps
    certain = sum(classes[name].warps for name in CERTAIN)
    every = sum(found.warps for name, found in classes.items() if name != "other")
    wavefronts = sum(classes[name].wavefronts for name in ("shared load", "shared store"))
    requested = kernel.requested_bytes / SHARED_BYTES_PER_CYCLE
    resident = gpu.resident_blocks(kernel.block_threads, kernel.registers, kernel.shared_bytes)
    turns = on_busiest / min(resident, on_busiest)
    beyond_cache = max(kernel.different_bytes / kernel.launches - gpu.l2_bytes, 0) * kernel.launches
    parts = {
        "multiply-add": floats * 32 / gpu.float_lanes * share * cycles_us,
        "memory": beyond_cache / gpu.memory_gb_per_s * 1e-3,
        "shared memory": (wavefronts + requested) * share * cycles_us,
        "issue": certain / ISSUES_PER_CYCLE * share * cycles_us,
        "all instructions": every / ISSUES_PER_CYCLE * share * cycles_us,
        "latency": max(turns * kernel.cycles / kernel.blocks, kernel.longest_cycles) * kernel.launches * cycles_us,
    }
    return Cost(parts, resident)
