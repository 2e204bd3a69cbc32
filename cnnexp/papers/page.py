"""The page of a paper's table or figure, made again, as HTML and as Markdown."""

import html
import json
from pathlib import Path

from cnnexp.papers.compare import Cell, Result, compare, scaling_label
from cnnexp.system.table import Group, Table, as_html, as_markdown, number
from cnnexp.tracking.events import LACKING

WIDE = 3  # columns with the paper's numbers beside ours; more get them in brackets
SCALING = "More workers and other links, as the cost model has them"
FOLDER = "report"  # of a sweep's folder: the page and its figures


def write(folder: Path, key: str) -> None:
    """Write the report of a sweep into its folder: index.html, report.md, figure.png and figure.svg."""
    from cnnexp.papers.figures import draw  # matplotlib takes a while

    result = compare(folder, key)
    target = folder / FOLDER
    target.mkdir(exist_ok=True)
    draw(result, target)
    (target / "index.html").write_text(web_page(result, (target / "figure.svg").read_text(encoding="utf-8")), "utf-8")
    (target / "report.md").write_text(markdown(result), encoding="utf-8")


def texts(cell: Cell) -> dict[str, str]:
    """Return a cell as texts, by the heading under which each stands."""
    ours = cell.why if cell.ours is None else number(cell.ours)
    if cell.spread is not None:
        ours += f" ± {number(cell.spread)}"
    published = "" if cell.published is None else f"{cell.published:,g}"
    ratio = "" if cell.ratio is None else f"{cell.ratio:.3g}"
    both = f"{ours} ({published})" if published else ours
    return {"paper": published, "ours": ours, "ours / paper": ratio, "ours (paper)": both}


def table_of(result: Result) -> Table:
    """Return the comparison: the paper's numbers, ours and their ratio where the paper has any, else ours alone."""
    lines, columns = result.experiment.lines, result.experiment.columns
    compared = ("ours (paper)",) if len(columns) > WIDE else ("paper", "ours", "ours / paper")
    printed = [any(row[i].published is not None for row in result.cells) for i in range(len(columns))]
    groups = [Group(column.title, compared if has else ("ours",)) for column, has in zip(columns, printed, strict=True)]
    rows = [[line.label] for line in lines]
    for row, cells in zip(rows, result.cells, strict=True):
        for group, cell in zip(groups, cells, strict=True):
            row += [texts(cell)[heading] for heading in group.headings]
    return Table(groups, rows)


def scaling_table(result: Result) -> Table:
    """Return a row per link and way of averaging, a column per number of workers."""
    workers = dict.fromkeys(row["workers"] for row in result.scaling)
    rows: dict[str, list[str]] = {}
    for row in result.scaling:
        label = scaling_label(row)
        rows.setdefault(label, [label]).append(f"{number(row['epoch_s'])} ({100 * row['efficiency']:.3g} %)")
    return Table([Group(f"{count:,.0f}") for count in workers], list(rows.values()))


def scaling_text(result: Result) -> str:
    """Return what `scaling_table` shows."""
    measured = next(job.metrics for job in result.jobs if "cost_model/t_c_s" in job.metrics)
    constants = [f"{name} = {measured[f'cost_model/{name}_s']:.2g} s" for name in ("t_c", "t_s", "t_b")]
    return (
        "By number of workers: epoch time (s) and, in brackets, the speedup per worker. Each worker has a core of its "
        "own and as many images in a step as one worker has. Measured at the start of the run with the fewest "
        f"workers: {', '.join(constants)}."
    )


def markdown(result: Result) -> str:
    """Return the report as Markdown, with figure.png beside it."""
    experiment = result.experiment
    table, scaling = "\n".join(as_markdown(table_of(result))), ""
    differs = "\n".join(f"- {note}" for note in notes(result))
    facts = "\n".join(f"- {name}: {value}" for name, value in run_facts(result))
    if result.scaling:
        scaling = "\n".join([f"## {SCALING}\n\n{scaling_text(result)}\n", *as_markdown(scaling_table(result)), "\n"])
    return f"""# {experiment.title}

{experiment.source}. In the table: {experiment.quantity}.

![{experiment.title}](figure.png)

{table}

{scaling}## What differs from the paper, and why

{differs}

## What was run

{facts}
"""


def web_page(result: Result, figure_svg: str) -> str:
    """Return the report as one HTML page that needs no other file."""
    experiment = result.experiment
    title, svg = html.escape(experiment.title), figure_svg[figure_svg.index("<svg") :]
    scaling = ""
    if result.scaling:
        text, table = html.escape(scaling_text(result)), as_html(scaling_table(result))
        scaling = f"<h2>{SCALING}</h2>\n<p>{text}</p>\n{table}\n"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>{STYLE}</style></head><body>
<h1>{title}</h1>
<p class="source">{html.escape(experiment.source)}. In the table: {html.escape(experiment.quantity)}.</p>
<figure>{svg}</figure>
{as_html(table_of(result))}
{scaling}<h2>What differs from the paper, and why</h2>
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
    varied = {"trainer.batch_size": "batch {}", "model.filters": "{} filters"}
    for job in result.jobs:
        timed = sorted({int(epoch["train/images"]) for epoch in job.epochs})
        if timed and timed[0] < job.images:
            sizes = ", ".join(text.format(job.config[key]) for key, text in varied.items() if key in job.config)
            what = f"{job.config['backend.name']} ({sizes})"
            span = " to ".join(f"{count:,}" for count in dict.fromkeys((timed[0], timed[-1])))
            found.append(f"{what}: timed on {span} of {job.images:,} images an epoch, and scaled.")
    lacking = {job.config["backend.name"]: job.error for job in result.jobs if job.status == LACKING}
    found += [f"{backend}: {error}" for backend, error in lacking.items()]
    load, cores = float(result.facts["machine.load"]), int(result.facts["machine.cores"])
    if load > cores:
        shared = f"{load:.0f} processes shared the {cores} cores when this run started"
        longer = "its seconds are longer than the machine needs, and threads wait for each other"
        found.append(f"{shared}, so {longer}: ratios say more than seconds, and not much more.")
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
    shares = [job.metrics["profile/accounted"] for job in result.jobs if "profile/accounted" in job.metrics]
    commit = facts.get("git.commit", "unknown") + (" with changes" if facts.get("git.dirty") == "true" else "")
    return [
        ("command", facts["command"]),
        ("machine", f"{facts['machine.cpu']}, {facts['machine.cores']} usable cores, {facts['machine.system']}"),
        ("load", f"{facts['machine.load']} processes were running when it started"),
        ("threads", ", ".join(threads)),
        *([("time ledger", f"at least {min(shares):.1%} of each run's wall time accounted for")] if shares else []),
        ("versions", versions),
        ("commit", commit),
        ("config", ", ".join(f"{key}={json.dumps(value)}" for key, value in common.items())),
    ]
