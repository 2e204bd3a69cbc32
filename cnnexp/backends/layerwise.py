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
from cnnexp.backends.stages import Chain, Run, Watch, unwatched
from cnnexp.errors import CheckpointError
from cnnexp.network import Network
from cnnexp.network.losses import Loss, Totals, check_loss
from cnnexp.optimizers import Optimizer


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
    """A `Program` (see `protocol`) that runs the network's stages one after another: see `stages`.

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
        self.watch: Watch = unwatched
        self._update = ops.updater(optimizer)
        zeros = np.zeros(network.parameter_count, np.float32)
        self._parameters = ops.to_device(zeros.copy())
        self._gradient = ops.to_device(zeros.copy())
        self._slots = tuple(ops.to_device(zeros.copy()) for _ in optimizer.slots)
        self._step = 0
        self._x = ops.empty((batch_size, *network.input_shape), np.float32)
        self._labels = ops.empty((batch_size,), np.int32)
        self._chain = Chain(ops, network.stages, batch_size, self._x, None)
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
        x, labels = self._inputs(len(indices))
        ops.gather(handle.images, handle.labels, ops.to_device(np.ascontiguousarray(indices, np.int64)), x, labels)
        return ops.to_host(self._forward(x))

    @_in_scope
    def backward(self, d_outputs: np.ndarray) -> np.ndarray:
        """Return the flat gradient, given that of the outputs of the last `forward`, (N, *output_shape)."""
        count = len(d_outputs)
        self._ops.copy(d_outputs, self._chain.gradient(count))
        self._backward(self._inputs(count)[0])
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
        x, labels = self._inputs(count)
        with self.watch("batch", "gather"):
            ops.gather(handle.images, handle.labels, indices, x, labels)
        scores = self._forward(x)
        d_scores = self._chain.gradient(count)
        with self.watch("loss", "forward"):
            ops.loss(self.loss, scores, labels, 1.0 / count, d_scores, losses, hits)
        self._backward(x)

    def _apply(self, rate: float) -> None:
        self._step += 1
        with self.watch("parameters", "update"):
            self._update(self._parameters, self._gradient, self._slots, rate, self._step)

    def _forward(self, x: Array) -> Array:
        """Return the scores of x (N, *input_shape), filling the activation buffers."""
        return self._chain.forward(self._run(x.shape[0]), x)

    def _backward(self, x: Array) -> None:
        """Fill the flat gradient buffer, from the last layer's gradient back to the first layer with parameters."""
        self._chain.backward(self._run(x.shape[0]), x, None)

    def _run(self, count: int) -> Run:
        return Run(count, self._parameters, self._gradient, self.watch)

    def _inputs(self, count: int) -> tuple[Array, Array]:
        """Return the buffers of x (N, *input_shape) and of the labels (N,) of `count` images."""
        whole = count == self.batch_size
        return (self._x, self._labels) if whole else (self._x[:count], self._labels[:count])


def _totals(losses: np.ndarray, hits: np.ndarray) -> Totals:
    return Totals(float(losses.sum(dtype=np.float64)), int(hits.sum(dtype=np.int64)), len(losses))
