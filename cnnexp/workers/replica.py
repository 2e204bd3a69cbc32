"""One worker's part in training: what every worker runs, at the same time, with its own share of the images.

All three ways make every worker end each exchange with the same parameters, bit for bit, since each sum is formed once
and sent to all. Where layers keep running averages (BatchNorm2d), a batch's mean and variance are of each
worker's own images; the averages move to the mean of where the workers' shares move them. Shares may be unequal, and
empty where a short last batch has fewer images than there are workers.
"""

import dataclasses
import statistics
import time
import timeit
from typing import Any, NamedTuple

import numpy as np

from cnnexp.backends.protocol import Backend, Program, Rate, State, rate_of_steps
from cnnexp.network import Network
from cnnexp.network.losses import Loss, Totals
from cnnexp.optimizers import Optimizer
from cnnexp.system.cores import usable_cores
from cnnexp.workers.collective import Collective, Timed, share, shares

NOTHING = Totals(0.0, 0, 0)


class Spec(NamedTuple):
    """What the workers train, as for `Backend.compile`, and how they keep together."""

    backend: Backend
    network: Network
    loss: Loss
    optimizer: Optimizer
    batch_size: int
    sync: str  # `gradients`, `parameters` or `hybrid`
    period: int | None = None  # with `parameters`, batches between two averages; None averages once an epoch

    def compile(self, batch_size: int) -> Program:
        """Compile the network as it is, for batches of another size."""
        return self.backend.compile(self.network, self.loss, self.optimizer, batch_size)


class Loaded(NamedTuple):
    """A split on one worker."""

    whole: Any  # the program's handle on all images, for training
    images: np.ndarray
    labels: np.ndarray
    epoch: int  # images of an epoch over it, or over the larger one that it is some of


class Replica:
    """A worker that averages the gradient at every step: all are one with the whole batch, up to rounding.

    It is asked as a `Program` is, all workers at the same time; a handle is a number. The other ways to keep together
    inherit from it, with a `program` that is compiled for their share of a batch.
    """

    def __init__(self, spec: Spec, collective: Collective, program: Program | None = None) -> None:
        self.program = program or spec.compile(shares(spec.batch_size, collective.size)[0])
        self.collective, self.batch_size = Timed(collective), spec.batch_size
        self._splits, self._rows = list[Loaded](), dict[int, Any]()
        self._buffer = np.empty(self.program.network.parameter_count + 3, np.float32)  # a gradient, then totals
        self._train_s, self._communicate_s, self._images = 0.0, 0.0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.program, name)

    def load(self, images: np.ndarray, labels: np.ndarray) -> int:
        return self.refill(None, images, labels, len(labels))

    def refill(self, handle: int | None, images: np.ndarray, labels: np.ndarray, epoch: int) -> int:
        """As `Program.refill`, on every worker: rank 0 makes the images and sends them."""
        if handle is None:
            self._splits.append(Loaded(self.program.load(images, labels), images, labels, epoch))
            return len(self._splits) - 1
        whole = self.program.refill(self._splits[handle].whole, images, labels, epoch)
        self._splits[handle] = Loaded(whole, images, labels, epoch)
        return handle

    def train(self, handle: int, order: np.ndarray, rate: Rate) -> Totals:
        """As `Program.train`; the totals are of all workers."""
        started, communicated = time.perf_counter(), self.collective.seconds
        totals = self._train(self._splits[handle], order, rate_of_steps(rate, len(order), self.batch_size))
        self._train_s += time.perf_counter() - started
        self._communicate_s += self.collective.seconds - communicated
        return totals

    def gradients(self, handle: int, indices: np.ndarray) -> tuple[Totals, np.ndarray]:
        """As `Program.gradients`: each worker computes its share of the batch, and all get the mean."""
        totals = self._gradients(self._splits[handle], indices)
        return totals, self._buffer[:-3].copy()

    def predict(self, handle: int) -> np.ndarray:
        """As `Program.predict`: each worker scores its rows."""
        split, outputs = self._splits[handle], self.program.network.output_shape[0]
        count, size = len(split.labels), self.collective.size
        mine = share(count, size, self.collective.rank)
        scores = np.empty((0, outputs), np.float32)
        if mine.start < mine.stop:
            if handle not in self._rows:
                self._rows[handle] = self.program.load(split.images[mine], split.labels[mine])
            scores = self.program.predict(self._rows[handle])
        sizes = [rows * outputs for rows in shares(count, size)]
        return self.collective.all_gather(scores.ravel(), sizes).reshape(count, outputs)

    def exchange(self, floats: int, repeats: int) -> float:
        """Return the median seconds of an all-reduce of `floats` numbers."""
        buffer, all_reduce = np.zeros(floats, np.float32), self.collective.all_reduce
        barrier = self.collective.barrier  # before each
        return statistics.median(timeit.repeat(lambda: all_reduce(buffer), barrier, repeat=repeats, number=1))

    def gradient_s(self, handle: int, images: int, repeats: int) -> float:
        """Return the median seconds that this worker, alone, needs for the gradient of `images` images."""
        batch = self._splits[handle].whole, np.arange(images)
        return statistics.median(timeit.repeat(lambda: self.program.gradients(*batch), repeat=repeats, number=1))

    def times(self) -> np.ndarray:
        """Return float32 (workers, 3): of all training so far, seconds computing, seconds communicating, and images."""
        own = np.array([self._train_s - self._communicate_s, self._communicate_s, self._images], np.float32)
        return self.collective.all_gather(own, [3] * self.collective.size).reshape(-1, 3)

    def _train(self, split: Loaded, order: np.ndarray, rates: np.ndarray) -> Totals:
        totals = NOTHING
        for step, rate in enumerate(rates):
            totals += self._gradients(split, order[step * self.batch_size : (step + 1) * self.batch_size])
            self._apply(float(rate))
        return totals

    def _apply(self, rate: float) -> None:
        self.program.apply(self._buffer[:-3], rate)

    def _average_pending(self, weight: float) -> None:
        """Let `apply` move every worker's running averages to the mean of where the workers' shares of a batch do.

        After every batch, not now and then: a run that goes on from a checkpoint must end with the same bits. `weight`
        is this worker's share of the batch, 0 to 1; with 0 it has computed nothing, and counts for nothing.
        """
        if (pending := self.program.pending) is None or not self.program.network.running:
            return
        mean = np.zeros(self.program.network.running_count, np.float32)
        if pending.moved is not None:
            mean[:] = pending.moved * np.float32(weight)
        self.collective.all_reduce(mean)
        pending.moved = mean

    def _gradients(self, split: Loaded, batch: np.ndarray) -> Totals:
        """Leave the mean gradient of a batch over all workers in the buffer; the totals travel with it."""
        mine = batch[share(len(batch), self.collective.size, self.collective.rank)]
        if len(mine):
            totals, gradient = self.program.gradients(split.whole, mine)
            np.multiply(gradient, np.float32(len(mine) / len(batch)), out=self._buffer[:-3])
            self._buffer[-3:] = totals.loss, totals.correct, totals.count
        else:
            self._buffer[:] = 0
        self._images += len(mine)
        self.collective.all_reduce(self._buffer)
        self._average_pending(len(mine) / len(batch))
        return _totals(self._buffer[-3:])


class ParameterReplica(Replica):
    """Let every worker train alone and average the parameters now and then (chavan, algorithm 4; local SGD).

    Each step of a worker is on its share of a batch, so plain SGD averaged after every batch is one worker's SGD.
    Optimizer slots are averaged with the parameters, so that the state after an epoch is one state; a worker counts by
    the images it has trained since the last average. Between averages `state` is each worker's own.
    """

    def __init__(self, spec: Spec, collective: Collective) -> None:
        # batches of its own share: then many of them in one call fall apart into the right steps
        super().__init__(spec, collective, spec.compile(shares(spec.batch_size, collective.size)[collective.rank]))
        self._period, self._batches, self._seen = spec.period, 0, 0
        self._since = np.zeros((2, self.collective.size), np.int64)  # steps and images of each since the last average

    def restore(self, state: State) -> None:
        self.program.restore(state)
        self._begin_epoch()

    def predict(self, handle: int) -> np.ndarray:
        """As `Program.predict`, at the end of an epoch: where `trainer.pass_s` ended it early all meet here."""
        if self._since.any():
            self._average()
        self._begin_epoch()
        return super().predict(handle)

    def _train(self, split: Loaded, order: np.ndarray, rates: np.ndarray) -> Totals:
        totals: Totals = NOTHING
        waiting: list[tuple[np.ndarray, float]] = []
        for step, rate in enumerate(rates):
            batch = order[step * self.batch_size : (step + 1) * self.batch_size]
            if len(mine := batch[share(len(batch), self.collective.size, self.collective.rank)]):
                waiting.append((mine, rate))
            images = np.array(shares(len(batch), self.collective.size))
            self._since += np.stack([images > 0, images])
            self._batches, self._seen = self._batches + 1, self._seen + len(batch)
            epoch_over = self._seen >= split.epoch
            if epoch_over or (self._period and self._batches % self._period == 0):
                totals, waiting = totals + self._train_alone(split, waiting), []
                self._average()
            if epoch_over:
                self._begin_epoch()
        totals += self._train_alone(split, waiting)
        message = np.array([totals.loss, totals.correct, totals.count])
        self.collective.all_reduce(message)
        return _totals(message)

    def _train_alone(self, split: Loaded, parts: list[tuple[np.ndarray, float]]) -> Totals:
        if not parts:
            return NOTHING
        images, rates = zip(*parts, strict=True)
        self._images += len(order := np.concatenate(images))
        return self.program.train(split.whole, order, np.array(rates))

    def _average(self) -> None:
        rank, (steps, images) = self.collective.rank, self._since
        state = self.program.state()
        state["step"] = np.array(int(state["step"]) + int(steps.max() - steps[rank]), np.int64)
        arrays = {name: array for name, array in state.items() if array.ndim}
        flat = np.concatenate(list(arrays.values())) * np.float32(images[rank] / images.sum())
        self.collective.all_reduce(flat)
        parts = np.split(flat, np.cumsum([array.size for array in arrays.values()])[:-1])
        self.program.restore({**state, **dict(zip(arrays, parts, strict=True))})
        self._since[:] = 0

    def _begin_epoch(self) -> None:
        self._batches, self._seen = 0, 0
        self._since[:] = 0


def _totals(message: np.ndarray) -> Totals:
    return Totals(float(message[0]), round(float(message[1])), round(float(message[2])))


def divide_threads(backend: Backend, workers: int) -> Backend:
    """Return the backend with at most its share of this machine's cores, when `workers` of them run on it."""
    chosen: Any = backend
    if "threads" not in {field.name for field in dataclasses.fields(chosen)}:
        return backend
    return dataclasses.replace(chosen, threads=max(1, min(backend.threads, usable_cores() // workers)))
