"""The software GPU itself: each suite in a process of its own, which has the GPUs that it asks for."""

import os
import sys
from pathlib import Path

import pytest
from commands import python, suite
from tables import each

pytest.importorskip("numba_cuda", reason="runs numba-cuda: pip install cnnexp[gpu]")

import softgpu
from softgpu import SoftGpu

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(bool(softgpu.unavailable()), reason=softgpu.unavailable())


@pytest.mark.thorough
@each(
    pytest.param(("instructions", "faults", "host", "counts"), SoftGpu(devices=2), id="in order"),
    pytest.param(("host",), SoftGpu(devices=2, streams="late"), id="streams late"),
    pytest.param(("faults",), SoftGpu(devices=2, seed=5), id="shuffled", marks=pytest.mark.slow),
)
def test_suites(names, gpu):
    files = [str(HERE / f"{name}.py") for name in names]
    environ = {**gpu.environment(), "NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS": "0"}
    environ["PYTHONPATH"] += os.pathsep + str(HERE)
    assert "skipped" not in suite(*files, environ=environ)


ASK = """
import sys
from numba import cuda
import numpy as np
try:
    print(*(tuple(gpu.compute_capability) for gpu in cuda.gpus))
    for _ in range(3):
        x = cuda.to_device(np.zeros(4, np.float32))
        cuda.synchronize()
    print("done")
except Exception as error:
    print(type(error).__name__, error)
"""
FAULTY = (
    (SoftGpu(devices=0), "CUDA_ERROR_NO_DEVICE"),
    (SoftGpu(fault="alloc:2"), "CUDA_ERROR_OUT_OF_MEMORY"),
    (SoftGpu(fault="lost:2"), "CUDA_ERROR_UNKNOWN"),
)


@each(
    (SoftGpu(devices=3, capabilities=((7, 5), (9, 0)), capability=(12, 0)), "(7, 5) (9, 0) (12, 0)\ndone"),
    *(pytest.param(*machine, marks=pytest.mark.thorough) for machine in FAULTY),
)
def test_machines_and_faults_on_demand(gpu, says):
    assert says in python("-c", ASK, env=gpu.environment())


def test_nothing_of_it_is_at_work_outside_its_environment():
    assert "softgpu.numba_hook" not in sys.modules
