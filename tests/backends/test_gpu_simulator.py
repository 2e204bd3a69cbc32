"""Every GPU backend in Numba's CUDA simulator, each in a process of its own: see `simulated_gpu.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def simulate(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.parametrize(
    "which", ["gpu-naive", "gpu-shared-input", "gpu-shared and not input", "gpu-tuned", "gpu-fused", "refused"]
)
def test_backend_in_the_simulator(which):
    suite = "tests/backends/simulated_gpu.py"
    done = simulate("pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", suite, "-k", which)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
