"""A compiler that dies takes no run with it, and where the cache is warm nobody asks it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from cnnexp.backends.simd import CpuSimd
from cnnexp.backends.simd.compiler.host import host, host_target
from cnnexp.backends.simd.runtime import compilation, program
from cnnexp.errors import CompilerDied
from cnnexp.network import Flatten, Linear, Network
from cnnexp.network.losses import Loss
from cnnexp.optimizers import SGD
from cnnexp.tracking.events import JOURNAL, read_journal

ROOT = Path(__file__).resolve().parents[2]
COMPILE_IN_SUBPROCESS = compilation.compile_in_subprocess
NETWORK = Network((2, 2, 1), (Flatten(), Linear(2)))
SMALL = (
    *("experiment=smoke", "backend=cpu-simd", "backend.threads=1", "tracking=none", "trainer.baseline=null"),
    *("trainer.epochs=1", "model.filters=2", "hydra.run.dir=run"),
)
SITE = """
import os, sys, time
if "compilation:answer" in " ".join(sys.orig_argv):
    from cnnexp.backends.simd.runtime import compilation

    def abort(*_):
        os.write(2, b"python: X86.cpp:7: void f(): Assertion `VT.isInteger()' failed.\\nStack dump\\n")
        os.abort()

    def hang(*_):
        open("hangs", "w").close()
        time.sleep(600)

    compilation.compile_in_process = {compiler}
"""
DIED = re.escape("backend=cpu-simd: the compiler was ended by SIGABRT (Assertion `VT.isInteger()' failed), for ")
DIED += rf"{re.escape(host()[1])} with {host_target().lanes} lanes, on [a-z, -]+(skinny|wide); "
DIED += "backend.fallback=true goes on with cpu-parallel"


@pytest.fixture
def start(tmp_path):
    """Return start(compiler, *arguments): a run in a folder of its own, whose child process compiles as told."""
    started = []

    def start(compiler, *arguments):
        (tmp_path / "sitecustomize.py").write_text(SITE.format(compiler=compiler))
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }
        command = [sys.executable, "-m", "cnnexp", *SMALL, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=tmp_path, env=environ, **pipes))
        return started[-1]

    yield start
    for run in started:
        run.kill()
        run.communicate()


@pytest.mark.skipif(os.name == "nt", reason="an abort is a signal on POSIX alone")
def test_a_compiler_that_aborts_ends_the_run_in_one_line(start, tmp_path):
    run = start("abort")
    _, stderr = run.communicate(timeout=300)
    assert run.returncode == 1
    assert re.fullmatch(f"cnnexp: error: {DIED}\n", stderr)
    journal = read_journal(tmp_path / "run")
    assert journal["status"] == "FAILED"
    assert re.fullmatch(DIED, journal["error"])


@pytest.mark.skipif(os.name == "nt", reason="an abort is a signal on POSIX alone")
@pytest.mark.thorough
def test_with_fallback_the_run_goes_on_and_says_so(start, tmp_path):
    run = start("abort", "backend.fallback=true")
    stdout, stderr = run.communicate(timeout=300)
    assert run.returncode == 0, stderr
    assert re.search(DIED, stdout)
    assert "210 parameters; cpu-parallel on 1 thread" in " ".join(stdout.split())
    end = json.loads((tmp_path / "run" / JOURNAL).read_text().splitlines()[-1])
    assert (end["status"], end["tags"]["backend.fallback"]) == ("FINISHED", "cpu-parallel")


def test_ctrl_c_ends_the_child_too(start, tmp_path):
    psutil = pytest.importorskip("psutil", reason="finds the child")
    run = start("hang")
    deadline = time.monotonic() + 300
    while not (tmp_path / "hangs").exists():
        assert run.poll() is None, run.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (child,) = psutil.Process(run.pid).children()
    run.send_signal(signal.SIGINT)
    _, stderr = run.communicate(timeout=300)
    assert (run.returncode, stderr) == (130, "cnnexp: error: interrupted\n")
    with contextlib.suppress(psutil.NoSuchProcess):
        assert child.status() == psutil.STATUS_ZOMBIE
    assert read_journal(tmp_path / "run")["status"] == "KILLED"


@pytest.fixture
def cold(tmp_path, monkeypatch):
    """An empty cache, and compiling in a subprocess as in a run; yield the list of what was asked of the child."""
    asked = []

    def compile_in_subprocess(key, described):
        asked.append(key)
        return COMPILE_IN_SUBPROCESS(key, described)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(program, "_ready", {})
    monkeypatch.setattr(compilation, "compile_in_subprocess", compile_in_subprocess)
    return asked


def scores(optimizer=None):
    program = CpuSimd(1).compile(NETWORK, Loss.SOFTMAX_CROSS_ENTROPY, optimizer or SGD(), 4)
    program.restore({"parameters": np.arange(10, dtype=np.float32)})
    return program.predict(program.load(np.ones((1, 2, 2, 1), np.float32), np.zeros(1, int))).tolist()


def not_here(*_):
    pytest.fail("compiled in this process")


def test_the_child_compiles_and_a_warm_start_asks_nobody(cold, monkeypatch):
    monkeypatch.setattr(compilation, "compile_in_process", not_here)
    assert scores() == [[20.0, 25.0]]
    assert len(cold) == 1
    program._ready.clear()
    assert scores() == [[20.0, 25.0]]
    assert len(cold) == 1


def test_a_cache_that_cannot_be_written_compiles_nothing_twice(cold, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(compilation, "compile_in_process", not_here)
    assert scores() == [[20.0, 25.0]]


def test_what_the_child_cannot_know_is_compiled_here(cold):
    @dataclass(frozen=True)
    class Mine(SGD):
        pass

    assert scores(Mine()) == [[20.0, 25.0]]
    assert len(cold) == 1


def test_where_no_process_can_be_started_it_is_compiled_here(cold, monkeypatch):
    monkeypatch.setattr(compilation.child.sys, "executable", "/nowhere/python")
    assert scores() == [[20.0, 25.0]]


def test_a_compiler_that_hangs_is_ended(cold, monkeypatch):
    monkeypatch.setattr(compilation, "LIMIT_S", 0.01)
    with pytest.raises(CompilerDied, match=r"took more than 0\.01 s and was killed, for .* on wide;"):
        scores()
