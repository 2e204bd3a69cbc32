"""The epoch loop: it yields facts, and does nothing else. Who calls it records them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cnnexp.backends.protocol import Program
from cnnexp.datasets import Dataset
from cnnexp.errors import Diverged
from cnnexp.network.losses import Totals, evaluate
from cnnexp.system.signals import held
from cnnexp.training.baseline import Baseline, Comparison
from cnnexp.training.schedules import Cosine, Schedule

CHUNK_S = 0.5  # seconds between looks at the progress bar and at Ctrl-C


@dataclass(frozen=True)
class EpochResult:
    """What one epoch was.

    Attributes:
        epoch: 1 for the first.
        rate: the learning rate used.
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
        """Totals that early stop and "best" go by: of the validation split if there is one, else of the test split."""
        return self.validation or self.test


@dataclass(frozen=True)
class Progress:
    """How far an epoch is: the totals so far, of how many images, in how many seconds of training."""

    epoch: int
    totals: Totals
    images: int
    seconds: float


def train_epochs(
    program: Program,
    dataset: Dataset,
    epochs: int,
    seed: int = 0,
    schedule: Schedule = Cosine(),
    baseline: Baseline | None = None,
    patience: int | None = None,
    earlier: Sequence[EpochResult] = (),
    on_progress: Callable[[Progress], None] = lambda progress: None,
    clock: Callable[[], float] = time.perf_counter,
    pass_s: float | None = None,
    target: float | None = None,
    begun: Progress | None = None,
    most_batches: int | None = None,
) -> Iterator[EpochResult]:
    """Train `program` and yield one result per epoch.

    Args:
        program: holds the parameters to start from, its batch size and its optimizer.
        dataset: trained on `train`, evaluated on `test` and, if it has one, `validation`.
        epochs: the last epoch's number, >= 1.
        seed: shuffles; each epoch's order follows from the seed and the epoch alone.
        schedule: gives each epoch's learning rate.
        baseline: timed on a few of the run's batches each epoch.
        patience: stop after so many epochs in a row without a smaller held-out loss; None never stops early.
        earlier: results of the epochs that are done, after `program.restore`; training goes on from there.
        on_progress: called about twice a second, between two steps; no signal comes between a step and its call.
        clock: returns seconds.
        pass_s: seconds that a training pass may take: it then ends early, after at least one batch, and the epoch is
            evaluated on the same share of the held-out splits; None trains on every image.
        target: stop after the first epoch with such a held-out accuracy; None trains for all epochs.
        begun: how far the epoch after `earlier` was, after `program.restore`; None begins it.
        most_batches: batches between two calls of `on_progress`; None leaves it to the clock.

    Raises:
        Diverged: the loss, of training or of a held-out split, is not a finite number.
    """
    handle = program.load(dataset.train.images, dataset.train.labels)
    held_out = _load_held_out(program, dataset)
    best, worse, batches = math.inf, 0, 1
    for result in earlier:
        best, worse = _patience(result, best, worse)
    if patience is not None and worse >= patience:
        return
    for epoch in range(earlier[-1].epoch + 1 if earlier else 1, epochs + 1):
        rate = schedule(program.optimizer.lr, epoch, epochs)
        order = epoch_order(len(dataset.train.labels), seed, epoch)
        one_pass = _Pass(
            program, handle, order, epoch, rate, baseline, on_progress, clock, pass_s, most_batches, batches
        )
        if begun is not None and begun.epoch == epoch:
            one_pass.totals, one_pass.seconds = begun.totals, begun.seconds
        one_pass.run()
        batches = one_pass.batches
        share = one_pass.totals.count / len(order)
        tested = held_out if share == 1 else _load_held_out(program, dataset, share)

        started = clock()
        scores = {name: program.predict(split) for name, (split, _) in tested.items()}
        totals = {name: evaluate(program.loss, scores[name], labels) for name, (_, labels) in tested.items()}
        for name, total in totals.items():
            if not math.isfinite(total.loss):
                raise Diverged(
                    f"the {name} loss became {total.loss} after epoch {epoch}, at learning rate {rate:g}; lower "
                    "optimizer.lr or check the data"
                )
        result = EpochResult(
            epoch=epoch,
            rate=rate,
            train=one_pass.totals,
            test=totals["test"],
            validation=totals.get("validation"),
            epoch_s=one_pass.seconds,
            evaluate_s=clock() - started,
            comparison=baseline.compare(one_pass.seconds_per_image) if baseline else None,
            scores=scores["test"],
        )
        yield result
        if target is not None and result.held_out.accuracy >= target:
            return

        best, worse = _patience(result, best, worse)
        if patience is not None and worse >= patience:
            return


def predict_test(program: Program, dataset: Dataset, result: EpochResult) -> np.ndarray:
    """Return the scores (N, O) of the test images that an epoch was evaluated on, by the parameters as they are."""
    handle, _ = _load_held_out(program, dataset, result.train.count / len(dataset.train.labels))["test"]
    return program.predict(handle)


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the permutation of 0 .. count - 1 (int64) in which an epoch visits the images; no hidden state."""
    return np.random.default_rng((seed, epoch)).permutation(count)


def _patience(result: EpochResult, best: float, worse: int) -> tuple[float, int]:
    """Return the smallest held-out loss so far, and how many epochs in a row have not been below it."""
    loss = result.held_out.mean_loss
    return min(best, loss), 0 if loss < best else worse + 1


def _load_held_out(program: Program, dataset: Dataset, share: float = 1.0) -> dict[str, tuple[Any, np.ndarray]]:
    """Load the first share of each held-out split; return (handle, labels) by name."""
    held_out = {}
    for name, split in (("test", dataset.test), ("validation", dataset.validation)):
        if split is not None:
            part = slice(math.ceil(share * len(split.labels)))
            held_out[name] = program.load(split.images[part], split.labels[part]), split.labels[part]
    return held_out


class _Pass:
    """One epoch's training pass, in chunks of whole batches, the short last batch in a chunk of its own.

    Args:
        batches: of the first chunk, where no clock limits the pass: of the last one, in the pass before.
    """

    def __init__(
        self,
        program: Program,
        handle: Any,
        order: np.ndarray,
        epoch: int,
        rate: float,
        baseline: Baseline | None,
        on_progress: Callable[[Progress], None],
        clock: Callable[[], float],
        limit_s: float | None,
        most_batches: int | None,
        batches: int,
    ) -> None:
        self._program, self._handle, self._order = program, handle, order
        self._epoch, self._rate, self._baseline = epoch, rate, baseline
        self._on_progress, self._clock = on_progress, clock
        self._limit_s = math.inf if limit_s is None else limit_s
        self._most = most_batches or -(-len(order) // program.batch_size)
        self.batches = batches if limit_s is None else 1
        self._whole_s, self._whole_images = 0.0, 0
        self.totals, self.seconds = Totals(0.0, 0, 0), 0.0

    @property
    def seconds_per_image(self) -> float:
        """Over whole batches, since a short one costs more per image; over all where none is whole."""
        if self._whole_images:
            return self._whole_s / self._whole_images
        return self.seconds / self.totals.count

    def run(self) -> None:
        batch_size, count = self._program.batch_size, len(self._order)
        whole = count - count % batch_size
        # the baseline's samples are spread over the epoch
        largest = -(-whole // (batch_size * self._baseline.batches)) if self._baseline else self._most
        start, most = self.totals.count, self._most * batch_size
        chunk = batch_size * min(self.batches, largest)
        if start and self.seconds >= self._limit_s:
            return
        while start < whole and chunk:
            stop = min(start + chunk, whole, start - start % most + most)
            self._program.warm(self._handle, self._order[start : start + batch_size])
            seconds = self._train(start, stop)
            self._whole_s, self._whole_images = self._whole_s + seconds, self._whole_images + stop - start
            if self._baseline:
                self._baseline.sample(self._order[start : start + batch_size], self._rate, self._program.state)
            self.batches = max(1, min(self._batches_in(CHUNK_S), 4 * (chunk // batch_size), largest))
            start, chunk = stop, batch_size * min(self.batches, self._batches_in(self._limit_s - self.seconds))
        if start == whole < count:
            self._train(whole, count)
            if self._baseline and not whole:
                self._baseline.sample(self._order, self._rate, self._program.state)

    def _batches_in(self, seconds: float) -> int:
        """Return how many whole batches fit into some seconds, at the speed so far; at most so many as are wanted."""
        batch_s = self._whole_s * self._program.batch_size / self._whole_images
        return self._most if batch_s * self._most <= seconds else max(0, int(seconds / batch_s))

    def _train(self, start: int, stop: int) -> float:
        """Train on order[start:stop], one call; return its seconds."""
        with held():
            started = self._clock()
            totals = self._program.train(self._handle, self._order[start:stop], self._rate)
            seconds = self._clock() - started
            if not math.isfinite(totals.loss):
                raise Diverged(
                    f"the loss became {totals.loss} in epoch {self._epoch}, images {start} to {stop}, at learning rate "
                    f"{self._rate:g}; lower optimizer.lr or check the data"
                )
            self.totals, self.seconds = self.totals + totals, self.seconds + seconds
            self._on_progress(Progress(self._epoch, self.totals, len(self._order), self.seconds))
        return seconds
