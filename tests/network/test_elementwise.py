from dataclasses import dataclass

import numpy as np
import pytest
import reference
from commands import raises

from cnnexp.backends.cache import fingerprint
from cnnexp.backends.plain.numpy import MATHS
from cnnexp.backends.plain.python import MATHS as PYTHON
from cnnexp.errors import NetworkError
from cnnexp.network import GELU, Elementwise, LeakyReLU, ReLU, Sigmoid, Tanh
from cnnexp.network.elementwise import rational_erf, rational_tanh

LAYERS = (ReLU(), LeakyReLU(0.2), Sigmoid(), Tanh(), GELU())
X = np.linspace(-6, 6, 99).astype(np.float32)


@pytest.mark.parametrize("layer", LAYERS, ids=repr)
def test_a_rule_stays_in_float32_and_hides_no_nan(layer):
    rule, derivative = layer.rule(MATHS), layer.derivative(MATHS)
    assert rule(X).dtype == derivative(X, rule(X)).dtype == np.float32, "nothing is computed in double"
    assert np.isnan(rule(np.float32(np.nan)))
    assert np.isnan(layer.rule(PYTHON)(float("nan")))


def test_sigmoid_keeps_its_distance_from_one_and_functions_of_arithmetic_are_close():
    y = Sigmoid().rule(MATHS)(np.array([-700, -10, 10, 700], np.float32))
    np.testing.assert_allclose(y, 1 / (1 + np.exp(-np.array([-700, -10, 10, 700.0]))), rtol=1e-6, atol=1e-38)

    x = np.linspace(-9, 9, 10_001).astype(np.float32)
    assert np.abs(rational_erf(np.maximum)(x) - reference.erf(x.astype(np.float64))).max() < 4e-7
    assert np.abs(rational_tanh(np.maximum)(x) - np.tanh(x.astype(np.float64))).max() < 4e-7


@dataclass(frozen=True)
class Scaled(Elementwise):
    scale: float = 2.0

    def rule(self, maths):
        return lambda x: np.float32(self.scale) * x

    def derivative(self, maths):
        return lambda x, y: np.float32(self.scale)


def test_a_fingerprint_changes_with_numbers_and_code():
    prints = {fingerprint(layer) for layer in (*LAYERS, LeakyReLU(0.3), Scaled(), Scaled(3.0))}
    assert len(prints) == 8
    assert fingerprint(Scaled()) == fingerprint(Scaled(2.0))
    before = fingerprint(Scaled())
    changed = type("Scaled", (Scaled,), {"rule": lambda self, maths: lambda x: np.float32(self.scale) * x * x})
    assert fingerprint(changed()) != before


@pytest.mark.parametrize("slope", [float("nan"), 1e39, 1e-300, True, "0.1"])
def test_a_slope_is_a_finite_number(slope):
    raises(NetworkError, r"LeakyReLU: slope=.*; must be a finite number", LeakyReLU, slope)
