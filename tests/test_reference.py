"""The oracle itself, against central differences."""

import ast
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import reference

RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 5, 6, 2))
FOUR = RNG.standard_normal(4)
CONV = {"kind": "conv2d", "weight": RNG.standard_normal((3, 3, 2, 4)), "bias": FOUR, "stride": 2}
WIDER = {"kind": "conv2d", "weight": RNG.standard_normal((3, 3, 2, 5)), "bias": None, "stride": 2, "padding": "same"}
PADDED = {"kind": "residual", "layers": [WIDER], "step": 2}
LAYERS = [
    *({**CONV, "padding": padding} for padding in ("valid", "same", "full", "auto", "floor", 2)),
    *(
        {**CONV, "padding": "same", "dilation": dilation, "weight": RNG.standard_normal((3, 3, 2 // groups, 4))}
        for groups, dilation in ((2, 1), (1, 2), (2, 3))
    ),
    *({"kind": "maxpool2d", "pool": 3, "stride": 2, "padding": padding} for padding in ("valid", "auto", "floor")),
    *({"kind": "avgpool2d", "pool": 3, "stride": 2, "padding": padding} for padding in ("valid", "auto", "floor")),
    *({"kind": kind} for kind in ("globalavgpool", "relu", "sigmoid", "tanh", "gelu", "flatten")),
    {"kind": "leakyrelu", "slope": 0.2},
    {"kind": "dropout", "rate": 0.4, "kept": RNG.random(X.shape) > 0.4},
    {"kind": "batchnorm2d", "weight": RNG.standard_normal(2), "bias": RNG.standard_normal(2), "epsilon": 0.1},
    {"kind": "linear", "weight": RNG.standard_normal((60, 4)), "bias": FOUR},
    PADDED,
]


def assert_differences(gradient, function, array):
    """Compare a gradient with the central differences of a function by an array."""
    assert reference.relative_error(gradient, reference.numeric_gradient(function, array)) < 1e-6


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer["kind"])
def test_gradients_of_layers_are_central_differences(layer):
    x = X.reshape(3, -1).copy() if layer["kind"] == "linear" else X.copy()
    run, run_backward = reference.LAYERS[layer["kind"]]
    y = run(x, layer)
    dy = np.random.default_rng(1).standard_normal(y.shape)
    dx, dw, db = run_backward(x, y, dy, layer)

    def value():
        return (run(x, layer) * dy).sum()

    assert_differences(dx, value, x)
    for gradient, name in ((dw, "weight"), (db, "bias")):
        if name in layer:
            assert_differences(gradient, value, layer[name])


def test_every_layer_is_tested_and_the_oracle_imports_nothing_of_the_package():
    assert {layer["kind"] for layer in LAYERS} == set(reference.LAYERS)
    parsed = ast.parse(Path(reference.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(parsed) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {alias.name for node in imports for alias in node.names} == {"annotations", "math", "numpy"}


def test_gradients_of_a_residual_are_central_differences():
    rng = np.random.default_rng(3)
    linear = {"kind": "linear", "weight": rng.standard_normal((4, 4)), "bias": rng.standard_normal(4)}
    inner = [linear, {"kind": "tanh"}]
    network = [*inner, {"kind": "residual", "layers": [{"kind": "residual", "layers": inner}, {"kind": "tanh"}]}]
    x, dy = rng.standard_normal((2, 3, 4))
    dx, found = reference.backward(network, reference.forward(network, x), dy)

    def value():
        return (reference.forward(network, x)[-1] * dy).sum()

    assert_differences(dx, value, x)
    assert_differences(found[0] + found[2], value, linear["weight"])  # the same weights twice: gradients add up


@pytest.mark.parametrize("loss", [*reference.LOSSES.values(), partial(reference.softmax_cross_entropy, smoothing=0.1)])
def test_gradients_of_losses_are_central_differences(loss):
    rng = np.random.default_rng(2)
    scores = rng.uniform(0.1, 0.9, (6, 1)) if loss is reference.binary_cross_entropy else rng.standard_normal((6, 4))
    labels = rng.integers(0, max(scores.shape[1], 2), 6)
    assert_differences(loss(scores, labels)[1], lambda: loss(scores, labels)[0].mean(), scores)


def test_layers_by_hand():
    x = np.arange(9.0).reshape(1, 3, 3, 1)
    w = np.array([[1.0, 2.0], [3.0, 4.0]]).reshape(2, 2, 1, 1)
    layer = {"weight": w, "bias": np.array([10.0]), "stride": 1, "padding": "valid"}
    # 0*1 + 1*2 + 3*3 + 4*4 + 10 = 37, and one pixel further adds 1 + 2 + 3 + 4
    assert reference.conv2d(x, layer)[0, :, :, 0].tolist() == [[37, 47], [67, 77]]
    layer = {"pool": 2, "stride": 2, "padding": "valid"}  # a tie goes to the first pixel
    dx = reference.maxpool2d_backward(np.ones((1, 2, 2, 1)), None, np.full((1, 1, 1, 1), 5.0), layer)[0]
    assert dx[0, :, :, 0].tolist() == [[5, 0], [0, 0]]
    # the channels that a padded residual adds have nothing to be added to
    assert np.array_equal(reference.residual(X, PADDED)[..., 2:], reference.conv2d(X, WIDER)[..., 2:])
