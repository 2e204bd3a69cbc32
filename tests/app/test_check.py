"""`cnnexp check`: what it says of backends that are right, and of those that are wrong on purpose."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from commands import ROOT, raises
from tables import each

from cnnexp import Conv2d, Elementwise, Flatten, Linear, Network, testing
from cnnexp.app import check
from cnnexp.backends import backend_class
from cnnexp.backends.layerwise import LayerwiseProgram
from cnnexp.backends.plain.numpy import Numpy, NumpyOps
from cnnexp.errors import BackendUnavailable, CnnexpError, ConfigError, NetworkError
from cnnexp.network.elementwise import KINDS
from cnnexp.network.layers import LAYERS, Residual, Structural
from cnnexp.network.losses import NAMES, Loss
from cnnexp.network.shapes import walk
from cnnexp.optimizers import OPTIMIZERS, SGD, Optimizer
from cnnexp.system import registry


def examined(ops=NumpyOps, program=LayerwiseProgram, title="convolution"):
    """Return what is found of a backend made of these parts."""
    return testing.examine(SimpleNamespace(compile=lambda *given: program(ops(), *given)), Numpy(), title)


def test_a_right_backend_is_right_on_every_network_and_they_hold_every_layer(capsys):
    check.command(["numpy"])
    first, *rows, last = capsys.readouterr().out.splitlines()
    assert first.startswith("numpy beside python")
    assert [row.split("right, to ")[0].strip() for row in rows] == list(testing.NETWORKS)
    assert last == f"numpy is right on {len(rows)} of {len(rows)} networks"
    stages = [stage for network in testing.NETWORKS.values() for stage in walk(Network(*network).stages)]
    assert {type(stage.layer).__name__ for stage in stages} == set(LAYERS)


def spoiled(name, spoil):
    """Return NumPy's operations, what one of them has computed spoiled."""

    def method(self, *arguments):
        getattr(NumpyOps, name)(self, *arguments)
        spoil(*arguments)

    return type(name, (NumpyOps,), {name: method})


def scale(array, factor):
    array *= np.float32(factor)


DoubledWeights = spoiled("conv2d_backward", lambda x, w, dy, window, dx, dw, db: scale(dw, 1.001))
# as if the buffer were not overwritten
StaleBias = spoiled("linear_backward", lambda x, w, dy, dx, dw, db: db is None or np.add(db, 1, out=db))
NoNumber = spoiled("linear", lambda x, w, b, y: y[0].fill(np.nan))
HalfPool = spoiled("max_pool", lambda x, window, y, saved: scale(y, 0.5))
NoDropout = spoiled("dropout", lambda x, images, key, rate, y: np.copyto(y, x))
NoLoss = spoiled("loss", lambda loss, *rest: scale(rest[-2], 2 if loss == Loss.MEAN_SQUARED_ERROR else 1))
Lost = spoiled("gather", lambda *_: [][0])
Several = type("Several", (NoDropout, HalfPool), {})


class NoMomentum(NumpyOps):
    def updater(self, optimizer):
        return super().updater(SGD())


class Raising(NumpyOps):
    def conv2d(self, x, w, b, window, y):
        raise ValueError("tile\nof 7")


class Forgetful(LayerwiseProgram):
    def state(self):
        return {**super().state(), "velocity": super().state()["velocity"] * 0}


class Drifting(LayerwiseProgram):
    def restore(self, state):
        drift = np.float32(getattr(self, "_drift", 0.0))
        self._drift = drift + np.float32(1e-7)
        super().restore({**state, "parameters": state["parameters"] + drift})


class Refusing(LayerwiseProgram):
    def __init__(self, *arguments):
        raise NetworkError("no layers here")


@each(
    ({"ops": DoubledWeights}, "WRONG", "the gradient of conv1.weight, a batch of 4 is off by 0.001 of its largest"),
    ({"ops": StaleBias}, "WRONG", "the gradient of linear1.bias"),
    ({"ops": NoNumber}, "WRONG", "the scores of predict is off by nan"),
    ({"ops": Raising}, "WRONG", "ValueError: tile of 7 (test_check.py, line "),
    ({"program": Forgetful}, "WRONG", "velocity after training"),
    ({"program": Drifting}, "WRONG", "the same steps end elsewhere"),
    ({"program": Refusing}, "refused", "refused: no layers here"),
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_named(parts, verdict, text):
    found, said = examined(**parts)
    assert found == verdict
    assert text in said


def test_a_wrong_backend_ends_with_an_error(monkeypatch, capsys):
    monkeypatch.setattr(testing, "NETWORKS", {key: testing.NETWORKS[key] for key in ("linear", "convolution")})
    monkeypatch.setattr(backend_class("numpy"), "compile", lambda _, *made: LayerwiseProgram(DoubledWeights(), *made))
    raises(CnnexpError, "check numpy: wrong on 1 of 2 networks", check.command, ["numpy"])
    assert "linear              right" in capsys.readouterr().out


def test_what_cannot_run_says_why(monkeypatch):
    for arguments, said in (
        (["numpi"], r"check numpi: unknown; .*did you mean 'numpy'"),
        (
            ["Conv2d"],
            r"check Conv2d: is part of what `check BACKEND` checks; legal: .* GELU, sgd, .* mean_squared_error",
        ),
        *((words, "check: give one backend") for words in ([], ["numpy", "cpu"], ["backend=numpy"])),
    ):
        raises(ConfigError, said, check.command, arguments)
    monkeypatch.setattr(backend_class("cpu"), "compile", MagicMock(side_effect=BackendUnavailable("no GPU here")))
    raises(CnnexpError, "check cpu: takes none of the networks", check.command, ["cpu"])


@each(
    (DoubledWeights, "Conv2d is wrong: its gradient, not its output"),
    (StaleBias, "Linear is wrong: its gradient, not its output"),
    (HalfPool, "MaxPool2d is wrong: it is in every network that is wrong, in none that is right"),
    (NoDropout, "Dropout is wrong: "),
    (NoMomentum, "SGD is wrong: "),
    (NoLoss, "mean_squared_error is wrong: "),
    (NumpyOps, None),
    (Several, None),  # nothing is guessed
    (Lost, None),
)
def test_one_operation_that_explains_all_is_named(ops, said):
    found = testing.explain({title: examined(ops, title=title) for title in testing.NETWORKS})
    assert found is None if said is None else found.startswith(said)


@pytest.mark.parametrize("name", ["Swish", "sign"])
def test_a_layer_and_an_optimizer_are_compared_on_the_backends_that_compile_them(name, no_plugins, capsys):
    registry.load(f"{ROOT}/tests/outside.py")
    check.command([name])
    first, *rows, last = capsys.readouterr().out.splitlines()
    assert first == f"{name}: right by itself; a network with it, beside numpy:"
    assert [row.split("right, to ")[0].strip() for row in rows] == list(check.COMPILED)
    assert last == f"{name} is right on 3 of 3 backends"


@dataclass(frozen=True)
class Halves(Structural):
    """The second half of a vector times the first, right unless `wrong` says how not."""

    wrong: str = ""

    def output_shape(self, input_shape):
        (size,) = input_shape
        return (size // 2,)

    def forward(self, x):
        first, second = np.split(x, 2, axis=1)
        return first * second - (x.mean(axis=0)[: first.shape[1]] if self.wrong == "batch" else 0)

    def backward(self, x, y, dy):
        first, second = np.split(x, 2, axis=1)
        parts = [dy * first, dy * second] if self.wrong == "swapped" else [dy * second, dy * first]
        return np.concatenate(parts, axis=1) * {"scaled": 1.1, "no number": np.nan}.get(self.wrong, 1)


@each(
    ("", None),
    ("swapped", "its backward pass is wrong: .* along a random direction, where differences of its forward pass give"),
    ("scaled", "its backward pass is wrong: "),
    ("no number", "its backward pass is wrong: nan"),
    ("batch", "what it makes of an image depends on the other images of the batch"),
)
def test_a_structural_layer_is_checked_before_anything_is_trained(monkeypatch, no_plugins, capsys, wrong, said):
    network = Network((6, 6, 2), (Conv2d(2, 3), Flatten(), Halves(wrong), Linear(3)))
    registry.register("layer", "Halves")(Halves)
    if said is None:
        testing.check_rules(network, SGD())
        check.command(["Halves"])
        assert "Halves is right on 3 of 3 backends" in capsys.readouterr().out
    else:
        raises(NetworkError, f"layer Halves: {said}", testing.check_rules, network, SGD())
        monkeypatch.setattr(Halves, "surrogate", True)
        if wrong != "batch":
            testing.check_rules(network, SGD())


def test_the_layers_and_the_optimizers_of_the_package_are_right():
    for kind in KINDS:
        testing.check_layer(kind())
    for optimizer in OPTIMIZERS.values():
        testing.check_optimizer(optimizer())
        testing.check_descent(optimizer())


def test_the_losses_of_the_package_are_right_and_a_wrong_gradient_is_named(capsys, monkeypatch):
    for name in NAMES:
        check.command([name])
    assert capsys.readouterr().out.count("its gradient is the differences', NumPy's form agrees\n") == len(NAMES)

    rule = Loss.rule

    def doubled(self, outputs, *functions):
        right = rule(self, outputs, *functions)
        return lambda scores, label, scale, d_scores: right(scores, label, 2 * scale, d_scores)

    monkeypatch.setattr(Loss, "rule", doubled)
    raises(NetworkError, "loss mean_squared_error: its gradient is wrong", check.command, ["mean_squared_error"])


TWO = np.float32(2)


@dataclass(frozen=True)
class Square(Elementwise):
    """x * x, or what a test makes of it."""

    function: Callable = lambda maths, x: x * x
    slope: Callable = lambda maths, x: TWO * x

    def rule(self, maths):
        return lambda x: self.function(maths, x)

    def derivative(self, maths):
        return lambda x, y: self.slope(maths, x)


def test_a_derivative_may_be_a_surrogate_where_that_is_said():
    testing.check_layer(Square())
    testing.check_layer(Square(lambda maths, x: TWO, lambda maths, x: np.float32(0)))  # a constant
    surrogate = type("Surrogate", (Square,), {"surrogate": True})
    testing.check_layer(surrogate(slope=lambda maths, x: TWO))


def fail(*_):
    raise ValueError("a\nb")


@each(
    ({"function": fail}, r"ValueError: a b \(test_check\.py, line"),
    ({"slope": lambda maths, x: TWO}, "its derivative is wrong at 101 of 101 points"),
    ({"slope": lambda maths, x: np.float32(2.02) * x}, r"its derivative is wrong at .*; surrogate = True if it"),
    ({"slope": lambda maths, x: maths.where(x > TWO, x, TWO * x)}, r"at 34 of 101 points: 6\.012 at x = 6\.01"),
    ({"function": lambda maths, x: np.exp(x)}, r"numpy\.exp in a rule: use maths\.exp$"),
    ({"function": lambda maths, x: math.exp(x)}, r"plain number of one that varies: use maths\.exp, maths\.tanh"),
    ({"function": lambda maths, x: x**2}, r"numpy\.power in a rule: use \+ - \* /"),
    ({"function": lambda maths, x: x if x > TWO else -x}, r"of a number that varies: use maths\.where"),
    ({"function": lambda maths, x: 2.0 * x}, r"the number 2\.0 in a rule: write numpy\.float32\(2\.0\)"),
    ({"function": lambda maths, x: x * x / x}, "its rule is no number at x = 0"),
    ({"function": lambda maths, x: x.sign()}, r"AttributeError: .*'sign' \(test_check\.py, line"),
)
def test_a_wrong_rule_is_one_line_before_anything_is_trained(parts, said):
    layers = (Flatten(), Linear(3), Residual((Square(**parts),)), Linear(3))
    network = Network((2, 2, 1), layers)
    assert raises(NetworkError, f"layer Square: .*{said}", testing.check_rules, network, SGD()).exit_code == 2


@dataclass(frozen=True)
class Own(Optimizer):
    step: Callable = lambda maximum, w, g, rate: w - rate * g
    slots: tuple = ()
    returned: Callable = tuple

    def rule(self, sqrt=np.sqrt, maximum=np.maximum):
        return lambda w, g, s, t, rate, c0, c1: self.returned((self.step(maximum, w, g, rate), s, t))


@each(
    ({"step": lambda maximum, w, g, rate: w - rate * np.sign(g)}, r"numpy\.sign in a rule: use \+ - \* /"),
    ({"step": lambda maximum, w, g, rate: w - rate * g / maximum(g, -g)}, "a gradient of 0 makes"),
    ({"step": lambda maximum, w, g, rate: w - 0.1 * g}, r"the number 0\.1 in a rule"),
    ({"slots": ("a", "b", "c")}, "slots a, b, c: must be at most two"),
    ({"slots": ("a", "a")}, "slots a, a: must be names of their own, none of average_parameters, average_running, "),
    ({"slots": ("running",)}, "slots running: must be names of their own"),
    ({"slots": ("average_parameters",)}, "slots average_parameters: must be names of their own"),
    ({"returned": lambda values: values[0]}, r"its rule must return three values, \(w, s, t\)"),
    ({"returned": lambda values: values[:2]}, "its rule must return three values"),
)
def test_a_wrong_optimizer_is_one_line_before_anything_is_trained(parts, said):
    network = Network((4,), (Linear(3),))
    testing.check_rules(network, Own())
    raises(NetworkError, f"optimizer Own: {said}", testing.check_rules, network, Own(**parts))


def test_an_optimizer_that_climbs_is_named():
    testing.check_descent(Own())
    said = r"optimizer Own: 100 steps of lr=0\.01 down the sum of w\^2 lead from 6\.25 to"
    raises(NetworkError, said, testing.check_descent, Own(step=lambda maximum, w, g, rate: w + rate * g))
