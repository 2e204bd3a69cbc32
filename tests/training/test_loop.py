"""The epoch loop on a fake program and a fake clock: what is timed, what is trained, when it stops."""

import dataclasses
import signal

import numpy as np
import pytest
from commands import raises
from fakes import FakeClock, FakeProgram

from cnnexp import Dataset, EarlyStopping, Split, Step, Totals, TrainingPlan, train_epochs
from cnnexp.errors import ConfigError, Diverged
from cnnexp.training.checkpoint import Checkpoint
from cnnexp.training.loop import epoch_order


def dataset(train=25, test=8, validation=None):
    def split(count):
        return Split(np.zeros((count, 2, 2, 1), np.float32), np.zeros(count, np.int32))

    held_out = split(validation) if validation else None
    return Dataset("fake", split(train), split(test), held_out, ("a", "b"), "made here", "0" * 64)


class Seen(list):
    """An observer that keeps what it is given."""

    progressed = list.append

    def finished(self, result):
        """Leave results to the caller."""


def run(program, data=None, epochs=1, observers=(), earlier=(), begun=None, **plan):
    resumed = Checkpoint(len(earlier), {}, {}, history=tuple(earlier), begun=begun) if earlier else None
    plan = TrainingPlan(epochs, **plan)
    return list(train_epochs(program, data or dataset(), plan, observers, None, resumed, program.clock))


def stopped(epochs, data=None, earlier=(), **options):
    """Return the results of a run that early stopping watches, and why it ended."""
    stopping = EarlyStopping(**options, history=earlier)
    results = run(FakeProgram(FakeClock(), 0.1), data, epochs, [stopping], earlier) if not stopping.reason else []
    return results, stopping.reason


def test_every_image_is_trained_once_an_epoch_and_its_seconds_are_those_alone():
    program = FakeProgram(FakeClock(), 0.001, batch_size=10)
    (result,) = run(program)
    assert sorted(np.concatenate(program.orders)) == list(range(25))
    assert all(len(order) % 10 == 0 for order in program.orders[:-1])
    assert len(program.orders[-1]) == 5
    assert result.train.count == 25
    assert run(FakeProgram(FakeClock(), 0.1, batch_size=100))[0].train.count == 25, "a batch larger than the data"
    program = FakeProgram(FakeClock(), 1e-6, batch_size=2)
    run(program, dataset(train=101), epochs=2)
    assert [len(order) for order in program.orders] == [2, 8, 32, 58, 1, 101], "a short batch goes with many whole ones"

    program = FakeProgram(FakeClock(), 0.25, per_step_s=1.0, batch_size=10)
    (result,) = run(program)
    assert (result.epoch_s, result.evaluate_s) == (pytest.approx(25 * 0.25 + 3 * 1.0), pytest.approx(100.0))
    assert result.images_per_s == pytest.approx(25 / result.epoch_s)


def test_order_follows_from_seed_and_epoch_alone():
    first, second = FakeProgram(FakeClock(), 0.001), FakeProgram(FakeClock(), 5.0)
    run(first, epochs=2, seed=3)
    run(second, epochs=2, seed=3)  # slower, so its chunks differ
    assert np.array_equal(np.concatenate(first.orders), np.concatenate(second.orders))
    assert not np.array_equal(epoch_order(25, 3, 1), epoch_order(25, 3, 2))
    assert not np.array_equal(epoch_order(25, 3, 1), epoch_order(25, 4, 1))


def test_an_epoch_that_goes_on_trains_the_images_that_are_left():
    seen = Seen()
    whole, rest = FakeProgram(FakeClock(), 0.1), FakeProgram(FakeClock(), 0.2)
    (first, second) = run(whole, epochs=2, progress_batches=1, observers=[seen])
    stopped = [progress for progress in seen if progress.epoch == 2][1]
    assert (stopped.totals.count, stopped.images) == (20, 25)
    (again,) = run(rest, epochs=2, earlier=[first], begun=stopped)
    assert np.array_equal(np.concatenate(whole.orders)[45:], np.concatenate(rest.orders))
    assert again.train == second.train
    assert again.epoch_s == pytest.approx(20 * 0.1 + 5 * 0.2)
    done = [progress for progress in seen if progress.epoch == 2][-1]
    (again,) = run(rest, epochs=2, earlier=[first], begun=done)  # stopped before it was evaluated
    assert (again.train, len(rest.orders)) == (second.train, 1)


def test_progress_is_told_after_so_many_batches_and_an_epoch_begins_with_what_the_last_ended_with():
    seen = Seen()
    run(FakeProgram(FakeClock(), 1e-9, batch_size=2), dataset(train=41), progress_batches=3, observers=[seen])
    steps = np.diff([0, *(progress.totals.count for progress in seen)])
    assert (max(steps), sum(steps)) == (6, 41)

    program = FakeProgram(FakeClock(), 1e-6, batch_size=10)
    run(program, dataset(train=300), epochs=3)
    assert [len(order) for order in program.orders] == [10, 40, 160, 90, 300, 300]
    limited = FakeProgram(FakeClock(), 0.01, batch_size=10)
    run(limited, dataset(train=300), epochs=2, pass_s=1.05)  # begins with one batch, to know what it has time for
    assert [len(order) for order in limited.orders] == [10, 40, 50, 10, 40, 50]


def test_a_signal_comes_between_two_steps():
    seen = Seen()
    program = FakeProgram(FakeClock(), 0.1)
    train = program.train

    def stop(handle, order, rate):
        signal.raise_signal(signal.SIGINT)
        return train(handle, order, rate)

    program.train = stop
    with pytest.raises(KeyboardInterrupt):
        run(program, observers=[seen])
    assert [progress.totals.count for progress in seen] == [10]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_the_run(bad):
    program = FakeProgram(FakeClock(), 0.001, losses=[1.0, bad])
    raises(Diverged, r"epoch 1, images 10 to 20, at learning rate 0\.01", run, program)


def test_a_held_out_loss_that_is_not_finite_stops_the_run_before_it_is_kept():
    program = FakeProgram(FakeClock(), 0.001)
    program.predict = lambda handle: np.full((len(handle), 2), np.nan, np.float32)
    raises(Diverged, r"the test loss became nan after epoch 1, at learning rate 0\.01", run, program)


def test_patience_that_has_run_out_trains_no_epoch_more():
    earlier = run(FakeProgram(FakeClock(), 0.1), epochs=4)  # its held-out loss never falls
    assert stopped(9, earlier=earlier[:3], patience=2)[0] == []
    assert [r.epoch for r in stopped(9, earlier=earlier[:3], patience=3)[0]] == [4]
    losses = (2.0, 3.0, 3.0, 1.0)  # falls again
    fell = [dataclasses.replace(each, test=Totals(loss, 1, 1)) for each, loss in zip(earlier, losses, strict=True)]
    assert EarlyStopping(patience=2, history=fell[:3]).reason
    assert not EarlyStopping(patience=2, history=fell).reason


def test_a_pass_over_its_seconds_ends_early_and_is_tested_on_the_same_share():
    program = FakeProgram(FakeClock(), 0.1, batch_size=10)  # a batch takes a second
    results = run(program, dataset(train=100, test=50), epochs=2, pass_s=3.5)
    assert [result.train.count for result in results] == [30, 30]
    assert [result.test.count for result in results] == [15, 15]
    assert results[0].epoch_s == pytest.approx(3.0)
    assert len(results[0].scores) == 15
    counts = [run(FakeProgram(FakeClock(), 0.1), pass_s=seconds)[0].train.count for seconds in (0.01, 100.0)]
    assert counts == [10, 25], "one batch at least, and time enough changes nothing"


def test_early_stopping_counts_epochs_without_a_smaller_held_out_loss_of_the_split_that_there_is():
    results, reason = stopped(10, patience=2)
    assert len(results) == 3  # the fake's scores never change: best in epoch 1, worse in 2 and 3
    assert reason == "early stopping, trainer.patience=2: the loss of the test images fell no more"
    assert "of the validation images" in stopped(10, dataset(validation=4), patience=2)[1]

    (result,) = run(FakeProgram(FakeClock(), 0.1), dataset(test=8, validation=4))
    assert (result.test.count, result.validation.count, result.held_out.count) == (8, 4, 4)
    (result,) = run(FakeProgram(FakeClock(), 0.1), dataset(test=8))
    assert result.validation is None
    assert result.held_out is result.test


@pytest.mark.parametrize("options", [{"every": 0}, {"factor": 0.0}, {"factor": 1.5}])
def test_step_schedule_refuses(options):
    raises(ConfigError, rf"trainer\.step_{next(iter(options))}=", Step, **options)


def test_training_stops_after_the_epoch_that_reaches_its_target_and_every_observer_sees_it():
    results, reason = stopped(5, target=1.0)  # the fake's scores are all 0 and so are the labels: all is right
    assert (len(results), reason) == (1, "trainer.target=1 was reached on the test images")
    assert stopped(5, earlier=results, target=1.0)[0] == [], "a resumed run had reached it"
    wrong = dataset()
    wrong.test.labels[:] = 1
    results, reason = stopped(5, wrong, target=0.5)
    assert (len(results), reason) == (5, "")

    first, last = Seen(), Seen()
    for seen in (first, last):
        seen.finished = lambda result, seen=seen: seen.append(result.epoch)
    results = run(FakeProgram(FakeClock(), 1.0), epochs=5, observers=[first, EarlyStopping(target=1.0), last])
    assert len(results) == 1
    assert first[-1] == last[-1] == 1


def test_threads_are_ready_before_every_clocked_call_and_outside_its_clock():
    clock = FakeClock()
    program, warmed = FakeProgram(clock, per_image_s=0.5), []

    def warm(handle, indices):
        warmed.append(list(indices))
        clock.advance(7)

    program.warm = warm
    (result,) = run(program)
    assert warmed == [list(order[: program.batch_size]) for order in program.orders if len(order) >= program.batch_size]
    assert result.epoch_s == pytest.approx(0.5 * result.train.count)
