"""What must be right: of a backend, what it computes, compared with another's; of a rule on scalars, its derivative.

`cnnexp check` and `cnnexp doctor` compare with `numpy`, and `numpy` with `python`; the tests compare all backends on
these networks, and on odder ones, with a float64 oracle that imports nothing of this package.
"""

import contextlib
import math
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from cnnexp.backends.protocol import Backend, Program, State
from cnnexp.backends.state import AVERAGES
from cnnexp.errors import CnnexpError, NetworkError, said
from cnnexp.network import (
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAvgPool,
    Linear,
    MaxPool2d,
    Residual,
    Shape,
    Structural,
)
from cnnexp.network.elementwise import GELU, Elementwise, LeakyReLU, Maths, ReLU, Sigmoid, Tanh
from cnnexp.network.losses import Loss, compute
from cnnexp.network.recorded import Recorded
from cnnexp.network.shapes import Network, walk
from cnnexp.optimizers import SGD, Optimizer

ALLOWED = 1e-4
"""Of the largest number of an array: what float32, summed in another order, is far from on networks so small."""

IMAGES, BATCH, RATE = 11, 4, 0.05  # the last batch is a short one
ORDER = np.random.default_rng(1).permutation(IMAGES)
TRAINING = SGD(momentum=0.9, weight_decay=1e-3)
END = (Flatten(), Linear(3))
NETWORKS = {
    "convolution": ((8, 7, 2), (Conv2d(5, 3), ReLU(), Conv2d(3, 2), *END)),
    "stride and padding": ((9, 8, 1), (Conv2d(4, 3, 2, "same"), Tanh(), Conv2d(3, 2, 2, "floor", bias=False), *END)),
    "groups and dilation": (
        (8, 7, 4),
        (Conv2d(6, 3, 2, "same", groups=2), Tanh(), Conv2d(6, 2, 1, 1, groups=6, dilation=2), ReLU(), *END),
    ),
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
    "padded residual": ((5, 4, 2), (Tanh(), Conv2d(2, 2), Residual((Conv2d(3, 2, 2, "same"),), "padded"), *END)),
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


def examine(backend: Backend, other: Backend, trial: str | Network, optimizer: Optimizer = TRAINING) -> tuple[str, str]:
    """Return `right`, `WRONG` or `refused`, and the line that says so, of a backend on a network.

    It is compared with another, that is right. The trial is the network, or a title of `NETWORKS`.
    """
    network = trial if isinstance(trial, Network) else Network(*NETWORKS[trial])
    loss = LOSSES.get(str(trial), Loss.SOFTMAX_CROSS_ENTROPY)
    try:
        with (
            contextlib.closing(other.compile(network, loss, optimizer, BATCH)) as reference,
            contextlib.closing(backend.compile(network, loss, optimizer, BATCH)) as program,
        ):
            off = max(_compare(program, reference))
    except CnnexpError as refusal:
        return "refused", f"refused: {refusal}"
    except Wrong as wrong:
        return "WRONG", f"WRONG: {wrong}"
    except Exception as error:  # whatever a kernel in the making raises
        return "WRONG", f"WRONG: {said(error)}{_place(error)}"
    return "right", f"right, to {off:.0e}"


def explain(found: Mapping[str, tuple[str, str]]) -> str | None:
    """Return which operation explains all that is wrong, None where none does, or more than two may.

    It is in every network that is wrong and in none that is right, of what `examine` returned by titles of `NETWORKS`.
    """
    wrong = {title: text for title, (verdict, text) in found.items() if verdict == "WRONG"}
    right = set().union(*(_parts(title) for title, (verdict, _) in found.items() if verdict == "right"))
    update, suspects = {type(TRAINING).__name__}, list[set[str]]()
    for title, text in wrong.items():  # once gradients are right, no layer is suspected but one of state
        if " after " in text:
            suspects.append({"BatchNorm2d"} if "running" in text else update)
        else:
            suspects.append(_parts(title) - update)
    guilty = sorted(set.intersection(*suspects) - right) if suspects else []
    # every network has a Linear: where all are wrong it is guilty only if they say so
    if not 1 <= len(guilty) <= 2 or (guilty == ["Linear"] and not all("linear" in text for text in wrong.values())):
        return None
    gradient = all("the gradient of" in text for text in wrong.values())
    why = "its gradient, not its output" if gradient else "it is in every network that is wrong, in none that is right"
    return f"{' or '.join(guilty)} is wrong: {why}"


def _parts(title: str) -> set[str]:
    """Return what a network is computed with: its kinds of layers, its loss, its optimizer."""
    loss = LOSSES.get(title, Loss.SOFTMAX_CROSS_ENTROPY).name
    stages = walk(Network(*NETWORKS[title]).stages)
    return {type(stage.layer).__name__ for stage in stages} | {loss, type(TRAINING).__name__}


def _compare(program: Program[Any], reference: Program[Any]) -> Iterator[float]:
    """Yield how far apart two programs of a network are, of the largest number; raise Wrong by more than `ALLOWED`."""
    network = program.network
    rng = np.random.default_rng(0)
    images = rng.standard_normal((IMAGES, *network.input_shape), np.float32)
    classes = 2 if program.loss.is_binary else network.output_shape[0]
    labels = rng.integers(0, classes, IMAGES)
    start = network.initial_state(0)
    pairs = [(made, made.load(images, labels)) for made in (program, reference)]
    handle = pairs[0][1]

    def both(method: str, *arguments: Any) -> list[Any]:
        return [getattr(made, method)(handle, *arguments) for made, handle in pairs]

    for made in (program, reference):
        made.restore(start)
    yield _off("the scores of predict", *both("predict"))
    for batch in (ORDER[:BATCH], ORDER[:1]):
        (totals, gradient), (their_totals, theirs) = both("gradients", batch)
        yield _off("the loss", np.array(totals.loss), np.array(their_totals.loss))
        if (totals.correct, totals.count) != (their_totals.correct, their_totals.count):
            raise Wrong(f"{totals.correct} of {totals.count} right, should be {their_totals.correct}")
        for parameter in network.parameters:
            what = f"the gradient of {parameter.name}, {'a batch of ' if len(batch) > 1 else 'of '}{len(batch)}"
            yield _off(what, parameter.view(gradient), parameter.view(theirs))
    for made in (program, reference):
        made.restore(start)
    both("train", ORDER, RATE)
    trained = program.state()
    yield from _off_state("after training", trained, reference.state())

    program.restore(start)
    program.train(handle, ORDER, RATE)
    _need_same(program.state(), trained, "trained again from the same state, the same steps end elsewhere")
    program.restore(start)
    program.train(handle, ORDER[: 2 * BATCH], RATE)
    kept = program.state()
    program.train(handle, ORDER, RATE)
    program.restore(kept)
    program.train(handle, ORDER[2 * BATCH :], RATE)
    _need_same(program.state(), trained, "trained on from a state that was kept on the way, it ends elsewhere")
    program.restore(start)
    for first in range(0, IMAGES, BATCH):
        _, gradient = program.gradients(handle, ORDER[first : first + BATCH])
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


class _Probe(Recorded):
    """A number that varies; what a rule does with it must be what every target can compile."""

    def apply(self, operation: str, *values: Any) -> Self:
        for value in values:
            if not isinstance(value, _Probe | np.float32):
                raise NetworkError(f"the number {value!r} in a rule: write numpy.float32({value!r}), else a double")
        return self

    @classmethod
    def call(cls, *values: Any) -> Self:
        """Stand for any function that a rule is given."""
        return cls().apply("call", *values)


PROBING = Maths(*[_Probe.call] * 5)
EXACT = Maths(np.exp, np.tanh, np.vectorize(math.erf, [float]), np.maximum, np.where)
POINTS = np.linspace(-6, 6, 101) + 0.01234  # so that no usual kink is among them
STEP = 1e-6  # float64: differences are right to 1e-9
DERIVATIVE_ALLOWED = 1e-3  # of its size; constants are float32
APART = np.float32(2**-8)  # of inputs in float32: far enough for rounding, near enough for most kinks
CHANGE_ALLOWED = 0.05  # of its size
EDGES = np.array([-20, 0, 20], np.float32)
OF_STATES = {"seed", "step", *AVERAGES, *AVERAGES.values()}  # what a state holds beside slots
STEPS = 100  # of an optimizer, after which a bowl must be lower


def check_rules(network: Network, optimizer: Optimizer) -> None:
    """Raise NetworkError where a layer or an optimizer of others is wrong; a rule takes less than a millisecond."""
    for stage in {id(stage.layer): stage for stage in walk(network.stages)}.values():
        if isinstance(stage.layer, Elementwise) and _is_own(stage.layer):
            check_layer(stage.layer)
        elif isinstance(stage.layer, Structural):
            check_structural(stage.layer, stage.input_shape)
    if _is_own(optimizer):
        check_optimizer(optimizer)


def check_layer(layer: Elementwise) -> None:
    """Compare a layer's derivative with central differences of its rule, on numbers -6 .. 6.

    NetworkError is raised where they differ, one is no number, or uses what not every target can compile.
    """
    with _named(f"layer {type(layer).__name__}"), np.errstate(all="ignore"):
        layer.derivative(PROBING)(_Probe(), layer.rule(PROBING)(_Probe()))
        rule, derivative = layer.rule(EXACT), layer.derivative(EXACT)

        def both(x: np.ndarray) -> list[np.ndarray]:  # either may be a constant
            y = np.broadcast_to(rule(x), x.shape)
            return [y, np.broadcast_to(derivative(x, y), x.shape)]

        slope, given = (both(POINTS + STEP)[0] - both(POINTS - STEP)[0]) / (2 * STEP), both(POINTS)[1]
        for what, row in zip(("rule", "derivative"), both(EDGES), strict=True):
            if np.isnan(row).any():
                raise NetworkError(f"its {what} is no number at x = {EDGES[np.isnan(row)][0]:g}")
        off = np.abs(given - slope)
        legal = off <= DERIVATIVE_ALLOWED * (np.abs(slope) + np.abs(slope).max() / 10) + 1e-9
        if not (layer.surrogate or legal.all()):
            at = int(np.where(legal, -1.0, off).argmax())
            found = f"{(~legal).sum()} of {len(POINTS)} points: {given[at]:.4g} at x = {POINTS[at]:.3g}"
            right = f"differences of its rule give {slope[at]:.4g}; surrogate = True if it is meant"
            raise NetworkError(f"its derivative is wrong at {found}, where {right}")


def check_structural(layer: Structural, shape: Shape) -> None:
    """Compare a layer's backward pass with a central difference of its forward pass, on two images of a shape.

    NetworkError is raised where they differ, or what comes of an image depends on another one.
    """
    x, direction = np.random.default_rng(0).standard_normal((2, 2, *shape), np.float32)
    with _named(f"layer {type(layer).__name__}"), np.errstate(all="ignore"):
        y = layer.forward(x)
        if not np.allclose(layer.forward(x[:1]), y[:1], 1e-4, 1e-5, equal_nan=True):
            raise NetworkError("what it makes of an image depends on the other images of the batch")
        near = [layer.forward(x + step * direction) for step in (APART, -APART)]
        change = (near[0] - near[1]) / (2 * APART)
        right, given = np.vdot(change, change), np.vdot(layer.backward(x, y, change), direction)
        # a forward pass that has no number for such images says nothing
        if np.isfinite(right) and not (layer.surrogate or abs(given - right) <= CHANGE_ALLOWED * right):
            found = f"{given:.4g} along a random direction, where differences of its forward pass give {right:.4g}"
            raise NetworkError(f"its backward pass is wrong: {found}; surrogate = True if it is meant")


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise NetworkError where an optimizer's rule uses what not every target can compile, or makes a NaN of zeros."""
    with _named(f"optimizer {type(optimizer).__name__}"), np.errstate(all="ignore"):
        if len(optimizer.slots) > 2:
            raise NetworkError(f"slots {', '.join(optimizer.slots)}: must be at most two")
        if {*optimizer.slots} & OF_STATES or len({*optimizer.slots}) < len(optimizer.slots):
            others = ", ".join(sorted(OF_STATES))
            raise NetworkError(f"slots {', '.join(optimizer.slots)}: must be names of their own, none of {others}")
        made = optimizer.rule(_Probe.call, _Probe.call)(*[_Probe()] * 7)
        if not isinstance(made, tuple) or len(made) != 3:
            raise NetworkError("its rule must return three values, (w, s, t), those without slots as they come")
        w, slots = np.array([1, 0, -1], np.float32), [np.zeros(3, np.float32) for _ in optimizer.slots]
        optimizer.apply(w, np.zeros(3, np.float32), slots, optimizer.lr, 1)
        if not np.isfinite([w, *slots]).all():
            raise NetworkError("a gradient of 0 makes a parameter or its state infinite or no number")


def check_descent(optimizer: Optimizer) -> None:
    """Raise NetworkError where an optimizer does not lower the sum of w^2 in 100 steps of its learning rate."""
    w = np.array([1, -1, 0.5, 2], np.float32)
    slots, before = [np.zeros(4, np.float32) for _ in optimizer.slots], float(w @ w)
    with _named(f"optimizer {type(optimizer).__name__}"), np.errstate(all="ignore"):
        for step in range(1, STEPS + 1):
            optimizer.apply(w, 2 * w, slots, optimizer.lr, step)
        if not (after := float(w @ w)) < before:
            steps = f"{STEPS} steps of lr={optimizer.lr:g}"
            raise NetworkError(f"{steps} down the sum of w^2 lead from {before:g} to {after:g}")


def check_gradient(loss: Loss) -> None:
    """Raise NetworkError unless a loss's gradient is its rule's central differences, and NumPy's form is the rule."""
    rng, outputs = np.random.default_rng(0), 1 if loss.is_binary else 3
    rule = loss.rule(outputs, np.exp, np.log, np.log1p)
    for label in (0, 1, 1, 0):
        scores = rng.uniform(0.1, 0.9, outputs)
        given, unused = np.empty(outputs), np.empty(outputs)
        value, _ = rule(scores, label, 1.0, given)
        moved = STEP * np.eye(outputs)
        slope = [(rule(scores + m, label, 1.0, unused)[0] - rule(scores - m, label, 1.0, unused)[0]) / 2 for m in moved]
        arrays = np.empty((1, outputs)), np.empty(1), np.empty(1)
        compute(loss, scores[np.newaxis], np.array([label]), np.float32(1), *arrays)
        pairs = {
            "its gradient": (given, np.array(slope) / STEP),
            "NumPy's gradient": (arrays[0][0], given),
            "NumPy's loss": (arrays[1], np.array([value])),
        }
        for what, (found, wanted) in pairs.items():
            if not np.abs(found - wanted).max() <= DERIVATIVE_ALLOWED * np.abs(wanted).max():
                raise NetworkError(f"loss {loss.name}: {what} is wrong: {found}, should be {wanted}")


def _is_own(spec: object) -> bool:
    return type(spec).__module__.partition(".")[0] != __name__.partition(".")[0]


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Name a user's class in whatever its code raises."""
    try:
        yield
    except CnnexpError as error:
        raise NetworkError(f"{what}: {' '.join(str(error).split())}") from error
    except Exception as error:
        raise NetworkError(f"{what}: {said(error)}{_place(error)}") from error


def _place(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
