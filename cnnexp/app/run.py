"""One run, from its settings to its record: the pieces are put together here, trained, clocked, kept and shown."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from cnnexp.app.config import Settings, Trainer
from cnnexp.app.console import Display
from cnnexp.app.keeping import Keeping
from cnnexp.app.resume import Earlier
from cnnexp.app.sweep import write_csv
from cnnexp.backends.protocol import Backend, Program
from cnnexp.datasets import Dataset
from cnnexp.errors import CompilerDied, Diverged
from cnnexp.measuring import cost_model, footprint
from cnnexp.measuring.amdahl import amdahl_limit
from cnnexp.measuring.interference import Patience, Watch
from cnnexp.measuring.ledger import Ledger, Profiled, metrics, report, report_beside, step_parts
from cnnexp.network import Network
from cnnexp.network.losses import Loss, check_loss
from cnnexp.optimizers import Optimizer
from cnnexp.system import memory
from cnnexp.tracking import verdict
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
    Diverged.in_one_line()
    ledger, trainer = Ledger(), settings.trainer
    with ledger.span("data"):
        dataset = settings.dataset.load()
    network = settings.model.network(dataset.input_shape, len(dataset.classes))
    check_loss(network, settings.model.loss, len(dataset.classes))
    compiling = (network, settings.model.loss, settings.optimizer, trainer.batch_size)
    training = checkpoint.describe(*compiling, trainer.rates(), trainer.seed, dataset.sha256)
    resumed = earlier.load(training, trainer.epochs) if earlier is not None else None
    backend = settings.workers.share_cores(settings.backend)
    if trainer.profile and settings.workers.count == 1:
        backend = backend.clocked
    _need_memory(settings, backend, network, dataset)
    run.begin(dataset, network, backend, settings.workers.count)
    with contextlib.ExitStack() as stack:
        with ledger.span("compile"):
            backend, program = _compile(settings, backend, compiling, run)
            stack.enter_context(contextlib.closing(program))
        program.restore(resumed.state if resumed else network.initial_state(trainer.seed))
        beside = None
        if settings.baseline is not None and not backend.simulated and not run.contended:
            with ledger.span("baseline"):
                compiled = stack.enter_context(contextlib.closing(settings.baseline.compile(*compiling)))
            beside = Profiled(compiled, ledger, train="baseline")
        run.summarize({"time/compile_s": program.compile_s})
        run.add_artifact(run.folder / checkpoint.FOLDER, checkpoint.FOLDER)
        with ledger.span("record"):
            run.wait()
        parallel = program if isinstance(program, ParallelProgram) else None
        if parallel is not None and parallel.predictable:
            _predict_epochs(parallel, dataset, run)
        display = Display(trainer.epochs, trainer.baseline, trainer.progress, timed=not backend.simulated, job=job)
        stack.enter_context(display)
        display.start(dataset, network, backend, program.compile_s)
        if backend.explain:
            display.explain(program.explain())
        keeping = Keeping(run, program, trainer, training, resumed, within=parallel is None)
        stack.enter_context(keeping)
        history = resumed.history if resumed else ()
        run.resume(history)
        trained = Profiled(program, ledger) if trainer.profile else program
        pieces = _Pieces(settings, run, ledger, dataset, backend, trained, beside)
        _train_epochs(pieces, display, keeping, resumed.begun if resumed else None)
        if len(run.epochs) == len(history) > 0:  # nothing was left to train
            run.evaluated(predict_test(trained, dataset, history[-1]))
        _profile(pieces, run.epochs[len(history) :])
        if parallel is not None:
            run.summarize(parallel.metrics())


@dataclass(frozen=True)
class _Pieces:
    """What is trained, once all is compiled, and what takes note of it; `beside` is the baseline's program."""

    settings: Settings
    run: Run
    ledger: Ledger
    dataset: Dataset
    backend: Backend
    program: Program | Profiled
    beside: Profiled | None


def _train_epochs(pieces: _Pieces, display: Display, keeping: Keeping, begun: Progress | None) -> None:
    """Train every epoch that is left, the one that was `begun` first; each is recorded, shown and kept."""
    trainer, workers = pieces.settings.trainer, pieces.settings.workers.count
    run, ledger, beside, baseline = pieces.run, pieces.ledger, pieces.beside, None
    if pieces.settings.baseline is not None and beside is not None:
        baseline = _baseline(trainer, pieces.settings.baseline, beside, pieces.dataset)

    def progressed(progress: Progress) -> None:
        display.progress(progress)
        keeping.progressed(progress)

    watch = Watch()
    patience = Patience(trainer.patient)
    _await_quiet(patience, ledger)
    for result in train_epochs(
        pieces.program,
        pieces.dataset,
        trainer.epochs,
        trainer.seed,
        trainer.rates(),
        baseline,
        trainer.patience,
        tuple(run.epochs),
        on_progress=progressed,
        pass_s=trainer.pass_s,
        target=trainer.target,
        begun=begun,
        most_batches=trainer.checkpoint_batches,
        around=watch.around,
    ):
        with ledger.span("record"):
            run.interference = watch.interference() if workers == 1 else None
            run.epoch(result)
            display.epoch(result)
            if baseline is not None:
                run.summarize(_limit(baseline, pieces.backend, workers))
            keeping.epoch(result)
        if result.epoch < trainer.epochs:
            _await_quiet(patience, ledger)
    if pieces.settings.baseline is not None and beside is not None and beside.shares():
        run.parts[pieces.settings.baseline.name] = step_parts(beside.shares())


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


def _profile(pieces: _Pieces, clocked: Sequence[EpochResult]) -> None:
    """Record where the time of the epochs `clocked` went, the run's and its baseline's, if that is to be told."""
    run, program, backend, baseline = pieces.run, pieces.program, pieces.backend, pieces.settings.baseline
    if not isinstance(program, Profiled) or not clocked:
        return
    profile = report(pieces.ledger, program, clocked, backend)
    if baseline is not None and pieces.beside is not None:
        profile["baseline"] = report_beside(pieces.beside, baseline, clocked)
    if run.interference is not None and run.interference.disturbed:
        profile["disturbed"] = verdict.machine(run.interference)
    run.add_profile(profile)
    run.summarize(metrics(profile))
    if profile["layered"]:
        run.parts[backend.name] = step_parts(pieces.ledger.seconds)


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


def _await_quiet(patience: Patience, ledger: Ledger) -> None:
    if patience.left_s > 0:
        with ledger.span("quiet"):
            patience.wait()


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
    from cnnexp.backends.simd.compiler.host import host_target  # loads Numba's compiler, as most baselines have

    return backend.threads * host_target().lanes


def _predict_epochs(program: ParallelProgram, dataset: Dataset, run: Run) -> None:
    """Measure what the cost model says of more workers and keep its table."""
    program.measure(dataset.train)
    table = run.folder / cost_model.TABLE
    write_csv(program.extrapolate(), table)
    run.add_artifact(table)
