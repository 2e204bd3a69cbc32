"""`cpu-parallel`: the loops of `cpu`, with the images of a batch shared among threads."""

from __future__ import annotations

import functools
import importlib
import os
from dataclasses import dataclass
from typing import ClassVar

import numba

from cnnexp.backends.cpu.sequential import CpuOps
from cnnexp.backends.layerwise import LayerwiseProgram
from cnnexp.backends.processor import ThreadedBackend, using_threads
from cnnexp.errors import ConfigError
from cnnexp.network import Network
from cnnexp.network.losses import Loss
from cnnexp.optimizers import Optimizer


@functools.cache
def choose_threading_layer() -> None:
    """Let Numba use OpenMP, whose parallel regions start fastest, or its own work queue where it is missing.

    It counts until the process runs its first parallel kernel; a layer that already runs stays. GNU OpenMP reads its
    settings when it is loaded: by default a waiting thread spins for milliseconds, which on a machine with other work
    to do keeps from its core the very thread that it waits for. A user's own setting stands.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        importlib.import_module("numba.np.ufunc.omppool")
        numba.config.THREADING_LAYER = "omp"
    except ImportError:
        numba.config.THREADING_LAYER = "workqueue"


@dataclass(frozen=True)
class CpuParallel(ThreadedBackend):
    """Numba on several threads."""

    name: ClassVar[str] = "cpu-parallel"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.thread_count > numba.config.NUMBA_NUM_THREADS:
            raise ConfigError(
                f"backend.threads={self.threads}: must be at most {numba.config.NUMBA_NUM_THREADS}, "
                "the environment variable NUMBA_NUM_THREADS; unset it"
            )

    def compile(self, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int) -> LayerwiseProgram:
        choose_threading_layer()
        scope = functools.partial(using_threads, self.thread_count, numba.get_num_threads, numba.set_num_threads)
        return LayerwiseProgram(CpuOps(parallel=True), network, loss, optimizer, batch_size, scope=scope)
