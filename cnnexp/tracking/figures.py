"""Figures of a run and of a sweep: the only importer of matplotlib.

Functions take plain values and file names, since they are called in the recorder's process, with JSON between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from cnnexp.papers import page, published

if TYPE_CHECKING:
    from cnnexp.papers.page import Cell, Result

DPI = 100
# Okabe and Ito's colours, which the colour-blind can tell apart, without the palest
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
BLUE = COLOURS[0]
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", ":", "-.")
BY_EPOCH = {"time/epoch_s": "epoch time (s)", "train/loss": "training loss"}
SMALLEST_SHARE = 0.002  # of the wall time, for an entry of a ledger to have a bar of its own
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
        _save(figure, Path(folder) / f"{name}.png")


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
            _save(comparison(measured, varied, metric, label), Path(folder) / f"{name}.png")


def draw_profile(folder: str, profile: Mapping[str, Any], title: str) -> None:
    """Draw where a run's time went into `folder`: profile.png and, where layers were clocked, roofline.png.

    Args:
        folder: made if missing.
        profile: of `ledger.report`.
        title: of every figure.
    """
    figures = {"profile": ledger(profile)}
    if profile["layered"]:
        figures["roofline"] = roofline(profile)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.suptitle(title, fontsize="medium")
        _save(figure, Path(folder) / f"{name}.png")


def ledger(profile: Mapping[str, Any]) -> Figure:
    """Return the seconds of every entry of a profile's ledger, largest first."""
    seconds = {f"{entry['layer']} {entry['what']}".strip(): entry["seconds"] for entry in profile["entries"]}
    shown = {name: s for name, s in seconds.items() if s >= SMALLEST_SHARE * profile["wall_s"]}
    if len(shown) < len(seconds):
        shown[f"{len(seconds) - len(shown)} smaller entries"] = sum(seconds.values()) - sum(shown.values())
    figure = _figure(7, 1.2 + 0.28 * len(shown))
    axes = figure.subplots()
    bars = axes.barh(list(shown), list(shown.values()))
    axes.bar_label(bars, [f" {s / profile['wall_s']:.1%}" for s in shown.values()], fontsize="x-small")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    accounted = f"{profile['accounted']:.1%} of {profile['wall_s']:.2f} s accounted for"
    axes.set_xlabel(f"seconds and share of the wall time; {accounted}")
    return figure


def roofline(profile: Mapping[str, Any]) -> Figure:
    """Return the speed of every layer's pass against its arithmetic intensity, under the machine's two limits."""
    figure = _figure(7, 4.4)
    axes = figure.subplots()
    layers = [layer for layer in profile["layers"] if layer["flops"] > 0 and layer["seconds"] > 0]
    intensity = np.array([layer["flops"] / layer["bytes"] for layer in layers])
    speed = np.array([layer["flops"] / layer["seconds"] / 1e9 for layer in layers])
    limits = profile["machine"]
    span = np.geomspace(min(0.05, *intensity) / 2, max(100.0, *intensity) * 2, 200)
    axes.plot(span, np.minimum(limits["gflops"], span * limits["gb_per_s"]), color="black", label="limit, measured")
    for what, marker in (("forward", "o"), ("backward", "s")):
        chosen = [i for i, layer in enumerate(layers) if layer["pass"] == what]
        axes.scatter(intensity[chosen], speed[chosen], marker=marker, label=what, zorder=3)
    for i, layer in enumerate(layers):
        above = layer["pass"] == "forward"
        place: dict[str, Any] = {"xytext": (0, 6 if above else -6), "va": "bottom" if above else "top"}
        axes.annotate(
            layer["name"],
            (intensity[i], speed[i]),
            textcoords="offset points",
            ha="center",
            fontsize="x-small",
            **place,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    _label(axes, "arithmetic intensity (FLOP per byte, from the shapes)", "GFLOP/s")
    axes.legend(loc="lower right")
    return figure


def draw_paper(result: Result, folder: Path) -> None:
    """Draw a paper's table or figure, made again, into `folder`: figure.png and figure.svg."""
    draw = {"bars": _paper_bars, "lines": _paper_lines, "epochs": _paper_epochs}[result.experiment.figure]
    figure = draw(result)
    figure.suptitle(result.experiment.title, fontsize="medium")
    for suffix in ("png", "svg"):
        # no date in the file, and text that stays text
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "cnnexp"}):
            figure.savefig(folder / f"figure.{suffix}", metadata={"Date": None} if suffix == "svg" else None)


def _paper_bars(result: Result) -> Figure:
    """Return a panel per column: a bar per line, the paper's number as a hollow bar above ours."""
    lines, columns = result.experiment.lines, result.experiment.columns
    across = min(len(columns), 3 if len(lines) < 8 else 2)
    down = -(-len(columns) // across)
    figure = _figure(2.6 + 3.2 * across, down * (1 + 0.38 * len(lines)))
    panels = figure.subplots(down, across, sharey=True, squeeze=False).ravel()
    for axes in panels[len(columns) :]:
        axes.remove()
    for i, (column, axes) in enumerate(zip(columns, panels, strict=False)):
        cells = [row[i] for row in result.cells]
        values = [v for cell in cells for v in (cell.published, cell.ours) if v]
        logarithmic = bool(values) and max(values) > 50 * min(values)
        axes.set_xscale("log" if logarithmic else "linear")
        # a logarithmic axis has no 0 for a bar to start from or a text to stand at
        start = min(values) / 3 if logarithmic else 0
        printed = any(cell.published is not None for cell in cells)
        for place, cell in enumerate(cells):
            _paper_bar(axes, place, cell, start, printed)
        axes.set_yticks(range(len(lines)), [line.label for line in lines])
        axes.set_ylim(len(lines) - 0.4, -0.6)
        axes.margins(x=0.3)
        axes.set_xlim(left=start)
        if len(columns) > 1:
            axes.set_title(column.title, fontsize="medium")
        axes.grid(axis="x", alpha=0.3)
    shapes = [Patch(facecolor=BLUE, label="ours")]
    if any(cell.published is not None for row in result.cells for cell in row):
        shapes.append(Patch(facecolor="white", edgecolor="black", hatch="////", label="the paper"))
    figure.legend(handles=shapes, loc="outside lower center", ncols=2)
    return figure


def _paper_bar(axes, place: int, cell: Cell, start: float, printed: bool) -> None:
    """Draw one line's bars at a place of the vertical axis: the paper's in the upper half, ours in the lower."""
    height = 0.38 if printed else 0.7
    ours_at = place + (0.2 if printed else 0)
    text = {"fontsize": "x-small", "va": "center", "xytext": (3, 0), "textcoords": "offset points"}
    if cell.published is not None:
        at = place - 0.2
        axes.barh(at, cell.published - start, height, start, facecolor="white", edgecolor="black", hatch="////")
        axes.annotate(f"{cell.published:,g}", (cell.published, at), **text)
    if cell.ours is None:
        axes.annotate(cell.why, (start, ours_at), style="italic", color="#555555", **text)
    else:
        axes.barh(ours_at, cell.ours - start, height, start, color=BLUE, xerr=cell.spread)
        axes.annotate(page.number(cell.ours), (cell.ours + (cell.spread or 0), ours_at), **text)


def _paper_lines(result: Result) -> Figure:
    """Return a line over the columns for every line of the table that has numbers."""
    experiment = result.experiment
    figure = _figure(13 if result.scaling else 7.5, 5.4 if result.scaling else 4.6)
    axes, *right = figure.subplots(1, 2 if result.scaling else 1, squeeze=False)[0]
    values = [cell.ours for row in result.cells for cell in row if cell.ours]
    axes.set_yscale("log" if values and max(values) > 50 * min(values) else "linear")
    missing = []
    for i, (line, cells) in enumerate(zip(experiment.lines, result.cells, strict=True)):
        points = [
            (column.x, cell.ours, cell.spread or 0)
            for column, cell in zip(experiment.columns, cells, strict=True)
            if cell.ours is not None
        ]
        if points:
            x, y, spread = zip(*points, strict=True)
            axes.errorbar(x, y, spread if any(spread) else None, label=line.label, **_series(i))
        else:
            missing.append(line.jobs.get("backend.name", line.label))
    xs = [column.x for column in experiment.columns]
    _label(axes, experiment.axis, experiment.quantity)
    axes.set_xticks(xs, [f"{x:g}" for x in xs])
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    if experiment.top:
        above = axes.secondary_xaxis("top")
        above.set_xticks(xs, [f"{n:,}" for n in experiment.top[1]])
        above.set_xlabel(experiment.top[0])
    for panel in right:
        _paper_scaling(panel, result)
    _paper_legend(figure, axes, missing)
    return figure


def _paper_scaling(axes, result: Result) -> None:
    """Draw the cost model: a colour per link; averaging parameters solid, gradients at every step dashed and hollow."""
    links = list(dict.fromkeys(row["link"] for row in result.scaling))
    for label in dict.fromkeys(page.scaling_label(row) for row in result.scaling):
        rows = [row for row in result.scaling if page.scaling_label(row) == label]
        style = _series(links.index(rows[0]["link"]))
        if rows[0]["sync"] == "gradients":
            style |= {"linestyle": "--", "markerfacecolor": "white"}
        axes.plot(_column(rows, "workers"), _column(rows, "epoch_s"), label=f"model: {label}", **style)
    measured = [(column.x, cell.ours) for column, cell in zip(result.experiment.columns, result.cells[0], strict=True)]
    found = [(x, seconds) for x, seconds in measured if seconds is not None]
    if found:
        cores = result.facts["machine.cores"]
        axes.plot(*zip(*found, strict=True), "k*", label=f"measured here, {cores} cores shared by all workers")
    axes.set_xscale("log")
    axes.set_yscale("log")
    counts = list(dict.fromkeys(row["workers"] for row in result.scaling))
    axes.set_xticks(counts, [f"{count:,.0f}" for count in counts], rotation=45)
    axes.minorticks_off()
    _label(axes, result.experiment.axis, result.experiment.quantity)
    axes.legend(loc="lower left", fontsize="x-small", handlelength=4)  # long enough to show dashes


def _paper_epochs(result: Result) -> Figure:
    """Return a metric over the epochs, a line per cell of the table; and the recall of each class, if asked for."""
    experiment = result.experiment
    figure = _figure(11 if experiment.recall else 7.5, 4.6)
    panels = figure.subplots(1, 2 if experiment.recall else 1, squeeze=False)[0]
    axes, missing = panels[0], []
    drawn: set[str] = set()
    for i, line in enumerate(experiment.lines):
        found = False
        for j, column in enumerate(experiment.columns):
            for job in page.pick(result.jobs, {**column.jobs, **line.jobs}):
                if not job.epochs or job.folder in drawn:
                    continue
                drawn.add(job.folder)
                found = True
                name = f"{line.label}, {column.title}" if column.jobs else line.label
                style = (
                    {**_series(i), "linestyle": DASHES[j % len(DASHES)], "marker": MARKERS[j]}
                    if column.jobs
                    else _series(i)
                )
                marker_every = max(1, len(job.epochs) // 10)
                y = published.per_epoch(job, experiment.by_epoch)
                axes.plot(_column(job.epochs, "epoch"), y, label=name, markevery=marker_every, **style)
        if not found:
            missing.append(line.jobs.get("backend.name", line.label))
    _label(axes, "epoch", BY_EPOCH[experiment.by_epoch])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    finished = [job for job in result.jobs if job.status == "FINISHED"]
    if experiment.recall and finished:
        best = max(finished, key=lambda job: job.metrics["final/test_accuracy"])
        values = page.recalls(best)
        bars = panels[1].bar(range(len(values)), values, color=BLUE)
        panels[1].bar_label(bars, [f"{value:.3f}" for value in values], fontsize="x-small")
        panels[1].set_xticks(range(len(values)))
        panels[1].set_ylim(min(0.9, *values) - 0.02, 1.01)
        _label(panels[1], "class", "recall on the test split")
    _paper_legend(figure, axes, missing)
    return figure


def _paper_legend(figure: Figure, axes, missing: Sequence[str]) -> None:
    """Put the legend below the panels, with the backends that could not be run."""
    handles, labels = axes.get_legend_handles_labels()
    if missing:
        handles.append(Line2D([], [], linestyle=""))
        labels.append(f"not on this machine: {', '.join(dict.fromkeys(missing))}")
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize="small", frameon=False)


def _series(i: int) -> dict[str, Any]:
    """Return the look of a series: colour, marker and dash each tell it from the others, in print and to every eye."""
    return {
        "color": COLOURS[i % len(COLOURS)],
        "marker": MARKERS[i % len(MARKERS)],
        "linestyle": DASHES[i // len(COLOURS) % len(DASHES)],
    }


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
    figure = _figure(side + 0.6, side)
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
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    """Write a PNG. Unlike `savefig` this lays the figure out once, in half the time."""
    FigureCanvasAgg(figure).print_png(path)


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
