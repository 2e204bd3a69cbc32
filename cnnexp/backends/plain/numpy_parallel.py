"""`numpy-parallel` and `unrolled-parallel`: the images of a batch split over threads (garg: parallel over the batch).

NumPy lets go of the interpreter's lock while it works on large arrays, so threads of one process do.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np

from cnnexp.backends.layerwise import LayerwiseProgram
from cnnexp.backends.plain.numpy import NumpyOps, one_blas_thread
from cnnexp.backends.plain.unrolled import UnrolledOps
from cnnexp.backends.processor import ThreadedBackend
from cnnexp.backends.protocol import Ops
from cnnexp.network import Network
from cnnexp.network.losses import Loss
from cnnexp.optimizers import Optimizer

# of the operations that are shared out, the arguments that have a part for every image; the first has no more than that
BY_IMAGE = {
    "gather": (2, 3, 4),
    "conv2d": (0, 4),
    "conv2d_backward": (0, 2, 4),
    "elementwise": (1, 2),
    "elementwise_backward": (1, 2, 3, 4),
    "max_pool": (0, 2, 3),
    "max_pool_backward": (1, 0, 3),
    "avg_pool": (0, 2),
    "avg_pool_backward": (0, 2),
    "add": (0, 1, 2),
    "dropout": (0, 1, 4),
    "batch_norm_predict": (1, 6),  # the others' mean is one over all images
    "linear": (0, 3),
    "linear_backward": (0, 2, 3),
}
SUMMED = ("conv2d_backward", "linear_backward")  # their last arguments, dw and db, are sums over images


class SplitOps:
    """`Ops` (see `protocol`) that gives each of `threads` workers a contiguous part of the images.

    Each worker sums its own weight gradient; they are added in the order of the parts, so a number of threads always
    gives the same result. What is not in `BY_IMAGE` is done by one.
    """

    def __init__(self, ops: Ops, threads: int) -> None:
        self._ops, self._threads = ops, threads
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="cnnexp")

    def __getattr__(self, name: str) -> Any:
        whole = getattr(self._ops, name)
        return functools.partial(self._share, name, whole) if name in BY_IMAGE else whole

    def _share(self, name: str, whole: Callable, *arguments: Any) -> None:
        """Do an operation on every part of the images, side by side."""
        by_image, totals = BY_IMAGE[name], arguments[-2:] if name in SUMMED else ()
        given = arguments[: len(arguments) - len(totals)]
        count = len(arguments[by_image[0]])
        workers = min(self._threads, count)
        sums = [None if total is None else np.empty((workers, *total.shape), np.float32) for total in totals]

        def work(i: int) -> None:
            part = slice(i * count // workers, (i + 1) * count // workers)
            own = (a[part] if at in by_image and a is not None else a for at, a in enumerate(given))
            whole(*own, *(each if each is None else each[i] for each in sums))

        list(self.pool.map(work, range(workers)))  # waits for each, and raises a worker's error
        for each, total in zip(sums, totals, strict=True):
            if each is not None:
                each.sum(axis=0, out=total)


class NumpyParallel(ThreadedBackend):
    """`numpy` with the images of a batch split over threads."""

    name = "numpy-parallel"
    ops = NumpyOps

    def compile(self, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int) -> LayerwiseProgram:
        ops = SplitOps(self.ops(), self.thread_count)
        what = network, loss, optimizer, batch_size
        return LayerwiseProgram(cast(Ops, ops), *what, release=ops.pool.shutdown, scope=one_blas_thread)


class UnrolledParallel(NumpyParallel):
    """`unrolled` with the images of a batch split over threads."""

    name = "unrolled-parallel"
    ops = UnrolledOps
