"""A table as people read it: one model, shown on the screen, in Markdown and in HTML."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import rich.table


NARROWER = (40, 20, 12, 8, 1)  # columns of a text on the screen at most, labels twice; the first that fits is taken


@dataclass(frozen=True)
class Group:
    """Columns side by side under one title, each with its heading; one column alone may have none."""

    title: str
    headings: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Table:
    """Groups of columns after a column of labels, and rows: a label and a text for each column."""

    groups: Sequence[Group]
    rows: Sequence[Sequence[str]]

    def titles(self, between: str) -> list[str]:
        """Return what stands above each column after the labels: its group's title and its heading."""
        return [between.join(filter(None, (group.title, text))) for group in self.groups for text in group.headings]


def as_screen(table: Table, title: str, width: int) -> rich.table.Table:
    """Return the table for a screen so many columns wide; where that is narrow, texts go over several lines."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rows = [["", *table.titles("\n")], *table.rows]
    for most in NARROWER:
        wrapped = [[_wrapped(text, most if place else 2 * most) for place, text in enumerate(row)] for row in rows]
        lines = [[line for text in column for line in text.split("\n")] for column in zip(*wrapped, strict=True)]
        columns = [max(map(len, column)) for column in lines]
        if sum(columns) + len(columns) <= width:
            break
    shown = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for place, text in enumerate(wrapped[0]):
        shown.add_column(text, justify="right" if place else "left", overflow="fold")
    for row in wrapped[1:]:
        shown.add_row(*row)
    return shown


def _wrapped(text: str, width: int) -> str:
    lines = [textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in text.split("\n")]
    return "\n".join(lines)


def as_markdown(table: Table) -> list[str]:
    """Return the table as lines of Markdown."""
    titles = table.titles(": ")
    return [f"| {' | '.join(row)} |" for row in (["", *titles], ["---", *["--:"] * len(titles)], *table.rows)]


def as_html(table: Table) -> str:
    """Return the table as an HTML element; a second line of headings stands where any group has them."""
    heads = ["".join(_head(group.title, len(group.headings)) for group in table.groups)]
    kinds = [text for group in table.groups for text in group.headings]
    if any(kinds):
        heads.append("".join(_head(text) for text in kinds))
    head = "".join(f"<tr><th></th>{cells}</tr>" for cells in heads)
    body = "".join(f"<tr>{_head(row[0])}{''.join(map(_cell, row[1:]))}</tr>" for row in table.rows)
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def number(value: float | None) -> str:
    """Return a number with three or four significant digits, without exponents."""
    if value is None:
        return ""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = max(0, 3 - int(np.floor(np.log10(abs(value)))) - (0 if abs(value) >= 1 else 1))
    return f"{value:.{min(digits, 6)}f}"


def _head(text: str, columns: int = 1) -> str:
    span = f' colspan="{columns}"' if columns > 1 else ""
    return f"<th{span}>{html.escape(text)}</th>"


def _cell(text: str) -> str:
    return f"<td>{html.escape(text)}</td>"
