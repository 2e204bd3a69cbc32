"""`cpu-parallel`: the loops of `cpu`, with the images of a batch shared among threads."""

import functools
import importlib
import os
from contextlib import AbstractContextManager

import numba

from cnnexp.backends.cpu.sequential import CpuOps
from cnnexp.backends.processor import ThreadedBackend, using_threads
from cnnexp.errors import ConfigError


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


class ParallelOps(CpuOps):
    """`CpuOps` on as many threads as Numba uses."""

    parallel = True

    def __init__(self) -> None:
        super().__init__()
        choose_threading_layer()


class CpuParallel(ThreadedBackend):
    """Numba on several threads."""

    name = "cpu-parallel"
    ops = ParallelOps

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.thread_count > (most := numba.config.NUMBA_NUM_THREADS):
            legal = f"must be at most {most}, the environment variable NUMBA_NUM_THREADS; unset it"
            raise ConfigError(f"backend.threads={self.threads}: {legal}")

    def scope(self) -> AbstractContextManager[object]:
        return using_threads(self.thread_count, numba.get_num_threads, numba.set_num_threads)
