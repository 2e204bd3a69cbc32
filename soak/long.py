"""What may grow: 3,000 epochs, whose time, memory and open files must stay flat; and commands of random values."""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from cnnexp.app.config import Trainer, defaults
from cnnexp.backends import BACKENDS
from cnnexp.network.models import MODELS
from cnnexp.optimizers import OPTIMIZERS
from cnnexp.tracking.events import read_journal
from soak.commands import SMALL, run
from soak.faults import forked

EPOCHS = 3000
MOST_SLOWER, MOST_BYTES, MOST_FILES = 1.25, 1 << 25, 2  # the last tenth beside the second
VALUES = ("0", "-1", "1", "2", "3.5", "1e999", "nan", "null", "true", "x", "''", "[1]", "{a: 1}", "1e-30", "2**63", "é")


def epochs(folder: Path, seed: int) -> Iterator[str | None]:
    """Train for 3,000 epochs; the last must take the time, memory and open files that the first took."""
    words = [*SMALL, f"trainer.epochs={EPOCHS}", "dataset.train_size=50", "dataset.test_size=10"]
    for trial in itertools.count(seed):
        samples: list[tuple[int, int]] = []

        def watch(process: subprocess.Popen[str], samples: list[tuple[int, int]] = samples) -> None:
            with contextlib.suppress(psutil.Error):
                seen = psutil.Process(process.pid)
                while process.poll() is None:
                    samples.append((seen.memory_info().rss, seen.num_fds()))
                    time.sleep(0.2)

        place = folder / str(trial)
        store = f"tracking.uri=sqlite:///{folder}/mlflow.db"
        done = run([*words, store, "hydra.run.dir=run"], place, meanwhile=watch)
        yield done.fault or (f"exit code {done.code}: {done.err}" if done.code else None) or _growth(place, samples)


def _growth(place: Path, samples: list[tuple[int, int]]) -> str | None:
    times_ms = read_journal(place / "run")["times_ms"]
    gaps = [times_ms[epoch + 1] - times_ms[epoch] for epoch in range(1, EPOCHS)]
    tenth = EPOCHS // 10
    slower = statistics.mean(sorted(gaps[-tenth:])[: tenth // 2]) / statistics.mean(
        sorted(gaps[tenth : 2 * tenth])[: tenth // 2]
    )
    third = len(samples) // 3
    early, late = samples[third], samples[-3]
    told = f"{slower:.2f} times the time, {late[0] - early[0]} bytes and {late[1] - early[1]} files more"
    grown = slower > MOST_SLOWER or late[0] - early[0] > MOST_BYTES or late[1] - early[1] > MOST_FILES
    return told if grown else None


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
        unexpected = f"unexpected: {done.err}" if "unexpected" in done.err else None
        fault = done.fault or unexpected
        yield None if fault is None else f"{' '.join(words)}: {fault}"
