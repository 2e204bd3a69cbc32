"""An experiment: a paper's table or figure, as lines and columns that say which of our jobs make each number again.

Each cell is made by the jobs of a sweep whose config holds what its line and its column ask for, and by a measure of
such a job. The published numbers stand as printed; None stands where the paper has no number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cnnexp.papers.measures import Measure, epoch_s


@dataclass(frozen=True)
class Line:
    """A row of a table, a series of a figure."""

    label: str  # as the paper has it, or ours where the paper has no such row
    jobs: Mapping[str, Any] = field(default_factory=dict)  # config keys and values of the jobs that make it
    published: tuple[float | None, ...] = ()  # of the experiment's columns, first to last; none for those left over
    measure: Measure | None = None  # of its own, else the column's, else the experiment's
    against: Mapping[str, Any] | None = None  # makes it a speedup: the measure of these jobs over that of its own


@dataclass(frozen=True)
class Column:
    """A column of a table, a place on a figure's axis; attributes as `Line`, `x` its number on the axis."""

    title: str
    jobs: Mapping[str, Any] = field(default_factory=dict)
    measure: Measure | None = None
    x: float | None = None


@dataclass(frozen=True)
class Experiment:
    """One table or figure of a paper, drawn as a panel per column and a bar per line; or over x; or over epochs."""

    title: str
    source: str  # paper and place
    lines: tuple[Line, ...]
    columns: tuple[Column, ...]
    measure: Measure = epoch_s
    quantity: str = "epoch time (s)"  # what the numbers are, with their unit
    axis: str = ""  # what the columns vary: draws a line over their x
    top: tuple[str, tuple[float, ...]] | None = None  # a second horizontal axis: its name, its number for each column
    by_epoch: str = ""  # the metric to draw over epochs
    recall: bool = False  # adds a panel with the recall of each class
    scaling: bool = False  # adds a panel and a table with more workers and other links, by the cost model of its jobs
    notes: tuple[str, ...] = ()  # what differs from the paper, and why


def on(backend: str) -> dict[str, Any]:
    """Return what a line asks of its jobs: their backend."""
    return {"backend.name": backend}


def line(label: str, *published: float | None) -> Line:
    """Return a line made by the jobs of the backend that its label ends in, as `GPU: gpu-naive` does."""
    return Line(label, on(label.rpartition(": ")[2]), published)


def over(key: str, values: Sequence[float], title: str = "{}") -> tuple[Column, ...]:
    """Return a column for each value of a config key, under `title` with the value in it."""
    return tuple(Column(title.format(value), {key: value}, x=float(value)) for value in values)
