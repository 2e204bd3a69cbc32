"""Compiled code runs without Numba, and never on anything but what it was compiled for."""

import os
import subprocess
import sys

import numpy as np
import pytest
from numba import config
from numba.core.codegen import JITCPUCodegen

from cnnexp.backends.cache import host
from cnnexp.backends.simd.compiler.entry import Array
from cnnexp.backends.simd.compiler.host import host_target
from cnnexp.backends.simd.compiler.native import Function, MachineCode
from cnnexp.backends.simd.runtime import compilation, step
from cnnexp.network import Flatten, Linear, Network
from cnnexp.network.losses import Loss
from cnnexp.optimizers import SGD

DESCRIBED = Network((2, 2, 1), (Flatten(), Linear(2))), Loss.SOFTMAX_CROSS_ENTROPY, SGD(), host_target(), 1, 4
SCRIPT = """
import sys
import numpy as np
from cnnexp.backends import backend_class, cache
from cnnexp.backends.simd.compiler.native import Function, MachineCode
from cnnexp.backends.simd.runtime import program as programs
from cnnexp.network import Conv2d, Flatten, Linear, MaxPool2d, Network, ReLU
from cnnexp.network.losses import Loss
from cnnexp.optimizers import Adam

network = Network((6, 6, 1), (Conv2d(2, 3), ReLU(), MaxPool2d(2), Flatten(), Linear(3)))
found = []
for start in ("cold", "warm"):
    programs._ready.clear()
    program = backend_class("cpu-simd")(1).compile(network, Loss.SOFTMAX_CROSS_ENTROPY, Adam(), 4)
    program.restore({"parameters": network.initial_parameters(0)})
    handle = program.load(np.random.default_rng(0).random((9, 6, 6, 1), np.float32), np.arange(9) % 3)
    loss = program.train(handle, np.arange(9), 0.01).loss
    found.append((loss, program.predict(handle).tobytes()))
    assert "numba" not in sys.modules, start
assert found[0] == found[1]

(kept,) = cache.cache_folder().iterdir()
made = MachineCode.of_bytes(cache.read_private(kept))
Function(MachineCode(made.symbol, (*made.needs, "numba_unpickle"), made.object_file), [])
assert "numba" in sys.modules, "what only Numba has it is asked for"
"""


@pytest.fixture(scope="module")
def made():
    return MachineCode.of_bytes(compilation.compile_in_process("key", DESCRIBED))


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"NUMBA_CPU_NAME": "generic"},
        {"NUMBA_CPU_NAME": "nocona"},
        {"NUMBA_ENABLE_AVX": "0"},
        {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"},
    ],
    ids=lambda environment: ",".join(environment.values()) or "this CPU",
)
def test_the_cpu_is_what_numba_compiles_for(environment, monkeypatch):
    for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config.reload_config()
    assert host() == JITCPUCodegen("numba").magic_tuple()
    monkeypatch.undo()
    config.reload_config()


def test_neither_a_cold_nor_a_warm_start_imports_numba(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr


def test_code_that_calls_what_nobody_has_or_is_for_another_cpu_is_refused(made, monkeypatch):
    with pytest.raises(LookupError, match="calls nothing_of_the_kind, which"):
        Function(MachineCode(made.symbol, ("nothing_of_the_kind",), made.object_file), [])
    with pytest.raises(LookupError, match="no other_name in"):
        Function(MachineCode("other_name", made.needs, made.object_file), [])

    monkeypatch.setattr(step, "host", lambda: ("x86_64", "another", "+sse2"))
    with pytest.raises(RuntimeError, match=r"Numba compiles for .*, the kernels are for .*another"):
        compilation.compile_in_process("key", DESCRIBED)


@pytest.mark.parametrize("payload", [b"", b"code", b"[1]\ncode", b"{}\n", b'["a", 1]\ncode'])
def test_bytes_that_are_no_code_raise(payload):
    with pytest.raises((ValueError, TypeError)):
        MachineCode.of_bytes(payload)


def test_an_array_that_is_not_what_the_code_takes_is_refused(made):
    """Of another type, of two dimensions, with gaps, read-only, and a list."""
    function, right = Function(made, [Array("float32", 1, written=True)]), np.zeros(4, np.float32)
    for wrong in (right.astype(float), right.reshape(2, 2), right[::2], np.frombuffer(right.tobytes(), "f4"), [0.0]):
        with pytest.raises(TypeError, match="given for Array"):
            function(wrong)
