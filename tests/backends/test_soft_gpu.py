"""The GPU backends on the software GPU: `soft_gpu.py` in a process of its own, for GPUs of several kinds."""

from dataclasses import replace

import pytest
from commands import suite
from tables import each

pytest.importorskip("numba_cuda", reason="runs numba-cuda: pip install cnnexp[gpu]")

import softgpu
from softgpu import SoftGpu

OWN = "tests/backends/soft_gpu.py"
OF_ALL = "tests/backends/test_conformance.py", "tests/backends/test_random_networks.py"
SOME = "-k", "gpu and (outside or random or binary or ties or optimizer)"
NETWORKS = OWN, "-m", "slow and not mutant", "-k", "network or real_size"
TWO = SoftGpu(devices=2, multiprocessors=4)
OF_EACH_KIND = SoftGpu(devices=3, capabilities=((7, 5), (9, 0), (12, 0)), multiprocessors=4)
pytestmark = pytest.mark.skipif(bool(softgpu.unavailable()), reason=softgpu.unavailable())


@each(
    pytest.param(TWO, (OWN,), id="backends", marks=pytest.mark.thorough),
    pytest.param(TWO, (*OF_ALL, *SOME), id="what all backends are held to", marks=pytest.mark.slow),
    pytest.param(OF_EACH_KIND, NETWORKS, id="every network on a GPU of each kind", marks=pytest.mark.slow),
    pytest.param(TWO, (OWN, "-m", "slow", "-k", "epoch"), id="an epoch of MNIST", marks=pytest.mark.slow),
)
def test_backends(tmp_path, gpu, arguments):
    report = None if OWN in arguments else tmp_path / "findings"  # that suite looks at what is found itself
    printed = suite("-s", *arguments, environ=replace(gpu, report=report).environment())
    assert "skipped" not in printed
    assert report is None or not report.exists() or report.read_text() == ""
    print(printed)  # noqa: T201
