"""Run a network's layers one after another on an `Ops`: how most backends exist."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from cnnexp.backends.protocol import Array, Handle, Ops, Program, Rate, State, Watch, rate_of_steps
from cnnexp.backends.stages import Chain, Run, unwatched
from cnnexp.backends.state import PendingAverages, complete, optimizers
from cnnexp.network import Network, Stage
from cnnexp.network.losses import Loss, Totals, check_loss
from cnnexp.optimizers import Optimizer


def as_float32(images: np.ndarray) -> np.ndarray:
    """Return images as float32 (N, ...): uint8 stands for value / 255."""
    if images.dtype == np.uint8:
        return images.astype(np.float32) / np.float32(255)
    return np.ascontiguousarray(images, np.float32)


T = TypeVar("T")


def in_scope(method: Callable[..., T]) -> Callable[..., T]:
    """Run a method of `FlatProgram` inside a new context of its scope."""

    @functools.wraps(method)
    def wrapped(self: FlatProgram, *arguments: Any) -> T:
        with self._scope():
            return method(self, *arguments)

    return wrapped


@dataclass(frozen=True)
class Split(Generic[Array]):
    """A loaded split: images float32 (N, *input_shape) and labels int32 (N,), where the ops want them."""

    images: Array
    labels: Array

    def __len__(self) -> int:
        return self.images.shape[0]


class FlatProgram(Program[Handle], Generic[Array, Handle]):
    """What programs (see `protocol`) share whose parameters and optimizer state lie in flat arrays of an `Ops`.

    `release` is called once, by `close`; `scope` makes the context in which they compute, e.g. with some threads.
    """

    def __init__(
        self,
        ops: Ops[Array],
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
        self._watch: Watch = unwatched
        zeros = np.zeros(network.parameter_count, np.float32)
        self._gradient = ops.to_device(zeros.copy())
        self._kept = {name: ops.to_device(zeros.copy()) for name in ("parameters", *optimizer.slots)}  # see `state`
        self._parameters, *self._slots = self._kept.values()
        self._updates = [
            (ops.updater(own), self._parameters[part], self._gradient[part], tuple(slot[part] for slot in self._slots))
            for part, own in optimizers(network, optimizer)
        ]
        self._running = ops.to_device(np.zeros(max(network.running_count, 1), np.float32))
        if network.running:
            self._kept["running"] = self._running
        self.pending: PendingAverages = PendingAverages(
            network, lambda: ops.to_host(self._running), lambda averages: ops.copy(averages, self._running)
        )
        self._step, self._seed = 0, 0
        self._make()
        self.compile_s = time.perf_counter() - started

    def _make(self) -> None:
        """Compile everything, and run it once, so that nothing is compiled while timed."""
        raise NotImplementedError

    @in_scope
    def apply(self, gradient: np.ndarray, rate: float) -> None:
        self.pending.commit()
        self._ops.copy(gradient, self._gradient)
        self._apply(rate)

    @in_scope
    def state(self) -> State:
        state = {name: self._ops.to_host(array) for name, array in self._kept.items()}
        state["step"] = np.array(self._step, np.int64)
        if self.network.draws:
            state["seed"] = np.array(self._seed, np.int64)
        return state

    @in_scope
    def restore(self, state: State) -> None:
        whole = complete(state, self.network, self.optimizer)
        for name, array in self._kept.items():
            self._ops.copy(np.ascontiguousarray(whole[name], np.float32), array)
        self._step, self._seed = int(whole["step"]), int(whole.get("seed", 0))
        self.pending.drop()

    def close(self) -> None:
        self._release()
        self._release = lambda: None

    def _apply(self, rate: float) -> None:
        self._step += 1
        with self._watch("parameters", "update"):
            for update, w, g, slots in self._updates:
                update(w, g, slots, rate, self._step)


class LayerwiseProgram(FlatProgram[Array, Split[Array]]):
    """A `Program` (see `protocol`) that runs the network's stages one after another: see `stages`."""

    def _make(self) -> None:
        self._x = self._ops.empty((self.batch_size, *self.network.input_shape), np.float32)
        self._labels = self._ops.empty((self.batch_size,), np.int32)
        self._chain = Chain(self._ops, self.network.stages, self.batch_size, self._x, None)
        self._warm_up(1)

    @in_scope
    def load(self, images: np.ndarray, labels: np.ndarray) -> Split[Array]:
        return Split(self._ops.to_device(as_float32(images)), self._ops.to_device(labels.astype(np.int32)))

    @in_scope
    def train(self, handle: Split[Array], order: np.ndarray, rate: Rate, images: np.ndarray | None = None) -> Totals:
        """As `Program.train`; `images` are their places in the data set, where the handle shows only a part of it."""
        ops, count = self._ops, len(order)
        self.pending.drop()
        places, where = self._places(order, images)
        losses, hits = ops.empty((count,), np.float32), ops.empty((count,), np.uint8)
        for step, step_rate in enumerate(rate_of_steps(rate, count, self.batch_size)):
            batch = slice(step * self.batch_size, min((step + 1) * self.batch_size, count))
            self._gradients(handle, places[batch], where[batch], losses[batch], hits[batch])
            self._apply(float(step_rate))
        return _totals(ops.to_host(losses), ops.to_host(hits))

    @in_scope
    def gradients(
        self, handle: Split[Array], indices: np.ndarray, images: np.ndarray | None = None
    ) -> tuple[Totals, np.ndarray]:
        """As `Program.gradients`; `images` as for `train`."""
        ops, count = self._ops, len(indices)
        losses, hits = ops.empty((count,), np.float32), ops.empty((count,), np.uint8)
        with self.pending.hold():
            self._gradients(handle, *self._places(indices, images), losses, hits)
        return _totals(ops.to_host(losses), ops.to_host(hits)), ops.to_host(self._gradient)

    @in_scope
    def predict(self, handle: Split[Array]) -> np.ndarray:
        ops = self._ops
        scores = np.empty((len(handle), *self.network.output_shape), np.float32)
        for start in range(0, len(handle), self.batch_size):
            batch = slice(start, min(start + self.batch_size, len(handle)))
            scores[batch] = ops.to_host(self._chain.forward(self._run(batch.stop - start), handle.images[batch]))
        return scores

    @in_scope
    def outputs(self, handle: Split[Array]) -> list[tuple[Stage, np.ndarray]]:
        """Return each stage with its output in `predict`, (N, *output_shape), for at most batch_size images."""
        outputs = self._chain.outputs(self._run(len(handle)), handle.images)
        return [(stage, np.array(self._ops.to_host(y))) for stage, y in outputs]

    @in_scope
    def forward(
        self, handle: Split[Array], indices: np.ndarray, trains: bool, images: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the outputs (N, *output_shape) of at most batch_size images.

        If it `trains`, `backward` goes on; together they are `gradients`, and change no state either.
        """
        places, where = self._places(indices, images)
        x, labels = self._inputs(len(indices))
        self._ops.gather(handle.images, handle.labels, places, x, labels)
        self._begun = self._run(len(indices), trains, where)
        with self.pending.hold() if trains else contextlib.nullcontext():
            return self._ops.to_host(self._chain.forward(self._begun, x))

    @in_scope
    def backward(self, d_outputs: np.ndarray) -> np.ndarray:
        """Return the flat gradient, given that of the outputs of the last `forward`, (N, *output_shape)."""
        count = len(d_outputs)
        self._ops.copy(d_outputs, self._chain.gradient(count))
        self._chain.backward(self._begun, self._inputs(count)[0], None)
        return self._ops.to_host(self._gradient)

    def watch(self, watch: Watch | None) -> bool:
        @contextlib.contextmanager
        def until_done(layer: str, what: str) -> Iterator[None]:
            with made(layer, what):
                yield
                with self._scope():  # a copy to the host of what was written last waits until all work is done
                    self._ops.to_host(self._parameters[:1])

        made = watch or unwatched
        self._watch = until_done if watch else unwatched
        return True

    def _warm_up(self, images: int) -> None:
        """Run one step on zeros and look at them, so that every kernel is compiled before anything is timed."""
        zeros = self.load(np.zeros((images, *self.network.input_shape), np.float32), np.zeros(images, np.int32))
        self.train(zeros, np.arange(images), 0.0)
        self.predict(zeros)
        self.restore({"parameters": np.zeros(self.network.parameter_count, np.float32)})

    def _places(self, order: np.ndarray, images: np.ndarray | None) -> tuple[Array, Array]:
        """Return the places in a handle and in the data set, where the ops want them."""
        places = self._ops.to_device(np.ascontiguousarray(order, np.int64))
        return places, places if images is None else self._ops.to_device(np.ascontiguousarray(images, np.int64))

    def _gradients(self, handle: Split[Array], places: Array, images: Array, losses: Array, hits: Array) -> None:
        """Leave the mean gradient of one batch in the flat gradient buffer."""
        ops, count = self._ops, places.shape[0]
        run = self._run(count, True, images)
        x, labels = self._inputs(count)
        with self._watch("batch", "gather"):
            ops.gather(handle.images, handle.labels, places, x, labels)
        scores = self._forward(run, x)
        d_scores = self._chain.gradient(count)
        with self._watch("loss", "forward"):
            ops.loss(self.loss, scores, labels, 1.0 / count, d_scores, losses, hits)
        self._backward(run, x)

    def _forward(self, run: Run[Array], x: Array) -> Array:
        """Return the scores of a batch that is trained on."""
        return self._chain.forward(run, x)

    def _backward(self, run: Run[Array], x: Array) -> None:
        """Fill the flat gradient, given that of the scores."""
        self._chain.backward(run, x, None)

    def _run(self, count: int, trains: bool = False, images: Array | None = None) -> Run[Array]:
        arrays = self._parameters, self._gradient, self._running
        return Run(count, *arrays, trains, self._seed, self._step + 1, images, self._watch)

    def _inputs(self, count: int) -> tuple[Array, Array]:
        """Return the buffers of x (N, *input_shape) and of the labels (N,) of `count` images."""
        whole = count == self.batch_size
        return (self._x, self._labels) if whole else (self._x[:count], self._labels[:count])


def _totals(losses: np.ndarray, hits: np.ndarray) -> Totals:
    return Totals(float(losses.sum(dtype=np.float64)), int(hits.sum(dtype=np.int64)), len(losses))
