"""What may grow: 3,000 epochs, whose time, memory and open files must stay flat; and commands of random values."""

from __future__ import annotations

import contextlib
import itertools
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from cnnexp.app.config import Trainer, defaults
from cnnexp.backends import BACKENDS
from cnnexp.network.models import MODELS
from cnnexp.optimizers import OPTIMIZERS
from cnnexp.tracking.events import read_journal
from soak.commands import SMALL, UNEXPECTED, clocked, in_memory, run
from soak.faults import forked

EPOCHS = 3000
MOST_SLOWER, MOST_BYTES, MOST_FILES = 1.25, 1 << 25, 2  # the last tenth beside the second
TRIES = 3  # what grows does so again; other work that comes in late, on the core's other thread, say, does not
Sample = tuple[float, float, int, int]  # when, and how long kept from a core until then, ms; bytes, open files
VALUES = ("0", "-1", "1", "2", "3.5", "1e999", "nan", "null", "true", "x", "''", "[1]", "{a: 1}", "1e-30", "2**63", "é")


def epochs(folder: Path, seed: int) -> Iterator[str | None]:
    """Train for 3,000 epochs; the last must take the time, memory and open files that the first took."""
    while True:
        for _ in range(TRIES):
            fault, growth = _train(folder)
            if fault or not growth:
                break
        yield fault or growth


def _train(folder: Path) -> tuple[str | None, str | None]:
    """Train for 3,000 epochs; return what it may not do, and how it has grown."""
    words = [*SMALL, f"trainer.epochs={EPOCHS}", "dataset.train_size=50", "dataset.test_size=10"]
    samples: list[Sample] = []

    def watch(process: subprocess.Popen[str]) -> None:
        with contextlib.suppress(psutil.Error):
            its = psutil.Process(process.pid)
            while process.poll() is None:
                if (seen := clocked(process.pid)) is not None:
                    samples.append((seen[0], seen[2], its.memory_info().rss, its.num_fds()))
                time.sleep(0.2)

    with in_memory() as its:
        done = run(
            [*words, f"tracking.uri=sqlite:///{folder}/mlflow.db", f"hydra.run.dir={its}"], folder, meanwhile=watch
        )
        fault = done.fault or (f"exit code {done.code}: {done.err}" if done.code else None)
        return fault, None if fault else _growth(its, samples)


def _growth(folder: Path, samples: list[Sample]) -> str | None:
    """Return how a run has grown, None where it has not; its time without that for which others had the cores."""
    ends = [*read_journal(folder)["times_ms"].values()][:EPOCHS]
    at, waited, *_ = zip(*samples, strict=True)
    took = np.diff(ends) - np.diff(np.interp(ends, at, waited))
    tenth = EPOCHS // 10
    slower = took[-tenth:].mean() / took[tenth : 2 * tenth].mean()
    training = [sample for sample in samples if ends[tenth] <= sample[0] <= ends[-1]]
    early, late = training[0], training[-1]
    text = f"{slower:.2f} times the time, {late[2] - early[2]} bytes and {late[3] - early[3]} files more"
    sys.stderr.write(f"{text}\n")
    grown = slower > MOST_SLOWER or late[2] - early[2] > MOST_BYTES or late[3] - early[3] > MOST_FILES
    return text if grown else None


def configs(folder: Path, seed: int) -> Iterator[str | None]:
    """Run commands whose keys have random values: they train, or end in one line."""
    from cnnexp.app import hydra_app  # noqa: F401 - so that children have it
    from soak.review import Case, run_case

    rng = random.Random(seed)
    keys = {
        **{f"trainer.{key}": None for key in defaults(Trainer)},
        "model": [*MODELS],
        "optimizer": [*OPTIMIZERS],
        "backend": [name for name in BACKENDS if name in ("python", "numpy", "unrolled", "numpy-parallel")],
        **dict.fromkeys(("model.filters", "model.kernel", "model.stride", "model.padding", "model.pool")),
        **dict.fromkeys(("optimizer.lr", "optimizer.momentum", "optimizer.weight_decay")),
        **dict.fromkeys(("dataset.train_size", "dataset.test_size", "dataset.height", "dataset.width")),
    }
    for trial in itertools.count():
        chosen = rng.sample([*keys], rng.randint(1, 4))
        words = [f"{key}={rng.choice(keys[key] or VALUES)}" for key in chosen]
        tiny = ["experiment=smoke", "backend=numpy", "trainer.baseline=null", "trainer.epochs=1", "tracking=none"]
        here = folder / str(trial)
        here.mkdir()
        case = Case((*tiny, "trainer.pass_s=2", *words), 0)
        done = forked(here, lambda case=case, here=here: run_case([*case.words], case, here))
        unexpected = f"unexpected: {done.err}" if UNEXPECTED in done.err else None
        fault = done.fault or unexpected
        yield None if fault is None else f"{' '.join(words)}: {fault}"
