"""Every backend of this machine against the oracle, on networks that nobody thought of."""

import pytest
from networks import KINDS, check_random_networks

from cnnexp.network import LAYERS

# of each kind, the first the smallest that there is; a backend that compiles anew for each network gets fewer of them
FEW, MORE = {"cpu-simd": 1}, {"cpu-simd": 3, "gpu-fused": 3, "gpu": 3}


@pytest.mark.parametrize("kind", KINDS)
def test_random_networks(backend, kind):
    check_random_networks(backend, kind, FEW.get(backend.name, 2))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_more_random_networks(backend, kind):
    check_random_networks(backend, kind, MORE.get(backend.name, 6))


def test_random_networks_hold_every_layer():
    assert set(LAYERS) <= set(KINDS)
