"""`cpu-simd` on every kind of CPU, each in a process of its own, which LLVM may end: see `one_cpu.py`."""

import os

import pytest
from commands import suite
from machine_code import CPUS

ONE_CPU = "tests/backends/one_cpu.py"
SUITES = (
    *(f"tests/backends/test_{suite}.py" for suite in ("conformance", "cpu_simd")),
    "-k",
    "cpu-simd or test_cpu_simd",
)


def runs():
    for name, cpu in CPUS.items():
        yield pytest.param(name, (ONE_CPU,), id=name, marks=pytest.mark.thorough)
        yield pytest.param(name, (ONE_CPU, "-m", "slow"), id=f"{name}-every network", marks=pytest.mark.slow)
        if cpu.runs_here:
            yield pytest.param(name, (*SUITES, "-m", "not slow"), id=f"{name}-conformance", marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "arguments"), list(runs()))
def test_cpu(name, arguments):
    cpu, environ = CPUS[name], {**os.environ, "TEST_CPU": name}
    for key in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"):
        environ.pop(key, None)
    if cpu.runs_here:
        environ |= {"NUMBA_CPU_NAME": cpu.name, "NUMBA_CPU_FEATURES": cpu.features}
    suite("-p", "no:faulthandler", "--capture=sys", *arguments, environ=environ)
