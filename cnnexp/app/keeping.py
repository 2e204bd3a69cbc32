"""When a run's checkpoints are written: at its start, after every epoch, within one, and where a signal ends it."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from cnnexp.app.config import Trainer
from cnnexp.backends.protocol import Program
from cnnexp.tracking.journal import Run
from cnnexp.training.checkpoint import FOLDER, Checkpoint, CheckpointWriter
from cnnexp.training.loop import EpochResult, Progress


class CheckpointCallback(AbstractContextManager):
    """Keeps what a program has trained, in the folder of its run, whose model the newest one is.

    The trainer says how often, and how many stay. `within`: whether the program has one state between any two steps.
    CheckpointError is raised where one cannot be written.
    """

    def __init__(
        self,
        run: Run,
        program: Program,
        trainer: Trainer,
        training: Mapping[str, Any],
        resumed: Checkpoint | None = None,
        within: bool = True,
    ) -> None:
        history, self._kept = (resumed.history, resumed.begun) if resumed else ((), None)
        self._run, self._program, self._trainer, self._within = run, program, trainer, within
        self._writer = CheckpointWriter(run.folder / FOLDER, training, history, trainer.keep_last, trainer.keep_best)
        self._latest = self._kept
        self._save(begun=self._kept)  # of the start: so a run that is stopped in its first epoch can go on, too

    def finished(self, result: EpochResult) -> None:
        """Keep what an epoch has made, as `Run` has recorded it."""
        self._save(self._run.epochs[-1])

    def progressed(self, progress: Progress) -> None:
        """Keep how far an epoch is, where that is due."""
        self._latest = progress
        if not self._within or progress.totals.count == progress.images:
            return
        trainer = self._trainer
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
        self._run.model = self._writer.save(self._program.state(), self._run.facts, result, begun)
        self._kept, self._kept_at = begun, time.monotonic()
