"""A paper's table or figure, made again: our numbers beside the published ones, on the screen and as a page.

Everything comes from a sweep's folder, so a page can be made again at any time: `cnnexp report FOLDER`, or
`cnnexp report KEY` for the newest sweep of an experiment.
"""

from __future__ import annotations

import csv
import html
import importlib
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cnnexp import environment
from cnnexp.errors import ConfigError, DataError, did_you_mean
from cnnexp.measuring import cost_model
from cnnexp.papers.published import EXPERIMENTS, Column, Experiment, Job, Line
from cnnexp.tracking.journal import JOURNAL, LACKING, PREDICTIONS, read_journal

if TYPE_CHECKING:
    from rich.table import Table

FACTS = "sweep.json"  # of a sweep's folder: what was run, where
WIDE = 3  # columns with the paper's numbers beside ours; more get them in brackets
SCALING = "More workers and other links, as the cost model has them"
FOLDER = "report"  # of a sweep's folder: the page and its figures


@dataclass(frozen=True)
class Cell:
    """One number made again.

    Attributes:
        published: as printed, or None.
        ours: the mean over the jobs that make it, or None where there is none.
        spread: their standard deviation where there are several (seeds), else None.
        why: what stands there instead of a number.
    """

    published: float | None
    ours: float | None
    spread: float | None = None
    why: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over the published."""
        return None if self.published in (None, 0) or self.ours is None else self.ours / self.published


@dataclass(frozen=True)
class Result:
    """An experiment with its jobs, the cells they make, by line and column, and rows of `cost_model.extrapolate`."""

    key: str
    experiment: Experiment
    jobs: Sequence[Job]
    cells: Sequence[Sequence[Cell]]
    facts: Mapping[str, Any]
    scaling: Sequence[Mapping[str, Any]] = ()


def command(arguments: Sequence[str]) -> None:
    """Make the report of `cnnexp report FOLDER` or `cnnexp report KEY` again, and say where it is.

    Raises:
        ConfigError: no such sweep.
    """
    if len(arguments) != 1:
        raise ConfigError("report: give a sweep's folder, or an experiment: " + ", ".join(EXPERIMENTS))
    folder = Path(arguments[0])
    if not folder.is_dir():
        folder = newest(arguments[0], environment.outputs_dir() / "sweeps")
    key = read_facts(folder)["paper"]
    if key is None:
        raise ConfigError(f"report {folder}: makes no table or figure of a paper; set sweep.paper when you run it")
    write(folder, key)
    sys.stdout.write(f"{folder / FOLDER / 'index.html'}\n")


def newest(key: str, sweeps: Path) -> Path:
    """Return the folder of the last sweep that made the table or figure `key` again."""
    if key not in EXPERIMENTS:
        raise ConfigError(
            f"report {key}: neither a folder nor one of {', '.join(EXPERIMENTS)}{did_you_mean(key, EXPERIMENTS)}"
        )
    found = [path.parent for path in sweeps.glob(f"*/*/{FACTS}") if read_facts(path.parent)["paper"] == key]
    if not found:
        raise ConfigError(f"report {key}: never run; run it with {environment.program_name()} experiment={key}")
    return max(found)


def note_facts(folder: Path, paper: str | None, overrides: Sequence[str]) -> None:
    """Keep beside a sweep what a reader of its report must know: command, machine, versions, code."""
    facts = {
        "paper": paper,
        "command": f"python -m cnnexp {' '.join(overrides)}",
        **environment.machine_facts(),
        **environment.versions(),
        **environment.git_facts(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def read_facts(folder: Path) -> dict[str, Any]:
    """Return what `note_facts` kept.

    Raises:
        DataError: the folder is not one of a sweep.
    """
    try:
        return json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{folder}: not the folder of a sweep: it has no {FACTS}") from error


def write(folder: Path, key: str) -> Result:
    """Write the report of a sweep into its folder: index.html, report.md, figure.png and figure.svg."""
    result = compare(folder, key)
    target = folder / FOLDER
    target.mkdir(exist_ok=True)
    importlib.import_module("cnnexp.tracking.figures").draw_paper(result, target)
    (target / "index.html").write_text(as_html(result, (target / "figure.svg").read_text(encoding="utf-8")), "utf-8")
    (target / "report.md").write_text(as_markdown(result), encoding="utf-8")
    return result


def compare(folder: Path, key: str) -> Result:
    """Return an experiment's cells, made by the jobs in a sweep's folder."""
    experiment = EXPERIMENTS[key]
    paths = sorted((path.parent for path in folder.glob(f"*/{JOURNAL}")), key=lambda path: (len(path.name), path.name))
    jobs = [_job(path) for path in paths]
    cells = [
        [_cell(experiment, line, column, i, jobs) for i, column in enumerate(experiment.columns)]
        for line in experiment.lines
    ]
    return Result(key, experiment, jobs, cells, read_facts(folder), _scaling(jobs) if experiment.scaling else ())


def _scaling(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Return the cost model's rows of the first job that has any; its constants were measured with fewest workers."""
    path = next((path for job in jobs if (path := Path(job.folder) / cost_model.TABLE).is_file()), None)
    if path is None:
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [
            {key: value if key in ("link", "sync") else float(value) for key, value in row.items()}
            for row in csv.DictReader(file)
        ]


def _job(folder: Path) -> Job:
    journal = read_journal(folder)
    begun, tags = journal["begin"], journal["begin"].get("tags", {})
    return Job(
        config=_leaves(journal["config"]),
        status=journal["status"],
        error=journal["error"],
        metrics=journal["metrics"],
        epochs=journal["epochs"],
        images=begun.get("dataset", {}).get("profile", {}).get("train", 0),
        folder=str(folder),
        device=tags.get("device", ""),
        threads=int(tags.get("threads", 0)),
    )


def _leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a config by dotted key."""
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        leaves |= _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return leaves


def _cell(experiment: Experiment, line: Line, column: Column, position: int, jobs: Sequence[Job]) -> Cell:
    published = line.published[position] if position < len(line.published) else None
    measure = line.measure or column.measure or experiment.measure
    chosen = pick(jobs, {**column.jobs, **line.jobs})
    values = [value for job in chosen if job.status == "FINISHED" and (value := measure(job)) is not None]
    if line.against is not None and values:
        base = [
            value
            for job in pick(jobs, {**column.jobs, **line.against})
            if job.status == "FINISHED" and (value := measure(job)) is not None
        ]
        values = [statistics.fmean(base) / value for value in values] if base else []
    if values:
        spread = statistics.stdev(values) if len(values) > 1 else None
        return Cell(published, statistics.fmean(values), spread)
    return Cell(published, None, None, _why(chosen))


def pick(jobs: Sequence[Job], asked: Mapping[str, Any]) -> list[Job]:
    """Return the jobs whose config holds what is asked for."""
    return [job for job in jobs if all(job.config.get(key) == value for key, value in asked.items())]


def _why(chosen: Sequence[Job]) -> str:
    statuses = {job.status for job in chosen}
    if LACKING in statuses:
        return "not on this machine"
    if not chosen or statuses == {"FINISHED"}:
        return "–"
    return next(iter(statuses)).lower()


def number(value: float | None) -> str:
    """Return a number with three or four significant digits, without exponents."""
    if value is None:
        return ""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = max(0, 3 - int(np.floor(np.log10(abs(value)))) - (0 if abs(value) >= 1 else 1))
    return f"{value:.{min(digits, 6)}f}"


def texts(cell: Cell) -> tuple[str, str, str]:
    """Return a cell as texts: published, ours, ratio."""
    ours = cell.why if cell.ours is None else number(cell.ours)
    if cell.spread is not None:
        ours += f" ± {number(cell.spread)}"
    published = "" if cell.published is None else f"{cell.published:,g}"
    return published, ours, "" if cell.ratio is None else f"{cell.ratio:.3g}"


def screen_table(result: Result) -> Table:
    """Return the comparison as a table for the screen."""
    from rich.table import Table

    experiment = result.experiment
    table = Table(title=f"{experiment.title}\n{experiment.source}: {experiment.quantity}")
    table.add_column("")
    for column, headings in zip(experiment.columns, _headings(result), strict=True):
        for heading in headings:
            table.add_column(f"{column.title}\n{heading}", justify="right")
    for label, *cells in _rows(result):
        table.add_row(label, *cells)
    return table


def _headings(result: Result) -> list[tuple[str, ...]]:
    """Return what stands under the title of each column of the experiment."""
    wide = len(result.experiment.columns) > WIDE
    three = ("ours (paper)",) if wide else ("paper", "ours", "ours / paper")
    return [three if printed else ("ours",) for printed in _printed(result)]


def _rows(result: Result) -> Iterator[list[str]]:
    """Yield each line's label and texts, under `_headings`."""
    for line, cells in zip(result.experiment.lines, result.cells, strict=True):
        shown = zip(cells, _headings(result), strict=True)
        yield [line.label, *(text for cell, headings in shown for text in _shown(cell, headings))]


def _printed(result: Result) -> list[bool]:
    """Return for each column whether the paper has any number in it."""
    return [any(row[i].published is not None for row in result.cells) for i in range(len(result.experiment.columns))]


def _shown(cell: Cell, headings: tuple[str, ...]) -> tuple[str, ...]:
    published, ours, ratio = texts(cell)
    if headings == ("ours (paper)",):
        return (f"{ours} ({published})" if published else ours,)
    return (published, ours, ratio) if len(headings) == 3 else (ours,)


def scaling_table(result: Result) -> list[list[str]]:
    """Return a line per link and way of averaging under a line of headings; none without `Result.scaling`."""
    if not result.scaling:
        return []
    workers = list(dict.fromkeys(row["workers"] for row in result.scaling))
    lines: dict[str, list[str]] = {}
    for row in result.scaling:
        cell = f"{number(row['epoch_s'])} ({100 * row['efficiency']:.3g} %)"
        lines.setdefault(scaling_label(row), []).append(cell)
    return [["", *(f"{count:,.0f}" for count in workers)], *([label, *cells] for label, cells in lines.items())]


def scaling_label(row: Mapping[str, Any]) -> str:
    """Return the name of a row's link and of how its workers keep together."""
    return f"{row['link']}; {'gradients at every step' if row['sync'] == 'gradients' else 'parameters once an epoch'}"


def scaling_text(result: Result) -> str:
    """Return what `scaling_table` shows."""
    measured = next(job.metrics for job in result.jobs if "cost_model/t_c_s" in job.metrics)
    constants = [f"{name} = {measured[f'cost_model/{name}_s']:.2g} s" for name in ("t_c", "t_s", "t_b")]
    return (
        "By number of workers: epoch time (s) and, in brackets, the speedup per worker. Each worker has a core of its "
        "own and as many images in a step as one worker has. Measured at the start of the run with the fewest "
        f"workers: {', '.join(constants)}."
    )


def as_markdown(result: Result) -> str:
    """Return the report as Markdown, with figure.png beside it."""
    experiment = result.experiment
    titles = [
        f"{column.title}: {heading}"
        for column, headings in zip(experiment.columns, _headings(result), strict=True)
        for heading in headings
    ]
    table = [["", *titles], ["---", *["--:"] * len(titles)], *_rows(result)]
    return "\n".join(
        [
            f"# {experiment.title}",
            "",
            f"{experiment.source}. In the table: {experiment.quantity}.",
            "",
            f"![{experiment.title}](figure.png)",
            "",
            *(f"| {' | '.join(row)} |" for row in table),
            "",
            *_scaling_markdown(result),
            "## What differs from the paper, and why",
            "",
            *(f"- {note}" for note in notes(result)),
            "",
            "## What was run",
            "",
            *(f"- {name}: {value}" for name, value in run_facts(result)),
            "",
        ]
    )


def _scaling_markdown(result: Result) -> list[str]:
    if not result.scaling:
        return []
    head, *lines = scaling_table(result)
    rows = [head, ["---", *["--:"] * (len(head) - 1)], *lines]
    table = [f"| {' | '.join(row)} |" for row in rows]
    return [f"## {SCALING}", "", scaling_text(result), "", *table, ""]


def _scaling_html(result: Result) -> str:
    if not result.scaling:
        return ""
    head, *lines = scaling_table(result)
    headings = "".join(f"<th>{html.escape(text)}</th>" for text in head)
    body = "".join(
        f"<tr><th>{html.escape(label)}</th>{''.join(f'<td>{html.escape(text)}</td>' for text in texts)}</tr>"
        for label, *texts in lines
    )
    return (
        f"<h2>{SCALING}</h2>\n<p>{html.escape(scaling_text(result))}</p>\n"
        f"<table><thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table>\n"
    )


def as_html(result: Result, figure_svg: str) -> str:
    """Return the report as one HTML page that needs no other file."""
    experiment = result.experiment
    title, svg = html.escape(experiment.title), figure_svg[figure_svg.index("<svg") :]
    head = "".join(
        f'<th colspan="{len(headings)}">{html.escape(column.title)}</th>'
        for column, headings in zip(experiment.columns, _headings(result), strict=True)
    )
    kinds = "".join(f"<th>{heading}</th>" for headings in _headings(result) for heading in headings)
    body = "".join(
        f"<tr><th>{html.escape(label)}</th>{''.join(f'<td>{html.escape(text)}</td>' for text in texts)}</tr>"
        for label, *texts in _rows(result)
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>{STYLE}</style></head><body>
<h1>{title}</h1>
<p class="source">{html.escape(experiment.source)}. In the table: {html.escape(experiment.quantity)}.</p>
<figure>{svg}</figure>
<table><thead><tr><th></th>{head}</tr><tr><th></th>{kinds}</tr></thead><tbody>{body}</tbody></table>
{_scaling_html(result)}<h2>What differs from the paper, and why</h2>
<ul>{"".join(f"<li>{html.escape(note)}</li>" for note in notes(result))}</ul>
<h2>What was run</h2>
<dl>{"".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in run_facts(result))}</dl>
</body></html>
"""


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; color: #111 }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin-top: 2rem }
.source { color: #444; margin-top: 0 }
figure { margin: 1.5rem 0; text-align: center } figure svg { max-width: 100%; height: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem }
th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid #ccc }
thead th { border-bottom: 1px solid #444 } th[colspan] { text-align: center } td + td { white-space: nowrap }
tbody th { font-weight: 400; text-align: left }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .9rem }
dd { margin: 0; overflow-wrap: anywhere }
@media print { body { margin: 0; max-width: none; font-size: 11px } tr, figure { break-inside: avoid } }
"""


def notes(result: Result) -> list[str]:
    """Return what differs from the paper: its own notes, what was cut short, and what the machine lacks."""
    found = list(result.experiment.notes)
    for job in result.jobs:
        timed = sorted({int(epoch["train/images"]) for epoch in job.epochs})
        if timed and timed[0] < job.images:
            name, span = _name(job), " to ".join(f"{count:,}" for count in dict.fromkeys((timed[0], timed[-1])))
            found.append(f"{name}: timed on {span} of {job.images:,} images an epoch, and scaled.")
    lacking = {job.config["backend.name"]: job.error for job in result.jobs if job.status == LACKING}
    found += [f"{backend}: {error}" for backend, error in lacking.items()]
    load, cores = float(result.facts["machine.load"]), int(result.facts["machine.cores"])
    if load > cores:
        found.append(
            f"{load:.0f} processes shared the {cores} cores when this run started, so its seconds are longer than the "
            "machine needs, and threads wait for each other: ratios say more than seconds, and not much more."
        )
    return found


def run_facts(result: Result) -> list[tuple[str, str]]:
    """Return what was run, as (name, value) pairs."""
    facts = result.facts
    versions = ", ".join(f"{k.removeprefix('version.')} {v}" for k, v in facts.items() if k.startswith("version."))
    common = {
        key: value
        for key, value in result.jobs[0].config.items()
        if key.partition(".")[0] in ("model", "optimizer", "dataset", "trainer")
        and all(job.config.get(key) == value for job in result.jobs)
        and not key.endswith((".root", ".progress", ".resume", ".step_every", ".step_factor", ".baseline_s", ".verify"))
    }
    threads = sorted({f"{job.config['backend.name']} {job.threads}" for job in result.jobs if job.threads})
    accounted = [job.metrics["profile/accounted"] for job in result.jobs if "profile/accounted" in job.metrics]
    ledger = (
        [("time ledger", f"at least {min(accounted):.1%} of each run's wall time accounted for")] if accounted else []
    )
    commit = facts.get("git.commit", "unknown") + (" with changes" if facts.get("git.dirty") == "true" else "")
    return [
        ("command", facts["command"]),
        ("machine", f"{facts['machine.cpu']}, {facts['machine.cores']} usable cores, {facts['machine.system']}"),
        ("load", f"{facts['machine.load']} processes were running when it started"),
        ("threads", ", ".join(threads)),
        *ledger,
        ("versions", versions),
        ("commit", commit),
        ("config", ", ".join(f"{key}={json.dumps(value)}" for key, value in common.items())),
    ]


def _name(job: Job) -> str:
    varied = {"trainer.batch_size": "batch {}", "model.filters": "{} filters"}
    facts = [text.format(job.config[key]) for key, text in varied.items() if key in job.config]
    return f"{job.config['backend.name']} ({', '.join(facts)})"


def recalls(job: Job) -> list[float]:
    """Return the recall of each class on the test split."""
    with np.load(Path(job.folder) / PREDICTIONS, allow_pickle=False) as arrays:
        labels, predicted = arrays["labels"], arrays["predicted"]
    found, there = np.bincount(labels[predicted == labels], minlength=labels.max() + 1), np.bincount(labels)
    return (found / np.maximum(there, 1)).tolist()
