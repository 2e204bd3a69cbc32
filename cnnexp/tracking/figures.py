"""Figures of a run and of a sweep; `papers/figures` draws in the same style, and no other module imports matplotlib.

Functions take plain values and file names, since they are called in the recorder's process, with JSON between.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes as Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as PlainFigure
from matplotlib.ticker import LogFormatter, MaxNLocator

logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # else it tells of every font that its cache lacks

DPI = 100
SMALLEST_SHARE = 0.002  # of the wall time, for an entry of a ledger to have a bar of its own
CELLS_WITH_NUMBERS = 20  # a confusion matrix of more classes shows colours alone


class Figure(PlainFigure):
    """A figure that a notebook shows, whatever it makes of Matplotlib's own."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        FigureCanvasAgg(self).print_png(file)  # type: ignore[no-untyped-call]
        return file.getvalue()


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
        save(figure, Path(folder) / f"{name}.png")


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
            save(comparison(measured, varied, metric, label), Path(folder) / f"{name}.png")


def draw_profile(folder: str, profile: Mapping[str, Any], title: str) -> None:
    """Draw where a run's time went into `folder`: profile.png and, where layers were clocked, roofline.png.

    Args:
        folder: made if missing.
        profile: of `ledger.report`.
        title: of every figure.
    """
    figures = {"profile": ledger(profile)}
    if profile["layered"]:
        figures["roofline"] = layers_on_the_roofline(profile)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.suptitle(title, fontsize="medium")
        save(figure, Path(folder) / f"{name}.png")


def ledger(profile: Mapping[str, Any]) -> Figure:
    """Return the seconds of every entry of a profile's ledger, largest first."""
    seconds = {f"{entry['layer']} {entry['what']}".strip(): entry["seconds"] for entry in profile["entries"]}
    shown = {name: s for name, s in seconds.items() if s >= SMALLEST_SHARE * profile["wall_s"]}
    if len(shown) < len(seconds):
        shown[f"{len(seconds) - len(shown)} smaller entries"] = sum(seconds.values()) - sum(shown.values())
    figure = new_figure(7, 1.2 + 0.28 * len(shown))
    axes = figure.subplots()
    bars = axes.barh(list(shown), list(shown.values()))
    axes.bar_label(bars, [f" {s / profile['wall_s']:.1%}" for s in shown.values()], fontsize="x-small")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    accounted = f"{profile['accounted']:.1%} of {profile['wall_s']:.2f} s accounted for"
    axes.set_xlabel(f"seconds and share of the wall time; {accounted}")
    return figure


def layers_on_the_roofline(profile: Mapping[str, Any]) -> Figure:
    """Return the roofline with every layer's pass of a profile."""
    figure = new_figure(8, 4.4)
    layers = [layer for layer in profile["layers"] if layer["flops"] > 0 and layer["seconds"] > 0]
    points = [
        (
            f"{layer['name']} {layer['pass']}",
            layer["flops"] / layer["bytes"],
            layer["flops"] / layer["seconds"] / 1e9,
            layer["pass"],
        )
        for layer in layers
    ]
    roofline(figure.subplots(), points, profile["machine"])
    return figure


def roofline(axes: Axes, points: Sequence[tuple[str, float, float, str]], limits: Mapping[str, float]) -> None:
    """Draw speeds against arithmetic intensity, under the machine's two limits.

    Args:
        axes: to draw into.
        points: (name, FLOP per byte, GFLOP/s, pass).
        limits: of `roofline.machine_limits`.
    """
    intensity = np.array([point[1] for point in points])
    speed = np.array([point[2] for point in points])
    ridge = limits["gflops"] / limits["gb_per_s"]
    span = np.geomspace(min(ridge, *intensity) / 3, max(ridge, *intensity) * 3, 200)
    axes.plot(span, np.minimum(limits["gflops"], span * limits["gb_per_s"]), color="black", label="limit, measured")
    for what, marker in (("forward", "o"), ("backward", "s")):
        chosen = [i for i, point in enumerate(points) if point[3] == what]
        axes.scatter(intensity[chosen], speed[chosen], marker=marker, label=what, zorder=3)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(min(speed) / 2, max(limits["gflops"], *speed) * 2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(LogFormatter())
        axis.set_minor_formatter(LogFormatter())
    _name_beside(axes, points)
    label_axes(axes, "arithmetic intensity (FLOP per byte, from the shapes)", "GFLOP/s")
    axes.legend(loc="upper left", fontsize="small")


def _name_beside(axes: Axes, points: Sequence[tuple[str, float, float, str]]) -> None:
    """Write the names in a column beside the axes, in the order of their heights, a line to each point.

    So no two of them overlap, however close the points are.
    """
    ordered = sorted(points, key=lambda point: point[2])
    for i, (name, x, y, _) in enumerate(ordered):
        axes.annotate(
            name,
            (x, y),
            xytext=(1.03, (i + 0.5) / len(ordered)),
            textcoords="axes fraction",
            va="center",
            fontsize="x-small",
            arrowprops={"arrowstyle": "-", "color": "gray", "linewidth": 0.4},
        )


def learning(epochs: Sequence[Mapping[str, float]]) -> Figure:
    """Return loss and accuracy by epoch, of each split that was measured."""
    figure = new_figure(9, 3.6, measured=False)
    for axes, metric in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        for split in ("train", "validation", "test"):
            if f"{split}/{metric}" in epochs[0]:
                axes.plot(column_of(epochs, "epoch"), column_of(epochs, f"{split}/{metric}"), marker="o", label=split)
        label_axes(axes, "epoch", metric)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend()
    return figure


def epoch_time(epochs: Sequence[Mapping[str, float]], baseline_s: Sequence[float | None]) -> Figure:
    """Return the seconds of each epoch, beside what the baseline would have needed."""
    figure = new_figure(6, 3.6, measured=False)
    axes = figure.subplots()
    axes.plot(column_of(epochs, "epoch"), column_of(epochs, "time/epoch_s"), marker="o", label="this run")
    measured = [(row["epoch"], seconds) for row, seconds in zip(epochs, baseline_s, strict=True) if seconds is not None]
    if measured:
        axes.plot(*zip(*measured, strict=True), marker="s", linestyle="--", label="baseline, from its timed batches")
    label_axes(axes, "epoch", "training pass (s)")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    return figure


def confusion_counts(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """Return (classes, classes), how many images of the row's class were predicted as the column's.

    Two lines of NumPy, since importing scikit-learn for them takes longer than drawing all figures of a run.
    """
    counts = np.zeros((classes, classes), np.int64)
    np.add.at(counts, (labels, predicted), 1)
    return counts


def confusion(labels: np.ndarray, predicted: np.ndarray, classes: Sequence[str]) -> Figure:
    """Return how often each true class (row) was taken for each class (column), on the test split."""
    counts = confusion_counts(labels, predicted, len(classes))
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = min(3 + 0.42 * len(classes), 12)
    figure = new_figure(side + 0.6, side, measured=_long(classes))
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, label="share of the true class")
    if len(classes) <= CELLS_WITH_NUMBERS:
        _name_ticks(axes, classes)
        for row, column in np.argwhere(counts):
            colour = "white" if shares[row, column] > 0.5 else "black"
            text = axes.text(column, row, counts[row, column], ha="center", va="center", fontsize="x-small")
            text.set(color=colour, in_layout=False)  # inside the axes, so nothing has to make room for it
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    return figure


def recall(labels: np.ndarray, predicted: np.ndarray, classes: Sequence[str]) -> Figure:
    """Return the share of each class that was found, on the test split."""
    counts = confusion_counts(labels, predicted, len(classes))
    values = counts.diagonal() / np.maximum(counts.sum(axis=1), 1)
    figure = new_figure(max(6.0, min(0.5 * len(classes), 16)), 3.6, measured=_long(classes))
    axes = figure.subplots()
    bars = axes.bar(range(len(classes)), values)
    if len(classes) <= CELLS_WITH_NUMBERS:
        axes.set_xticks(range(len(classes)), classes, rotation=45 if _long(classes) else 0)
        axes.bar_label(bars, [f"{value:.3f}" for value in values], fontsize="x-small")
    label_axes(axes, "class", "recall")
    axes.set_ylim(0, 1.08)
    return figure


def comparison(rows: Sequence[Mapping[str, Any]], varied: Sequence[str], metric: str, label: str) -> Figure:
    """Return one metric against what varied: lines over a key of numbers if there is one, else bars."""
    axis = next((key for key in reversed(varied) if len(rows) > 1 and _numeric(rows, key)), None)
    others = [key for key in varied if key != axis]
    if axis is None:
        return _bars(rows, others, metric, label)
    figure = new_figure(7, 4)
    axes = figure.subplots()
    groups: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        groups.setdefault(_name(row, others), []).append((float(row[axis]), row[metric]))
    for name, points in groups.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    label_axes(axes, axis, label)
    axes.set_xticks(sorted({float(row[axis]) for row in rows}), minor=False)
    axes.set_ylim(bottom=0)
    if others:
        axes.legend(title=", ".join(others))
    return figure


def _bars(rows: Sequence[Mapping[str, Any]], varied: Sequence[str], metric: str, label: str) -> Figure:
    figure = new_figure(7, 1 + 0.4 * len(rows))
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


def new_figure(width: float, height: float, measured: bool = True) -> Figure:
    """Return a figure of its own, in inches; pyplot would keep every one alive.

    Args:
        width, height: in inches.
        measured: whether Matplotlib makes room for every text, in half of the time that drawing takes; else the usual
            room is left for a title and for labels of a few letters.
    """
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained" if measured else None)
    if not measured:
        figure.subplots_adjust(0.8 / width, 0.6 / height, 1 - 0.2 / width, 1 - 0.45 / height)
    return figure


def _long(names: Sequence[str]) -> bool:
    return max(map(len, names)) > 3


def save(figure: Figure, path: Path) -> None:
    """Write a PNG. Unlike `savefig` this lays the figure out once, in half the time."""
    FigureCanvasAgg(figure).print_png(path, pil_kwargs={"compress_level": 1})  # type: ignore[no-untyped-call]


def column_of(rows: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    return [row[key] for row in rows]


def label_axes(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)


def _name_ticks(axes: Axes, names: Sequence[str]) -> None:
    axes.set_xticks(range(len(names)), names, rotation=90 if _long(names) else 0)
    axes.set_yticks(range(len(names)), names)


def _name(row: Mapping[str, Any], keys: Sequence[str]) -> str:
    return ", ".join(str(row[key]) for key in keys)


def _numeric(rows: Sequence[Mapping[str, Any]], key: str) -> bool:
    try:
        return len({float(row[key]) for row in rows}) > 1
    except ValueError:
        return False
