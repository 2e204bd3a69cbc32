"""What the GPU itself can do: multiply-adds in registers, and bytes through its memory."""

import timeit
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from cnnexp.backends.gpu import device
from cnnexp.backends.gpu.launch import Kernel

ROUNDS = 10
BLOCKS, THREADS = 8, 256  # blocks for each multiprocessor
TURNS = 512  # of the multiply-add loop
FLOATS = 2**28  # copied, or as much as fits


def limits(gpu: device.Gpu) -> dict[str, float]:
    """Measure a GPU: `gflops` of float32 multiply-adds in registers, `gb_per_s` read and written by a copy."""
    free, _ = device.free_memory()
    floats = int(min(FLOATS, free // 32))
    return {"gflops": 2e-9 * multiply_adds_per_s(gpu, TURNS), "gb_per_s": 1e-9 * copied_bytes_per_s(floats)}


def copied_bytes_per_s(floats: int) -> float:
    """Return the bytes read and written a second by the copy of an array."""
    source, target = (cuda.device_array(floats, np.float32) for _ in range(2))
    cuda.to_device(np.zeros(floats, np.float32), to=source)
    return 8 * floats / best_seconds(lambda: target.copy_to_device(source))


def multiply_adds_per_s(gpu: device.Gpu, turns: int) -> float:
    """Return the multiply-adds a second of all multiprocessors at once, each thread going round `turns` times."""
    kernel, each = multiply_add(turns)
    blocks = gpu.multiprocessors * BLOCKS
    out, a, b = device.empty((blocks * THREADS,), np.float32), np.float32(0.999), np.float32(0.001)
    return blocks * THREADS * turns * each / best_seconds(lambda: kernel.launch(blocks, 0, out, a, b))


def multiply_add(turns: int) -> tuple[Kernel, int]:
    """Return a kernel that does nothing but multiply and add, and how often a thread does in a turn."""
    most, chains, links = np.uint32(turns), 8, 8  # chains hide the latency; many links, the cost of counting turns

    def multiply_add(out: Any, a: Any, b: Any) -> None:
        x = cuda.local.array(chains, np.float32)
        for k in range(chains):
            x[k] = np.float32(cuda.threadIdx.x + k)
        for _ in range(most):
            for _ in range(links):
                for k in range(chains):
                    x[k] = x[k] * a + b
        total = np.float32(0)
        for k in range(chains):
            total += x[k]
        out[cuda.grid(1)] = total

    return Kernel(multiply_add, "void(f4[::1], f4, f4)", THREADS), chains * links


def best_seconds(work: Callable[[], object]) -> float:
    """Return the least seconds of a few, after one that warms up."""

    def done() -> None:
        work()
        cuda.synchronize()

    return min(timeit.repeat(done, number=1, repeat=1 + ROUNDS)[1:])
