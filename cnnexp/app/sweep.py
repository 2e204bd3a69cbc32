"""A sweep: many jobs of one command, one parent run over theirs, and a table that compares them.

The jobs may run in other processes, on other machines that share the disk, so all they share with the sweep is an
environment variable (whose sweep am I part of?) and their folders (what became of me?).
"""

import json
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cnnexp.app import ranking
from cnnexp.system.table import Group, Table, as_markdown, write_csv
from cnnexp.tracking import verdict
from cnnexp.tracking.events import JOURNAL, LACKING, SWEEP, read_journal
from cnnexp.tracking.journal import START_S, Record
from cnnexp.tracking.pipe import NoAnswerYet, Recorder

log = logging.getLogger(__name__)
VARIABLE = "CNNEXP_SWEEP"
TABLE = "summary.csv"
OF_JOB = ("name", "status", "error", "contended", "fallback", "disturbed")  # of its journal, in its row
# of the table on the screen: metric -> title and format
COLUMNS = {
    "time/median_epoch_s": ("epoch (s)", ".4g"),
    "speedup/median": ("speedup", ".3g"),
    "time/to_target_s": ("to target (s)", ".3g"),
    "final/test_accuracy": ("test acc.", ".4f"),
    "time/compile_s": ("compile (s)", ".2f"),
    "model/parameters": ("parameters", ",.0f"),
}


class Sweep(NamedTuple):
    """A sweep, as its jobs see it."""

    folder: str  # holds one folder per job
    process: str  # host and process that started the sweep
    begun: Mapping[str, Any]  # what makes the parent run in the store: the first job to come there makes it
    varied: Sequence[str] = ()  # the keys that differ between its jobs, in the order they were typed
    jobs: int | None = None  # how many there will be, None where the sweeper decides as it goes
    started: float = 0.0  # `time.time()` at its start

    @property
    def contended(self) -> bool:
        """Whether this job runs in another process than the sweep: a parallel launcher runs several at once."""
        return self.process != _this_process()


def current() -> Sweep | None:
    """Return the sweep that this process runs a job of, None where there is none."""
    text = os.environ.get(VARIABLE)
    return Sweep(**json.loads(text)) if text else None


class SweepRecord(Record):
    """The record of a sweep, in the folder that holds one per job: its journal, its table and its figures.

    It lets the jobs know whose they are. A store that is silent, as one that another process has locked, gets it later.

    Args, beside those of `Record`:
        paper: the table or figure of a paper that it makes again, or None; its jobs may lack what they need.
        config: what the jobs have in common, as it is recorded; and as `varied` the keys that differ between them, with
            their values as they were typed.
        jobs: how many there will be, None where the sweeper decides as it goes.

    Raises:
        ConfigError: another sweep is in the folder now.
        TrackingError: the store cannot be opened or written.
    """

    kind, key = SWEEP, "hydra.sweep.dir"

    def __init__(
        self,
        folder: Path,
        overrides: Sequence[str],
        recorder: Recorder | None = None,
        paper: str | None = None,
        config: Mapping[str, Any] = {"varied": {}},
        jobs: int | None = None,
        earlier: Path | None = None,
    ) -> None:
        from cnnexp.papers.compare import note_facts  # here: a single run needs none of the papers

        name = paper or " ".join(override for override in overrides if "," in override) or Path(folder).name
        super().__init__(folder, config, overrides, recorder, f"sweep {name}", earlier=earlier)
        self.paper = paper
        self._begin({"overrides": " ".join(overrides)}, {})
        if recorder is not None:
            try:
                self._take_id(recorder.call("follow", within_s=START_S, folder=str(self.folder)))
            except NoAnswerYet as silent:
                log.warning("%s; the sweep goes on, and is recorded when it answers", silent)
        note_facts(self.folder, paper, overrides)
        within = Sweep(str(folder), _this_process(), self.begun, list(config["varied"]), jobs, time.time())
        os.environ[VARIABLE] = json.dumps(within._asdict())

    def finish(self, interrupted: bool = False) -> list[dict[str, Any]]:
        """End the sweep, one that a signal has interrupted, too; return `rows`. `lost` says why the store lacks it."""
        os.environ.pop(VARIABLE, None)
        with self._locks, self._journal:
            self._rows = rows(self.folder)
            if not self._rows:
                return []
            write_csv(self._rows, self.folder / TABLE)
            self.artifacts.append(self.folder / TABLE)
            if self.paper is not None:
                from cnnexp.papers import page

                page.write(self.folder, self.paper)
                self.artifacts.append(self.folder / page.FOLDER)
            failed = len(_failed(self._rows, self.paper))
            self.tags |= {"jobs": str(len(self._rows)), "jobs.failed": str(failed)}
            self._end("KILLED" if interrupted else "FAILED" if failed else "FINISHED", drawn=True)
        return self._rows

    def _draw(self) -> None:
        from cnnexp.tracking import figures  # loads Matplotlib

        finished = [row for row in self._rows if row["status"] in ranking.ENDED]
        figures.draw_sweep(self.folder / "figures", finished, varied(self._rows))

    def _conclude(self, status: str) -> str:
        self.verdict, self.metrics = conclude(self.folder, self._rows, self.paper)
        if self.id is not None:
            self.verdict.append(("run", self.id))
        table = "\n".join(as_markdown(job_table(self._rows)))
        return f"{verdict.markdown(f'{len(self._rows)} jobs', self.verdict)}\n{table}\n"


def conclude(
    folder: Path, found: Sequence[Mapping[str, Any]], paper: str | None = None
) -> tuple[list[verdict.Row], dict[str, float]]:
    """Return what a sweep ends with, its ranking, what differs and where it is, and the metrics of its own run."""
    journals = {row["job"]: read_journal(Path(folder) / row["job"]) for row in found}
    baselines = {journal["config"].get("trainer", {}).get("baseline") for journal in journals.values()}
    measure, places = ranking.rank(found, varied(found), {job: journal["epochs"] for job, journal in journals.items()})
    baseline = baselines.pop() if len(baselines) == 1 else None
    rows = ranking.rows(found, measure, places, baseline, len(_failed(found, paper)))
    return [*rows, ("folder", str(folder))], ranking.metrics(measure, places)


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return a row per job, by number: `job` (its folder's name), `OF_JOB`, what varied by key, the final metrics."""
    jobs = [path.parent for path in Path(folder).glob(f"*/{JOURNAL}")]
    jobs.sort(key=lambda job: (int(job.name) if job.name.isdecimal() else -1, job.name))
    journals = [read_journal(job) for job in jobs]
    changed = [dict(word.lstrip("+~").partition("=")[::2] for word in journal["overrides"]) for journal in journals]
    typed = dict.fromkeys(key for values in changed for key in values)  # in the order they were typed
    keys = [key for key in typed if len({values.get(key) for values in changed}) > 1]
    return [
        {
            "job": job.name,
            **{key: journal[key] for key in OF_JOB},
            **{key: values.get(key, "") for key in keys},
            **journal["metrics"],
        }
        for job, journal, values in zip(jobs, journals, changed, strict=True)
    ]


def varied(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys of `rows` that hold what varied."""
    return [key for key in found[0] if key not in ("job", *OF_JOB) and "/" not in key]


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
    """Return one line per cause that jobs of `rows` did not finish: the first of them, how many more, and why.

    Where a paper is made again, a backend that this machine lacks is no failure.
    """
    keys = varied(found) if found else []
    causes: dict[str, list[str]] = {}
    for row in _failed(found, paper):
        causes.setdefault(row["error"], []).append(f"{row['job']} ({' '.join(f'{key}={row[key]}' for key in keys)})")
    return [
        f"job in folder {first}{f' and {len(others)} more' if others else ''}: {cause}"
        for cause, (first, *others) in causes.items()
    ]


def _failed(found: Sequence[Mapping[str, Any]], paper: str | None) -> list[Mapping[str, Any]]:
    fine = ("FINISHED", "SKIPPED", *([LACKING] if paper is not None else []))
    return [row for row in found if row["status"] not in fine]


def _this_process() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"
