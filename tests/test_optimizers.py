"""Every optimizer against its published algorithm in float64; `backend=torch` in test_conformance runs torch.optim."""

import numpy as np
import pytest
import reference

from cnnexp.backends.cpu.kernels import compile_update
from cnnexp.optimizers import OPTIMIZERS

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


BEGIN, TARGET = np.random.default_rng(0).standard_normal((2, 40))


def run(optimizer, gradients, compiled=None):
    """Return float32 parameters after an optimizer's steps by the given gradients, by its rule or a compiled one."""
    w = BEGIN.astype(np.float32)
    slots = tuple(np.zeros_like(w) for _ in optimizer.slots)
    unused = np.empty(0, np.float32)
    for step, gradient in enumerate(gradients, 1):
        if compiled is None:
            optimizer.apply(w, gradient, slots, optimizer.lr, step)
        else:
            two = (*slots, unused, unused)[:2]
            compiled(w, gradient, *two, np.float32(optimizer.lr), *optimizer.constants(step))
    return w.astype(np.float64)


def expected(name, settings):
    """Return the oracle's parameters and the float32 gradients that led there, of a bowl that tilts at each step."""
    w, memory, gradients = BEGIN, {}, []
    for step in range(1, 101):
        gradients.append((w - TARGET) + np.sin(step + np.arange(len(w))))  # they change sign and size
        w = reference.OPTIMIZERS[name](w, gradients[-1], memory, step, **settings)
    return w, [gradient.astype(np.float32) for gradient in gradients]


def test_every_optimizer_is_tested():
    assert {name for name, _ in CASES} == set(OPTIMIZERS)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_100_steps_are_the_published_algorithm_compiled_or_not(name, settings):
    w, gradients = expected(name, settings)
    optimizer = OPTIMIZERS[name](**settings)
    found = run(optimizer, gradients)
    assert reference.relative_error(found, w) < 1e-5
    assert reference.relative_error(run(optimizer, gradients, compile_update(optimizer)), found) < 1e-5
