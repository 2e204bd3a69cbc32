"""The config: what each group holds, and the strict way from plain values to objects.

The schema is the dataclasses themselves: a group's keys are the fields of the class that its `name` picks, their types
are the fields' annotations, and their ranges are checked where the object is made. So YAML and Python use one
vocabulary, and every mistake is one `ConfigError` line that names the key, the value and what is legal.
"""

import contextlib
import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from cnnexp.backends import BACKENDS
from cnnexp.backends.protocol import Backend
from cnnexp.datasets import DATASETS, Dataset, Source
from cnnexp.errors import ConfigError, did_you_mean, first_line
from cnnexp.network import LAYERS, Layer
from cnnexp.network.losses import Loss
from cnnexp.network.models import MODELS, Model
from cnnexp.optimizers import OPTIMIZERS, Optimizer
from cnnexp.papers import EXPERIMENTS
from cnnexp.system.ranges import FLOAT32, LARGEST, check_fields, check_range, in_float32, ranged
from cnnexp.system.registry import Registry
from cnnexp.training.augment import AUGMENTATIONS, Augmentation
from cnnexp.training.schedules import Schedule, ScheduleName
from cnnexp.workers import WORKERS, Alone, Workers

SECTIONS = ("model", "backend", "optimizer", "dataset", "augment", "trainer", "workers", "tracking", "sweep")
# what a group's `name` picks from; the backends are last, since importing their compilers takes longest
GROUPS = dict[str, Registry](model=MODELS, optimizer=OPTIMIZERS, dataset=DATASETS, workers=WORKERS, backend=BACKENDS)
MAX_WHOLE = 2**63 - 1  # compiled code counts in int64
MOST_SHOWN = 200  # characters of a value, in a message
REQUIRED = "???"  # OmegaConf's word for a value that is missing

# in plain containers; unresolved, unless asked for, as what a config holds may lead nowhere, or to a secret
container: Callable[..., Any] = OmegaConf.to_container


@dataclass(frozen=True)
class Trainer:
    """How long and in what order to train, and what to measure beside it; see `conf/trainer/default.yaml`."""

    epochs: int = ranged(10, "1 .. 1000000")
    batch_size: int = ranged(32, ">= 1")
    seed: int = ranged(0, "0 .. 2**63 - 1")
    schedule: ScheduleName = "cosine"
    step_every: int = 10
    step_factor: float = 0.1
    milestones: tuple[int, ...] = ()
    power: float = 1.0
    peak: float = 0.3
    warmup: float = 0.0
    clip_norm: float | None = ranged(None, "> 0, or null")
    accumulate: int = ranged(1, ">= 1")
    class_weights: tuple[float, ...] | Literal["balanced"] | None = None
    ema: float | None = ranged(None, "> 0 and < 1, or null")
    patience: int | None = ranged(None, ">= 1, or null")
    target: float | None = ranged(None, "> 0, <= 1, or null")
    baseline: str | None = "cpu"
    baseline_batches: int = ranged(3, ">= 1")
    baseline_s: float = ranged(1.0, "> 0 seconds")
    progress: bool = True
    resume: str | None = None
    pass_s: float | None = ranged(None, "> 0 seconds, or null")
    profile: bool = False
    patient: bool = False
    checkpoint_s: float | None = ranged(300.0, "> 0 seconds, or null")
    checkpoint_batches: int | None = ranged(None, ">= 1, or null")
    keep_last: int = ranged(2, ">= 1")
    keep_best: int = ranged(1, ">= 0")

    def __post_init__(self) -> None:
        check_fields(self, "trainer")
        weights = self.class_weights or ()
        for weight in weights if isinstance(weights, tuple) else () if weights == "balanced" else (weights,):
            check_range("trainer.class_weights", weight, "> 0")
        self.rates()

    @property
    def steps(self) -> dict[str, Any]:
        """The arguments of `Steps` that are not its defaults, by name; empty where the program's own steps do."""
        plain = {"clip_norm": None, "accumulate": 1, "ema": None}
        return {key: value for key in plain if (value := getattr(self, key)) != plain[key]}

    def rates(self) -> Schedule:
        steps = self.step_every, self.step_factor
        return Schedule(self.schedule, *steps, self.milestones, self.power, self.peak, self.warmup)


@dataclass(frozen=True)
class Tracking:
    """Where runs are recorded; see `conf/tracking/mlflow.yaml`."""

    name: Literal["none", "mlflow"] = "mlflow"
    uri: str | None = None
    experiment: str = "cnnexp"
    run_name: str | None = None

    def __post_init__(self) -> None:
        if not 0 < len(self.experiment) <= 256:
            raise ConfigError(f"tracking.experiment={show(self.experiment)}: must be 1 .. 256 characters")


@dataclass(frozen=True)
class Sweep:
    """How a multirun behaves; see `conf/config.yaml`."""

    skip_finished: bool = False
    objective: Literal["test_accuracy", "epoch_s"] = "test_accuracy"
    paper: str | None = None  # a key of `papers.EXPERIMENTS`; what this machine lacks is a row that says so
    small: bool = False

    def __post_init__(self) -> None:
        if self.paper is not None and self.paper not in EXPERIMENTS:
            near = did_you_mean(self.paper, EXPERIMENTS)
            raise ConfigError(f"sweep.paper={show(self.paper)}: unknown; legal: {', '.join(EXPERIMENTS)}{near}")


@dataclass(frozen=True)
class Settings:
    """One run's config, every piece made and checked, no data read yet."""

    model: Model
    backend: Backend
    optimizer: Optimizer
    dataset: Source | Dataset
    trainer: Trainer
    tracking: Tracking
    baseline: Backend | None
    augment: tuple[Augmentation, ...] = ()
    workers: Workers = Alone()  # noqa: RUF009 - frozen
    sweep: Sweep = Sweep()

    def __post_init__(self) -> None:
        if self.trainer.steps and getattr(self.workers, "sync", "") == "parameters":
            keys = ", ".join(f"trainer.{key}" for key in self.trainer.steps)
            raise ConfigError(f"workers.sync=parameters: takes no {keys}, its workers take steps alone; use gradients")

    def loss(self, dataset: Dataset) -> Loss:
        """Return the model's loss, weighted where that is wanted; raise ConfigError without one weight a class."""
        classes, weights = len(dataset.classes), self.trainer.class_weights or ()
        if weights == "balanced":
            counts = np.bincount(dataset.train.labels, minlength=classes)
            weights = tuple(float(weight) for weight in len(dataset.train) / (classes * np.maximum(counts, 1)))
        if weights and len(weights) != classes:
            raise ConfigError(f"trainer.class_weights={list(weights)}: must be {classes}, one for each class")
        return dataclasses.replace(self.model.loss, class_weights=weights)


def load(values: Mapping[str, Any]) -> Settings:
    """Make the pieces from a composed, resolved config, section -> key -> value as plain containers: see `plain`.

    ConfigError: an unknown key, a wrong type, an illegal value; BackendUnavailable: this machine lacks what it needs.
    """
    if "plugins" in values:
        raise ConfigError("plugins: refused in a config file, being code; give plugins=FILE.py on the command line")
    _check_names("", values, SECTIONS, required=[name for name in SECTIONS if name != "augment"])
    for section, value in values.items():
        if not isinstance(value, Mapping):
            raise ConfigError(f"{section}={show(value)}: must be a mapping of keys to values")
    augment = values.get("augment", {})
    _check_names("augment", augment, list(AUGMENTATIONS), required=())
    trainer = build(Trainer, values["trainer"], "trainer")
    return Settings(
        augment=tuple(convert(keys, AUGMENTATIONS[name], f"augment.{name}") for name, keys in augment.items()),
        trainer=trainer,
        tracking=build(Tracking, values["tracking"], "tracking"),
        sweep=build(Sweep, values["sweep"], "sweep"),
        **{group: named(group, values[group]) for group in GROUPS},
        baseline=None if trainer.baseline is None else BACKENDS.find(trainer.baseline, "trainer.baseline")(),
    )


def plain(config: DictConfig) -> dict[str, Any]:
    """Return a config in plain containers, resolved; raise ConfigError where `???` or an interpolation is left."""
    try:
        return container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key}: must be given, as {error.full_key}=VALUE") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {first_line(error)}") from error


def record(config: DictConfig) -> dict[str, Any]:
    """Return a config for the record of a run, which others may see: what reads the environment stays as written."""
    written = container(config)
    try:
        return _keep_env(plain(config), written)
    except ConfigError:
        return written


def build(cls: type, values: Mapping[str, Any], where: str, tag: str | None = None) -> Any:
    """Make a dataclass from plain values, strictly: its fields are the legal keys, their annotations the legal types.

    `where` is the config path of the values, for messages; `tag` a key that has chosen the class and is no field of it.
    ConfigError is raised on an unknown or missing key, a wrong type, an illegal value.
    """
    legal = defaults(cls)
    given = {key: value for key, value in values.items() if key != tag}
    _check_names(where, given, list(legal), required=[key for key, value in legal.items() if value is REQUIRED])
    hints = typing.get_type_hints(cls)
    return cls(**{key: convert(value, hints[key], f"{where}.{key}") for key, value in given.items()})


def defaults(cls: type) -> dict[str, Any]:
    """Return the keys of a dataclass with their defaults, as plain values; `REQUIRED` for those that must be given."""
    missing, fields = dataclasses.MISSING, [field for field in dataclasses.fields(cls) if field.init]
    values = {f.name: f.default if f.default_factory is missing else f.default_factory() for f in fields}
    return {name: REQUIRED if value is missing else value for name, value in values.items()}


def convert(value: Any, hint: Any, key: str) -> Any:
    """Return `value` as `hint` wants it, never a guess ('3' for 3, true for 1.0, nan); else ConfigError names `key`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint == Layer:
        if not isinstance(value, Mapping) or "type" not in value:
            raise ConfigError(f"{key}={show(value)}: must be a mapping with a type, one of {', '.join(LAYERS)}")
        return build(LAYERS.find(value["type"], f"{key}.type"), value, key, tag="type")
    if origin in (typing.Union, types.UnionType):
        for member in args:
            with contextlib.suppress(ConfigError):
                return convert(value, member, key)
    if origin is Literal and isinstance(value, str) and value in args:
        return value
    if origin in (tuple, list) and isinstance(value, Sequence) and not isinstance(value, str):
        return origin(convert(item, args[0], f"{key}[{i}]") for i, item in enumerate(value))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return build(hint, value, key)
    if hint is Any or (hint in (str, bool, type(None)) and isinstance(value, hint)):
        return value
    number = not isinstance(value, bool)  # which Python takes for one
    if hint is int and number and isinstance(value, int):
        if abs(value) <= MAX_WHOLE:
            return value
        raise ConfigError(f"{key}={show(value)}: must be a whole number of at most 2**63 - 1")
    if hint is float and number and isinstance(value, int | float) and abs(value) <= LARGEST and in_float32(value):
        return float(value)
    literals = [name for kind in (hint, *args) if typing.get_origin(kind) is Literal for name in typing.get_args(kind)]
    near = did_you_mean(value, literals) if isinstance(value, str) else ""
    raise ConfigError(f"{key}={show(value)}: must be {_describe(hint)}{near}")


def named(group: str, values: Mapping[str, Any]) -> Any:
    """Make the object that `values["name"]` picks from a group of `GROUPS`, strictly."""
    return build(GROUPS[group].find(values.get("name"), f"{group}.name"), values, group, tag="name")


def show(value: Any) -> str:
    """Return a value as YAML would write it, on one line, cut where it is long."""
    if value is None:
        return "null"
    try:
        text = str(value).lower() if isinstance(value, bool) else repr(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        text = "a number of thousands of digits"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _check_names(where: str, given: Mapping[str, Any], legal: Sequence[str], required: Sequence[str]) -> None:
    prefix = f"{where}." if where else ""
    for key, value in given.items():
        if key not in legal:
            keys = ", ".join(legal) or "none"
            raise ConfigError(f"{prefix}{key}={show(value)}: unknown key; legal: {keys}{did_you_mean(str(key), legal)}")
    for key in required:
        if key not in given:
            raise ConfigError(f"{prefix}{key} is missing")


def _keep_env(resolved: Any, written: Any) -> Any:
    if isinstance(written, str) and "oc.env" in written:
        return written
    if isinstance(resolved, dict) and isinstance(written, dict):
        return {key: _keep_env(value, written[key]) for key, value in resolved.items()}
    if isinstance(resolved, list) and isinstance(written, list):
        return [_keep_env(*pair) for pair in zip(resolved, written, strict=True)]
    return resolved


def _describe(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(args)}"
    if hint == Layer:
        return "a mapping with a type"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(member) for member in args)
    if origin in (tuple, list):
        return f"a list, each {_describe(args[0])}"
    words = {int: "a whole number", float: FLOAT32, bool: "true or false", str: "a text", type(None): "null"}
    return words.get(hint, "a mapping of keys to values")
