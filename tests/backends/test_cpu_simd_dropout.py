"""Dropout in the fused step of `cpu-simd`: the masks that every backend makes, in each layout and vector width."""

import numpy as np
import pytest
from backends.on_target import TARGETS, OnTarget, computed
from conformance import check_case, clear_case
from tables import each

from cnnexp import SGD, Adam, Conv2d, Dropout, Flatten, Linear, Loss, MaxPool2d, Network, ReLU
from cnnexp.backends.plain.numpy import Numpy
from cnnexp.backends.simd.runtime.program import make_plan
from cnnexp.testing import END

SHOWN = {
    "rows": ((37,), (Dropout(0.5), Linear(3))),
    "lanes": ((4, 4, 3), (Dropout(0.5), Conv2d(3, 4), Flatten())),
    "flattened": ((3, 5, 2), (Dropout(0.7), *END)),
    "activations": ((6, 6, 1), (Conv2d(5, 3, bias=False), Dropout(0.5), Conv2d(3, 4), Flatten())),
    "images": ((8, 8, 1), (Conv2d(16, 3), ReLU(), Conv2d(16, 3), ReLU(), MaxPool2d(2), Dropout(0.5), *END)),
    "rectified": ((5, 5, 2), (Conv2d(6, 2), ReLU(), MaxPool2d(2), Dropout(0.3), Flatten(), Dropout(0.6), Linear(3))),
}  # fmt: skip
"""Networks whose last gradient has a factor of every number that a Dropout lets through."""
SEED, LOSS = 2**40 + 5, Loss.SOFTMAX_CROSS_ENTROPY
RNG = np.random.default_rng(1)


def state(network, step=3):
    return {**network.initial_state(SEED), "step": np.int64(step)}


def shaped(name):
    """Return this machine's target, which computes the convolutions of "images" with channels in lanes."""
    return computed(Network(*SHOWN[name]), TARGETS["host"], "channels") if name == "images" else TARGETS["host"]


@each(
    *((name, shaped(name), threads) for name in SHOWN for threads in (1, 3)),
    *((name, TARGETS[vectors], 1) for name in ("rows", "lanes") for vectors in ("sse", "wide")),
)
def test_masks_are_those_of_numpy(name, target, threads):
    """The oracle has them from `network/noise`, as NumPy has; a number more or less would change the gradient."""
    count = 6 if name == "images" else 20  # else rounding decides somewhere
    check_case(OnTarget(target, threads), clear_case(Network(*SHOWN[name]), images=count))


def test_all_layouts_are_met():
    plans = [make_plan(Network(*SHOWN[name]), shaped(name), 8) for name in SHOWN]
    assert {type(node.x).__name__ for plan in plans for node in plan.dropouts} == {"NC", "Blocked", "NHWC"}


@pytest.mark.parametrize("threads", [1, 3])
def test_training_goes_on_with_the_same_masks_on_another_backend(threads):
    network, simd = Network(*SHOWN["rectified"]), OnTarget(threads=threads)
    images, labels = RNG.random((21, *network.input_shape), np.float32), RNG.integers(0, 3, 21)
    order, ends = RNG.permutation(21), []
    for backends in ((simd, simd), (Numpy(), Numpy()), (simd, Numpy()), (Numpy(), simd)):
        carried = state(network)
        for backend, part in zip(backends, (order[:13], order[13:]), strict=True):
            program = backend.compile(network, LOSS, Adam(lr=0.01), 6)
            program.restore(carried)
            program.train(program.load(images, labels), part, 0.01)
            carried = program.state()
        assert (int(carried["seed"]), int(carried["step"])) == (SEED, 8)
        ends.append(carried["parameters"])
        np.testing.assert_allclose(ends[-1], ends[0], rtol=1e-4, atol=1e-6)


def test_every_step_draws_anew_and_predict_not_at_all():
    network, images, dropped = Network(*SHOWN["rows"]), RNG.random((5, 37), np.float32), []
    program = OnTarget(threads=1).compile(network, LOSS, SGD(), 19)
    handle = program.load(images, np.zeros(5, int))
    for step in (3, 3, 4):
        program.restore(state(network, step))
        dropped.append(program.gradients(handle, np.arange(1))[1] == 0)
    np.testing.assert_array_equal(dropped[0], dropped[1])
    assert np.any(dropped[1] != dropped[2])
    weight, bias = (p.view(state(network)["parameters"]) for p in network.parameters)
    np.testing.assert_allclose(program.predict(handle), images @ weight + bias, rtol=1e-5, atol=1e-5)
