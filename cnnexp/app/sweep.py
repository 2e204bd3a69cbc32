"""A sweep: many jobs of one command, one parent run over theirs, and a table that compares them.

The jobs may run in other processes, on other machines that share the disk, so all they share with the sweep is an
environment variable (whose sweep am I part of?) and their folders (what became of me?).
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cnnexp.app import ranking
from cnnexp.system.table import Group, Table, as_markdown, write_csv
from cnnexp.tracking import verdict
from cnnexp.tracking.events import JOURNAL, LACKING, read_journal
from cnnexp.tracking.journal import REPORT, START_S, draw
from cnnexp.tracking.pipe import NoAnswerYet, Recorder

log = logging.getLogger(__name__)
VARIABLE = "CNNEXP_SWEEP"
# of the table on the screen: metric -> title and format
COLUMNS = {
    "time/median_epoch_s": ("epoch (s)", ".4g"),
    "speedup/median": ("speedup", ".3g"),
    "time/to_target_s": ("to target (s)", ".3g"),
    "final/test_accuracy": ("test acc.", ".4f"),
    "time/compile_s": ("compile (s)", ".2f"),
    "model/parameters": ("parameters", ",.0f"),
}


@dataclass(frozen=True)
class Sweep:
    """A sweep, as its jobs see it.

    Attributes:
        folder: holds one folder per job.
        run_id: of the parent run; None without MLflow, or where the store was silent when the sweep began.
        process: host and process that started the sweep.
        paper: the table or figure of a paper that it makes again, or None; its jobs may lack what they need.
        varied: the keys that differ between its jobs, in the order they were typed.
        jobs: how many there will be, None where the sweeper decides as it goes.
        started: `time.time()` at its start.
        begin: what `Store.begin` is given for the parent run.
    """

    folder: str
    run_id: str | None
    process: str
    paper: str | None = None
    varied: Sequence[str] = ()
    jobs: int | None = None
    started: float = 0.0
    begin: Mapping[str, Any] = field(default_factory=dict)

    @property
    def contended(self) -> bool:
        """Whether this job runs in another process than the sweep: a parallel launcher runs several at once."""
        return self.process != _this_process()


def current() -> Sweep | None:
    """Return the sweep that this process runs a job of, None where there is none."""
    text = os.environ.get(VARIABLE)
    return Sweep(**json.loads(text)) if text else None


def begin(
    folder: Path,
    overrides: Sequence[str],
    recorder: Recorder | None = None,
    paper: str | None = None,
    varied: Sequence[str] = (),
    jobs: int | None = None,
) -> Sweep:
    """Start a sweep: make its parent run, and let its jobs know.

    A store that is silent, as one that another process has locked, gets its parent run at the end.

    Args:
        folder: where the jobs' folders will be.
        overrides: what the user typed, ranges and all.
        recorder: None keeps MLflow out.
        paper: see `Sweep`.
        varied, jobs: see `Sweep`.

    Raises:
        TrackingError: the store cannot be opened or written.
    """
    from cnnexp.papers.compare import note_facts  # here: a single run needs none of the papers

    run_id, call = None, {}
    if recorder is not None:
        name = paper or " ".join(override for override in overrides if "," in override) or Path(folder).name
        tags = {"kind": "sweep", "overrides": " ".join(overrides)}
        call = {"name": f"sweep {name}", "params": {}, "tags": tags, "key": uuid.uuid4().hex}
        try:
            run_id = recorder.call("begin", within_s=START_S, **call)
        except NoAnswerYet as silent:
            log.warning("%s; the sweep goes on, and is recorded when it answers", silent)
    sweep = Sweep(str(folder), run_id, _this_process(), paper, list(varied), jobs, time.time(), call)
    note_facts(Path(folder), paper, overrides)
    os.environ[VARIABLE] = json.dumps(asdict(sweep))
    return sweep


def finish(sweep: Sweep, recorder: Recorder | None = None, interrupted: bool = False) -> list[dict[str, Any]]:
    """End a sweep: write its table, draw its figures, end its parent run.

    Args:
        sweep: as `begin` returned it.
        recorder: as for `begin`.
        interrupted: by Ctrl-C or SIGTERM.

    Returns:
        One row per job, in their order: see `rows`.
    """
    os.environ.pop(VARIABLE, None)
    found = rows(Path(sweep.folder))
    if not found:
        return found
    table = Path(sweep.folder) / "summary.csv"
    write_csv(found, table)
    report, ranked = _write_report(sweep, found)
    if sweep.paper is not None:
        from cnnexp.papers import page

        page.write(Path(sweep.folder), sweep.paper)
    if recorder is not None:
        run_id = sweep.run_id or _begin_late(sweep, found, recorder)
        figures = Path(sweep.folder) / "figures"
        finished = [row for row in found if row["status"] == "FINISHED"]
        draw("draw_sweep", folder=str(figures), rows=finished, varied=varied(found))
        failed = len(_failed(found, sweep.paper))
        if ranked:
            recorder.call("log", run_id=run_id, metrics=ranked, step=0, time_ms=int(time.time() * 1000))
        recorder.call(
            "finish",
            run_id=run_id,
            status="KILLED" if interrupted else "FAILED" if failed else "FINISHED",
            tags={
                "jobs": str(len(found)),
                "jobs.failed": str(failed),
                "mlflow.note.content": report.read_text("utf-8"),
            },
            artifacts=[(str(table), None), (str(report), None), (str(figures), "figures"), *_report(sweep)],
        )
    return found


def _begin_late(sweep: Sweep, found: Sequence[Mapping[str, Any]], recorder: Recorder) -> str:
    """Make the parent run of a sweep whose store did not answer when it began, with the jobs under it."""
    run_id: str = recorder.call("begin", **sweep.begin)
    recorded = (read_journal(Path(sweep.folder) / row["job"])["run_id"] for row in found)
    recorder.call("adopt", parent=run_id, run_ids=[job for job in recorded if job is not None])
    return run_id


def conclude(sweep: Sweep, found: Sequence[Mapping[str, Any]]) -> tuple[list[verdict.Row], dict[str, float]]:
    """Return what a sweep ends with, its ranking, what differs and where it is, and the metrics of its own run."""
    journals = {row["job"]: read_journal(Path(sweep.folder) / row["job"]) for row in found}
    baselines = {journal["config"].get("trainer", {}).get("baseline") for journal in journals.values()}
    epochs = {job: journal["epochs"] for job, journal in journals.items()}
    measure, places = ranking.rank(found, varied(found), epochs)
    baseline = baselines.pop() if len(baselines) == 1 else None
    told = ranking.rows(found, measure, places, baseline, len(_failed(found, sweep.paper)))
    told.append(("folder", sweep.folder))
    if sweep.run_id is not None:
        told.append(("run", sweep.run_id))
    return told, ranking.metrics(measure, places)


def _write_report(sweep: Sweep, found: Sequence[Mapping[str, Any]]) -> tuple[Path, dict[str, float]]:
    """Write the verdict into the sweep's folder; return the file, and the metrics of the sweep's own run."""
    told, metrics = conclude(sweep, found)
    table = "\n".join(as_markdown(job_table(found)))
    report = Path(sweep.folder) / REPORT
    report.write_text(f"{verdict.markdown(f'{len(found)} jobs', told)}\n{table}\n", encoding="utf-8")
    return report, metrics


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return one row per job of a sweep's folder, by their number.

    Returns:
        `job` (its folder's name), `name`, `status` (FINISHED, FAILED, KILLED, SKIPPED, UNAVAILABLE, or DIED where the
        process was gone before it could say), `error`, `contended`, `fallback` (the backend that took over, or None),
        `disturbed` (by other work, None where it is not known), what varied by key, and the final metrics by name.
    """
    jobs = sorted((path.parent for path in Path(folder).glob(f"*/{JOURNAL}")), key=_job_number)
    journals = [read_journal(job) for job in jobs]
    changed = [_values(journal["overrides"]) for journal in journals]
    keys = _differing(changed)
    return [
        {
            "job": job.name,
            "name": journal["name"],
            "status": journal["status"],
            "error": journal["error"],
            "contended": journal["contended"],
            "fallback": journal["fallback"],
            "disturbed": journal["disturbed"],
            **{key: values.get(key, "") for key in keys},
            **journal["metrics"],
        }
        for job, journal, values in zip(jobs, journals, changed, strict=True)
    ]


def varied(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys of `rows` that hold what varied."""
    fixed = {"job", "name", "status", "error", "contended", "fallback", "disturbed"}
    return [key for key in found[0] if key not in fixed and "/" not in key]


def job_table(found: Sequence[Mapping[str, Any]]) -> Table:
    """Return `rows` as a table: what varied, how each job ended, and its metrics in `COLUMNS`."""
    keys, names = varied(found), [name for name in COLUMNS if any(name in row for row in found)]
    lines = []
    for row in found:
        status = row["status"] + (", contended" if row["contended"] else "")
        status += f", on {row['fallback']}" if row["fallback"] else ""
        cells = [format(row[name], COLUMNS[name][1]) if name in row else "" for name in names]
        lines.append([row["job"], *(str(row[key]) for key in keys), status, *cells])
    return Table([Group(COLUMNS[name][0]) for name in names], lines, ["job", *keys, "status"])


def failures(found: Sequence[Mapping[str, Any]], paper: str | None = None) -> list[str]:
    """Return one line per cause that jobs did not finish: the first of them, how many more, and why.

    Args:
        found: as `rows` returned it.
        paper: see `Sweep`: where it is given, a backend that this machine lacks is no failure.
    """
    keys = varied(found) if found else []
    causes: dict[str, list[str]] = {}
    for row in _failed(found, paper):
        causes.setdefault(row["error"], []).append(f"{row['job']} ({' '.join(f'{key}={row[key]}' for key in keys)})")
    told = []
    for cause, jobs in causes.items():
        more = f" and {len(jobs) - 1} more" if len(jobs) > 1 else ""
        told.append(f"job in folder {jobs[0]}{more}: {cause}")
    return told


def _failed(found: Sequence[Mapping[str, Any]], paper: str | None) -> list[Mapping[str, Any]]:
    fine = ("FINISHED", "SKIPPED", *([LACKING] if paper is not None else []))
    return [row for row in found if row["status"] not in fine]


def _report(sweep: Sweep) -> list[tuple[str, str]]:
    """Return the report of a paper's table or figure as an artifact, if there is one."""
    if sweep.paper is None:
        return []
    from cnnexp.papers.page import FOLDER

    return [(str(Path(sweep.folder) / FOLDER), FOLDER)]


def _values(overrides: Sequence[str]) -> dict[str, str]:
    return {key.lstrip("+~"): value for key, _, value in (override.partition("=") for override in overrides)}


def _differing(changed: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys whose values differ between jobs, in the order they were typed."""
    keys = dict.fromkeys(key for values in changed for key in values)
    return [key for key in keys if len({values.get(key) for values in changed}) > 1]


def _job_number(folder: Path) -> tuple[int, str]:
    return (int(folder.name) if folder.name.isdecimal() else -1, folder.name)


def _this_process() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"
