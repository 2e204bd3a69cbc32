"""What every backend must do, as functions that any test can call: `check_backend(backend, network, ...)`.

Everything is compared with the float64 oracle of `reference`. Where a number decides, whether a ReLU lets it through or
which pixel of a window is largest, float32 and float64 may decide differently if rounding blurs it. Only a case without
such decisions says anything about a backend: `decisions_are_clear`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import reference

from cnnexp import SGD, Adam, AvgPool2d, BatchNorm2d, Dropout, Loss, MaxPool2d, Network, Residual, Tanh
from cnnexp.backends import backend_class
from cnnexp.errors import BackendUnavailable
from cnnexp.network import Stage, noise
from cnnexp.network.shapes import walk
from cnnexp.optimizers import Optimizer

TOLERANCE = 1e-5  # relative, of outputs and of every parameter's gradient
SEED = 7  # of what Dropout draws
INEXACT = ("sigmoid", "tanh", "gelu", "leakyrelu", "avgpool2d", "globalavgpool", "dropout", "batchnorm2d")
CLEAR = 1e-4  # a decision between numbers closer than this, relative to the layer's largest, is blurred
BARELY_CLEAR = 4e-6  # likewise where few layers follow each other, which round less


@dataclass
class Case:
    """A network with parameters and data.

    Attributes:
        exact: parameters and images are small whole numbers, so that most sums are exact, and ties are common.
        known: what the oracle has found, which takes it as long as a backend; by batch, see `oracle`.
    """

    network: Network
    loss: Loss
    parameters: np.ndarray
    images: np.ndarray
    labels: np.ndarray
    exact: bool = False
    known: dict = field(default_factory=dict, repr=False)

    @property
    def state(self) -> dict[str, np.ndarray]:
        """What a program is given: the parameters, and running averages and a seed where there are any."""
        state = {**self.network.initial_state(SEED), "parameters": self.parameters}
        if "running" in state:
            state["running"] = np.random.default_rng(1).uniform(0.5, 1.5, self.network.running_count).astype(np.float32)
        return state

    def layers(self, batch: np.ndarray | None = None) -> list[dict]:
        """Return the network as the oracle takes it, in the first training step on these images, else in `predict`."""
        flat = {name: array.astype(np.float64) for name, array in self.state.items() if array.ndim}
        return _describe(self.network.stages, flat, batch)

    @property
    def batches(self) -> list[np.ndarray]:
        """The batches that `check_case` trains on: the last is a short one."""
        count = len(self.images)
        order, size = np.arange(count)[::-1].astype(np.int64), max(count - 1, 1)
        return [batch for batch in (order[:size], order[size:]) if len(batch)]

    @property
    def float_images(self) -> np.ndarray:
        images = self.images
        return images / 255.0 if images.dtype == np.uint8 else images.astype(np.float64)


def make_case(network, loss=Loss.SOFTMAX_CROSS_ENTROPY, images=5, seed=0, exact=False) -> Case:
    """Draw parameters, images and labels."""
    rng = np.random.default_rng(seed)
    shape = (images, *network.input_shape)
    if exact:
        parameters, pixels = rng.integers(-1, 2, network.parameter_count), rng.integers(-2, 3, shape)
    else:
        parameters, pixels = rng.uniform(-1, 1, network.parameter_count), rng.standard_normal(shape)
        for parameter in network.parameters:
            parameter.view(parameters)[...] *= np.sqrt(3 / parameter.fan_in)  # keeps activations near 1
    labels = rng.integers(0, 2 if loss == Loss.BINARY_CROSS_ENTROPY else network.output_shape[0], images)
    return Case(network, loss, parameters.astype(np.float32), pixels.astype(np.float32), labels, exact)


def _describe(stages: Iterable[Stage], flat: dict[str, np.ndarray], batch: np.ndarray | None) -> list[dict]:
    layers: list[dict] = []
    for stage in stages:
        layer = stage.layer
        found = {**vars(layer), "kind": type(layer).__name__.lower(), "averages": stage.running}
        if stage.weight:
            found["weight"] = stage.weight.view(flat["parameters"])
            found["bias"] = stage.bias.view(flat["parameters"]) if stage.bias else None
        match layer:
            case MaxPool2d() | AvgPool2d():
                found["stride"] = layer.stride or layer.pool
            case Residual():
                found["layers"] = _describe(stage.stages, flat, batch)
                if layer.shortcut == "padded":
                    found["step"] = max(-(-stage.input_shape[i] // stage.output_shape[i]) for i in range(2))
            case Dropout() if batch is not None:
                key, size = noise.layer_key(SEED, 1, stage.name), math.prod(stage.output_shape)
                found["kept"] = noise.keeps(key, layer.rate, batch, size).reshape(-1, *stage.output_shape)
            case BatchNorm2d() if batch is None:
                found["running"] = [average.view(flat["running"]) for average in stage.running]
        layers.append(found)
    return layers


def decisions_are_clear(case: Case, apart: float = CLEAR) -> bool:
    """Tell whether float32 must decide as float64 does at every ReLU, every maximum and every hit.

    Exact zeros and ties count as clear: in random cases they come from equal terms. In cases of whole numbers they also
    come from terms that cancel, and are clear as long as the sums are exact.
    """
    last = {"kind": "binary" if case.loss == Loss.BINARY_CROSS_ENTROPY else "scores"}
    passes = [(case.layers(), case.float_images)]
    if case.network.running or case.network.draws:
        passes += [(case.layers(batch), case.float_images[batch]) for batch in case.batches]
    return all(_clear([*layers, last], x, case.exact, apart)[0] for layers, x in passes)


@functools.cache
def clear_case(
    network: Network, loss=Loss.SOFTMAX_CROSS_ENTROPY, images=5, exact=False, whole_after=1000, apart=CLEAR
) -> Case:
    """Return the first drawn case whose decisions are clear; after so many draws they are of whole numbers."""
    draws = (make_case(network, loss, images, seed, exact or seed >= whole_after) for seed in range(1100))
    return next(draw for draw in draws if decisions_are_clear(draw, apart))


def _clear(layers: list[dict], x: np.ndarray, exact: bool, apart: float) -> tuple[bool, bool]:
    """Return whether the decisions on the way of x through layers are clear, and whether sums still are exact."""
    whole = exact
    for layer in layers:
        if layer["kind"] == "batchnorm2d" and "running" not in layer and not _spread(x):
            return False, exact
        if layer["kind"] == "residual":
            clear, exact = _clear(layer["layers"], x, exact, apart)
            if not clear:
                return False, exact
        gaps = _gaps(layer, x)
        blurred = gaps < apart * np.abs(x).max(initial=0)
        if not exact and np.any(blurred if whole else blurred & (gaps != 0)):
            return False, exact
        # fractions, or sums of more than the 24 bits of a float32
        exact = exact and layer["kind"] not in INEXACT and np.abs(x).max(initial=0) < 2**18
        if layer["kind"] in reference.LAYERS:
            x = reference.LAYERS[layer["kind"]][0](x, layer)
    return True, exact


def _spread(x: np.ndarray) -> bool:
    """Tell whether the numbers of every channel differ enough for what is left of them without their mean."""
    few = x[..., 0].size < 4
    return not few and bool((x.var(axis=(0, 1, 2)) > 1e-3 * np.square(x).mean(axis=(0, 1, 2)) + 1e-6).all())


def _gaps(layer: dict, x: np.ndarray) -> np.ndarray:
    """Return how far each decision that a layer takes on x is from being another one."""
    match layer["kind"]:
        case "relu" | "leakyrelu":
            return np.abs(x)
        case "binary":
            # a hit or not; and 1 - p, by which the gradient divides, has lost float32's last digits near 1
            return np.minimum(np.abs(x - 0.5), np.minimum(x, 1 - x) / 100) * np.abs(x).max()
        case "scores":
            return np.diff(np.sort(x, axis=1)[:, -2:], axis=1)
        case "maxpool2d":
            windows: dict[tuple, list] = {}
            for p, q, _, _, row, column in reference.places(x, layer["pool"], layer):
                windows.setdefault((p, q), []).append(x[:, row, column])
            return np.concatenate([np.diff(np.sort(w, axis=0)[-2:], axis=0).ravel() for w in windows.values()])
    return np.empty(0)


def flat_gradient(case: Case, found: list) -> np.ndarray:
    """Return the oracle's gradients, parameter by parameter, as one flat float64 buffer."""
    flat = np.zeros(case.network.parameter_count)
    for parameter, gradient in zip(case.network.parameters, found, strict=True):
        parameter.view(flat)[...] = gradient
    return flat


same_case = functools.cache(make_case)  # for all backends: the oracle finds its answers once


def check_backend(backend, network: Network, **drawn) -> None:
    """Hold one backend to the whole contract on one network: outputs, gradients, training, state, repetition."""
    check_case(backend, same_case(network, **drawn), Adam(lr=0.01))


def is_here(name: str) -> bool:
    """Tell whether this machine has what a backend needs."""
    with contextlib.suppress(BackendUnavailable):
        return backend_class(name)() is not None
    return False


def check_case(backend, case: Case, optimizer: Optimizer | None = None, answers: bool = True) -> None:
    """Compare scores, totals and the gradient of every parameter with the oracle; train where there is an optimizer."""
    program = backend.compile(case.network, case.loss, optimizer or SGD(lr=0.1), max(len(case.images) - 1, 1))
    with contextlib.closing(program), contextlib.closing(program):  # it may be closed twice
        if answers:
            program.restore(case.state)
            handle = program.load(case.images, case.labels)
            check_scores(program, handle, case)
            for batch in case.batches:
                check_gradients(program, handle, case, batch)
        if optimizer:
            check_steps(program, case, optimizer)


def check_training(backend, case: Case, optimizer: Optimizer) -> None:
    check_case(backend, case, optimizer, answers=False)


def started(backend, case: Case, optimizer: Optimizer, batch_size: int):
    """Return a program in the state that a case begins with, and the handle of its images."""
    program = backend.compile(case.network, case.loss, optimizer, batch_size)
    program.restore(case.state)
    return program, program.load(case.images, case.labels)


def check_scores(program, handle, case: Case) -> None:
    scores = program.predict(handle)
    assert scores.dtype == np.float32
    assert scores.shape == (len(case.images), *case.network.output_shape)
    if "scores" not in case.known:
        outputs = reference.forward(case.layers(), case.float_images)
        case.known["scores"] = outputs[-1], max(np.abs(y).max(initial=0.0) for y in outputs)
    expected, whole = case.known["scores"]
    assert _close(scores, expected, whole), reference.relative_error(scores, expected)


def check_gradients(program, handle, case: Case, batch: np.ndarray) -> None:
    program.restore(case.state)
    before = program.state()
    totals, gradient = program.gradients(handle, batch)
    assert_same_state(program.state(), before)
    losses, hits, expected, moved, whole = oracle(case, batch)
    if case.network.running:
        program.apply(gradient, 0.0)
        assert _close(program.state()["running"], moved)
        program.restore(case.state)
    assert totals.count == len(batch)
    assert totals.correct == hits.sum()
    np.testing.assert_allclose(totals.loss, losses.sum(), rtol=TOLERANCE, atol=TOLERANCE)
    assert gradient.dtype == np.float32
    assert gradient.shape == expected.shape
    for parameter in case.network.parameters:
        actual, wanted = parameter.view(gradient), parameter.view(expected)
        error = reference.relative_error(actual, wanted)
        assert _close(actual, wanted, whole), f"{parameter.name}: relative error {error:.1e}"


def oracle(case: Case, batch: np.ndarray) -> tuple:
    """Return what the oracle finds in a batch: losses, hits, gradient, running averages after it, `_uncancelled`."""
    key = batch.tobytes()
    if key not in case.known:
        layers, losses, hits, gradient = _step(case, batch)
        moved = case.state.get("running", np.empty(0)).astype(np.float64)
        _move(moved, layers)
        case.known[key] = losses, hits, gradient, moved, _uncancelled(case, batch)
    return case.known[key]


def _step(case: Case, batch: np.ndarray) -> tuple:
    layers, loss = case.layers(batch), case.loss
    images, labels = case.float_images[batch], case.labels[batch]
    losses, hits, found = reference.gradients(layers, images, labels, loss.name, loss.label_smoothing)
    return layers, losses, hits, flat_gradient(case, found)


def _move(averages: np.ndarray, layers: list[dict]) -> None:
    """Move flat running averages by what was seen in the step that `layers` have been run in."""
    for layer in layers:
        for average, seen in zip(layer["averages"], layer.get("seen", ()), strict=True):
            view = average.view(averages)
            view += layer["momentum"] * (seen - view)
        _move(averages, layer.get("layers", []))


def _uncancelled(case: Case, batch: np.ndarray) -> float:
    """Return how large the mean gradient is before its terms cancel: images, or a label and a probability near it."""
    sizes = []
    # the mean that a batch normalization takes away binds the images together
    whole = len(batch) > 8 or case.network.running
    for part in [batch] if whole else np.split(batch, len(batch)):
        _, losses, _, gradient = _step(case, part)
        sizes.append(np.abs(gradient).max() / max(-np.expm1(-losses.max()), 1e-30))
    # a bias before a batch normalization has no gradient but what rounding leaves; nor a scale; nor has a tanh near 1
    blurs = case.network.running or any(isinstance(stage.layer, Tanh) for stage in walk(case.network.stages))
    return float(np.mean(sizes)) * (100 if blurs else 1)


def _close(actual, expected, whole: float = 0.0) -> bool:
    """Compare to TOLERANCE of the largest value; what cancels leaves rounding of the size of the `whole`'s."""
    difference = np.abs(actual - expected).max(initial=0.0)
    return bool(difference <= TOLERANCE * np.abs(expected).max(initial=0.0) + 4e-7 * whole + 1e-30)


def check_steps(program, case: Case, optimizer: Optimizer, steps: int = 5) -> None:
    """Training is `gradients` and `apply` in turn; two runs are bit-identical; a run can go on from its state."""
    batch_size = program.batch_size
    order = np.random.default_rng(1).integers(0, len(case.images), (steps - 1) * batch_size + 1)
    handle = program.load(case.images, case.labels)
    program.restore(case.state)
    first = program.train(handle, order, 0.01)
    trained = program.state()
    assert first.count == len(order)
    assert int(trained["step"]) == steps
    assert set(trained) == {"step", *case.state, *optimizer.slots}

    program.restore(case.state)
    assert program.train(handle, order, 0.01) == first, "two runs differ"
    assert_same_state(program.state(), trained)

    program.restore(case.state)
    middle = 2 * batch_size
    program.train(handle, order[:middle], 0.01)
    saved = program.state()
    program.train(handle, order[:middle], 0.5)  # `saved` is a copy that later steps leave alone
    program.restore(saved)
    program.train(handle, order[middle:], 0.01)
    assert_same_state(program.state(), trained)

    program.restore(case.state)
    for start in range(0, len(order), batch_size):
        _, gradient = program.gradients(handle, order[start : start + batch_size])
        program.apply(gradient, 0.01)
    assert int(program.state()["step"]) == steps
    for name in (*case.state, *optimizer.slots):
        np.testing.assert_allclose(program.state()[name], trained[name], rtol=1e-5, atol=1e-6)


def assert_same_state(actual: dict, expected: dict) -> None:
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert np.array_equal(actual[name], value), f"{name} differs"
