"""`cpu-simd` on every kind of CPU, each in a process of its own, which LLVM may end: see `one_cpu.py`."""

import os

import pytest
from commands import suite
from machine_code import CPUS
from tables import each

ONE_CPU = "tests/backends/one_cpu.py"
FILES = (f"tests/backends/test_{suite}.py" for suite in ("conformance", "random_networks", "cpu_simd"))
SUITES = (*FILES, "-k", "cpu-simd or test_cpu_simd")


def runs():
    for name, cpu in CPUS.items():
        yield pytest.param(name, (ONE_CPU,), id=name, marks=pytest.mark.thorough)
        yield pytest.param(name, (ONE_CPU, "-m", "slow"), id=f"{name}-every network", marks=pytest.mark.slow)
        if cpu.runs_here:
            yield pytest.param(name, (*SUITES, "-m", "not slow"), id=f"{name}-conformance", marks=pytest.mark.slow)


@each(*runs())
def test_cpu(name, arguments):
    cpu = CPUS[name]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("NUMBA_CPU_")}
    environ["TEST_CPU"] = name
    if cpu.runs_here:
        environ |= {"NUMBA_CPU_NAME": cpu.name, "NUMBA_CPU_FEATURES": cpu.features}
    suite("-p", "no:faulthandler", "--capture=sys", *arguments, environ=environ)
