"""A table as people read it: one model, shown on the screen, in Markdown and in HTML; and as CSV for programs."""

import csv
import html
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import rich.table


class Group(NamedTuple):
    """Columns side by side under one title, each with its heading; one column alone may have none."""

    title: str
    headings: tuple[str, ...] = ("",)


class Table(NamedTuple):
    """Groups of columns after columns of labels, and rows: the labels and a text for each column."""

    groups: Sequence[Group]  # of columns of numbers, aligned to the right
    rows: Sequence[Sequence[str]]  # a text for each label and column
    labels: Sequence[str] = ("",)  # titles of the columns of texts before them, aligned to the left

    def titles(self, between: str) -> list[str]:
        """Return what stands above each column: a label, or its group's title and its heading."""
        columns = [between.join(filter(None, (group.title, text))) for group in self.groups for text in group.headings]
        return [*self.labels, *columns]


def as_screen(table: Table, title: str | None, width: int) -> "rich.table.Table":
    """Return the table for a screen so many columns wide; where that is narrow, texts go over several lines."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    texts = list(zip(table.titles("\n"), *table.rows, strict=True))
    columns = [list(column) for column in texts]
    widths = [_widest(column) for column in columns]
    open_to = set(range(len(columns)))  # columns that can still be narrower
    while open_to and sum(widths) + 2 * len(widths) > width:
        i = max(open_to, key=lambda i: widths[i])
        narrower = [_wrapped(text, max(1, widths[i] - 1)) for text in texts[i]]
        if _widest(narrower) < widths[i]:
            columns[i], widths[i] = narrower, _widest(narrower)
        else:
            open_to.remove(i)
    shown = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for i, column in enumerate(columns):
        shown.add_column(column[0], justify="left" if i < len(table.labels) else "right", overflow="fold")
    for row in list(zip(*columns, strict=True))[1:]:
        shown.add_row(*row)
    return shown


def _widest(column: Sequence[str]) -> int:
    return max(len(line) for text in column for line in text.split("\n"))


def _wrapped(text: str, width: int) -> str:
    lines = [textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in text.split("\n")]
    return "\n".join(lines)


def as_markdown(table: Table) -> list[str]:
    titles, left = table.titles(": "), len(table.labels)
    lines = [titles, [*["---"] * left, *["--:"] * (len(titles) - left)], *table.rows]
    return [f"| {' | '.join(text.replace('|', chr(92) + '|') for text in line)} |" for line in lines]


def as_html(table: Table) -> str:
    """Return the table, of one label a row, as an HTML element; groups with headings give it a second line of them."""
    heads = ["".join(_head(group.title, len(group.headings)) for group in table.groups)]
    kinds = [text for group in table.groups for text in group.headings]
    if any(kinds):
        heads.append("".join(_head(text) for text in kinds))
    head = "".join(f"<tr><th></th>{cells}</tr>" for cells in heads)
    cells = ["".join(f"<td>{html.escape(text)}</td>" for text in row[1:]) for row in table.rows]
    body = "".join(f"<tr>{_head(row[0])}{own}</tr>" for row, own in zip(table.rows, cells, strict=True))
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write rows with a header of all their keys; what a row lacks is left empty."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


def number(value: float | None) -> str:
    """Return a number with three or four significant digits, without exponents."""
    if value is None:
        return ""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))) - (0 if abs(value) >= 1 else 1))
    return f"{value:.{min(digits, 6)}f}"


def rounded(value: float) -> str:
    """Return a number with three significant digits, a large one whole."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def _head(text: str, columns: int = 1) -> str:
    span = f' colspan="{columns}"' if columns > 1 else ""
    return f"<th{span}>{html.escape(text)}</th>"
