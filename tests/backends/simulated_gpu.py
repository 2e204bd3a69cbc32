"""The GPU backends in Numba's CUDA simulator; run by `test_gpu_simulator.py`, in a process of its own.

The simulator is chosen by an environment variable before Python starts, and shows whether kernels compute the right
numbers: more than one block, tiles that do not fill, one filter, one image. Whether they compile is for
`test_gpu_compile.py`; neither has met a GPU.
"""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from backends import outside_layer
from conformance import assert_same_state, check_case, check_training, decisions_are_clear, make_case
from networks import KINDS, check_random_networks

from cnnexp.backends import backend_class
from cnnexp.backends.gpu import device, launch
from cnnexp.backends.gpu.streamed import Streamed
from cnnexp.errors import ConfigError
from cnnexp.network import (
    GELU,
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAvgPool,
    LeakyReLU,
    Linear,
    MaxPool2d,
    Network,
    ReLU,
    Residual,
    Sigmoid,
    Tanh,
)
from cnnexp.network.losses import Loss
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
    "elementwise": ((3,), (Linear(4), Tanh(), Linear(3), GELU(), LeakyReLU(0.2), Linear(3), Dropout(0.3))),
    "residual": (
        (4, 4, 1),
        (
            *(Conv2d(2, 3, padding="same", bias=False), BatchNorm2d(), Dropout(0.2)),
            *(Residual((Conv2d(2, 3, padding="same"), BatchNorm2d(0.5), ReLU())), GlobalAvgPool(), Linear(3)),
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


def test_a_users_own_layer_from_outside_the_package(backend):
    with outside_layer.network() as network:
        check_case(backend, make_case(network, images=3))


@pytest.mark.parametrize("kind", KINDS)
def test_random_networks(backend, kind):
    check_random_networks(backend, kind, 2, most=4)


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


def test_a_data_set_larger_than_the_gpu_is_streamed_to_the_same_bits(backend, monkeypatch):
    # drops by the images' places in the data set, not in what is shown of it; gpu-fused has no node for it
    dropped = () if backend.name == "gpu-fused" else (Dropout(0.3),)
    case = make_case(Network((4, 4, 1), (Conv2d(2, 3), ReLU(), *dropped, Flatten(), Linear(2))), images=20)
    rng = np.random.default_rng(3)
    images, order = rng.integers(0, 256, case.images.shape).astype(np.uint8), rng.permutation(20)[:11]
    program = backend.compile(case.network, case.loss, Adam(lr=0.01), 2)
    found = []
    for free in (np.inf, 950):  # bytes: windows of one batch or two
        monkeypatch.setattr(device, "free_memory", lambda free=free: (free, free))
        program.restore({"parameters": case.parameters})
        handle = program.load(images, case.labels)
        assert isinstance(handle, Streamed) == (free == 950)
        assert len(handle) == 20
        totals, gradient = program.gradients(handle, order[:2])
        trained = program.train(handle, order, 0.01)
        found.append((totals, trained, gradient, program.predict(handle), program.state()))
    (totals, trained, gradient, scores, state), streamed = found
    assert streamed[0] == totals
    assert (streamed[1].correct, streamed[1].count) == (trained.correct, 11)
    assert streamed[1].loss == pytest.approx(trained.loss, rel=1e-6)  # added up by parts
    assert np.array_equal(streamed[2], gradient)
    assert np.array_equal(streamed[3], scores)
    assert_same_state(streamed[4], state)


def test_a_gpu_too_small_for_one_batch_says_what_it_needs(backend, monkeypatch):
    program = backend.compile(Network((100,), (Linear(2),)), Loss.SOFTMAX_CROSS_ENTROPY, Adam(), 2)
    monkeypatch.setattr(device, "free_memory", lambda: (3000, 5000))
    images = np.zeros((8, 100), np.float32)
    needs = {"gpu-fused": ("3,456", "864")}.get(backend.name, ("3,336", "834"))
    with pytest.raises(
        ConfigError, match=rf"8 images, needs {needs[0]} bytes.* batch of 2 needs 4 times {needs[1]}; 3,000 of 5,000"
    ):
        program.load(images, np.zeros(8, np.int32))


def test_a_batch_larger_than_the_gpu_is_refused(backend, monkeypatch):
    monkeypatch.setattr(device, "free_memory", lambda: (3000, 5000))
    with pytest.raises(ConfigError, match=r"needs [\d,]+ bytes of GPU memory, 3,000 of 5,000 are free"):
        backend.compile(Network((100,), (Linear(2),)), Loss.SOFTMAX_CROSS_ENTROPY, Adam(), 50)


def test_a_program_computes_on_its_own_gpu_whatever_was_used_before(backend, monkeypatch):
    current = []

    @contextlib.contextmanager
    def on(gpu):
        current.append(gpu)
        yield
        current.pop()

    def guarded(function):
        def guard(*arguments):
            assert current
            assert set(current) == {backend.gpu}
            return function(*arguments)

        return guard

    monkeypatch.setattr(device, "on", on)
    monkeypatch.setattr(launch.Kernel, "launch", guarded(launch.Kernel.launch))
    for name in ("free_memory", "empty", "to_device", "to_host", "copy", "synchronize"):
        monkeypatch.setattr(device, name, guarded(getattr(device, name)))
    network = Network((2,), (Linear(2),))
    program = backend.compile(network, Loss.SOFTMAX_CROSS_ENTROPY, Adam(), 2)
    program.restore(program.state())
    handle = program.load(np.ones((2, 2), np.float32), np.zeros(2, np.int32))
    program.train(handle, np.arange(2), 0.1)
    _, gradient = program.gradients(handle, np.arange(2))
    program.apply(gradient, 0.1)
    program.predict(handle)
    program.close()
    assert not current


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


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpu-naive", {"block": 3}),
        ("gpu-shared-input", {"block": 7, "tile": 1}),
        ("gpu-shared", {"block": 3, "tile": 3}),
    ],
)
def test_any_block_and_tile_give_the_same_numbers(name, settings):
    case = make_case(Network(*NETWORKS["strides_and_paddings"]), images=2)
    check_case(backend_class(name)(**settings), case)


def test_settings_beyond_the_gpu_are_refused():
    with pytest.raises(ConfigError, match=r"backend.block=2048: must be 1 \.\. 1024 threads"):
        backend_class("gpu-naive")(block=2048)
    with pytest.raises(ConfigError, match=r"backend.block=0: must be 1 \.\. 1024 threads, the limit of CUDA simulator"):
        backend_class("gpu-shared")(block=0)
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


def test_threads_that_ask_at_once_get_the_same_shared_array(monkeypatch):
    from numba.cuda.simulator.kernelapi import FakeCUDAShared

    both, empty = threading.Barrier(2), np.empty

    def empty_when_both_ask(shape, dtype):
        both.wait(10)
        return empty(shape, dtype)

    monkeypatch.setattr(np, "empty", empty_when_both_ask)
    shared = FakeCUDAShared(0)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: shared.array(4, np.float32), range(2))
    assert first is second
