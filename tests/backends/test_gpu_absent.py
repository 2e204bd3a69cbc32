"""Where there is no GPU: the GPU jobs of a sweep fail, each by one clear line, and its other jobs are kept."""

import csv
import subprocess
import sys

import pytest
from conformance import is_here

from cnnexp.backends import BACKENDS, backend_class
from cnnexp.errors import BackendUnavailable

pytestmark = pytest.mark.skipif(is_here("gpu"), reason="this machine has a GPU")


@pytest.mark.parametrize("name", [name for name in BACKENDS if name.startswith("gpu")])
def test_every_gpu_backend_says_what_is_missing_and_what_to_use(name):
    with pytest.raises(BackendUnavailable, match=r"^no GPU to compute on: .*use backend=cpu-parallel or cpu-simd$"):
        backend_class(name)()


WITHOUT_NUMBA_CUDA = """
import importlib.util, sys
sys.meta_path = [finder for finder in sys.meta_path if type(finder).__name__ != "NumbaCudaFinder"]
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "numba_cuda" else found(name, *rest)
from cnnexp.backends import BACKENDS, backend_class
from cnnexp.errors import BackendUnavailable
for name in [name for name in BACKENDS if name.startswith("gpu")]:
    try:
        backend_class(name)()
    except BackendUnavailable as error:
        print(error)
"""


def test_every_gpu_backend_loads_without_numba_cuda():
    """As the core install leaves it: Numba's own `numba.cuda` has fewer modules."""
    ran = subprocess.run([sys.executable, "-c", WITHOUT_NUMBA_CUDA], capture_output=True, text=True, check=True)
    lines = ran.stdout.splitlines()
    assert len(lines) == len([name for name in BACKENDS if name.startswith("gpu")])
    assert all(line.startswith("no GPU to compute on: the package numba-cuda is not installed; ") for line in lines)


def test_a_sweep_loses_its_gpu_jobs_and_keeps_the_others(run, tmp_path):
    smoke = "experiment=smoke", "dataset.train_size=20", "dataset.test_size=5", "trainer.epochs=1", "tracking=none"
    code, _, stderr = run("-m", "backend=gpu-naive,numpy,gpu-shared", "model.filters=2,3", *smoke)
    assert code == 1
    assert "Traceback" not in stderr
    assert " and 3 more: no GPU to compute on" in stderr
    assert stderr.count("no GPU to compute on") == 1
    with (tmp_path / "sweep" / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = [(row["backend"], row["model.filters"], row["status"], bool(row["final/test_accuracy"])) for row in rows]
    expected = {"gpu-naive": ("UNAVAILABLE", False), "numpy": ("FINISHED", True), "gpu-shared": ("UNAVAILABLE", False)}
    assert sorted(found) == sorted((name, n, *ended) for name, ended in expected.items() for n in "23")
    lacking = [row["backend"] for row in rows if "no GPU to compute on" in row["error"]]
    assert lacking == ["gpu-naive"] * 2 + ["gpu-shared"] * 2
