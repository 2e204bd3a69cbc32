"""The composition root: the command line. It puts the pieces together, and is the only module that imports Hydra.

`python -m cnnexp ...` and the console script `cnnexp ...` are the same.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from cnnexp import checkpoint, explain, page, profile, sweep
from cnnexp.config import Settings, Tracking, Trainer, build, load, plain, record
from cnnexp.console import Display, make_console
from cnnexp.environment import outputs_dir, program_name
from cnnexp.errors import CnnexpError, ConfigError
from cnnexp.losses import check_loss
from cnnexp.profile import Ledger, Profiled
from cnnexp.recorder import Recorder, Run, find_folder, start_process
from cnnexp.speedup import Baseline
from cnnexp.tracking import store_uri
from cnnexp.train import train_epochs
from cnnexp.workers import mpi
from cnnexp.workers.program import ParallelProgram

log = logging.getLogger(__name__)

COMMANDS = {"report": "cnnexp.page:command", "ui": "cnnexp.tracking:ui"}
OBJECTIVES = {"test_accuracy": "final/test_accuracy", "epoch_s": "time/median_epoch_s"}
PACKAGE = Path(__file__).resolve().parent
# a checkout holds conf/ beside the package, an installed package inside it
CONF = next((path for path in (PACKAGE / "conf", PACKAGE.parent / "conf") if path.is_dir()), PACKAGE / "conf")

# ${outputs:} in conf/config.yaml; here, so that the workers of a parallel launcher know it too
OmegaConf.register_new_resolver("outputs", lambda: str(outputs_dir()), replace=True)
# ${by:NAME,{NAME1: VALUE1},OTHERWISE} in conf/experiment/: a value that depends on the backend, say
OmegaConf.register_new_resolver("by", lambda name, values, otherwise: values.get(name, otherwise), replace=True)


class Terminated(KeyboardInterrupt):
    """SIGTERM, treated like Ctrl-C: the run ends as killed."""


def main() -> None:
    """Run the command line and leave with its exit code."""
    traceback_wanted = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise what it would print, so that errors are reported here
    signal.signal(signal.SIGTERM, _terminate)
    if mpi.launched_rank():
        mpi.follow()
        return
    try:
        if mpi.launched_rank() == 0:
            mpi.lead()
        _dispatch(sys.argv[1:])
    except CnnexpError as error:
        if traceback_wanted:
            raise
        _leave(str(error), error.exit_code)
    except KeyboardInterrupt as error:
        terminated = isinstance(error, Terminated)
        _leave("terminated" if terminated else "interrupted", 143 if terminated else 130)
    except Exception as error:
        composing = explain.explain(error, _config_keys)
        if composing is None or traceback_wanted:
            raise
        _leave(str(composing), composing.exit_code)


def job(composed: DictConfig) -> float:
    """Run one job of the command line; return its objective, nan if it failed.

    A failure is kept, not raised: Hydra would print it its own way, and of a sweep only the first.
    """
    try:
        return run(composed)
    except Exception as error:
        if sweep.current():  # its end tells what failed, from the jobs' folders
            log.error("%s", error, exc_info=None if isinstance(error, CnnexpError) else error)
        else:
            _failures.append(error)
        return math.nan


def run(composed: DictConfig) -> float:
    """Train what the config describes, record it, show it; return the objective."""
    hydra_config = HydraConfig.get()
    folder, overrides = Path(hydra_config.runtime.output_dir), _as_typed(hydra_config.overrides.task)
    within, recorded = sweep.current(), record(composed)
    # loads MLflow while this process loads the backend's compiler
    early = start_process() if not _recorders and OmegaConf.select(composed, "tracking.name") == "mlflow" else None
    try:
        settings = load(plain(composed))
    except CnnexpError:
        if early is not None:
            with early:
                early.kill()
        # a sweep finds what became of its jobs in their folders
        with Run(folder, recorded, overrides, name="illegal config"):
            raise
    tracking, parent = settings.tracking, within.run_id if within else None
    contended = within is not None and within.contended
    recorder = _recorder(tracking, early)
    with Run(folder, recorded, overrides, recorder, tracking.run_name, parent, contended) as run:
        if settings.sweep.skip_finished and run.skip_if_finished():
            log.info("skipped, finished before: %s", run.name)
        else:
            _train(settings, run)
    return run.metrics.get(OBJECTIVES[settings.sweep.objective], math.nan)  # a simulated run has no times


def _train(settings: Settings, run: Run) -> None:
    ledger, trainer = Ledger(), settings.trainer
    with ledger.span("data"):
        dataset = settings.dataset.load()
    network = settings.model.network(dataset.input_shape, len(dataset.classes))
    check_loss(network, settings.model.loss, len(dataset.classes))
    compiling = (network, settings.model.loss, settings.optimizer, trainer.batch_size)
    training = checkpoint.describe(*compiling, trainer.rates(), trainer.seed, dataset.sha256)
    resumed = _resumed(trainer, training) if trainer.resume is not None else None
    backend = settings.workers.share_cores(settings.backend)
    run.begin(dataset, network, backend, settings.workers.count)
    with contextlib.ExitStack() as stack:
        with ledger.span("compile"):
            program = stack.enter_context(contextlib.closing(settings.workers.compile(backend, *compiling)))
        parallel = program if isinstance(program, ParallelProgram) else None
        if trainer.profile:
            program = Profiled(program, ledger)
        program.restore(resumed.state if resumed else {"parameters": network.initial_parameters(trainer.seed)})
        baseline, timed = None, not getattr(backend, "simulated", False)
        if settings.baseline is not None and timed and not run.contended:
            with ledger.span("baseline"):
                beside = stack.enter_context(contextlib.closing(settings.baseline.compile(*compiling)))
            beside = Profiled(beside, ledger, train="baseline")
            baseline = Baseline(beside, dataset.train, trainer.baseline_batches, trainer.baseline_s)
        run.summarize({"time/compile_s": program.compile_s})
        run.add_artifact(run.folder / checkpoint.FOLDER, checkpoint.FOLDER)
        with ledger.span("record"):
            run.wait()
        if parallel is not None and parallel.predictable:
            parallel.measure(dataset.train)
            table = run.folder / "cost_model.csv"
            sweep.write_csv(parallel.extrapolate(), table)
            run.add_artifact(table)
        display = stack.enter_context(Display(trainer.epochs, trainer.baseline, trainer.progress, timed=timed))
        display.start(dataset, network, backend, program.compile_s)
        for result in resumed.history if resumed else ():
            run.epoch(result)
        for result in train_epochs(
            program,
            dataset,
            trainer.epochs,
            trainer.seed,
            trainer.rates(),
            baseline,
            trainer.patience,
            tuple(run.epochs),
            on_progress=display.progress,
            pass_s=trainer.pass_s,
        ):
            with ledger.span("record"):
                run.epoch(result)
                display.epoch(result)
                whole = checkpoint.Checkpoint(result.epoch, training, program.state(), tuple(run.epochs), run.facts)
                checkpoint.save(run.folder / checkpoint.FOLDER, whole)
        if isinstance(program, Profiled):
            run.add_profile(profile.report(ledger, program, run.epochs, backend.threads))
            run.summarize(profile.metrics(run.profile))
        if parallel is not None:
            run.summarize(parallel.metrics())
    display.table(run.epochs)


def _resumed(trainer: Trainer, training: Mapping[str, Any]) -> checkpoint.Checkpoint:
    """Return the checkpoint that `trainer.resume` names, once it is known to be of this very training."""
    where = Path(trainer.resume)
    if not where.exists() and re.fullmatch("[0-9a-f]{32}", trainer.resume):
        where = find_folder(outputs_dir(), trainer.resume) or where
    path = checkpoint.find(where)
    found = checkpoint.load(path)
    checkpoint.check_same(found, training, path)
    if found.epoch >= trainer.epochs:
        raise ConfigError(f"trainer.epochs={trainer.epochs}: {path} has done {found.epoch} already; give more epochs")
    return found


class SweepCallback(Callback):
    """Hydra's word that a sweep starts, in the process that starts it (see conf/config.yaml)."""

    started: sweep.Sweep | None = None
    recorder: Recorder | None = None

    def on_multirun_start(self, config: DictConfig, **_) -> None:
        """Begin the sweep; what Hydra would swallow ends the program instead."""
        try:
            tracking = build(Tracking, plain(config.tracking), "tracking")
            SweepCallback.recorder = _recorder(tracking)
            overrides = _as_typed(config.hydra.overrides.task)
            folder, paper = Path(config.hydra.sweep.dir), config.sweep.paper
            SweepCallback.started = sweep.begin(folder, overrides, SweepCallback.recorder, paper)
        except CnnexpError as error:
            _leave(str(error), error.exit_code)


_failures: list[Exception] = []  # of this process
_recorders: dict[Tracking, Recorder] = {}  # the jobs of a sweep share one


def _dispatch(arguments: list[str]) -> None:
    if arguments and arguments[0] in COMMANDS:
        module, _, function = COMMANDS[arguments[0]].partition(":")
        getattr(importlib.import_module(module), function)(arguments[1:])
        return
    command = hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)
    interrupted = True
    try:
        command()
        interrupted = False
    finally:
        failed = _finish_sweep(SweepCallback.started, interrupted) if SweepCallback.started else []
        for recorder in _recorders.values():
            recorder.close()
    for tracking in _recorders:
        store = f" tracking.uri={tracking.uri}" if tracking.uri else ""
        make_console().print(f"To look at it: {program_name()} ui{store}", highlight=False, soft_wrap=True)
    if failed:
        _leave(
            f"{len(failed)} job{'s' if len(failed) > 1 else ''} failed" + "".join(f"\n  {line}" for line in failed), 1
        )
    if _failures:
        raise _failures[0]


def _finish_sweep(started: sweep.Sweep, interrupted: bool) -> list[str]:
    """End a sweep and show its table; return a line for each job that failed."""
    rows = sweep.finish(started, SweepCallback.recorder, interrupted)
    if rows:
        console = make_console()
        console.print(sweep.summary_table(rows))
        if started.paper is not None:
            console.print(page.screen_table(page.compare(Path(started.folder), started.paper)))
            console.print(f"The page: {Path(started.folder) / page.FOLDER / 'index.html'}", soft_wrap=True)
    return sweep.failures(rows, started.paper)


def _recorder(tracking: Tracking, early: subprocess.Popen[str] | None = None) -> Recorder | None:
    """Return the process that writes to the store: the one started `early`, if any, when first asked for."""
    if tracking.name == "none":
        return None
    if tracking not in _recorders:
        _recorders[tracking] = Recorder(store_uri(tracking.uri), tracking.experiment, early)
    return _recorders[tracking]


def _as_typed(overrides: Any) -> list[str]:
    """Return overrides without resolving what they hold: it may lead nowhere, or to a secret."""
    return cast(list[str], OmegaConf.to_container(overrides, resolve=False))


def _config_keys() -> list[str]:
    """Return the dotted keys of the config, with the groups that the command line picks where they exist."""
    choices = [word.partition("=")[::2] for word in sys.argv[1:]]
    picked = [f"{group}={name}" for group, name in choices if (CONF / group / f"{name}.yaml").is_file()]
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return list(_dotted(hydra.compose("config", picked)))


def _dotted(values: Any, prefix: str = "") -> Iterator[str]:
    for key, value in values.items_ex(resolve=False):
        if isinstance(value, DictConfig):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _terminate(signum: int, frame: object) -> None:
    raise Terminated


def _leave(message: str, code: int) -> None:
    sys.stderr.write(f"cnnexp: error: {message}\n")
    sys.exit(code)


if __name__ == "__main__":
    # under its import name, so that Hydra's callback and the workers of a parallel launcher see this one module
    from cnnexp.__main__ import main

    main()
