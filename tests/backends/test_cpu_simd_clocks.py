"""What a program of `cpu-simd` tells of the parts of its steps, where it was compiled to."""

import time
from dataclasses import replace

import numpy as np
import pytest
from backends.on_target import HOST, NETWORKS, OnTarget, forced
from conformance import check_case, make_case, started
from machine_code import CPUS, assembly_of

from cnnexp import SGD, Conv2d, Flatten, Linear, MaxPool2d, Network, OneConv, ReLU, TwoConvMlp, TwoConvPool4
from cnnexp.backends import backend_class
from cnnexp.backends.parts import BACKWARD, FOLLOWED, FORWARD, TRANSFORMED
from cnnexp.backends.simd.compiler.emit import FLOAT
from cnnexp.backends.simd.lowering import Plan
from cnnexp.backends.simd.runtime.program import make_plan
from cnnexp.network import BatchNorm2d

OWNED = Network((12, 12, 1), (Conv2d(5, 3), ReLU(), Conv2d(6, 3), MaxPool2d(2), Flatten(), Linear(21), Linear(5)))
CLOCKED = OnTarget(replace(HOST, clocks=True))


@pytest.mark.parametrize("network", [Network(*NETWORKS["first"]), OWNED], ids=["filters", "owned"])
def test_clocks_change_no_number_and_tell_every_layer(network):
    case = make_case(network, images=37)
    check_case(CLOCKED, case)
    program, handle = started(CLOCKED, case, SGD(lr=0.1), len(case.images) - 1)
    program.predict(handle)
    program.gradients(handle, np.arange(3))
    assert program.clocked() == [], "what is no training is not told"
    began = time.perf_counter()
    for _ in range(3):
        program.train(handle, np.arange(len(case.images)), 0.1)
    wall_s = time.perf_counter() - began
    seconds = dict(program.clocked())
    assert all(value > 0 for value in seconds.values())
    assert sum(seconds.values()) <= wall_s * 1.001, "a mean over the threads, nothing counted twice"
    told = {(part.what, layer) for part in seconds for layer in part.layers}
    computing = {stage.name for stage in network.stages if not isinstance(stage.layer, Flatten)}
    assert {(what, name) for name in computing for what in (FORWARD, BACKWARD)} <= told
    assert {("gather", "batch"), (FORWARD, "loss"), ("update", "parameters"), ("wait", "threads")} <= told


def test_one_thread_waits_for_nobody():
    """Nor is it waiting when, in a step with seams, other tiles have their turn."""
    network = Network((8, 8, 3), (Conv2d(16, 3, padding="same"), BatchNorm2d(), ReLU(), Flatten(), Linear(3)))
    case = make_case(network, images=64)
    program, handle = started(OnTarget(CLOCKED.target, threads=1), case, SGD(), 64)
    for _ in range(3):
        program.train(handle, np.arange(64), 0.1)
    seconds = {part.what: value for part, value in program.clocked()}
    assert seconds.get("wait", 0) < sum(seconds.values()) / 50


def test_the_backend_has_clocks_only_when_asked():
    backend = backend_class("cpu-simd")(threads=1)
    assert (backend.clocks, backend.clocked.clocks, backend.clocked.threads) == (False, True, 1)
    assert make_plan(OWNED, HOST, 18).arena.size < make_plan(OWNED, CLOCKED.target, 18).arena.size


def parts_of(network, **algorithms):
    """By (pass, first layer): its part."""
    plan = Plan(network, replace(forced(CPUS["avx512"].target, **algorithms), clocks=True), 1, 16)
    return {(part.what, part.layers[0]): part for part in plan.clocks.parts}


def test_multiply_adds_by_hand():
    parts = parts_of(OneConv(filters=64).network((28, 28, 1), 10), conv1="filters-fused")
    assert parts[FORWARD, "conv1"].multiply_adds == 26 * 26 * 64 * 9
    assert parts[BACKWARD, "conv1"].multiply_adds == 13 * 13 * 64 * 9, "one output of each window of four"
    assert parts[BACKWARD, "conv1"].fewer == FOLLOWED
    assert parts[FORWARD, "conv1"].fewer == ""
    assert parts[BACKWARD, "linear1"].multiply_adds == 2 * 13 * 13 * 64 * 10
    assert parts[FORWARD, "conv1"].at_once == "16 filters"
    parts = parts_of(TwoConvMlp().network((28, 28, 1), 10))
    followed = parts[BACKWARD, "conv2"]
    assert followed.layers == ("conv2", "relu2", "maxpool1")
    assert followed.multiply_adds == 2 * 10 * 10 * 8 * 25 * 8, "of weights and of the input"
    assert (followed.at_once, parts[FORWARD, "conv2"].at_once) == ("16 weights", "16 images")
    dense = parts_of(TwoConvPool4().network((28, 28, 1), 10), conv2="lanes")[BACKWARD, "conv2"]
    assert (dense.fewer, dense.multiply_adds) == ("", 2 * 28 * 28 * 4 * 4 * 4)
    convolutions = (Conv2d(16, 3, padding="same"), ReLU(), Conv2d(32, 3, padding="same"), ReLU())
    parts = parts_of(Network((8, 8, 1), (*convolutions, Flatten(), Linear(2))), conv2="winograd")
    tiles = 2 * 2
    assert parts[FORWARD, "conv2"].fewer == parts[BACKWARD, "conv2"].fewer == TRANSFORMED
    assert parts[FORWARD, "conv2"].multiply_adds == tiles * 36 * 16 * 32
    assert parts[BACKWARD, "conv2"].multiply_adds == 2 * tiles * 36 * 16 * 32


@pytest.mark.parametrize(("name", "instruction"), [("avx2", "rdtsc"), ("cortex-a53", "cntvct_el0")])
def test_each_architecture_has_its_clock(name, instruction):
    cpu, texts = CPUS[name], []
    for clocks in (False, True):
        plan = make_plan(OWNED, replace(cpu.target, clocks=clocks), 18)
        texts.append(assembly_of(cpu, plan.target, plan.forward, [FLOAT] * 3))
    assert [text.lower().count(instruction) for text in texts] == [0, len(plan.forward)]
