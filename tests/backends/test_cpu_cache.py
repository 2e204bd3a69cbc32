"""Numba's disk cache: `cpu` and `cpu-parallel`, started at once on an empty cache, never take each other's code."""

import os
import subprocess
import sys

SCRIPT = """
import sys
import numpy as np
from cnnexp.backends import backend_class
from cnnexp.backends.cpu import kernels
from cnnexp.network.losses import Loss
from cnnexp.network import Linear, Network
from cnnexp.optimizers import SGD

network = Network((3,), (Linear(2),))
program = backend_class(sys.argv[1])().compile(network, Loss.SOFTMAX_CROSS_ENTROPY, SGD(), 4)
program.restore({"parameters": np.arange(8, dtype=np.float32) / 8})
handle = program.load(np.arange(12, dtype=np.float32).reshape(4, 3) / 12, np.array([0, 1, 1, 0]))
parallel = sys.argv[1] == "cpu-parallel"
stats = kernels.linear.compiled(parallel).stats
print(bool(stats.cache_hits), program.gradients(handle, np.arange(4))[1].tobytes().hex())
"""


def start(backend, cache):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    return subprocess.Popen([sys.executable, "-c", SCRIPT, backend], env=environment, stdout=subprocess.PIPE, text=True)


def outputs(processes):
    found = [process.communicate(timeout=300)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return found


def test_processes_share_an_empty_cache(tmp_path):
    names = ["cpu", "cpu-parallel"]
    cold = outputs([start(name, tmp_path) for name in names])
    warm = outputs([start(name, tmp_path) for name in names])
    assert [hit for hit, _ in cold] == ["False", "False"]
    assert [hit for hit, _ in warm] == ["True", "True"]
    assert len({gradient for _, gradient in cold + warm}) == 1
    indexes = [path.name for path in tmp_path.rglob("*.nbi") if "linear_" in path.name]
    for way in ("sequential", "parallel"):
        assert sum(f".linear_{way}-" in name for name in indexes) == 1
    for index in tmp_path.rglob("*.nbi"):
        # one entry per file, so no two processes can write different code under one name
        assert len(list(index.parent.glob(f"{index.stem}.*.nbc"))) == 1, index.name
