"""What all backends that run layer after layer on the CPU owe to a clock."""

import os
from pathlib import Path

import numpy as np
import pytest

from cnnexp.backends.cpu.sequential import CpuOps
from cnnexp.backends.plain.numpy import NumpyOps
from cnnexp.backends.plain.python import PythonOps

RESIDENT = Path("/proc/self/statm")


def resident_bytes():
    return int(RESIDENT.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not RESIDENT.exists(), reason="only Linux tells how much memory a process has in use")
@pytest.mark.parametrize("ops", [CpuOps(parallel=False), NumpyOps(), PythonOps()], ids=lambda ops: type(ops).__name__)
def test_no_batch_pays_for_the_first_use_of_its_buffers(ops):
    before = resident_bytes()
    buffer = ops.empty((5000, 1000, 10), np.float32)
    assert resident_bytes() - before > 0.9 * buffer.nbytes
