"""`numpy-parallel` and `unrolled-parallel`: the images of a batch split over threads (garg: parallel over the batch).

NumPy lets go of the interpreter's lock while it works on large arrays, so threads of one process do.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cnnexp.backends.host import Array
from cnnexp.backends.layerwise import LayerwiseProgram
from cnnexp.backends.plain.numpy import NumpyOps, one_blas_thread
from cnnexp.backends.plain.unrolled import UnrolledOps
from cnnexp.backends.processor import ThreadedBackend
from cnnexp.backends.protocol import Ops, Update
from cnnexp.network import BatchNorm2d, Elementwise, Network, Window
from cnnexp.network.losses import Loss
from cnnexp.optimizers import Optimizer


class SplitOps:
    """`Ops` (see `protocol`) that gives each of `threads` workers a contiguous part of the images.

    Each worker sums its own weight gradient; they are added in the order of the parts, so a number of threads always
    gives the same result.
    """

    def __init__(self, ops: Ops, threads: int) -> None:
        self._ops, self._threads = ops, threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="cnnexp")
        self.empty, self.saved, self.copy = ops.empty, ops.saved, ops.copy
        self.to_device, self.to_host = ops.to_device, ops.to_host

    def shutdown(self) -> None:
        """End the workers."""
        self._pool.shutdown()

    def gather(self, images: Array, labels: Array, indices: Array, x: Array, t: Array) -> None:
        self._each(len(x), lambda part: self._ops.gather(images, labels, indices[part], x[part], t[part]))

    def conv2d(self, x: Array, w: Array, b: Array | None, window: Window, y: Array) -> None:
        self._each(len(x), lambda part: self._ops.conv2d(x[part], w, b, window, y[part]))

    def conv2d_backward(
        self, x: Array, w: Array, dy: Array, window: Window, dx: Array | None, dw: Array, db: Array | None
    ) -> None:
        self._sum(
            len(x),
            lambda part, dw, db: self._ops.conv2d_backward(x[part], w, dy[part], window, _part_of(dx, part), dw, db),
            dw,
            db,
        )

    def elementwise(self, layer: Elementwise, x: Array, y: Array) -> None:
        self._each(len(x), lambda part: self._ops.elementwise(layer, x[part], y[part]))

    def elementwise_backward(self, layer: Elementwise, x: Array, y: Array, dy: Array, dx: Array) -> None:
        self._each(len(x), lambda part: self._ops.elementwise_backward(layer, x[part], y[part], dy[part], dx[part]))

    def max_pool(self, x: Array, window: Window, y: Array, saved: Array) -> None:
        self._each(len(x), lambda part: self._ops.max_pool(x[part], window, y[part], saved[part]))

    def max_pool_backward(self, saved: Array, dy: Array, window: Window, dx: Array) -> None:
        self._each(len(dx), lambda part: self._ops.max_pool_backward(saved[part], dy[part], window, dx[part]))

    def avg_pool(self, x: Array, window: Window, y: Array) -> None:
        self._each(len(x), lambda part: self._ops.avg_pool(x[part], window, y[part]))

    def avg_pool_backward(self, dy: Array, window: Window, dx: Array) -> None:
        self._each(len(dx), lambda part: self._ops.avg_pool_backward(dy[part], window, dx[part]))

    def add(self, a: Array, b: Array, total: Array) -> None:
        self._each(len(a), lambda part: self._ops.add(a[part], b[part], total[part]))

    def dropout(self, x: Array, images: Array, key: int, rate: float, y: Array) -> None:
        self._each(len(x), lambda part: self._ops.dropout(x[part], images[part], key, rate, y[part]))

    def batch_norm(
        self, layer: BatchNorm2d, x: Array, w: Array, b: Array, mean: Array, variance: Array, y: Array, saved: Array
    ) -> None:
        self._ops.batch_norm(layer, x, w, b, mean, variance, y, saved)  # the mean is one over all images

    def batch_norm_predict(
        self, layer: BatchNorm2d, x: Array, w: Array, b: Array, mean: Array, variance: Array, y: Array
    ) -> None:
        self._each(len(x), lambda part: self._ops.batch_norm_predict(layer, x[part], w, b, mean, variance, y[part]))

    def batch_norm_backward(
        self, x: Array, w: Array, dy: Array, saved: Array, dx: Array | None, dw: Array, db: Array
    ) -> None:
        self._ops.batch_norm_backward(x, w, dy, saved, dx, dw, db)

    def linear(self, x: Array, w: Array, b: Array | None, y: Array) -> None:
        self._each(len(x), lambda part: self._ops.linear(x[part], w, b, y[part]))

    def linear_backward(self, x: Array, w: Array, dy: Array, dx: Array | None, dw: Array, db: Array | None) -> None:
        self._sum(
            len(x),
            lambda part, dw, db: self._ops.linear_backward(x[part], w, dy[part], _part_of(dx, part), dw, db),
            dw,
            db,
        )

    def loss(
        self, loss: Loss, scores: Array, labels: Array, scale: float, d_scores: Array, losses: Array, hits: Array
    ) -> None:
        self._ops.loss(loss, scores, labels, scale, d_scores, losses, hits)

    def updater(self, optimizer: Optimizer) -> Update:
        return self._ops.updater(optimizer)

    def _parts(self, count: int) -> list[slice]:
        workers = min(self._threads, count)
        return [slice(i * count // workers, (i + 1) * count // workers) for i in range(workers)]

    def _each(self, count: int, work: Callable[[slice], None]) -> None:
        """Do `work` on every part of `count` images, side by side."""
        for _ in self._pool.map(work, self._parts(count)):
            pass  # each result is waited for, and a worker's error is raised here

    def _sum(self, count: int, work: Callable, dw: np.ndarray, db: np.ndarray | None) -> None:
        """Do `work(part, dw, db)` on every part with gradients of its own, and add them up in order."""
        parts = self._parts(count)
        dws = np.empty((len(parts), *dw.shape), np.float32)
        dbs = None if db is None else np.empty((len(parts), *db.shape), np.float32)
        for _ in self._pool.map(work, parts, dws, [None] * len(parts) if dbs is None else dbs):
            pass
        dws.sum(axis=0, out=dw)
        if dbs is not None:
            dbs.sum(axis=0, out=db)


def _part_of(array: np.ndarray | None, part: slice) -> np.ndarray | None:
    return None if array is None else array[part]


@dataclass(frozen=True)
class _Split(ThreadedBackend):
    """What both backends share."""

    ops: ClassVar[type[Ops]]

    def compile(self, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int) -> LayerwiseProgram:
        ops = SplitOps(self.ops(), self.thread_count)
        return LayerwiseProgram(ops, network, loss, optimizer, batch_size, release=ops.shutdown, scope=one_blas_thread)


@dataclass(frozen=True)
class NumpyParallel(_Split):
    """`numpy` with the images of a batch split over threads."""

    name: ClassVar[str] = "numpy-parallel"
    ops: ClassVar[type[Ops]] = NumpyOps


@dataclass(frozen=True)
class UnrolledParallel(_Split):
    """`unrolled` with the images of a batch split over threads."""

    name: ClassVar[str] = "unrolled-parallel"
    ops: ClassVar[type[Ops]] = UnrolledOps
