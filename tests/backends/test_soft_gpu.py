"""The GPU backends on the software GPU: `soft_gpu.py` in a process of its own, for GPUs of several kinds."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="runs numba-cuda: pip install cnnexp[gpu]")

import softgpu
from softgpu import SoftGpu

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(bool(softgpu.unavailable()), reason=softgpu.unavailable())


def run(capability: tuple[int, int], *arguments: str) -> None:
    environment = SoftGpu(devices=2, capability=capability, multiprocessors=4).environment()
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
    run((9, 0))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [(7, 5), (9, 0), (12, 0)], ids="sm_{0[0]}{0[1]}".format)
def test_every_network_on_every_backend(capability):
    run(capability, "-m", "slow and not mutant", "-k", "network or real_size")


@pytest.mark.slow
def test_an_epoch_of_mnist():
    run((9, 0), "-m", "slow", "-k", "epoch")
