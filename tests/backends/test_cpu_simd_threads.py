"""How many threads of `cpu-simd` work: what they choose on a made-up machine, and that the bits stay the same."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
from backends.on_target import HOST, OnTarget
from conformance import assert_same_state, check_case, make_case, started

from cnnexp import GELU, SGD, Adam, BatchNorm2d, Conv2d, Dropout, Flatten, Linear, MaxPool2d, Network, ReLU, Residual
from cnnexp.backends.simd.runtime.adaptive_threads import UNKNOWN_S, AdaptiveThreads
from cnnexp.backends.simd.runtime.program import make_plan

CONVOLUTION = Network((10, 10, 1), (Conv2d(8, 3), ReLU(), MaxPool2d(2), Flatten(), Linear(10)))
BLOCK = Residual((Conv2d(8, 3, padding="same"),))
NORMED = Network((10, 10, 1), (Conv2d(8, 3), BatchNorm2d(), ReLU(), BLOCK, Flatten(), Linear(10)))
OWNED = Network((12, 12, 1), (Flatten(), Linear(256), ReLU(), Linear(10)))


@dataclass
class Machine:
    """A step takes `alone_s` on one thread and `together_s` on all."""

    adaptive: AdaptiveThreads
    together_s: float
    alone_s: float = 1e-4

    def train(self, seconds):
        """Return the share of the time in which one thread worked, and the steps that were done a second."""
        spent, steps_done = {True: 0.0, False: 0.0}, 0
        while sum(spent.values()) < seconds:
            threads, steps = self.adaptive.next()
            took = steps * (self.alone_s if threads == 1 else self.together_s)
            self.adaptive.took(threads, steps, took)
            spent[threads == 1] += took
            steps_done += steps
        return spent[True] / sum(spent.values()), steps_done / sum(spent.values())


@pytest.mark.parametrize(
    ("together_s", "least", "most"),
    [(6e-5, 0, 0.01), (1e-3, 0.9, 1), (0.01, 0.9, 1)],
    ids=["quiet", "busy", "many meetings"],
)
def test_one_thread_works_where_others_keep_the_cores_busy_and_all_do_elsewhere(together_s, least, most):
    machine = Machine(AdaptiveThreads(2), together_s)
    machine.train(2)
    share, rate = machine.train(30)
    assert least <= share <= most
    assert rate * min(1e-4, together_s) > 0.9


def test_all_work_again_when_the_others_have_gone_and_what_passes_sends_no_thread_away():
    machine = Machine(AdaptiveThreads(4), together_s=1e-3)
    machine.train(30)
    machine.together_s = 4e-5
    machine.train(10)  # no trial is further off
    assert machine.train(10)[0] < 0.01

    machine = Machine(AdaptiveThreads(2), together_s=6e-5)
    for together_s in (6e-5, 6e-4, 6e-5):  # a short disturbance
        machine.together_s = together_s
        share, _ = machine.train(0.1 if together_s < 1e-4 else 0.05)
    assert share < 0.1

    machine = Machine(AdaptiveThreads(2), together_s=6e-4)
    while machine.adaptive.size == 2:
        machine.train(0.01)
    machine.together_s = 6e-5
    machine.train(0.06)
    assert machine.adaptive.size == 2, "a long one is forgotten soon after its end"


def test_a_short_call_that_waking_the_threads_outlasts_does_not_count_alone():
    adaptive = AdaptiveThreads(2)
    machine = Machine(adaptive, together_s=6e-5)
    for _ in range(20):
        adaptive.took(adaptive.next()[0], steps=1, seconds=1e-3)  # cold
        assert machine.train(0.2)[0] < 0.05
        assert adaptive.size == 2


def test_no_other_number_is_tried_where_there_is_none_or_steps_are_long():
    for adaptive in (AdaptiveThreads(1), AdaptiveThreads(2, trials=False)):
        size = adaptive.size
        Machine(adaptive, together_s=1e-3).train(3)
        assert adaptive.size == size
    assert Machine(AdaptiveThreads(2), alone_s=4 * UNKNOWN_S, together_s=2 * UNKNOWN_S).train(30)[0] == 0
    share, _ = Machine(AdaptiveThreads(2), alone_s=UNKNOWN_S, together_s=UNKNOWN_S / 2).train(30)
    assert 0 < share < 0.01, "once is enough"


@pytest.mark.parametrize("network", [CONVOLUTION, OWNED, NORMED], ids=["convolution", "owned", "normed"])
def test_one_thread_that_does_all_shares_computes_the_same_bits(network):
    assert make_plan(OWNED, HOST, 14).owns, "one of them has a thread step its own weights"
    found = []
    for alone in (True, False):
        program, handle = started(OnTarget(threads=3), make_case(network, images=100), Adam(lr=0.01), 40)
        program._adaptive = AdaptiveThreads(3, trials=False)
        if alone:
            program._adaptive.size = 1
            program._adaptive.took(1, steps=1, seconds=1.0)
        totals = program.train(handle, np.arange(100)[::-1].copy(), 0.01)
        total, gradient = program.gradients(handle, np.arange(7))
        arrays = {"gradient": gradient, "scores": program.predict(handle), **program.state()}
        found.append({"totals": totals, "total": total, **arrays})
    assert_same_state(*found)


@pytest.mark.parametrize("layer", [Conv2d(9, 3), BatchNorm2d(), Dropout(0.5)])
def test_threads_share_the_kernels_of_one_image(layer):
    """Any number of them finds the same bits; with seams, and of several images, they share none."""
    layers = layer, ReLU(), Flatten(), Linear(301), ReLU(), Linear(45), GELU(), Linear(4)
    network, target = Network((12, 12, 2), layers), replace(HOST, part_cycles=100, l2_bytes=2**13)
    plan = make_plan(network, replace(target, parts=3), 1)
    shared = {name for name, kernel in (*plan.forward, *plan.backward) if kernel.parts == 3}
    assert {"linear1.forward", "linear2.forward", "linear2.backward_input"} <= shared
    check_case(OnTarget(target, 3), case := make_case(network, images=2))
    found, several = [], []
    for threads, working in ((1, 1), (3, 1), (3, 2), (3, 3)):
        program, handle = started(OnTarget(target, threads), case, Adam(lr=0.01), 1)
        program._adaptive = SimpleNamespace(size=working, next=lambda n=working: (n, 9), took=lambda *_: None)
        program.train(handle, np.array([0, 1, 1, 0, 1]), 0.01)
        found.append({"gradient": program.gradients(handle, np.arange(1))[1], **program.state()})
        several.append(program.gradients(handle, np.arange(1 if network.running else 2))[1])
    for state, gradient in zip(found[1:], several[1:], strict=True):
        assert_same_state(found[0], state)
        np.testing.assert_allclose(gradient, several[0], rtol=1e-3, atol=1e-5)


def test_gradients_of_weights_wait_for_every_part_of_the_last_kernel():
    """A first layer without a bias has no kernel after it; the images alternate, or what is there before is right."""
    network = Network((301,), (Linear(700, bias=False), Linear(99), ReLU(), Linear(4)))
    target, case = replace(HOST, part_cycles=100, l2_bytes=2**13), make_case(network, images=2)
    assert make_plan(network, replace(target, parts=3), 1).backward[-1][1].parts == 3
    (alone, one), (program, handle) = (started(OnTarget(target, n), case, SGD(lr=0.1), 1) for n in (1, 3))
    wanted = [alone.gradients(one, np.array([i]))[1] for i in range(2)]
    for i in range(40):
        np.testing.assert_array_equal(program.gradients(handle, np.array([i % 2]))[1], wanted[i % 2])


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("threads", "optimizer"), [(2, Adam(weight_decay=0.1)), (3, SGD(momentum=0.9))])
def test_threads_own_convolutions_whose_weights_outweigh_their_images(normed, threads, optimizer):
    """One in a Residual, one with a bias and without padding, with seams and without, and a batch that is not full."""
    body = Conv2d(80, 3, padding="same"), *((BatchNorm2d(),) if normed else ()), ReLU()
    layers = Conv2d(80, 3, padding="same"), ReLU(), MaxPool2d(2), Residual(body), Conv2d(48, 2), Flatten(), Linear(4)
    network, forced = Network((4, 4, 8), layers), (("residual1.conv1", "channels"), ("conv2", "channels"))
    target = replace(HOST, l2_bytes=2**13, forced=forced)
    plan = make_plan(network, target, -(-9 // threads))
    assert {"residual1.conv1", "conv2"} <= {node.name for node in plan.nodes if node.owns(plan)}
    check_case(OnTarget(target, threads), case := make_case(network, images=10))
    program, handle = started(OnTarget(target, threads), case, optimizer, 9)
    program.train(handle, np.arange(10), 0.01)
    trained = program.state()
    program.restore(case.state)
    for batch in (np.arange(9), np.arange(9, 10)):
        program.apply(program.gradients(handle, batch)[1], 0.01)
    for name, array in trained.items():  # a sum over all threads' images rounds other than one for each
        np.testing.assert_allclose(program.state()[name], array, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("network", [CONVOLUTION, OWNED, NORMED], ids=["convolution", "owned", "normed"])
def test_shares_without_images_add_nothing(network):
    """Batches of two images and, the last, of one, on three threads; then a gradient that is given."""
    ends = []
    for threads in (1, 3):
        backend = OnTarget(replace(HOST, l2_bytes=1024), threads)
        program, handle = started(backend, make_case(network, images=5), SGD(momentum=0.9), 2)
        program.train(handle, np.arange(5), 0.01)
        program.apply(program.gradients(handle, np.arange(1))[1], 0.01)
        assert not program._gradients.any()
        ends.append(program.state())
    for name, array in ends[0].items():
        np.testing.assert_allclose(ends[1][name], array, rtol=1e-3, atol=1e-4)
