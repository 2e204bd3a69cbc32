"""Every backend of this machine against the oracle: the contract of `cnnexp.backends.protocol`."""

import conformance
import numpy as np
import pytest
from backends import outside_layer
from commands import raises
from conformance import Case, assert_same_state, check_backend, check_case, check_training, is_here, same_case, started
from networks import NETWORKS

from cnnexp import SGD, Adam, Loss
from cnnexp.backends import BACKENDS, backend_class
from cnnexp.errors import CheckpointError, ConfigError, NetworkError
from cnnexp.network import BatchNorm2d, Conv2d, Dropout, Flatten, Linear, Network, ReLU, Residual, Sigmoid, Tanh

LARGE = Network((28, 28, 1), (Conv2d(2, 3), ReLU(), Flatten(), Linear(4)))
ONE_CONV = Network(*NETWORKS["one_conv"])


@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", NETWORKS)
def test_network(backend, name, turn):
    """Every network in one size of batch, each size with half of the networks; then the other way round."""
    check_backend(backend, Network(*NETWORKS[name]), images=(1, 5)[(list(NETWORKS).index(name) + turn) % 2])


@pytest.mark.usefixtures("no_plugins")
def test_a_users_own_layer_from_outside_the_package(backend, monkeypatch):
    check_backend(backend, outside_layer.network(monkeypatch))


@pytest.mark.parametrize("name", ["one_conv", "two_conv_mlp", "max-pool"])
def test_ties_and_dead_relus(backend, name):
    check_backend(backend, Network(*NETWORKS[name]), images=9, exact=True)


@pytest.mark.parametrize("hidden", [(), (Linear(8), ReLU(), Linear(4), ReLU())])
def test_binary_cross_entropy(backend, hidden):
    network = Network((2,), (*hidden, Linear(1), Sigmoid()))
    check_backend(backend, network, loss=Loss.BINARY_CROSS_ENTROPY, images=20, seed=1)


@pytest.mark.parametrize("loss", [Loss.MEAN_SQUARED_ERROR, Loss("softmax_cross_entropy", 0.1)])
def test_other_losses(backend, loss):
    check_backend(backend, Network((4,), (Linear(5), Tanh(), Linear(3))), loss=loss, images=7)


def test_saturated_and_huge_scores_stay_finite(backend):
    images, labels = np.array([[-200], [-200], [200], [200]], np.float32), np.array([0, 1, 0, 1])
    network = Network((1,), (Linear(1), Sigmoid()))
    case = Case(network, Loss.BINARY_CROSS_ENTROPY, np.array([1, 0], np.float32), images, labels)
    program, handle = started(backend, case, SGD(), 4)
    totals, gradient = program.gradients(handle, np.arange(4))
    assert totals.loss == pytest.approx(200)
    assert totals.correct == 2
    assert np.isfinite(gradient).all()

    network, parameters = Network((1,), (Linear(3, bias=False),)), np.array([-1e4, 0, 1e4], np.float32)
    images, labels = np.ones((2, 1), np.float32), np.array([0, 2])
    check_case(backend, Case(network, Loss.SOFTMAX_CROSS_ENTROPY, parameters, images, labels))


@pytest.mark.parametrize("kind", [np.float32, np.uint8])
def test_images_that_may_not_be_written_and_bytes_stand_for_fractions(backend, kind):
    case = conformance.make_case(ONE_CONV)
    if kind is np.uint8:
        case.images = np.random.default_rng(3).integers(0, 256, case.images.shape).astype(np.uint8)
        assert conformance.decisions_are_clear(case)
    case.images.flags.writeable = False
    case.labels.flags.writeable = False
    check_case(backend, case)


def test_large_sums(backend):
    # rounding grows with the number of terms: as many as a batch of 100 at 28x28
    check_case(backend, same_case(LARGE, images=3 if backend.name == "python" else 101))


def test_every_optimizer_trains(backend, optimizer):
    check_training(backend, same_case(ONE_CONV, images=6), optimizer)


def test_gradients_change_nothing_that_state_returns(backend):
    block = Residual((Conv2d(3, 3, padding="same"), BatchNorm2d(), ReLU(), Dropout(0.4)))
    network = Network((6, 6, 1), (Conv2d(3, 3, padding="same"), BatchNorm2d(), block, Flatten(), Linear(10)))
    first, second = np.arange(4), np.arange(4, 7)
    program, handle = started(backend, same_case(network, images=8), Adam(), 4)
    program.train(handle, first, 0.01)
    before = program.state()

    _, gradient = program.gradients(handle, second)
    assert_same_state(program.state(), before)
    program.restore(before)  # forgets the batch, so `apply` has nothing to move the averages by
    program.apply(gradient, 0.01)
    assert np.array_equal(program.state()["running"], before["running"])

    program.restore(before)
    program.gradients(handle, first)
    _, gradient = program.gradients(handle, second)  # this batch counts, the one before does not
    assert_same_state(program.state(), before)
    program.apply(gradient, 0.01)
    halves = program.state()
    program.restore(before)
    program.train(handle, second, 0.01)
    assert not np.array_equal(halves["running"], before["running"])
    np.testing.assert_allclose(halves["running"], program.state()["running"], rtol=1e-6)


def test_a_state_continues_on_any_backend(backend, optimizer):
    case, other, states = same_case(ONE_CONV, images=6), backend_class("numpy")(), []
    for halves in ((backend, other), (other, backend)):
        state = case.state
        for half in halves:
            program = half.compile(case.network, case.loss, optimizer, 5)
            program.restore(state)
            program.train(program.load(case.images, case.labels), np.arange(6), 0.01)
            state = program.state()
        states.append(state)
    assert int(states[0]["step"]) == int(states[1]["step"]) == 4
    for key in ("parameters", *optimizer.slots):
        np.testing.assert_allclose(states[0][key], states[1][key], rtol=1e-4, atol=1e-5)


def test_programs_of_one_process_leave_each_other_alone(backend):
    case, found = same_case(ONE_CONV, images=6), []
    for backends in ((backend,), (backend, backend_class("cpu")())):
        programs = [started(made, case, Adam(), 3) for made in backends]
        for start in (0, 3):
            for program, handle in programs:
                program.train(handle, np.arange(start, start + 3), 0.01)
        found.append(programs[0][0].state())
    assert_same_state(*found)


def test_a_backend_says_what_it_is_and_refuses_another_networks_state_and_loss(backend):
    network = Network((3,), (Linear(2),))
    program = backend.compile(network, Loss.SOFTMAX_CROSS_ENTROPY, SGD(), 2)
    raises(CheckpointError, "7.*8", program.restore, {"parameters": np.zeros(7, np.float32)})
    raises(NetworkError, "Sigmoid last", backend.compile, network, Loss.BINARY_CROSS_ENTROPY, SGD(), 2)
    assert backend.name in BACKENDS
    assert backend.threads >= 1
    assert backend.device_name
    assert program.compile_s >= 0
    assert program.batch_size == 2


@pytest.mark.parametrize("name", ["numpy-parallel", "unrolled-parallel", "cpu-parallel", "torch", "keras"])
def test_threads_out_of_range(name):
    if not is_here(name):
        pytest.skip("what it needs is not installed")
    for threads in (0, -1, 10_000):
        with pytest.raises(ConfigError, match=rf"backend.threads={threads}: must be 1 to \d+"):
            backend_class(name)(threads=threads)


def test_the_number_of_pytorchs_threads_is_its_users():
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    program, handle = started(backend_class("torch")(threads=1), same_case(ONE_CONV), SGD(), 4)
    program.predict(handle)
    assert torch.get_num_threads() == before
