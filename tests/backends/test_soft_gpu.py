"""The GPU backends on the software GPU: `soft_gpu.py` in a process of its own, for GPUs of several kinds."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="runs numba-cuda: pip install cnnexp[gpu]")

import softgpu
from softgpu import SoftGpu

ROOT = Path(__file__).parents[2]
TWO = SoftGpu(devices=2, multiprocessors=4)
OF_EACH_KIND = SoftGpu(devices=3, capabilities=((7, 5), (9, 0), (12, 0)), multiprocessors=4)
pytestmark = pytest.mark.skipif(bool(softgpu.unavailable()), reason=softgpu.unavailable())


def run(gpu: SoftGpu, *arguments: str) -> None:
    environment = gpu.environment()
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-s"]
    done = subprocess.run(
        [*command, "tests/backends/soft_gpu.py", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=7200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
    print(done.stdout)  # noqa: T201


@pytest.mark.thorough
def test_backends():
    run(TWO)


@pytest.mark.slow
def test_every_network_on_every_backend_and_a_gpu_of_each_kind():
    run(OF_EACH_KIND, "-m", "slow and not mutant", "-k", "network or real_size")


@pytest.mark.slow
def test_an_epoch_of_mnist():
    run(TWO, "-m", "slow", "-k", "epoch")
