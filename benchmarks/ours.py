"""Our own backends as contestants."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from importlib.metadata import version

import numpy as np

from benchmarks.cases import DROPOUT_SEED, LOSS, Case, Data, visiting_order
from cnnexp.backends import backend_class

SLOW_STEP_S = 0.5
"""A slow backend gets so few images a step that a step takes no longer than this."""
FEWER = (32, 1)
"""Images per step that are tried where a whole batch is too much, most first; the oracle answers for them too."""


class Ours:
    """A backend's program. It pays for gathering each batch in its shuffled order; the peers find theirs gathered.

    Args:
        backend: its name in the registry.
        slow: whether a whole batch may take too long; then a step has fewer images.
    """

    def __init__(self, case: Case, data: Data, threads: int, backend: str, slow: bool) -> None:
        cls = backend_class(backend)
        takes_threads = "threads" in {f.name for f in dataclasses.fields(cls)}
        made = cls(threads=threads) if takes_threads else cls()
        self._first, self._rate = data.parameters, case.optimizer.lr
        self._compile = lambda size: made.compile(case.network, LOSS, case.optimizer, size)
        order = visiting_order(case)
        images, labels = data.images.reshape(-1, *data.images.shape[2:]), data.labels.reshape(-1)
        put_away(order, images, labels)
        self._order = order
        sizes = [case.batch_size, *(n for n in FEWER if n < case.batch_size)]
        size = self._affordable(sizes, images, labels) if slow else case.batch_size
        self._begin(size, images, labels)
        self.facts = {"threads": made.threads, "device": made.device_name, "numpy": np.__version__}
        self.facts |= _numba_facts() if not slow else {}

    def _begin(self, size: int, images: np.ndarray, labels: np.ndarray) -> None:
        self.batch_size, self._program = size, self._compile(size)
        self.compile_s = self._program.compile_s
        self._handle = self._program.load(images, labels)
        self._batches = len(self._order) // size
        self.reset()

    def _affordable(self, sizes: list[int], images: np.ndarray, labels: np.ndarray) -> int:
        """Return the largest batch, sizes descending, whose step is short, judged by a step of the smallest."""
        self._begin(sizes[-1], images, labels)
        started = time.perf_counter()
        self.train(1)
        per_image = (time.perf_counter() - started) / sizes[-1]
        self._program.close()
        return next((size for size in sizes if size * per_image <= SLOW_STEP_S), sizes[-1])

    def reset(self) -> None:
        self._program.restore({"parameters": self._first, "seed": np.int64(DROPOUT_SEED)})

    def train(self, steps: int) -> None:
        rounds, rest = divmod(steps, self._batches)
        for count in [self._batches] * rounds + [rest] * bool(rest):
            self._program.train(self._handle, self._order[: count * self.batch_size], self._rate)

    def gradient(self) -> tuple[float, np.ndarray]:
        totals, gradient = self._program.gradients(self._handle, self._order[: self.batch_size])
        return totals.mean_loss, gradient

    def parameters(self) -> np.ndarray:
        return self._program.state()["parameters"]

    def draw(self, on: bool) -> bool:
        return True


def put_away(order: np.ndarray, images: np.ndarray, labels: np.ndarray) -> None:
    """Shuffle in place, so that `order` then visits images and labels (N, ...) as they stood: as the peers do.

    A second copy of the images would count as this contestant's memory, not as the peers'.
    """
    done = np.zeros(len(order), bool)
    for first in range(len(order)):
        at, image, label = first, images[first].copy(), labels[first]
        while not done[at]:
            done[at], at = True, order[at]
            image, images[at] = images[at].copy(), image
            label, labels[at] = labels[at], label


def _numba_facts() -> dict[str, object]:
    layer = "none"
    if "numba" in sys.modules:  # what is found compiled may run without it
        import numba

        with contextlib.suppress(ValueError):  # nothing has run in parallel
            layer = numba.threading_layer()
    return {"numba": version("numba"), "threading_layer": layer, "numba_cpu": os.environ.get("NUMBA_CPU_NAME", "")}
