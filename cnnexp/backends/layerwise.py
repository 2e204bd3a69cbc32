"""Run a network's layers one after another on an `Ops`: how most backends exist."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from cnnexp.backends.protocol import Array, Ops, State
from cnnexp.errors import CheckpointError
from cnnexp.network import AvgPool2d, Conv2d, Flatten, Linear, MaxPool2d, Network, ReLU, Sigmoid, Stage
from cnnexp.network.losses import Loss, Totals, check_loss
from cnnexp.optimizers import Optimizer

Watch = Callable[[str, str], AbstractContextManager]
"""Makes the context in which a pass of a layer runs, e.g. ("conv1", "backward"): where a profiler puts its clock."""

_UNWATCHED: AbstractContextManager = contextlib.nullcontext()


def as_float32(images: np.ndarray) -> np.ndarray:
    """Return images as float32 (N, ...): uint8 stands for value / 255."""
    if images.dtype == np.uint8:
        return images.astype(np.float32) / np.float32(255)
    return np.ascontiguousarray(images, np.float32)


def _in_scope(method):
    """Run a method of `LayerwiseProgram` inside a new context of its scope."""

    @functools.wraps(method)
    def wrapped(self, *arguments):
        with self._scope():
            return method(self, *arguments)

    return wrapped


@dataclass(frozen=True)
class Split:
    """A loaded split: images float32 (N, *input_shape) and labels int32 (N,), where the ops want them."""

    images: Array
    labels: Array

    def __len__(self) -> int:
        return self.images.shape[0]


class LayerwiseProgram:
    """A `Program` (see `protocol`) that keeps one activation and one gradient buffer per layer.

    Args:
        ops: the layers' mathematics.
        release: called once by `close`.
        scope: makes the context in which anything is computed, e.g. with a number of threads.

    Attributes:
        watch: may be set by who wants to know what a step does; besides the layers it hears of ("batch", "gather"),
            ("loss", "forward") and ("parameters", "update").
    """

    def __init__(
        self,
        ops: Ops,
        network: Network,
        loss: Loss,
        optimizer: Optimizer,
        batch_size: int,
        release: Callable[[], None] = lambda: None,
        scope: Callable[[], AbstractContextManager] = contextlib.nullcontext,
    ) -> None:
        check_loss(network, loss)
        started = time.perf_counter()
        self.network, self.loss, self.optimizer, self.batch_size = network, loss, optimizer, batch_size
        self._ops, self._release, self._scope = ops, release, scope
        self.watch: Watch = lambda layer, what: _UNWATCHED
        self._update = ops.updater(optimizer)
        zeros = np.zeros(network.parameter_count, np.float32)
        self._parameters = ops.to_device(zeros.copy())
        self._gradient = ops.to_device(zeros.copy())
        self._slots = tuple(ops.to_device(zeros.copy()) for _ in optimizer.slots)
        self._step = 0
        self._buffers = _Buffers(ops, network, batch_size)
        self._warm_up()
        self.compile_s = time.perf_counter() - started

    def load(self, images: np.ndarray, labels: np.ndarray) -> Split:
        return Split(self._ops.to_device(as_float32(images)), self._ops.to_device(labels.astype(np.int32)))

    @_in_scope
    def train(self, handle: Split, order: np.ndarray, rate: float) -> Totals:
        ops, count = self._ops, len(order)
        order = ops.to_device(np.ascontiguousarray(order, np.int64))
        losses, hits = ops.empty((count,), np.float32), ops.empty((count,), np.uint8)
        for start in range(0, count, self.batch_size):
            batch = slice(start, min(start + self.batch_size, count))
            self._gradients(handle, order[batch], losses[batch], hits[batch])
            self._apply(rate)
        return _totals(ops.to_host(losses), ops.to_host(hits))

    @_in_scope
    def gradients(self, handle: Split, indices: np.ndarray) -> tuple[Totals, np.ndarray]:
        ops, count = self._ops, len(indices)
        losses, hits = ops.empty((count,), np.float32), ops.empty((count,), np.uint8)
        self._gradients(handle, ops.to_device(np.ascontiguousarray(indices, np.int64)), losses, hits)
        return _totals(ops.to_host(losses), ops.to_host(hits)), ops.to_host(self._gradient)

    @_in_scope
    def apply(self, gradient: np.ndarray, rate: float) -> None:
        self._ops.copy(gradient, self._gradient)
        self._apply(rate)

    @_in_scope
    def predict(self, handle: Split) -> np.ndarray:
        ops = self._ops
        scores = np.empty((len(handle), *self.network.output_shape), np.float32)
        for start in range(0, len(handle), self.batch_size):
            batch = slice(start, min(start + self.batch_size, len(handle)))
            scores[batch] = ops.to_host(self._forward(handle.images[batch]))
        return scores

    @_in_scope
    def forward(self, handle: Split, indices: np.ndarray) -> np.ndarray:
        """Return the outputs (N, *output_shape) of at most batch_size images; `backward` goes on from them."""
        ops = self._ops
        x, labels = self._buffers.inputs(len(indices))
        ops.gather(handle.images, handle.labels, ops.to_device(np.ascontiguousarray(indices, np.int64)), x, labels)
        return ops.to_host(self._forward(x))

    @_in_scope
    def backward(self, d_outputs: np.ndarray) -> np.ndarray:
        """Return the flat gradient, given that of the outputs of the last `forward`, (N, *output_shape)."""
        count = len(d_outputs)
        self._ops.copy(d_outputs, self._buffers.gradients(count)[-1])
        self._backward(self._buffers.inputs(count)[0])
        return self._ops.to_host(self._gradient)

    def state(self) -> State:
        to_host = self._ops.to_host
        slots = {name: to_host(slot) for name, slot in zip(self.optimizer.slots, self._slots, strict=True)}
        return {"parameters": to_host(self._parameters), "step": np.int64(self._step), **slots}

    def restore(self, state: State) -> None:
        size = self.network.parameter_count
        for name, target in zip(("parameters", *self.optimizer.slots), (self._parameters, *self._slots), strict=True):
            source = state[name] if name == "parameters" else state.get(name, np.zeros(size, np.float32))
            if source.shape != (size,):
                raise CheckpointError(f"state {name!r} has shape {source.shape}, the network needs ({size},)")
            self._ops.copy(np.ascontiguousarray(source, np.float32), target)
        self._step = int(state.get("step", 0))

    def synchronize(self) -> None:
        """Wait until all work is done: a copy to the host of what was written last."""
        self._ops.to_host(self._parameters[:1])

    def close(self) -> None:
        self._release()
        self._release = lambda: None

    def _warm_up(self) -> None:
        """Run one step on zeros, so that every kernel is compiled before anything is timed."""
        zeros = np.zeros((1, *self.network.input_shape), np.float32)
        self.train(self.load(zeros, np.zeros(1, np.int32)), np.zeros(1, np.int64), 0.0)
        self.restore({"parameters": np.zeros(self.network.parameter_count, np.float32)})

    def _gradients(self, handle: Split, indices: Array, losses: Array, hits: Array) -> None:
        """Leave the mean gradient of one batch in the flat gradient buffer."""
        ops, count = self._ops, indices.shape[0]
        x, labels = self._buffers.inputs(count)
        with self.watch("batch", "gather"):
            ops.gather(handle.images, handle.labels, indices, x, labels)
        scores = self._forward(x)
        d_scores = self._buffers.gradients(count)[-1]
        with self.watch("loss", "forward"):
            ops.loss(self.loss, scores, labels, 1.0 / count, d_scores, losses, hits)
        self._backward(x)

    def _apply(self, rate: float) -> None:
        self._step += 1
        with self.watch("parameters", "update"):
            self._update(self._parameters, self._gradient, self._slots, rate, self._step)

    def _forward(self, x: Array) -> Array:
        """Return the scores of x (N, *input_shape), filling the activation buffers."""
        count = x.shape[0]
        for stage, y, argmax in zip(
            self.network.stages, self._buffers.activations(count), self._buffers.argmaxes(count), strict=True
        ):
            if isinstance(stage.layer, Flatten):
                x = x.reshape(y.shape)  # not y: where it opens the network, x need not be the gathered batch
            else:
                with self.watch(stage.name, "forward"):
                    forward_stage(self._ops, stage, self._parameters, x, y, argmax)
                x = y
        return x

    def _backward(self, x: Array) -> None:
        """Fill the flat gradient buffer, from the last layer's gradient back to the first layer with parameters."""
        count = x.shape[0]
        stages, activations = self.network.stages, self._buffers.activations(count)
        d_activations, argmaxes = self._buffers.gradients(count), self._buffers.argmaxes(count)
        first = next(i for i, stage in enumerate(stages) if stage.weight)
        for i in range(len(stages) - 1, first - 1, -1):
            source = activations[i - 1] if i else x
            dx = d_activations[i - 1] if i > first else None
            with self.watch(stages[i].name, "backward"):
                backward_stage(
                    self._ops,
                    stages[i],
                    self._parameters,
                    self._gradient,
                    source,
                    activations[i],
                    d_activations[i],
                    argmaxes[i],
                    dx,
                )


def forward_stage(ops: Ops, stage: Stage, parameters: Array, x: Array, y: Array, argmax: Array | None) -> None:
    """Run one layer on x (N, *input_shape), filling y and, for a max-pool, argmax."""
    weight, bias = _views(stage, parameters)
    match stage.layer:
        case Conv2d(stride=stride):
            ops.conv2d(x, weight, bias, stride, stage.pads, y)
        case ReLU():
            ops.relu(x, y)
        case Sigmoid():
            ops.sigmoid(x, y)
        case MaxPool2d(pool, stride):
            ops.max_pool(x, pool, stride or pool, stage.pads, y, argmax)
        case AvgPool2d(pool, stride):
            ops.avg_pool(x, pool, stride or pool, stage.pads, y)
        case Linear():
            ops.linear(x, weight, bias, y)
        case Flatten():
            pass  # y is a view of x's buffer


def backward_stage(
    ops: Ops,
    stage: Stage,
    parameters: Array,
    gradient: Array,
    x: Array,
    y: Array,
    dy: Array,
    argmax: Array | None,
    dx: Array | None,
) -> None:
    """Run one layer backwards, filling dx and its part of the flat gradient; arrays as in `forward_stage`."""
    weight, _ = _views(stage, parameters)
    dw, db = _views(stage, gradient)
    match stage.layer:
        case Conv2d(stride=stride):
            ops.conv2d_backward(x, weight, dy, stride, stage.pads, dx, dw, db)
        case ReLU():
            ops.relu_backward(y, dy, dx)
        case Sigmoid():
            ops.sigmoid_backward(y, dy, dx)
        case MaxPool2d(pool, stride):
            ops.max_pool_backward(argmax, dy, pool, stride or pool, stage.pads, dx)
        case AvgPool2d(pool, stride):
            ops.avg_pool_backward(dy, pool, stride or pool, stage.pads, dx)
        case Linear():
            ops.linear_backward(x, weight, dy, dx, dw, db)
        case Flatten():
            pass  # dx is a view of dy's buffer


def _views(stage: Stage, flat: Array) -> tuple[Array | None, Array | None]:
    """Return the weight's and the bias's part of a flat buffer, None where the layer has none."""
    return stage.weight and stage.weight.view(flat), stage.bias and stage.bias.view(flat)


class _Buffers:
    """The arrays of one batch, allocated once; shorter batches get views of their first images."""

    def __init__(self, ops: Ops, network: Network, batch_size: int) -> None:
        self._x = ops.empty((batch_size, *network.input_shape), np.float32)
        self._labels = ops.empty((batch_size,), np.int32)
        self._activations: list[Array] = []
        self._gradients: list[Array] = []
        self._argmaxes: list[Array | None] = []
        for stage in network.stages:
            shape = (batch_size, *stage.output_shape)
            if isinstance(stage.layer, Flatten):
                # a Flatten that opens the network flattens the gathered batch itself
                source = self._activations[-1] if self._activations else self._x
                gradient = self._gradients[-1] if self._gradients else ops.empty(shape, np.float32)
                self._activations.append(source.reshape(shape))
                self._gradients.append(gradient.reshape(shape))
            else:
                self._activations.append(ops.empty(shape, np.float32))
                self._gradients.append(ops.empty(shape, np.float32))
            pools = isinstance(stage.layer, MaxPool2d)
            self._argmaxes.append(ops.empty(shape, np.int32) if pools else None)
        self._batch_size = batch_size

    def inputs(self, count: int) -> tuple[Array, Array]:
        """Return x (N, *input_shape) and labels (N,) of `count` images."""
        return self._first(self._x, count), self._first(self._labels, count)

    def activations(self, count: int) -> list[Array]:
        """Return the output of every layer, (N, *output_shape)."""
        return [self._first(a, count) for a in self._activations]

    def gradients(self, count: int) -> list[Array]:
        """Return the gradient of every layer's output, (N, *output_shape)."""
        return [self._first(a, count) for a in self._gradients]

    def argmaxes(self, count: int) -> list[Array | None]:
        """Return the argmax of every max-pool, (N, U, V, C), None for other layers."""
        return [None if a is None else self._first(a, count) for a in self._argmaxes]

    def _first(self, array: Array, count: int) -> Array:
        return array if count == self._batch_size else array[:count]


def _totals(losses: np.ndarray, hits: np.ndarray) -> Totals:
    return Totals(float(losses.sum(dtype=np.float64)), int(hits.sum(dtype=np.int64)), len(losses))
