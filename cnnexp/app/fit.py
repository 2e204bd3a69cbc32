"""Training in one call, from Python: what `python -m cnnexp` does, without a config and without Hydra."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cnnexp.app.config import GROUPS, Settings, Tracking, Trainer, build
from cnnexp.app.console import LINE, Display
from cnnexp.app.resume import find_earlier
from cnnexp.app.run import train
from cnnexp.backends import backend_class
from cnnexp.backends.protocol import Backend, State
from cnnexp.datasets import Dataset, Source
from cnnexp.measuring.confidence import Interval, median_interval
from cnnexp.measuring.environment import outputs_dir
from cnnexp.measuring.interference import Interference
from cnnexp.network import Network
from cnnexp.network.models import Model
from cnnexp.optimizers import SGD, Optimizer
from cnnexp.tracking import verdict
from cnnexp.tracking.address import store_uri
from cnnexp.tracking.journal import Run, save_epochs
from cnnexp.tracking.metrics import epoch_metrics, summary
from cnnexp.tracking.pipe import Recorder
from cnnexp.training import checkpoint
from cnnexp.training.augment import describe
from cnnexp.training.loop import EpochResult

if TYPE_CHECKING:
    from cnnexp.tracking.figures import Figure


@dataclass(frozen=True, repr=False)
class Fit:
    """A trained network, and what its training was.

    Attributes:
        network: what was trained.
        state: of the program after the last epoch: `parameters`, and the optimizer's.
        epochs: what every epoch was.
        backend, baseline: their names; the baseline's is None without one.
        interference: what other work took of the time, None where it is not known.
        run_id: of the MLflow run, None unless recorded.
    """

    network: Network
    state: State
    epochs: tuple[EpochResult, ...]
    backend: str
    baseline: str | None
    interference: Interference | None
    run_id: str | None
    _checkpoint: checkpoint.Checkpoint = field(compare=False)
    _course: verdict.Course = field(compare=False)

    @property
    def accuracy(self) -> float:
        """Of the test split after the last epoch, 0 .. 1."""
        return self.epochs[-1].test.accuracy

    @property
    def speedup(self) -> Interval | None:
        """Median over the epochs of the ratio to the baseline, with its interval; None without a baseline."""
        ratios = [result.comparison.speedup for result in self.epochs if result.comparison is not None]
        return median_interval(ratios) if ratios else None

    @property
    def table(self) -> str:
        """A row per epoch: loss and accuracy of training and test, seconds, images/s, speedup."""
        page = io.StringIO()
        shown = Display(len(self.epochs), self.baseline, console=Console(file=page, width=LINE))
        for result in self.epochs:
            shown.finished(result)
        return page.getvalue().rstrip()

    @property
    def verdict(self) -> str:
        """What a run of the command line ends with: how much faster, how sure, whether the machine was quiet."""
        found = summary(self.epochs)
        rows = verdict.run_rows(self.epochs, found, self.baseline, interference=self.interference, course=self._course)
        return verdict.screen([(title, text.replace("trainer.patient=true", "patient=True")) for title, text in rows])

    def plot(self) -> Figure:
        """Return loss and accuracy by epoch as a Matplotlib figure."""
        from cnnexp.tracking import figures

        return figures.learning([{"epoch": result.epoch, **epoch_metrics(result)} for result in self.epochs])

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint that `cnnexp predict FOLDER` and `trainer.resume=FOLDER` take; return its file.

        Raises:
            CheckpointError: it cannot be written.
        """
        save_epochs(Path(folder), self.epochs)
        writer = checkpoint.CheckpointWriter(Path(folder) / checkpoint.FOLDER, self._checkpoint.training, self.epochs)
        return writer.save(self.state, self._checkpoint.about)

    def __repr__(self) -> str:
        speedup = f", {self.speedup.median:.3g} x {self.baseline}" if self.speedup else ""
        epochs = f"{len(self.epochs)} epoch{'s' if len(self.epochs) > 1 else ''}"
        return f"Fit({self.backend}: {self.accuracy:.2%} after {epochs}{speedup})"


def fit(
    model: Model,
    data: Dataset | Source,
    backend: str | Backend = "cpu-simd",
    epochs: int = 10,
    optimizer: Optimizer = SGD(lr=0.1),  # noqa: B008 - frozen
    baseline: str | Backend | None = "cpu",
    record: bool | str = False,
    **trainer: Any,
) -> Fit:
    """Train a model on data; return the result. The defaults are those of the command line.

    Args:
        model, data: e.g. `OneConv(filters=32)`, and `Digits()` or a `Dataset` that is loaded.
        backend: its name, or one made with options.
        epochs, optimizer: at most; with its learning rate.
        baseline: timed beside the run on the same batches; None compares with nothing.
        record: record the run in MLflow and under `outputs/`, for `cnnexp ui`; a text is the MLflow experiment.
        trainer: keys of `conf/trainer/default.yaml`, e.g. `batch_size=64, patience=3`; `augment`, e.g. `[Affine()]`.

    Raises:
        CnnexpError: of the kind that says what is wrong: option, data, network, backend, divergence, store.
    """
    beside = backend_class(baseline)() if isinstance(baseline, str) else baseline
    given = {"epochs": epochs, "baseline": beside.name if beside else None, "progress": False}
    settings = Settings(
        model=model,
        backend=backend_class(backend)() if isinstance(backend, str) else backend,
        optimizer=optimizer,
        dataset=data,
        augment=tuple(trainer.pop("augment", ())),
        trainer=build(Trainer, {**given, **trainer}, "trainer"),
        tracking=Tracking("mlflow" if record else "none", experiment=record if isinstance(record, str) else "cnnexp"),
        baseline=beside,
    )
    with contextlib.ExitStack() as stack:
        recorder, folder = None, outputs_dir() / "runs" / datetime.now().strftime("%Y-%m-%d/%H-%M-%S-%f")
        if record:
            recorder = stack.enter_context(contextlib.closing(Recorder(store_uri(None), settings.tracking.experiment)))
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cnnexp-")))
        config = _config(settings, data.name)
        earlier = find_earlier(settings.trainer.resume, folder, config)
        with Run(folder, config, (), recorder, earlier=earlier.folder if earlier else None) as run:
            train(settings, run, earlier)
        last = checkpoint.load(checkpoint.find(folder))
    return Fit(
        network=checkpoint.rebuild(last.training)[0],
        state=last.state,
        epochs=tuple(run.epochs),
        backend=settings.backend.name,
        baseline=settings.trainer.baseline,
        interference=run.interference,
        run_id=run.id,
        _checkpoint=last,
        _course=run.course,
    )


def _config(settings: Settings, name: str) -> dict[str, dict[str, Any]]:
    """Return the settings, of a data set by its name, as a config has them: a name and options, section by section."""
    return {
        **{group: _described(group, getattr(settings, group)) for group in ("model", "backend", "optimizer")},
        "dataset": {"name": name},
        "augment": describe(settings.augment),
        "trainer": _plain_fields(settings.trainer),
        "tracking": _plain_fields(settings.tracking),
    }


def _described(group: str, made: Any) -> dict[str, Any]:
    kind = type(made).__name__
    name = next((name for name in GROUPS[group] if name.replace("-", "").replace("_", "") == kind.lower()), kind)
    return {"name": getattr(made, "name", name), **_plain_fields(made)}


def _plain_fields(made: Any) -> dict[str, Any]:
    return {f.name: value for f in dataclasses.fields(made) if _plain(value := getattr(made, f.name))}


def _plain(value: Any) -> bool:
    return isinstance(value, str | int | float | None) or (isinstance(value, Sequence) and all(map(_plain, value)))
