"""`cpu-simd` on every kind of CPU, each in a process of its own, which LLVM may end: see `one_cpu.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from machine_code import CPUS

ROOT = Path(__file__).parents[2]
OFTEN = ("sse2",)
RUN_HERE = [name for name, cpu in CPUS.items() if cpu.runs_here]


def run_tests(name: str, cache: Path, *arguments: str) -> None:
    cpu, environment = CPUS[name], {**os.environ, "TEST_CPU": name, "XDG_CACHE_HOME": str(cache)}
    for key in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "PYTEST_XDIST_WORKER"):
        environment.pop(key, None)
    if cpu.runs_here:
        environment |= {"NUMBA_CPU_NAME": cpu.name, "NUMBA_CPU_FEATURES": cpu.features}
    options = ["-v", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:faulthandler", "--capture=sys"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{name}: exit code {done.returncode}\n{done.stdout[-4000:]}{done.stderr[:2000]}"
    assert " passed" in done.stdout


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.thorough) for name in CPUS]
)
def test_cpu(name, tmp_path):
    run_tests(name, tmp_path, "tests/backends/one_cpu.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", CPUS)
def test_whole_grid(name, tmp_path):
    run_tests(name, tmp_path, "tests/backends/one_cpu.py", "-m", "slow")


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN_HERE)
def test_conformance(name, tmp_path):
    suites = (f"tests/backends/test_{suite}.py" for suite in ("conformance", "cpu_simd"))
    run_tests(name, tmp_path, *suites, "-k", "cpu-simd or test_cpu_simd", "-m", "not slow")
