"""The baseline on a fake clock: the ratio must be of equal work, and nothing else may be in it."""

import numpy as np
import pytest
from fakes import FakeClock, FakeProgram
from tables import each
from training.test_loop import dataset

from cnnexp import Baseline, train_epochs


def measure(own, other, train=25, batch_size=10, epochs=1, **options):
    """Run a fake program of costs `own` beside a baseline of costs `other`, (per image, per step) in seconds."""
    clock = FakeClock()
    program = FakeProgram(clock, *own, batch_size=batch_size)
    beside = FakeProgram(clock, *other, batch_size=batch_size)
    data = dataset(train)
    baseline = Baseline(beside, data.train, clock=clock, **options)
    return list(train_epochs(program, data, epochs, baseline=baseline, clock=clock)), program, beside


@each(
    ((0.01,), (0.08,), 25, 10, 8.0),
    # a cost per step makes short batches dearer per image: 10 images cost 0.02 each, 1 image would cost 0.11
    ((0.01, 0.1), (0.02, 0.2), 21, 10, 2.0),
    ((0.01, 0.1), (0.02, 0.2), 7, 7, 2.0),  # one short batch is compared with the same one
)
def test_speedup_is_the_ratio_of_the_costs_without_the_short_last_batch(own, other, train, images, speedup):
    (result,), _, _ = measure(own=own, other=other, train=train)
    assert (result.train.count, result.comparison.images) == (train, images)
    assert result.comparison.speedup == pytest.approx(speedup)
    assert result.comparison.seconds_per_image == pytest.approx(other[0] + sum(other[1:]) / min(10, train))


def test_the_baseline_sees_batches_of_the_run_spread_over_every_epoch_but_a_short_one_from_its_parameters_on():
    (result,), program, beside = measure(own=(0.01,), other=(0.02,), train=100, batches=2)
    trained = [batch for order in program.orders for batch in np.split(order, len(order) // 10)]
    timed = beside.orders[-result.comparison.batches :]
    assert result.comparison.batches == 2
    assert all(any(np.array_equal(batch, own) for own in trained) for batch in timed)

    _, program, _ = measure(own=(1e-3,), other=(1e-6,), train=300, epochs=2)
    assert [len(order) for order in program.orders] == [10, 40, 100, 100, 50, 100, 100, 100]
    results, program, beside = measure(own=(1e-6,), other=(2e-6,), train=300, epochs=3)
    assert len(program.orders[-1]) == 300
    assert [result.comparison.batches for result in results] == [3, 3, 3]
    assert [result.comparison.speedup for result in results] == pytest.approx([2.0] * 3)
    assert len(beside.restored) == 3


def test_baseline_time_is_not_in_the_epoch_and_a_slow_one_is_timed_on_fewer_images():
    (result,), _, _ = measure(own=(0.01,), other=(5.0,))
    assert result.epoch_s == pytest.approx(25 * 0.01)
    (result,), _, beside = measure(own=(0.01,), other=(2.0,), train=400, batch_size=100, budget_s=10.0)
    assert (result.comparison.images, result.comparison.speedup) == (5, pytest.approx(200.0))
    assert max(len(order) for order in beside.orders) == 5


@each(
    ([0.9, 0.2, 0.8, 0.1], 10.0, 0.8, 3),  # the median of three, in the first epoch alone
    ([0.9, 0.2, 0.8], 1.0, 0.9, 1),  # of a slow one's step
    ([None, 0.5], 1.0, None, 1),  # a fused one has none
)
def test_the_parallel_share_is_measured_once_a_run_outside_what_is_timed(shares, budget_s, found, asked):
    clock, data, left = FakeClock(), dataset(40), iter(shares)

    def layers_share(handle, batch, rate):
        clock.advance(1.0)
        return next(left)

    beside = FakeProgram(clock, 0.001)
    baseline = Baseline(beside, data.train, budget_s=budget_s, clock=clock, layers_share=layers_share)
    results = list(train_epochs(FakeProgram(clock, 0.01), data, 2, baseline=baseline, clock=clock))
    assert (baseline.parallel_share, len(shares) - len([*left])) == (found, asked)
    assert [r.epoch_s for r in results] == pytest.approx([0.4, 0.4])
    assert [r.comparison.seconds_per_image for r in results] == pytest.approx([0.001, 0.001])
