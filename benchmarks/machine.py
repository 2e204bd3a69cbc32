"""The machine: how many float32 multiply-adds a second it can do, and what it is."""

from __future__ import annotations

import os
import platform
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from benchmarks.cases import Case, Data

HOLDS = {
    "avx2": {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+bmi,+bmi2,+f16c,+popcnt,+lzcnt,+movbe,+sse4.2",
        "OPENBLAS_CORETYPE": "Haswell",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2 --xla_cpu_experimental_ynn_fusion_type=",
    }
}
"""Environments that restrict everyone, the limits too, to less than the CPU has: `avx2` is 8 lanes, 16 registers.

XLA hands products to YNNPACK, which asks the CPU itself, so it must not: with the first of its flags alone a product of
jaxlib 0.10.2 does 120 billion multiply-adds a second on a core that can do 67 with AVX2, with both 64.
"""

STEP_S = 0.005
"""About how long one step of a limit takes; short beside a sample."""


class Sgemm:
    """A large float32 matrix product by NumPy's BLAS; `batch_size` is its multiply-adds."""

    SIDE = 1024

    def __init__(self, case: Case, data: Data, threads: int) -> None:
        rng = np.random.default_rng(0)
        self._a, self._b = (rng.random((self.SIDE, self.SIDE), np.float32) for _ in range(2))
        self._c = np.empty_like(self._a)
        threadpool_limits(threads)
        self.batch_size, self.compile_s = self.SIDE**3, 0.0
        self.facts = {"numpy": np.__version__, "blas": _blas(), "threads": threads}

    def reset(self) -> None:
        pass

    def train(self, steps: int) -> None:
        for _ in range(steps):
            np.matmul(self._a, self._b, out=self._c)


class FmaLoop:
    """Independent fused multiply-adds on vectors that stay in registers: nothing is read or written."""

    def __init__(self, case: Case, data: Data, threads: int) -> None:
        from cnnexp.backends.simd.runtime.limit import fma_loop  # Numba, which the peers' interpreter may lack

        started = time.perf_counter()
        loop, per_turn, lanes = fma_loop()
        loop(1)
        self.compile_s = time.perf_counter() - started
        self._loop, self._threads = loop, threads
        self._turns = round(STEP_S * 1e11 / per_turn)
        self.batch_size = self._turns * per_turn * threads
        self.facts = {"numba": version("numba"), "lanes": lanes, "threads": threads}

    def reset(self) -> None:
        pass

    def train(self, steps: int) -> None:
        turns = self._turns * steps
        others = [threading.Thread(target=self._loop, args=(turns,)) for _ in range(self._threads - 1)]
        for other in others:
            other.start()
        self._loop(turns)
        for other in others:
            other.join()


def facts() -> dict[str, Any]:
    """Return what the machine is and how busy it was: once at the beginning of a run."""
    return {
        "processor": processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cores": usable_cores(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
    }


def processor() -> str:
    """Return the CPU's name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def usable_cores() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_times() -> dict[str, float] | None:
    """Return the machine's seconds of (all, idle, stolen by the hypervisor) CPU time since it started, where known."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    ticks = [int(n) for n in stat.read_text().splitlines()[0].split()[1:9]]  # user .. steal
    seconds = [n / os.sysconf("SC_CLK_TCK") for n in ticks]
    return {"all": sum(seconds), "idle": seconds[3] + seconds[4], "stolen": seconds[7]}


def _blas() -> str:
    return ", ".join(f"{pool['internal_api']} {pool['version']}" for pool in threadpool_info())
