import json
import math

import numpy as np
import reference
from commands import raises
from hypothesis import given
from hypothesis import strategies as st
from tables import each

from cnnexp import Network, ReLU, Residual, Sigmoid
from cnnexp.errors import NetworkError
from cnnexp.network import AvgPool2d, BatchNorm2d, Conv2d, Dropout, Flatten, GlobalAvgPool, LeakyReLU, Linear, MaxPool2d
from cnnexp.network.layers import describe_layer, make_layer
from cnnexp.network.shapes import walk, window_count

IMAGE = (28, 28, 1)


def test_parameters_lie_one_after_another():
    network = Network((6, 6, 2), (Conv2d(3, 3), ReLU(), Conv2d(4, 2, bias=False), Flatten(), Linear(5)))
    names = ["conv1.weight", "conv1.bias", "conv2.weight", "linear1.weight", "linear1.bias"]
    assert [p.name for p in network.parameters] == names
    assert [p.shape for p in network.parameters] == [(3, 3, 2, 3), (3,), (2, 2, 3, 4), (36, 5), (5,)]
    sizes = [math.prod(parameter.shape) for parameter in network.parameters]
    assert [parameter.size for parameter in network.parameters] == sizes
    assert [parameter.offset for parameter in network.parameters] == [0, *np.cumsum(sizes)[:-1]]
    flat = np.zeros(network.parameter_count, np.float32)
    for i, parameter in enumerate(network.parameters, 1):
        parameter.view(flat)[...] = i  # views of one buffer
    np.testing.assert_array_equal(flat, np.repeat(range(1, 6), sizes))


PADDINGS = st.sampled_from(["valid", "same", "full", "auto", "floor", 1])


@given(st.integers(1, 30), st.integers(1, 8), st.integers(1, 5), PADDINGS)
def test_windows_are_counted_as_the_oracle_does(size, window, stride, padding):
    found = window_count(size, window, stride, padding)
    if found is None:
        before = {"valid": 0, "floor": 0, "full": window - 1}.get(padding, padding)
        assert size + 2 * before < window or (size + 2 * before - window) % stride
    else:
        assert found == reference.geometry(size, window, stride, padding)


def test_a_residual_holds_a_network_of_its_own_and_comes_back_from_plain_values():
    inner = (Conv2d(2, 3, padding="same"), Residual((ReLU(), Conv2d(2, 1))))
    network = Network((4, 4, 2), (Conv2d(2, 1), Residual(inner), GlobalAvgPool(), Linear(3)))
    names = [parameter.name.removesuffix(".weight") for parameter in network.parameters if "weight" in parameter.name]
    assert names == ["conv1", "residual1.conv1", "residual1.residual1.conv1", "linear1"]
    assert network.parameters[-1].offset + 3 == network.parameter_count == 6 + 38 + 6 + 9
    assert [stage.macs for stage in network.stages] == [64, 16 * (36 + 4), 0, 6]
    within = ["residual1.conv1", "residual1.residual1.relu1", "residual1.residual1.conv1", "residual1.residual1"]
    assert [stage.name for stage in walk(network.stages)][1:5] == within

    layers = (Conv2d(2, 3), Residual((LeakyReLU(0.2), Residual((ReLU(),)))), Flatten(), Linear(2, bias=False))
    plain = json.loads(json.dumps([describe_layer(layer) for layer in layers]))
    assert tuple(make_layer(layer) for layer in plain) == layers


@each(
    (IMAGE, (Conv2d(8, 5, stride=2),), r"height \(28 \+ 2\*0 - 5\) / 2 \+ 1 = 12.5 is not a whole.*padding=auto"),
    ((28, 27, 1), (Conv2d(8, 4, stride=2),), r"layer 0 \(conv1\): width \(27 \+ 2\*0 - 4\) / 2 \+ 1 = 12.5"),
    (IMAGE, (Conv2d(8, 5, 2, padding=1),), r"\(28 \+ 2\*1 - 5\) / 2 \+ 1 = 13.5"),
    ((7, 7, 1), (Conv2d(8, 9),), r"kernel 9 is larger than its padded input, height 7; use a kernel of at most 7"),
    (IMAGE, (Conv2d(2), MaxPool2d(3)), r"layer 1 \(maxpool1\).*not a whole number of windows; change pool or str"),
    (IMAGE, (Conv2d(0),), r"filters=0; must be a whole number >= 1"),
    (IMAGE, (Conv2d(True),), r"filters=True; must be a whole number >= 1"),
    (IMAGE, (Conv2d(2, 2.5),), r"kernel=2.5; must be a whole number >= 1"),
    (IMAGE, (Conv2d(2, 3, stride=0),), r"stride=0; must be a whole number >= 1"),
    (IMAGE, (Conv2d(2, 3, padding=-1),), r"padding=-1; legal: valid, same, .*floor\+PIXELS, or a whole number >= 0"),
    (IMAGE, (Conv2d(2, 3, padding="sane"),), r"padding='sane'; legal"),
    (IMAGE, (MaxPool2d(2, padding="same"),), r"pooling allows 'valid', 'auto', 'floor' or 'floor\+PIXELS'"),
    ((2, 2, 1), (MaxPool2d(1, 2, "auto"),), r"auto puts a window of pool=1, stride=2 wholly outside"),
    ((2, 2, 1), (AvgPool2d(1, 4, "auto"),), r"auto puts a window of pool=1, stride=4 wholly outside"),
    (IMAGE, (AvgPool2d(2, stride=0), Flatten(), Linear(1)), r"stride=0; must be"),
    (IMAGE, (Linear(10),), r"Linear needs a flat input but gets \(28, 28, 1\); put Flatten before it"),
    (IMAGE, (Flatten(), Conv2d(2)), r"layer 1 \(conv1\): Conv2d needs an image .* but gets \(784,\)"),
    (IMAGE, (Flatten(), Linear(0)), r"features=0; must be"),
    (IMAGE, (Flatten(), ReLU()), r"nothing to train; add at least one Conv2d or Linear layer"),
    (IMAGE, (), r"empty; add at least one"),
    ((8, 8, 4), (Residual((Conv2d(4, 3),)),), r"layer 0 \(residual1\): Residual adds .*, \(6, 6, 4\); they must give"),
    (IMAGE, (Residual((Flatten(), Conv2d(1))),), r"layer 0.1 \(residual1.conv1\): Conv2d needs an image"),
    (IMAGE, (Dropout(1.0), Flatten(), Linear(1)), r"layer 0 \(dropout1\): rate=1.0; must be >= 0 and < 1"),
    (IMAGE, (Dropout(-0.1), Flatten(), Linear(1)), r"rate=-0.1; must be >= 0 and < 1"),
    (IMAGE, (Dropout(False), Flatten(), Linear(1)), r"rate=False; must be"),
    (IMAGE, (BatchNorm2d(0), Flatten(), Linear(1)), r"layer 0 \(batchnorm1\): momentum=0; must be > 0 and <= 1"),
    (IMAGE, (BatchNorm2d(0.1, 0.0),), r"epsilon=0.0; must be > 0"),
    ((4,), (BatchNorm2d(), Linear(1)), r"BatchNorm2d needs an image .* but gets \(4,\)"),
    (IMAGE, (Residual(()),), r"Residual holds no layers"),
    ((8, 8, 4), (Residual((ReLU(),), "none"),), r"shortcut='none'; legal: identity, padded"),
    ((8, 8, 4), (Residual((Conv2d(4, 4),), "padded"),), r"\(5, 5, 4\); for shortcut=padded they must"),
    ((8, 8, 4), (Residual((Conv2d(3, 1),), "padded"),), r"\(8, 8, 3\); for shortcut=padded .* no fewer channels"),
    ((8, 8, 4), (Residual((Flatten(),), "padded"),), r"\(256,\); for shortcut=padded"),
    ((8, 8, 4), (Conv2d(6, 3, groups=4),), r"groups=4; must divide the 4 channels and the 6 filters"),
    ((8, 8, 4), (Conv2d(4, 3, groups=0),), r"groups=0; must be a whole number >= 1"),
    ((8, 8, 4), (Conv2d(4, 3, dilation=4),), r"kernel 9 is larger than its padded input, height 8"),
    ((4,), (GlobalAvgPool(), Linear(1)), r"GlobalAvgPool needs an image .* but gets \(4,\)"),
    (IMAGE, ("Conv2d",), r"'Conv2d' is not a layer; legal: Conv2d, ReLU"),
    ((28, 28), (Flatten(), Linear(1)), r"input shape \(28, 28\): must be"),
    ((0,), (Linear(1),), r"input shape \(0,\): must be"),
)
def test_what_does_not_fit_is_refused(shape, layers, message):
    raises(NetworkError, message, Network, shape, layers)


def test_a_run_begins_with_a_whole_state():
    plain = Network(IMAGE, (Flatten(), Linear(2)))
    assert plain.initial_state(3).keys() == {"parameters"}
    inner = Residual((Conv2d(1, 1, bias=False), BatchNorm2d(), Dropout()))
    network = Network(IMAGE, (BatchNorm2d(), inner, GlobalAvgPool(), Linear(2, bias=False)))
    state = network.initial_state(3)
    assert (state.keys(), state["seed"]) == ({"parameters", "running", "seed"}, 3)
    outer = ["batchnorm1.mean", "batchnorm1.variance"]
    assert [average.name for average in network.running] == [*outer, *(f"residual1.{name}" for name in outer)]
    assert state["running"].tolist() == [0, 1, 0, 1]
    named = {parameter.name: parameter.view(state["parameters"]).tolist() for parameter in network.parameters}
    assert named["batchnorm1.weight"] == named["residual1.batchnorm1.weight"] == [1]
    assert named["batchnorm1.bias"] == [0]


def test_initial_parameters_follow_from_the_seed_in_pytorchs_range_and_equal_layers_are_equal():
    network = Network(IMAGE, (Conv2d(64, 5), ReLU(), Flatten(), Linear(10)))
    flat = network.initial_parameters(0)
    assert flat.dtype == np.float32
    assert np.array_equal(flat, network.initial_parameters(0))
    assert not np.array_equal(flat, network.initial_parameters(1))
    for parameter in network.parameters:
        bound = 1 / math.sqrt({"conv1": 25, "linear1": 24 * 24 * 64}[parameter.name.split(".")[0]])
        values = parameter.view(flat)
        assert np.abs(values).max() <= bound
        assert np.abs(values).max() > 0.8 * bound
        assert abs(values.mean()) < 0.5 * bound

    layers = (Linear(3), Sigmoid(), Linear(1))
    assert Network((2,), layers) == Network([2], list(layers))
    assert Network((2,), layers) != Network((3,), layers)
