"""`cnnexp runs`: the runs under `outputs/`, read from their journals: no store is asked, and no page is served."""

import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cnnexp.app.console import make_console, say
from cnnexp.errors import ConfigError, did_you_mean
from cnnexp.measuring.environment import outputs_dir
from cnnexp.system.table import Group, Table, as_screen
from cnnexp.tracking.events import DIED, JOURNAL, RUN, read_journal
from cnnexp.tracking.folder import is_locked
from cnnexp.tracking.metrics import flatten

LAST = 20  # runs, where nobody says how many
TIME = "%Y-%m-%d %H:%M"
# title of a column, by which rows are sorted, too -> its metric and its format
COLUMNS = {
    "epochs": ("epochs", ",.0f"),
    "speedup": ("speedup/median", ".3g"),
    "images/s": ("throughput/median_images_per_s", ",.0f"),
    "accuracy": ("final/test_accuracy", ".2%"),
}
LABELS = ("run", "ended", "name", "status")
SORT = ("ended", *COLUMNS)


def command(arguments: Sequence[str]) -> None:
    """Show the newest runs that have every KEY=VALUE of the command line, the newest or the highest first.

    `last=N` shows so many; `sort=COLUMN` is one of `SORT`; every other word is `status=...`, or a group or key of the
    config with its value; ConfigError is raised where one is none of these.
    """
    asked = {"last": str(LAST), "sort": SORT[0], **dict(word.partition("=")[::2] for word in arguments)}
    last, sort = asked.pop("last"), asked.pop("sort")
    if not (last.isascii() and last.isdecimal() and int(last[:9]) > 0):
        raise ConfigError(f"runs last={last}: must be a whole number >= 1")
    if sort not in SORT:
        raise ConfigError(f"runs sort={sort}: legal: {', '.join(SORT)}{did_you_mean(sort, SORT)}")
    journals = {path.parent: read_journal(path.parent) for path in outputs_dir().rglob(JOURNAL)}
    runs = [_run(folder, journal) for folder, journal in journals.items() if journal["kind"] == RUN]
    legal = {key for run in runs for key in run["keys"]}
    for key, value in asked.items():
        if runs and key not in legal:
            near = did_you_mean(key, legal)
            given = f"{key}={value}" if value else key
            raise ConfigError(f"runs {given}: legal: last, sort, status, or a key of the config{near}")
    found = [run for run in runs if all(run["keys"].get(key) == value for key, value in asked.items())]
    found = sorted(found, key=lambda run: -run["ended"])[: int(last)]
    found.sort(key=lambda run: -run.get(sort, float("-inf")))
    console = make_console()
    rows, titles = [_row(run) for run in found], [*LABELS, *COLUMNS]
    longest = (max(len(word) for text in column for word in text.split()) for column in zip(titles, *rows, strict=True))
    if sum(longest) + 2 * len(titles) > console.width:  # a table would break what is to be copied
        for run, *texts in rows:
            told = ", ".join(f"{title} {text}" for title, text in zip(titles[1:], texts, strict=True) if text)
            say(console, f"{run}\n{textwrap.fill(told, console.width, initial_indent='  ', subsequent_indent='  ')}")
    else:
        table = Table([Group(name) for name in COLUMNS], rows, LABELS)
        console.print(as_screen(table, None, console.width) if found else "", highlight=False, markup=False)
    say(console, f"{len(found)} of {len(runs)} runs under {outputs_dir()}")


def _run(folder: Path, journal: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is shown of a run: its numbers by the title of their column, `ended` in seconds; and its `keys`."""
    status = "RUNNING" if journal["status"] == DIED and is_locked(folder) else journal["status"]
    keys = {key.removesuffix(".name"): value for key, value in flatten(journal["config"]).items()}
    values = {**journal["metrics"], "epochs": len(journal["epochs"])}
    return {
        "folder": folder,
        "id": journal["run_id"],
        "name": journal["name"],
        "ended": max([0, *journal["times_ms"].values()]) / 1000 or (folder / JOURNAL).stat().st_mtime,
        "keys": {**keys, "status": status},
        **{title: values[name] for title, (name, _) in COLUMNS.items() if isinstance(values.get(name), int | float)},
    }


def _row(run: Mapping[str, Any]) -> list[str]:
    numbers = [format(run[title], form) if title in run else "" for title, (_, form) in COLUMNS.items()]
    named = run["id"][:8] if run["id"] else str(run["folder"].relative_to(outputs_dir().parent))
    return [named, time.strftime(TIME, time.localtime(run["ended"])), run["name"], run["keys"]["status"], *numbers]
