"""The epoch loop: it yields facts and hands them to observers. Nothing here records, prints or writes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from cnnexp.backends.protocol import Program, State
from cnnexp.datasets import Dataset
from cnnexp.errors import Diverged
from cnnexp.network.losses import Totals, evaluate
from cnnexp.system.signals import held
from cnnexp.training.augment import Augmentation, Augmenter, Feed
from cnnexp.training.baseline import Baseline, Comparison
from cnnexp.training.schedules import Cosine, Schedule

CHUNK_S = 0.5  # seconds between looks at the progress bar and at Ctrl-C
# seconds of training between two of the baseline's batches, at least: waking threads that slept meanwhile takes some
# tenths of a millisecond, on a virtual machine one or two
BESIDE_S = 0.05
LONG = 32  # whole batches after which a short last one needs no call of its own: its images hardly change the mean


@dataclass(frozen=True)
class EpochResult:
    """What one epoch was.

    Attributes:
        epoch: 1 for the first.
        rate: the learning rate of its last step.
        train: totals of the training pass, each image scored as its step saw it.
        test: totals of the test split after the epoch.
        validation: totals of the validation split after the epoch, where the data set has one.
        epoch_s: seconds of the training pass alone; evaluation, baseline and compilation are not in it.
        evaluate_s: seconds of evaluation.
        comparison: the baseline beside this epoch, None where there is no baseline.
        scores: (N, O), the network's outputs on the test split.
    """

    epoch: int
    rate: float
    train: Totals
    test: Totals
    validation: Totals | None
    epoch_s: float
    evaluate_s: float
    comparison: Comparison | None
    scores: np.ndarray = field(repr=False)

    def __repr__(self) -> str:
        return f"EpochResult({self.epoch}: test {self.test.accuracy:.2%}, {self.epoch_s:.3g} s)"

    @property
    def images_per_s(self) -> float:
        return self.train.count / self.epoch_s

    @property
    def held_out(self) -> Totals:
        """Totals for early stopping and "best": of the validation split if there is one, else of the test split."""
        return self.validation or self.test


@dataclass(frozen=True)
class Progress:
    """How far an epoch is: the totals so far, of how many images, in how many seconds of training."""

    epoch: int
    totals: Totals
    images: int
    seconds: float


class Observer(Protocol):
    """Takes note of training: the record, the screen, the checkpoints, early stopping."""

    def progressed(self, progress: Progress) -> None:
        """Take note, if need be, of how far an epoch is: twice a second, between two steps, no signal in between."""
        return

    def finished(self, result: EpochResult) -> bool | None:
        """Take note of an epoch; return True to end the training."""


@dataclass(frozen=True)
class TrainingPlan:
    """How long and in what order to train.

    Attributes:
        epochs: the last epoch's number, >= 1.
        seed: shuffles; each epoch's order follows from the seed and the epoch alone.
        schedule: gives each step's learning rate.
        pass_s: seconds that a training pass may take: it then ends early, after at least one batch, and the epoch is
            evaluated on the same share of the held-out splits; None trains on every image.
        progress_batches: batches between two calls of `progressed`; None leaves it to the clock.
        augment: what happens to the training images, each kind once.
    """

    epochs: int
    seed: int = 0
    schedule: Schedule = Cosine()
    pass_s: float | None = None
    progress_batches: int | None = None
    augment: tuple[Augmentation, ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    """A run between two steps: what a file of `training.checkpoint` holds, whose functions are named here."""

    epoch: int  # the last one that is done, 0 before the first
    training: Mapping[str, Any]  # what must be the same for a run to go on as if never stopped: see `describe`
    state: State = field(repr=False)  # as `Program.state` returned it after that epoch
    history_sha256: str = ""  # of what every epoch was, see `take_history`
    history: tuple[EpochResult, ...] = ()  # that itself, once `take_history` has found it, without the scores
    about: Mapping[str, Any] = field(default_factory=dict)  # for the reader, e.g. backend, versions; never checked
    begun: Progress | None = None  # how far the next epoch is; None where it has not begun


def train_epochs(
    program: Program,
    dataset: Dataset,
    epochs: int | TrainingPlan,
    observers: Sequence[Observer] = (),
    baseline: Baseline | None = None,
    resume_from: Checkpoint | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[EpochResult]:
    """Train `program` and yield one result per epoch, once every observer has taken note of it.

    Args:
        program: holds the parameters to start from, its batch size and its optimizer.
        dataset: trained on `train`, evaluated on `test` and, if it has one, `validation`.
        epochs: how many, or the whole plan.
        observers: called in this order.
        baseline: timed on a few of the run's batches each epoch.
        resume_from: what is done, after `program.restore`; None begins with epoch 1.

    Raises:
        Diverged: the loss, of training or of a held-out split, is not a finite number.
        ConfigError: the images are too small for what `augment` does to them.
    """
    plan = epochs if isinstance(epochs, TrainingPlan) else TrainingPlan(epochs)
    augmenter = Augmenter(plan.augment, dataset.train.images, plan.seed) if plan.augment else None
    feed = Feed(program, dataset.train, augmenter)
    held_out = _load_held_out(program, dataset)
    history, begun = (resume_from.history, resume_from.begun) if resume_from else ((), None)
    batches = 1
    for epoch in range(history[-1].epoch + 1 if history else 1, plan.epochs + 1):
        order = epoch_order(len(dataset.train.labels), plan.seed, epoch)
        one_pass = _Pass(program, feed, plan, observers, baseline, clock, epoch, order, batches)
        if begun is not None and begun.epoch == epoch:
            one_pass.totals, one_pass.seconds = begun.totals, begun.seconds
        one_pass.run()
        batches = one_pass.batches
        share = one_pass.totals.count / len(dataset.train.labels)
        started = clock()
        scores, totals = _evaluate(one_pass, held_out if share == 1 else _load_held_out(program, dataset, share))
        result = EpochResult(
            epoch=epoch,
            rate=one_pass.rate,
            train=one_pass.totals,
            test=totals["test"],
            validation=totals.get("validation"),
            epoch_s=one_pass.seconds,
            evaluate_s=clock() - started,
            comparison=baseline.compare(one_pass.seconds_per_image) if baseline else None,
            scores=scores,
        )
        ends = [observer.finished(result) for observer in observers]
        yield result
        if any(ends):
            return


def predict_test(program: Program, dataset: Dataset, result: EpochResult) -> np.ndarray:
    """Return the scores (N, O) of the test images that an epoch was evaluated on, by the parameters as they are."""
    handle, _ = _load_held_out(program, dataset, result.train.count / len(dataset.train.labels))["test"]
    return program.predict(handle)


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the permutation of 0 .. count - 1 (int64) in which an epoch visits the images; no hidden state."""
    return np.random.default_rng((seed, epoch)).permutation(count)


def _load_held_out(program: Program, dataset: Dataset, share: float = 1.0) -> dict[str, tuple[Any, np.ndarray]]:
    """Load the first share of each held-out split; return (handle, labels) by name."""
    splits = {"test": dataset.test, "validation": dataset.validation}
    firsts = {name: split[: math.ceil(share * len(split))] for name, split in splits.items() if split is not None}
    return {name: (program.load(split.images, split.labels), split.labels) for name, split in firsts.items()}


def _evaluate(one_pass: _Pass, held_out: dict[str, tuple[Any, np.ndarray]]) -> tuple[np.ndarray, dict[str, Totals]]:
    """Return the scores (N, O) of the test split and the totals of each held-out split."""
    scores = {name: one_pass.program.predict(split) for name, (split, _) in held_out.items()}
    totals = {name: evaluate(one_pass.program.loss, scores[name], labels) for name, (_, labels) in held_out.items()}
    for name, total in totals.items():
        if not math.isfinite(total.loss):
            raise _diverged(f"{name} loss became {total.loss} after epoch {one_pass.epoch}", one_pass.rate)
    return scores["test"], totals


def _diverged(what: str, rate: float) -> Diverged:
    return Diverged(f"the {what}, at learning rate {rate:g}; lower optimizer.lr or check the data")


@dataclass
class _Pass:
    """One epoch's training pass, in chunks of whole batches; a short last batch goes with many or by itself.

    Where no clock limits the pass, its first chunk has as many `batches` as the last one of the pass before.
    """

    program: Program
    feed: Feed
    plan: TrainingPlan
    observers: Sequence[Observer]
    baseline: Baseline | None
    clock: Callable[[], float]
    epoch: int
    order: np.ndarray
    batches: int

    def __post_init__(self) -> None:
        plan, steps = self.plan, -(-len(self.order) // self.program.batch_size)
        self._rates = plan.schedule.rates(self.program.optimizer.lr, self.epoch, plan.epochs, steps)
        self._limit_s = math.inf if plan.pass_s is None else plan.pass_s
        self._most = plan.progress_batches or steps
        self.batches = self.batches if plan.pass_s is None else 1
        self._whole_s, self._whole_images = 0.0, 0
        self.totals, self.seconds = Totals(0.0, 0, 0), 0.0

    @property
    def rate(self) -> float:
        """The learning rate of the last step so far."""
        return float(self._rates[max(0, -(-self.totals.count // self.program.batch_size) - 1)])

    @property
    def seconds_per_image(self) -> float:
        """Over whole batches, since a short one costs more per image; over all where none is, or very many are."""
        return self._whole_s / self._whole_images if self._whole_images else self.seconds / self.totals.count

    def run(self) -> None:
        program, baseline = self.program, self.baseline
        batch_size, count = program.batch_size, len(self.order)
        whole = count - count % batch_size
        start, most = self.totals.count, self._most * batch_size
        chunk = batch_size * self.batches
        if start and self.seconds >= self._limit_s:
            return
        while start < whole and chunk:
            stop = min(start + chunk, whole, start - start % most + most)
            if stop == whole and stop - start >= LONG * batch_size:
                stop = count
            program.warm(*next(self.feed.parts(self.epoch, self.order, start, start + batch_size)))
            seconds = self._train(start, stop)
            self._whole_s, self._whole_images = self._whole_s + seconds, self._whole_images + stop - start
            if baseline:
                baseline.sample(self.order[start : start + batch_size], self.rate, program.state)
            self.batches = max(1, min(self._batches_in(CHUNK_S), 4 * (chunk // batch_size), self._spread(whole)))
            start, chunk = stop, batch_size * min(self.batches, self._batches_in(self._limit_s - self.seconds))
        if start == whole < count:
            self._train(whole, count)
        if baseline and start >= whole:
            while len(baseline.samples) < min(baseline.batches, max(1, whole // batch_size)):
                baseline.sample(self.order[:batch_size], self.rate, program.state)

    def _spread(self, whole: int) -> int:
        """Return the most batches of a call: the baseline's samples are spread over the epoch, where it is long."""
        if not self.baseline:
            return self._most
        pieces = int(whole * self._whole_s / self._whole_images / BESIDE_S)
        return -(-whole // (self.program.batch_size * max(1, min(pieces, self.baseline.batches))))

    def _batches_in(self, seconds: float) -> int:
        """Return how many whole batches fit into some seconds, at the speed so far; at most so many as are wanted."""
        batch_s = self._whole_s * self.program.batch_size / self._whole_images
        return self._most if batch_s * self._most <= seconds else max(0, int(seconds / batch_s))

    def _train(self, start: int, stop: int) -> float:
        """Train on order[start:stop], one call; return its seconds."""
        batch_size = self.program.batch_size
        rates = self._rates[start // batch_size : -(-stop // batch_size)]
        with held():
            started = self.clock()
            totals = Totals(0.0, 0, 0)
            for handle, places in self.feed.parts(self.epoch, self.order, start, stop):
                first = totals.count // batch_size
                part = rates[first : first + -(-len(places) // batch_size)]
                rate = float(part[0]) if (part == part[0]).all() else part
                totals += self.program.train(handle, places, rate)
            seconds = self.clock() - started
            if not math.isfinite(totals.loss):
                images = f"images {start} to {stop}"
                raise _diverged(f"loss became {totals.loss} in epoch {self.epoch}, {images}", rates.max())
            self.totals, self.seconds = self.totals + totals, self.seconds + seconds
            for observer in self.observers:
                observer.progressed(Progress(self.epoch, self.totals, len(self.order), self.seconds))
        return seconds
