"""The peers as backends; the contract that they share with all is in test_conformance."""

import numpy as np
import pytest
from conformance import is_here

from cnnexp.backends import backend_class
from cnnexp.network import Linear, Network
from cnnexp.network.losses import Loss
from cnnexp.optimizers import SGD

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("name", ["torch", "keras"])
def test_the_number_of_pytorchs_threads_is_its_users(name):
    network, before = Network((4,), (Linear(2),)), torch.get_num_threads()
    if not is_here(name):
        pytest.skip("what it needs is not installed")
    program = backend_class(name)(threads=1).compile(network, Loss.SOFTMAX_CROSS_ENTROPY, SGD(), 4)
    program.predict(program.load(np.zeros((1, 4), np.float32), np.zeros(1, np.int32)))
    assert torch.get_num_threads() == before
