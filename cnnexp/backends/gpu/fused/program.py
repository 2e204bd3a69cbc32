"""The program of `gpu-fused`: the data set stays on the device, a call to `train` launches graphs of many steps."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from cnnexp.backends.gpu import device, streamed
from cnnexp.backends.gpu.device import Gpu, Tensor
from cnnexp.backends.gpu.fused import kernels
from cnnexp.backends.gpu.fused.build import build
from cnnexp.backends.gpu.fused.clocks import EVERY, GpuClocks
from cnnexp.backends.gpu.fused.kernels import BLOCK
from cnnexp.backends.gpu.fused.nodes import BatchStep, Context, GradientArena, Partials
from cnnexp.backends.gpu.kernels.index import u32
from cnnexp.backends.gpu.kernels.sums import sum_threads
from cnnexp.backends.gpu.launch import Graphs
from cnnexp.backends.gpu.shared import CONV_TILE, SharedOps
from cnnexp.backends.layerwise import FlatProgram, as_float32, in_scope
from cnnexp.backends.parts import BACKWARD, FORWARD, Part
from cnnexp.backends.protocol import Rate, rate_of_steps
from cnnexp.backends.state import optimizers
from cnnexp.network import DropoutStage, Network, StructuralStage
from cnnexp.network.losses import Loss, Totals
from cnnexp.network.noise import layer_key
from cnnexp.network.shapes import walk
from cnnexp.optimizers import Optimizer

GRAPH_STEPS = (64, 8, 1)  # steps of the graphs that a pass is put together from
UPDATE = Part("update", ("parameters",), "update")


@dataclass
class DeviceSplit:
    """A loaded split, and what a pass over it needs on the device."""

    images: Tensor  # (N, *input_shape), bytes or float32
    labels: Tensor  # int32 (N,)
    order: Tensor  # uint32, the place from which steps count, then the images of the steps to come
    shown: Tensor  # uint32, their places in the data set, of which `images` may be a part
    keys: Tensor  # uint32, of every step to come, of each layer that draws random numbers
    rates: Tensor  # (rate, c0, c1) of every step to come, float32
    outcomes: Tensor  # (loss, hit) by place in `order`
    sums: Tensor  # of `BLOCK` outcomes each; all that goes back to the host
    graphs: dict[int, Any] = field(default_factory=dict)  # by number of steps, most first
    predictions: dict[int, tuple[Tensor, Any]] = field(default_factory=dict)  # scores, and what fills them, by images

    @property
    def is_bytes(self) -> bool:
        return self.images.dtype == np.uint8

    @property
    def room(self) -> int:
        """Images that the buffers hold."""
        return self.outcomes.shape[0]

    def __len__(self) -> int:
        return self.images.shape[0]


class FusedProgram(FlatProgram[Tensor, Any]):
    """A `Program` (see `protocol`) in few kernels and no work on the host between steps.

    Its steps are captured in CUDA `graphs`, else the same kernels are launched one by one; some have `clocks`, by part.
    """

    _ops: SharedOps

    def __init__(
        self, gpu: Gpu, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int, graphs: bool, clocks: bool
    ) -> None:
        self.gpu, self._clocked = gpu, clocks
        on_host = any(isinstance(stage, StructuralStage) for stage in walk(network.stages))
        self._graphs = Graphs(gpu.index) if graphs and not on_host else None
        self._stream = self._graphs.stream if self._graphs else 0
        ops = SharedOps(gpu, BLOCK, CONV_TILE)
        super().__init__(ops, network, loss, optimizer, batch_size, scope=self._synchronized)

    def _make(self) -> None:
        self._nothing = device.empty((1,), np.float32)
        self._arena = GradientArena(self.network.parameter_count)
        self._draws = tuple(stage.name for stage in walk(self.network.stages) if isinstance(stage, DropoutStage))
        flat = self._parameters, self._running, self._arena
        context = Context(self.gpu, self.batch_size, *flat, self._ops, self._draws)
        self._nodes = build(context, self.network, self.loss)
        self._arena.allocate()
        taken = optimizers(self.network, self.optimizer)
        self._tables = {  # by optimizer, what it takes the step of
            own: device.to_device(segments(self._arena.partials, [part for part, of in taken if of == own]))
            for own in dict.fromkeys(own for _, own in taken)
        }
        parts = [part for node in self._nodes for part in node.parts.values()]
        self._clocks = GpuClocks([*parts, UPDATE]) if self._clocked else None
        self._images = 0  # trained on
        self._warm_up()

    @contextlib.contextmanager
    def _synchronized(self) -> Iterator[None]:
        """Work on the GPU with nothing else under way, before or after: `Ops` enqueue on another stream."""
        with device.on(self.gpu):
            device.synchronize()
            yield
            device.synchronize()

    @in_scope
    def load(self, images: np.ndarray, labels: np.ndarray) -> DeviceSplit | streamed.Streamed:
        images = images if images.dtype == np.uint8 else as_float32(images)
        image_bytes = 36 + 4 * len(self._draws) + images[:1].nbytes  # what else `DeviceSplit` has takes the rest
        return streamed.load(self._load, images, labels, image_bytes, self.batch_size)

    @in_scope
    def refill(self, handle: Any, images: np.ndarray, labels: np.ndarray, epoch: int) -> Any:
        if not isinstance(handle, DeviceSplit):
            return self.load(images, labels)
        device.copy(images, handle.images)  # its graphs go on to serve
        device.copy(labels.astype(np.int32), handle.labels)
        return handle

    def _load(self, images: np.ndarray, labels: np.ndarray, captures: bool = True) -> DeviceSplit:
        """Put bytes or float32 images on the GPU, all of them; capture its graphs while no epoch's clock runs."""
        room = max(len(images), self.batch_size)
        steps = -(-room // self.batch_size)
        split = DeviceSplit(
            images=device.to_device(images),
            labels=device.to_device(labels.astype(np.int32)),
            order=device.empty((1 + room,), np.uint32),
            shown=device.to_device(np.zeros(room, np.uint32)),  # what draws reads both in `predict`, too
            keys=device.to_device(np.zeros(max(1, steps * len(self._draws)), np.uint32)),
            rates=device.empty((3 * steps,), np.float32),
            outcomes=device.empty((room, 2), np.float32),
            sums=device.empty((-(-room // BLOCK), 2), np.float32),
        )
        if captures:
            self._capture(split)
        return split

    @in_scope
    def train(self, handle: DeviceSplit | streamed.Streamed, order: np.ndarray, rate: Rate) -> Totals:
        totals, rates = Totals(0.0, 0, 0), rate_of_steps(rate, len(order), self.batch_size)
        self.pending.drop()
        for split, places in streamed.parts(handle, order):
            most = split.room // self.batch_size * self.batch_size  # whole steps that the buffers hold
            for start in range(0, len(places), most):
                part = places[start : start + most]
                first, steps = totals.count // self.batch_size, -(-len(part) // self.batch_size)
                shown = order[totals.count : totals.count + len(part)]
                totals += self._train(split, part, shown, rates[first : first + steps])
        return totals

    @in_scope
    def gradients(self, handle: DeviceSplit | streamed.Streamed, indices: np.ndarray) -> tuple[Totals, np.ndarray]:
        split, places = next(streamed.parts(handle, indices))
        step = BatchStep(self._stream, split, 0, len(places), trains=True)
        self._send(split, places, indices)
        with self.pending.hold():
            self._run(step)
            device.synchronize()
        self._update(step, self._gradient)
        return self._totals(split, len(places)), device.to_host(self._gradient)

    @in_scope
    def predict(self, handle: DeviceSplit | streamed.Streamed) -> np.ndarray:
        return streamed.predicted(handle, self._scored)

    def _scored(self, split: DeviceSplit) -> Tensor:
        """Enqueue the scores of a split, as a graph that is captured when they are first asked for."""
        count = len(split)
        if count not in split.predictions:
            scores = device.empty((count, *self.network.output_shape), np.float32)
            enqueue = partial(self._enqueue_scores, split, scores)
            split.predictions[count] = scores, self._graphs.capture(enqueue).launch if self._graphs else enqueue
        scores, launch = split.predictions[count]
        self._send(split, np.arange(count))
        launch(self._stream)
        return scores

    def _enqueue_scores(self, split: DeviceSplit, scores: Tensor, stream: Any) -> None:
        def outputs(start: int, count: int) -> Tensor:
            for node in self._nodes:
                node.forward(BatchStep(stream, split, start, count, trains=False))
            return self._nodes[-1].y[:count]

        streamed.enqueue_batches(scores, self.batch_size, stream, outputs)

    @in_scope
    def clocked(self) -> Sequence[tuple[Part, float]]:
        """As `Program.clocked`: of all steps, by those that were clocked."""
        return [*self._clocks.seconds(self._images / self.batch_size).items()] if self._clocks else []

    def _apply(self, rate: float) -> None:
        self._ops.stream = 0  # a step's kernels leave theirs
        super()._apply(rate)

    def _warm_up(self) -> None:
        """Take every path once on zeros: kernels are compiled before anything is timed, and never while a graph is."""
        zeros = np.zeros((self.batch_size, *self.network.input_shape), np.uint8)
        labels, order = np.zeros(self.batch_size, np.int32), np.arange(self.batch_size)
        for images in (zeros, zeros.astype(np.float32)):
            split = self._load(images, labels, captures=False)
            self._train(split, order, order, np.zeros(1))  # kernel by kernel
            scores = device.empty((len(split), *self.network.output_shape), np.float32)
            self._enqueue_scores(split, scores, self._stream)
            kernels.advance(1).launch(1, self._stream, split.order, u32(0))
            self._capture(split)
            self._train(split, order, order, np.zeros(1))
            self.predict(split)
        self.restore({"parameters": np.zeros(self.network.parameter_count, np.float32)})
        self._images = 0
        if self._clocks:
            self._clocks.reset()

    def _train(self, split: DeviceSplit, order: np.ndarray, shown: np.ndarray, rates: np.ndarray) -> Totals:
        """Train on at most as many images as the split's buffers hold; `shown` are their places in the data set."""
        batch, count, steps = self.batch_size, len(order), len(rates)
        numbers = [(rate, *self.optimizer.constants(self._step + 1 + i)) for i, rate in enumerate(rates)]
        device.copy(np.array(numbers, np.float32).reshape(-1), split.rates)
        self._send(split, order, shown)
        base = self._launch_graphs(split, count // batch)
        for start in range(base, count, batch):
            clocked = start // batch % EVERY == 0 and count - start >= batch
            self._enqueue(self._stream, split, start - base, min(batch, count - start), clocked)
        self._step += steps
        self._images += count
        return self._totals(split, count)

    def _capture(self, split: DeviceSplit) -> None:
        """Capture the graphs of as many steps as the split's buffers hold."""
        if self._graphs is None:
            return
        for size in GRAPH_STEPS:
            if size * self.batch_size <= split.room:
                split.graphs[size] = self._graphs.capture(partial(self._enqueue_steps, split, size))

    def _launch_graphs(self, split: DeviceSplit, steps: int) -> int:
        """Launch graphs, if there are any, for `steps` whole steps; return where the cursor is after them."""
        left = steps
        for size, graph in split.graphs.items():
            for _ in range(left // size):
                graph.launch(self._stream)
            left %= size
        return (steps - left) * self.batch_size

    def _enqueue_steps(self, split: DeviceSplit, steps: int, stream: Any) -> None:
        """Enqueue whole steps from the cursor on, then move it past them."""
        for i in range(steps):
            self._enqueue(stream, split, i * self.batch_size, self.batch_size, i % EVERY == 0)
        kernels.advance(1).launch(1, stream, split.order, u32(steps * self.batch_size))

    def _enqueue(self, stream: Any, split: DeviceSplit, ahead: int, count: int, clocked: bool) -> None:
        """Enqueue one step, with readings of the clock if there is one."""
        step, clocks = BatchStep(stream, split, ahead, count, trains=True), self._clocks if clocked else None
        if clocks:
            clocks.begin(stream)
        self._run(step, clocks)
        self._update(step)
        if clocks:
            clocks.charge(stream, UPDATE)

    def _update(self, step: BatchStep, gradient: Tensor | None = None) -> None:
        """Enqueue the end of a step, the optimizer's; or where a `gradient` is given, what fills that instead."""
        for optimizer, table in self._tables.items():
            kernel = kernels.update(optimizer if gradient is None else None, self.batch_size)
            target = self._parameters if gradient is None else gradient
            slots = (*self._slots, self._nothing, self._nothing)[:2]
            arrays = self._arena.memory, table, target, *slots, step.split.rates
            kernel.launch(table.shape[0], step.stream, *arrays, *step.place)

    def _run(self, step: BatchStep, clocks: GpuClocks | None = None) -> None:
        """Enqueue a step but for its update: losses, hits and partial gradients."""
        passes = [(FORWARD, node, node.forward) for node in self._nodes]
        passes += [(BACKWARD, node, node.backward) for node in reversed(self._nodes)]
        for what, node, run in passes:
            run(step)
            if clocks and what in node.parts:
                clocks.charge(step.stream, node.parts[what])

    def _send(self, split: DeviceSplit, order: np.ndarray, shown: np.ndarray | None = None) -> None:
        """Put the images of the steps to come on the device, the first of them first, and what these steps draw from.

        Their places in the data set, `shown`, are needed in training alone.
        """
        device.copy(np.concatenate([[0], order]).astype(np.uint32), split.order)
        if self._draws and shown is not None:
            steps = self._step + 1 + np.arange(-(-len(order) // self.batch_size))
            keys = [layer_key(self._seed, steps, name) for name in self._draws]
            device.copy(np.stack(keys, axis=1).astype(np.uint32), split.keys)
            device.copy(shown.astype(np.uint32), split.shown)
        device.synchronize()

    def _totals(self, split: DeviceSplit, count: int) -> Totals:
        """Return the totals of a pass, all work being done."""
        blocks = -(-count // BLOCK)
        kernels.sum_up(BLOCK).launch(blocks, self._stream, split.outcomes, split.sums, u32(count))
        device.synchronize()
        loss, hits = device.to_host(split.sums[:blocks]).sum(axis=0, dtype=np.float64)
        return Totals(float(loss), int(hits), count)


def segments(partials: list[Partials], within: list[slice]) -> np.ndarray:
    """Return the table of `kernels.update`, a row per block, uint32 (blocks, SEGMENT), for some parts of the buffer."""
    rows: list[tuple[int, ...]] = []
    for sums, part in itertools.product(partials, within):
        threads = sum_threads(sums.parts)
        wide = BLOCK // threads
        end = min(sums.size, part.stop - sums.offset)
        for first in range(max(0, part.start - sums.offset), end, wide):
            many = min(wide, end - first)
            rows.append((sums.offset + first, many, sums.base + first, sums.size, sums.parts, threads))
    return np.array(rows, np.uint32)
