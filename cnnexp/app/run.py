"""One run, from its settings to its record: the pieces are made, and every epoch goes to observers."""

import gc
import logging
import math
import time
from contextlib import AbstractContextManager, ExitStack, closing
from typing import Any, cast

import numpy as np

from cnnexp.app.config import Settings
from cnnexp.app.console import Display
from cnnexp.app.resume import ResumePoint
from cnnexp.backends.protocol import Program
from cnnexp.errors import CompilerDied, DataError, Diverged
from cnnexp.measuring import footprint, interference
from cnnexp.measuring.amdahl import amdahl_limit
from cnnexp.measuring.ledger import Charged, Ledger, Profiled, metrics, report, report_beside, step_parts
from cnnexp.network import Network
from cnnexp.network.losses import check_loss
from cnnexp.system import memory
from cnnexp.system.table import write_csv
from cnnexp.testing import check_rules
from cnnexp.tracking import verdict
from cnnexp.tracking.events import FALLBACK
from cnnexp.tracking.journal import Run
from cnnexp.training import augment, checkpoint
from cnnexp.training.baseline import Baseline
from cnnexp.training.checkpoint import CheckpointWriter
from cnnexp.training.early_stopping import EarlyStopping
from cnnexp.training.loop import EpochResult, Progress, TrainingPlan, predict_test, train_epochs
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
        made = _Training(settings, run, earlier, stack, display)
        if made.backend.explain:
            display.explain(made.program.explain())
        keeping = stack.enter_context(_Keeping(made))
        run.resume(made.history)
        stopping = EarlyStopping(trainer.patience, trainer.target, made.history)
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
            made.tell(stopping, watch)
        made.conclude()


class _Training:
    """A run once all is compiled: what it is made from, its record, its time, and what comes of it."""

    def __init__(
        self, settings: Settings, run: Run, earlier: ResumePoint | None, stack: ExitStack, display: Display
    ) -> None:
        """Load, compile and restore; `stack` closes what was compiled, `display` says what will be trained."""
        self.settings, self.run, self.earlier, self.ledger = settings, run, earlier, Ledger()
        trainer, ledger = settings.trainer, self.ledger
        with ledger.span("data"):
            self.dataset = dataset = settings.dataset.load()
        network = self._network()
        loss = settings.loss(dataset)
        check_loss(network, loss, len(dataset.classes))
        check_rules(network, settings.optimizer)
        compiling = (network, loss, settings.optimizer, trainer.batch_size)
        self.training = checkpoint.describe(*compiling, trainer.rates(), trainer.seed, dataset.sha256, trainer.steps)
        self.training |= {"augment": augment.describe(settings.augment)} if settings.augment else {}
        self.resumed = earlier.load(self.training, trainer.epochs) if earlier is not None else None
        self.history, self.begun = (self.resumed.history, self.resumed.begun) if self.resumed else ((), None)
        self.backend = settings.workers.share_cores(settings.backend)
        if trainer.profile and settings.workers.count == 1:
            self.backend = self.backend.clocked
        self._need_memory(network)
        run.begin(dataset, network, self.backend, settings.workers.count)
        with ledger.span("compile"):
            program = stack.enter_context(closing(self._compile(*compiling)))
        self.parallel = program if isinstance(program, ParallelProgram) else None
        if trainer.steps:
            program = cast(Program, Steps(program, **trainer.steps))
        display.start(dataset, network, self.backend, program.compile_s, run.folder)
        program.restore(self.resumed.state if self.resumed else settings.model.initial_state(network, trainer.seed))
        self.beside: Profiled | None = None  # the baseline's program
        self.baseline: Baseline | None = None
        if (other := settings.baseline) is not None and not run.contended:
            with ledger.span("baseline"):
                compiled = stack.enter_context(closing(other.compile(*compiling)))
            self.beside = beside = Profiled(compiled, ledger, train="baseline")
            # one that is sequential says, too, which share of its steps could be parallel
            share = beside.layers_share if other.threads == 1 and not other.on_gpu else None
            timed = trainer.baseline_batches, trainer.baseline_s
            self.baseline = Baseline(beside, dataset.train, *timed, layers_share=share)
        run.metrics.update({"time/compile_s": program.compile_s})
        run.artifacts.append(run.folder / checkpoint.FOLDER)
        if settings.augment:
            few = dataset.train[:AUGMENTED]
            run.augmented = np.empty_like(few.images)
            places = np.arange(len(few), dtype=np.int64)
            augment.Augmenter(settings.augment, few.images, trainer.seed).fill(1, places, run.augmented)
        with ledger.span("record"):
            run.wait()
        if self.parallel is not None and self.parallel.predictable:
            from cnnexp.measuring import cost_model

            self.parallel.measure(dataset.train)
            table = run.folder / cost_model.TABLE
            write_csv(self.parallel.extrapolate(), table)
            run.artifacts.append(table)
        self.program = Profiled(program, ledger) if trainer.profile else program

    def _network(self) -> Network:
        """Return the model's network; where its file cannot be read, that of the checkpoint it goes on from."""
        try:
            return self.settings.model.network(self.dataset.input_shape, len(self.dataset.classes))
        except DataError:
            if self.earlier is None or self.earlier.path is None:
                raise
            return checkpoint.rebuild(checkpoint.load(self.earlier.path).training)[0]

    def _compile(self, *compiling: Any) -> Program:
        """Compile with the backend, or with its next best, which takes its place, where its compiler dies."""
        try:
            return self.settings.workers.compile(self.backend, *compiling)
        except CompilerDied as death:
            if (following := self.backend.next_best) is None:
                raise
            log.warning("%s", death)
            self.run.tags[FALLBACK] = following.name
            self.backend = following
            return self.settings.workers.compile(following, *compiling)

    def _need_memory(self, network: Network) -> None:
        """Raise OutOfMemory where the run takes more memory than there is, before any of it is taken."""
        settings = self.settings
        size = (network, settings.optimizer, settings.trainer.batch_size)
        parts = [*footprint.training(*size, self.backend, self.dataset, settings.workers.count)]
        if settings.baseline is not None:
            parts += footprint.program(*size, settings.baseline)
        memory.need(parts)

    def tell(self, stopping: EarlyStopping, watch: interference.Watch) -> None:
        """Give the record what is known when training ends, however it does: its conditions, its start and its end."""
        run, trainer, earlier = self.run, self.settings.trainer, self.earlier
        done, begun = len(self.history), self.begun
        trained, whole = run.epochs[done:], len(self.dataset.train)
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
        if self.baseline is not None and (share := self.baseline.parallel_share) is not None:
            at_once = math.inf  # float32 operations; from a GPU's thousands on, their number hardly moves the limit
            if not self.backend.on_gpu:
                from cnnexp.backends.simd.compiler.host import host_target  # loads Numba's compiler, as most baselines

                at_once = self.settings.workers.count * self.backend.threads * host_target().lanes
            run.metrics.update({"speedup/parallel_share": share, "speedup/amdahl_limit": amdahl_limit(share, at_once)})
        if self.beside is not None and self.beside.shares():
            run.parts[str(trainer.baseline)] = step_parts(self.beside.shares())

    def conclude(self) -> None:
        """Record what only a whole training has: its time and its workers'."""
        run, program, ledger = self.run, self.program, self.ledger
        clocked, baseline = run.epochs[len(self.history) :], self.settings.baseline
        if self.history and not clocked:
            run.evaluated(predict_test(program, self.dataset, run.epochs[-1]))
        if isinstance(program, Profiled) and clocked:
            profile = report(ledger, program, clocked, self.backend)
            if baseline is not None and self.beside is not None:
                profile["baseline"] = report_beside(self.beside, baseline, clocked)
            if run.interference is not None and run.interference.disturbed:
                profile["disturbed"] = verdict.machine(run.interference)
            run.add_profile(profile)
            run.metrics.update(metrics(profile))
            if profile["layered"]:
                run.parts[self.backend.name] = step_parts(ledger.seconds)
        if self.parallel is not None:
            run.metrics.update(self.parallel.metrics())


class _Keeping(AbstractContextManager):
    """Keeps what a run has trained in its folder: at its start, after every epoch, within one, where a signal ends it.

    The newest checkpoint is the run's model. CheckpointError is raised where one cannot be written.
    """

    def __init__(self, made: _Training) -> None:
        trainer, folder = made.settings.trainer, made.run.folder / checkpoint.FOLDER
        self._made, self._within = made, made.parallel is None  # workers have no one state between any two steps
        self._writer = CheckpointWriter(folder, made.training, made.history, trainer.keep_last, trainer.keep_best)
        self._latest = made.begun
        self._save(begun=made.begun)  # of the start: so a run that is stopped in its first epoch can go on, too

    def finished(self, result: EpochResult) -> None:
        """Keep what an epoch has made, as `Run` has recorded it."""
        self._save(self._made.run.epochs[-1])

    def progressed(self, progress: Progress) -> None:
        """Keep how far an epoch is, where that is due."""
        self._latest = progress
        if not self._within or progress.totals.count == progress.images:
            return
        trainer = self._made.settings.trainer
        due = trainer.checkpoint_s is not None and time.monotonic() - self._kept_at >= trainer.checkpoint_s
        if trainer.checkpoint_batches is not None:
            images, kept = trainer.checkpoint_batches * trainer.batch_size, self._kept.totals.count if self._kept else 0
            due = due or progress.totals.count // images > kept // images
        if due:
            self._save(begun=progress)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Keep how far an epoch is that Ctrl-C or a signal ends."""
        stopped, latest = isinstance(error, KeyboardInterrupt) and self._within, self._latest
        if stopped and latest is not None and latest != self._kept and latest.epoch == self._writer.epochs + 1:
            self._save(begun=latest)

    def _save(self, result: EpochResult | None = None, begun: Progress | None = None) -> None:
        run, program = self._made.run, self._made.program
        run.model = self._writer.save(program.state(), run.facts, result, begun)
        self._kept, self._kept_at = begun, time.monotonic()


def _await_quiet(left_s: float, watch: interference.Watch, ledger: Ledger) -> float:
    """Wait for so long at most until nothing else computes; watch the machine from then on; return what is left."""
    if left_s > 0:
        with ledger.span("quiet"):
            left_s -= interference.await_quiet(left_s)
    watch.start()
    return left_s
