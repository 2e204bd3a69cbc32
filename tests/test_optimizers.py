"""Every optimizer against its published algorithm in float64, and against torch.optim."""

import numpy as np
import pytest
import reference

from cnnexp.optimizers import OPTIMIZERS

STEPS = 100
CASES = [
    ("sgd", {"lr": 0.1}),
    ("sgd", {"lr": 0.1, "momentum": 0.9}),
    ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("sgd", {"lr": 0.1, "weight_decay": 0.01}),
    ("rmsprop", {"lr": 0.01}),
    ("rmsprop", {"lr": 0.01, "alpha": 0.9, "momentum": 0.5, "weight_decay": 0.01}),
    ("adagrad", {"lr": 0.1}),
    ("adagrad", {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.01}),
    ("adadelta", {"lr": 1.0}),
    ("adadelta", {"lr": 0.5, "rho": 0.95, "weight_decay": 0.01}),
    ("adam", {}),
    ("adam", {"lr": 0.01, "beta1": 0.95, "beta2": 0.99}),  # garg's
    ("adam", {"lr": 0.01, "weight_decay": 0.01}),
    ("adamw", {"lr": 0.01}),
    ("adamw", {"lr": 0.01, "weight_decay": 0.1}),
    ("adamax", {"lr": 0.01}),
    ("adamax", {"lr": 0.01, "weight_decay": 0.01}),
]


def gradient_of(w, target, step):
    """A bowl that tilts from step to step, so that gradients change sign and size."""
    return (w - target) + np.sin(step + np.arange(len(w)))


def problem(dtype):
    rng = np.random.default_rng(0)
    return rng.standard_normal(40).astype(dtype), rng.standard_normal(40).astype(dtype)


def run(optimizer, gradients):
    """Apply an optimizer to float32 parameters, with the given gradients."""
    w, _ = problem(np.float32)
    slots = tuple(np.zeros_like(w) for _ in optimizer.slots)
    for step, gradient in enumerate(gradients, 1):
        optimizer.apply(w, gradient.astype(np.float32), slots, optimizer.lr, step)
    return w


def expected(name, settings):
    """Return the oracle's parameters and the gradients that led there."""
    w, target = problem(np.float64)
    memory, gradients = {}, []
    for step in range(1, STEPS + 1):
        gradients.append(gradient_of(w, target, step))
        w = reference.OPTIMIZERS[name](w, gradients[-1], memory, step, **settings)
    return w, gradients


def test_every_optimizer_is_tested():
    assert {name for name, _ in CASES} == set(OPTIMIZERS)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_100_steps_are_the_published_algorithm(name, settings):
    w, gradients = expected(name, settings)
    assert reference.relative_error(run(OPTIMIZERS[name](**settings), gradients), w) < 1e-5


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_100_steps_are_those_of_torch(name, settings):
    torch = pytest.importorskip("torch")
    _, gradients = expected(name, settings)
    cls = {"sgd": "SGD", "rmsprop": "RMSprop", "adagrad": "Adagrad", "adadelta": "Adadelta", "adam": "Adam",
           "adamw": "AdamW", "adamax": "Adamax"}[name]  # fmt: skip
    optimizer = OPTIMIZERS[name](**settings)
    theirs = {"lr": optimizer.lr, **settings}
    if "beta1" in theirs:
        theirs["betas"] = (theirs.pop("beta1"), theirs.pop("beta2"))
    parameter = torch.nn.Parameter(torch.tensor(problem(np.float32)[0]))
    their_optimizer = getattr(torch.optim, cls)([parameter], **theirs)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient.astype(np.float32))
        their_optimizer.step()
    actual = run(optimizer, gradients)
    assert reference.relative_error(actual, parameter.detach().numpy().astype(np.float64)) < 1e-5


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_the_compiled_rule_is_the_same(name, settings):
    from cnnexp.backends.cpu.kernels import compile_update

    _, gradients = expected(name, settings)
    optimizer = OPTIMIZERS[name](**settings)
    w, _ = problem(np.float32)
    slots = tuple(np.zeros_like(w) for _ in optimizer.slots)
    unused = np.empty(0, np.float32)
    for step, gradient in enumerate(gradients, 1):
        s, t = (*slots, unused, unused)[:2]
        compile_update(optimizer)(
            w, gradient.astype(np.float32), s, t, np.float32(optimizer.lr), *optimizer.constants(step)
        )
    assert reference.relative_error(w, run(optimizer, gradients).astype(np.float64)) < 1e-5


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rules_stay_in_float32(name):
    optimizer = OPTIMIZERS[name]()
    one = np.float32(1)
    new = optimizer.rule()(one, one, one, one, one, *optimizer.constants(7))
    assert {type(value) for value in new} == {np.float32}
