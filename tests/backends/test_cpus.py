"""`cpu-simd` on every kind of CPU, each in a process of its own, which LLVM may end: see `one_cpu.py`."""

import os
import subprocess
import sys

import pytest
from commands import ROOT
from machine_code import CPUS

ONE_CPU = "tests/backends/one_cpu.py"
SUITES = (
    *(f"tests/backends/test_{suite}.py" for suite in ("conformance", "cpu_simd")),
    "-k",
    "cpu-simd or test_cpu_simd",
)


def runs():
    for name, cpu in CPUS.items():
        yield pytest.param(name, (ONE_CPU,), id=name, marks=() if name == "sse2" else pytest.mark.thorough)
        yield pytest.param(name, (ONE_CPU, "-m", "slow"), id=f"{name}-whole grid", marks=pytest.mark.slow)
        if cpu.runs_here:
            yield pytest.param(name, (*SUITES, "-m", "not slow"), id=f"{name}-conformance", marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "arguments"), list(runs()))
def test_cpu(name, arguments):
    cpu, environment = CPUS[name], {**os.environ, "TEST_CPU": name}
    for key in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "PYTEST_XDIST_WORKER"):
        environment.pop(key, None)
    if cpu.runs_here:
        environment |= {"NUMBA_CPU_NAME": cpu.name, "NUMBA_CPU_FEATURES": cpu.features}
    options = ["-v", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:faulthandler", "--capture=sys"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{name}: exit code {done.returncode}\n{done.stdout[-4000:]}{done.stderr[:2000]}"
    assert " passed" in done.stdout
