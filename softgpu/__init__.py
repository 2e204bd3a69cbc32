"""A GPU made of software: numba-cuda and cuda-core run unchanged where there is none, and every access is checked.

    from softgpu import SoftGpu
    subprocess.run([sys.executable, "-m", "cnnexp", "backend=gpu-fused"], env=SoftGpu(devices=2).environment())

A driver of our own stands in for libcuda.so.1 (`driver.c`) and executes the PTX that NVVM compiled for the GPU asked
for (`engine.c`), the same instructions in the same order, 32 lanes at once; an import hook in the process (`hook/`)
hands it that PTX with what the cubin says. Python, Numba's compiler, nvJitLink and the host's calls are the real ones.

What it checks, what it counts and what it cannot know: README.md beside this file.

It stands at the top of the checkout, neither in `cnnexp`, which runs where there is no compiler and no need of it, nor
in `tests` or `benchmarks`, both of which use it; it knows nothing of any of them. It is not installed with the package.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from softgpu.build import Unavailable, library, unavailable

__all__ = ["SoftGpu", "Unavailable", "executed", "findings", "library", "revive", "set_order", "unavailable"]

HOOK = Path(__file__).parent / "hook"


@dataclass(frozen=True)
class SoftGpu:
    """A machine to pretend.

    Attributes:
        devices: GPUs, 0 to 8.
        capability: compute capability of each, (9, 0).
        capabilities: where they differ, of each of the first; `capability` is that of the rest.
        memory: bytes of each.
        multiprocessors: of each.
        driver: newest CUDA that its driver takes, (13, 4).
        seed: order of blocks and warps; 0 is as they are numbered.
        streams: when work on a stream is done: "now", "late" (when the host waits for it), or "random" by the seed.
        checks: of "init", "race" and "sync", which are made; bounds always are.
        fault: what fails: "alloc:3" (the third allocation and all after it), "launch:5", "lost:7" (the GPU, at the
            seventh piece of work).
        report: file to which findings go, a line each; else to standard error.
    """

    devices: int = 1
    capability: tuple[int, int] = (9, 0)
    capabilities: tuple[tuple[int, int], ...] = ()
    memory: int = 4 << 30
    multiprocessors: int = 132
    driver: tuple[int, int] = (13, 4)
    seed: int = 0
    streams: str = "now"
    checks: tuple[str, ...] = ("init", "race", "sync")
    fault: str = ""
    report: Path | None = None

    def environment(self) -> dict[str, str]:
        """Return the environment in which a child process, and its children, have this machine.

        Raises:
            Unavailable: no C compiler, or no CUDA headers.
        """
        settings = {
            "SOFTGPU_DEVICES": self.devices,
            "SOFTGPU_CAPABILITY": ",".join(f"{10 * x + y}" for x, y in (*self.capabilities, self.capability)),
            "SOFTGPU_MEMORY": self.memory,
            "SOFTGPU_MULTIPROCESSORS": self.multiprocessors,
            "SOFTGPU_DRIVER": 1000 * self.driver[0] + 10 * self.driver[1],
            "SOFTGPU_SEED": self.seed,
            "SOFTGPU_STREAMS": self.streams,
            "SOFTGPU_CHECKS": ",".join(self.checks) or "none",
            "SOFTGPU_FAULT": self.fault,
        }
        made = {**os.environ, **{name: str(value) for name, value in settings.items()}}
        made.pop("SOFTGPU_REPORT", None)
        if self.report is not None:
            made["SOFTGPU_REPORT"] = str(self.report)
        for name, folder in (
            ("LD_LIBRARY_PATH", library().parent),
            ("PYTHONPATH", HOOK.parents[1]),
            ("PYTHONPATH", HOOK),
        ):
            made[name] = os.pathsep.join(filter(None, (str(folder), made.get(name, ""))))
        return made


def driver() -> ctypes.CDLL:
    """Return the driver that this process runs on."""
    return ctypes.CDLL("libcuda.so.1")


def findings() -> list[str]:
    """Return what the checks have found in this process so far, a line each."""
    found = driver().softgpu_findings
    found.restype = ctypes.c_char_p
    return found().decode().splitlines()


def executed() -> int:
    """Return how many instructions of warps, of 32 threads each, this process has executed so far."""
    return ctypes.c_uint64.in_dll(driver(), "clock_ticks").value


def revive() -> None:
    """Forget this process's findings, and the errors that its GPUs are in, as if it had just begun."""
    driver().softgpu_revive()


def set_order(seed: int, streams: str = "now") -> None:
    """Change, in this process, the order of blocks and warps and when work on streams is done: see `SoftGpu`."""
    driver().softgpu_order(ctypes.c_uint64(seed), ("now", "late", "random").index(streams))
