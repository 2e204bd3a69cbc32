"""The GPU backends in Numba's CUDA simulator; run by `test_gpu_simulator.py`, in a process of its own.

The simulator is chosen by an environment variable before Python starts, and shows whether kernels compute the right
numbers: more than one block, tiles that do not fill, one filter, one image. Whether they compile is for
`test_gpu_compile.py`; neither has met a GPU.
"""

import numpy as np
import pytest
from conformance import check_case, check_training, decisions_are_clear, make_case

from cnnexp.backends import backend_class
from cnnexp.errors import ConfigError
from cnnexp.losses import Loss
from cnnexp.network import AvgPool2d, Conv2d, Flatten, Linear, MaxPool2d, Network, ReLU, Sigmoid
from cnnexp.optimizers import OPTIMIZERS, Adam

GPU_BACKENDS = ("gpu-naive", "gpu-shared-input", "gpu-shared", "gpu-tuned", "gpu-fused")

NETWORKS = {
    "one_conv": ((6, 6, 1), (Conv2d(3, 3), ReLU(), MaxPool2d(2), Flatten(), Linear(3))),
    "one_conv_colour": ((5, 7, 2), (Conv2d(5, 2), MaxPool2d(2), ReLU(), Flatten(), Linear(4, bias=False))),
    "two_conv": (
        (6, 6, 1),
        (
            Conv2d(2, 3),
            ReLU(),
            Conv2d(1, 3, padding="same"),
            ReLU(),
            MaxPool2d(4),
            Flatten(),
            Linear(5),
            ReLU(),
            Linear(3),
        ),
    ),
    "strides_and_paddings": (
        (7, 6, 2),
        (
            Conv2d(2, 3, stride=2, padding="auto", bias=False),
            ReLU(),
            Conv2d(3, 2, padding="full"),
            Flatten(),
            Linear(2),
        ),
    ),
    "pools": (
        (6, 5, 1),
        (
            Conv2d(2, 2, padding=1),
            MaxPool2d(3, 2, "auto"),
            Sigmoid(),
            AvgPool2d(2, 1),
            AvgPool2d(2, padding="auto"),
            Flatten(),
        ),
    ),
    "one_pixel": ((1, 1, 1), (Conv2d(1, 1), ReLU(), Flatten(), Linear(2))),
}


@pytest.fixture(params=GPU_BACKENDS)
def backend(request):
    made = backend_class(request.param)()
    assert made.simulated
    return made


@pytest.mark.parametrize("name", NETWORKS)
def test_network_equals_the_oracle(backend, name):
    case = make_case(Network(*NETWORKS[name]), images=3)
    assert decisions_are_clear(case)
    check_case(backend, case)


def test_binary_cross_entropy(backend):
    network = Network((2,), (Linear(3), ReLU(), Linear(1), Sigmoid()))
    check_case(backend, make_case(network, Loss.BINARY_CROSS_ENTROPY, images=4, seed=1))


def test_bytes_stand_for_fractions(backend):
    case = make_case(Network(*NETWORKS["one_conv"]), images=3)
    case.images = np.random.default_rng(3).integers(0, 256, case.images.shape).astype(np.uint8)
    assert decisions_are_clear(case)
    check_case(backend, case)


def test_ties_and_dead_relus(backend):
    check_case(backend, make_case(Network(*NETWORKS["one_conv"]), images=3, exact=True))


def test_training_repeats_bit_for_bit_and_resumes(backend):
    check_training(backend, make_case(Network(*NETWORKS["one_conv"]), images=3), Adam(lr=0.01), steps=3)


def test_training_in_many_nodes_repeats_bit_for_bit():
    case = make_case(Network(*NETWORKS["two_conv"]), images=3)
    check_training(backend_class("gpu-fused")(), case, Adam(lr=0.01), steps=3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_takes_the_step_of_the_cpu(backend, optimizer):
    case, rule = make_case(Network((3,), (Linear(2),)), images=2), OPTIMIZERS[optimizer](weight_decay=0.01)
    states = []
    for one in (backend, backend_class("numpy")()):
        program = one.compile(case.network, case.loss, rule, 2)
        program.restore({"parameters": case.parameters})
        program.train(program.load(case.images, case.labels), np.array([0, 1, 1]), 0.01)
        states.append(program.state())
    assert set(states[0]) == set(states[1])
    for key, value in states[1].items():
        np.testing.assert_allclose(states[0][key], value, rtol=1e-5, atol=1e-7)


def test_settings_beyond_the_gpu_are_refused():
    with pytest.raises(ConfigError, match=r"backend.block=2048: must be 1 \.\. 1024 threads"):
        backend_class("gpu-naive")(block=2048)
    with pytest.raises(ConfigError, match=r"backend.device=1: must be 0 \.\. 0"):
        backend_class("gpu-naive")(device=1)
    with pytest.raises(ConfigError, match=r"backend.tile=0: must be >= 1"):
        backend_class("gpu-shared")(tile=0)
    network = Network((8, 8, 1), (Conv2d(1, 3), Flatten(), Linear(2)))
    with pytest.raises(
        ConfigError, match=r"backend.tile=200: .* needs 163,252 bytes of shared memory, a block has 49,152"
    ):
        backend_class("gpu-shared")(tile=200).compile(network, Loss.SOFTMAX_CROSS_ENTROPY, Adam(), 1)


def test_an_array_too_large_for_32_bit_indices_is_refused():
    network = Network((64, 64, 64), (Conv2d(512, 1), Flatten(), Linear(2)))
    with pytest.raises(ConfigError, match=r"2,147,483,648 elements"):
        backend_class("gpu-naive")().compile(network, Loss.SOFTMAX_CROSS_ENTROPY, Adam(), 1024)
