"""Every GPU backend in Numba's CUDA simulator, each in a process of its own: see `simulated_gpu.py`.

A second opinion beside the software GPU (`test_soft_gpu.py`), and slow: most of it is left to `-m slow`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cnnexp.backends import BACKENDS

ROOT = Path(__file__).parents[2]
SLOW = pytest.mark.slow


def simulate(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.parametrize(
    "which",
    [
        "(gpu-naive and residual) or refused or shared_array",
        pytest.param("gpu-fused and (one_conv or fractions)", marks=pytest.mark.thorough),
        *(
            pytest.param(which, marks=SLOW)
            for which in ("naive", "shared-input", "gpu-shared and not input", "tuned", "fused")
        ),
    ],
)
def test_backend_in_the_simulator(which):
    suite = "tests/backends/simulated_gpu.py"
    done = simulate("pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", suite, "-k", which)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.parametrize(
    "name",
    [
        "gpu",
        *(pytest.param(name, marks=SLOW) for name in BACKENDS if name.startswith("gpu-")),
    ],
)
def test_a_simulated_run_trains_and_tells_no_times(name, tmp_path):
    small = (
        "dataset.height=6",
        "dataset.width=6",
        "dataset.train_size=12",
        "dataset.test_size=3",
        "trainer.batch_size=6",
    )
    done = simulate(
        "cnnexp", f"backend={name}", "experiment=smoke", *small, "tracking=none", f"hydra.run.dir={tmp_path}"
    )
    assert done.returncode == 0, done.stderr
    assert "simulated: its times mean nothing" in done.stdout
    assert " 2/2 " in done.stdout
    assert "images/s" not in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    told = {key for line in lines for key in line.get("metrics", {})}
    assert {"train/loss", "test/accuracy", "final/test_accuracy", "model/parameters"} <= told
    assert not [key for key in told if key.startswith(("time/", "throughput/", "speedup/"))]
    tags = next(line["tags"] for line in lines if line["event"] == "begin")
    assert tags["gpu.simulated"] == "true"
    assert tags["device"] == "CUDA simulator"
