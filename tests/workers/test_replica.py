import itertools

import numpy as np
import pytest
from commands import raises
from conformance import assert_same_state
from workers.work import MODELS, OPTIMIZERS, images, on_threads

from cnnexp import SGD, BatchNorm2d, Conv2d, Dropout, Flatten, Linear, Loss, MaxPool2d, Network, ReLU, Totals
from cnnexp.backends import backend_class
from cnnexp.errors import ConfigError
from cnnexp.training.loop import epoch_order
from cnnexp.workers.collective import share, shares
from cnnexp.workers.program import make_replica
from cnnexp.workers.replica import ParameterReplica, Spec

SOFTMAX = Loss.SOFTMAX_CROSS_ENTROPY


def spec(model="one_conv", optimizer="sgd", batch_size=16, sync="gradients", period=None):
    network = MODELS[model].network((12, 12, 1), 10)
    return Spec(backend_class("numpy")(), network, SOFTMAX, OPTIMIZERS[optimizer], batch_size, sync, period)


def alone(spec, order, rate, data):
    program = spec.compile(spec.batch_size)
    program.restore(spec.network.initial_state(11))
    totals = program.train(program.load(*data), order, rate)
    return program, totals


def together(size, spec, work, data):
    def run(collective):
        replica = make_replica(spec, collective)
        replica.restore(spec.network.initial_state(11))
        return work(replica, replica.load(*data))

    return on_threads(size, run)


def relative(a, b):
    return np.linalg.norm(a.astype(float) - b) / np.linalg.norm(b.astype(float))


@pytest.mark.parametrize("count", [0, 1, 5, 16, 17])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shares_cover_everything_once_and_differ_by_at_most_one(count, size):
    parts = [np.arange(count)[share(count, size, rank)] for rank in range(size)]
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(count))
    assert [len(part) for part in parts] == shares(count, size)
    assert max(shares(count, size)) - min(shares(count, size)) <= 1


def layered(*layers, sync="gradients", period=None):
    network = Network((6, 6, 1), (Conv2d(3, 3), *layers, Flatten(), Dropout(0.2), Linear(10), Dropout(0.3), Linear(10)))
    return Spec(backend_class("numpy")(), network, SOFTMAX, SGD(lr=0.05), 8, sync, period)


@pytest.mark.parametrize(("sync", "period"), [("gradients", None), ("hybrid", None), ("parameters", 1)])
def test_what_dropout_drops_does_not_depend_on_the_workers(sync, period):
    case, data, order = layered(Dropout(0.4), sync=sync, period=period), images(24, side=6), np.arange(24)
    rates = np.array([0.05, 0.1, 0.02])  # a step's own
    program, totals = alone(case, order, rates, data)

    def work(replica, handle):
        return replica.train(handle, order, rates), replica.state(), replica.predict(handle)

    for own, state, scores in together(2, case, work, data):
        assert own.loss == pytest.approx(totals.loss, rel=1e-5)
        assert state["seed"] == 11
        assert relative(state["parameters"], program.state()["parameters"]) < 1e-6
        np.testing.assert_allclose(scores, program.predict(program.load(*data)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sync", ["gradients", "hybrid"])
def test_running_averages_are_averaged_over_the_workers(sync):
    case, data, order = layered(BatchNorm2d(), sync=sync), images(24, side=6), np.arange(8)

    def work(replica, handle):
        replica.train(handle, order, 0.0)
        return replica.state()["running"]

    averaged, *others = together(3, case, work, data)
    for other in others:
        np.testing.assert_array_equal(averaged, other)
    parts = [alone(case, part, 0.0, data)[0].state()["running"] for part in (order[:3], order[3:6], order[6:])]
    np.testing.assert_allclose(averaged, np.average(parts, 0, [3, 3, 2]), rtol=1e-5, atol=1e-6)
    assert relative(parts[0], parts[1]) > 1e-4


@pytest.mark.parametrize(("sync", "period"), [("gradients", None), ("hybrid", None), ("parameters", 2)])
def test_the_calls_that_an_epoch_is_cut_into_change_no_bit(sync, period):
    case, data, order = layered(BatchNorm2d(), sync=sync, period=period), images(44, side=6), np.arange(44)

    def work(replica, handle):
        states = []
        for cuts in ((0, 44), (0, 8, 24, 44)):
            replica.restore(case.network.initial_state(11))
            for first, last in itertools.pairwise(cuts):
                replica.train(handle, order[first:last], 0.05)
            states.append(replica.state())
        return states

    for whole, pieces in together(3, case, work, data):
        assert_same_state(pieces, whole)


@pytest.mark.parametrize("sync", ["gradients", "parameters", "hybrid"])
def test_gradients_change_nothing_that_state_returns(sync):
    case, data = layered(BatchNorm2d(), Dropout(0.4), sync=sync), images(24, side=6)
    batch, single = np.arange(8), np.arange(8, 9)  # one image leaves the second worker without any

    def work(replica, handle):
        replica.train(handle, batch, 0.05)
        before = replica.state()
        replica.gradient_s(handle, 4, 2)
        replica.gradients(handle, batch)
        _, gradient = replica.gradients(handle, single)
        states = [before, replica.state()]
        replica.apply(gradient, 0.05)
        states.append(replica.state())
        replica.restore(before)
        replica.train(handle, single, 0.05)
        return *states, replica.state()

    for before, after, halves, trained in together(2, case, work, data):
        assert_same_state(after, before)
        assert not np.array_equal(halves["running"], before["running"])
        if sync != "parameters":  # there `train` takes the step on its share alone, here on the mean gradient
            assert_same_state(halves, trained)


@pytest.mark.parametrize("sync", ["gradients", "hybrid"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("size", [2, 3])
def test_workers_train_like_one_on_the_whole_batch(sync, optimizer, model, size):
    case, data = spec(model, optimizer, sync=sync), images(50)
    # 16 batches, the last of which leaves one of three workers without images
    order = np.concatenate([epoch_order(50, 0, epoch) for epoch in range(5)])[:242]
    one, totals = alone(case, order, 0.01, data)

    def work(replica, handle):
        return replica.train(handle, order, 0.01), replica.state(), replica.predict(handle)

    found = together(size, case, work, data)
    for own_totals, state, scores in found:
        assert_same_state(state, found[0][1])
        assert (own_totals.correct, own_totals.count) == (totals.correct, totals.count)
        assert own_totals.loss == pytest.approx(totals.loss, rel=1e-5)
        assert state.keys() == one.state().keys()
        for name, array in one.state().items():
            assert relative(state[name], array) < 1e-5, name
        assert state["step"] == 16
        np.testing.assert_allclose(scores, one.predict(one.load(*data)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sync", ["gradients", "parameters", "hybrid"])
def test_the_two_halves_of_a_step_equal_one_workers(sync):
    case, data, batch = spec("two_conv_mlp", sync=sync), images(16), np.arange(16)
    one, _ = alone(case, batch[:0], 0.05, data)
    totals, gradient = one.gradients(one.load(*data), batch)
    one.apply(gradient, 0.05)

    def work(replica, handle):
        found = replica.gradients(handle, batch)
        replica.apply(found[1], 0.05)
        return *found, replica.state()["parameters"]

    for own_totals, own_gradient, parameters in together(2, case, work, data):
        assert (own_totals.correct, own_totals.count) == (totals.correct, totals.count)
        np.testing.assert_allclose(own_gradient, gradient, rtol=1e-4, atol=1e-7)
        assert relative(parameters, one.state()["parameters"]) < 1e-6


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("period", [None, 1, 2])
def test_parameters_are_averaged_as_algorithm_4_says(size, period):
    """Against a simulation: programs trained one after another on their shares, averaged by hand, by their images."""
    case, data, order = spec(optimizer="adam", sync="parameters", period=period), images(90), epoch_order(90, 0, 1)
    programs = [alone(case, order[:0], 0.01, data)[0] for _ in range(size)]
    handles = [program.load(*data) for program in programs]
    totals, since = Totals(0.0, 0, 0), np.zeros(size)
    batches = np.split(order, range(16, 90, 16))  # five of 16 and one of 10
    for i, batch in enumerate(batches):
        for rank, program in enumerate(programs):
            mine = batch[share(len(batch), size, rank)]
            totals += program.train(handles[rank], mine, 0.01)
            since[rank] += len(mine)
        if i == 5 or (period and (i + 1) % period == 0):
            states = [program.state() for program in programs]
            mean = {name: np.average([state[name] for state in states], 0, since) for name in states[0]}
            for program in programs:
                program.restore(mean)
            since[:] = 0

    def work(replica, handle):
        # called in uneven pieces, as the loop does
        parts = [replica.train(handle, order[start:stop], 0.01) for start, stop in ((0, 16), (16, 64), (64, 90))]
        return parts[0] + parts[1] + parts[2], replica.state()

    found = together(size, case, work, data)
    for own, state in found:
        assert_same_state(state, found[0][1])
        assert (own.correct, own.count) == (totals.correct, totals.count)
        assert own.loss == pytest.approx(totals.loss, rel=1e-5)
        assert state["step"] == 6
        for name, array in mean.items():
            np.testing.assert_allclose(state[name], array, rtol=1e-4, atol=1e-7)


def test_every_workers_time_and_share_are_known_and_hybrid_refuses_what_it_cannot_split():
    def work(replica, handle):
        replica.train(handle, np.arange(40), 0.05)
        return replica.times()

    for times in together(2, spec(), work, images(40)):
        assert times.shape == (2, 3)
        assert (times[:, :2] > 0).all()
        np.testing.assert_array_equal(times[:, 2], [20, 20])

    only_linear = Network((12, 12, 1), (Flatten(), Linear(10)))
    few_outputs = Network((12, 12, 1), (Conv2d(2, 3), ReLU(), MaxPool2d(2), Flatten(), Linear(2)))
    for network, message in ((only_linear, "needs convolutions"), (few_outputs, "linear1 has 2 outputs for 3 workers")):
        case = Spec(backend_class("numpy")(), network, SOFTMAX, SGD(), 16, "hybrid")
        raises(ConfigError, message, on_threads, 3, lambda collective, case=case: make_replica(case, collective))


def test_parameters_are_averaged_once_an_epoch_that_comes_in_parts(monkeypatch):
    averaged, data = [], images(24)
    monkeypatch.setattr(ParameterReplica, "_average", lambda self: averaged.append(self.collective.rank))

    def work(replica, handle):
        for start in range(0, 48, 8):  # two epochs
            part = slice(start % 24, start % 24 + 8)
            handle = replica.refill(handle if start else None, data[0][part], data[1][part], 24)
            replica.train(handle, np.arange(8), 0.1)
            averaged.append((start, replica.collective.rank))
        return handle

    handles = together(2, spec(sync="parameters", batch_size=4), work, data)
    assert handles == [1, 1], "the first takes a place beside the whole split, the others that one"
    assert [found for found in averaged if found in (0, (16, 0))] == [0, (16, 0), 0]
    assert averaged.count(0) == averaged.count(1) == 2


def test_workers_meet_at_the_end_of_an_epoch_that_ends_early():
    """What is predicted then is of the state that is recorded, and the next epoch begins with all its batches."""
    case, data = spec(sync="parameters"), images(90)

    def work(replica, handle):
        replica.train(handle, np.arange(32), 0.5)
        return replica.predict(handle), replica.state(), replica._seen

    (scores, state, seen), *others = together(3, case, work, data)
    for there in others:
        assert_same_state(state, there[1])
        np.testing.assert_array_equal(scores, there[0])
    program = case.compile(case.batch_size)
    program.restore(state)
    np.testing.assert_allclose(scores, program.predict(program.load(*data)), rtol=1e-5, atol=1e-6)
    assert seen == 0
