"""The record of a run: `Run` writes its journal, figures and model into its folder, and has a `Recorder` follow it.

What it shares with the record of a sweep is `Record`. All that MLflow gets, a recorder reads from the journal, so no
failure of the store loses anything, and training waits for none.
"""

import contextlib
import dataclasses
import functools
import json
import os
import shlex
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from cnnexp.backends.protocol import Backend
from cnnexp.datasets import Dataset, photograph
from cnnexp.errors import BackendUnavailable, CheckpointError, ConfigError, Diverged, TrackingError, first_line, refused
from cnnexp.measuring import environment
from cnnexp.measuring.explanation import changes, sides_of
from cnnexp.measuring.interference import Interference
from cnnexp.network import Network
from cnnexp.system.registry import VARIABLE, files
from cnnexp.tracking import events, verdict
from cnnexp.tracking.events import JOURNAL, MODEL, Journal, note, open_journal
from cnnexp.tracking.folder import RunLock
from cnnexp.tracking.metrics import class_metrics, default_name, epoch_metrics, flatten, predicted_classes, summary
from cnnexp.tracking.pipe import ANSWER_S, NoAnswerYet, Recorder, RecorderDied
from cnnexp.training.checkpoint import as_result, holds_checkpoints, plain_result
from cnnexp.training.loop import EpochResult, Observer

PREDICTIONS = "predictions.npz"  # of the test split: labels and predicted, integers (N,)
CONFIG, PROFILE = "config.json", "profile.json"
REPORT = "report.md"  # the verdict, and MLflow's note of the run
START_S = 5.0  # as long does a sweep wait for a store that says nothing
MOST_REASONS = 2  # that a verdict gives for a speedup; `cnnexp explain` gives all


class Record(ABC):
    """The journal of a folder, a run's or a sweep's, and the recorder that brings the store up to it.

    ConfigError is raised where another run is in the folder now, or it holds one that is not `earlier`.

    Args:
        folder: where the journal, the figures and the model go; made here, and locked until the end of the record.
        config: the resolved config, section -> key -> value, with secrets left out.
        overrides: what the user typed, e.g. `["model.filters=32"]`; part of the name, where none is given.
        recorder: None records in the folder alone.
        parent: `begun` of the sweep's record.
        contended: whether other runs compute at the same time; then no speedup is claimed.
        earlier: the folder of the run that this one goes on with, perhaps its own, whose journal is then continued;
            where the config is the same, the MLflow run goes on, too.
    """

    kind, key = events.RUN, "hydra.run.dir"  # of the config: names the folder
    id: str | None = None  # of the MLflow run
    begun: Mapping[str, Any] = {}  # what `Store.begin` is given
    lost: TrackingError | None = None  # why the store lacks something

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        overrides: Sequence[str] = (),
        recorder: Recorder | None = None,
        name: str | None = None,
        parent: Mapping[str, Any] | None = None,
        contended: bool = False,
        earlier: Path | None = None,
    ) -> None:
        self.folder, self.name, self.contended = Path(folder), name or default_name(config, overrides), contended
        self.metrics: dict[str, float] = {}  # what is recorded once, at the end
        self.tags: dict[str, str] = {}  # that become known only after `begin`
        self.artifacts: list[Path] = []  # beside the usual ones: files and folders, stored if they exist at the end
        self.verdict: list[verdict.Row] = []  # what it ends with; empty without an epoch
        # takes what a finished run's verdict says: its results before the store has them, then where they are
        self.show: Callable[[Sequence[verdict.Row]], None] = lambda rows: None
        self._config, self._recorder, self._parent = config, recorder, parent
        self.folder.mkdir(parents=True, exist_ok=True)
        goes_on = earlier is not None and Path(earlier).resolve() == self.folder.resolve()
        self._locks = self._lock(earlier, goes_on)
        before = Journal(self.folder if earlier is None else earlier)
        begun = before.read().facts["begin"] if earlier is not None else {}
        self._hash = environment.config_hash(config)
        same = bool(begun) and begun["tags"].get("config_hash") == self._hash
        self._key = begun["key"] if same else uuid.uuid4().hex
        # what is recorded of an epoch stays, though it may be trained again: its checkpoint may not have been written
        self._known = before.epochs if same else {}
        self._missing = {} if goes_on else self._known  # of them, what this journal lacks
        self._journal = open_journal(self.folder / JOURNAL, goes_on)
        facts = {"overrides": list(overrides), "config": config, "config_hash": self._hash, "contended": contended}
        note(self._journal, "job", schema=events.SCHEMA, kind=self.kind, name=self.name, **facts)

    def _lock(self, earlier: Path | None, goes_on: bool) -> contextlib.ExitStack:
        """Return what unlocks the folder, and the one that it goes on from, once they are locked."""
        with contextlib.ExitStack() as locks:
            locks.callback(RunLock(self.folder, key=self.key).release)
            if earlier is not None and not goes_on:
                with contextlib.suppress(OSError):  # a folder that nobody can write to
                    locks.callback(RunLock(Path(earlier)).release)
            if not goes_on and holds_run(self.folder):
                advice = "choose another folder, or go on with that run by trainer.resume=auto"
                raise ConfigError(f"{self.key}={self.folder}: holds another run; {advice}")
            return locks.pop_all()

    def _begin(self, tags: Mapping[str, str], params: Mapping[str, str], **more: Any) -> None:
        """Begin the record: what is given and made up here is what `Store.begin` is given."""
        own = {"kind": self.kind, "config_hash": self._hash, events.FOLDER: str(self.folder.resolve())}
        self.begun = {"name": self.name, "params": params, "tags": {**own, **tags}, **more, "key": self._key}
        note(self._journal, "begin", **self.begun)

    def _take_id(self, run_id: str | None) -> None:
        if run_id is not None and self.id is None:
            self.id = run_id
            note(self._journal, "recorded", run_id=run_id)

    def _end(self, status: str, drawn: bool) -> None:
        """Draw the figures where they are wanted, conclude, end the journal, wait for the store to have it all."""
        try:
            if self._recorder is not None and self.begun:
                self._recorder.ask("follow", folder=str(self.folder))
                if drawn:
                    self._draw()  # while the recorder gets ready, and saves the model
        except TrackingError as lost:
            self.lost = lost
        except Exception as failure:
            self.lost = TrackingError(
                f"the record cannot be completed: {type(failure).__name__}: {first_line(failure)}"
            )
        try:
            recorded = self._recorded()  # for the id, which the verdict names
        finally:
            if (page := self._conclude(status)) is not None:
                (self.folder / REPORT).write_text(page, encoding="utf-8")
                self.tags["mlflow.note.content"] = page
            places = ((path, path.name if os.path.isdir(path) else None) for path in self.artifacts)
            artifacts = [(os.path.relpath(path, self.folder), target) for path, target in places]
            facts = {"status": status, "tags": self.tags, "metrics": self.metrics, "artifacts": artifacts}
            note(self._journal, "finish", **facts, time_ms=int(time.time() * 1000))
        if recorded and self._recorded():
            note(self._journal, "stored")

    def _recorded(self) -> bool:
        """Wait until the store has all that the journal has; return whether it does."""
        try:
            if self._recorder is not None and self.begun:
                self._take_id(self._recorder.call("follow", folder=str(self.folder)))
                return True
        except TrackingError as lost:
            self.lost = lost
        return False

    @abstractmethod
    def _draw(self) -> None:
        """Draw the figures."""

    @abstractmethod
    def _conclude(self, status: str) -> str | None:
        """Come to the verdict; return it as Markdown, None where there is nothing to say."""


class Run(Record, Observer, contextlib.AbstractContextManager["Run"]):
    """Context manager: one run's journal, MLflow record and figures.

    Leaving the block ends the run: FINISHED, KILLED by Ctrl-C or SIGTERM, FAILED by any other exception, which goes on.
    """

    # once begun: the data, the results so far, and by the name of a backend the share of its training step by part
    _dataset: Dataset
    epochs: list[EpochResult]
    parts: dict[str, Mapping[str, float]]
    profile: Mapping[str, Any] | None = None  # where the time went
    interference: Interference | None = None  # what other work took of the time
    course = verdict.Course()  # how the run began and ended
    model: Path | None = None  # the checkpoint that is the run's model, should it end now, for MLflow to load
    augmented: np.ndarray | None = None  # the first images as the first epoch sees them
    _skipped = False

    def skip_if_finished(self) -> bool:
        """Return whether the store has a finished run of the same config; this run then takes over its metrics."""
        if self._recorder is not None:
            with contextlib.suppress(NoAnswerYet):
                metrics = self._recorder.call("finished", within_s=ANSWER_S, config_hash=self._hash)
                self._skipped = metrics is not None
                self.metrics.update(metrics or {})
        return self._skipped

    def begin(self, dataset: Dataset, network: Network, backend: Backend, workers: int = 1) -> None:
        """Begin the record, once data and backend are made; raise TrackingError where no store is there or answers."""
        if self._recorder is not None:
            self._recorder.check()
            (self.folder / CONFIG).write_text(json.dumps(self._config, indent=2) + "\n", encoding="utf-8")
        self._dataset, self.epochs, self.parts = dataset, [], {}
        self.metrics["model/parameters"] = network.parameter_count
        names = {group: str(self._config[group]["name"]) for group in ("backend", "model", "dataset", "optimizer")}
        run = {"seed": str(self._config["trainer"]["seed"]), "timing.contended": str(self.contended).lower()}
        place = {"device": backend.device_name, "threads": str(backend.threads), "workers": str(workers)}
        plugins = {"plugins": os.environ[VARIABLE]} if os.environ.get(VARIABLE) else {}
        tags = {**names, **run, **place, **plugins, **backend.facts}  # facts of a GPU: what it can do, driver, toolkit
        splits = {name: getattr(dataset, name) for name in ("train", "test", "validation")}
        sizes = {name: len(split.labels) for name, split in splits.items() if split is not None}
        described = {"name": dataset.name, "sha256": dataset.sha256, "source": dataset.source, "profile": sizes}
        self._begin(tags, flatten(self._config), dataset=described, parent=self._parent)
        for epoch, entry in sorted(self._missing.items()):  # for who goes on with this one, should it end untrained
            note(self._journal, "epoch", epoch=epoch, **entry)
        self._follow()

    def wait(self) -> None:
        """Have a recorder that is not ready keep still for a while, so that nothing but training runs.

        TrackingError is raised where the store is known by now to be one that cannot be opened or written.
        """
        if self._recorder is not None and (look := self._follow()) is not None:
            if not look.done():
                self._recorder.hold()
            elif (failure := look.exception()) is not None and not isinstance(failure, RecorderDied):
                raise failure

    @functools.cached_property
    def _look(self) -> photograph.Look | None:
        train = self._dataset.train
        return photograph.describe(train.images, train.labels, len(self._dataset.classes))

    @property
    def facts(self) -> dict[str, Any]:
        """What names this run and its data, for a reader of its checkpoints."""
        run = {"name": self.name, "config_hash": self._hash, "run_id": self.id}
        pixels = str(self._dataset.train.images.dtype)
        data = {"classes": list(self._dataset.classes), "pixels": pixels, "look": self._look}
        return {**run, **data, "plugins": files("layer")}

    def resume(self, history: Sequence[EpochResult]) -> None:
        """Take over the epochs that an earlier process has trained, the first of this run to the last."""
        self.epochs = list(history)
        for result in history:
            self._note_epoch(result)
        self._follow()

    def finished(self, result: EpochResult) -> None:
        """Record one epoch; a store that cannot be written ends no training."""
        entry = self._known.get(result.epoch)
        if entry is not None and entry["result"] is not None:
            result = dataclasses.replace(as_result(entry["result"]), scores=result.scores)
        self.epochs.append(result)
        self._note_epoch(result)
        self._follow()

    def _note_epoch(self, result: EpochResult) -> None:
        """Write an epoch into the journal, unless it is there from before."""
        if result.epoch in self._known:
            return
        metrics, time_ms = epoch_metrics(result, self.contended), int(time.time() * 1000)
        if scored := len(result.scores):
            metrics |= class_metrics(result.scores, self._dataset.test.labels[:scored], self._dataset.classes)
        note(self._journal, "epoch", epoch=result.epoch, metrics=metrics, time_ms=time_ms, result=plain_result(result))

    def _follow(self) -> Future[Any] | None:
        """Have the recorder look into the journal, however the store is; note the id of the run once it is known."""
        if self._recorder is None or not self.begun:
            return None
        try:
            look = self._recorder.follow(self.folder)
        except TrackingError:  # none can be started now; it is tried again at the next epoch, and at the end
            return None
        if self.id is None and look.done() and look.exception() is None:
            self._take_id(look.result())
        return look

    def add_profile(self, profile: Mapping[str, Any]) -> None:
        """Store where the time went: `ledger.report`."""
        self.profile = profile
        (self.folder / PROFILE).write_text(json.dumps(profile, indent=2) + "\n", encoding="utf-8")

    def evaluated(self, scores: np.ndarray) -> None:
        """Give the last epoch its scores on the test split, which no checkpoint keeps."""
        self.epochs[-1] = dataclasses.replace(self.epochs[-1], scores=scores)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        status = "SKIPPED" if self._skipped else _status(error)
        if error is not None:
            self.tags["error"] = f"exit code {error}" if isinstance(error, SystemExit) else first_line(error)
        if isinstance(error, Diverged):
            self.tags["diverged"] = "true"
        with self._locks, self._journal:
            if self.begun and self.epochs:
                self._summarize(status)
            self._end(status, drawn=status == "FINISHED")
        if self.lost is not None and error is None:
            advice = f"{environment.program_name()} sync {self.folder} sends what is missing"
            raise TrackingError(f"{self.lost}; all {len(self.epochs)} epochs are in {self.folder / JOURNAL}; {advice}")

    def _summarize(self, status: str) -> None:
        """Come to the results of the epochs, of which there is one at least."""
        baseline, target = (self._config["trainer"].get(key) for key in ("baseline", "target"))
        self.metrics.update(summary(self.epochs, self.contended, target))
        if self.interference is not None:
            self.metrics["time/others_share"] = self.interference.others
            if self.interference.known:
                self.tags[events.DISTURBED] = str(self.interference.disturbed).lower()
        conditions = self.contended, self.interference, self.parts, self.course
        self.verdict = list(verdict.run_rows(self.epochs, self.metrics, baseline, *conditions))
        if target is not None:
            self.verdict.append(("target", verdict.to_target(target, self.metrics)))
        if self.profile is not None:
            self.verdict += [("why", text) for text in changes(sides_of(self.profile))[:MOST_REASONS]]
        if status != "FINISHED":
            self.verdict.insert(0, ("status", f"{status} after {self.epochs[-1].epoch} epochs"))
            return
        predicted = predicted_classes(self.epochs[-1].scores)
        labels = self._dataset.test.labels[: len(predicted)]
        np.savez_compressed(self.folder / PREDICTIONS, labels=labels, predicted=predicted)
        if self._recorder is not None and self.model is not None:
            self._save_model(self.model)
        self.show(self.verdict)

    def _conclude(self, status: str) -> str | None:
        if not self.verdict:
            return None
        below = self.folder.resolve().is_relative_to(environment.outputs_dir().resolve())  # where ids are looked for
        run = self.id if self.id and below else shlex.quote(str(self.folder))
        offers = ("ui", self.id), (f"predict {run} IMAGE", run), (f"explain {run}", self.profile)
        more = (f"{environment.program_name()} {command}" for command, known in offers if known is not None)
        where = [("folder", str(self.folder)), *([("run", self.id)] if self.id else []), ("more", " | ".join(more))]
        self.verdict += where
        if status == "FINISHED":
            self.show(where)
        return verdict.markdown(self.name, self.verdict)

    def _save_model(self, checkpoint: Path) -> None:
        """Leave for the recorder what it makes a model of."""
        test, folder = self._dataset.test.images, self.folder / MODEL
        folder.mkdir(exist_ok=True)
        (folder / events.EXAMPLE).write_text(json.dumps(test[:1].tolist()), encoding="utf-8")
        takes = {"shape": list(test.shape[1:]), "pixels": str(test.dtype), "classes": len(self._dataset.classes)}
        path, step = os.path.relpath(checkpoint, self.folder), self.epochs[-1].epoch
        note(self._journal, "model", checkpoint=path, **takes, step=step)

    def _draw(self) -> None:
        from cnnexp.tracking import figures  # loads Matplotlib

        folder, classes = self.folder / "figures", self._dataset.classes
        metrics = [{"epoch": e.epoch, **epoch_metrics(e, self.contended)} for e in self.epochs]
        baseline_s = [e.comparison.seconds_per_image * e.train.count if e.comparison else None for e in self.epochs]
        with np.load(self.folder / PREDICTIONS, allow_pickle=False) as arrays:
            labels, predicted = arrays["labels"], arrays["predicted"]
        figures.save(figures.learning(metrics), folder / "learning.png", self.name)
        figures.save(figures.curves(metrics), folder / "curves.png")
        figures.save(figures.epoch_time(metrics, baseline_s), folder / "epoch_time.png", self.name)
        figures.save(figures.confusion(labels, predicted, classes), folder / "confusion.png", self.name)
        figures.save(figures.recall(labels, predicted, classes), folder / "recall.png", self.name)
        if self.augmented is not None:
            figures.draw_augmented(folder / "augmented.png", self.augmented, self.name)
        if self.profile is not None:
            figures.save(figures.ledger(self.profile), folder / "profile.png", self.name)
            if self.profile["layered"]:
                figures.save(figures.explained(sides_of(self.profile), self.name), folder / "explain.png")


def holds_run(folder: Path) -> bool:
    """Return whether a folder holds what a run has trained; a job that failed before leaves a journal alone."""
    return Journal(folder).read().has_results or holds_checkpoints(folder)


def save_epochs(folder: Path, epochs: Sequence[EpochResult]) -> None:
    """Write the journal of epochs that were trained without one, for checkpoints in the folder to go on from.

    CheckpointError is raised where the folder holds a run's journal, or cannot be written.
    """
    with refused(CheckpointError, f"{folder / JOURNAL}: cannot be written"):
        if Journal(folder).read().facts["config"]:
            raise CheckpointError(f"{folder}: holds a run; choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        with open_journal(folder / JOURNAL, goes_on=False) as journal:
            for result in epochs:
                note(journal, "epoch", epoch=result.epoch, metrics=epoch_metrics(result), result=plain_result(result))


def _status(error: BaseException | None) -> str:
    if error is None:
        return "FINISHED"
    if isinstance(error, BackendUnavailable):
        return events.LACKING
    return "KILLED" if isinstance(error, KeyboardInterrupt | SystemExit) else "FAILED"
