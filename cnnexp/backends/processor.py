"""What all backends on the CPU have in common."""

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np

from cnnexp.backends.layerwise import LayerwiseProgram
from cnnexp.backends.protocol import Backend, Program
from cnnexp.errors import BackendUnavailable, ConfigError
from cnnexp.network import BatchNorm2d, MaxPool2d, Network, Stage
from cnnexp.network.losses import Loss
from cnnexp.optimizers import Optimizer
from cnnexp.system.cores import usable_cores

Array = np.ndarray


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
        instead = "unset it, or use backend=numpy and trainer.baseline=null"
        raise BackendUnavailable(f"backend: NUMBA_DISABLE_JIT={disabled} is set, so Numba compiles nothing; {instead}")


@dataclass(frozen=True)
class HostBackend(Backend):
    """A backend on the CPU: unless it has a `compile` of its own, its programs run `ops` layer by layer."""

    ops: ClassVar[type[Any]]  # the class of its operations

    def scope(self) -> AbstractContextManager[object]:
        """Return the context in which they compute, e.g. with a number of threads."""
        return contextlib.nullcontext()

    def compile(self, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int) -> Program[Any]:
        return LayerwiseProgram(self.ops(), network, loss, optimizer, batch_size, scope=self.scope)


class SequentialBackend(HostBackend):
    """One on one thread."""


@dataclass(frozen=True)
class ThreadedBackend(HostBackend):
    """One on several threads."""

    threads: int | None = None  # type: ignore[assignment]  # 1 to the usable cores: all of them if None is given

    def __post_init__(self) -> None:
        cores = usable_cores()
        if self.threads is None:
            object.__setattr__(self, "threads", cores)
        elif not 1 <= self.threads <= cores:
            legal = f"1 to {cores}, the cores this process may use, or null"
            raise ConfigError(f"backend.threads={self.threads}: must be {legal}")

    @property
    def thread_count(self) -> int:
        """What `threads` has become: a number."""
        return cast(int, self.threads)


class HostOps:
    """The part of `Ops` (see `protocol`) that all on NumPy arrays share; they may visit the numbers otherwise.

    A max-pool keeps the place, row * size + column, of each window's maximum, int32 (N,U,V,C); a BatchNorm2d the mean
    and the inverse deviation of each channel, float32 (2,C).
    """

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.full(shape, 0, dtype)

    def saved(self, stage: Stage, batch_size: int) -> np.ndarray | None:
        if isinstance(stage.layer, MaxPool2d):
            return self.empty((batch_size, *stage.output_shape), np.int32)
        return self.empty((2, stage.output_shape[2]), np.float32) if isinstance(stage.layer, BatchNorm2d) else None

    def to_device(self, array: np.ndarray) -> np.ndarray:
        return array

    def to_host(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        target[...] = source

    def batch_norm(
        self, layer: BatchNorm2d, x: Array, w: Array, b: Array, mean: Array, variance: Array, y: Array, saved: Array
    ) -> None:
        count, momentum = x.size // w.size, np.float32(layer.momentum)
        m = (self._sum_channels(x) / count).astype(np.float32)
        v = self._sum_products(x, m, x, m) / count
        mean += momentum * (m - mean)
        variance += momentum * (v * count / max(count - 1, 1) - variance)
        saved[0], saved[1] = m, 1 / np.sqrt(v + layer.epsilon)
        self._normalize(x, m, saved[1] * w, b, y)

    def batch_norm_predict(
        self, layer: BatchNorm2d, x: Array, w: Array, b: Array, mean: Array, variance: Array, y: Array
    ) -> None:
        self._normalize(x, mean, w / np.sqrt(variance + np.float32(layer.epsilon)), b, y)

    def batch_norm_backward(
        self, x: Array, w: Array, dy: Array, saved: Array, dx: Array | None, dw: Array, db: Array
    ) -> None:
        (mean, inverse), count = saved, x.size // w.size
        total = self._sum_channels(dy)
        product = self._sum_products(x, mean, dy, np.zeros_like(mean)) * inverse
        dw[:], db[:] = product, total
        if dx is not None:
            mean_dy, factor = ((sums / count).astype(np.float32) for sums in (total, product * inverse))
            self._normalize_backward(x, dy, mean, inverse * w, mean_dy, factor, dx)

    def _sum_channels(self, x: Array) -> Array:
        """Return the sums over all but the channels (C,), float64."""
        return x.sum(axis=(0, 1, 2), dtype=np.float64)

    def _sum_products(self, x: Array, x_mean: Array, y: Array, y_mean: Array) -> Array:
        """As `_sum_channels`, of (x - x_mean) * (y - y_mean)."""
        return self._sum_channels((x - x_mean) * (y - y_mean))

    def _normalize(self, x: Array, mean: Array, scale: Array, shift: Array, y: Array) -> None:
        y[...] = (x - mean) * scale + shift

    def _normalize_backward(
        self, x: Array, dy: Array, mean: Array, scale: Array, mean_dy: Array, factor: Array, dx: Array
    ) -> None:
        dx[...] = scale * (dy - mean_dy - (x - mean) * factor)
