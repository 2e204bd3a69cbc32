"""Our numbers beside the published ones: the cells of an experiment, made by the jobs in a sweep's folder."""

import csv
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cnnexp.errors import DataError
from cnnexp.measuring import cost_model, environment
from cnnexp.papers import EXPERIMENTS
from cnnexp.papers.experiment import Column, Experiment, Line
from cnnexp.papers.measures import Job
from cnnexp.tracking.events import JOURNAL, LACKING, read_journal
from cnnexp.tracking.metrics import leaves

FACTS = "sweep.json"  # of a sweep's folder: what was run, where


class Cell(NamedTuple):
    """One number made again."""

    published: float | None  # as printed, or None
    ours: float | None  # the mean over the jobs that make it, or None where there is none
    spread: float | None = None  # their standard deviation where there are several (seeds), else None
    why: str = ""  # what stands there instead of a number

    @property
    def ratio(self) -> float | None:
        return None if self.published in (None, 0) or self.ours is None else self.ours / self.published


class Result(NamedTuple):
    """An experiment with its jobs, the cells they make, by line and column, and rows of `cost_model.extrapolate`."""

    experiment: Experiment
    jobs: Sequence[Job]
    cells: Sequence[Sequence[Cell]]
    facts: Mapping[str, Any]
    scaling: Sequence[Mapping[str, Any]] = ()


def note_facts(folder: Path, paper: str | None, overrides: Sequence[str]) -> None:
    """Keep beside a sweep what a reader of its report must know: command, machine, versions, code."""
    here = {**environment.machine_facts(), **environment.versions(), **environment.git_facts()}
    facts = {"paper": paper, "command": f"python -m cnnexp {' '.join(overrides)}", **here}
    (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def read_facts(folder: Path) -> dict[str, Any]:
    """Return what `note_facts` kept; raise DataError where the folder is not one of a sweep."""
    try:
        return json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{folder}: not the folder of a sweep: it has no {FACTS}") from error


def compare(folder: Path, key: str) -> Result:
    """Return an experiment's cells, made by the jobs in a sweep's folder."""
    experiment = EXPERIMENTS[key]
    paths = sorted((path.parent for path in folder.glob(f"*/{JOURNAL}")), key=lambda path: (len(path.name), path.name))
    jobs = [_job(path) for path in paths]
    columns = list(enumerate(experiment.columns))
    cells = [[_cell(experiment, line, column, i, jobs) for i, column in columns] for line in experiment.lines]
    return Result(experiment, jobs, cells, read_facts(folder), _scaling(jobs) if experiment.scaling else ())


def _scaling(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Return the cost model's rows of the first job that has any; its constants were measured with fewest workers."""
    path = next((path for job in jobs if (path := Path(job.folder) / cost_model.TABLE).is_file()), None)
    rows = csv.DictReader(path.read_text(encoding="utf-8").splitlines() if path is not None else [])
    return [{key: text if key in ("link", "sync") else float(text) for key, text in row.items()} for row in rows]


def _job(folder: Path) -> Job:
    journal = read_journal(folder)
    begun, tags = journal["begin"], journal["begin"].get("tags", {})
    computed = {"backend.name": journal["fallback"]} if journal["fallback"] else {}
    return Job(
        config=leaves(journal["config"]) | computed,
        **{key: journal[key] for key in ("status", "error", "metrics", "epochs")},
        images=begun.get("dataset", {}).get("profile", {}).get("train", 0),
        folder=str(folder),
        threads=int(tags.get("threads", 0)),
    )


def _cell(experiment: Experiment, line: Line, column: Column, position: int, jobs: Sequence[Job]) -> Cell:
    published = line.published[position] if position < len(line.published) else None
    measure = line.measure or column.measure or experiment.measure

    def measured(chosen: Sequence[Job]) -> list[float]:
        return [value for job in chosen if job.status == "FINISHED" and (value := measure(job)) is not None]

    chosen = pick(jobs, {**column.jobs, **line.jobs})
    values = measured(chosen)
    if line.against is not None and values:
        base = measured(pick(jobs, {**column.jobs, **line.against}))
        values = [statistics.fmean(base) / value for value in values] if base else []
    if values:
        return Cell(published, statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)
    statuses = {job.status for job in chosen}
    ended = "–" if statuses <= {"FINISHED"} else next(iter(statuses)).lower()
    return Cell(published, None, None, "not on this machine" if LACKING in statuses else ended)


def pick(jobs: Sequence[Job], asked: Mapping[str, Any]) -> list[Job]:
    """Return the jobs whose config holds what is asked for."""
    return [job for job in jobs if all(job.config.get(key) == value for key, value in asked.items())]


def scaling_label(row: Mapping[str, Any]) -> str:
    """Return the name of a row's link and of how its workers keep together."""
    return f"{row['link']}; {'gradients at every step' if row['sync'] == 'gradients' else 'parameters once an epoch'}"
