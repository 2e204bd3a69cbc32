"""Programs of `cpu-simd` that only predict: BatchNorm2d folded, threads that join a call once they wake."""

import itertools
import threading
from dataclasses import replace
from queue import SimpleQueue

import numpy as np
import pytest
from backends.on_target import HOST, TARGETS
from commands import often, raises
from conformance import check_scores, make_case, started
from networks import NETWORKS

from benchmarks.networks import NETWORKS as TIMED
from cnnexp import SGD, BatchNorm2d, Conv2d, Flatten, Linear, Network, ReLU
from cnnexp.backends.plain.numpy import Numpy
from cnnexp.backends.simd import CpuSimd
from cnnexp.backends.simd.algorithms.residual import Split
from cnnexp.backends.simd.lowering import Plan
from cnnexp.backends.simd.runtime import program as programs
from cnnexp.backends.simd.runtime.program import ForwardProgram
from cnnexp.backends.simd.runtime.thread_pool import Helpers
from cnnexp.network.folding import Folded

NORMED = Network((6, 6, 1), (Conv2d(9, 3, bias=False), BatchNorm2d(), ReLU(), BatchNorm2d(), Flatten(), Linear(3)))


@pytest.mark.parametrize("name", often(NETWORKS, ("batch_norm_first", "residual_network", "dropouts")))
def test_a_program_that_only_predicts_gives_the_oracles_scores(name):
    case = make_case(Network(*NETWORKS[name]), images=19)
    for threads in (1, 3):
        program = ForwardProgram(case.network, case.loss, SGD(), 8, replace(HOST, part_cycles=0), threads)
        program.restore(case.state)
        handle = program.load(case.images, case.labels)
        check_scores(program, handle, case)
        scores, few = program.predict(handle), program.load(case.images[:2], case.labels[:2])
        for _ in range(20):  # a tile, of whose kernels each thread takes parts
            np.testing.assert_array_equal(program.predict(few), scores[:2])
        wanted = case.loss.probabilities(scores[:2])
        np.testing.assert_allclose(program.probabilities(few), wanted, rtol=1e-5, atol=1e-7)
    assert set(program.state()) == {"step", *case.state}
    raises(TypeError, "predicts and does not train", program.train, handle, np.arange(4), 0.1)


@pytest.mark.parametrize(("batch", "l2_bytes"), [(12, 1 << 10), (24, 1 << 10), (40, 1 << 21)])
@pytest.mark.parametrize("target", ["avx2", "wide"])
def test_few_images_have_the_scores_that_they_have_among_many(target, batch, l2_bytes):
    """A linear layer's tiles follow how many there are, and whether its weights come from beyond L2."""
    case = make_case(Network((30,), (Linear(70), ReLU(), Linear(33))), images=41)
    program = ForwardProgram(case.network, case.loss, SGD(), batch, replace(TARGETS[target], l2_bytes=l2_bytes), 1)
    program.restore(case.state)
    check_scores(program, handle := program.load(case.images, case.labels), case)
    scores = program.predict(handle)
    for count in range(1, 41):
        few = program.load(case.images[-count:], case.labels[-count:])
        np.testing.assert_array_equal(program.predict(few), scores[-count:])


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_weights_that_one_or_two_images_stream_are_not_asked_for_ahead(target):
    network, wide = Network((256,), (Linear(256), Linear(10))), replace(TARGETS[target], forward_only=True)
    plans = {
        (images, l2_bytes): Plan(network, replace(wide, l2_bytes=l2_bytes), 1, images)
        for images, l2_bytes in itertools.product((1, 2, 3, 4), (1 << 16, 1 << 20))
    }
    asked = {key for key, plan in plans.items() if plan.nodes[0].ahead}
    assert asked == {(3, 1 << 16), (4, 1 << 16)}


def test_batch_norm_costs_nothing_after_a_convolution():
    network = TIMED["vgg_norm"][1]
    plan = Plan(Folded.of(network).network, replace(HOST, forward_only=True), 1, 8)
    assert {layer for node in plan.nodes for layer in node.layers if "batchnorm" in layer} == set()
    assert [name for name, _ in plan.forward] == [row.kernel for row in plan.explain(1)]
    assert plan.backward == plan.gradients == plan.seams == []
    trained = Plan(network, HOST, 1, 8)
    assert (len(trained.seams), plan.arena.size + plan.arena.scratch < 0.7 * trained.arena.size) == (2 * 4, True)


@pytest.mark.parametrize("name", ["mobilenet", "resnet20"])
def test_activations_leave_their_room_to_later_ones(name):
    plan = Plan(Folded.of(TIMED[name][1]).network, replace(HOST, forward_only=True), 0.25, 8)
    tensors = [node.y for node in plan.nodes if not isinstance(node, Split)]
    assert plan.arena.scratch < 0.4 * sum(map(plan.arena.floats, tensors))
    for x, y in itertools.pairwise(tensors):
        assert int(y.offset) not in range(int(x.offset), int(x.offset) + plan.arena.floats(x))
        assert int(x.offset) not in range(int(y.offset), int(y.offset) + plan.arena.floats(y))


def test_threads_share_what_winograd_transforms_once():
    plan = Plan(Folded.of(TIMED["vgg11"][1]).network, replace(HOST, forward_only=True), 1, 8)
    assert plan.arena.size < plan.parameters.size < plan.parameters.kept


def test_evaluation_takes_the_averages_of_the_moment():
    case, found = make_case(NORMED, images=50), []
    (program, handle), (other, again) = (started(backend, case, SGD(), 8) for backend in (CpuSimd(2), Numpy()))
    for _ in range(2):
        program.train(handle, np.arange(16), 0.1)
        other.restore(program.state())
        found.append(program.predict(handle))
        np.testing.assert_allclose(found[-1], other.predict(again), rtol=1e-4, atol=1e-5)
    assert not np.allclose(*found, atol=1e-3)


def test_threads_and_calls_share_a_split(monkeypatch):
    """Many calls of three threads that each take a tile at a time give the bits of one."""
    case, found = make_case(NORMED, images=70), []
    images = (100 * np.abs(case.images)).astype(np.uint8)
    monkeypatch.setattr(programs, "WAKING_CYCLES", 0)
    for threads, rows in ((1, 4096), (3, 4096), (3, 32)):
        monkeypatch.setattr(programs, "ROWS", rows)
        program = ForwardProgram(NORMED, case.loss, SGD(), 24, HOST, threads)
        program.restore(case.state)
        handle = program.load(images, case.labels)
        found += [program.predict(handle) for _ in range(20)]
        assert len(program.predict(program.load(images[:0], case.labels[:0]))) == 0
    assert all(np.array_equal(scores, found[0]) for scores in found)


def test_a_helper_does_its_task_whenever_it_is_woken():
    done, again = SimpleQueue(), threading.Event()
    helpers = Helpers([lambda: done.put(1), lambda: (again.wait(60), done.put(2))])
    helpers.wake(2)
    helpers.wake(2)  # while it is at it
    helpers.wake(1)
    assert done.get(timeout=60) == 1
    again.set()
    assert [done.get(timeout=60) for _ in range(2)] == [2, 2]
    helpers.close()
    helpers.wake(1)
    assert done.get(timeout=60) == 1
    helpers.close()
