"""GPUs as numbers, for `model`: what their makers and measurements say of them.

Sources: NVIDIA, H200 data sheet (2023) and H100 architecture white paper (2022); A100 architecture white paper (2020)
and 80 GB data sheet (2021); Turing architecture white paper (2018) and T4 data sheet (2019); Ada architecture white
paper (2022). Occupancy: CUDA programming guide 13.0, table of compute capabilities. Latencies: Luo et al. 2024,
"Benchmarking and Dissecting the Nvidia Hopper GPU Architecture" (arXiv 2402.13499), H100, A100 and RTX 4090; Jia et al.
2019, "Dissecting the NVidia Turing T4 GPU via Microbenchmarking" (arXiv 1903.07486). No number was measured here.
"""

from __future__ import annotations

from dataclasses import dataclass

SECTOR_BYTES, SHARED_BYTES_PER_CYCLE, ISSUES_PER_CYCLE = 32, 128, 4  # of a multiprocessor, the latter two
REGISTERS = 65536  # of a multiprocessor


@dataclass(frozen=True)
class GpuModel:
    """One GPU.

    Attributes:
        capability: compute capability.
        multiprocessors: how many.
        clock_ghz: boost clock.
        float_lanes: multiply-adds in float32 that a multiprocessor begins in a cycle.
        memory_gb_per_s: bandwidth of its memory, 10**9 bytes.
        l2_bytes: its second cache.
        shared_bytes: shared memory of a multiprocessor, all blocks together.
        threads: resident on a multiprocessor, at most.
        blocks: likewise.
        load_cycles, cached_cycles, shared_cycles: latency of a load from the second cache, from the first, and from
            shared memory. An arithmetic instruction takes 4.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    clock_ghz: float
    float_lanes: int
    memory_gb_per_s: float
    l2_bytes: int
    shared_bytes: int
    threads: int
    blocks: int
    load_cycles: int
    cached_cycles: int
    shared_cycles: int

    def resident_blocks(self, threads: int, registers: int, shared: int) -> int:
        """Return how many blocks of a kernel a multiprocessor holds at once.

        A warp's registers go by 256; from 8.0 on, 1 KiB of a block's shared memory is the system's.
        """
        warps = -(-threads // 32)
        by_registers = REGISTERS // (-(-32 * max(registers, 1) // 256) * 256 * warps)
        system = 1024 if self.capability >= (8, 0) else 0
        by_shared = self.shared_bytes // (shared + system) if shared + system else self.blocks
        return max(min(self.threads // (32 * warps), by_registers, by_shared, self.blocks), 1)


H200 = GpuModel("H200", (9, 0), 132, 1.98, 128, 4800, 50 << 20, 228 << 10, 2048, 32, 263, 41, 29)
A100 = GpuModel("A100", (8, 0), 108, 1.41, 64, 2039, 40 << 20, 164 << 10, 2048, 32, 262, 38, 29)
T4 = GpuModel("T4", (7, 5), 40, 1.59, 64, 320, 4 << 20, 64 << 10, 1024, 16, 188, 32, 19)
RTX_4090 = GpuModel("RTX 4090", (8, 9), 128, 2.52, 128, 1008, 72 << 20, 100 << 10, 1536, 24, 273, 43, 30)

GPUS = {gpu.name: gpu for gpu in (H200, A100, T4, RTX_4090)}
