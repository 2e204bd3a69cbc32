"""What is recorded of a run, by the names that MLflow shows: metrics of epochs and of the whole, parameters, name."""

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cnnexp.measuring.confidence import median_interval
from cnnexp.training.loop import EpochResult

UNNAMED = r"~|(tracking|sweep|hydra|search)\b"  # words of a command line that no run is named by
TOP, MOST_CLASSES = 5, 20  # classes with metrics of their own, at every epoch
LONGEST = 24  # characters of a value in a name


def epoch_metrics(result: EpochResult, contended: bool = False) -> dict[str, float]:
    """Return one epoch's metrics by their MLflow names."""
    metrics = {
        "train/images": result.train.count,
        "time/epoch_s": result.epoch_s,
        "time/evaluate_s": result.evaluate_s,
        "throughput/images_per_s": result.images_per_s,
        "train/learning_rate": result.rate,
    }
    for name, split in {"train": result.train, "validation": result.validation, "test": result.test}.items():
        if split is not None:
            metrics |= {f"{name}/loss": split.mean_loss, f"{name}/accuracy": split.accuracy}
    if result.comparison is not None and not contended:
        metrics["speedup/vs_baseline"] = result.comparison.speedup
        metrics["speedup/baseline_images"] = result.comparison.images
    return metrics


def class_metrics(scores: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> dict[str, float]:
    """Return what one epoch's test scores (N, O) are against labels (N,), class by class, by MLflow's names.

    `test/f1` is the mean over the classes that an image has or is taken for; of at most `MOST_CLASSES` each has its
    precision, recall and F1, 0 where that is 0 / 0. Of more than five, `test/top5_accuracy` counts a label among the
    five highest scores as right.
    """
    predicted, count = predicted_classes(scores), len(classes)
    hits, found, wanted = (np.bincount(of, minlength=count) for of in (labels[predicted == labels], predicted, labels))
    f1 = 2 * hits / np.maximum(found + wanted, 1)
    metrics = {"test/f1": float(f1[found + wanted > 0].mean())}
    if count > TOP:
        best = np.argpartition(-scores, TOP - 1, axis=1)[:, :TOP]
        metrics["test/top5_accuracy"] = float((best == labels[:, np.newaxis]).any(axis=1).mean())
    if count <= MOST_CLASSES:
        by_class = {"precision": hits / np.maximum(found, 1), "recall": hits / np.maximum(wanted, 1), "f1": f1}
        for i, name in enumerate(classes):
            shown = name if re.fullmatch(r"[\w. -]{1,99}", name) else f"class {i}"  # what MLflow takes in a name
            metrics |= {f"{what}/{shown}": float(values[i]) for what, values in by_class.items()}
    return metrics


def summary(epochs: Sequence[EpochResult], contended: bool = False, target: float | None = None) -> dict[str, float]:
    """Return the metrics that are recorded once; "best" is by held-out accuracy, the first of equals.

    Where an epoch has reached the accuracy `target`, `time/to_target_s` is the seconds of training up to its end.
    """
    best = max(epochs, key=lambda result: result.held_out.accuracy)
    metrics = {
        "time/median_epoch_s": statistics.median(result.epoch_s for result in epochs),
        "throughput/median_images_per_s": 1 / statistics.median(1 / result.images_per_s for result in epochs),
        "final/test_accuracy": epochs[-1].test.accuracy,
        "best/test_accuracy": best.test.accuracy,
    }
    reached = (i for i, result in enumerate(epochs, 1) if target is not None and result.held_out.accuracy >= target)
    if first := next(reached, None):
        metrics["time/to_target_s"] = sum(result.epoch_s for result in epochs[:first])
    ratios = [result.comparison.speedup for result in epochs if result.comparison is not None]
    if ratios and not contended:
        found = median_interval(ratios)
        metrics |= {"speedup/median": found.median, "speedup/low": found.low, "speedup/high": found.high}
    return metrics


def flatten(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the leaves of a config by dotted key, as Hydra would take them back; lists as JSON."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in leaves(config).items()}


def leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a config by dotted key."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def default_name(config: Mapping[str, Any], overrides: Sequence[str] = (), varied: Sequence[str] = ()) -> str:
    """Return e.g. `adam epochs=3 cpu-simd one_conv digits`: a page that cuts names keeps what differs.

    Keys that a sweep varies come first, then the groups and keys that were typed, the other pieces, and long values.
    """
    typed = dict(word.lstrip("+").partition("=")[::2] for word in overrides)
    typed = {key: value for key, value in typed.items() if not re.match(UNNAMED, key)}
    short = {key: _shortened(value) for key, value in typed.items()}
    names = {key: f"{key.rpartition('.')[2]}={value}" if "." in key else value for key, value in short.items()}
    pieces = {group: str(config[group]["name"]) for group in ("backend", "model", "dataset")}
    whole = sorted((key for key in typed if short[key] == typed[key]), key=lambda key: "." in key)
    order = dict.fromkeys((*(key for key in varied if key in names), *whole, *pieces, *names))
    return " ".join({**pieces, **names}[key] for key in order)


def _shortened(value: str) -> str:
    """Return a path's last part alone, and a long value without its middle."""
    parts = re.split(r"[/\\]", value.rstrip("/"))
    value = f".../{parts[-1]}" if len(parts) > 1 else value
    half = LONGEST // 2
    return value if len(value) <= LONGEST else f"{value[:half]}...{value[-half:]}"


def predicted_classes(scores: np.ndarray) -> np.ndarray:
    """Return the class (N,) that scores (N, O) choose; one output is the probability of class 1."""
    return (scores[:, 0] >= 0.5).astype(np.int32) if scores.shape[1] == 1 else scores.argmax(axis=1)
