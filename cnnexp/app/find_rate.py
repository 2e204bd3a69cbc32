"""`cnnexp find-rate`: train at ever higher learning rates, and say from where on it fails (Smith 2017, section 3.3)."""

import math
import sys
from collections.abc import Sequence
from contextlib import closing

import numpy as np

from cnnexp.app.config import Settings
from cnnexp.app.hydra_app import settings_of
from cnnexp.errors import ConfigError, Diverged
from cnnexp.measuring.environment import outputs_dir
from cnnexp.network.losses import check_loss
from cnnexp.testing import check_rules
from cnnexp.training.loop import epoch_order
from cnnexp.training.steps import Steps

LOWEST, HIGHEST, STEPS = 1e-6, 10.0, 100  # rates, in equal ratios
KEEPS, FAILS = 0.9, 4.0  # of the smoothed loss at every step; times the smallest of them, and the test is over
SAFE = 10  # the suggestion is so many times lower than the rate at the smallest smoothed loss, as fastai's
ROWS, FIGURE = 12, "find-rate.png"


def command(arguments: Sequence[str]) -> None:
    """Print the rates, their losses and the rate for a run; raise ConfigError where the loss falls at no rate."""
    found = _train(settings_of(arguments), np.geomspace(LOWEST, HIGHEST, STEPS))
    for row in found[np.unique(np.linspace(0, max(0, len(found) - 1), ROWS).astype(int))] if len(found) else ():
        sys.stdout.write("{:9.2e}  loss {:9.4f}  smoothed {:9.4f}\n".format(*row))
    best = int(np.argmin(found[:, 2])) if len(found) else -1
    if best < len(found) // ROWS:
        raise ConfigError(f"find-rate: the loss falls at no rate from {LOWEST:g} on; look at the model and the data")
    from cnnexp.tracking import figures  # loads Matplotlib

    suggested, page = float(f"{found[best, 0] / SAFE:.1e}"), outputs_dir() / FIGURE
    figures.save(figures.rate_range(found, suggested), page)
    sys.stdout.write(f"optimizer.lr={suggested:g}: a tenth of the rate with the smallest smoothed loss\n{page}\n")


def _train(settings: Settings, rates: np.ndarray) -> np.ndarray:
    """Take one step at each rate until the loss grows or is no number; return rows (rate, loss, smoothed loss)."""
    dataset, trainer = settings.dataset.load(), settings.trainer
    network, count = settings.model.network(dataset.input_shape, len(dataset.classes)), len(dataset.train)
    loss, backend = settings.loss(dataset), settings.workers.share_cores(settings.backend)
    check_loss(network, loss, len(dataset.classes))
    check_rules(network, settings.optimizer)
    rows, mean = np.empty((0, 3)), 0.0
    Diverged.in_one_line()
    with closing(settings.workers.compile(backend, network, loss, settings.optimizer, trainer.batch_size)) as program:
        steps = Steps(program, **trainer.steps)
        steps.restore(settings.model.initial_state(network, trainer.seed))
        handle, size = steps.load(dataset.train.images, dataset.train.labels), min(steps.batch_size, count)
        epochs = range(1, 1 + -(-size * len(rates) // count))
        order = np.concatenate([epoch_order(count, trainer.seed, epoch) for epoch in epochs])
        for step, rate in enumerate(rates, 1):
            found = steps.train(handle, order[(step - 1) * size : step * size], float(rate)).mean_loss
            mean = KEEPS * mean + (1 - KEEPS) * found
            smoothed = mean / (1 - KEEPS**step)
            if not math.isfinite(found) or (step > 1 and smoothed > FAILS * rows[:, 2].min()):
                break
            rows = np.vstack([rows, (rate, found, smoothed)])
    return rows
