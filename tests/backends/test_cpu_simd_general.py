"""Layers that `cpu-simd` has no vector kernel for: one call out of the step each, and nothing else changes."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import reference
from backends.on_target import HOST, OnTarget, forced
from backends.outside_layer import ORACLE, Unshuffle
from conformance import check_case, check_training, make_case

from cnnexp.backends.cpu.sequential import Cpu
from cnnexp.backends.plain.numpy import Numpy
from cnnexp.backends.simd import CpuSimd
from cnnexp.backends.simd.planner import choose_nodes
from cnnexp.errors import ConfigError, NetworkError
from cnnexp.network import AvgPool2d, BatchNorm2d, Conv2d, Flatten, Linear, MaxPool2d, Network, ReLU, Residual, Tanh
from cnnexp.network.layers import describe_layer
from cnnexp.network.losses import Loss
from cnnexp.optimizers import SGD, Adam

LOSS = Loss.SOFTMAX_CROSS_ENTROPY
BEFORE = (Conv2d(16, 3, padding="same"), ReLU())
AFTER = (Conv2d(32, 3, padding="same"), ReLU(), MaxPool2d(2), Flatten(), Linear(5))
STRANGE = Network((8, 8, 3), (*BEFORE, Unshuffle(), *AFTER))
NORMED = Network((8, 8, 2), (
    Conv2d(5, 3, padding="same", bias=False), BatchNorm2d(), ReLU(), Unshuffle(), Unshuffle(), BatchNorm2d(),
    Residual((Conv2d(80, 1), Tanh())), AvgPool2d(2), Flatten(), Linear(4),
))  # fmt: skip
FIRST = Network((4, 4, 2), (Unshuffle(), Conv2d(4, 1), Flatten(), Linear(3)))
LAST = Network((4, 4, 1), (Conv2d(2, 3, padding="same"), Unshuffle(), Flatten()))
MIXED = Network((8, 7, 2), (
    Conv2d(9, 3, padding="same"), ReLU(), MaxPool2d(2, padding="floor"), Conv2d(6, 3, padding="same"), Tanh(),
    AvgPool2d(2, 1), BatchNorm2d(), Flatten(), Linear(7), ReLU(), Linear(4),
))  # fmt: skip


@pytest.fixture(autouse=True)
def oracle(monkeypatch):
    for name, functions in ORACLE.items():
        monkeypatch.setitem(reference.LAYERS, name, functions)


def test_the_layers_around_a_strange_one_keep_their_algorithms():
    chosen = {node.name: node.algorithm for node in choose_nodes(STRANGE, HOST, 8)}
    usual = Network((8, 8, 3), (*BEFORE, Conv2d(64, 2, 2), *AFTER))  # of the same shapes
    others = {node.name: node.algorithm for node in choose_nodes(usual, HOST, 8)}
    assert [chosen[n] for n in ("conv1", "conv2", "linear1")] == [others[n] for n in ("conv1", "conv3", "linear1")]
    assert [name for name, algorithm in chosen.items() if algorithm == "general"] == ["unshuffle1"]


@pytest.mark.parametrize(
    ("backend", "network"),
    [*((CpuSimd(2), network) for network in (STRANGE, NORMED, FIRST, LAST)), (Numpy(), NORMED), (Cpu(), NORMED)],
    ids=["strange", "normed", "first", "last", "numpy", "cpu"],
)
def test_a_strange_layer_is_right_wherever_it_stands(backend, network):
    check_case(backend, make_case(network, images=19 if backend.name == "cpu-simd" else 9))


def test_training_with_a_strange_layer():
    check_training(CpuSimd(2), make_case(NORMED, images=35), Adam())


def generally(*layers):
    """Return `cpu-simd` with layers computed by general operations."""
    return OnTarget(forced(HOST, **dict.fromkeys(layers, "general")))


@pytest.mark.parametrize("layers", [("conv1", "avgpool1", "linear2"), ("conv2", "tanh1", "linear1")], ids="-".join)
def test_every_kind_of_layer_has_general_operations(layers):
    check_case(generally(*layers), make_case(MIXED, images=19))


def test_what_cannot_be_a_call_is_refused_and_a_strange_layer_is_described_as_any_other():
    with pytest.raises(ConfigError, match="batchnorm1 cannot be computed by 'general' here"):
        generally("batchnorm1").compile(MIXED, LOSS, SGD(), 4)
    assert describe_layer(Unshuffle(3)) == {"type": "Unshuffle", "block": 3}


@dataclass(frozen=True)
class Wrong(Unshuffle):
    """Gives another shape than it says, or another error."""

    fails: bool = False

    def forward(self, x):
        if self.fails:
            raise ValueError("not today")
        return super().forward(x)[:, :1]


@pytest.mark.parametrize("backend", [CpuSimd(2), Numpy()], ids=lambda backend: backend.name)
def test_a_layer_that_gives_another_shape_is_an_error_of_one_line(backend):
    network = Network((4, 4, 1), (Conv2d(2, 3, padding="same"), Wrong(), Flatten(), Linear(2)))
    images, labels = np.zeros((9, 4, 4, 1), np.float32), np.zeros(9, np.int32)

    def train():  # numpy tries each kernel before it trains
        program = backend.compile(network, LOSS, SGD(), 4)
        program.train(program.load(images, labels), np.arange(9), 0.1)

    with pytest.raises(NetworkError, match=r"layer wrong1: forward gives an array of shape \(\d+, 1, 2, 8\); must be"):
        train()


def test_what_a_layer_raises_is_an_error_of_one_line_in_predict_too():
    network = Network((4, 4, 1), (Conv2d(2, 3, padding="same"), Wrong(fails=True), Flatten(), Linear(2)))
    program = CpuSimd(1).forward_only.compile(network, LOSS, SGD(), 4)
    with pytest.raises(NetworkError, match="layer wrong1: ValueError: not today"):
        program.predict(program.load(np.zeros((9, 4, 4, 1), np.float32), np.zeros(9, np.int32)))


@dataclass(frozen=True)
class Shapeless(Unshuffle):
    def output_shape(self, input_shape):
        return [math.prod(input_shape)]


def test_a_shape_must_be_a_tuple():
    with pytest.raises(NetworkError, match=r"layer 0 \(shapeless1\): output_shape\(\(4, 4, 1\)\) gives \[16\]"):
        Network((4, 4, 1), (Shapeless(), Flatten(), Linear(2)))
