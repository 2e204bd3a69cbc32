"""`cpu-simd` compiled for one CPU, named by TEST_CPU; run by `test_cpus.py`, in a process of its own.

A kernel that a CPU has no instruction for ends the process inside LLVM, and Numba takes the CPU from the environment.
Where this machine has not got the CPU's instructions, its code is made and read, not run.
"""

import contextlib
import itertools
import os
import re

import numpy as np
import pytest
import reference
from backends import on_target
from conformance import (
    check_case,
    check_gradients,
    check_scores,
    check_training,
    decisions_are_clear,
    make_case,
    oracle,
)
from machine_code import CPUS, KernelProgram, check_update

from cnnexp.backends.simd import CpuSimd
from cnnexp.backends.simd.compiler.host import host, host_target
from cnnexp.backends.simd.runtime.program import make_plan
from cnnexp.errors import NetworkError
from cnnexp.network import Conv2d, Flatten, Linear, MaxPool2d, Network, ReLU
from cnnexp.optimizers import SGD

CPU = CPUS[os.environ["TEST_CPU"]]
RATE = 0.1
FILTERS, KERNELS, POOLS = range(1, 18), range(1, 8), range(1, 5)
STRIDES, PADDINGS, POOL_PADDINGS = (1, 2), (*["valid"] * 4, "same", "full", "auto", 1), ("valid", "valid", "auto")
GRID = list(itertools.product(FILTERS, KERNELS, POOLS))

FEW_FILTERS = Network(
    (12, 14, 1), (Conv2d(3, 3), ReLU(), Conv2d(3, 3), ReLU(), MaxPool2d(2), Flatten(), Linear(5, False))
)


def two_convolutions(filters: int, kernel: int, pool: int) -> Network:
    """Return a network of two convolutions, the rest of its geometry drawn, its sides until they fit."""
    rng = np.random.default_rng((filters, kernel, pool))
    few_or_many = filters, rng.integers(1, 5), rng.choice(FILTERS)
    first, first_kernel, stride = (int(rng.choice(choice)) for choice in (few_or_many, KERNELS[:3], STRIDES))
    padding, pool_padding = (choice[rng.integers(len(choice))] for choice in (PADDINGS, POOL_PADDINGS))
    convolutions = Conv2d(first, first_kernel), ReLU(), Conv2d(filters, kernel, stride, padding), ReLU()
    layers = *convolutions, MaxPool2d(pool, padding=pool_padding), Flatten(), Linear(5)
    while True:
        height, width = map(int, rng.integers(0, 9, 2) + first_kernel + kernel - 1)
        with contextlib.suppress(NetworkError):
            return Network((height, width, 1), layers)


def is_sparse(network: Network) -> bool:
    return any(node.algorithm.endswith("-argmax") for node in make_plan(network, CPU.target, 99).nodes)


def sample(count: int) -> list[tuple[int, int, int]]:
    """Return points of the grid, half of them with the gradient that follows the argmax."""
    grid = np.random.default_rng(list(CPUS).index(os.environ["TEST_CPU"])).permutation(GRID)
    kinds = {True: [], False: []}
    for point in map(tuple, grid.tolist()):
        kind = kinds[is_sparse(two_convolutions(*point))]
        if len(kind) < count // 2:
            kind.append(point)
        elif min(map(len, kinds.values())) == count // 2:
            return kinds[True] + kinds[False]
    raise AssertionError("no such networks")


def check_step(network: Network, forced=()) -> KernelProgram:
    """Compile the kernels, and train one step beside the oracle where they can run; look at the code where not."""
    program = KernelProgram(CPU, network, SGD(), CPU.target.lanes + 2, forced)
    if not CPU.runs_here:
        program.read()
        return program
    cases = (make_case(network, images=CPU.target.lanes + 3, seed=seed, exact=seed == 2) for seed in range(3))
    case = next(case for case in cases if decisions_are_clear(case))
    program.restore({"parameters": case.parameters})
    handle, batch = program.load(case.images, case.labels), np.arange(CPU.target.lanes + 3)[:0:-1]
    check_scores(program, handle, case)
    check_gradients(program, handle, case, batch)
    program.apply(program.gradients(handle, batch)[1], RATE)
    _, _, gradient, *_ = oracle(case, batch)
    expected = reference.sgd(case.parameters.astype(np.float64), gradient, {}, 1, RATE)
    np.testing.assert_allclose(program.state()["parameters"], expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    return program


@pytest.mark.parametrize("point", sample(2), ids=str)
def test_two_convolutions(point):
    check_step(two_convolutions(*point))


@pytest.mark.parametrize(
    "network", [FEW_FILTERS, on_target.FILTERS, on_target.GENERAL], ids=["few_filters", "many_filters", "general"]
)
def test_code_is_of_this_cpu(network):
    # events are moved to the front of their list, for which CPUs differ most
    forced = (("conv2", "channels-argmax"),) if network is FEW_FILTERS else ()
    assembly = check_step(network, forced).read()
    for pattern in CPU.has if network is FEW_FILTERS else ():
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


@pytest.mark.slow
@pytest.mark.parametrize("point", GRID, ids=str)
def test_whole_grid(point):
    check_step(two_convolutions(*point))
