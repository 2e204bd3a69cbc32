"""Layers that `cpu-simd` has no vector kernel for: one call out of the step each, and nothing else changes."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import reference
from backends.on_target import HOST, OnTarget, forced
from backends.outside_layer import ORACLE, Unshuffle
from commands import raises
from conformance import check_case, make_case, started
from tables import each

from cnnexp import SGD, Adam, Loss
from cnnexp.backends.cpu.sequential import Cpu
from cnnexp.backends.plain.numpy import Numpy
from cnnexp.backends.simd import CpuSimd
from cnnexp.backends.simd.planner import choose_nodes
from cnnexp.errors import ConfigError, NetworkError
from cnnexp.network import AvgPool2d, BatchNorm2d, Conv2d, Flatten, Linear, MaxPool2d, Network, ReLU, Residual, Tanh
from cnnexp.network.layers import describe_layer

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
    monkeypatch.setitem(reference.LAYERS, "unshuffle", ORACLE)


def test_the_layers_around_a_strange_one_keep_their_algorithms():
    usual = Network((8, 8, 3), (*BEFORE, Conv2d(64, 2, 2), *AFTER))  # of the same shapes
    chosen, others = ([node.algorithm for node in choose_nodes(one, HOST, 8)] for one in (STRANGE, usual))
    assert chosen == [*others[:1], "general", *others[2:]]


@each(
    *((CpuSimd(2), network) for network in (STRANGE, NORMED, FIRST, LAST)),
    (Numpy(), NORMED),
    (Cpu(), NORMED),
    ids=["strange", "normed", "first", "last", "numpy", "cpu"],
)
def test_a_strange_layer_is_right_wherever_it_stands(backend, network):
    check_case(backend, make_case(network, images=35 if backend.name == "cpu-simd" else 9), Adam())


def generally(*layers):
    """Return `cpu-simd` with layers computed by general operations."""
    return OnTarget(forced(HOST, **dict.fromkeys(layers, "general")))


@pytest.mark.parametrize("layers", [("conv1", "avgpool1", "linear2"), ("conv2", "tanh1", "linear1")], ids="-".join)
def test_every_kind_of_layer_has_general_operations(layers):
    check_case(generally(*layers), make_case(MIXED, images=19))


def test_what_cannot_be_a_call_is_refused_and_a_strange_layer_is_described_as_any_other():
    with pytest.raises(ConfigError, match="batchnorm1 cannot be computed by 'general' here"):
        generally("batchnorm1").compile(MIXED, Loss.SOFTMAX_CROSS_ENTROPY, SGD(), 4)
    assert describe_layer(Unshuffle(3)) == {"type": "Unshuffle", "block": 3}


@dataclass(frozen=True)
class Wrong(Unshuffle):
    """Gives another shape than it says, or another error."""

    fails: bool = False

    def forward(self, x):
        if self.fails:
            raise ValueError("not today")
        return super().forward(x)[:, :1]


def with_wrong(**settings):
    return Network((4, 4, 1), (Conv2d(2, 3, padding="same"), Wrong(**settings), Flatten(), Linear(2)))


@pytest.mark.parametrize("backend", [CpuSimd(2), Numpy()], ids=lambda backend: backend.name)
def test_a_layer_that_gives_another_shape_is_an_error_of_one_line(backend):
    def train():  # numpy tries each kernel before it trains
        program, handle = started(backend, make_case(with_wrong()), SGD(), 4)
        program.train(handle, np.arange(5), 0.1)

    raises(NetworkError, r"layer wrong1: forward gives an array of shape \(\d+, 1, 2, 8\); must be", train)


def test_what_a_layer_raises_is_an_error_of_one_line_in_predict_too():
    program, handle = started(CpuSimd(1).forward_only, make_case(with_wrong(fails=True)), SGD(), 4)
    raises(NetworkError, "layer wrong1: ValueError: not today", program.predict, handle)


def test_a_shape_must_be_a_tuple(monkeypatch):
    monkeypatch.setattr(Unshuffle, "output_shape", lambda self, shape: [math.prod(shape)])
    with pytest.raises(NetworkError, match=r"layer 0 \(unshuffle1\): output_shape\(\(4, 4, 1\)\) gives \[16\]"):
        Network((4, 4, 1), (Unshuffle(), Flatten(), Linear(2)))
