"""One run, from its settings to its record: the pieces are put together here, trained, clocked, kept and shown."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence

from cnnexp.app.config import Settings, Trainer
from cnnexp.app.console import Display
from cnnexp.app.keeping import Keeping
from cnnexp.app.resume import Earlier
from cnnexp.app.sweep import write_csv
from cnnexp.backends.protocol import Backend, Program
from cnnexp.datasets import Dataset
from cnnexp.errors import CompilerDied
from cnnexp.measuring import cost_model, footprint
from cnnexp.measuring.amdahl import amdahl_limit
from cnnexp.measuring.interference import PATIENCE_S, Watch, await_quiet
from cnnexp.measuring.ledger import Ledger, Profiled, metrics, report, report_beside, step_parts
from cnnexp.network import Network
from cnnexp.network.losses import Loss, check_loss
from cnnexp.optimizers import Optimizer
from cnnexp.system import memory
from cnnexp.tracking.events import FALLBACK
from cnnexp.tracking.journal import Run
from cnnexp.training import checkpoint
from cnnexp.training.baseline import Baseline
from cnnexp.training.loop import EpochResult, Progress, predict_test, train_epochs
from cnnexp.workers.program import ParallelProgram

log = logging.getLogger(__name__)


def train(settings: Settings, run: Run, earlier: Earlier | None = None, job: str = "") -> None:
    """Train what the settings describe, from where an earlier run was stopped; record it in `run`, show it.

    Args:
        settings: every piece, made and checked.
        run: its record.
        earlier: what was stopped, None to start afresh.
        job: e.g. `job 2 of 8`, of a sweep; empty for a run alone.
    """
    ledger, trainer = Ledger(), settings.trainer
    with ledger.span("data"):
        dataset = settings.dataset.load()
    network = settings.model.network(dataset.input_shape, len(dataset.classes))
    check_loss(network, settings.model.loss, len(dataset.classes))
    compiling = (network, settings.model.loss, settings.optimizer, trainer.batch_size)
    training = checkpoint.describe(*compiling, trainer.rates(), trainer.seed, dataset.sha256)
    resumed = earlier.load(training, trainer.epochs) if earlier is not None else None
    history = resumed.history if resumed else ()
    backend = settings.workers.share_cores(settings.backend)
    if trainer.profile and settings.workers.count == 1:
        backend = backend.clocked
    _need_memory(settings, backend, network, dataset)
    run.begin(dataset, network, backend, settings.workers.count)
    with contextlib.ExitStack() as stack:
        with ledger.span("compile"):
            backend, program = _compile(settings, backend, compiling, run)
            stack.enter_context(contextlib.closing(program))
        kernels = program.explain()
        parallel = program if isinstance(program, ParallelProgram) else None
        if trainer.profile:
            program = Profiled(program, ledger)
        program.restore(resumed.state if resumed else network.initial_state(trainer.seed))
        timed = not backend.simulated
        baseline = beside = None
        if settings.baseline is not None and timed and not run.contended:
            with ledger.span("baseline"):
                compiled = stack.enter_context(contextlib.closing(settings.baseline.compile(*compiling)))
            beside = Profiled(compiled, ledger, train="baseline")
            baseline = _baseline(trainer, settings.baseline, beside, dataset)
        run.summarize({"time/compile_s": program.compile_s})
        run.add_artifact(run.folder / checkpoint.FOLDER, checkpoint.FOLDER)
        with ledger.span("record"):
            run.wait()
        if parallel is not None and parallel.predictable:
            _predict_epochs(parallel, dataset, run)
        display = Display(trainer.epochs, trainer.baseline, trainer.progress, timed=timed, job=job)
        stack.enter_context(display)
        display.start(dataset, network, backend, program.compile_s)
        if backend.explain:
            display.explain(kernels)
        keeping = Keeping(run, program, trainer, training, resumed, within=parallel is None)
        stack.enter_context(keeping)

        def progressed(progress: Progress) -> None:
            display.progress(progress)
            keeping.progressed(progress)

        run.resume(history)
        watch = Watch()
        patience_s = PATIENCE_S if trainer.patient else 0.0
        patience_s -= _await_quiet(patience_s, ledger)
        for result in train_epochs(
            program,
            dataset,
            trainer.epochs,
            trainer.seed,
            trainer.rates(),
            baseline,
            trainer.patience,
            tuple(run.epochs),
            on_progress=progressed,
            pass_s=trainer.pass_s,
            target=trainer.target,
            begun=resumed.begun if resumed else None,
            most_batches=trainer.checkpoint_batches,
            around=watch.around,
        ):
            with ledger.span("record"):
                run.interference = None if parallel is not None else watch.interference()
                run.epoch(result)
                display.epoch(result)
                if baseline is not None:
                    run.summarize(_limit(baseline, backend, settings.workers.count))
                keeping.epoch(result)
            patience_s -= _await_quiet(patience_s if result.epoch < trainer.epochs else 0.0, ledger)
        if settings.baseline is not None and beside is not None and beside.shares():
            run.parts[settings.baseline.name] = step_parts(beside.shares())
        if len(run.epochs) == len(history) > 0:  # nothing was left to train
            run.evaluated(predict_test(program, dataset, history[-1]))
        clocked = run.epochs[len(history) :]
        if isinstance(program, Profiled) and clocked:
            _profile(settings, run, backend, program, beside, clocked, ledger)
        if parallel is not None:
            run.summarize(parallel.metrics())


Compiling = tuple[Network, Loss, Optimizer, int]


def _compile(settings: Settings, backend: Backend, compiling: Compiling, run: Run) -> tuple[Backend, Program]:
    """Compile with a backend, or with its next best where its compiler dies; return that backend and the program."""
    try:
        return backend, settings.workers.compile(backend, *compiling)
    except CompilerDied as death:
        following = backend.next_best
        if following is None:
            raise
        log.warning("%s", death)
        run.tag(FALLBACK, following.name)
        return following, settings.workers.compile(following, *compiling)


def _profile(
    settings: Settings,
    run: Run,
    backend: Backend,
    program: Profiled,
    beside: Profiled | None,
    clocked: Sequence[EpochResult],
    ledger: Ledger,
) -> None:
    """Record where the time of the epochs `clocked` went, the run's and its baseline's."""
    profile = report(ledger, program, clocked, backend.threads)
    profile["backend"] = backend.name
    if settings.baseline is not None and beside is not None:
        profile["baseline"] = report_beside(beside, settings.baseline, clocked)
    run.add_profile(profile)
    run.summarize(metrics(profile))
    if profile["layered"]:
        run.parts[backend.name] = step_parts(ledger.seconds)


def _need_memory(settings: Settings, backend: Backend, network: Network, dataset: Dataset) -> None:
    """Raise OutOfMemory where the run takes more memory than there is, before any of it is taken."""
    size = (network, settings.optimizer, settings.trainer.batch_size)
    parts = [*footprint.training(*size, backend, dataset, settings.workers.count)]
    if settings.baseline is not None:
        parts += footprint.program(*size, settings.baseline)
    memory.need(parts)


def _baseline(trainer: Trainer, backend: Backend, program: Profiled, dataset: Dataset) -> Baseline:
    """Return the baseline; one that is sequential tells, too, which share of its steps could be parallel."""
    share = program.layers_share if backend.threads == 1 and not backend.on_gpu else None
    return Baseline(program, dataset.train, trainer.baseline_batches, trainer.baseline_s, layers_share=share)


def _await_quiet(patience_s: float, ledger: Ledger) -> float:
    """Wait until others leave the cores alone, so many seconds at most; return the seconds waited."""
    if patience_s <= 0:
        return 0.0
    with ledger.span("quiet"):
        return await_quiet(patience_s)


def _limit(baseline: Baseline, backend: Backend, workers: int) -> dict[str, float]:
    """Return Amdahl's limit for the run's hardware, and the share that it follows from, where that was measured."""
    share = baseline.parallel_share
    if share is None:
        return {}
    limit = amdahl_limit(share, workers * _parallel_operations(backend))
    return {"speedup/parallel_share": share, "speedup/amdahl_limit": limit}


def _parallel_operations(backend: Backend) -> float:
    """Return how many float32 operations a backend's hardware does at once: threads times vector lanes.

    A GPU's are infinite: from thousands on, their number hardly moves a limit.
    """
    if backend.on_gpu:
        return math.inf
    from cnnexp.backends.simd.host import host_target  # loads Numba's compiler, as most baselines have

    return backend.threads * host_target().lanes


def _predict_epochs(program: ParallelProgram, dataset: Dataset, run: Run) -> None:
    """Measure what the cost model says of more workers and keep its table."""
    program.measure(dataset.train)
    table = run.folder / cost_model.TABLE
    write_csv(program.extrapolate(), table)
    run.add_artifact(table)
