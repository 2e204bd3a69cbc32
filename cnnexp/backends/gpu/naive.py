"""`gpu-naive`: convolutions by one thread per output element, from global memory (castanheira section 3; chavan).

`NaiveOps` is also what the other layerwise GPU backends start from: they override its convolutions alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cnnexp.backends.gpu import device
from cnnexp.backends.gpu.backend import BLOCK, GpuBackend
from cnnexp.backends.gpu.device import Gpu, Tensor
from cnnexp.backends.gpu.kernels import direct, layers, norms, sums
from cnnexp.backends.gpu.kernels.index import ZERO, ConvSizes, conv_sizes, f32, pool_sizes, u32
from cnnexp.backends.protocol import Update
from cnnexp.errors import ConfigError
from cnnexp.network import BatchNorm2d, Elementwise, MaxPool2d, Stage, Window
from cnnexp.network.losses import Loss
from cnnexp.network.noise import threshold
from cnnexp.optimizers import Optimizer


@dataclass(frozen=True)
class SavedNorm:
    """What a BatchNorm2d keeps of a step: a batch's mean and 1 / sqrt(variance + epsilon), (C,) each."""

    statistics: tuple[Tensor, Tensor]
    relu: Tensor | None = None  # its output, where a ReLU after it is part of it


class Scratch:
    """Room for partial sums, and what adds them up."""

    def __init__(self) -> None:
        self._rooms = [device.empty((1,), np.float32)]  # the last; a captured graph may use an earlier one

    def take(self, slices: int, size: int) -> Tensor:
        """Return scratch (slices, size), valid until asked for again."""
        if self._rooms[-1].size < slices * size:
            self._rooms.append(device.empty((slices * size,), np.float32))
        return Tensor(self._rooms[-1].flat, (slices, size))

    def add_up(self, stream: Any, partial: Tensor, out: Tensor, bias: Tensor | None = None, relu: bool = False) -> None:
        """Fill out with the sums over the slices of partial (slices, out.size), plus a bias if there is one; ReLU."""
        threads, columns = sums.sum_threads(len(partial)), out.size if bias is None else bias.size
        kernel = sums.sum_slices(bias is not None, relu, threads)
        blocks, sizes = -(-out.size * threads // sums.THREADS), map(u32, (len(partial), columns, out.size))
        kernel.launch(blocks, stream, partial, out if bias is None else bias, out, *sizes)


class NaiveOps:
    """`Ops` (see `protocol`) on device arrays, nothing of a convolution staged in shared memory."""

    def __init__(self, gpu: Gpu, block: int) -> None:
        self.stream: Any = 0
        self._block, self._multiprocessors = block, gpu.multiprocessors
        self.scratch = Scratch()
        self._nothing = device.empty((1,), np.float32)  # stands for an absent bias or slot

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        return device.empty(shape, dtype)

    def to_device(self, array: np.ndarray) -> Tensor:
        return device.to_device(array)

    def to_host(self, array: Tensor) -> np.ndarray:
        return device.to_host(array)

    def copy(self, source: np.ndarray, target: Tensor) -> None:
        device.copy(source, target)

    def saved(self, stage: Stage, batch_size: int) -> Any:
        """Allocate the place of each window's maximum, int32 (N,U,V,C); what a BatchNorm2d keeps."""
        match stage.layer:
            case MaxPool2d():
                return self.empty((batch_size, *stage.output_shape), np.int32)
            case BatchNorm2d():
                mean, inverse = (self.empty(stage.output_shape[2:], np.float32) for _ in range(2))
                return SavedNorm((mean, inverse))
        return None

    def gather(self, images: Tensor, labels: Tensor, indices: Tensor, x: Tensor, t: Tensor) -> None:
        layers.gather(x.size // x.shape[0], self._block).over(x.size, self.stream, images, labels, indices, x, t)

    def conv2d(self, x: Tensor, w: Tensor, b: Tensor | None, window: Window, y: Tensor) -> None:
        kernel = direct.conv2d(conv_sizes(x, w, window, y), b is not None, self._block)
        kernel.over(y.size, self.stream, x, w, self._or_nothing(b), y)

    def conv2d_backward(
        self, x: Tensor, w: Tensor, dy: Tensor, window: Window, dx: Tensor | None, dw: Tensor, db: Tensor | None
    ) -> None:
        sizes = conv_sizes(x, w, window, dy)
        if dx is not None:
            self._conv2d_backward_input(sizes, w, dy, dx)
        self._conv2d_backward_weights(sizes, x, dy, dw)
        if db is not None:
            self._sum_columns(dy, db)

    def _conv2d_backward_input(self, sizes: ConvSizes, w: Tensor, dy: Tensor, dx: Tensor) -> None:
        direct.conv2d_backward_input(sizes, self._block).over(dx.size, self.stream, w, dy, dx)

    def _conv2d_backward_weights(self, sizes: ConvSizes, x: Tensor, dy: Tensor, dw: Tensor) -> None:
        rows = len(x) * sizes.P
        partial, kernel = self._slices(rows, dw), direct.conv2d_backward_weights(sizes, self._block)
        kernel.over(partial.size, self.stream, x, dy, partial, u32(rows), u32(len(partial)))
        self.scratch.add_up(self.stream, partial, dw)

    def elementwise(self, layer: Elementwise, x: Tensor, y: Tensor) -> None:
        layers.elementwise(layer, self._block).over(x.size, self.stream, x, y)

    def elementwise_backward(self, layer: Elementwise, x: Tensor, y: Tensor, dy: Tensor, dx: Tensor) -> None:
        layers.elementwise_backward(layer, self._block).over(y.size, self.stream, x, y, dy, dx)

    def max_pool(self, x: Tensor, window: Window, y: Tensor, saved: Any) -> None:
        layers.pool(pool_sizes(x, window, y), self._block, True).over(y.size, self.stream, x, y, saved)

    def max_pool_backward(self, saved: Any, dy: Tensor, window: Window, dx: Tensor) -> None:
        layers.pool_backward(pool_sizes(dx, window, dy), self._block, True).over(dx.size, self.stream, saved, dy, dx)

    def avg_pool(self, x: Tensor, window: Window, y: Tensor) -> None:
        layers.pool(pool_sizes(x, window, y), self._block, False).over(y.size, self.stream, x, y, y)

    def avg_pool_backward(self, dy: Tensor, window: Window, dx: Tensor) -> None:
        layers.pool_backward(pool_sizes(dx, window, dy), self._block, False).over(dx.size, self.stream, dy, dy, dx)

    def add(self, a: Tensor, b: Tensor, total: Tensor) -> None:
        layers.add(self._block).over(total.size, self.stream, a, b, total)

    def dropout(self, x: Tensor, images: Tensor, key: int, rate: float, y: Tensor) -> None:
        kernel, numbers = layers.dropout(x.size // x.shape[0], self._block), (np.int64(key), np.int64(threshold(rate)))
        kernel.over(x.size, self.stream, x, images, *numbers, f32(1 / (1 - rate)), y)

    def batch_norm(
        self, layer: BatchNorm2d, x: Tensor, w: Tensor, b: Tensor, mean: Tensor, variance: Tensor, y: Tensor, saved: Any
    ) -> None:
        (m, inverse), cut = saved.statistics, self._columns(x, w)
        partial, sizes = self.scratch.take(2 * cut.slices, w.size), (u32(cut.rows), u32(cut.deep))
        norms.moments(w.size).launch(cut.blocks, self.stream, x, partial, *sizes)
        arrays = partial, m, inverse, mean, variance
        norms.statistics(layer, w.size).launch(-(-w.size // norms.OWNERS), self.stream, *arrays, *sizes)
        kernel = norms.normalize(w.size, False, saved.relu is not None, self._block)
        kernel.over(x.size, self.stream, x, m, inverse, w, b, ZERO, y)

    def batch_norm_predict(
        self, layer: BatchNorm2d, x: Tensor, w: Tensor, b: Tensor, mean: Tensor, variance: Tensor, y: Tensor
    ) -> None:
        kernel = norms.normalize(w.size, True, False, self._block)
        kernel.over(x.size, self.stream, x, mean, variance, w, b, f32(layer.epsilon), y)

    def batch_norm_backward(
        self, x: Tensor, w: Tensor, dy: Tensor, saved: Any, dx: Tensor | None, dw: Tensor, db: Tensor
    ) -> None:
        relu, y, cut = saved.relu is not None, saved.relu or dy, self._columns(x, w)
        partial = self.scratch.take(2 * cut.slices, w.size)
        half, sizes = u32(cut.slices * w.size), (u32(cut.rows), u32(cut.deep))
        kernel = norms.backward_sums(w.size, relu)
        kernel.launch(cut.blocks, self.stream, x, *saved.statistics, y, dy, partial, half, *sizes)
        finish = norms.finish_sums(w.size)
        finish.launch(-(-w.size // norms.OWNERS), self.stream, partial, dw, db, half, u32(cut.slices))
        if dx is not None:
            backward = norms.normalize_backward(w.size, relu, self._block)
            backward.over(x.size, self.stream, x, *saved.statistics, w, y, dy, dw, db, dx)

    def _columns(self, x: Tensor, w: Tensor) -> sums.Columns:
        """Return how to cut sums of the columns of x (..., C), for w (C,)."""
        return sums.columns_of(self._multiprocessors, x.size // w.size, w.size)

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None, y: Tensor) -> None:
        self._product(x, w, b, y, (False, False))

    def _product(self, x: Tensor, w: Tensor, b: Tensor | None, y: Tensor, transposed: tuple[bool, bool]) -> None:
        """y = x @ w + b, where `transposed` says which of x and w are stored so."""
        (rows, columns), depth = y.shape, x.shape[0 if transposed[0] else 1]
        deep = sums.deep(self._multiprocessors, rows, columns, depth)
        parts = -(-depth // deep)
        partial = y if parts == 1 else self.scratch.take(parts, y.size)
        kernel = sums.matmul(*transposed, b is not None and parts == 1)
        sizes = (u32(size) for size in (rows, columns, depth, deep))
        blocks = sums.tiles(rows, columns) * parts
        kernel.launch(blocks, self.stream, x, w, self._or_nothing(b), partial, *sizes)
        if parts > 1:
            self.scratch.add_up(self.stream, partial, y, b)

    def linear_backward(
        self, x: Tensor, w: Tensor, dy: Tensor, dx: Tensor | None, dw: Tensor, db: Tensor | None
    ) -> None:
        self._product(x, dy, None, dw, (True, False))
        if db is not None:
            self._sum_columns(dy, db)
        if dx is not None:
            self._product(dy, w, None, dx, (False, True))

    def loss(
        self, loss: Loss, scores: Tensor, labels: Tensor, scale: float, d_scores: Tensor, losses: Tensor, hits: Tensor
    ) -> None:
        kernel = layers.loss(loss, scores.shape[1], self._block)
        kernel.over(scores.shape[0], self.stream, scores, labels, f32(scale), d_scores, losses, hits)

    def updater(self, optimizer: Optimizer) -> Update:
        kernel = layers.update(optimizer, self._block)

        def update(w: Tensor, g: Tensor, slots: Sequence[Tensor], rate: float, step: int) -> None:
            s, t = (*slots, self._nothing, self._nothing)[:2]
            kernel.over(w.size, self.stream, w, g, s, t, f32(rate), *optimizer.constants(step))

        return update

    def _sum_columns(self, dy: Tensor, out: Tensor) -> None:
        """out[c] = the sum of dy (..., C) over all but the column."""
        cut = self._columns(dy, out)
        partial = self.scratch.take(cut.slices, out.size)
        sums.column_sums(out.size).launch(cut.blocks, self.stream, dy, partial, u32(cut.rows), u32(cut.deep))
        self.scratch.add_up(self.stream, partial, out)

    def _slices(self, most: int, dw: Tensor) -> Tensor:
        """Return scratch for dw of at most so many slices, but no more than give the whole GPU work."""
        blocks = -(-dw.size // self._block)  # of a slice
        return self.scratch.take(min(most, -(-sums.BLOCKS * self._multiprocessors // blocks)), dw.size)

    def _or_nothing(self, array: Tensor | None) -> Tensor:
        return self._nothing if array is None else array


@dataclass(frozen=True)
class GpuNaive(GpuBackend):
    """Convolutions by one thread per output element, from global memory only."""

    name: ClassVar[str] = "gpu-naive"
    block: int | None = None  # threads per block; chosen if None

    @property
    def block_threads(self) -> int:
        """What `block` has become: a number."""
        return BLOCK if self.block is None else self.block

    def __post_init__(self) -> None:
        super().__post_init__()
        block, most = self.block_threads, self.gpu.block_threads
        if not 1 <= block <= most:
            raise ConfigError(f"backend.block={block}: must be 1 .. {most} threads, the limit of {self.gpu.name}")

    def ops(self, batch_size: int) -> NaiveOps:
        return NaiveOps(self.gpu, self.block_threads)
