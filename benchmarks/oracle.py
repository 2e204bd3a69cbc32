"""What is right for a case, by the tests' float64 oracle: `python -m benchmarks.oracle CASE FILE`.

The file holds, for n images (the whole batch, and the fewer that slow contestants take): `loss_n`, the mean loss;
`gradient_n`, its flat gradient; `update_n`, what one optimizer step adds to the parameters.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from benchmarks.cases import CASES, LOSS, Case, data
from benchmarks.ours import FEWER

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import conformance
import reference

CHUNK = 50  # images at once: activations in float64 are large


def expected(case: Case, mnist: str | None = None) -> dict[str, np.ndarray]:
    """Return what the file holds."""
    given = data(case, mnist)
    images, labels = given.images.reshape(-1, *case.network.input_shape), given.labels.reshape(-1)
    found = {}
    for n in {case.batch_size, *(n for n in FEWER if n < case.batch_size)}:
        loss, gradient = mean_gradient(case, given.parameters, images[:n], labels[:n])
        found |= {f"loss_{n}": loss, f"gradient_{n}": gradient, f"update_{n}": update(case, given.parameters, gradient)}
    return found


def mean_gradient(case: Case, parameters: np.ndarray, images: np.ndarray, labels: np.ndarray):
    """Return (mean loss, flat mean gradient), summed over chunks."""
    trial, count = conformance.Case(case.network, LOSS, parameters, images, labels), len(labels)
    loss, gradient = 0.0, np.zeros(parameters.size)
    for start in range(0, count, CHUNK):
        chunk = slice(start, start + CHUNK)
        loss_name = conformance.loss_name(LOSS)
        _, losses, _, found = reference.gradients(trial.layers, images[chunk], labels[chunk], loss_name)
        loss += losses.sum() / count
        gradient += conformance.flat_gradient(trial, found) * len(losses) / count
    return loss, gradient


def update(case: Case, parameters: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Return what the first step of the case's optimizer adds to the parameters."""
    rule = reference.OPTIMIZERS[type(case.optimizer).__name__.lower()]
    before = parameters.astype(np.float64)
    return rule(before, gradient, {}, 1, **vars(case.optimizer)) - before


if __name__ == "__main__":
    name, file, *mnist = sys.argv[1:]
    np.savez(file, **expected(next(case for case in CASES if case.name == name), *mnist))
