"""The journal of a run, as a file: an event a line, in `journal.jsonl` of the run's folder.

It is written before any store is told, so it is what a store is brought up to: by the recorder that takes over from a
dead one, by the next start, or by `cnnexp sync`. Imports nothing heavy, since the recorder reads it, too.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from cnnexp.system.files import open_regular

JOURNAL = "journal.jsonl"
FALLBACK = "backend.fallback"  # tag: the backend that took over from one whose compiler died
DISTURBED = "timing.disturbed"  # tag: whether other work took more of the time than a verdict stands
KEY = "record.key"  # tag: names a run in any store; made when it first begins
FOLDER = "record.folder"  # tag: of the run, which tells what a store lacks
LACKING = "UNAVAILABLE"  # status of a run whose backend this machine cannot run
DIED = "DIED"  # of one that never ended
MOST_BYTES, MOST_LINE = 1 << 32, 1 << 24  # of a journal, and of an event in it


def read_journal(folder: Path) -> dict[str, Any]:
    """Return what the journal of a run's folder tells.

    A line that is no event of ours, such as the last one of a process that was killed while it wrote, is left out.

    Returns:
        The facts of its last `job` line (name, overrides, config, config_hash, contended; empty without one), with
        `status` (DIED if it never ended), `error` (or None), `fallback` (the backend that took over, or None),
        `disturbed` (by other work; None where it is not known), `begin` (what `Store.begin` was given, else empty),
        `run_id` (of the MLflow run, or None), `stored` (whether the store was brought up to the end), `metrics` (the
        final ones), `tags` (added at the end), `epochs` (a list of metrics by name, each epoch once) and `times_ms`
        (by epoch, and the end's by 0: when it was).
    """
    unended: dict[str, Any] = {
        "status": DIED,
        "error": "the process died",
        "fallback": None,
        "disturbed": None,
        "metrics": {},
        "tags": {},
        "begin": {},
        "stored": False,
    }
    facts: dict[str, Any] = {
        "name": "", "overrides": [], "config": {}, "config_hash": "", "contended": False, "run_id": None, **unended
    }  # fmt: skip
    epochs: dict[int, dict[str, float]] = {}
    times_ms: dict[int, int] = {}
    for entry in _events(Path(folder) / JOURNAL):
        with contextlib.suppress(KeyError, TypeError, AttributeError):
            match entry.pop("event"):
                case "job" if _describes(entry):  # the first, or of a process that goes on where another ended
                    facts.update(unended)
                    facts.update(entry)
                case "begin":
                    facts["begin"] = dict(entry)
                case "recorded":
                    facts["run_id"] = entry["run_id"]
                case "epoch":
                    epochs[entry["epoch"]] = {"epoch": entry["epoch"], **entry["metrics"]}
                    times_ms[entry["epoch"]] = entry.get("time_ms", 0)
                case "finish":
                    facts.update(status=entry["status"], metrics=entry["metrics"], tags=entry["tags"])
                    facts.update(error=entry["tags"].get("error"), fallback=entry["tags"].get(FALLBACK))
                    facts["disturbed"] = {"true": True, "false": False}.get(entry["tags"].get(DISTURBED))
                    times_ms[0] = entry.get("time_ms", 0)
                case "stored":
                    facts["stored"] = True
    return {**facts, "epochs": list(epochs.values()), "times_ms": times_ms}


def _describes(job: dict[str, Any]) -> bool:
    """Return whether a `job` line holds facts of the kinds that its readers take."""
    kinds = {"name": str, "overrides": list, "config": dict, "config_hash": str}
    return all(isinstance(job.get(name, kind()), kind) for name, kind in kinds.items()) and all(
        isinstance(override, str) for override in job.get("overrides", [])
    )


def open_journal(path: Path, goes_on: bool = True) -> TextIO:
    """Open a journal to write to: behind its last whole line, or anew."""
    if not goes_on:
        return path.open("w", encoding="utf-8")
    with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
        os.ftruncate(file.fileno(), file.read().rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8")


def note(journal: TextIO, event: str, **facts: Any) -> None:
    """Write an event into an open journal."""
    journal.write(json.dumps({"event": event, **facts}) + "\n")
    journal.flush()


def store_status(status: str) -> str:
    """Return the status of a journal as MLflow has it."""
    return {LACKING: "FAILED", DIED: "KILLED"}.get(status, status)


def hash_in(journal: Path) -> str | None:
    """Return the config hash in the first line of a journal, which is its job's."""
    return next((entry.get("config_hash") for entry in _events(journal)), None)


def _events(journal: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), open_regular(journal, MOST_BYTES) as file:
        while line := file.readline(MOST_LINE):
            with contextlib.suppress(ValueError, RecursionError):
                entry = json.loads(line.decode("utf-8", errors="replace"))
                if isinstance(entry, dict):
                    yield entry
