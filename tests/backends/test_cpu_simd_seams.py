"""BatchNorm2d and Residual in the fused step of `cpu-simd`: a batch in tiles, and what all threads add up of it."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from backends.on_target import HOST, TARGETS, OnTarget, computed
from commands import often, raises
from conformance import check_case, check_training, make_case, started
from networks import NETWORKS

from benchmarks.networks import NETWORKS as TIMED
from cnnexp import SGD, Adam, Dropout
from cnnexp.backends.simd.layouts import NHWC, Blocked
from cnnexp.backends.simd.lowering import Plan
from cnnexp.backends.simd.runtime.program import make_plan
from cnnexp.network import BatchNorm2d, Conv2d, Flatten, GlobalAvgPool, Linear, MaxPool2d, Network, ReLU, Residual, Tanh
from cnnexp.network.shapes import FlattenStage, walk

INNER = Residual((BatchNorm2d(0.3, 1e-2), Conv2d(11, 1)))
CONV = Conv2d(11, 3, padding="same", bias=False)
BLOCK = CONV, BatchNorm2d(), ReLU(), Conv2d(11, 3, padding="same"), INNER, BatchNorm2d()
NORMED = Network((7, 6, 3), (
    CONV, BatchNorm2d(), ReLU(), Residual(BLOCK), ReLU(), MaxPool2d(2, 1), Conv2d(5, 3, 2, "auto", bias=False),
    BatchNorm2d(), Tanh(), Residual((Residual((Tanh(),)),)), GlobalAvgPool(), Linear(9),
    Residual((Linear(9), ReLU())), ReLU(), Linear(4),
))  # fmt: skip
SAME = Residual((Conv2d(5, 3, padding="same"), BatchNorm2d())), ReLU()
NARROW = Residual((Conv2d(7, 2, 2, "auto"), BatchNorm2d()), "padded"), Residual((Conv2d(7, 1), BatchNorm2d())), ReLU()
FLATTENED = Network((7, 6, 3), (
    Conv2d(5, 3), BatchNorm2d(), ReLU(), MaxPool2d(2, 1), Conv2d(5, 3, padding="same"), BatchNorm2d(),
    *SAME * 3, *NARROW, MaxPool2d(2, 1), Flatten(), Linear(3),
))  # fmt: skip
POOLED = Network(*NETWORKS["batch_norm_pooled"])
HEADED = Network((7, 6, 3), (
    Conv2d(5, 3), BatchNorm2d(), Tanh(), Dropout(0.2), MaxPool2d(2, 1), Flatten(), Linear(37), ReLU(), Dropout(0.4),
    Linear(29), Tanh(), Linear(3),
))  # fmt: skip


@pytest.mark.parametrize("name", [*NETWORKS, *TIMED])
def test_every_layer_has_a_vector_kernel(name):
    network = Network(*NETWORKS[name]) if name in NETWORKS else TIMED[name][1]
    for target in (HOST, replace(HOST, forward_only=True)):
        nodes = make_plan(network, target, 8).nodes
        computed = {layer for node in nodes for layer in node.layers}
        assert computed == {stage.name for stage in walk(network.stages) if not isinstance(stage, FlattenStage)}
        assert "general" not in {node.algorithm for node in nodes}


@pytest.mark.parametrize("algorithm", ["lanes", "channels"])
@pytest.mark.parametrize("target", often(("sse", "avx2", "wide"), ("avx2",)))
@pytest.mark.parametrize("network", [NORMED, POOLED], ids=["normed", "pooled"])
def test_statistics_are_of_the_whole_batch(network, target, algorithm):
    """19 images of two threads are several tiles of each, the last of them with lanes to spare."""
    cpu = computed(network, TARGETS[target], algorithm)
    layouts = {type(node.x) for node in make_plan(network, cpu, 10).nodes if node.algorithm == "batch-norm"}
    assert layouts == {NHWC if algorithm == "channels" else Blocked}
    check_case(OnTarget(cpu), make_case(network, images=19))


@pytest.mark.parametrize("name", ["vgg_norm", "resnet20", "mobilenet"])
def test_tiles_keep_what_a_seam_lies_across_and_no_more(name):
    plan = make_plan(TIMED[name][1], HOST, 64)
    normed = [node for node in plan.nodes if node.algorithm == "batch-norm"]
    again = {kernel.removesuffix(".again") for kernel, _ in plan.backward if kernel.endswith(".again")}
    assert len(again) >= len(normed) // 2 - 1
    sums = [node.name in again for node in plan.nodes if node.algorithm == "residual" and ".split" not in node.name]
    assert sums[:-1] == [number % 3 < 2 for number in range(len(sums) - 1)]
    assert {node.x.offset for node in normed} & {node.dy.offset for node in normed}
    for node in normed:
        assert min(node.x.offset, node.dy.offset) > 0
        after = plan.nodes[plan.nodes.index(node) + 1]
        assert (node.y.offset < 0) == (node.name in again or not (after.keeps_x or after.algorithm == "together"))
        assert node.dx is None or node.dx.offset < 0
    ends = {}
    for tensor in {tensor for node in plan.nodes for tensor in (node.x, node.y, node.dy)}:
        start = int(tensor.offset)
        ends[start] = max(ends.get(start, start), start + plan.arena.floats(tensor))
    assert all(ends[start] <= following for start, following in itertools.pairwise(sorted(ends)))


def test_convolutions_bring_near_what_the_next_tile_normalizes():
    plan = make_plan(TIMED["mobilenet"][1], HOST, 64)
    normed = [node for node in plan.nodes if node.algorithm == "batch-norm"]
    brought = {tensor.offset for tensors in plan.brought.values() for tensor in tensors}
    assert brought == {tensor.offset for node in normed[:-1] for tensor in (node.x, node.dy)} | {normed[-1].dy.offset}
    assert not make_plan(TIMED["mobilenet"][1], HOST, 1).brought


@pytest.mark.parametrize("algorithm", ["lanes", "channels"])
@pytest.mark.parametrize("network", [NORMED, FLATTENED, POOLED, HEADED], ids=["normed", "flat", "pooled", "headed"])
def test_training_in_tiles(network, algorithm):
    """Of 5 numbers or 35, the last vector has lanes to spare, which no weight may be trained by."""
    cpu = computed(network, TARGETS["sse"], algorithm)
    check_training(OnTarget(cpu, threads=3), make_case(network, images=35), Adam())


def test_linear_layers_behind_the_last_seam_take_all_tiles_at_once():
    plan = make_plan(HEADED, TARGETS["sse"], 12)
    after = [f"{name}.forward" for name in ("linear1.together", "linear1", "dropout2", "linear2", "tanh2", "linear3")]
    assert [name for name, _ in plan.forward[-len(after) :]] == after
    assert (len(plan.seams), plan.arena.images, plan.apart) == (4, 8, 60 * 37 + 37 * 29 + 29 * 3)


@pytest.mark.parametrize("network", [NORMED, HEADED], ids=["normed", "headed"])
@pytest.mark.parametrize("algorithm", ["lanes", "channels"])
def test_gradients_in_tiles(network, algorithm):
    """18 images of one thread are three tiles, which share a scratch buffer."""
    check_case(OnTarget(computed(network, TARGETS["sse"], algorithm), threads=1), make_case(network, images=19))


@pytest.mark.parametrize("target", often(("sse", "avx2", "wide"), ("avx2",)))
def test_what_leaves_the_second_cache_goes_by_parts_of_a_vector(target):
    network = Network((12, 12, 3), (*FLATTENED.layers[:-1], Linear(37), Linear(3)))
    cpu = replace(computed(network, TARGETS[target], "channels"), l2_bytes=1 << 12)
    plan = make_plan(network, cpu, 10)
    assert plan.arena.images < cpu.lanes
    assert "wide" in {node.algorithm for node in plan.nodes}
    check_case(OnTarget(cpu), make_case(network, images=19))


@pytest.mark.parametrize("images", [1, 2])
def test_a_tile_is_what_the_second_cache_holds_between_two_seams(images):
    network, cpu = TIMED["mobilenet"][1], TARGETS["avx2"]
    fits = Plan(network, cpu, images / cpu.lanes, 32).between_seams
    assert make_plan(network, replace(cpu, l2_bytes=fits), 32).arena.images == images


@pytest.mark.parametrize("first_row", [0, 1000])
def test_a_mean_far_above_the_deviation_takes_no_precision(first_row):
    case = make_case(Network((5, 6, 3), (BatchNorm2d(), BatchNorm2d(), Conv2d(2, 1), GlobalAvgPool())), images=37)
    case.parameters[:3] /= 16
    case.images[:, 0] += first_row
    check_case(OnTarget(), case)


def test_a_batch_has_no_more_images_than_there_are_tiles_for():
    program, handle = started(OnTarget(threads=1), make_case(NORMED, images=9), SGD(), 4)
    raises(ValueError, "9 images in a batch of at most 4", program.gradients, handle, np.arange(9))


def test_a_lost_run_leaves_nothing_behind():
    case, found = make_case(NORMED, images=40), []  # tiles that a smaller batch does not use may hold what is no number
    for lost in (False, True):
        program, handle = started(OnTarget(TARGETS["sse"]), case, SGD(), 40)
        if lost:
            program.train(program.load(case.images * np.float32(np.inf), case.labels), np.arange(40), 0.1)
            assert not np.isfinite(program.state()["parameters"]).all()
        program.restore(case.state)
        found.append(program.gradients(handle, np.arange(3))[1])
    assert np.isfinite(found[0]).all()
    np.testing.assert_array_equal(*found)
