"""What holds for the tests of backends."""

from dataclasses import replace

import pytest

from cnnexp.optimizers import OPTIMIZERS


@pytest.fixture(autouse=True, scope="session")
def _compiled_here():
    """Compile hundreds of small programs in this process: a child for each costs minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cnnexp.backends.simd.runtime.compilation.compile_in_subprocess", lambda key, described: None)
        yield


@pytest.fixture(params=OPTIMIZERS)
def optimizer(request):
    """Every optimizer, with all that it can do: momentum and decay."""
    made = OPTIMIZERS[request.param](weight_decay=0.01)
    return replace(made, momentum=0.9) if hasattr(made, "momentum") else made
