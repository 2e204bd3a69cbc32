"""The record of a run, as the training process sees it: a journal in a folder, and MLflow through a `Recorder`.

`Run` has results recorded as metrics, tags and figures. Every epoch is first a line of `journal.jsonl`, so no failure
of the store loses it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from cnnexp.backends.protocol import Backend
from cnnexp.datasets import Dataset, photograph
from cnnexp.errors import BackendUnavailable, ConfigError, Diverged, TrackingError
from cnnexp.measuring import environment
from cnnexp.measuring.explanation import changes, side_of
from cnnexp.measuring.interference import Interference
from cnnexp.network import Network
from cnnexp.system.registry import VARIABLE, files
from cnnexp.tracking import verdict
from cnnexp.tracking.events import DISTURBED, FOLDER, JOURNAL, LACKING, note, open_journal, read_journal, store_status
from cnnexp.tracking.folder import Claim
from cnnexp.tracking.metrics import (
    baseline_epoch_s,
    default_name,
    epoch_metrics,
    flatten,
    predicted_classes,
    summary,
)
from cnnexp.tracking.pipe import ANSWER_S, NoAnswerYet, Recorder, RecorderDied
from cnnexp.training.checkpoint import holds_checkpoints
from cnnexp.training.loop import EpochResult, Progress

log = logging.getLogger(__name__)
T = TypeVar("T")
PREDICTIONS = "predictions.npz"  # of the test split: labels and predicted, integers (N,)
PROFILE = "profile.json"
REPORT = "report.md"  # the verdict, and MLflow's note of the run
MODEL = "model"  # folder of the run's
FIGURES = "cnnexp.tracking.figures"  # loads Matplotlib
START_S = 5.0  # a store that says nothing for so long is told of a run that trains
MOST_TRIES = 5  # recorders that die of the same calls
MOST_REASONS = 2  # that a verdict gives for a speedup; `cnnexp explain` gives all


class Run:
    """Context manager: one run's journal, MLflow record and figures.

    Leaving the block ends the run: FINISHED, KILLED after Ctrl-C or SIGTERM, FAILED after any other exception, which
    goes on to the caller.

    Args:
        folder: where the journal, the figures and the model go; made here.
        config: the resolved config, section -> key -> value, with secrets left out.
        overrides: what the user typed, e.g. `["model.filters=32"]`; part of the name.
        recorder: None records in the folder alone.
        name: None makes one up from the config.
        parent: id of the sweep's MLflow run.
        contended: whether other runs compute at the same time; then no speedup is claimed.
        earlier: the folder of the run that this one goes on with, perhaps its own, whose journal is then continued;
            where the config is the same, the MLflow run goes on, too.

    Raises:
        ConfigError: another run is in the folder now, or the folder holds one that is not `earlier`.

    Attributes:
        id: of the MLflow run, None without one.
        contended: as given.
        epochs: the results so far.
        metrics: what is recorded once, at the end.
        profile: where the time went, None unless asked for.
        interference: what other work took of the time, None where it is not known.
        parts: by the name of a backend, the share of its training step by part.
        course: how the run began and ended.
        verdict: what the run ends with, once it has ended; empty without an epoch.
    """

    _dataset: Dataset  # once begun

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Mapping[str, Any]],
        overrides: Sequence[str] = (),
        recorder: Recorder | None = None,
        name: str | None = None,
        parent: str | None = None,
        contended: bool = False,
        earlier: Path | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.name = name or default_name(config, overrides)
        self.id: str | None = None
        self.epochs: list[EpochResult] = []
        self.metrics: dict[str, float] = {}
        self._tags: dict[str, str] = {}
        self.profile: Mapping[str, Any] | None = None
        self.interference: Interference | None = None
        self.parts: dict[str, Mapping[str, float]] = {}
        self.verdict: list[verdict.Row] = []
        self.course = verdict.Course()
        self.contended = contended
        self._config, self._recorder, self._parent = config, recorder, parent
        self._begun: Callable[[float | None], str] | None = None
        self._patience_s: float | None = START_S  # None: until the recorder is called dead
        self._skipped = False
        self._look: photograph.Look | None = None
        self._artifacts: list[tuple[str, str | None]] = []
        self._model: Path | None = None
        self._behind = False  # whether the recorder was not told all
        self._lost: TrackingError | None = None
        self.folder.mkdir(parents=True, exist_ok=True)
        goes_on = earlier is not None and Path(earlier).resolve() == self.folder.resolve()
        with contextlib.ExitStack() as claims:
            claims.callback(Claim(self.folder).release)
            if earlier is not None and not goes_on:
                with contextlib.suppress(OSError):  # a folder that nobody can write to
                    claims.callback(Claim(Path(earlier)).release)
            if not goes_on and holds_run(self.folder):
                raise ConfigError(
                    f"hydra.run.dir={self.folder}: holds another run; choose another folder, or go on with that run by "
                    "trainer.resume=auto"
                )
            self._claims = claims.pop_all()
        wanted = environment.config_hash(config)
        before = read_journal(Path(earlier)) if earlier is not None else None
        same = before is not None and before["config_hash"] == wanted
        self._key = before["begin"].get("key") if before is not None and same else None
        self._goes_on = self._key is not None
        self._key = self._key or uuid.uuid4().hex
        # what is recorded of an epoch stays, though it may be trained again: its checkpoint may not have been written
        self._known: dict[int, tuple[dict[str, float], int]] = {}
        if before is not None and self._goes_on:
            metrics = ({**entry} for entry in before["epochs"])
            self._known = {(epoch := entry.pop("epoch")): (entry, before["times_ms"][epoch]) for entry in metrics}
        self._noted = set(self._known) if goes_on else set[int]()
        self._journal = open_journal(self.folder / JOURNAL, goes_on)
        self._note(
            "job",
            name=self.name,
            overrides=list(overrides),
            config=config,
            config_hash=wanted,
            contended=contended,
        )

    def __enter__(self) -> Self:
        return self

    def skip_if_finished(self) -> bool:
        """Return whether the store has a finished run of the same config; this run then takes over its metrics."""
        if self._recorder is None:
            return False
        metrics = None
        with contextlib.suppress(NoAnswerYet):
            metrics = self._recorder.ask("finished", config_hash=environment.config_hash(self._config))(ANSWER_S)
        self._skipped = metrics is not None
        self.metrics.update(metrics or {})
        return self._skipped

    def begin(self, dataset: Dataset, network: Network, backend: Backend, workers: int = 1) -> None:
        """Ask for an MLflow run, once the data is there and the backend made; `wait` for it after compiling."""
        self._dataset = dataset
        self._look = photograph.describe(dataset.train.images, dataset.train.labels, len(dataset.classes))
        self.metrics["model/parameters"] = network.parameter_count
        call = {
            "name": self.name,
            "params": flatten(self._config),
            "tags": {
                "kind": "run",
                **{group: str(self._config[group]["name"]) for group in ("backend", "model", "dataset", "optimizer")},
                "seed": str(self._config["trainer"]["seed"]),
                "device": backend.device_name,
                "threads": str(backend.threads),
                "workers": str(workers),
                "config_hash": environment.config_hash(self._config),
                "timing.contended": str(self.contended).lower(),
                FOLDER: str(self.folder.resolve()),
                **({"plugins": os.environ[VARIABLE]} if os.environ.get(VARIABLE) else {}),
                **backend.facts,  # of a GPU: what it can do, driver and toolkit
            },
            "dataset": {
                "name": dataset.name,
                "sha256": dataset.sha256,
                "source": dataset.source,
                "profile": {
                    name: len(split.labels)
                    for name in ("train", "test", "validation")
                    if (split := getattr(dataset, name)) is not None
                },
            },
            "parent": self._parent,
            "key": self._key,
        }
        self._note("begin", **call)
        for epoch in sorted(self._known):  # for who goes on with this one, should it end before it trains
            self._note_once(epoch, *self._known[epoch])
        if self._recorder is not None:
            try:
                self._begun = self._recorder.ask("begin", goes_on=self._goes_on, **call)
            except RecorderDied:
                self._begun = self._begin_again()

    def wait(self) -> None:
        """Return once the store has the run, so that nothing but training runs while training is timed.

        A store that stands still is waited for once; from then on it is asked in passing, and told all when it answers.

        Raises:
            TrackingError: the store cannot be opened or written, and nothing is trained yet.
        """
        if self._begun is not None:
            importlib.import_module(FIGURES)  # while the store is opened
        tries = MOST_TRIES
        while self._begun is not None:
            begun, self._begun = self._begun, None
            try:
                self.id = begun(self._patience_s)
            except NoAnswerYet as silent:
                if self._patience_s:
                    log.warning("%s; the run goes on, and is recorded when it answers", silent)
                self._begun, self._patience_s = begun, 0.0
                return
            except TrackingError as failure:
                tries -= 1
                passing = self._patience_s == 0.0
                if not tries or not (passing or isinstance(failure, RecorderDied)):
                    raise
                self._begun = self._begin_again()
                if passing:
                    return
            else:
                self._note("recorded", run_id=self.id)
                if self.epochs:
                    self._post("catch_up", folder=str(self.folder))

    def _begin_again(self) -> Callable[[float | None], str]:
        """Have a recorder, another one where it has died, begin the run as its journal says."""
        assert self._recorder is not None
        while True:
            with contextlib.suppress(RecorderDied):
                if self._recorder.alive:
                    self._recorder.reopen()
                else:
                    self._recorder.restart()
                return self._recorder.ask("catch_up", folder=str(self.folder))

    @property
    def facts(self) -> dict[str, Any]:
        """What names this run and its data, for a reader of its checkpoints."""
        return {
            "name": self.name,
            "config_hash": environment.config_hash(self._config),
            "run_id": self.id,
            "classes": list(self._dataset.classes),
            "pixels": str(self._dataset.train.images.dtype),
            "look": self._look,
            "plugins": files("layer"),
        }

    def resume(self, history: Sequence[EpochResult]) -> None:
        """Take over the epochs that an earlier process has trained, the first of this run to the last."""
        if not history:
            return
        self.wait()
        self.epochs = list(history)
        for result in history:
            self._note_epoch(result)
        self._post("catch_up", folder=str(self.folder))

    def progressed(self, progress: Progress) -> None:
        """Record whole epochs alone."""

    def finished(self, result: EpochResult) -> None:
        """Record one epoch; a store that cannot be written ends no training."""
        try:
            self.wait()
        except TrackingError as lost:
            self._lost = lost
        self.epochs.append(result)
        metrics, time_ms = self._note_epoch(result)
        self._post("log", run_id=self.id, metrics=metrics, step=result.epoch, time_ms=time_ms)

    def _note_epoch(self, result: EpochResult) -> tuple[dict[str, float], int]:
        """Write an epoch into the journal, once; return its metrics and when it was, as the journal has them."""
        fresh = epoch_metrics(result, self.contended), int(time.time() * 1000)
        metrics, time_ms = self._known.get(result.epoch, fresh)
        self._note_once(result.epoch, metrics, time_ms)
        return metrics, time_ms

    def _note_once(self, epoch: int, metrics: dict[str, float], time_ms: int) -> None:
        if epoch not in self._noted:
            self._noted.add(epoch)
            self._note("epoch", epoch=epoch, metrics=metrics, time_ms=time_ms)

    def summarize(self, metrics: Mapping[str, float]) -> None:
        """Add metrics that are recorded once, e.g. `{"time/compile_s": 1.2}`."""
        self.metrics.update(metrics)

    def tag(self, name: str, value: str) -> None:
        """Add a tag that becomes known only after `begin`."""
        self._tags[name] = value

    def add_profile(self, profile: Mapping[str, Any]) -> None:
        """Store where the time went: `ledger.report`."""
        self.profile = profile
        (self.folder / PROFILE).write_text(json.dumps(profile, indent=2) + "\n", encoding="utf-8")

    def set_model(self, checkpoint: Path) -> None:
        """Say which checkpoint is the run's model, should the run end now; MLflow gets it as one that it can load."""
        self._model = checkpoint

    def evaluated(self, scores: np.ndarray) -> None:
        """Give the last epoch its scores on the test split, which no checkpoint keeps."""
        self.epochs[-1] = dataclasses.replace(self.epochs[-1], scores=scores)

    def add_artifact(self, path: Path, target: str | None = None) -> None:
        """Store a file or folder, if it exists when the run ends, under the folder `target` of its artifacts."""
        self._artifacts.append((str(path), target))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        status = "SKIPPED" if self._skipped else _status(error)
        tags = self._tags if error is None else {**self._tags, "error": _one_line(error)}
        if isinstance(error, Diverged):
            tags["diverged"] = "true"
        with contextlib.ExitStack() as stack:
            stack.callback(self._claims.close)
            stack.enter_context(self._journal)
            if self.epochs:
                self._summarize(status, tags)
            self._patience_s = None
            try:
                self.wait()  # for the id, which the verdict names
            except TrackingError as lost:
                self._lost = lost
            if self.epochs:
                tags["mlflow.note.content"] = self._conclude(status)
            time_ms = int(time.time() * 1000)
            self._note("finish", status=status, tags=tags, metrics=self.metrics, time_ms=time_ms)
            if self._recorder is not None and self.id is not None and self._lost is None:
                try:
                    self._insist(functools.partial(self._tell_end, status, tags, time_ms))
                    self._note("stored")
                except TrackingError as lost:
                    self._lost = lost
        if self._lost is not None and error is None:
            raise TrackingError(
                f"{self._lost}; all {len(self.epochs)} epochs are in {self.folder / JOURNAL}; "
                f"{environment.program_name()} sync {self.folder} sends them"
            )

    def _summarize(self, status: str, tags: dict[str, str]) -> None:
        self.metrics.update(summary(self.epochs, self.contended, self._config["trainer"].get("target")))
        if self.interference is not None:
            self.metrics["time/others_share"] = self.interference.others
            if self.interference.known:
                tags[DISTURBED] = str(self.interference.disturbed).lower()
        if status == "FINISHED":
            self._save_predictions()

    def _conclude(self, status: str) -> str:
        """Come to the verdict and write it into the folder; return it as Markdown."""
        baseline = self._config["trainer"].get("baseline")
        self.verdict = verdict.run_rows(
            self.epochs,
            self.metrics,
            baseline,
            self.contended,
            self.interference,
            self.parts,
            self.course,
        )
        target = self._config["trainer"].get("target")
        if target is not None:
            self.verdict.append(("target", verdict.to_target(target, self.metrics)))
        if self.profile is not None:
            sides = [side_of(side) for side in (self.profile, self.profile.get("baseline")) if side]
            self.verdict += [("why", text) for text in changes(sides)[:MOST_REASONS]]
        if status != "FINISHED":
            self.verdict.insert(0, ("status", f"{status} after {self.epochs[-1].epoch} epochs"))
        self.verdict.append(("folder", str(self.folder)))
        if self.id is not None:
            self.verdict.append(("run", self.id))
        run = self.id or self.folder
        told = ("ui", self.id), (f"predict {run} IMAGE", run), (f"explain {run}", self.profile)
        commands = [command for command, known in told if known is not None]
        more = (f"{environment.program_name()} {command}" for command in commands)
        self.verdict.append(("more", " | ".join(more)))
        page = verdict.markdown(self.name, self.verdict)
        (self.folder / REPORT).write_text(page, encoding="utf-8")
        self.add_artifact(self.folder / REPORT)
        return page

    def _tell_end(self, status: str, tags: Mapping[str, str], time_ms: int) -> None:
        """Have the recorder end the run: its last metrics, figures, model and artifacts."""
        assert self._recorder is not None
        recorder = self._recorder
        if self._behind:
            self._catch_up()
        elif self.epochs:
            recorder.post("log", run_id=self.id, metrics=self.metrics, step=0, time_ms=time_ms)
        if status == "FINISHED":
            saved = self._save_model(recorder) if self._model is not None else None
            self._draw()  # while the recorder saves the model
            if saved is not None:
                saved()
        config = self.folder / "config.json"
        config.write_text(json.dumps(self._config, indent=2) + "\n", encoding="utf-8")
        self.add_artifact(config)
        artifacts = [(path, target) for path, target in dict.fromkeys(self._artifacts) if Path(path).exists()]
        recorder.call("finish", run_id=self.id, status=store_status(status), tags=tags, artifacts=artifacts)

    def _catch_up(self) -> str:
        """Have the recorder bring the store up to the journal; return the id of the run there."""
        assert self._recorder is not None
        return self._recorder.call("catch_up", folder=str(self.folder))

    def _insist(self, call: Callable[[], T]) -> T:
        """Return what calls of the recorder return; where it dies, another takes over, from the journal."""
        assert self._recorder is not None
        for left in reversed(range(MOST_TRIES)):
            try:
                if not self._recorder.alive:
                    self._recorder.restart()
                    self._recorder.post("catch_up", folder=str(self.folder))
                return call()
            except RecorderDied:
                if not left:
                    raise
        raise AssertionError

    def _save_model(self, recorder: Recorder) -> Callable[[], None]:
        test = self._dataset.test.images
        return recorder.ask(
            "save_model",
            run_id=self.id,
            checkpoint=str(self._model),
            folder=str(self.folder / MODEL),
            example=test[:1].tolist(),
            pixels=str(test.dtype),
            classes=len(self._dataset.classes),
            step=self.epochs[-1].epoch,
        )

    def _draw(self) -> None:
        """Draw the figures."""
        self.add_artifact(self.folder / PREDICTIONS)
        folder = self.folder / "figures"
        draw(
            "draw_run",
            folder=str(folder),
            epochs=[{"epoch": e.epoch, **epoch_metrics(e, self.contended)} for e in self.epochs],
            baseline_s=[baseline_epoch_s(e) for e in self.epochs],
            predictions=str(self.folder / PREDICTIONS),
            classes=list(self._dataset.classes),
            title=self.name,
        )
        if self.profile is not None:
            draw("draw_profile", folder=str(folder), profile=self.profile, title=self.name)
            self.add_artifact(self.folder / PROFILE)
        self.add_artifact(folder, "figures")

    def _save_predictions(self) -> None:
        predicted = predicted_classes(self.epochs[-1].scores)
        labels = self._dataset.test.labels[: len(predicted)]
        np.savez_compressed(self.folder / PREDICTIONS, labels=labels, predicted=predicted)

    def _post(self, method: str, **arguments: Any) -> None:
        """Send to the store what is in the journal; what does not reach the recorder is caught up with at the end."""
        if self._recorder is None or self.id is None or self._lost is not None:
            return
        try:
            if not self._recorder.alive:
                self._recorder.restart()
                method, arguments = "catch_up", {"folder": str(self.folder)}
            self._behind |= not self._recorder.post(method, **arguments)
            if method == "log":
                self._recorder.settle()
        except RecorderDied:
            self._behind = True  # another takes over at the next call
        except TrackingError as lost:
            self._lost = lost

    def _note(self, event: str, **facts: Any) -> None:
        note(self._journal, event, **facts)


def draw(kind: str, **arguments: Any) -> None:
    """Call a function of `tracking.figures`; raise TrackingError where it cannot write."""
    try:
        getattr(importlib.import_module(FIGURES), kind)(**arguments)
    except Exception as failure:
        raise TrackingError(
            f"the record of the run cannot be completed: {type(failure).__name__}: {failure}"
        ) from failure


def holds_run(folder: Path) -> bool:
    """Return whether a folder holds what a run has trained; a job that failed before leaves a journal alone."""
    return holds_checkpoints(folder) or bool(read_journal(folder)["epochs"])


def _status(error: BaseException | None) -> str:
    if error is None:
        return "FINISHED"
    if isinstance(error, BackendUnavailable):
        return LACKING
    return "KILLED" if isinstance(error, KeyboardInterrupt | SystemExit) else "FAILED"


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
