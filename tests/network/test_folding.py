"""What `predict` computes: BatchNorm2d in the weights before it, and no Dropout."""

import numpy as np
import pytest
import reference
from conformance import make_case
from networks import NETWORKS

from cnnexp.network import BatchNorm2d, Conv2d, Dropout, Flatten, GlobalAvgPool, Linear, Network, ReLU, Residual
from cnnexp.network.folding import Folded
from cnnexp.network.shapes import walk

CONV = Conv2d(3, 3, padding="same", bias=False)
TRIALS = {
    "without_bias": ((5, 4, 2), (CONV, BatchNorm2d(), ReLU(), Flatten(), Linear(3)), 0),
    "with_bias": ((5, 4, 2), (Conv2d(3, 2), BatchNorm2d(epsilon=0.5), Flatten(), Linear(3, bias=False)), 0),
    "twice": ((5, 4, 2), (CONV, BatchNorm2d(), Dropout(), BatchNorm2d(), GlobalAvgPool(), Linear(3)), 0),
    "after_a_relu": ((5, 4, 2), (CONV, ReLU(), BatchNorm2d(), Flatten(), Linear(3)), 1),
    "first": ((5, 4, 2), (BatchNorm2d(), BatchNorm2d(), CONV, Flatten(), Linear(3)), 2),
    "in_a_residual": ((5, 4, 2), (
        CONV, BatchNorm2d(), Residual((CONV, BatchNorm2d(), ReLU(), Residual((CONV, BatchNorm2d())))), ReLU(),
        Residual((BatchNorm2d(), CONV)), Residual((Dropout(), Dropout())), Flatten(), Linear(3),
    ), 1),
}  # fmt: skip


@pytest.mark.parametrize(("shape", "layers", "left"), TRIALS.values(), ids=TRIALS)
def test_the_folded_network_gives_the_same_scores(shape, layers, left):
    case = make_case(Network(shape, layers))
    folded = Folded.of(case.network)
    assert sum(isinstance(stage.layer, BatchNorm2d) for stage in walk(folded.network.stages)) == left
    again = make_case(folded.network)
    again.images, again.parameters = case.images, folded.parameters(case.state)
    assert again.parameters.dtype == np.float32
    described = as_parameters(again.layers())
    expected, found = (reference.forward(layers, case.float_images)[-1] for layers in (case.layers(), described))
    assert reference.relative_error(found, expected) < 1e-6


def as_parameters(layers):
    """Have the oracle take a BatchNorm2d for the scale and the shift that its parameters are once folded."""
    for layer in layers:
        if layer["kind"] == "batchnorm2d":
            layer |= {"running": [np.zeros_like(layer["weight"]), np.ones_like(layer["weight"])], "epsilon": 0.0}
        as_parameters(layer.get("layers", []))
    return layers


@pytest.mark.parametrize("name", [name for name in NETWORKS if not Network(*NETWORKS[name]).running])
def test_a_network_without_batch_norm_keeps_its_parameters(name):
    case = make_case(Network(*NETWORKS[name]))
    np.testing.assert_array_equal(Folded.of(case.network).parameters(case.state), case.parameters)
