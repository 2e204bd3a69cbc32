"""The figure of `cnnexp explain`: the parts of training steps as bars to one scale, and their place on the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cnnexp.measuring.explanation import Row, Side, rows, us_text
from cnnexp.tracking.figures import Axes, Figure, new_figure, roofline, save


def draw(path: Path, sides: Sequence[Side], title: str) -> None:
    """Write the figure as a PNG; its folder is made if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = figure(sides)
    drawn.suptitle(title, fontsize="medium")
    save(drawn, path)


def figure(sides: Sequence[Side]) -> Figure:
    """Return the bars and, of the first side, whose limits were measured, the roofline."""
    table = rows(sides)
    ours = sides[0]
    points = [
        (piece.name, piece.flops / piece.bytes, piece.gflops(), piece.what)
        for piece in (row.pieces[0] for row in table)
        if piece is not None and piece.flops and piece.bytes
    ]
    drawn = new_figure(13 if points else 7, max(4.2, 1.4 + 0.42 * len(table)))
    if not points:
        _bars(drawn.subplots(), sides, table)
        return drawn
    left, right = drawn.subplots(1, 2, width_ratios=(6, 7))
    _bars(left, sides, table)
    roofline(right, points, ours.limits)
    right.set_title(ours.label, fontsize="medium")
    return drawn


def _bars(axes: Axes, sides: Sequence[Side], table: Sequence[Row]) -> None:
    height = 0.8 / len(sides)
    for i, side in enumerate(sides):
        here = [(at, row.pieces[i]) for at, row in enumerate(table)]
        drawn = [(at, piece) for at, piece in here if piece is not None]
        places = [at + (i - (len(sides) - 1) / 2) * height for at, _ in drawn]
        bars = axes.barh(places, [piece.us for _, piece in drawn], height, label=f"{side.label}: {us_text(side.us)}")
        axes.bar_label(
            bars, [f" {us_text(piece.us)}  {piece.us / side.us:.0%}" for _, piece in drawn], fontsize="x-small"
        )
    axes.set_yticks(range(len(table)), [row.name for row in table], fontsize="small")
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.set_xlabel("microseconds an image, share of its own step")
    # above, where no bar is
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(sides), frameon=False, fontsize="small")
