"""Figures of a run and of a sweep: the only importer of matplotlib.

Functions take plain values and file names, since they are called in the recorder's process, with JSON between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from sklearn.metrics import confusion_matrix, recall_score

DPI = 100
CELLS_WITH_NUMBERS = 20  # a confusion matrix of more classes shows colours alone


def warm_up() -> None:
    """Do nothing: importing this module is what takes time, and a caller may want it done early."""


def draw_run(
    folder: str,
    epochs: Sequence[Mapping[str, float]],
    baseline_s: Sequence[float | None],
    predictions: str,
    classes: Sequence[str],
    title: str,
) -> None:
    """Draw the figures of one run into `folder`.

    Args:
        folder: made if missing; gets learning.png, epoch_time.png, confusion.png and recall.png.
        epochs: each epoch's metrics by name, with `epoch`.
        baseline_s: seconds the baseline would have needed for each epoch, None where it was not measured.
        predictions: an .npz file with `labels` and `predicted` of the test split, integers (N,).
        classes: their names.
        title: of every figure.
    """
    with np.load(predictions, allow_pickle=False) as arrays:
        labels, predicted = arrays["labels"], arrays["predicted"]
    figures = {
        "learning": learning(epochs),
        "epoch_time": epoch_time(epochs, baseline_s),
        "confusion": confusion(labels, predicted, classes),
        "recall": recall(labels, predicted, classes),
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.suptitle(title, fontsize="medium")
        figure.savefig(Path(folder) / f"{name}.png")


def draw_sweep(folder: str, rows: Sequence[Mapping[str, Any]], varied: Sequence[str]) -> None:
    """Draw what a sweep compares into `folder`: epoch_time.png and, where it was measured, speedup.png.

    Args:
        folder: made if missing.
        rows: one per finished job: what varied, by key, and its metrics, by name.
        varied: the keys that differ between jobs; the last with numbers alone is the horizontal axis.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, metric, label in (
        ("epoch_time", "time/median_epoch_s", "median epoch time (s)"),
        ("speedup", "speedup/median", "speedup over the baseline"),
    ):
        measured = [row for row in rows if metric in row]
        if measured:
            comparison(measured, varied, metric, label).savefig(Path(folder) / f"{name}.png")


def learning(epochs: Sequence[Mapping[str, float]]) -> Figure:
    """Return loss and accuracy by epoch, of each split that was measured."""
    figure = _figure(9, 3.6)
    for axes, metric in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        for split in ("train", "validation", "test"):
            if f"{split}/{metric}" in epochs[0]:
                axes.plot(_column(epochs, "epoch"), _column(epochs, f"{split}/{metric}"), marker="o", label=split)
        _label(axes, "epoch", metric)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend()
    return figure


def epoch_time(epochs: Sequence[Mapping[str, float]], baseline_s: Sequence[float | None]) -> Figure:
    """Return the seconds of each epoch, beside what the baseline would have needed."""
    figure = _figure(6, 3.6)
    axes = figure.subplots()
    axes.plot(_column(epochs, "epoch"), _column(epochs, "time/epoch_s"), marker="o", label="this run")
    measured = [(row["epoch"], seconds) for row, seconds in zip(epochs, baseline_s, strict=True) if seconds is not None]
    if measured:
        axes.plot(*zip(*measured, strict=True), marker="s", linestyle="--", label="baseline, from its timed batches")
    _label(axes, "epoch", "training pass (s)")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    return figure


def confusion(labels: np.ndarray, predicted: np.ndarray, classes: Sequence[str]) -> Figure:
    """Return how often each true class (row) was taken for each class (column), on the test split."""
    counts = confusion_matrix(labels, predicted, labels=range(len(classes)))
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = min(3 + 0.42 * len(classes), 12)
    figure = _figure(side + 0.6, side)
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, label="share of the true class")
    if len(classes) <= CELLS_WITH_NUMBERS:
        _name_ticks(axes, classes)
        for row, column in np.argwhere(counts):
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, counts[row, column], ha="center", va="center", fontsize="x-small", color=colour)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    return figure


def recall(labels: np.ndarray, predicted: np.ndarray, classes: Sequence[str]) -> Figure:
    """Return the share of each class that was found, on the test split."""
    values = recall_score(labels, predicted, labels=range(len(classes)), average=None, zero_division=0.0)
    figure = _figure(max(6.0, min(0.5 * len(classes), 16)), 3.6)
    axes = figure.subplots()
    bars = axes.bar(range(len(classes)), values)
    if len(classes) <= CELLS_WITH_NUMBERS:
        axes.set_xticks(range(len(classes)), classes, rotation=45 if max(map(len, classes)) > 3 else 0)
        axes.bar_label(bars, [f"{value:.3f}" for value in values], fontsize="x-small")
    _label(axes, "class", "recall")
    axes.set_ylim(0, 1.08)
    return figure


def comparison(rows: Sequence[Mapping[str, Any]], varied: Sequence[str], metric: str, label: str) -> Figure:
    """Return one metric against what varied: lines over a key of numbers if there is one, else bars."""
    axis = next((key for key in reversed(varied) if len(rows) > 1 and _numeric(rows, key)), None)
    others = [key for key in varied if key != axis]
    if axis is None:
        return _bars(rows, others, metric, label)
    figure = _figure(7, 4)
    axes = figure.subplots()
    groups: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        groups.setdefault(_name(row, others), []).append((float(row[axis]), row[metric]))
    for name, points in groups.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    _label(axes, axis, label)
    axes.set_xticks(sorted({float(row[axis]) for row in rows}), minor=False)
    axes.set_ylim(bottom=0)
    if others:
        axes.legend(title=", ".join(others))
    return figure


def _bars(rows: Sequence[Mapping[str, Any]], varied: Sequence[str], metric: str, label: str) -> Figure:
    figure = _figure(7, 1 + 0.4 * len(rows))
    axes = figure.subplots()
    values = [row[metric] for row in rows]
    # a logarithmic axis where the slowest would hide the others
    axes.set_xscale("log" if max(values) > 50 * min(values) > 0 else "linear")
    bars = axes.barh([f"{_name(row, varied)} " for row in rows], values)
    axes.bar_label(bars, [f" {value:.3g}" for value in values])
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    return figure


def _figure(width: float, height: float) -> Figure:
    """Return a figure of its own, in inches; pyplot would keep every one alive."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _column(rows: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    return [row[key] for row in rows]


def _label(axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)


def _name_ticks(axes, names: Sequence[str]) -> None:
    axes.set_xticks(range(len(names)), names, rotation=90 if max(map(len, names)) > 3 else 0)
    axes.set_yticks(range(len(names)), names)


def _name(row: Mapping[str, Any], keys: Sequence[str]) -> str:
    return ", ".join(str(row[key]) for key in keys)


def _numeric(rows: Sequence[Mapping[str, Any]], key: str) -> bool:
    try:
        return len({float(row[key]) for row in rows}) > 1
    except ValueError:
        return False
