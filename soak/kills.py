"""SIGKILL at any moment, of a run, of its recorder, of a sweep; then the same command again, to its end."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import math
import random
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from cnnexp.tracking.events import JOURNAL, read_journal
from soak.commands import SMALL, UNEXPECTED, NotTried, fault_of, recorded, run, weights

EPOCHS = 5
STRATA = 20  # of a run's time: so that few kills reach its start and its end, too
TRAINS = (*SMALL, f"trainer.epochs={EPOCHS}", "trainer.batch_size=5", "trainer.checkpoint_batches=7")
NORM_LAYERS = (
    "[{type: Conv2d, filters: 4},{type: BatchNorm2d},{type: ReLU},{type: Flatten},{type: Linear, features: 10}]"
)
TOGETHER = (
    *("dataset=synthetic", "dataset.height=8", "dataset.width=8", "dataset.train_size=200", "dataset.test_size=50"),
    *("model=custom", f"model.layers={NORM_LAYERS}", *SMALL[1:], "workers=local"),
    *(f"trainer.epochs={EPOCHS}", "trainer.batch_size=5"),
)


def kills(folder: Path, seed: int, trains: Sequence[str] = TRAINS) -> Iterator[str | None]:
    """Kill a run at a random time, now and then twice, and go on with `trainer.resume=auto`.

    It must end as one that was never killed: the same bits, in one MLflow run, with every epoch once. Of a run with
    workers, now rank 0 is killed, now another; nothing may be left behind that Python warns of.
    """
    rng = random.Random(seed)
    store = folder / "mlflow.db"
    words = [*trains, f"tracking.uri=sqlite:///{store}", "trainer.resume=auto"]
    whole = run([*words, "tracking.experiment=whole", "hydra.run.dir=run"], folder / "whole")
    if whole.code != 0:
        yield f"the run that was not killed: {whole}"
        return
    wanted, losses = weights(folder / "whole" / "run"), recorded(store, "whole")[0].metrics
    for trial in itertools.count():
        place, experiment = folder / f"{trial:05d}", f"trial {trial}"
        in_one_folder = rng.random() < 0.5
        mine = [*words, f"tracking.experiment={experiment}", *(["hydra.run.dir=run"] if in_one_folder else [])]
        for again in range(2 if rng.random() < 0.25 else 1):
            after_s = (trial % STRATA + rng.random()) / STRATA * whole.seconds * 1.1 / (1 + again)
            if trains is TOGETHER and rng.random() < 0.5:
                run(mine, place, meanwhile=functools.partial(_kill_child, after_s, "spawn_main", []))
            else:
                run(mine, place, kill_after_s=after_s)
        done = run(mine, place)
        left = f"left behind: {done.err}" if "resource_tracker" in done.err else None
        fault = done.fault or (f"exit code {done.code}: {done.err}" if done.code else left)
        yield _line(fault or _compare(place, store, experiment, wanted, losses), trial, after_s, in_one_folder)


def recorder(folder: Path, seed: int) -> Iterator[str | None]:
    """Kill the recorder of a run at a random time; no epoch may be missing, no run left RUNNING, nothing said."""
    rng = random.Random(seed)
    store, epochs = folder / "mlflow.db", 30
    words = [*SMALL, f"trainer.epochs={epochs}", "trainer.batch_size=1", f"tracking.uri=sqlite:///{store}"]
    whole = run([*words, "tracking.experiment=whole", "hydra.run.dir=run"], folder / "whole")
    for trial in itertools.count():
        experiment = f"trial {trial}"
        after_s = (trial % STRATA + rng.random()) / STRATA * whole.seconds
        killed: list[int] = []
        kill = functools.partial(_kill_child, after_s, "cnnexp.tracking.store", killed)
        place = folder / f"{trial:05d}"
        done = run([*words, f"tracking.experiment={experiment}", "hydra.run.dir=run"], place, meanwhile=kill)
        fault = done.fault or (f"exit code {done.code}: {done.err}" if done.code else None)
        fault = fault or fault_of(recorded(store, experiment), epochs)
        yield _line(fault, trial, after_s, bool(killed), "recorder killed")


def sweeps(folder: Path, seed: int) -> Iterator[str | None]:
    """Kill a sweep, and with it the job that runs, then run it again with what is finished skipped.

    In the end every job is FINISHED once, and nothing is RUNNING.
    """
    rng = random.Random(seed)
    store, filters = folder / "mlflow.db", (1, 2, 3)
    words = [*SMALL, "trainer.epochs=2", f"tracking.uri=sqlite:///{store}", "sweep.skip_finished=true"]
    words += ["-m", f"model.filters={','.join(map(str, filters))}"]
    whole = run([*words, "tracking.experiment=whole"], folder / "whole")
    for trial in itertools.count():
        experiment, place = f"trial {trial}", folder / f"{trial:05d}"
        mine = [*words, f"tracking.experiment={experiment}"]
        after_s = (trial % STRATA + rng.random()) / STRATA * whole.seconds
        run(mine, place, kill_after_s=after_s)
        done = run(mine, place)
        fault = done.fault or (f"exit code {done.code}: {done.err}" if done.code else None)
        yield _line(fault or _sweep_fault(store, experiment, len(filters)), trial, after_s)


def jobs(folder: Path, seed: int) -> Iterator[str | None]:
    """Kill a process that runs jobs of a parallel sweep, then run the sweep again with what is finished skipped.

    The sweep must name what is lost in one line; in the end every job is FINISHED once, and nothing is RUNNING.
    """
    if importlib.util.find_spec("hydra_plugins.hydra_joblib_launcher") is None:
        raise NotTried("hydra-joblib-launcher is not here: pip install -e '.[sweep]'")
    rng = random.Random(seed)
    store, filters = folder / "mlflow.db", (1, 2, 3, 4)
    words = [*SMALL, "trainer.epochs=2", f"tracking.uri=sqlite:///{store}", "sweep.skip_finished=true"]
    words += ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "-m", f"model.filters={','.join(map(str, filters))}"]
    whole = run([*words, "tracking.experiment=whole"], folder / "whole")
    for trial in itertools.count():
        experiment, place = f"trial {trial}", folder / f"{trial:05d}"
        mine = [*words, f"tracking.experiment={experiment}"]
        after_s = (trial % STRATA + rng.random()) / STRATA * whole.seconds
        killed: list[int] = []
        kill = functools.partial(_kill_child, after_s, "popen_loky_posix", killed)
        first = run(mine, place / "killed", meanwhile=kill)
        done = run(mine, place / "again")
        fault = first.fault or done.fault or (f"exit code {done.code}: {done.err}" if done.code else None)
        if not fault and UNEXPECTED in first.err:
            fault = f"not said as what it is: {first.err}"
        yield _line(fault or _sweep_fault(store, experiment, len(filters)), trial, after_s, bool(killed), "job killed")


def _kill_child(after_s: float, named: str, killed: list[int], process: subprocess.Popen[str]) -> None:
    """Kill a child of a process after a while; note its id. A word of its command line says which one."""
    ends = time.monotonic() + after_s
    while time.monotonic() < ends and process.poll() is None:
        time.sleep(0.01)
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process.pid).children():
            if any(named in word for word in child.cmdline()):
                child.kill()
                killed.append(child.pid)
                return


def _sweep_fault(store: Path, experiment: str, jobs: int) -> str | None:
    found = recorded(store, experiment)
    running = [run for run in found if run.status == "RUNNING"]
    trained = [run for run in found if run.status == "FINISHED" and "train/loss" in run.metrics]
    if running:
        return f"{len(running)} of {len(found)} MLflow runs are RUNNING"
    if len(trained) != jobs:
        return f"{len(trained)} of {jobs} jobs are FINISHED"
    return next((fault for run in trained if (fault := fault_of([run], 2))), None)


def _compare(place: Path, store: Path, experiment: str, wanted: str, losses: dict) -> str | None:
    """Return what differs from the run that was not killed."""
    folders = [path.parent for path in place.rglob(JOURNAL)]
    last = max(folders, key=lambda path: (path / JOURNAL).stat().st_mtime)
    runs, journal = recorded(store, experiment), read_journal(last)
    if fault := fault_of(runs, EPOCHS):
        return fault
    if journal["status"] != "FINISHED" or not journal["stored"]:
        return f"the journal says {journal['status']}, stored: {journal['stored']}"
    if [entry["epoch"] for entry in journal["epochs"]] != list(range(1, EPOCHS + 1)):
        return "the journal has other epochs"
    if weights(last) != wanted:
        return "the weights differ"
    if runs[0].metrics["test/loss"] != losses["test/loss"]:
        return "the test losses differ"
    for (_, now), (_, then) in zip(runs[0].metrics["train/loss"], losses["train/loss"], strict=True):
        if not math.isclose(now, then, rel_tol=1e-12):  # the sum of a pass is of its chunks, which follow a clock
            return f"the training losses differ: {now!r}, {then!r}"
    left = [path.name for path in last.rglob("*.tmp")]
    return f"left behind: {left}" if left else None


def _line(fault: str | None, *about: object) -> str | None:
    return None if fault is None else f"{about}: {fault}"
