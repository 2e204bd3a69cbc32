"""What is right for a case, by the tests' float64 oracle: `python -m benchmarks.oracle CASE FILE`.

The file holds, for n images (the whole batch, and the fewer that slow contestants take): `loss_n`, the mean loss;
`gradient_n`, its flat gradient; `update_n`, what one optimizer step adds to the parameters; and `blur_loss_n`,
`blur_gradient_n`, `blur_update_n`, how far, relatively, these move with images and parameters that differ by a few
roundings of a float32. That is next to nothing unless a ReLU or a max-pool decides between numbers that a float32
cannot distinguish: then who decides otherwise than the oracle is as right. Of a case of the group `inference` it holds
`probabilities` alone, those of the first batch.

Every peer draws what Dropout leaves out in its own way, so the peers are compared without Dropout. Our backends are
compared with the very numbers that they draw: where a network has a Dropout, the names with `drawn_` before them.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.cases import CASES, DROPOUT_SEED, LOSS, Case, data, visiting_order
from benchmarks.layer_cost import without
from benchmarks.ours import FEWER
from cnnexp.network import Dropout

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import conformance
import reference

NUDGE, FEW_LAYERS = 2.0**-19, 8
"""Relative: sixteen roundings of a float32, about what Winograd's algorithm collects; more where more layers with
parameters than a few follow each other. In VGG with batch normalization, at batch 16, `cpu-simd` decides one ReLU
otherwise than the oracle, at batch 128 PyTorch's channels_last; a quarter as much showed neither."""

CHUNK = 50  # images at once: activations in float64 are large; all where BatchNorm2d takes statistics of the batch

conformance.SEED = DROPOUT_SEED


def expected(case: Case, mnist: str | None = None) -> dict[str, np.ndarray]:
    """Return what the file holds."""
    given = data(case, mnist)
    images, labels = given.images.reshape(-1, *case.network.input_shape), given.labels.reshape(-1)
    if case.group == "inference":
        trial = conformance.Case(case.network, LOSS, given.parameters, given.images[0], given.labels[0])
        scores = reference.forward(trial.layers(), trial.float_images)[-1]
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return {"probabilities": powers / powers.sum(axis=1, keepdims=True)}
    still = replace(case, network=without(case.network, Dropout)) if case.network.draws else case
    found = {}
    for n in {case.batch_size, *(n for n in FEWER if n < case.batch_size)}:
        for mark, job in {"": still, **({"drawn_": case} if case.network.draws else {})}.items():
            answer = _answer(job, given.parameters, images[:n], labels[:n])
            # up and down: where rounding decides, one of the two decides otherwise
            size = NUDGE * max(1.0, sum(p.name.endswith("weight") for p in case.network.parameters) / FEW_LAYERS)
            moved = [_nudged(given.parameters, images[:n], sign * size) for sign in (1, -1)]
            nudged = [_answer(job, *ends, labels[:n]) for ends in moved]
            for name, value in answer.items():
                apart = max(np.linalg.norm(other[name] - value) for other in nudged)
                found |= {f"{mark}{name}_{n}": value, f"{mark}blur_{name}_{n}": apart / np.linalg.norm(value)}
    return found


def _answer(case: Case, parameters: np.ndarray, images: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    loss, gradient = mean_gradient(case, parameters, images, labels)
    return {"loss": np.array(loss), "gradient": gradient, "update": update(case, parameters, gradient)}


def _nudged(parameters: np.ndarray, images: np.ndarray, size: float) -> tuple[np.ndarray, np.ndarray]:
    """Return them in float64, each number moved by about this part of it; -size moves it the other way."""
    rng = np.random.default_rng(0)
    moved = [a * (1 + size * rng.standard_normal(a.shape)) for a in (parameters, images)]
    return moved[0], moved[1]


def mean_gradient(case: Case, parameters: np.ndarray, images: np.ndarray, labels: np.ndarray):
    """Return (mean loss, flat mean gradient), summed over chunks."""
    trial, count = conformance.Case(case.network, LOSS, parameters, images, labels), len(labels)
    loss, gradient = 0.0, np.zeros(parameters.size)
    at_once = count if case.network.running else CHUNK
    for start in range(0, count, at_once):
        chunk = slice(start, start + at_once)
        layers = trial.layers(visiting_order(case)[:count][chunk])
        losses, _, found = reference.gradients(layers, images[chunk], labels[chunk], LOSS.name)
        loss += losses.sum() / count
        gradient += conformance.flat_gradient(trial, found) * len(losses) / count
    return loss, gradient


def update(case: Case, parameters: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Return what the first step of the case's optimizer adds to the parameters."""
    rule = reference.OPTIMIZERS[type(case.optimizer).__name__.lower()]
    before = parameters.astype(np.float64)
    numbers = {key: value for key, value in vars(case.optimizer).items() if key != "decay_biases"}  # decays nothing
    return rule(before, gradient, {}, 1, **numbers) - before


if __name__ == "__main__":
    name, file, *mnist = sys.argv[1:]
    np.savez(file, **expected(next(case for case in CASES if case.name == name), *mnist))
