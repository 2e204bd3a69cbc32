"""Every backend of this machine against the oracle, on networks that nobody thought of."""

import pytest
from networks import KINDS, check_random_networks

from cnnexp.network import LAYERS

# of each kind, the first the smallest that there is; a backend that compiles anew for each network gets fewer of them
FEW, MORE = {"cpu-simd": 1, "": 2}, {"cpu-simd": 3, "gpu-fused": 3, "gpu": 3, "": 6}


@pytest.mark.parametrize("counts", [FEW, pytest.param(MORE, marks=pytest.mark.thorough)], ids=["few", "more"])
@pytest.mark.parametrize("kind", KINDS)
def test_random_networks(backend, kind, counts):
    check_random_networks(backend, kind, counts.get(backend.name, counts[""]))


def test_random_networks_hold_every_layer():
    assert set(LAYERS) <= set(KINDS)
