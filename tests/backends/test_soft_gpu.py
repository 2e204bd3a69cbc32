"""The GPU backends on the software GPU: `soft_gpu.py` in a process of its own, for GPUs of several kinds."""

from dataclasses import replace

import pytest
from commands import suite

pytest.importorskip("numba_cuda", reason="runs numba-cuda: pip install cnnexp[gpu]")

import softgpu
from softgpu import SoftGpu

OWN = "tests/backends/soft_gpu.py"
TWO = SoftGpu(devices=2, multiprocessors=4)
OF_EACH_KIND = SoftGpu(devices=3, capabilities=((7, 5), (9, 0), (12, 0)), multiprocessors=4)
pytestmark = pytest.mark.skipif(bool(softgpu.unavailable()), reason=softgpu.unavailable())


@pytest.mark.parametrize(
    ("gpu", "arguments"),
    [
        pytest.param(TWO, (OWN,), id="backends", marks=pytest.mark.thorough),
        pytest.param(
            TWO,
            ("tests/backends/test_conformance.py", "-k", "gpu and (outside or random or binary or ties or optimizer)"),
            id="what all backends are held to",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            OF_EACH_KIND,
            (OWN, "-m", "slow and not mutant", "-k", "network or real_size"),
            id="every network on every backend and a GPU of each kind",
            marks=pytest.mark.slow,
        ),
        pytest.param(TWO, (OWN, "-m", "slow", "-k", "epoch"), id="an epoch of MNIST", marks=pytest.mark.slow),
    ],
)
def test_backends(gpu, arguments, tmp_path):
    report = None if OWN in arguments else tmp_path / "findings"  # that suite looks at what is found itself
    printed = suite("-s", *arguments, environ=replace(gpu, report=report).environment())
    assert "skipped" not in printed
    assert report is None or not report.exists() or report.read_text() == ""
    print(printed)  # noqa: T201
