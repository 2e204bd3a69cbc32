"""One run, from its settings to its record: the pieces are made, and every epoch goes to observers."""

import contextlib
import gc
import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple, cast

import numpy as np

from cnnexp.app.config import Settings
from cnnexp.app.console import Display
from cnnexp.app.keeping import CheckpointCallback
from cnnexp.app.resume import ResumePoint
from cnnexp.backends.protocol import Backend, Program
from cnnexp.datasets import Dataset
from cnnexp.errors import CompilerDied, DataError, Diverged
from cnnexp.measuring import footprint, interference
from cnnexp.measuring.amdahl import amdahl_limit
from cnnexp.measuring.ledger import Charged, Ledger, Profiled, metrics, report, report_beside, step_parts
from cnnexp.network import Network
from cnnexp.network.losses import Loss, check_loss
from cnnexp.optimizers import Optimizer
from cnnexp.system import memory
from cnnexp.system.table import write_csv
from cnnexp.testing import check_rules
from cnnexp.tracking import verdict
from cnnexp.tracking.events import FALLBACK
from cnnexp.tracking.journal import Run
from cnnexp.training import augment, checkpoint
from cnnexp.training.baseline import Baseline
from cnnexp.training.early_stopping import EarlyStopping
from cnnexp.training.loop import TrainingPlan, predict_test, train_epochs
from cnnexp.training.steps import Steps
from cnnexp.workers.program import ParallelProgram

AUGMENTED = 16  # images in the picture of what augmentation does

log = logging.getLogger(__name__)


def train(settings: Settings, run: Run, earlier: ResumePoint | None = None, job: str = "") -> None:
    """Train what settings describe, from where an earlier run stopped; record and show it, of a sweep as a `job`."""
    Diverged.in_one_line()
    trainer = settings.trainer
    with ExitStack() as stack:
        display = stack.enter_context(Display(trainer.epochs, trainer.baseline, trainer.progress, job=job))
        made = _make(settings, run, earlier, stack, display)
        if made.backend.explain:
            display.explain(made.program.explain())
        history = made.resumed.history if made.resumed else ()
        keeping = CheckpointCallback(run, made.program, trainer, made.training, made.resumed, made.parallel is None)
        stack.enter_context(keeping)
        run.resume(history)
        stopping = EarlyStopping(trainer.patience, trainer.target, history)
        watch = interference.Watch(settings.workers.count * made.backend.threads)
        left_s = _await_quiet(interference.IDLE_WAIT_S if trainer.patient else 0.0, watch, made.ledger)
        if not gc.isenabled():  # see `__main__`
            gc.freeze()  # what has been loaded is no garbage
            gc.enable()
        limits = trainer.pass_s, trainer.checkpoint_batches
        epochs = train_epochs(
            made.program,
            made.dataset,
            TrainingPlan(trainer.epochs, trainer.seed, trainer.rates(), *limits, settings.augment),
            [Charged(observer, made.ledger) for observer in (watch, run, display, keeping, stopping)],
            made.baseline,
            made.resumed,
        )
        try:
            for result in epochs if not stopping.reason else ():
                if result.epoch < trainer.epochs and not stopping.reason:
                    left_s = _await_quiet(left_s, watch, made.ledger)
        finally:
            _tell(made, earlier, stopping, watch)
        _conclude(made, len(history))


class _Made(NamedTuple):
    """What is trained, once all is compiled: what it is made from, its record, its time, and what came of it."""

    settings: Settings
    run: Run
    ledger: Ledger
    dataset: Dataset
    backend: Backend  # that compiled it: the next best where the wanted one's compiler died
    program: Program  # the run's, profiled where that is wanted
    parallel: ParallelProgram | None  # the same where workers share it
    beside: Profiled | None  # the baseline's program
    baseline: Baseline | None
    training: Mapping[str, Any]  # what decides the numbers, see `checkpoint.describe`
    resumed: checkpoint.Checkpoint | None  # where an earlier run was stopped


def _make(settings: Settings, run: Run, earlier: ResumePoint | None, stack: ExitStack, display: Display) -> _Made:
    """Load, compile and restore; `stack` closes what was compiled, `display` says what will be trained."""
    ledger, trainer = Ledger(), settings.trainer
    with ledger.span("data"):
        dataset = settings.dataset.load()
    network = _network(settings, dataset, earlier)
    loss = settings.loss(dataset)
    check_loss(network, loss, len(dataset.classes))
    check_rules(network, settings.optimizer)
    compiling = (network, loss, settings.optimizer, trainer.batch_size)
    training = checkpoint.describe(*compiling, trainer.rates(), trainer.seed, dataset.sha256, trainer.steps)
    training |= {"augment": augment.describe(settings.augment)} if settings.augment else {}
    resumed = earlier.load(training, trainer.epochs) if earlier is not None else None
    backend = settings.workers.share_cores(settings.backend)
    if trainer.profile and settings.workers.count == 1:
        backend = backend.clocked
    _need_memory(settings, backend, network, dataset)
    run.begin(dataset, network, backend, settings.workers.count)
    with ledger.span("compile"):
        backend, program = _compile(settings, backend, compiling, run)
        stack.enter_context(contextlib.closing(program))
    parallel = program if isinstance(program, ParallelProgram) else None
    if trainer.steps:
        program = cast(Program, Steps(program, **trainer.steps))
    display.start(dataset, network, backend, program.compile_s, run.folder)
    program.restore(resumed.state if resumed else settings.model.initial_state(network, trainer.seed))
    beside = baseline = None
    if (other := settings.baseline) is not None and not run.contended:
        with ledger.span("baseline"):
            compiled = stack.enter_context(contextlib.closing(other.compile(*compiling)))
        beside = Profiled(compiled, ledger, train="baseline")
        # one that is sequential says, too, which share of its steps could be parallel
        share = beside.layers_share if other.threads == 1 and not other.on_gpu else None
        baseline = Baseline(beside, dataset.train, trainer.baseline_batches, trainer.baseline_s, layers_share=share)
    run.metrics.update({"time/compile_s": program.compile_s})
    run.artifacts.append(run.folder / checkpoint.FOLDER)
    if settings.augment:
        few = dataset.train[:AUGMENTED]
        run.augmented = np.empty_like(few.images)
        places = np.arange(len(few), dtype=np.int64)
        augment.Augmenter(settings.augment, few.images, trainer.seed).fill(1, places, run.augmented)
    with ledger.span("record"):
        run.wait()
    if parallel is not None and parallel.predictable:
        from cnnexp.measuring import cost_model

        parallel.measure(dataset.train)
        table = run.folder / cost_model.TABLE
        write_csv(parallel.extrapolate(), table)
        run.artifacts.append(table)
    trained = Profiled(program, ledger) if trainer.profile else program
    return _Made(settings, run, ledger, dataset, backend, trained, parallel, beside, baseline, training, resumed)


def _network(settings: Settings, dataset: Dataset, earlier: ResumePoint | None) -> Network:
    """Return the model's network; where its file cannot be read, that of the checkpoint that the run goes on from."""
    try:
        return settings.model.network(dataset.input_shape, len(dataset.classes))
    except DataError:
        if earlier is None or earlier.path is None:
            raise
        return checkpoint.rebuild(checkpoint.load(earlier.path).training)[0]


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
        run.tags[FALLBACK] = following.name
        return following, settings.workers.compile(following, *compiling)


def _need_memory(settings: Settings, backend: Backend, network: Network, dataset: Dataset) -> None:
    """Raise OutOfMemory where the run takes more memory than there is, before any of it is taken."""
    size = (network, settings.optimizer, settings.trainer.batch_size)
    parts = [*footprint.training(*size, backend, dataset, settings.workers.count)]
    if settings.baseline is not None:
        parts += footprint.program(*size, settings.baseline)
    memory.need(parts)


def _tell(made: _Made, earlier: ResumePoint | None, stopping: EarlyStopping, watch: interference.Watch) -> None:
    """Give the record what is known when training ends, however it does: its conditions, its start and its end."""
    run, trainer, workers = made.run, made.settings.trainer, made.settings.workers.count
    done, begun = (len(made.resumed.history), made.resumed.begun) if made.resumed else (0, None)
    trained, whole = run.epochs[done:], len(made.dataset.train)
    if trained:
        run.interference = watch.interference()
    resumed = cut = ""
    if earlier is not None and (done or begun):
        resumed = f"{f'within epoch {begun.epoch}' if begun else f'after epoch {done}'}, from {earlier.folder}"
    if trainer.pass_s is not None and any(result.train.count < whole for result in trained):
        images = min(result.train.count for result in trained)
        cut = f"trainer.pass_s={trainer.pass_s:g} ended epochs early: from {images:,} of {whole:,} images on"
    chosen = trainer.patience is not None or trainer.target is not None
    run.course = verdict.Course(done, resumed, stopping.reason, cut, chosen)
    if made.baseline is not None and (share := made.baseline.parallel_share) is not None:
        limit = amdahl_limit(share, workers * _parallel_operations(made.backend))
        run.metrics.update({"speedup/parallel_share": share, "speedup/amdahl_limit": limit})
    if made.beside is not None and made.beside.shares():
        run.parts[str(trainer.baseline)] = step_parts(made.beside.shares())


def _conclude(made: _Made, done: int) -> None:
    """Record what only a whole training has, after `done` epochs of an earlier one: its time, its workers' shares."""
    run, program, ledger = made.run, made.program, made.ledger
    clocked, baseline = run.epochs[done:], made.settings.baseline
    if done and not clocked:
        run.evaluated(predict_test(program, made.dataset, run.epochs[-1]))
    if isinstance(program, Profiled) and clocked:
        profile = report(ledger, program, clocked, made.backend)
        if baseline is not None and made.beside is not None:
            profile["baseline"] = report_beside(made.beside, baseline, clocked)
        if run.interference is not None and run.interference.disturbed:
            profile["disturbed"] = verdict.machine(run.interference)
        run.add_profile(profile)
        run.metrics.update(metrics(profile))
        if profile["layered"]:
            run.parts[made.backend.name] = step_parts(ledger.seconds)
    if made.parallel is not None:
        run.metrics.update(made.parallel.metrics())


def _await_quiet(left_s: float, watch: interference.Watch, ledger: Ledger) -> float:
    """Wait for so long at most until nothing else computes; watch the machine from then on; return what is left."""
    if left_s > 0:
        with ledger.span("quiet"):
            left_s -= interference.await_quiet(left_s)
    watch.start()
    return left_s


def _parallel_operations(backend: Backend) -> float:
    """Return how many float32 operations a backend's hardware does at once: threads times vector lanes.

    A GPU's are infinite: from thousands on, their number hardly moves a limit.
    """
    if backend.on_gpu:
        return math.inf
    from cnnexp.backends.simd.compiler.host import host_target  # loads Numba's compiler, as most baselines have

    return backend.threads * host_target().lanes
