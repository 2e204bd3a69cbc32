"""What holds for the tests of backends."""

from dataclasses import replace

import pytest
from conformance import is_here

from cnnexp.backends import BACKENDS, backend_class
from cnnexp.optimizers import OPTIMIZERS


# those of a GPU only where there is one: `test_gpu_absent` has what they say elsewhere, `soft_gpu` what they compute
@pytest.fixture(params=[name for name in BACKENDS if not name.startswith("gpu") or is_here("gpu-naive")])
def backend(request):
    if not is_here(request.param):
        pytest.skip("what it needs is not installed")
    return backend_class(request.param)()


@pytest.fixture(params=OPTIMIZERS)
def optimizer(request):
    """Every optimizer, with all that it can do: momentum and decay."""
    made = OPTIMIZERS[request.param](weight_decay=0.01)
    return replace(made, momentum=0.9) if hasattr(made, "momentum") else made
