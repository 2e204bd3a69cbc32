"""`cnnexp explain`: why a run is as fast as it is, part by part of its training step, on the screen and as a figure."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cnnexp.app.console import LINE, make_console
from cnnexp.app.resume import find_run, folder_of
from cnnexp.errors import ConfigError
from cnnexp.measuring.explanation import Row, Side, rows, sentences, side_of
from cnnexp.tracking.events import read_journal
from cnnexp.tracking.journal import PROFILE

NAME, SIDE, US, SHARE = 24, 14, 9, 6  # columns of the table; bars have what is left
EIGHTHS = " ▏▎▍▌▋▊▉█"


def command(arguments: Sequence[str]) -> None:
    """Print the step of a run beside its baseline's, or of two runs, and why they differ; draw it.

    Args:
        arguments: one run or two, see `resume.find_run`.

    Raises:
        ConfigError: not one or two runs, or one that was not profiled.
        CheckpointError: there is no such run.
    """
    if len(arguments) not in (1, 2):
        raise ConfigError("explain: give a run, to see it beside its baseline, or two: explain RUN | RUN RUN")
    folders = [folder_of(find_run(run, f"explain {run}")) for run in arguments]
    profiles = [_profile(run, folder) for run, folder in zip(arguments, folders, strict=True)]
    names = [str(read_journal(folder)["name"]) for folder in folders]
    console = make_console()
    sides = sides_of(profiles, names)
    file = folders[0] / "figures" / ("explain.png" if len(folders) == 1 else f"explain-{folders[1].name}.png")
    for line in screen(sides, " | ".join(names), min(console.width, LINE), _draws_blocks(console.encoding)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    from cnnexp.tracking.explained import draw  # loads matplotlib: after the answer is there

    draw(file, sides, " | ".join(names))
    console.print(f"\nThe figure: {file}", highlight=False, markup=False, soft_wrap=True)


def sides_of(profiles: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Side]:
    """Return the steps to set beside each other: two runs', or a run's and its baseline's, where it had one."""
    if len(profiles) == 1:
        beside = profiles[0].get("baseline")
        return [side_of(profiles[0]), *([side_of(beside)] if beside else [])]
    labels = [str(profile["backend"]) for profile in profiles]
    if labels[0] == labels[1]:
        labels = [f"{label} {number}" for number, label in enumerate(labels, 1)]
    return [side_of(profile, label) for profile, label in zip(profiles, labels, strict=True)]


def screen(sides: Sequence[Side], title: str, width: int = LINE, blocks: bool = True) -> list[str]:
    """Return the lines to show: a bar per part and side, all to one scale, then the sentences.

    Args:
        sides: one or two.
        title: what was run.
        width: of the screen.
        blocks: whether it shows letters that are parts of a bar.
    """
    table = rows(sides)
    bar = max(8, width - NAME - SIDE - US - SHARE - 2)
    longest = max((piece.us for row in table for piece in row.pieces if piece is not None), default=0.0)
    lines = [textwrap.shorten(title, width, placeholder="..."), ""]
    if table:
        lines.append(f"{'part of a step':{NAME}}{'':{SIDE}}{'us/image':>{US}}{'share':>{SHARE}}")
    for row in table:
        lines += _row(row, sides, lambda us: _bar(us / longest * bar, blocks))
    whole = [f"{'the whole step':{NAME}}" if i == 0 else " " * NAME for i in range(len(sides))]
    lines += [
        f"{name}{side.label[: SIDE - 1]:{SIDE}}{_number(side.us):>{US}}"
        for name, side in zip(whole, sides, strict=True)
    ]
    for text in sentences(sides):
        lines += ["", *textwrap.wrap(text, width, break_on_hyphens=False)]
    return lines


def _row(row: Row, sides: Sequence[Side], bar_of: Any) -> list[str]:
    """Return a line per side that has the part; its name goes over as many as there are."""
    here = [(side, piece) for side, piece in zip(sides, row.pieces, strict=True) if piece is not None]
    name = textwrap.wrap(row.name, NAME - 1)
    lines = []
    for i in range(max(len(here), len(name))):
        line = f"{name[i] if i < len(name) else '':{NAME}}"
        if i < len(here):
            side, piece = here[i]
            share = f"{piece.us / side.us:.1%}"
            line += f"{side.label[: SIDE - 1]:{SIDE}}{_number(piece.us):>{US}}{share:>{SHARE + 1}} {bar_of(piece.us)}"
        lines.append(line.rstrip())
    return lines


def _bar(length: float, blocks: bool) -> str:
    if not blocks:
        return "#" * round(length)
    whole, eighths = divmod(round(8 * length), 8)
    return EIGHTHS[8] * whole + (EIGHTHS[eighths] if eighths else "")


def _number(us: float) -> str:
    return f"{us:,.0f}" if us >= 1000 else f"{us:.3g}"


def _draws_blocks(encoding: str) -> bool:
    return encoding.lower().startswith("utf")


def _profile(run: str, folder: Path) -> dict[str, Any]:
    """Return the profile that a run recorded."""
    try:
        profile: dict[str, Any] = json.loads((folder / PROFILE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"explain {run}: its steps were not clocked; run it again with trainer.profile=true"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"explain {run}: {folder / PROFILE}: {error}") from error
    if "us_per_image" not in profile:
        raise ConfigError(f"explain {run}: recorded by an older cnnexp; run it again with trainer.profile=true")
    return profile
