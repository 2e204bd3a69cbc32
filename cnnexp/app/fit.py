"""Training in one call, from Python: what `python -m cnnexp` does, without a config and without Hydra."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cnnexp.backends import BACKENDS, backend_class
from cnnexp.backends.protocol import Backend, State
from cnnexp.datasets import Dataset, Source, photograph
from cnnexp.measuring.confidence import Interval, median_interval
from cnnexp.measuring.environment import outputs_dir
from cnnexp.measuring.interference import IdleWait, Interference, Watch
from cnnexp.network import Network
from cnnexp.network.models import MODELS, Model
from cnnexp.optimizers import OPTIMIZERS, SGD, Optimizer
from cnnexp.system.registry import Registry
from cnnexp.tracking import verdict
from cnnexp.tracking.address import store_uri
from cnnexp.tracking.journal import Run
from cnnexp.tracking.metrics import epoch_metrics, summary
from cnnexp.tracking.pipe import Recorder
from cnnexp.training import checkpoint
from cnnexp.training.baseline import Baseline
from cnnexp.training.loop import EpochResult, train_epochs
from cnnexp.training.schedules import Cosine, Schedule

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
    _training: Mapping[str, Any] = field(compare=False)
    _about: Mapping[str, Any] = field(compare=False)

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
        lines = [f"{'epoch':>5}{'train loss':>12}{'acc.':>9}{'test loss':>11}{'acc.':>9}{'seconds':>9}{'images/s':>11}"]
        lines[0] += f"{'speedup':>9}" if self.baseline else ""
        for result in self.epochs:
            line = f"{result.epoch:>5}{result.train.mean_loss:>12.4f}{result.train.accuracy:>9.2%}"
            line += f"{result.test.mean_loss:>11.4f}{result.test.accuracy:>9.2%}"
            line += f"{result.epoch_s:>9.3g}{result.images_per_s:>11,.0f}"
            lines.append(line + (f"{result.comparison.speedup:>9.2f}" if result.comparison else ""))
        return "\n".join(lines)

    @property
    def verdict(self) -> str:
        """What a run of the command line ends with: how much faster, how sure, whether the machine was quiet."""
        told = verdict.run_rows(self.epochs, summary(self.epochs), self.baseline, interference=self.interference)
        return verdict.screen([(title, text.replace("trainer.patient=true", "patient=True")) for title, text in told])

    def plot(self) -> Figure:
        """Return loss and accuracy by epoch as a Matplotlib figure."""
        from cnnexp.tracking import figures

        return figures.learning([{"epoch": result.epoch, **epoch_metrics(result)} for result in self.epochs])

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint that `cnnexp predict FOLDER` and `trainer.resume=FOLDER` take; return its file.

        Raises:
            CheckpointError: it cannot be written.
        """
        keeper = checkpoint.Keeper(Path(folder) / checkpoint.FOLDER, self._training, self.epochs)
        return keeper.save(self.state, self._about)

    def __repr__(self) -> str:
        speedup = f", {self.speedup.median:.3g} x {self.baseline}" if self.speedup else ""
        epochs = f"{len(self.epochs)} epoch{'s' if len(self.epochs) > 1 else ''}"
        return f"Fit({self.backend}: {self.accuracy:.2%} after {epochs}{speedup})"


def fit(
    model: Model,
    data: Dataset | Source,
    backend: str | Backend = "cpu-simd",
    epochs: int = 10,
    batch_size: int = 32,
    optimizer: Optimizer = SGD(lr=0.1),  # noqa: B008 - frozen
    schedule: Schedule = Cosine(),
    seed: int = 0,
    baseline: str | Backend | None = "cpu",
    patience: int | None = None,
    target: float | None = None,
    patient: bool = False,
    record: bool = False,
    experiment: str = "cnnexp",
) -> Fit:
    """Train a model on data; return the result. The defaults are those of the command line.

    Args:
        model: e.g. `OneConv(filters=32)`.
        data: e.g. `Digits()`, or a `Dataset` that is loaded.
        backend: its name, or one made with options.
        epochs: at most.
        batch_size: images per step.
        optimizer: with its learning rate.
        schedule: of the learning rate.
        seed: of parameters and order.
        baseline: timed beside the run on the same batches; None compares with nothing.
        patience: stop after so many epochs in a row without a smaller held-out loss.
        target: stop after the first epoch with such a held-out accuracy.
        patient: wait before every epoch until other work leaves the cores alone, five minutes at most in all.
        record: record the run in MLflow and under `outputs/`, for `cnnexp ui`.
        experiment: the MLflow experiment of the record.

    Raises:
        CnnexpError: of the kind that says what is wrong: data, network, backend, divergence, store.
    """
    dataset = data if isinstance(data, Dataset) else data.load()
    compiler = backend_class(backend)() if isinstance(backend, str) else backend
    beside = backend_class(baseline)() if isinstance(baseline, str) else baseline
    network = model.network(dataset.input_shape, len(dataset.classes))
    compiling = (network, model.loss, optimizer, batch_size)
    training = checkpoint.describe(*compiling, schedule, seed, dataset.sha256)
    config = {
        "model": _described(MODELS, model),
        "backend": _described(BACKENDS, compiler),
        "optimizer": _described(OPTIMIZERS, optimizer),
        "dataset": {"name": dataset.name},
        "tracking": {"name": "mlflow", "uri": None, "experiment": experiment},
        "trainer": {"epochs": epochs, "batch_size": batch_size, "seed": seed, "target": target}
        | {"baseline": beside.name if beside else None},
    }
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(_recorded(config, experiment)) if record else None
        if run is not None:
            run.begin(dataset, network, compiler)
        program = stack.enter_context(contextlib.closing(compiler.compile(*compiling)))
        program.restore(network.initial_state(seed))
        compared = None
        if beside is not None:
            compared = Baseline(stack.enter_context(contextlib.closing(beside.compile(*compiling))), dataset.train)
        if run is not None:
            run.wait()  # so that nothing but training runs while training is timed
        watch, quiet, done = Watch(compiler.threads), IdleWait(patient), []
        interference = None
        quiet.wait()
        watch.start()
        for result in train_epochs(program, dataset, epochs, seed, schedule, compared, patience, target=target):
            done.append(result)
            interference = watch.interference()
            if run is not None:
                run.interference = interference
                run.epoch(result)
            if result.epoch < epochs:
                quiet.wait()
                watch.start()
        about = run.facts if run is not None else _about(dataset)
        state = program.state()
        if run is not None:
            keeper = checkpoint.Keeper(run.folder / checkpoint.FOLDER, training, done)
            run.set_model(keeper.save(state, about))
    return Fit(
        network=network,
        state=state,
        epochs=tuple(done),
        backend=compiler.name,
        baseline=beside.name if beside else None,
        interference=interference,
        run_id=run.id if run is not None else None,
        _training=training,
        _about=about,
    )


def _about(dataset: Dataset) -> dict[str, Any]:
    """Return what a checkpoint tells of its data."""
    images, classes = dataset.train.images, list(dataset.classes)
    look = photograph.describe(images, dataset.train.labels, len(classes))
    return {"classes": classes, "pixels": str(images.dtype), "look": look}


@contextlib.contextmanager
def _recorded(config: Mapping[str, Mapping[str, Any]], experiment: str) -> Iterator[Run]:
    """Give a `Run` in a folder of its own, recorded in the store under `outputs/`."""
    recorder = Recorder(store_uri(None), experiment)
    folder = outputs_dir() / "runs" / datetime.now().strftime("%Y-%m-%d/%H-%M-%S-%f")
    try:
        with Run(folder, config, (), recorder) as run:
            yield run
    finally:
        recorder.close()


def _described(registry: Registry, made: Any) -> dict[str, Any]:
    """Return a piece as the config has it: its name, and its options."""
    name = next((name for name in registry if name.replace("-", "_") == _snake(type(made).__name__)), None)
    options = {f.name: getattr(made, f.name) for f in dataclasses.fields(made) if _plain(getattr(made, f.name))}
    return {"name": getattr(made, "name", None) or name or type(made).__name__, **options}


def _snake(name: str) -> str:
    """Return `OneConv` as `one_conv`."""
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


def _plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | None) or (
        isinstance(value, Sequence) and not isinstance(value, np.ndarray) and all(map(_plain, value))
    )
