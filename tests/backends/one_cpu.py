"""`cpu-simd` compiled for one CPU, named by TEST_CPU; run by `test_cpus.py`, in a process of its own.

A kernel that a CPU has no instruction for ends the process inside LLVM, and Numba takes the CPU from the environment.
Where this machine has not got the CPU's instructions, its code is made and read, not run.
"""

import os
import re

import conformance
import numpy as np
import pytest
import reference
from backends.on_target import NETWORKS
from backends.test_cpu_simd_algorithms import rounds
from conformance import check_case, check_gradients, check_scores, check_training, decisions_are_clear, make_case
from machine_code import CPUS, KernelProgram, check_update

from cnnexp.backends.simd import CpuSimd
from cnnexp.backends.simd.compiler.host import host, host_target
from cnnexp.network import Conv2d, Flatten, Linear, MaxPool2d, Network, ReLU
from cnnexp.optimizers import SGD

CPU = CPUS[os.environ["TEST_CPU"]]
RATE = 0.1

FEW_FILTERS = Network(
    (12, 14, 1), (Conv2d(3, 3), ReLU(), Conv2d(3, 3), ReLU(), MaxPool2d(2), Flatten(), Linear(5, False))
)


def check_step(network: Network, forced=()) -> KernelProgram:
    """Compile the kernels, and train one step beside the oracle where they can run; look at the code where not."""
    program = KernelProgram(CPU, network, SGD(), CPU.target.lanes + 2, forced)
    if not CPU.runs_here:
        program.read()
        return program
    cases = (make_case(network, images=CPU.target.lanes + 3, seed=seed, exact=seed > 4) for seed in range(20))
    case = next(case for case in cases if decisions_are_clear(case))
    program.restore({"parameters": case.parameters})
    handle, batch = program.load(case.images, case.labels), np.arange(CPU.target.lanes + 3)[:0:-1]
    check_scores(program, handle, case)
    check_gradients(program, handle, case, batch)
    program.apply(program.gradients(handle, batch)[1], RATE)
    _, _, gradient, *_ = conformance.oracle(case, batch)
    expected = reference.sgd(case.parameters.astype(np.float64), gradient, {}, 1, RATE)
    np.testing.assert_allclose(program.state()["parameters"], expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    return program


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "between" else pytest.mark.slow) for n in NETWORKS])
def test_every_algorithm_of_every_layer(name):
    network = Network(*NETWORKS[name])
    for forced in rounds(network, CPU.target):
        check_step(network, forced)


def test_code_is_of_this_cpu():
    # events are moved to the front of their list, for which CPUs differ most
    assembly = check_step(FEW_FILTERS, (("conv2", "channels-argmax"),)).read()
    for pattern in CPU.has:
        assert re.search(pattern, assembly), pattern


def test_every_optimizer_compiles():
    check_update(CPU)


@pytest.mark.skipif(not CPU.runs_here, reason="another CPU")
def test_a_program_trains():
    assert host()[1:] == (CPU.name, CPU.features)
    assert host_target() == CPU.target
    case = make_case(FEW_FILTERS, images=19)
    check_case(CpuSimd(2), case)
    check_training(CpuSimd(2), case, SGD(lr=0.1))  # as in check_case: it is compiled already
