"""The journal of a run or of a sweep: `journal.jsonl` of its folder, an event a line, and the only record it writes.

Whatever is known of one elsewhere follows from this file: a recorder reads it while the run goes on, and brings the
store up to it; so does the next recorder where one dies, the next start, and `cnnexp sync`. Imports nothing heavy.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO, Self, TextIO

from cnnexp.system.files import open_regular

JOURNAL = "journal.jsonl"
SCHEMA = 3  # of its events, in its first line; what a later version writes is not read as ours
FALLBACK = "backend.fallback"  # tag: the backend that took over from one whose compiler died
DISTURBED = "timing.disturbed"  # tag: whether other work took more of the time than a verdict stands
RUN, SWEEP = "run", "sweep"  # what a journal is of
KEY = "record.key"  # tag: names a run in any store; made when it first begins
FOLDER = "record.folder"  # tag: of the run, where its journal is
LACKING = "UNAVAILABLE"  # status of a run whose backend this machine cannot run
DIED = "DIED"  # of one that never ended
MODEL, EXAMPLE = "model", "input_example.json"  # folder of the run's, and an image in it that the model takes
MOST_BYTES, MOST_LINE = 1 << 32, 1 << 24  # of a journal, and of an event in it
_UNENDED: dict[str, Any] = {
    **{"status": DIED, "error": "the process died", "fallback": None, "disturbed": None, "stored": False},
    **{"metrics": {}, "tags": {}, "model": None, "artifacts": []},
}


class Journal:
    """What the journal of a run's folder says; `read` takes in what has been written since.

    What is no event of ours, as the half-written last line of a killed process, is left out. The folder may be missing.

    Attributes:
        facts: of its last `job` line kind (`RUN` or `SWEEP`), name, overrides, config, config_hash and contended (empty
            without one), with `status` (DIED if it never ended), `error` (or None), `fallback` (the backend that took
            over, or None), `disturbed` (by other work; None where it is not known), `begin` (what `Store.begin` is
            given, else empty), `run_id` (of the MLflow run, or None), `stored` (whether the store was brought up to the
            end), `metrics` (the final ones), `tags` (added at the end), `model` (what `Store.save_model` is given, or
            None), `artifacts` ((file or folder, folder among the artifacts) pairs beside the usual ones) and `time_ms`.
        epochs: by number, each once: its `metrics` by name, `time_ms`, when it ended, and `result`, all that a run
            needs to go on after it.
        unsent: numbers of the epochs that were read and that nobody has taken out.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._at = Path(folder) / JOURNAL, 0
        self._clear()

    def _clear(self) -> None:
        self.facts: dict[str, Any] = {
            "name": "", "overrides": [], "config": {}, "config_hash": "", "contended": False, "run_id": None,
            "time_ms": 0, "begin": {}, "kind": RUN, **_UNENDED,
        }  # fmt: skip
        self._key: str | None = None
        self.epochs: dict[int, dict[str, Any]] = {}
        self.unsent: list[int] = []

    @property
    def has_results(self) -> bool:
        """Whether it says what a store must have: an epoch of a run, or the end of a sweep."""
        return bool(self.epochs) or (self.facts["kind"] == SWEEP and self.facts["status"] != DIED)

    def read(self) -> Self:
        """Take in all whole lines that are new; return the journal."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), open_regular(self._path, MOST_BYTES) as file:
            if os.fstat(file.fileno()).st_size < self._at:  # another run's, in the place of one that never trained
                self._at = 0
                self._clear()
            file.seek(self._at)
            while (entry := _next_event(file)) is not None:
                self._at = file.tell()
                with contextlib.suppress(KeyError, TypeError, AttributeError):
                    self._take(entry)
        return self

    def _take(self, entry: dict[str, Any]) -> None:
        facts = self.facts
        match entry.pop("event"):
            case "job" if _describes(entry):  # the first, or of a process that goes on where another ended
                if facts["begin"] and facts["begin"]["tags"].get("config_hash") != entry.get("config_hash", ""):
                    facts["begin"] = {}  # it will begin a record of its own
                facts.update({**_UNENDED, **entry})
            case "begin":
                if self._key not in (None, entry["key"]):
                    self.unsent.clear()  # they are of another record
                facts["begin"], self._key = entry, entry["key"]
            case "recorded":
                facts["run_id"] = entry["run_id"]
            case "epoch":
                epoch, metrics = entry.pop("epoch"), dict(entry["metrics"])
                self.epochs[epoch] = {"time_ms": 0, "result": None, **entry, "metrics": metrics}
                self.unsent.append(epoch)
            case "model":
                facts["model"] = entry
            case "finish":
                facts.update(status=entry["status"], metrics=entry["metrics"], tags=entry["tags"])
                facts.update(error=entry["tags"].get("error"), fallback=entry["tags"].get(FALLBACK))
                facts["disturbed"] = {"true": True, "false": False}.get(entry["tags"].get(DISTURBED))
                facts.update(time_ms=entry.get("time_ms", 0), artifacts=entry.get("artifacts", []))
            case "stored":
                facts["stored"] = True


def read_journal(folder: Path) -> dict[str, Any]:
    """Return the facts of a `Journal`, its `epochs` (metrics of each) and `times_ms` (by epoch, of the end by 0)."""
    journal = Journal(folder).read()
    times_ms = {epoch: entry["time_ms"] for epoch, entry in journal.epochs.items()}
    epochs = [{"epoch": epoch, **entry["metrics"]} for epoch, entry in journal.epochs.items()]
    return {**journal.facts, "epochs": epochs, "times_ms": {**times_ms, 0: journal.facts["time_ms"]}}


def _describes(job: dict[str, Any]) -> bool:
    """Return whether a `job` line holds facts of the kinds that its readers take."""
    kinds = {"name": str, "overrides": list, "config": dict, "config_hash": str, "kind": str, "schema": int}
    right = all(isinstance(job.get(name, kind()), kind) for name, kind in kinds.items())
    right = right and all(isinstance(override, str) for override in job.get("overrides", []))
    return right and job.get("schema", SCHEMA) <= SCHEMA


def open_journal(path: Path, goes_on: bool = True) -> TextIO:
    """Open a journal to write to: behind its last whole line, or anew."""
    if not goes_on:
        return path.open("w", encoding="utf-8")
    with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
        os.ftruncate(file.fileno(), file.read().rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8")


def note(journal: TextIO, event: str, /, **facts: Any) -> None:
    """Write an event into an open journal; an epoch is on the disk when this returns, since checkpoints build on it."""
    journal.write(json.dumps({"event": event, **facts}) + "\n")
    journal.flush()
    if event == "epoch":
        os.fsync(journal.fileno())


def hash_in(journal: Path) -> str | None:
    """Return the config hash in the first line of a journal, which is its job's."""
    with contextlib.suppress(OSError), open_regular(journal, MOST_BYTES) as file:
        return (_next_event(file) or {}).get("config_hash")
    return None


def _next_event(file: BinaryIO) -> dict[str, Any] | None:
    """Return the next event of a journal, None at the end of its last whole line."""
    while (line := file.readline(MOST_LINE)) and line.endswith(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            entry = json.loads(line.decode("utf-8", errors="replace"))
            if isinstance(entry, dict):
                return entry
    return None
