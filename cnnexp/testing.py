"""What a backend must compute right: a network for each kind of layer, and the comparison of two backends on them.

`cnnexp check` and `cnnexp doctor` compare with `numpy`, and `numpy` with `python`; the tests compare all backends on
these networks, and on odder ones, with a float64 oracle that imports nothing of this package.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cnnexp.backends.protocol import Backend, Program, State
from cnnexp.errors import CnnexpError
from cnnexp.network import (
    GELU,
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAvgPool,
    LeakyReLU,
    Linear,
    MaxPool2d,
    Network,
    ReLU,
    Residual,
    Sigmoid,
    Tanh,
)
from cnnexp.network.losses import Loss
from cnnexp.optimizers import SGD

ALLOWED = 1e-4
"""Of the largest number of an array: what float32, summed in another order, is far from on networks so small."""

IMAGES, BATCH, RATE = 11, 4, 0.05  # the last batch is a short one
ORDER = np.random.default_rng(1).permutation(IMAGES)
TRAINING = SGD(momentum=0.9, weight_decay=1e-3)
END = (Flatten(), Linear(3))
NETWORKS = {
    "convolution": ((8, 7, 2), (Conv2d(5, 3), ReLU(), Conv2d(3, 2), *END)),
    "stride and padding": ((9, 8, 1), (Conv2d(4, 3, 2, "same"), Tanh(), Conv2d(3, 2, 2, "floor", bias=False), *END)),
    "max-pool": ((9, 9, 2), (Conv2d(3, 2), MaxPool2d(2), ReLU(), MaxPool2d(3, 1), *END)),
    "average-pool": ((7, 7, 2), (Conv2d(3, 2), AvgPool2d(4, padding="auto"), Flatten(), Linear(3))),
    "global average": ((5, 3, 2), (Conv2d(3, 2), ReLU(), GlobalAvgPool(), Linear(3))),
    "linear": ((12,), (Linear(7), ReLU(), Linear(5, bias=False), Sigmoid(), Linear(3))),
    "elementwise": (
        (4, 5, 2),
        (
            *(Tanh(), Conv2d(3, 2), GELU(), Conv2d(2, 2), LeakyReLU(0.2), Flatten()),
            *(Linear(5), Tanh(), Linear(4), GELU(), Linear(3), LeakyReLU(), Linear(3)),
        ),
    ),
    "dropout": (
        (4, 3, 2),
        (
            *(Dropout(0.2), Conv2d(3, 2), Dropout(0.5), ReLU(), Flatten()),
            *(Dropout(0.1), Linear(6), Residual((Dropout(0.7), Linear(6))), Dropout(0.0), Linear(3)),
        ),
    ),
    "batch normalization": ((5, 5, 2), (Conv2d(3, 2, bias=False), BatchNorm2d(), ReLU(), *END)),
    "residual": (
        (5, 4, 2),
        (
            *(Conv2d(3, 2), Residual((ReLU(), Conv2d(3, 3, padding="same"), Tanh())), MaxPool2d(3, padding="floor")),
            *(Flatten(), Residual((Linear(3, bias=False),)), Linear(3)),
        ),
    ),
    "two classes": ((6, 6, 1), (Conv2d(3, 3), Sigmoid(), Flatten(), Linear(1), Sigmoid())),
    "squared error": ((6, 6, 1), (Conv2d(3, 3), ReLU(), *END)),
}
"""An input shape and layers by what is tried; small, so that rounding stays small and Python is fast enough."""
LOSSES = {"two classes": Loss.BINARY_CROSS_ENTROPY, "squared error": Loss.MEAN_SQUARED_ERROR}


class Wrong(Exception):
    """What a program computes differs; the text says what and by how much."""


def reference_of(name: str) -> str:
    """Return the backend to compare another with."""
    return "python" if name == "numpy" else "numpy"


def examine(backend: Backend, other: Backend, title: str) -> tuple[str, str]:
    """Return `right`, `WRONG` or `refused`, and the line that says so, of a backend on the network of a title."""
    network, loss = Network(*NETWORKS[title]), LOSSES.get(title, Loss.SOFTMAX_CROSS_ENTROPY)
    try:
        with (
            contextlib.closing(other.compile(network, loss, TRAINING, BATCH)) as reference,
            contextlib.closing(backend.compile(network, loss, TRAINING, BATCH)) as program,
        ):
            off = max(_compare(program, reference))
    except CnnexpError as refusal:
        return "refused", f"refused: {refusal}"
    except Wrong as wrong:
        return "WRONG", f"WRONG: {wrong}"
    except Exception as error:  # whatever a kernel in the making raises
        return "WRONG", f"WRONG: {type(error).__name__}: {error}{_place(error)}"
    return "right", f"right, to {off:.0e}"


def _compare(program: Program[Any], reference: Program[Any]) -> Iterator[float]:
    """Yield how far apart two programs of a network are, of the largest number.

    Raises:
        Wrong: by more than `ALLOWED`.
    """
    network = program.network
    rng = np.random.default_rng(0)
    images = rng.standard_normal((IMAGES, *network.input_shape), np.float32)
    classes = 2 if program.loss == Loss.BINARY_CROSS_ENTROPY else network.output_shape[0]
    labels = rng.integers(0, classes, IMAGES)
    start = network.initial_state(0)
    handles = [made.load(images, labels) for made in (program, reference)]

    def both(method: str, *arguments: Any) -> list[Any]:
        return [
            getattr(made, method)(handle, *arguments)
            for made, handle in zip((program, reference), handles, strict=True)
        ]

    for made in (program, reference):
        made.restore(start)
    yield _off("the scores of predict", *both("predict"))
    for batch in (ORDER[:BATCH], ORDER[:1]):
        (totals, gradient), (their_totals, theirs) = both("gradients", batch)
        yield _off("the loss", np.array(totals.loss), np.array(their_totals.loss))
        if (totals.correct, totals.count) != (their_totals.correct, their_totals.count):
            raise Wrong(f"{totals.correct} of {totals.count} right, should be {their_totals.correct}")
        for parameter in network.parameters:
            told = f"the gradient of {parameter.name}, {'a batch of ' if len(batch) > 1 else 'of '}{len(batch)}"
            yield _off(told, parameter.view(gradient), parameter.view(theirs))
    for made in (program, reference):
        made.restore(start)
    both("train", ORDER, RATE)
    trained = program.state()
    yield from _off_state("after training", trained, reference.state())

    program.restore(start)
    program.train(handles[0], ORDER, RATE)
    _need_same(program.state(), trained, "trained again from the same state, the same steps end elsewhere")
    program.restore(start)
    program.train(handles[0], ORDER[: 2 * BATCH], RATE)
    kept = program.state()
    program.train(handles[0], ORDER, RATE)
    program.restore(kept)
    program.train(handles[0], ORDER[2 * BATCH :], RATE)
    _need_same(program.state(), trained, "trained on from a state that was kept on the way, it ends elsewhere")
    program.restore(start)
    for first in range(0, IMAGES, BATCH):
        _, gradient = program.gradients(handles[0], ORDER[first : first + BATCH])
        program.apply(gradient, RATE)
    yield from _off_state("after gradients and apply in turn", program.state(), trained)


def _off_state(when: str, state: State, other: State) -> Iterator[float]:
    if set(state) != set(other):
        raise Wrong(f"the state holds {sorted(state)}, should be {sorted(other)}")
    for name in state:
        yield _off(f"{name} {when}", state[name], other[name])


def _need_same(state: State, other: State, otherwise: str) -> None:
    if not all(np.array_equal(state[name], other[name]) for name in other):
        raise Wrong(otherwise)


def _off(what: str, found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest difference, of the largest number; raise Wrong where it is not allowed."""
    if found.shape != wanted.shape:
        raise Wrong(f"{what} has shape {found.shape}, should be {wanted.shape}")
    off = float(np.abs(found - wanted).max(initial=0.0) / max(np.abs(wanted).max(initial=0.0), 1e-6))
    if not off <= ALLOWED:  # nan is not, either
        raise Wrong(f"{what} is off by {off:.1g} of its largest; {ALLOWED:.0e} is rounding")
    return off


def _place(error: Exception) -> str:
    """Return where an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
