"""What every GPU backend is, and the program of the layerwise ones."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol, Self, cast

import numpy as np

from cnnexp.backends.gpu import device, streamed
from cnnexp.backends.gpu.device import Gpu, Tensor
from cnnexp.backends.gpu.launch import Graphs, default_stream
from cnnexp.backends.gpu.limits import limits
from cnnexp.backends.layerwise import LayerwiseProgram, in_scope
from cnnexp.backends.protocol import Backend, Ops, Program, Rate, rate_of_steps
from cnnexp.backends.stages import Run, unwatched
from cnnexp.network import Network
from cnnexp.network.losses import Loss, Totals
from cnnexp.optimizers import Optimizer

BLOCK = 256  # threads per block


class GpuOps(Ops[Tensor], Protocol):
    """`Ops` that enqueue on `stream`: 0 for the default one, or a graph builder."""

    stream: Any


class GpuProgram(LayerwiseProgram):
    """A layerwise program on one GPU, for data sets of any size: see `streamed`.

    A whole batch's way through the layers, and back, is a graph each, where every step launches the same.
    """

    def __init__(
        self, gpu: Gpu, ops: GpuOps, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int
    ) -> None:
        self.gpu = gpu
        self._passes: tuple[Any, Any] | None = None
        super().__init__(ops, network, loss, optimizer, batch_size, scope=lambda: device.on(gpu))

    @in_scope
    def load(self, images: np.ndarray, labels: np.ndarray) -> Any:
        image_bytes = 4 * int(np.prod(images.shape[1:])) + 17  # its label, and in `train` its index, loss and hit
        return streamed.load(super().load, images, labels, image_bytes, self.batch_size)

    @in_scope
    def train(self, handle: Any, order: np.ndarray, rate: Rate, images: np.ndarray | None = None) -> Totals:
        totals, rates = Totals(0.0, 0, 0), rate_of_steps(rate, len(order), self.batch_size)
        for split, places in streamed.parts(handle, order):
            shown = order[totals.count : totals.count + len(places)]
            first, steps = totals.count // self.batch_size, -(-len(places) // self.batch_size)
            totals += super().train(split, places, rates[first : first + steps], shown)
        return totals

    @in_scope
    def gradients(
        self, handle: Any, indices: np.ndarray, images: np.ndarray | None = None
    ) -> tuple[Totals, np.ndarray]:
        split, places = next(streamed.parts(handle, indices))
        return super().gradients(split, places, indices)

    @in_scope
    def predict(self, handle: Any) -> np.ndarray:
        def scored(split: Any) -> Tensor:
            def outputs(start: int, count: int) -> Tensor:
                return self._chain.forward(self._run(count), split.images[start : start + count])

            scores = device.empty((len(split), *self.network.output_shape), np.float32)
            streamed.enqueue_batches(scores, self.batch_size, 0, outputs)
            return scores

        return streamed.predicted(handle, scored)

    @in_scope
    def forward(self, handle: Any, indices: np.ndarray, trains: bool, images: np.ndarray | None = None) -> Any:
        split, places = next(streamed.parts(handle, indices))
        return super().forward(split, places, trains, indices)

    def _warm_up(self, images: int) -> None:
        """As of all layerwise programs, and with a whole batch, whose sums other kernels may make."""
        super()._warm_up(images)
        super()._warm_up(self.batch_size)
        if not self.network.draws:  # a graph would draw the same in every step
            self._passes = self._captured()

    def _captured(self) -> tuple[Any, Any]:
        """Return the graphs of a whole batch's passes, forward and backward."""
        ops, graphs, run = cast(GpuOps, self._ops), Graphs(self.gpu.index), self._run(self.batch_size, True)

        def enqueue(one_pass: Callable[[Run[Tensor], Tensor], Any], stream: Any) -> None:
            own, ops.stream = ops.stream, stream
            one_pass(run, self._x)
            ops.stream = own

        forward, backward = super()._forward, super()._backward
        return graphs.capture(partial(enqueue, forward)), graphs.capture(partial(enqueue, backward))

    def _forward(self, run: Run[Tensor], x: Tensor) -> Tensor:
        if graphs := self._graphs(run):
            graphs[0].launch(default_stream())
            return self._chain.steps[-1].y
        return super()._forward(run, x)

    def _backward(self, run: Run[Tensor], x: Tensor) -> None:
        if graphs := self._graphs(run):
            graphs[1].launch(default_stream())
        else:
            super()._backward(run, x)

    def _graphs(self, run: Run[Tensor]) -> tuple[Any, Any] | None:
        """Return the graphs of the passes, None where they have to be launched kernel by kernel."""
        return self._passes if run.count == self.batch_size and run.watch is unwatched else None


@dataclass(frozen=True)
class GpuBackend(Backend):
    """Base of the GPU backends; to make one raises what `device.open_gpu` does."""

    device: int = 0  # CUDA's index of the GPU
    on_gpu: ClassVar[bool] = True

    def __post_init__(self) -> None:
        device.open_gpu(self.device)

    def limits(self) -> dict[str, float]:
        with device.on(self.gpu):
            return limits(self.gpu)

    @property
    def gpu(self) -> Gpu:
        return device.open_gpu(self.device)

    def of_worker(self, host_rank: int) -> Self:
        """As `Backend.of_worker`: the GPUs of a machine are taken in turn, from `device` on."""
        return replace(self, device=(self.device + host_rank) % device.gpu_count())

    @property
    def device_name(self) -> str:
        return self.gpu.name

    @property
    def facts(self) -> dict[str, str]:
        gpu = self.gpu
        return {
            "gpu.compute_capability": device.dotted(gpu.compute_capability),
            "gpu.driver_cuda": device.dotted(gpu.driver),
            "gpu.toolkit": device.dotted(gpu.toolkit),
        }

    def ops(self, batch_size: int) -> GpuOps:
        """Return the layers' mathematics at this backend's settings, for batches of that size."""
        raise NotImplementedError

    def compile(self, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int) -> Program:
        with device.on(self.gpu):
            return GpuProgram(self.gpu, self.ops(batch_size), network, loss, optimizer, batch_size)
