"""Drawings of the papers' tables and figures, made again, in the style of `tracking/figures`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.rcsetup import cycler
from matplotlib.ticker import MaxNLocator

from cnnexp.papers.compare import Cell, Result, pick, scaling_label
from cnnexp.papers.measures import per_epoch
from cnnexp.system.table import number
from cnnexp.tracking.figures import Figure, column_of, entitle, label_axes, new_figure

# Okabe and Ito's colours, which the colour-blind can tell apart, without the palest
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
BLUE = COLOURS[0]
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", ":", "-.")
# looks of series: colour, marker and dash each tell one from the others, in print and to every eye
SERIES = list(cycler(linestyle=DASHES) * (cycler(color=COLOURS) + cycler(marker=MARKERS)))
BY_EPOCH = {"time/epoch_s": "epoch time (s)", "train/loss": "training loss"}


def draw(result: Result, folder: Path) -> None:
    """Draw a paper's table or figure, made again, into `folder`: figure.png and figure.svg."""
    drawn = figure(result)
    drawn.savefig(folder / "figure.png")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "cnnexp"}):  # text stays text, and no date is in the file
        drawn.savefig(folder / "figure.svg", metadata={"Date": None})


def figure(result: Result) -> Figure:
    experiment = result.experiment
    drawn = _lines(result) if experiment.axis else _epochs(result) if experiment.by_epoch else _bars(result)
    entitle(drawn, experiment.title)
    return drawn


def _bars(result: Result) -> Figure:
    """Return a panel per column: a bar per line, the paper's number as a hollow bar above ours."""
    lines, columns = result.experiment.lines, result.experiment.columns
    across = min(len(columns), 3 if len(lines) < 8 else 2)
    down = -(-len(columns) // across)
    figure, panels = new_figure(2.6 + 3.2 * across, down * (1 + 0.38 * len(lines)), across, down, sharey=True)
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
            _bar(axes, place, cell, start, printed)
        axes.set_yticks(range(len(lines)), [line.label for line in lines])
        axes.set_ylim(len(lines) - 0.4, -0.6)
        axes.margins(x=0.3)
        axes.set_xlim(left=start)
        if not logarithmic:
            axes.xaxis.set_major_locator(MaxNLocator(4))  # as many ticks after the layout as before
        if len(columns) > 1:
            axes.set_title(column.title, fontsize="medium")
        axes.grid(axis="x", alpha=0.3)
    shapes = [Patch(facecolor=BLUE, label="ours")]
    if any(cell.published is not None for row in result.cells for cell in row):
        shapes.append(Patch(facecolor="white", edgecolor="black", hatch="////", label="the paper"))
    figure.legend(handles=shapes, loc="outside lower center", ncols=2)
    return figure


def _bar(axes: Axes, place: int, cell: Cell, start: float, printed: bool) -> None:
    """Draw one line's bars at a place of the vertical axis: the paper's in the upper half, ours in the lower."""
    height = 0.38 if printed else 0.7
    ours_at = place + (0.2 if printed else 0)
    text: dict[str, Any] = {"fontsize": "x-small", "va": "center", "xytext": (3, 0), "textcoords": "offset points"}
    if cell.published is not None:
        at = place - 0.2
        axes.barh(at, cell.published - start, height, start, facecolor="white", edgecolor="black", hatch="////")
        axes.annotate(f"{cell.published:,g}", (cell.published, at), **text)
    if cell.ours is None:
        axes.annotate(cell.why, (start, ours_at), style="italic", color="#555555", **text)
    else:
        axes.barh(ours_at, cell.ours - start, height, start, color=BLUE, xerr=cell.spread)
        axes.annotate(number(cell.ours), (cell.ours + (cell.spread or 0), ours_at), **text)


def _lines(result: Result) -> Figure:
    """Return a line over the columns for every line of the table that has numbers."""
    experiment = result.experiment
    width, height, across = (13, 5.4, 2) if result.scaling else (7.5, 4.6, 1)
    figure, (axes, *right) = new_figure(width, height, across)
    values = [cell.ours for row in result.cells for cell in row if cell.ours]
    axes.set_yscale("log" if values and max(values) > 50 * min(values) else "linear")
    missing = []
    for i, (line, cells) in enumerate(zip(experiment.lines, result.cells, strict=True)):
        pairs = zip(experiment.columns, cells, strict=True)
        points = [(column.x, cell.ours, cell.spread or 0) for column, cell in pairs if cell.ours is not None]
        if points:
            x, y, spread = zip(*points, strict=True)
            axes.errorbar(x, y, spread if any(spread) else None, label=line.label, **SERIES[i % len(SERIES)])
        else:
            missing.append(line.jobs.get("backend.name", line.label))
    xs: list[Any] = [column.x for column in experiment.columns]
    label_axes(axes, experiment.axis, experiment.quantity)
    axes.set_xticks(xs, [f"{x:g}" for x in xs])
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    if experiment.top:
        above = axes.secondary_xaxis("top")
        above.set_xticks(xs, [f"{n:,}" for n in experiment.top[1]])
        above.set_xlabel(experiment.top[0])
    for panel in right:
        _scaling(panel, result)
    _legend(figure, axes, missing)
    return figure


def _scaling(axes: Axes, result: Result) -> None:
    """Draw the cost model: a colour per link; averaging parameters solid, gradients at every step dashed and hollow."""
    links = list(dict.fromkeys(row["link"] for row in result.scaling))
    for label in dict.fromkeys(scaling_label(row) for row in result.scaling):
        rows = [row for row in result.scaling if scaling_label(row) == label]
        style: dict[str, Any] = SERIES[links.index(rows[0]["link"]) % len(SERIES)]
        if rows[0]["sync"] == "gradients":
            style = {**style, "linestyle": "--", "markerfacecolor": "white"}
        axes.plot(column_of(rows, "workers"), column_of(rows, "epoch_s"), label=f"model: {label}", **style)
    measured = [(column.x, cell.ours) for column, cell in zip(result.experiment.columns, result.cells[0], strict=True)]
    found = [(x, seconds) for x, seconds in measured if seconds is not None]
    if found:
        cores = result.facts["machine.cores"]
        axes.plot(*zip(*found, strict=True), "k*", label=f"measured here, {cores} cores shared by all workers")
    axes.set(xscale="log", yscale="log")
    counts = list(dict.fromkeys(row["workers"] for row in result.scaling))
    axes.set_xticks(counts, [f"{count:,.0f}" for count in counts], rotation=45)
    axes.minorticks_off()
    label_axes(axes, result.experiment.axis, result.experiment.quantity)
    axes.legend(loc="lower left", fontsize="x-small", handlelength=4)  # long enough to show dashes


def _epochs(result: Result) -> Figure:
    """Return a metric over the epochs, a line per cell of the table; and the recall of each class, if asked for."""
    experiment = result.experiment
    figure, panels = new_figure(11 if experiment.recall else 7.5, 4.6, 2 if experiment.recall else 1)
    axes, missing, drawn = panels[0], list[str](), set[str]()
    for i, line in enumerate(experiment.lines):
        drawn_before = len(drawn)
        for j, column in enumerate(experiment.columns):
            for job in pick(result.jobs, {**column.jobs, **line.jobs}):
                if not job.epochs or job.folder in drawn:
                    continue
                drawn.add(job.folder)
                name = f"{line.label}, {column.title}" if column.jobs else line.label
                style = {**SERIES[i % len(SERIES)], "markevery": max(1, len(job.epochs) // 10)}
                if column.jobs:
                    style |= {"linestyle": DASHES[j % len(DASHES)], "marker": MARKERS[j]}
                axes.plot(column_of(job.epochs, "epoch"), per_epoch(job, experiment.by_epoch), label=name, **style)
        if len(drawn) == drawn_before:
            missing.append(line.jobs.get("backend.name", line.label))
    label_axes(axes, "epoch", BY_EPOCH[experiment.by_epoch])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    finished = [job for job in result.jobs if job.status == "FINISHED"]
    if experiment.recall and finished:
        best = max(finished, key=lambda job: job.metrics["final/test_accuracy"])
        values = [value for name, value in best.epochs[-1].items() if name.startswith("recall/")]
        bars = panels[1].bar(range(len(values)), values, color=BLUE)
        panels[1].bar_label(bars, [f"{value:.3f}" for value in values], fontsize="x-small")
        panels[1].set(xticks=range(len(values)), ylim=(min([0.9, *values]) - 0.02, 1.01))
        label_axes(panels[1], "class", "recall on the test split")
    _legend(figure, axes, missing)
    return figure


def _legend(figure: Figure, axes: Axes, missing: Sequence[str]) -> None:
    """Put the legend below the panels, with the backends that could not be run."""
    handles, labels = axes.get_legend_handles_labels()
    if missing:
        handles.append(Line2D([], [], linestyle=""))
        labels.append(f"not on this machine: {', '.join(dict.fromkeys(missing))}")
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize="small", frameon=False)
