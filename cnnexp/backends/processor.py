"""What all backends on the CPU have in common."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from cnnexp.backends.protocol import Backend
from cnnexp.errors import BackendUnavailable, ConfigError
from cnnexp.network import BatchNorm2d, MaxPool2d, Stage
from cnnexp.system.cores import usable_cores

Array = np.ndarray


def resolve_threads(threads: int | None) -> int:
    """Return `threads`, or every usable core for None; ConfigError outside 1..cores."""
    cores = usable_cores()
    if threads is None:
        return cores
    if not 1 <= threads <= cores:
        raise ConfigError(f"backend.threads={threads}: must be 1 to {cores}, the cores this process may use, or null")
    return threads


@contextlib.contextmanager
def using_threads(count: int, get: Callable[[], int], use: Callable[[int], object]) -> Iterator[None]:
    """Let a library use `count` threads, then as many as before: programs of a process do not share a count."""
    before = get()
    use(count)
    try:
        yield
    finally:
        use(before)


def need_compiler() -> None:
    """Raise BackendUnavailable where the environment has Numba compile nothing: our kernels are not for Python."""
    disabled = os.environ.get("NUMBA_DISABLE_JIT", "0")
    if disabled not in ("", "0"):
        raise BackendUnavailable(
            f"backend: NUMBA_DISABLE_JIT={disabled} is set, so Numba compiles nothing; unset it, or use backend=numpy "
            "and trainer.baseline=null"
        )


@dataclass(frozen=True)
class SequentialBackend(Backend):
    """A backend on one thread of the CPU: as `Backend` has it, under a name that says so."""


@dataclass(frozen=True)
class ThreadedBackend(Backend):
    """What backends on several threads of the CPU have in common.

    Attributes:
        threads: 1 to the usable cores; all of them if None.
    """

    threads: int | None = None  # type: ignore[assignment]  # a number, once it is made

    def __post_init__(self) -> None:
        object.__setattr__(self, "threads", resolve_threads(self.threads))

    @property
    def thread_count(self) -> int:
        """What `threads` has become: a number."""
        return cast(int, self.threads)


class HostOps:
    """The part of `Ops` (see `protocol`) that computes nothing.

    A max-pool keeps the place, row * size + column, of each window's maximum, int32 (N,U,V,C); a BatchNorm2d the mean
    and the inverse deviation of each channel, float32 (2,C).
    """

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.full(shape, 0, dtype)

    def saved(self, stage: Stage, batch_size: int) -> np.ndarray | None:
        match stage.layer:
            case MaxPool2d():
                return self.empty((batch_size, *stage.output_shape), np.int32)
            case BatchNorm2d():
                return self.empty((2, stage.output_shape[2]), np.float32)
        return None

    def to_device(self, array: np.ndarray) -> np.ndarray:
        return array

    def to_host(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        target[...] = source
