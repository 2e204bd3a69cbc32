"""A compiler that dies takes no run with it, and where the cache is warm nobody asks it."""

import json
import os
import re
import signal
from dataclasses import dataclass
from unittest.mock import MagicMock

import numpy as np
import psutil
import pytest
from commands import ROOT, starting, wait_for

from cnnexp import SGD, Flatten, Linear, Loss, Network
from cnnexp.backends.simd import CpuSimd
from cnnexp.backends.simd.compiler.host import host, host_target
from cnnexp.backends.simd.runtime import compilation, program
from cnnexp.errors import CompilerDied
from cnnexp.tracking.events import JOURNAL, read_journal

COMPILE_IN_SUBPROCESS, CALL = compilation.compile_in_subprocess, compilation.child.call
NETWORK = Network((2, 2, 1), (Flatten(), Linear(2)))
SMALL = (
    *("experiment=smoke", "backend=cpu-simd", "backend.threads=1", "tracking=none", "trainer.baseline=null"),
    *("trainer.epochs=1", "model.filters=2"),
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
def asked(monkeypatch):
    """Compiling in a subprocess as in a run; what notes the calls."""
    monkeypatch.setattr(program, "_ready", {})
    asked = MagicMock(side_effect=COMPILE_IN_SUBPROCESS)
    monkeypatch.setattr(compilation, "compile_in_subprocess", asked)
    return asked


@pytest.fixture
def cold(asked, tmp_path, monkeypatch):
    """That, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return asked


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Return compiler(function): from now on a child process has it for a compiler."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}", prepend=os.pathsep)
    return lambda function: (tmp_path / "sitecustomize.py").write_text(SITE.format(compiler=function))


@pytest.mark.skipif(os.name == "nt", reason="an abort is a signal on POSIX alone")
@pytest.mark.usefixtures("asked")
def test_a_compiler_that_aborts_ends_the_run_in_one_line_or_with_fallback_it_goes_on(compiler, run, tmp_path):
    compiler("abort")
    never_compiled = (*SMALL, "trainer.batch_size=37")  # by any other test: the cache cannot have it
    code, _, stderr = run(*never_compiled)
    assert code == 1
    assert re.fullmatch(f"cnnexp: error: {DIED}\n", stderr)
    journal = read_journal(tmp_path / "run")
    assert journal["status"] == "FAILED"
    assert re.fullmatch(DIED, journal["error"])

    code, stdout, stderr = run(*never_compiled, "backend.fallback=true", f"hydra.run.dir={tmp_path}/again")
    assert code == 0, stderr
    assert re.search(DIED, stdout)
    assert "210 parameters; cpu-parallel on 1 thread" in " ".join(stdout.split())
    end = json.loads((tmp_path / "again" / JOURNAL).read_text().splitlines()[-1])
    assert (end["status"], end["tags"]["backend.fallback"]) == ("FINISHED", "cpu-parallel")


def test_ctrl_c_ends_the_child_too(compiler, tmp_path):
    compiler("hang")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with starting(*SMALL, "hydra.run.dir=run", cwd=tmp_path, env=environment) as run:
        try:
            wait_for((tmp_path / "hangs").exists, run, 300)
            children = psutil.Process(run.pid).children()
            run.send_signal(signal.SIGINT)
            _, stderr = run.communicate(timeout=300)
        finally:
            run.kill()
    assert (run.returncode, stderr) == (130, "cnnexp: error: interrupted\n")
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert read_journal(tmp_path / "run")["status"] == "KILLED"


def scores(optimizer=None):
    program = CpuSimd(1).compile(NETWORK, Loss.SOFTMAX_CROSS_ENTROPY, optimizer or SGD(), 4)
    program.restore({"parameters": np.arange(10, dtype=np.float32)})
    return program.predict(program.load(np.ones((1, 2, 2, 1), np.float32), np.zeros(1, int))).tolist()


def test_the_child_compiles_and_a_warm_start_asks_nobody(cold, tmp_path, monkeypatch):
    """And nothing is compiled twice where the cache cannot be written."""
    made = []
    monkeypatch.setattr(compilation, "compile_in_process", lambda *_: pytest.fail("compiled in this process"))
    monkeypatch.setattr(compilation.child, "call", lambda *asked: made.append((asked, CALL(*asked))) or made[-1][1])
    for _ in range(2):
        assert scores() == [[20.0, 25.0]]
        assert cold.call_count == 2, "what trains, and what predicts"
        program._ready.clear()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    answers = {asked[1]: answer for asked, answer in made}
    monkeypatch.setattr(compilation.child, "call", lambda *asked: answers[asked[1]])
    assert scores() == [[20.0, 25.0]]
    assert cold.call_count == 4


def test_what_the_child_cannot_know_or_where_there_is_none_is_compiled_here(cold, monkeypatch):
    @dataclass(frozen=True)
    class Mine(SGD):
        pass

    here = MagicMock(side_effect=compilation.compile_in_process)
    monkeypatch.setattr(compilation, "compile_in_process", here)
    assert scores(Mine()) == [[20.0, 25.0]]
    monkeypatch.setattr(compilation.child.sys, "executable", "/nowhere/python")
    assert scores() == [[20.0, 25.0]]
    assert (cold.call_count, here.call_count) == (3, 2), "what predicts is the same for all optimizers"


def test_a_compiler_that_hangs_is_ended(cold, monkeypatch):
    monkeypatch.setattr(compilation, "LIMIT_S", 0.01)
    with pytest.raises(CompilerDied, match=r"took more than 0\.01 s and was killed, for .* on wide;"):
        scores()
