"""Where there is no GPU: the GPU jobs of a sweep fail, each by one clear line, and its other jobs are kept."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from cnnexp.backends import BACKENDS, backend_class
from cnnexp.errors import BackendUnavailable

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def absent():
    try:
        backend_class("gpu")()
    except BackendUnavailable:
        return
    pytest.skip("this machine has a GPU")


@pytest.mark.parametrize("name", [name for name in BACKENDS if name.startswith("gpu")])
def test_every_gpu_backend_says_what_is_missing_and_what_to_use(name):
    with pytest.raises(BackendUnavailable, match=r"^no GPU to compute on: .*use backend=cpu-parallel or cpu-simd$"):
        backend_class(name)()


def test_a_sweep_loses_its_gpu_jobs_and_keeps_the_others(tmp_path):
    arguments = (
        "backend=cpu,cpu-parallel,gpu-naive,gpu-shared",
        "model.filters=2,3",
        "experiment=smoke",
        "dataset.train_size=20",
        "dataset.test_size=5",
        "trainer.epochs=1",
        "tracking=none",
        f"hydra.sweep.dir={tmp_path}",
    )
    command = [sys.executable, "-m", "cnnexp", "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert " and 3 more: no GPU to compute on" in done.stderr
    assert done.stderr.count("no GPU to compute on") == 1
    with (tmp_path / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    lacking = [row["backend"] for row in rows if "no GPU to compute on" in row["error"]]
    assert lacking == ["gpu-naive"] * 2 + ["gpu-shared"] * 2
    kept = [(row["backend"], row["model.filters"], row["status"]) for row in rows if row["final/test_accuracy"]]
    assert kept == [(name, filters, "FINISHED") for name in ("cpu", "cpu-parallel") for filters in "23"]
    assert [row["status"] for row in rows if not row["final/test_accuracy"]] == ["UNAVAILABLE"] * 4
