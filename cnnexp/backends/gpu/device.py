"""The GPU itself: whether there is one, what it allows, and its arrays."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from cnnexp.errors import BackendUnavailable, ConfigError, GpuError, installing

# numba-cuda reads this when imported. A small batch fills few blocks, by the nature of these networks: no warning.
os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")
os.environ.setdefault("CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING", "1")  # `open_gpu` says so, in one line
logging.getLogger("numba.cuda.cudadrv.driver").setLevel(logging.CRITICAL + 1)  # what it logs, it raises too

try:
    from numba import cuda
except ImportError as error:  # numba-cuda is there, but not its CUDA bindings
    advice = f"{installing('gpu')}, or use backend=cpu-parallel or cpu-simd"
    raise BackendUnavailable(f"numba-cuda does not import ({error}): {advice}") from error

OLDEST_CAPABILITY = (7, 5)  # that CUDA 13 compiles for
LARGEST_ARRAY = 2**31  # elements; kernels index with uint32, and the last block may reach past the end
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Gpu:
    """What one GPU is and allows."""

    index: int  # CUDA's number of it
    name: str
    compute_capability: tuple[int, int]
    driver: tuple[int, int]  # newest CUDA version that its driver takes, (major, minor)
    toolkit: tuple[int, int]  # CUDA version of the compiler in use
    multiprocessors: int  # how many blocks can surely run at once
    block_threads: int  # the most in one block
    shared_bytes: int  # the most static shared memory of one block


def dotted(version: tuple[int, int]) -> str:
    return ".".join(str(part) for part in version)


@cache
def open_gpu(index: int) -> Gpu:
    """Return what a GPU is.

    BackendUnavailable: numba-cuda, the driver or a GPU is missing; the message says which. ConfigError: the index is
    not a GPU's. GpuError: the GPU or its driver is too old for the compiler, or does not answer.
    """
    if importlib.util.find_spec("numba_cuda") is None:
        raise _unavailable(f"the package numba-cuda is not installed; {installing('gpu')}")
    try:
        count = len(cuda.gpus)
    except cuda.CudaSupportError as error:
        missing = "NO_DEVICE" in str(error)
        driver = "the NVIDIA driver finds no GPU" if missing else "the NVIDIA driver is not installed or does not load"
        raise _unavailable(driver) from error
    if count == 0:
        raise _unavailable("the NVIDIA driver finds no GPU")
    if not 0 <= index < count:
        raise ConfigError(f"backend.device={index}: must be 0 .. {count - 1}, the GPUs of this machine")
    with _translate_errors():
        device = cuda.gpus[index]
        driver, toolkit = cuda.cudadrv.driver.get_version(), cuda.runtime.get_version()
        if driver[0] < toolkit[0]:  # a driver takes the code of every toolkit of its own major version
            takes = f"takes CUDA {dotted(driver)}, the compiler here is of CUDA {dotted(toolkit)}"
            raise GpuError(f"the NVIDIA driver {takes}: update the driver, or use backend=cpu-parallel or cpu-simd")
        name, capability = device.name, tuple(device.compute_capability)
        if capability < OLDEST_CAPABILITY:
            raise GpuError(
                f"backend.device={index}: {name} has compute capability {dotted(capability)}, the compiler here is "
                f"for {dotted(OLDEST_CAPABILITY)} and later; use another GPU, or backend=cpu-parallel or cpu-simd"
            )
        limits = device.MULTIPROCESSOR_COUNT, device.MAX_THREADS_PER_BLOCK, device.MAX_SHARED_MEMORY_PER_BLOCK
        return Gpu(index, name, capability, driver, toolkit, *limits)


def gpu_count() -> int:
    return len(cuda.gpus)


def _unavailable(what: str) -> BackendUnavailable:
    return BackendUnavailable(f"no GPU to compute on: {what}; without one use backend=cpu-parallel or cpu-simd")


@contextlib.contextmanager
def on(gpu: Gpu) -> Iterator[None]:
    """Have this thread compute on a GPU, whichever it used before; GpuError where that is out of memory or fails."""
    with _translate_errors(), cuda.gpus[gpu.index]:
        yield


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    """Raise what CUDA reports of a GPU, through whichever package, as one line."""
    try:
        yield
    except Exception as error:
        found = re.search(r"CUDA_ERROR_\w+", str(error))
        if found is None:
            raise
        if found[0] == "CUDA_ERROR_OUT_OF_MEMORY":
            what = "the GPU is out of memory; lower trainer.batch_size, dataset.train_size or the model's size, or end "
            raise GpuError(f"{what}what else computes on it") from error
        advice = "nvidia-smi may say why; trainer.resume=RUN goes on from the last epoch"
        raise GpuError(f"the GPU failed ({found[0]}) and computes no more for this process; {advice}") from error


def free_memory() -> tuple[float, float]:
    """Return the bytes of the GPU's memory that are free, and all of them."""
    context = cuda.current_context()
    context.deallocations.clear()  # what Numba has yet to give back
    free, total = context.get_memory_info()
    return free, total


class Tensor:
    """A C-contiguous device array with a shape, in a flat Numba array, so that reshaping is free.

    Slicing is, too: Numba takes longer to slice an array than the host to launch three kernels. It begins at `start` of
    the Numba array `whole`, None where it is all of that.
    """

    def __init__(self, whole: Any, shape: Shape, start: int | None = None) -> None:
        self._whole, self.shape, self._start = whole, tuple(shape), start

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype:
        return self._whole.dtype

    @cached_property
    def flat(self) -> Any:
        """The Numba array of its own elements."""
        return self._whole if self._start is None else self._whole[self._start : self._start + self.size]

    @cached_property
    def words(self) -> tuple[int, ...]:
        """What Numba's code takes for the flat array: no owners, elements, bytes of one, address, dimension, stride."""
        size, width = self._whole.size if self._start is None else self.size, self.dtype.itemsize
        address = self._whole.__cuda_array_interface__["data"][0] + (self._start or 0) * width
        return (0, 0, size, width, address, size, width)

    def reshape(self, shape: Shape) -> Tensor:
        return Tensor(self._whole, shape, self._start)

    def __getitem__(self, part: slice) -> Tensor:
        start, stop, _ = part.indices(self.shape[0])
        row = math.prod(self.shape[1:])
        return Tensor(self._whole, (stop - start, *self.shape[1:]), (self._start or 0) + start * row)


def empty(shape: Shape, dtype: Any) -> Tensor:
    """Allocate an uninitialized device array; ConfigError where free memory, or an index of kernels, is too small."""
    _check_array(shape, dtype)
    return Tensor(cuda.device_array(max(math.prod(shape), 1), dtype), shape)


def to_device(array: np.ndarray) -> Tensor:
    """Copy a NumPy array to the device; ConfigError as `empty`."""
    _check_array(array.shape, array.dtype)
    return Tensor(cuda.to_device(np.ascontiguousarray(array).reshape(-1)), array.shape)


def to_host(tensor: Tensor) -> np.ndarray:
    """Copy a device array to a NumPy array, once all work on it is done."""
    return tensor.flat.copy_to_host()[: tensor.size].reshape(tensor.shape)


def copy(source: np.ndarray, target: Tensor) -> None:
    target.flat[: source.size].copy_to_device(np.ascontiguousarray(source).reshape(-1))


def synchronize() -> None:
    cuda.synchronize()


def _check_array(shape: Shape, dtype: Any) -> None:
    size, what = math.prod(shape), f"an array of shape {tuple(shape)}"
    if size >= LARGEST_ARRAY:
        index = f"GPU kernels index less than {LARGEST_ARRAY:,}; lower trainer.batch_size or the model's size"
        raise ConfigError(f"{what} has {size:,} elements, {index}")
    needed, (free, total) = size * np.dtype(dtype).itemsize, free_memory()
    if needed > free:
        lower = "lower trainer.batch_size, dataset.train_size or the model's size"
        raise ConfigError(f"{what} needs {needed:,} bytes of GPU memory, {free:,} of {total:,} are free; {lower}")
