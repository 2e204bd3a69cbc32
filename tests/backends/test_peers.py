"""The peers as backends; the contract that they share with all is in test_conformance."""

import numpy as np
import pytest

from cnnexp.backends import backend_class
from cnnexp.errors import BackendUnavailable, ConfigError
from cnnexp.network import Linear, Network
from cnnexp.network.losses import Loss
from cnnexp.optimizers import SGD

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("name", ["torch", "keras"])
def test_threads_out_of_range_and_who_keeps_their_number(name):
    network = Network((4,), (Linear(2),))
    try:
        peer = backend_class(name)(threads=1)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    for threads in (0, 10_000):
        with pytest.raises(ConfigError, match=rf"backend.threads={threads}: must be 1 to \d+"):
            backend_class(name)(threads=threads)
    before = torch.get_num_threads()
    program = peer.compile(network, Loss.SOFTMAX_CROSS_ENTROPY, SGD(), 4)
    program.predict(program.load(np.zeros((1, 4), np.float32), np.zeros(1, np.int32)))
    assert torch.get_num_threads() == before, "PyTorch's is its user's"
