"""What recipes ask for beside a rate: schedules, weight decay, class weights, clipping, accumulation, averaging."""

import contextlib
import dataclasses

import numpy as np
import pytest
from conformance import assert_same_state
from tables import each

from cnnexp import SGD, AdamW, BatchNorm2d, Conv2d, Dropout, Flatten, Linear, Loss, Network, ReLU, Sigmoid
from cnnexp.backends import backend_class
from cnnexp.errors import BackendUnavailable
from cnnexp.network.losses import evaluate
from cnnexp.training.schedules import FACTORS, Schedule
from cnnexp.training.steps import Steps
from cnnexp.workers import Local

BACKENDS = ("numpy", "python", "cpu", "cpu-simd", "torch", "keras")
NETWORK = Network((8, 8, 1), (Conv2d(4, 3, bias=False), BatchNorm2d(), ReLU(), Flatten(), Linear(6)))
PLAIN = Network((8, 8, 1), (Conv2d(4, 3), ReLU(), Flatten(), Linear(6)))
BATCH, COUNT, MOMENTUM = 8, 30, SGD(lr=0.1, momentum=0.9)
WEIGHTS = (0.5, 2.0, 1.0, 3.0, 0.25, 1.5)
ALL = {"clip_norm": 0.5, "accumulate": 2, "ema": 0.9}
Renamed = type("Renamed", (SGD,), {"slots": ("average_velocity",)})  # a plugin's, its slot named as an average
RNG = np.random.default_rng(3)
IMAGES, LABELS = RNG.random((COUNT, 8, 8, 1), np.float32), RNG.integers(0, 6, COUNT).astype(np.int32)


@contextlib.contextmanager
def compiled(backend, network=PLAIN, optimizer=MOMENTUM, loss=Loss.SOFTMAX_CROSS_ENTROPY, batch=BATCH):
    try:
        made = backend_class(backend)().compile(network, loss, optimizer, batch)
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    with contextlib.closing(made) as program:
        program.restore(network.initial_state(1))
        yield program, program.load(IMAGES, LABELS if loss.name != "binary_cross_entropy" else LABELS % 2)


def assert_close(state, other):
    assert set(state) == set(other)
    for name in state:
        np.testing.assert_allclose(state[name], other[name], rtol=2e-5, atol=2e-5, err_msg=name)


def torch_rates(schedule, lr, epochs, steps):
    """Return the rates (epochs * steps,) that PyTorch's schedulers set, stepped once a step or once an epoch."""
    torch = pytest.importorskip("torch")
    schedulers = torch.optim.lr_scheduler
    optimizer, count, rates = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr), epochs * steps, []
    made = {
        "constant": lambda: schedulers.ConstantLR(optimizer, 1.0),
        "step": lambda: schedulers.StepLR(optimizer, schedule.every, schedule.factor),
        "milestones": lambda: schedulers.MultiStepLR(optimizer, schedule.milestones, schedule.factor),
        "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, epochs),
        "polynomial": lambda: schedulers.PolynomialLR(optimizer, count, schedule.power),
        "one_cycle": lambda: schedulers.OneCycleLR(optimizer, lr, count, pct_start=schedule.peak, cycle_momentum=False),
    }[schedule.name]()
    for step in range(count):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if schedule.name in ("polynomial", "one_cycle") or step % steps == steps - 1:
            made.step()
    return rates


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("steps", [1, 7])
def test_schedules_are_pytorchs(name, steps):
    schedule = Schedule(name, every=2, factor=0.3, milestones=(2, 5), power=1.7, peak=0.25)
    rates = [schedule.rates(0.4, epoch, 6, steps) for epoch in range(1, 7)]
    np.testing.assert_allclose(np.concatenate(rates), torch_rates(schedule, 0.4, 6, steps), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", FACTORS)
def test_warm_up_multiplies_the_first_steps_of_any_schedule(name):
    cold, warm = Schedule(name, milestones=(1,)), Schedule(name, milestones=(1,), warmup=1.5)
    factors = [warm.rates(0.4, epoch, 3, 8) / cold.rates(0.4, epoch, 3, 8) for epoch in (1, 2, 3)]
    np.testing.assert_allclose(np.concatenate(factors), [*np.arange(1, 13) / 12, *[1.0] * 12], rtol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rate_for_each_step_is_as_many_calls(backend):
    order, rates = np.random.default_rng(5).permutation(COUNT), np.array([0.1, 0.02, 0.3, 0.05])
    with compiled(backend, NETWORK) as (program, handle):
        totals = program.train(handle, order, rates)
        together = program.state()
        program.restore(NETWORK.initial_state(1))
        parts = [program.train(handle, order[i * BATCH : (i + 1) * BATCH], rate) for i, rate in enumerate(rates)]
        assert totals.correct == sum(part.correct for part in parts)
        assert_same_state(program.state(), together)
        program.restore(NETWORK.initial_state(1))
        program.train(handle, order, 0.1)
        assert np.abs(together["parameters"] - program.state()["parameters"]).max() > 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "optimizer", [SGD(lr=0.1, momentum=0.9, weight_decay=0.05), AdamW(lr=0.01, weight_decay=0.3)], ids=["sgd", "adamw"]
)
def test_weight_decay_spares_biases_and_normalization(backend, optimizer):
    """The reference: the very rule in float64, parameter by parameter, on the gradients that the program reports."""
    sparing, order = dataclasses.replace(optimizer, decay_biases=False), np.arange(COUNT)
    with compiled(backend, NETWORK, sparing) as (program, handle):
        w = program.state()["parameters"].astype(np.float64)
        all_decay, slots, other_slots = w.copy(), *([np.zeros_like(w) for _ in sparing.slots] for _ in range(2))
        for step in range(3):
            batch = order[step * BATCH : (step + 1) * BATCH]
            g = program.gradients(handle, batch)[1].astype(np.float64)
            program.train(handle, batch, 0.05)
            for p in NETWORK.parameters:
                part, decays = slice(p.offset, p.offset + p.size), p.name.endswith("weight") and len(p.shape) > 1
                rule = dataclasses.replace(optimizer, weight_decay=optimizer.weight_decay if decays else 0.0)
                rule.apply(w[part], g[part], [slot[part] for slot in slots], 0.05, step + 1)
            optimizer.apply(all_decay, g, other_slots, 0.05, step + 1)
            np.testing.assert_allclose(program.state()["parameters"], w, atol=2e-5, rtol=2e-4)
        assert np.abs(all_decay - w).max() > 1e-3
        trained = program.state()
        program.apply(program.gradients(handle, order[:BATCH])[1], 0.05)  # the same step in two halves
        halves = program.state()
        program.restore(trained)
        program.train(handle, order[:BATCH], 0.05)
        assert_close(program.state(), halves)


@pytest.mark.parametrize("backend", BACKENDS)
@each(
    (Loss("softmax_cross_entropy", 0.1), PLAIN, WEIGHTS),
    (Loss("mean_squared_error"), PLAIN, WEIGHTS),
    (Loss("binary_cross_entropy"), Network((8, 8, 1), (Flatten(), Linear(1), Sigmoid())), (0.5, 3.0)),
    ids=lambda given: getattr(given, "name", ""),
)
def test_class_weights_multiply_the_gradient_of_each_image(backend, loss, network, weights):
    """The reference: the gradients of the batch's classes one by one, each unweighted, added up in float64."""
    labels, batch = LABELS % len(weights), np.arange(COUNT)
    mean, total = 0.0, 0.0
    with compiled(backend, network, loss=loss, batch=COUNT) as (program, handle):
        for label, weight in enumerate(weights):
            own = batch[labels == label]
            totals, gradient = program.gradients(handle, own)
            mean = mean + weight * gradient.astype(np.float64) * len(own) / COUNT
            total += weight * totals.loss
    weighted = dataclasses.replace(loss, class_weights=weights)
    with compiled(backend, network, loss=weighted, batch=COUNT) as (program, handle):
        totals, gradient = program.gradients(handle, batch)
        np.testing.assert_allclose(gradient, mean, rtol=1e-4, atol=1e-6)
        assert totals.loss == pytest.approx(total, rel=1e-5)


def test_held_out_images_count_alike_whatever_their_class_weighs():
    scores, labels = np.random.default_rng(0).normal(size=(9, 6)).astype(np.float32), np.arange(9) % 6
    plain, weighted = (Loss("softmax_cross_entropy", class_weights=weights) for weights in ((), WEIGHTS))
    assert evaluate(weighted, scores, labels) == evaluate(plain, scores, labels)


@pytest.mark.parametrize("backend", BACKENDS)
def test_clipping_is_by_the_norm_over_all_parameters(backend):
    """The reference: the rule in float64, on the program's gradients, clipped in float64."""
    with compiled(backend, NETWORK) as (program, handle):
        w, slots = program.state()["parameters"].astype(np.float64), [np.zeros(NETWORK.parameter_count)]
        norms = []
        for step in range(4):
            batch = np.arange(step * BATCH, min((step + 1) * BATCH, COUNT))
            gradient = program.gradients(handle, batch)[1].astype(np.float64)
            norms.append(np.linalg.norm(gradient))
            largest = norms[0] * 1.1
            Steps(program, clip_norm=largest).train(handle, batch, 0.05)
            MOMENTUM.apply(w, gradient * min(1.0, largest / norms[-1]), slots, 0.05, step + 1)
            np.testing.assert_allclose(program.state()["parameters"], w, atol=2e-5, rtol=2e-4)
        assert min(norms) < largest < max(norms)  # some were, some were not


@pytest.mark.parametrize("backend", BACKENDS)
def test_accumulated_batches_are_one_batch_so_many_times_as_large(backend):
    accumulate = 2  # two batches of 8, then one of 8 and one of 6
    network = Network((8, 8, 1), (*PLAIN.layers[:-1], Dropout(0.3), PLAIN.layers[-1]))
    order = np.random.default_rng(5).permutation(COUNT)
    with compiled(backend, network) as (program, handle):
        steps = Steps(program, accumulate=accumulate)
        assert steps.batch_size == accumulate * BATCH
        totals, parts = steps.train(handle, order, 0.1), steps.state()
    with compiled(backend, network, batch=accumulate * BATCH) as (program, handle):
        whole = program.train(handle, order, 0.1)
        assert_close(parts, program.state())
        assert (totals.correct, totals.count) == (whole.correct, whole.count)
        assert totals.loss == pytest.approx(whole.loss, rel=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_average_follows_the_parameters_and_is_what_predicts(backend):
    """The reference: the recurrence in float64, over the states that a program without an average goes through."""
    order, start = np.random.default_rng(5).permutation(COUNT), NETWORK.initial_state(1)
    with compiled(backend, NETWORK) as (program, handle):
        average = {name: start[name].astype(np.float64) for name in ("parameters", "running")}
        for step in range(1, 5):
            program.train(handle, order[(step - 1) * BATCH : step * BATCH], 0.1)
            decay = min(0.3, (1 + step) / (10 + step))
            for name, array in program.state().items():
                if name in average:
                    average[name] = decay * average[name] + (1 - decay) * array
        trained = program.state()
        program.restore({**trained, **{name: array.astype(np.float32) for name, array in average.items()}})
        scores = program.predict(handle)
        steps = Steps(program, ema=0.3)
        steps.restore(start)
        steps.train(handle, order, 0.1)
        state = steps.state()
        for name, array in average.items():
            np.testing.assert_allclose(state[f"average_{name}"], array, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(steps.predict(handle), scores, rtol=1e-3, atol=1e-5)
        for name, array in trained.items():  # the steps themselves, and the state after a prediction, are as without
            np.testing.assert_array_equal(steps.state()[name], array)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_stopped_goes_on_to_the_same_bits(backend):
    order = np.random.default_rng(5).permutation(COUNT)
    network = Network((8, 8, 1), (*NETWORK.layers[:-1], Dropout(0.3), NETWORK.layers[-1]))
    kind = SGD if backend in ("torch", "keras") else Renamed  # the peers take no plugin's
    optimizer = kind(lr=0.1, momentum=0.9, weight_decay=0.01, decay_biases=False)
    with compiled(backend, network, optimizer) as (program, data):
        steps = Steps(program, **ALL)
        steps.restore(network.initial_state(1))
        steps.train(data, order[:16], 0.1)
        stopped = steps.state()
        steps.train(data, order[16:], 0.05)
        whole, scores = steps.state(), steps.predict(data)
        steps = Steps(program, **ALL)
        steps.restore(stopped)
        steps.train(data, order[16:], 0.05)
        assert_same_state(steps.state(), whole)
        np.testing.assert_array_equal(steps.predict(data), scores)


@pytest.mark.parametrize("sync", ["gradients", "hybrid"])
def test_workers_take_the_same_steps(sync):
    """Every option at once, two workers' steps beside one's: a rate for each step, two batches to each."""
    optimizer = dataclasses.replace(MOMENTUM, weight_decay=0.01, decay_biases=False)
    order, loss = np.random.default_rng(5).permutation(COUNT), Loss("softmax_cross_entropy", 0.1, WEIGHTS)
    rates, options = np.array([0.1, 0.05, 0.02, 0.01]), {"clip_norm": 0.5, "ema": 0.9}

    def trained(program):
        with contextlib.closing(program):
            steps = Steps(program, **options)
            steps.restore(PLAIN.initial_state(1))
            handle = steps.load(IMAGES, LABELS)
            totals, state, scores = steps.train(handle, order, rates), steps.state(), steps.predict(handle)
            return totals, state, scores, program.train(handle, order, rates)

    made = PLAIN, loss, optimizer, BATCH
    totals, state, scores, own = trained(backend_class("numpy")().compile(*made))
    found, other, theirs, shared = trained(Local(count=2, sync=sync).compile(backend_class("numpy")(), *made))
    assert found.loss == pytest.approx(totals.loss, rel=1e-5)
    assert shared.loss == pytest.approx(own.loss, rel=1e-5)
    assert_close(other, state)
    np.testing.assert_allclose(theirs, scores, rtol=1e-4, atol=1e-5)
