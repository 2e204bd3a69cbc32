"""Where there is no GPU: the GPU jobs of a sweep fail, each by one clear line, and its other jobs are kept."""

import csv

import pytest
from commands import python
from conformance import is_here

from cnnexp.backends import BACKENDS, backend_class
from cnnexp.errors import BackendUnavailable

pytestmark = pytest.mark.skipif(is_here("gpu"), reason="this machine has a GPU")
ON_GPU = [name for name in BACKENDS if name.startswith("gpu")]


@pytest.mark.parametrize("name", ON_GPU)
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
    lines = python("-c", WITHOUT_NUMBA_CUDA).splitlines()
    assert len(lines) == len(ON_GPU)
    assert all(line.startswith("no GPU to compute on: the package numba-cuda is not installed; ") for line in lines)


def test_a_sweep_loses_its_gpu_jobs_and_keeps_the_others(run, tmp_path):
    smoke = "experiment=smoke", "dataset.train_size=20", "dataset.test_size=5", "trainer.epochs=1", "tracking=none"
    code, _, stderr = run("-m", "backend=gpu-naive,numpy,gpu-shared", "model.filters=2,3", *smoke)
    assert code == 1
    assert "Traceback" not in stderr
    assert " and 3 more: no GPU to compute on" in stderr
    assert stderr.count("no GPU to compute on") == 1
    rows = [*csv.DictReader((tmp_path / "sweep" / "summary.csv").read_text().splitlines())]
    found = [(row["backend"], row["model.filters"], row["status"], bool(row["final/test_accuracy"])) for row in rows]
    expected = {"gpu-naive": ("UNAVAILABLE", False), "numpy": ("FINISHED", True), "gpu-shared": ("UNAVAILABLE", False)}
    assert sorted(found) == sorted((name, n, *ended) for name, ended in expected.items() for n in "23")
    assert all(("no GPU to compute on" in row["error"]) == (row["status"] == "UNAVAILABLE") for row in rows)
