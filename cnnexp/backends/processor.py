"""What the CPU is and how many of its cores may be used."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from cnnexp.errors import BackendUnavailable, ConfigError
from cnnexp.system.cores import usable_cores

if TYPE_CHECKING:
    from cnnexp.backends.protocol import Backend


def resolve_threads(threads: int | None) -> int:
    """Return `threads`, or every usable core for None; ConfigError outside 1..cores."""
    cores = usable_cores()
    if threads is None:
        return cores
    if not 1 <= threads <= cores:
        raise ConfigError(f"backend.threads={threads}: must be 1 to {cores}, the cores this process may use, or null")
    return threads


def need_compiler() -> None:
    """Raise BackendUnavailable where the environment has Numba compile nothing: our kernels are not for Python."""
    disabled = os.environ.get("NUMBA_DISABLE_JIT", "0")
    if disabled not in ("", "0"):
        raise BackendUnavailable(
            f"backend: NUMBA_DISABLE_JIT={disabled} is set, so Numba compiles nothing; unset it, or use backend=numpy "
            "and trainer.baseline=null"
        )


@functools.cache
def cpu_name() -> str:
    """Return the CPU's model name, or its architecture where the system does not tell."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class CpuBackend:
    """What backends on the CPU have in common."""

    on_gpu: ClassVar[bool] = False
    facts: ClassVar[Mapping[str, str]] = {}

    @property
    def device_name(self) -> str:
        return cpu_name()

    @property
    def next_best(self) -> Backend | None:
        return None

    @property
    def explain(self) -> bool:
        return False

    @property
    def clocked(self) -> Backend:
        return cast("Backend", self)

    @property
    def forward_only(self) -> Backend:
        return cast("Backend", self)

    def limits(self) -> Mapping[str, float]:
        return {}

    def of_worker(self, host_rank: int) -> Backend:
        return cast("Backend", self)


@dataclass(frozen=True)
class SequentialBackend(CpuBackend):
    """What backends on one thread of the CPU have in common."""

    threads: ClassVar[int] = 1


@dataclass(frozen=True)
class ThreadedBackend(CpuBackend):
    """What backends on several threads of the CPU have in common.

    Attributes:
        threads: 1 to the usable cores; all of them if None.
    """

    threads: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "threads", resolve_threads(self.threads))

    @property
    def thread_count(self) -> int:
        """What `threads` has become: a number."""
        return cast(int, self.threads)
