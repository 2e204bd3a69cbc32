"""`cpu-simd` compiled for one CPU, named by TEST_CPU; run by `test_cpus.py`, in a process of its own.

A kernel that a CPU has no instruction for ends the process inside LLVM, and Numba takes the CPU from the environment.
Where this machine has not got the CPU's instructions, its code is made and read, not run.
"""

import functools
import os
import re

import pytest
from backends.on_target import NETWORKS
from backends.test_cpu_simd_algorithms import check_every_algorithm, check_step
from conformance import check_case, make_case
from machine_code import CPUS, assembly_of

from cnnexp import SGD, Conv2d, Flatten, Linear, MaxPool2d, Network, ReLU
from cnnexp.backends.simd import CpuSimd
from cnnexp.backends.simd.algorithms import update
from cnnexp.backends.simd.compiler.emit import FLOAT
from cnnexp.backends.simd.compiler.host import host, host_target
from cnnexp.optimizers import OPTIMIZERS

CPU = CPUS[os.environ["TEST_CPU"]]
CONVOLUTIONS = Conv2d(3, 3), ReLU(), Conv2d(3, 3), ReLU()
FEW_FILTERS = Network((12, 14, 1), (*CONVOLUTIONS, MaxPool2d(2), Flatten(), Linear(5, False)))


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "between" else pytest.mark.slow) for n in NETWORKS])
def test_every_algorithm_of_every_layer(name):
    check_every_algorithm(CPU, Network(*NETWORKS[name]))


def test_code_is_of_this_cpu():
    # events are moved to the front of their list, for which CPUs differ most
    assembly = check_step(CPU, FEW_FILTERS, (("conv2", "channels-argmax"),)).read()
    for pattern in CPU.has:
        assert re.search(pattern, assembly), pattern


def test_every_optimizer_compiles():
    for optimizer in OPTIMIZERS.values():
        step = [("update", functools.partial(update.update, optimizer=optimizer(weight_decay=0.01)))]
        assembly_of(CPU, CPU.target, step, [FLOAT] * 5)


@pytest.mark.skipif(not CPU.runs_here, reason="another CPU")
def test_a_program_trains():
    assert host()[1:] == (CPU.name, CPU.features)
    assert host_target() == CPU.target
    check_case(CpuSimd(2), make_case(FEW_FILTERS, images=19), SGD(lr=0.1))
