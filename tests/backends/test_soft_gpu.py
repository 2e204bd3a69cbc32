"""The GPU backends on the software GPU: `soft_gpu.py` in a process of its own, for GPUs of several kinds."""

import subprocess
import sys

import pytest
from commands import ROOT

pytest.importorskip("numba_cuda", reason="runs numba-cuda: pip install cnnexp[gpu]")

import softgpu
from softgpu import SoftGpu

TWO = SoftGpu(devices=2, multiprocessors=4)
OF_EACH_KIND = SoftGpu(devices=3, capabilities=((7, 5), (9, 0), (12, 0)), multiprocessors=4)
pytestmark = pytest.mark.skipif(bool(softgpu.unavailable()), reason=softgpu.unavailable())


@pytest.mark.parametrize(
    ("gpu", "arguments"),
    [
        pytest.param(TWO, (), id="backends", marks=pytest.mark.thorough),
        pytest.param(
            OF_EACH_KIND,
            ("-m", "slow and not mutant", "-k", "network or real_size"),
            id="every network on every backend and a GPU of each kind",
            marks=pytest.mark.slow,
        ),
        pytest.param(TWO, ("-m", "slow", "-k", "epoch"), id="an epoch of MNIST", marks=pytest.mark.slow),
    ],
)
def test_backends(gpu, arguments):
    environment = gpu.environment()
    environment.pop("PYTEST_XDIST_WORKER", None)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-s", "tests/backends/soft_gpu.py"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    pipes = {"capture_output": True, "text": True, "timeout": 7200}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, **pipes)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
    print(done.stdout)  # noqa: T201
