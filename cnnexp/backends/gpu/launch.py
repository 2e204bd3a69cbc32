"""A kernel: compiled by Numba when it is first launched, kept on disk, and launched by cuda.core.

Numba's own launch looks at every argument anew, which takes the host longer than these kernels take the GPU. Here the
types are compared with the signature, and what Numba's code expects of an array is put together by `Tensor.words`.
Launches that come again and again are captured in a graph.
"""

import hashlib
import re
import sys
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numba import cuda

from cnnexp.backends.cache import cache_folder, code_of, digest, read_private, source_files, write_private
from cnnexp.backends.gpu.device import Tensor, open_gpu

KEEP = 2000
"""Kernels kept on disk, the latest used; one has some 10 KB."""


class Kernel:
    """A kernel with its signature and block size, compiled when first launched.

    The Python function stays at hand, so that a test can compile it for any GPU where there is none. The signature has
    the Numba types of the arguments, e.g. `void(f4[::1], u4)`; a block so many threads, x only.
    """

    def __init__(self, function: Callable[..., None], signature: str, block: int) -> None:
        self.function, self.signature, self.block = function, signature, block
        # for the compiler: so bounded, a block of many threads never needs more registers than there are
        self.options = {"launch_bounds": block}
        arguments = re.findall(r"(\w+)(\[::1\])?", signature.removeprefix("void"))
        self._kinds = [(np.dtype(name), bool(array)) for name, array in arguments]
        self._compiled: Any = None  # as far as it is the same on every GPU
        self._loaded: dict[int, Any] = {}  # by GPU

    def over(self, count: int, stream: Any, *arguments: Any) -> None:
        """Launch with a thread for each of `count` elements, which is the last argument: threads beyond do nothing."""
        self.launch(-(-count // self.block), stream, *arguments, np.uint32(count))

    def launch(self, blocks: int, stream: Any, *arguments: Any) -> None:
        """Launch `blocks` blocks on a stream (0 for the default one, or a graph builder).

        TypeError is raised unless the arguments are tensors and NumPy scalars of the signature's types.
        """
        words = self._words(arguments)
        index = cuda.current_context().device.id
        if index not in self._loaded:
            self._loaded[index] = self._load(index)
        _core().launch(stream or default_stream(), _config(blocks, self.block), self._loaded[index], *words)

    def _words(self, arguments: tuple[Any, ...]) -> list[Any]:
        """Return the arguments as the code takes them, their types being right."""
        if len(arguments) != len(self._kinds):
            raise TypeError(f"{self.function.__name__} takes {len(self._kinds)} arguments, {len(arguments)} given")
        words: list[Any] = []
        for place, (argument, (dtype, is_array)) in enumerate(zip(arguments, self._kinds, strict=True)):
            array = isinstance(argument, Tensor)
            found = argument.dtype if array else getattr(argument, "dtype", type(argument).__name__)
            if found != dtype or array != is_array:
                given, wanted = ("an array of " if is_one else "" for is_one in (array, is_array))
                differs = f"argument {place} is {given}{found}, the kernel takes {wanted}{dtype}"
                raise TypeError(f"{self.function.__name__}: {differs}")
            words.extend(argument.words if array else (argument,))
        return words

    def _load(self, index: int) -> Any:
        """Return the kernel on a GPU, from the disk where it has been compiled before."""
        folder = cache_folder("compiled-gpu")
        path = None if folder is None else folder / f"{self._key(index)}.bin"
        made = None if path is None else read_private(path)
        if made is None:
            if self._compiled is None:
                (self._compiled,) = cuda.jit(self.signature, **self.options)(self.function).overloads.values()
            code = self._compiled._codelibrary.get_cubin().code  # for the GPU at hand
            made = self._compiled.entry_name.encode() + b"\0" + bytes(code)
            if path is not None:
                write_private(path, made, KEEP)
        name, _, code = made.partition(b"\0")
        return _core().ObjectCode.from_cubin(code).get_kernel(name.decode())

    def _key(self, index: int) -> str:
        """Return the hash of all that the machine code depends on."""
        gpu = open_gpu(index)
        packages = sys.version, metadata.version("numba-cuda"), np.__version__, gpu.toolkit
        facts = packages, gpu.name, gpu.compute_capability, self.signature, self.block, code_of(self.function)
        return hashlib.sha256(source_digest() + repr(facts).encode()).hexdigest()


def kernel(signature: str) -> Callable[[Callable[..., None]], Callable[[int], Kernel]]:
    """Return the decorator of a function that is the same for all sizes: it makes its kernel, given the block size."""
    return lambda function: cache(lambda block: Kernel(function, signature, block))


class Graphs:
    """Captures launches in CUDA graphs of the GPU with CUDA's number `index`."""

    def __init__(self, index: int) -> None:
        self._device = _core().Device(index)
        self._device.set_current()
        self.stream = self._device.create_stream()

    def capture(self, enqueue: Callable[[Any], None]) -> Any:
        """Return the graph of what `enqueue` launches on the stream it is given."""
        builder = self._device.create_graph_builder()
        builder.begin_building()
        enqueue(builder)
        graph = builder.end_building().complete()
        graph.upload(self.stream)
        return graph

    def seconds(self, graph: Any) -> float:
        """Launch a graph; return the seconds that the GPU was at it."""
        timed = _core().EventOptions(timing_enabled=True)
        start = self.stream.record(options=timed)
        graph.launch(self.stream)
        stop = self.stream.record(options=timed)
        stop.sync()
        return (stop - start) / 1e3


@cache
def source_digest() -> bytes:
    """Return a hash of the sources of all kernels."""
    return digest((*sorted(Path(__file__).parent.rglob("*.py")), *source_files()))


@cache
def _core() -> Any:
    """Return `cuda.core`, imported at the first launch: without a driver it does not load."""
    import cuda.core

    return cuda.core


@cache
def _config(blocks: int, block: int) -> Any:
    return _core().LaunchConfig(grid=blocks, block=block)


@cache
def default_stream() -> Any:
    return _core().Stream.from_handle(0)
