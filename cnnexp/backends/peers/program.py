"""What the programs of both frameworks share: the contract's borders, around operations that are their own."""

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from cnnexp.backends.protocol import Program, Rate, State, rate_of_steps
from cnnexp.backends.state import PendingAverages, complete
from cnnexp.network import Network
from cnnexp.network.losses import Loss, Totals, check_loss
from cnnexp.optimizers import Optimizer

Scope = Callable[[], AbstractContextManager]


class PeerProgram(Program):
    """A `Program` (see `protocol`) of a framework's tensors: a handle is the images and the labels as such.

    `make` fills `tensors`, the parameters in the order of the flat buffer and, by slot, what the optimizer keeps of
    each, and `averages`, the running averages in their order. `scope` makes the context in which anything is computed.
    Random numbers follow from `seed`, `now`, the step that is being taken, and `images`, their places in the data set.
    """

    def __init__(
        self, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int, scope: Scope = contextlib.nullcontext
    ) -> None:
        check_loss(network, loss)
        started = time.perf_counter()
        self.network, self.loss, self.optimizer, self.batch_size = network, loss, optimizer, batch_size
        self.tensors: dict[str, list[Any]] = {"parameters": []}
        self.averages: list[Any] = []
        self.seed, self.now, self.scope = 0, 1, scope
        self.images: Any = None
        self.pending: PendingAverages = PendingAverages(network, lambda: self._flat(self.averages), self._set_running)
        self.make()
        self._warm_up()
        self.compile_s = time.perf_counter() - started

    def make(self) -> None:
        raise NotImplementedError

    def step(self, handle: Any, indices: np.ndarray, rate: float) -> tuple[Any, Any]:
        """Take the step `now` on the images `indices` (int64); return the summed loss and the hits, as tensors."""
        raise NotImplementedError

    def differentiate(self, handle: Any, indices: np.ndarray) -> tuple[Any, Any, Sequence[Any]]:
        """Return the summed loss and the hits of a batch, as tensors, and the gradient of each parameter."""
        raise NotImplementedError

    def update(self, parts: list[np.ndarray], rate: float) -> None:
        """Take the step `now` with the gradient of each parameter, in our shapes."""
        raise NotImplementedError

    def scores(self, images: Any) -> np.ndarray:
        """Return the scores of at most a batch of images."""
        raise NotImplementedError

    def assign(self, tensor: Any, array: np.ndarray) -> None:
        """Overwrite a tensor with an array in our shape and layout."""
        raise NotImplementedError

    def array(self, tensor: Any) -> np.ndarray:
        """Return a tensor as an array in our shape and layout."""
        return np.asarray(tensor, np.float32)

    def train(self, handle: Any, order: np.ndarray, rate: Rate) -> Totals:
        self.pending.drop()
        found, order = [], np.ascontiguousarray(order, np.int64)
        with self.scope():
            for step, step_rate in enumerate(rate_of_steps(rate, len(order), self.batch_size)):
                indices = order[step * self.batch_size : (step + 1) * self.batch_size]
                found.append(self.step(handle, indices, float(step_rate)))
                self.now += 1
        return Totals(sum(float(loss) for loss, _ in found), sum(int(hits) for _, hits in found), len(order))

    def gradients(self, handle: Any, indices: np.ndarray) -> tuple[Totals, np.ndarray]:
        with self.scope(), self.pending.hold():
            loss, hits, gradients = self.differentiate(handle, np.ascontiguousarray(indices, np.int64))
        return Totals(float(loss), int(hits), len(indices)), self._flat(gradients)

    def apply(self, gradient: np.ndarray, rate: float) -> None:
        self.pending.commit()
        with self.scope():
            self.update(self._parts(gradient), rate)
        self.now += 1

    def predict(self, handle: Any) -> np.ndarray:
        images, batch = handle[0], self.batch_size
        with self.scope():
            return np.concatenate([self.scores(images[n : n + batch]) for n in range(0, len(images), batch)])

    def state(self) -> State:
        state = {name: self._flat(tensors) for name, tensors in self.tensors.items()}
        state["step"] = np.array(self.now - 1, np.int64)
        if self.averages:
            state["running"] = self._flat(self.averages)
        if self.network.draws:
            state["seed"] = np.array(self.seed, np.int64)
        return state

    def restore(self, state: State) -> None:
        whole = complete(state, self.network, self.optimizer)
        self.pending.drop()
        self.seed, self.now = int(whole.get("seed", 0)), int(whole["step"]) + 1
        if self.averages:
            self._set_running(whole["running"])
        for name, tensors in self.tensors.items():
            for tensor, part in zip(tensors, self._parts(whole[name]), strict=True):
                self.assign(tensor, part)

    def _warm_up(self) -> None:
        """Run everything once, so that nothing is compiled while timed."""
        zeros = self.load(np.zeros((1, *self.network.input_shape), np.float32), np.zeros(1, np.int32))
        _, gradient = self.gradients(zeros, np.zeros(1, np.int64))
        self.apply(gradient, 0.0)
        self.train(zeros, np.zeros(1, np.int64), 0.0)
        self.predict(zeros)
        self.restore({"parameters": np.zeros(self.network.parameter_count, np.float32)})

    def _set_running(self, running: np.ndarray) -> None:
        for average, part in zip(self.averages, self.network.running, strict=True):
            self.assign(average, part.view(running))

    def _flat(self, tensors: Sequence[Any]) -> np.ndarray:
        return np.concatenate([self.array(tensor).ravel() for tensor in tensors])

    def _parts(self, flat: np.ndarray) -> list[np.ndarray]:
        return [parameter.view(np.asarray(flat, np.float32)) for parameter in self.network.parameters]
