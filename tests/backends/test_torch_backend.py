"""The peers train the same network as we do: what the conformance tests cannot see."""

import numpy as np
import pytest

from cnnexp.backends import backend_class
from cnnexp.errors import BackendUnavailable, ConfigError
from cnnexp.network.losses import Loss
from cnnexp.network.models import TwoConvMlp
from cnnexp.optimizers import Adam


@pytest.fixture(params=["torch", "keras"])
def peer(request):
    try:
        return backend_class(request.param)(threads=1)
    except BackendUnavailable as error:
        pytest.skip(str(error))


def test_a_paper_network_trains_to_the_same_parameters(peer):
    network = TwoConvMlp().network((28, 28, 1), 10)
    rng = np.random.default_rng(0)
    images, labels = rng.random((40, 28, 28, 1), np.float32), rng.integers(0, 10, 40)
    order = rng.permutation(40)
    trained = []
    for backend in (peer, backend_class("cpu")()):
        program = backend.compile(network, Loss.SOFTMAX_CROSS_ENTROPY, Adam(), 16)
        program.restore({"parameters": network.initial_parameters(0)})
        totals = program.train(program.load(images, labels), order, 0.001)
        trained.append((totals.loss, totals.correct, program.state()["parameters"]))
        program.close()
    (loss, correct, parameters), (our_loss, our_correct, ours) = trained
    assert loss == pytest.approx(our_loss, rel=1e-5)
    assert correct == our_correct
    np.testing.assert_allclose(parameters, ours, atol=1e-4)


@pytest.mark.parametrize("threads", [0, 10_000])
def test_threads_out_of_range(peer, threads):
    with pytest.raises(ConfigError, match=rf"backend.threads={threads}: must be 1 to \d+"):
        type(peer)(threads=threads)


def test_torch_keeps_its_number_of_threads_to_itself():
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    network = TwoConvMlp().network((28, 28, 1), 10)
    program = backend_class("torch")(threads=1).compile(network, Loss.SOFTMAX_CROSS_ENTROPY, Adam(), 4)
    program.predict(program.load(np.zeros((1, 28, 28, 1), np.float32), np.zeros(1, np.int32)))
    assert torch.get_num_threads() == before
