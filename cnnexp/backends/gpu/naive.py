"""`gpu-naive`: convolutions by one thread per output element, from global memory (castanheira section 3; chavan).

Also what every layerwise GPU backend shares: `NaiveOps`, of which the others override the convolutions alone, and
`GpuBackend`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Self, cast

import numpy as np
from numba import cuda

from cnnexp.backends.gpu import device, kernels, streamed, sums
from cnnexp.backends.gpu.device import SIMULATED, Gpu, Tensor, on_its_gpu
from cnnexp.backends.gpu.kernels import ZERO, ConvSizes, f32, u32
from cnnexp.backends.gpu.launch import Kernel
from cnnexp.backends.layerwise import LayerwiseProgram
from cnnexp.backends.protocol import Backend, Program, State, Update
from cnnexp.network import BatchNorm2d, Conv2d, Elementwise, Flatten, MaxPool2d, Network, Stage, Window
from cnnexp.network.losses import Loss, Totals
from cnnexp.network.noise import threshold
from cnnexp.network.shapes import walk
from cnnexp.optimizers import Optimizer

BLOCK = 4 if SIMULATED else 256  # threads per block


@cache
def conv2d(sizes: ConvSizes, has_bias: bool, block: int) -> Kernel:
    """One thread per (n, p, q, f); neighbours in a warp differ in f, so weights coalesce and pixels broadcast."""
    H, W, C, K, F, stride, top, left, P, Q = kernels.unsigned(sizes)
    padded = sizes.padded

    def conv2d(x, w, b, y, count):
        i = u32(cuda.grid(1))
        while i < count:
            f = u32(i % F)
            q = u32(u32(i // F) % Q)
            p = u32(u32(i // u32(F * Q)) % P)
            n = u32(i // u32(F * Q * P))
            total = b[f] if has_bias else ZERO
            for a in range(K):
                row = u32(p * stride + u32(a))  # in the padded image
                for e in range(K):
                    col = u32(q * stride + u32(e))
                    if not padded or (top <= row and row < u32(H + top) and left <= col and col < u32(W + left)):
                        pixel = u32(u32(u32(n * H + row - top) * W + col - left) * C)
                        weight = u32(u32(u32(u32(a) * K + u32(e)) * C) * F + f)
                        for c in range(C):
                            total += x[u32(pixel + u32(c))] * w[u32(weight + u32(c) * F)]
            y[i] = total
            i = u32(i + u32(cuda.gridsize(1)))

    return Kernel(conv2d, "void(float32[::1], float32[::1], float32[::1], float32[::1], uint32)", block)


@cache
def conv2d_backward_input(sizes: ConvSizes, block: int) -> Kernel:
    """One thread per input pixel, which gathers from the outputs whose windows hold it."""
    H, W, C, K, F, stride, top, left, P, Q = kernels.unsigned(sizes)

    def conv2d_backward_input(w, dy, dx, count):
        i = u32(cuda.grid(1))
        while i < count:
            c = u32(i % C)
            col = u32(u32(u32(i // C) % W) + left)  # in the padded image
            row = u32(u32(u32(i // u32(C * W)) % H) + top)
            n = u32(i // u32(C * W * H))
            total = ZERO
            p = u32((row - K) // stride + u32(1)) if row >= K else u32(0)
            while p < P and u32(p * stride) <= row:
                q = u32((col - K) // stride + u32(1)) if col >= K else u32(0)
                while q < Q and u32(q * stride) <= col:
                    a, e = u32(row - p * stride), u32(col - q * stride)
                    weight = u32(u32(u32(a * K + e) * C + c) * F)
                    place = u32(u32(u32(n * P + p) * Q + q) * F)
                    for f in range(F):
                        total += w[u32(weight + u32(f))] * dy[u32(place + u32(f))]
                    q = u32(q + u32(1))
                p = u32(p + u32(1))
            dx[i] = total
            i = u32(i + u32(cuda.gridsize(1)))

    return Kernel(conv2d_backward_input, "void(float32[::1], float32[::1], float32[::1], uint32)", block)


@cache
def conv2d_backward_weights(sizes: ConvSizes, block: int) -> Kernel:
    """partial[s, i, j, c, f] = the gradient of weight (i, j, c, f) over images s, s + slices, ...: one thread each."""
    H, W, C, K, F, stride, top, left, P, Q = kernels.unsigned(sizes)
    padded, size = sizes.padded, u32(sizes.K * sizes.K * sizes.C * sizes.F)

    def conv2d_backward_weights(x, dy, partial, images, slices, count):
        i = u32(cuda.grid(1))
        while i < count:
            k = u32(i % size)
            f = u32(k % F)
            c = u32(u32(k // F) % C)
            e = u32(u32(k // u32(F * C)) % K)
            a = u32(k // u32(F * C * K))
            total = ZERO
            n = u32(i // size)
            while n < images:
                for p in range(P):
                    row = u32(u32(p) * stride + a)  # in the padded image
                    if not padded or (top <= row and row < u32(H + top)):
                        for q in range(Q):
                            col = u32(u32(q) * stride + e)
                            if not padded or (left <= col and col < u32(W + left)):
                                pixel = u32(u32(u32(n * H + row - top) * W + col - left) * C + c)
                                place = u32(u32(u32(n * P + u32(p)) * Q + u32(q)) * F + f)
                                total += x[pixel] * dy[place]
                n = u32(n + slices)
            partial[i] = total
            i = u32(i + u32(cuda.gridsize(1)))

    return Kernel(
        conv2d_backward_weights, "void(float32[::1], float32[::1], float32[::1], uint32, uint32, uint32)", block
    )


class NaiveOps:
    """`Ops` (see `protocol`) on device arrays, nothing of a convolution staged in shared memory.

    Args:
        gpu: whose multiprocessors are to have work.
        block: threads per block.
    """

    def __init__(self, gpu: Gpu, block: int) -> None:
        self.stream = 0
        self._block, self._multiprocessors = block, gpu.multiprocessors
        self._scratch = [device.empty((1,), np.float32)]  # the last; a captured graph may use an earlier one
        self._nothing = device.empty((1,), np.float32)  # stands for an absent bias or slot

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        return device.empty(shape, dtype)

    def saved(self, stage: Stage, batch_size: int) -> Any:
        """Allocate the place of each window's maximum, int32 (N,U,V,C); mean and inverse deviation, (C,) each."""
        match stage.layer:
            case MaxPool2d():
                return self.empty((batch_size, *stage.output_shape), np.int32)
            case BatchNorm2d():
                return tuple(self.empty(stage.output_shape[2:], np.float32) for _ in range(2))
        return None

    def to_device(self, array: np.ndarray) -> Tensor:
        return device.to_device(array)

    def to_host(self, array: Tensor) -> np.ndarray:
        return device.to_host(array)

    def copy(self, source: np.ndarray, target: Tensor) -> None:
        device.copy(source, target)

    def gather(self, images: Tensor, labels: Tensor, indices: Tensor, x: Tensor, t: Tensor) -> None:
        kernel = kernels.gather(x.size // x.shape[0], self._block)
        kernel.over(x.size, self.stream, images, labels, indices, x, t)

    def conv2d(self, x: Tensor, w: Tensor, b: Tensor | None, window: Window, y: Tensor) -> None:
        kernel = conv2d(kernels.conv_sizes(x, w, window, y), b is not None, self._block)
        kernel.over(y.size, self.stream, x, w, self._or_nothing(b), y)

    def conv2d_backward(
        self, x: Tensor, w: Tensor, dy: Tensor, window: Window, dx: Tensor | None, dw: Tensor, db: Tensor | None
    ) -> None:
        sizes = kernels.conv_sizes(x, w, window, dy)
        if dx is not None:
            self._conv2d_backward_input(sizes, w, dy, dx)
        self._conv2d_backward_weights(sizes, x, dy, dw)
        if db is not None:
            self._sum_columns(dy, db)

    def _conv2d_backward_input(self, sizes: ConvSizes, w: Tensor, dy: Tensor, dx: Tensor) -> None:
        conv2d_backward_input(sizes, self._block).over(dx.size, self.stream, w, dy, dx)

    def _conv2d_backward_weights(self, sizes: ConvSizes, x: Tensor, dy: Tensor, dw: Tensor) -> None:
        images = x.shape[0]
        blocks_of_a_slice = -(-dw.size // self._block)
        partial, slices = self._partial(dw.size, min(images, self._enough_blocks(blocks_of_a_slice)))
        kernel = conv2d_backward_weights(sizes, self._block)
        kernel.over(partial.size, self.stream, x, dy, partial, u32(images), slices)
        self._sum_slices(partial, slices, dw)

    def elementwise(self, layer: Elementwise, x: Tensor, y: Tensor) -> None:
        kernels.elementwise(layer, self._block).over(x.size, self.stream, x, y)

    def elementwise_backward(self, layer: Elementwise, x: Tensor, y: Tensor, dy: Tensor, dx: Tensor) -> None:
        kernels.elementwise_backward(layer, self._block).over(y.size, self.stream, x, y, dy, dx)

    def max_pool(self, x: Tensor, window: Window, y: Tensor, saved: Any) -> None:
        kernel = kernels.max_pool(kernels.pool_sizes(x, window, y), self._block)
        kernel.over(y.size, self.stream, x, y, saved)

    def max_pool_backward(self, saved: Any, dy: Tensor, window: Window, dx: Tensor) -> None:
        kernel = kernels.max_pool_backward(kernels.pool_sizes(dx, window, dy), self._block)
        kernel.over(dx.size, self.stream, saved, dy, dx)

    def avg_pool(self, x: Tensor, window: Window, y: Tensor) -> None:
        kernels.avg_pool(kernels.pool_sizes(x, window, y), self._block).over(y.size, self.stream, x, y)

    def avg_pool_backward(self, dy: Tensor, window: Window, dx: Tensor) -> None:
        kernels.avg_pool_backward(kernels.pool_sizes(dx, window, dy), self._block).over(dx.size, self.stream, dy, dx)

    def add(self, a: Tensor, b: Tensor, total: Tensor) -> None:
        kernels.add(self._block).over(total.size, self.stream, a, b, total)

    def dropout(self, x: Tensor, images: Tensor, key: int, rate: float, y: Tensor) -> None:
        kernel, numbers = kernels.dropout(x.size // x.shape[0], self._block), (np.int64(key), np.int64(threshold(rate)))
        kernel.over(x.size, self.stream, x, images, *numbers, f32(1 / (1 - rate)), y)

    def batch_norm(
        self,
        layer: BatchNorm2d,
        x: Tensor,
        w: Tensor,
        b: Tensor,
        mean: Tensor,
        variance: Tensor,
        y: Tensor,
        saved: Any,
    ) -> None:
        (m, inverse), count = saved, x.size // w.size
        self._sum_columns(x, m)
        kernels.scale(self._block).over(m.size, self.stream, m, f32(1 / count))
        self._sum_products(x, m, x, inverse, squares=True)
        shares = f32(1 / count), f32(1 / max(count - 1, 1))
        arrays = m, inverse, mean, variance
        kernels.average(self._block).over(
            w.size, self.stream, *arrays, f32(layer.momentum), f32(layer.epsilon), *shares
        )
        kernels.normalize(w.size, False, self._block).over(x.size, self.stream, x, m, inverse, w, b, ZERO, y)

    def batch_norm_predict(
        self, layer: BatchNorm2d, x: Tensor, w: Tensor, b: Tensor, mean: Tensor, variance: Tensor, y: Tensor
    ) -> None:
        kernel = kernels.normalize(w.size, True, self._block)
        kernel.over(x.size, self.stream, x, mean, variance, w, b, f32(layer.epsilon), y)

    def batch_norm_backward(
        self, x: Tensor, w: Tensor, dy: Tensor, saved: Any, dx: Tensor | None, dw: Tensor, db: Tensor
    ) -> None:
        mean, inverse = saved
        self._sum_columns(dy, db)
        self._sum_products(x, mean, dy, dw, squares=False)
        kernels.times(self._block).over(w.size, self.stream, dw, inverse)
        if dx is not None:
            kernel, share = kernels.normalize_backward(w.size, self._block), f32(w.size / x.size)
            kernel.over(x.size, self.stream, x, mean, inverse, w, dy, dw, db, share, dx)

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None, y: Tensor) -> None:
        self._matmul(x, False, w, False, b, y, depth=x.shape[1])

    def linear_backward(
        self, x: Tensor, w: Tensor, dy: Tensor, dx: Tensor | None, dw: Tensor, db: Tensor | None
    ) -> None:
        self._matmul(x, True, dy, False, None, dw, depth=x.shape[0])
        if db is not None:
            self._sum_columns(dy, db)
        if dx is not None:
            self._matmul(dy, False, w, True, None, dx, depth=dy.shape[1])

    def loss(
        self, loss: Loss, scores: Tensor, labels: Tensor, scale: float, d_scores: Tensor, losses: Tensor, hits: Tensor
    ) -> None:
        kernel = kernels.loss(loss, scores.shape[1], self._block)
        kernel.over(scores.shape[0], self.stream, scores, labels, f32(scale), d_scores, losses, hits)

    def updater(self, optimizer: Optimizer) -> Update:
        kernel = kernels.update(optimizer, self._block)

        def update(w, g, slots, rate, step):
            s, t = (*slots, self._nothing, self._nothing)[:2]
            kernel.over(w.size, self.stream, w, g, s, t, f32(rate), *optimizer.constants(step))

        return update

    def _matmul(self, left, left_transposed, right, right_transposed, bias, out, depth: int) -> None:
        """out = left @ right (+ bias), over `depth` products; a transposed operand is stored so."""
        rows, columns = out.shape
        deep = sums.deep(self._multiprocessors, rows, columns, depth)
        parts = -(-depth // deep)
        partial = out if parts == 1 else self._partial(out.size, parts)[0]
        kernel = sums.matmul(left_transposed, right_transposed, bias is not None and parts == 1)
        sizes = (u32(size) for size in (rows, columns, depth, deep))
        blocks = sums.tiles(rows, columns) * parts
        kernel.launch(blocks, self.stream, left, right, self._or_nothing(bias), partial, *sizes)
        if parts > 1:
            self._sum_slices(partial, u32(parts), out, bias)

    def _sum_columns(self, dy: Tensor, out: Tensor) -> None:
        """out[f] = the sum of dy[..., f] over all else."""
        columns = dy.shape[-1]
        rows = dy.size // columns
        partial, slices = self._partial(columns, sums.slices(self._multiprocessors, rows, columns))
        sums.column_sums(columns).over(partial.size, self.stream, dy, partial, u32(rows), slices)
        self._sum_slices(partial, slices, out)

    def _sum_products(self, x: Tensor, mean: Tensor, dy: Tensor, out: Tensor, squares: bool) -> None:
        """out[c] = the sum of (x - mean)^2, or of (x - mean) * dy, over all but the channels."""
        columns = mean.size
        rows = x.size // columns
        partial, slices = self._partial(columns, sums.slices(self._multiprocessors, rows, columns))
        kernel = sums.column_products(columns, squares)
        kernel.over(partial.size, self.stream, x, mean, dy, partial, u32(rows), slices)
        self._sum_slices(partial, slices, out)

    def _sum_slices(self, partial: Tensor, slices: np.uint32, out: Tensor, bias: Tensor | None = None) -> None:
        """out = the sum of its partial sums (+ bias)."""
        kernel, columns = sums.sum_slices(bias is not None), out.size if bias is None else bias.size
        blocks, sizes = sums.sum_slices_blocks(out.size), (slices, u32(columns), u32(out.size))
        kernel.launch(blocks, self.stream, partial, self._or_nothing(bias), out, *sizes)

    def _enough_blocks(self, blocks: int) -> int:
        """Return how many times so many blocks give all multiprocessors work."""
        return -(-sums.BLOCKS * self._multiprocessors // blocks)

    def _partial(self, size: int, slices: int) -> tuple[Tensor, np.uint32]:
        """Return scratch (slices, size), valid until asked for again, and the slices."""
        if self._scratch[-1].size < slices * size:
            self._scratch.append(device.empty((slices * size,), np.float32))
        return Tensor(self._scratch[-1].flat, (slices, size)), u32(slices)

    def _or_nothing(self, array: Tensor | None) -> Tensor:
        return self._nothing if array is None else array


class GpuProgram(LayerwiseProgram):
    """A layerwise program on one GPU, for data sets of any size: see `streamed`.

    Args:
        gpu: what it runs on.
    """

    def __init__(
        self, gpu: Gpu, ops: NaiveOps, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int
    ) -> None:
        self.gpu = gpu
        super().__init__(ops, network, loss, optimizer, batch_size, scope=lambda: device.on(gpu))

    @on_its_gpu
    def load(self, images: np.ndarray, labels: np.ndarray) -> Any:
        image_bytes = 4 * int(np.prod(images.shape[1:])) + 17  # its label, and in `train` its index, loss and hit
        return streamed.load(super().load, images, labels, image_bytes, self.batch_size)

    @on_its_gpu
    def train(self, handle, order, rate, images=None):
        totals = Totals(0.0, 0, 0)
        for split, places in streamed.parts(handle, order):
            shown = order[totals.count : totals.count + len(places)]
            totals += super().train(split, places, rate, shown)
        return totals

    @on_its_gpu
    def gradients(self, handle, indices, images=None):
        split, places = next(streamed.parts(handle, indices))
        return super().gradients(split, places, indices)

    @on_its_gpu
    def predict(self, handle: Any) -> np.ndarray:
        every = streamed.parts(handle, np.arange(len(handle)))
        return np.concatenate([self._predict(split) for split, _ in every])

    def _predict(self, split: Any) -> np.ndarray:
        """Leave all scores on the GPU until the last batch is done: one copy, and one wait for it."""
        scores = device.empty((len(split), *self.network.output_shape), np.float32)
        for start in range(0, len(split), self.batch_size):
            batch = slice(start, min(start + self.batch_size, len(split)))
            y = self._chain.forward(self._run(batch.stop - start), split.images[batch])
            kernels.put(BLOCK).over(y.size, 0, y, scores, u32(start * (y.size // len(y))))
        return device.to_host(scores)

    @on_its_gpu
    def forward(self, handle, indices, trains, images=None):
        split, places = next(streamed.parts(handle, indices))
        return super().forward(split, places, trains, indices)

    @on_its_gpu
    def state(self) -> State:
        return super().state()

    @on_its_gpu
    def restore(self, state: State) -> None:
        super().restore(state)

    @on_its_gpu
    def _synchronize(self):
        super()._synchronize()


@dataclass(frozen=True)
class GpuBackend:
    """Base of the GPU backends.

    Attributes:
        device: CUDA's index of the GPU, >= 0.

    Raises:
        BackendUnavailable: numba-cuda, the driver or a GPU is missing.
        ConfigError: the index is not a GPU's.
    """

    device: int = 0
    threads: ClassVar[int] = 1
    on_gpu: ClassVar[bool] = True
    simulated: ClassVar[bool] = SIMULATED
    explain: ClassVar[bool] = False
    next_best: ClassVar[None] = None

    def __post_init__(self) -> None:
        self.check(self.gpu)

    @property
    def clocked(self) -> Backend:
        """Itself: where layers run one by one, whoever watches them clocks them."""
        return cast(Backend, self)

    @property
    def gpu(self) -> Gpu:
        """What this backend computes on."""
        return device.open_gpu(self.device)

    def of_worker(self, host_rank: int) -> Self:
        """Return the backend of a worker: the GPUs of its machine are taken in turn, from `device` on."""
        return replace(self, device=(self.device + host_rank) % device.gpu_count())

    @property
    def device_name(self) -> str:
        return self.gpu.name

    @property
    def facts(self) -> dict[str, str]:
        """Tags that say what computed."""
        return self.gpu.facts

    def check(self, gpu: Gpu) -> None:
        """Raise ConfigError where a setting is more than the GPU allows."""

    def ops(self, batch_size: int) -> NaiveOps:
        """Return the layers' mathematics at this backend's settings, for batches of that size."""
        raise NotImplementedError

    def compile(self, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int) -> Program:
        with device.on(self.gpu):
            needed = batch_bytes(network, optimizer, batch_size, self.gpu)
            device.check_memory(needed, f"a batch of {batch_size}")
            return GpuProgram(self.gpu, self.ops(batch_size), network, loss, optimizer, batch_size)


def batch_bytes(network: Network, optimizer: Optimizer, batch_size: int, gpu: Gpu) -> int:
    """Return the bytes that a layerwise program allocates, but for the data set."""
    values = int(np.prod(network.input_shape)) + 1
    for stage in walk(network.stages):
        size = int(np.prod(stage.output_shape))
        if not isinstance(stage.layer, Flatten):  # it shares its input's buffers
            values += size * (3 if isinstance(stage.layer, MaxPool2d) else 2)  # activation, gradient, argmax
    weights = [stage.weight.size for stage in walk(network.stages) if stage.weight and isinstance(stage.layer, Conv2d)]
    scratch = sums.BLOCKS * gpu.multiprocessors * sums.THREADS + max(weights, default=0)
    return 4 * (values * batch_size + network.parameter_count * (2 + len(optimizer.slots)) + scratch)


@dataclass(frozen=True)
class GpuNaive(GpuBackend):
    """Convolutions by one thread per output element, from global memory only.

    Attributes:
        block: threads per block; chosen if None.
    """

    name: ClassVar[str] = "gpu-naive"
    block: int | None = None

    def check(self, gpu: Gpu) -> None:
        device.check_block(gpu, BLOCK if self.block is None else self.block)

    def ops(self, batch_size: int) -> NaiveOps:
        return NaiveOps(self.gpu, BLOCK if self.block is None else self.block)
