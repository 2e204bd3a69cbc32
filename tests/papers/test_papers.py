"""The papers' tables and figures: the published numbers as printed, and every experiment run again at a small scale."""

import json
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cnnexp import __main__ as cli
from cnnexp.app import hydra_app
from cnnexp.errors import ConfigError, DataError
from cnnexp.papers import page
from cnnexp.papers.published import (
    EXPERIMENTS,
    Column,
    Experiment,
    Job,
    Line,
    accuracy,
    epoch_s,
    limit,
    per_epoch,
    seconds_per_iteration,
)
from cnnexp.tracking.journal import JOURNAL, LACKING

ROOT = Path(__file__).resolve().parents[2]
MNIST = ROOT.parent / "shared" / "data" / "mnist"
FILES = {path.stem: path for path in (ROOT / "conf" / "experiment").glob("*.yaml")}


def make_job(backend="numpy", images=100, timed=100, seconds=2.0, status="FINISHED", accuracy=0.5, **config) -> Job:
    config = {"backend.name": backend, "trainer.batch_size": 10, **config}
    epoch = {"epoch": 1, "time/epoch_s": seconds, "train/images": timed, "test/loss": 0.1}
    finished = status == "FINISHED"
    metrics = {"final/test_accuracy": accuracy} if finished else {}
    return Job(config, status, None if finished else "no GPU", metrics, [epoch] if finished else [], images)


def as_cells(experiment: Experiment, jobs) -> list[list[page.Cell]]:
    return [
        [page._cell(experiment, line, column, i, jobs) for i, column in enumerate(experiment.columns)]
        for line in experiment.lines
    ]


def test_every_experiment_has_a_file_that_states_its_command():
    assert set(EXPERIMENTS) == set(FILES) - {"smoke"}
    for key, path in FILES.items():
        head = path.read_text(encoding="utf-8").splitlines()
        assert head[0] == "# @package _global_"
        assert head[1].endswith(f": python -m cnnexp experiment={key}")


def test_no_line_has_more_numbers_than_columns():
    for experiment in EXPERIMENTS.values():
        assert all(len(line.published) <= len(experiment.columns) for line in experiment.lines)
        assert experiment.figure != "lines" or all(column.x is not None for column in experiment.columns)


def test_published_totals_are_the_sums_of_their_parts():
    layers = [line.published for line in EXPERIMENTS["chavan_table1"].lines]
    sums = [sum(column[:-1]) - column[-1] for column in zip(*layers, strict=True)]
    # naive and advanced do not add up in the paper either: 28.95 and 23.13, as a note of the experiment says
    assert sums == pytest.approx([0, -0.52, 0, 0, 0.02], abs=1e-6)
    assert "28.95" in " ".join(EXPERIMENTS["chavan_table1"].notes)
    shares = [line.published[0] for line in EXPERIMENTS["khandait_amdahl"].lines[:6]]
    assert sum(shares) == pytest.approx(97.71)  # the paper prints 98.01, and a note of the experiment says so
    assert "97.71" in " ".join(EXPERIMENTS["khandait_amdahl"].notes)


def test_amdahl_with_the_papers_inputs():
    assert limit(768)(replace(make_job(), metrics={"profile/parallel_share": 0.9801})) == pytest.approx(47.2, abs=0.05)
    assert limit(768)(make_job()) is None
    assert "gives 47.2; the paper prints 45.45" in EXPERIMENTS["khandait_amdahl"].notes[0]


def test_an_epoch_cut_short_is_scaled():
    job = make_job(images=1000, timed=250, seconds=2.0)
    assert epoch_s(job) == 8.0
    assert seconds_per_iteration(job) == 0.08
    assert per_epoch(job, "time/epoch_s") == [8.0]  # what the figure draws
    assert per_epoch(job, "test/loss") == [0.1]


def test_a_page_tells_on_how_many_images_an_epoch_was_timed():
    job = make_job(images=1000, timed=250)
    job.epochs.append({**job.epochs[0], "train/images": 400})
    facts = {"machine.load": "0.1", "machine.cores": "2"}
    result = page.Result("castanheira_fig3", EXPERIMENTS["castanheira_fig3"], (job,), (), facts)
    assert any("timed on 250 to 400 of 1,000 images an epoch, and scaled" in note for note in page.notes(result))


def test_cells_have_the_mean_over_seeds_its_spread_and_the_ratio():
    table = Experiment("t", "s", "q", (Line("a", {"backend.name": "numpy"}, (25.0,)),), (Column("c"),), accuracy)
    (cell,) = as_cells(table, [make_job(accuracy=0.4), make_job(accuracy=0.6), make_job("cpu", accuracy=0.9)])[0]
    assert (cell.ours, cell.published, cell.ratio) == pytest.approx((50.0, 25.0, 2.0))
    assert cell.spread == pytest.approx(14.142, abs=1e-3)
    assert page.texts(cell) == ("25", "50.00 ± 14.14", "2")


def test_a_speedup_is_against_the_jobs_of_the_same_column():
    lines = (Line("a", {"backend.name": "cpu-simd"}, against={"backend.name": "cpu"}),)
    columns = tuple(Column(str(n), {"model.filters": n}) for n in (1, 2))
    jobs = [
        make_job(name, seconds=s, **{"model.filters": n})
        for n, name, s in ((1, "cpu", 6.0), (1, "cpu-simd", 2.0), (2, "cpu", 8.0), (2, "cpu-simd", 1.0))
    ]
    assert [cell.ours for cell in as_cells(Experiment("t", "s", "q", lines, columns), jobs)[0]] == [3.0, 8.0]


@pytest.mark.parametrize(
    ("status", "why"), [(LACKING, "not on this machine"), ("FAILED", "failed"), ("KILLED", "killed"), (None, "–")]
)
def test_what_could_not_be_run_says_why(status, why):
    table = Experiment("t", "s", "q", (Line("a", {"backend.name": "gpu-naive"}, (4.06,)),), (Column("c"),))
    (cell,) = as_cells(table, [make_job("gpu-naive", status=status)] if status else [])[0]
    assert page.texts(cell) == ("4.06", why, "")


@pytest.mark.parametrize(
    ("value", "text"), [(7341, "7,341"), (262.4, "262.4"), (4.0561, "4.056"), (0.01234, "0.0123"), (0, "0"), (None, "")]
)
def test_numbers_are_read_at_a_glance(value, text):
    assert page.number(value) == text


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Return run(*arguments) -> standard output; the sweep's folder is `tmp_path / "sweep"`."""
    handler = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["cnnexp", *arguments, f"hydra.sweep.dir={tmp_path}/sweep"])
        monkeypatch.setattr(hydra_app.SweepCallback, "started", None)
        monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
        cli.main()
        return capsys.readouterr().out

    yield run
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize("key", EXPERIMENTS)
def test_every_experiment_runs_small(run, tmp_path, key):
    data = []
    if "override /dataset: mnist" in FILES[key].read_text(encoding="utf-8"):
        data = [f"dataset.root={MNIST}"] if MNIST.is_dir() else ["dataset=synthetic"]
    out = run(f"experiment={key}", "debug=small", "tracking=none", "trainer.progress=false", *data)
    folder = tmp_path / "sweep"
    result = page.compare(folder, key)
    made = [cell.ours for row in result.cells for cell in row if cell.ours is not None]
    assert made
    assert all(value >= 0 for value in made)
    assert {job.status for job in result.jobs} <= {"FINISHED", LACKING}
    assert EXPERIMENTS[key].source.partition(",")[0] in re.sub(r"\s+", " ", out)
    report = folder / page.FOLDER
    text = (report / "index.html").read_text(encoding="utf-8")
    assert "<svg" in text
    assert not re.search(r'(src|href)="(?!#)', text), "the page needs another file"
    assert (report / "figure.png").stat().st_size > 5000
    assert (report / "report.md").read_text(encoding="utf-8").startswith(f"# {EXPERIMENTS[key].title}\n")


def test_the_quadrants_are_learned_as_well_as_in_the_paper(run, tmp_path):
    run("experiment=khandait_quadrants", "backend=cpu", "tracking=none", "trainer.progress=false")
    result = page.compare(tmp_path / "sweep", "khandait_quadrants")
    loss, accuracy, _ = result.cells[0]
    assert len(result.jobs) == 3  # seeds
    assert loss.ours <= 0.106
    assert accuracy.ours >= 99.0
    assert accuracy.spread is not None


def test_a_report_is_made_again_from_its_folder(tmp_path, capsys):
    job = tmp_path / "0"
    job.mkdir()
    config = {"backend": {"name": "cpu"}, "model": {"hidden": [4]}}
    entries = [
        {"event": "job", "name": "n", "overrides": [], "config": config, "config_hash": "h", "contended": False},
        {"event": "finish", "status": LACKING, "tags": {"error": "no <b>"}, "metrics": {}},
    ]
    (job / JOURNAL).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    page.note_facts(tmp_path, "khandait_quadrants", ["experiment=khandait_quadrants"])
    page.command([str(tmp_path)])
    made = Path(capsys.readouterr().out.strip())
    assert made == tmp_path / "report" / "index.html"
    assert "not on this machine" in made.read_text(encoding="utf-8")
    assert "no &lt;b&gt;" in made.read_text(encoding="utf-8")


def test_a_report_of_nothing(tmp_path):
    with pytest.raises(ConfigError, match="give a sweep's folder, or an experiment: castanheira_fig2_batch"):
        page.command([])
    with pytest.raises(ConfigError, match=r"neither a folder nor one of .*; did you mean 'garg_table1'"):
        page.newest("garg_tabel1", tmp_path)
    with pytest.raises(ConfigError, match=r"never run; run it with .* experiment=garg_table1"):
        page.newest("garg_table1", tmp_path)
    with pytest.raises(DataError, match="not the folder of a sweep"):
        page.command([str(tmp_path)])
