"""Trained networks as ONNX graphs, in onnxruntime, against `predict`."""

import json

import numpy as np
import pytest
import reference
from backends import outside_layer
from conformance import make_case
from hypothesis import HealthCheck, given, settings
from networks import NETWORKS, cases

from cnnexp.network import Network
from cnnexp.network.losses import Loss

pytest.importorskip("onnx", reason="no onnx is installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="no onnxruntime is installed")

from cnnexp.tracking import graph  # noqa: E402


def probabilities(case, pixels="float32"):
    """Return what onnxruntime makes of a case's images."""
    outputs = 2 if case.loss == Loss.BINARY_CROSS_ENTROPY else case.network.output_shape[0]
    model = graph.build(case.network, case.loss, case.state, pixels, [f"class {c}" for c in range(outputs)])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run([graph.OUTPUT], {graph.INPUT: case.images})
    assert found.shape == (len(case.images), outputs)
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"])[0] == "class 0"
    return found


def expected(case):
    """Return the oracle's probabilities, float64."""
    scores = reference.forward(case.layers, case.float_images)[-1]
    if case.loss == Loss.BINARY_CROSS_ENTROPY:
        return np.hstack([1 - scores, scores])
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("name", NETWORKS)
def test_network(name):
    case = make_case(Network(*NETWORKS[name]))
    np.testing.assert_allclose(probabilities(case), expected(case), rtol=0, atol=1e-5)


@settings(max_examples=75, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_random_networks(case):
    np.testing.assert_allclose(probabilities(case), expected(case), rtol=0, atol=1e-5)


def test_a_layer_of_a_plugin_is_told_by_its_rule():
    with outside_layer.network() as network:
        case = make_case(network)
        np.testing.assert_allclose(probabilities(case), expected(case), rtol=0, atol=1e-5)
