import pytest


@pytest.fixture
def run_ptx():
    from ptx_runner import run  # imports CUDA, which only the suites that run on the software GPU may

    return run
