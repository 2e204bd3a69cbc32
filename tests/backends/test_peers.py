"""The peers as backends; the contract that they share with all is in test_conformance."""

import pytest
from conformance import is_here, make_case, started

from cnnexp import SGD, Linear, Network
from cnnexp.backends import backend_class

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("name", ["torch", "keras"])
def test_the_number_of_pytorchs_threads_is_its_users(name):
    case, before = make_case(Network((4,), (Linear(2),))), torch.get_num_threads()
    if not is_here(name):
        pytest.skip("what it needs is not installed")
    program, handle = started(backend_class(name)(threads=1), case, SGD(), 4)
    program.predict(handle)
    assert torch.get_num_threads() == before
