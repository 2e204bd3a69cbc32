"""Compiled code runs without Numba, and never on anything but what it was compiled for."""

import os
import platform

import numpy as np
import pytest
from commands import python
from numba import config
from numba.core.codegen import JITCPUCodegen
from tables import each

from cnnexp import SGD, Flatten, Linear, Loss, Network
from cnnexp.backends.cache import host
from cnnexp.backends.simd.compiler import native
from cnnexp.backends.simd.compiler.entry import Array
from cnnexp.backends.simd.compiler.host import host_target
from cnnexp.backends.simd.runtime import compilation, step

x86_linux = pytest.mark.skipif(platform.machine() + platform.system() != "x86_64Linux", reason="`link` is for that")
DESCRIBED = Network((2, 2, 1), (Flatten(), Linear(2))), Loss.SOFTMAX_CROSS_ENTROPY, SGD(), host_target(), 1, 4
SCRIPT = """
import sys
import numpy as np
from cnnexp import Adam, Conv2d, Flatten, Linear, Loss, MaxPool2d, Network, ReLU
from cnnexp.backends import backend_class, cache
from cnnexp.backends.simd.compiler import native
from cnnexp.backends.simd.runtime import program as programs

network = Network((6, 6, 1), (Conv2d(2, 3), ReLU(), MaxPool2d(2), Flatten(), Linear(3)))
found = []
for start in ("cold", "warm", "linked by LLVM"):
    native.link = native.link if start != "linked by LLVM" else lambda *_: None
    programs._ready.clear()
    program = backend_class("cpu-simd")(1).compile(network, Loss.SOFTMAX_CROSS_ENTROPY, Adam(), 4)
    program.restore({"parameters": network.initial_parameters(0)})
    handle = program.load(np.random.default_rng(0).random((9, 6, 6, 1), np.float32), np.arange(9) % 3)
    loss = program.train(handle, np.arange(9), 0.01).loss
    found.append((loss, program.predict(handle).tobytes()))
    assert "numba" not in sys.modules, start
    assert start != "warm" or sys.argv[1] == "first" or "llvmlite.binding" not in sys.modules
assert found[0] == found[1] == found[2]

kept, _ = cache.cache_folder().iterdir()  # what trains, and what predicts
made = native.MachineCode.of_bytes(cache.read_private(kept))
native.Function(native.MachineCode(made.symbol, (*made.needs, "numba_unpickle"), made.object_file), [])
assert "numba" in sys.modules, "what only Numba has it is asked for"
"""


@pytest.fixture(scope="module")
def made():
    return native.MachineCode.of_bytes(compilation.compile_in_process("key", DESCRIBED))


@each((None, None, None), ("generic", None, None), ("nocona", None, None), (None, None, "0"), ("haswell", "+fma", None))
def test_the_cpu_is_what_numba_compiles_for(monkeypatch, name, features, avx):
    asked = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "NUMBA_ENABLE_AVX": avx}
    monkeypatch.setattr(os, "environ", os.environ | {key: value for key, value in asked.items() if value is not None})
    config.reload_config()
    assert host() == JITCPUCodegen("numba").magic_tuple()
    monkeypatch.undo()
    config.reload_config()


@x86_linux
def test_no_start_imports_numba_and_a_second_one_does_not_load_llvm(tmp_path):
    for start in ("first", "second"):
        python("-c", SCRIPT, start, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)})


@x86_linux
def test_what_is_not_plain_code_is_left_to_llvm(made):
    """Another machine's file, a function that it lacks, a name that the process lacks, files that are cut short."""
    good, bad = made.object_file, ((b"\0\x3e\0", b"\0\xb7\0"), (b"call_packed", b"other_name_"), (b"usleep", b"usleeq"))
    files = [good.replace(*change, 1) for change in bad] + [good[:size] for size in range(0, len(good) - 64, 64)]
    assert [bool(native.link(file, made.symbol)) for file in [good, *files]] == [True] + [False] * len(files)


def test_code_that_calls_what_nobody_has_or_is_for_another_cpu_is_refused(made, monkeypatch):
    monkeypatch.setattr(native, "link", lambda *_: None)
    with pytest.raises(LookupError, match="calls nothing_of_the_kind, which"):
        native.Function(native.MachineCode(made.symbol, ("nothing_of_the_kind",), made.object_file), [])
    with pytest.raises(LookupError, match="no other_name in"):
        native.Function(native.MachineCode("other_name", made.needs, made.object_file), [])
    monkeypatch.setattr(step, "host", lambda: ("x86_64", "another", "+sse2"))
    with pytest.raises(RuntimeError, match=r"Numba compiles for .*, the kernels are for .*another"):
        compilation.compile_in_process("key", DESCRIBED)


@pytest.mark.parametrize("payload", [b"", b"code", b"[1]\ncode", b"{}\n", b'["a", 1]\ncode'])
def test_bytes_that_are_no_code_raise(payload):
    with pytest.raises((ValueError, TypeError)):
        native.MachineCode.of_bytes(payload)


def test_an_array_that_is_not_what_the_code_takes_is_refused(made):
    """Of another type, of two dimensions, with gaps, read-only, and a list."""
    function, right = native.Function(made, [Array("float32", 1, written=True)]), np.zeros(4, np.float32)
    for wrong in (right.astype(float), right.reshape(2, 2), right[::2], np.frombuffer(right.tobytes(), "f4"), [0.0]):
        with pytest.raises(TypeError, match="given for Array"):
            function(wrong)
