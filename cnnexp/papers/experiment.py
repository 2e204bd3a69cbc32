"""An experiment: a paper's table or figure, as lines and columns that say which of our jobs make each number again.

Each cell is made by the jobs of a sweep whose config holds what its line and its column ask for, and by a measure of
such a job. The published numbers stand as printed; None stands where the paper has no number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cnnexp.papers.measures import Measure, epoch_s


@dataclass(frozen=True)
class Line:
    """A row of a table, a series of a figure.

    Attributes:
        label: as the paper has it, or ours where the paper has no such row.
        jobs: config keys and values of the jobs that make it.
        published: one number per column of the experiment, first to last; the paper has none for those left over.
        measure: of its own, else the column's, else the experiment's.
        against: makes the line a speedup: the measure of these jobs over that of its own.
    """

    label: str
    jobs: Mapping[str, Any] = field(default_factory=dict)
    published: tuple[float | None, ...] = ()
    measure: Measure | None = None
    against: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Column:
    """A column of a table, a place on a figure's axis; attributes as `Line`, `x` its number on the axis."""

    title: str
    jobs: Mapping[str, Any] = field(default_factory=dict)
    measure: Measure | None = None
    x: float | None = None


@dataclass(frozen=True)
class Experiment:
    """One table or figure of a paper.

    Attributes:
        source: paper and place.
        quantity: what the numbers are, with their unit.
        lines, columns: the table.
        measure: of a job.
        figure: `bars` (a panel per column, a bar per line), `lines` (over the columns' x), or `epochs` (over epochs).
        axis: what the columns vary.
        top: a second horizontal axis: its name and its number for each column.
        by_epoch: of figure `epochs`, the metric drawn; `recall` adds a panel with the recall of each class.
        scaling: adds a panel and a table with more workers and other links, as the cost model of its jobs has them.
        notes: what differs from the paper, and why.
    """

    title: str
    source: str
    quantity: str
    lines: tuple[Line, ...]
    columns: tuple[Column, ...]
    measure: Measure = epoch_s
    figure: Literal["bars", "lines", "epochs"] = "bars"
    axis: str = ""
    top: tuple[str, tuple[float, ...]] | None = None
    by_epoch: str = "time/epoch_s"
    recall: bool = False
    scaling: bool = False
    notes: tuple[str, ...] = ()


def on(backend: str) -> dict[str, Any]:
    """Return what a line asks of its jobs: their backend."""
    return {"backend.name": backend}


def over(key: str, values: Sequence[float], title: str = "{}") -> tuple[Column, ...]:
    """Return a column for each value of a config key, under `title` with the value in it."""
    return tuple(Column(title.format(value), {key: value}, x=float(value)) for value in values)
