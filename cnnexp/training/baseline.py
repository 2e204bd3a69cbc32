"""How much faster, measured: a baseline trains beside the run, on the same network and the same batches.

Two sessions on two days do not compare; a machine's speed drifts within one. So the baseline's batches are taken
between the run's own, in the same process, on a copy of the parameters, and every epoch gets a ratio of its own.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cnnexp.backends.protocol import Program
from cnnexp.datasets import Split


@dataclass(frozen=True)
class Comparison:
    """The baseline beside one epoch."""

    seconds_per_image: float  # median over the baseline's batches of this epoch
    images: int  # images per baseline batch; less than the run's batch where a whole one would take too long
    batches: int  # how many batches the median is over
    speedup: float  # the baseline's seconds per image over the run's, see `_Pass.seconds_per_image`

    def __repr__(self) -> str:
        baseline = f"{1e6 * self.seconds_per_image:.3g} us an image over {self.batches} batches of {self.images}"
        return f"Comparison({self.speedup:.3g} x, {baseline})"


class Baseline:
    """A second program that is timed on the batches of the run.

    Args:
        program: the baseline's, compiled for the same network, loss, optimizer and batch size.
        split: the training split.
        batches: how many batches to time each epoch.
        budget_s: the most seconds one batch may take; a slower baseline is timed on the first images of each batch.
        layers_share: trains on (handle, batch, rate) and returns the share of that step inside its layers' passes, None
            where they cannot be told apart (`ledger.Profiled.layers_share`); itself None where no share is wanted.

    Attributes:
        parallel_share: the median of what `layers_share` returned, over steps before the first that is timed, so that
            no clock inside a step slows a step that counts; None before, and where nothing is known.
    """

    def __init__(
        self,
        program: Program,
        split: Split,
        batches: int = 3,
        budget_s: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
        layers_share: Callable[[Any, np.ndarray, float], float | None] | None = None,
    ) -> None:
        self.program, self.batches = program, batches
        self.parallel_share: float | None = None
        self._clock, self._budget_s, self._layers_share = clock, budget_s, layers_share
        self._handle = program.load(split.images, split.labels)
        self._images: int | None = None
        self.samples: list[float] = []  # seconds an image, of the batches timed in this epoch

    def sample(self, batch: np.ndarray, rate: float, state: Callable[[], Any]) -> None:
        """Time one step on indices that the run trained on, if samples are missing; `state` is asked once an epoch."""
        if len(self.samples) == self.batches:
            return
        if not self.samples:
            self.program.restore(state())
        if self._images is None:
            self._images = self._affordable_images(batch, rate)
            self.parallel_share = self._measure_share(batch[: self._images], rate)
        batch = batch[: self._images]
        self.samples.append(self._time(batch, rate) / len(batch))

    def compare(self, seconds_per_image: float) -> Comparison | None:
        """Close the epoch: set its samples against the run's seconds per image; None without a sample."""
        if not self.samples:  # its last batch was trained before a stop
            return None
        median = statistics.median(self.samples)
        count, self.samples = len(self.samples), []
        assert self._images is not None  # a batch was timed
        return Comparison(median, self._images, count, median / seconds_per_image)

    def _affordable_images(self, batch: np.ndarray, rate: float) -> int:
        """Return how many images of a batch fit the budget.

        A step has fixed costs, so seconds per image fall as the batch grows: each guess from fewer images is too low,
        never too high, and the guesses grow until one is exact.
        """
        count = 1
        while True:
            self._time(batch[:count], rate)  # warms caches at this size; not counted
            seconds = self._time(batch[:count], rate)
            affordable = int(count * self._budget_s / seconds) if seconds > 0 else len(batch)
            if count == len(batch) or affordable <= count:
                return count
            count = min(affordable, len(batch))

    def _measure_share(self, batch: np.ndarray, rate: float) -> float | None:
        """Return the median share of `batches` steps, or of as many as fit the budget of one batch; at least one."""
        if self._layers_share is None:
            return None
        shares: list[float] = []
        started = self._clock()
        while len(shares) < self.batches and (not shares or self._clock() - started < self._budget_s):
            if (share := self._layers_share(self._handle, batch, rate)) is None:
                return None
            shares.append(share)
        return statistics.median(shares)

    def _time(self, batch: np.ndarray, rate: float) -> float:
        started = self._clock()
        self.program.train(self._handle, batch, rate)
        return self._clock() - started
