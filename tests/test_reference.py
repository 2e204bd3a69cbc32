"""The oracle itself, against central differences."""

import ast
from pathlib import Path

import numpy as np
import pytest
import reference

RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 5, 6, 2))
LAYERS = {
    "conv2d": {"weight": RNG.standard_normal((3, 3, 2, 4)), "bias": RNG.standard_normal(4), "stride": 2},
    "max_pool": {"pool": 3, "stride": 2},
    "avg_pool": {"pool": 3, "stride": 2},
    "global_avg_pool": {},
    "relu": {},
    "leaky_relu": {"slope": 0.2},
    "sigmoid": {},
    "tanh": {},
    "gelu": {},
    "flatten": {},
    "dropout": {"rate": 0.4, "kept": RNG.random((3, 5, 6, 2)) > 0.4},
    "batch_norm": {"weight": RNG.standard_normal(2), "bias": RNG.standard_normal(2), "epsilon": 0.1},
    "linear": {"weight": RNG.standard_normal((60, 4)), "bias": RNG.standard_normal(4)},
}


@pytest.mark.parametrize(("groups", "dilation"), [(2, 1), (1, 2), (2, 3)])
def test_gradients_of_groups_and_dilation_are_central_differences(groups, dilation):
    rng = np.random.default_rng(2)
    layer = {"kind": "conv2d", "padding": "same", "stride": 2, "dilation": dilation, "bias": rng.standard_normal(4)}
    layer["weight"], x = rng.standard_normal((3, 3, 2 // groups, 4)), X.copy()
    y = reference.conv2d(x, layer)
    dy = rng.standard_normal(y.shape)
    dx, dw, _ = reference.conv2d_backward(x, y, dy, layer)

    def value():
        return (reference.conv2d(x, layer) * dy).sum()

    assert reference.relative_error(dx, reference.numeric_gradient(value, x)) < 1e-6
    assert reference.relative_error(dw, reference.numeric_gradient(value, layer["weight"])) < 1e-6


def test_gradients_of_a_padded_residual_are_central_differences():
    rng = np.random.default_rng(4)
    inner = {
        "kind": "conv2d",
        "padding": "same",
        "stride": 2,
        "weight": rng.standard_normal((3, 3, 2, 5)),
        "bias": None,
    }
    layer, x = {"kind": "residual", "layers": [inner], "step": 2}, X.copy()
    y = reference.residual(x, layer)
    dy = rng.standard_normal(y.shape)
    dx, _, _ = reference.residual_backward(x, y, dy, layer)
    assert np.array_equal(y[..., 2:], reference.conv2d(x, inner)[..., 2:])
    assert (
        reference.relative_error(dx, reference.numeric_gradient(lambda: (reference.residual(x, layer) * dy).sum(), x))
        < 1e-6
    )


@pytest.mark.parametrize("padding", ["valid", "same", "full", "auto", "floor", 2])
@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_of_layers_are_central_differences(kind, padding):
    if kind not in ("conv2d", "max_pool", "avg_pool") and padding != "valid":
        pytest.skip("the layer has no padding")
    if kind.endswith("pool") and padding not in ("valid", "auto", "floor"):
        pytest.skip("pooling pads valid, auto or floor")
    layer = {"kind": kind, "padding": padding, **LAYERS[kind]}
    x = X.reshape(3, -1).copy() if kind == "linear" else X.copy()
    run, run_backward = reference.LAYERS[kind]
    y = run(x, layer)
    dy = np.random.default_rng(1).standard_normal(y.shape)
    dx, dw, db = run_backward(x, y, dy, layer)

    def value():
        return (run(x, layer) * dy).sum()

    assert reference.relative_error(dx, reference.numeric_gradient(value, x)) < 1e-6
    for gradient, name in ((dw, "weight"), (db, "bias")):
        if gradient is not None:
            assert reference.relative_error(gradient, reference.numeric_gradient(value, layer[name])) < 1e-6


def test_gradients_of_a_residual_are_central_differences():
    rng = np.random.default_rng(3)
    inner = [
        {"kind": "linear", "weight": rng.standard_normal((4, 4)), "bias": rng.standard_normal(4)},
        {"kind": "tanh"},
    ]
    network = [*inner, {"kind": "residual", "layers": [{"kind": "residual", "layers": inner}, {"kind": "tanh"}]}]
    x, dy = rng.standard_normal((2, 3, 4))
    dx, found = reference.backward(network, reference.forward(network, x), dy)

    def value():
        return (reference.forward(network, x)[-1] * dy).sum()

    assert reference.relative_error(dx, reference.numeric_gradient(value, x)) < 1e-6
    # the same weights twice: their gradients add up
    weights = reference.numeric_gradient(value, inner[0]["weight"])
    assert reference.relative_error(found[0] + found[2], weights) < 1e-6


@pytest.mark.parametrize("loss", reference.LOSSES)
def test_gradients_of_losses_are_central_differences(loss):
    rng = np.random.default_rng(2)
    scores = rng.uniform(0.1, 0.9, (6, 1)) if loss == "binary_cross_entropy" else rng.standard_normal((6, 4))
    labels = rng.integers(0, max(scores.shape[1], 2), 6)
    gradient = reference.LOSSES[loss](scores, labels)[1]
    numeric = reference.numeric_gradient(lambda: reference.LOSSES[loss](scores, labels)[0].mean(), scores)
    assert reference.relative_error(gradient, numeric) < 1e-6


def test_a_convolution_by_hand():
    x = np.arange(9.0).reshape(1, 3, 3, 1)
    w = np.array([[1.0, 2.0], [3.0, 4.0]]).reshape(2, 2, 1, 1)
    layer = {"kind": "conv2d", "weight": w, "bias": np.array([10.0]), "stride": 1, "padding": "valid"}
    # 0*1 + 1*2 + 3*3 + 4*4 + 10 = 37, and one pixel further adds 1 + 2 + 3 + 4
    assert reference.conv2d(x, layer)[0, :, :, 0].tolist() == [[37, 47], [67, 77]]


def test_a_tie_goes_to_the_first_pixel():
    x = np.ones((1, 2, 2, 1))
    layer = {"kind": "max_pool", "pool": 2, "stride": 2, "padding": "valid"}
    dx = reference.max_pool_backward(x, None, np.full((1, 1, 1, 1), 5.0), layer)[0]
    assert dx[0, :, :, 0].tolist() == [[5, 0], [0, 0]]


def test_the_oracle_imports_nothing_of_the_package():
    parsed = ast.parse(Path(reference.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(parsed) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {alias.name for node in imports for alias in node.names} == {"annotations", "math", "numpy"}
