"""What a paper's page says of its jobs: measures, cells, and the table of them."""

import pytest
from tables import each

from cnnexp.papers import EXPERIMENTS, compare, page
from cnnexp.papers.compare import Cell, Result
from cnnexp.papers.experiment import Column, Experiment, Line
from cnnexp.papers.measures import Job, accuracy, epoch_s, limit, per_epoch, seconds_per_iteration
from cnnexp.papers.page import texts
from cnnexp.tracking.events import LACKING


def make_job(backend="numpy", images=100, timed=100, seconds=2.0, status="FINISHED", accuracy=0.5, **config) -> Job:
    """Return the job of a sweep as its journal would tell it."""
    config = {"backend.name": backend, "trainer.batch_size": 10, **config}
    if status != "FINISHED":
        return Job(config, status, "no GPU", {}, [], images)
    epoch = {"epoch": 1, "time/epoch_s": seconds, "train/images": timed, "test/loss": 0.1}
    return Job(config, status, None, {"final/test_accuracy": accuracy}, [epoch], images)


def as_cells(experiment: Experiment, jobs) -> list[list[Cell]]:
    return [
        [compare._cell(experiment, line, column, i, jobs) for i, column in enumerate(experiment.columns)]
        for line in experiment.lines
    ]


def test_cells_have_mean_spread_and_ratio_and_speedups_are_against_the_same_column():
    table = Experiment("t", "s", (Line("a", {"backend.name": "numpy"}, (25.0,)),), (Column("c"),), accuracy)
    (cell,) = as_cells(table, [make_job(accuracy=0.4), make_job(accuracy=0.6), make_job("cpu", accuracy=0.9)])[0]
    assert (cell.ours, cell.published, cell.ratio) == pytest.approx((50.0, 25.0, 2.0))
    assert cell.spread == pytest.approx(14.142, abs=1e-3)
    shown = {"paper": "25", "ours": "50.00 ± 14.14", "ours / paper": "2", "ours (paper)": "50.00 ± 14.14 (25)"}
    assert texts(cell) == shown

    lines = (Line("a", {"backend.name": "cpu-simd"}, against={"backend.name": "cpu"}),)
    columns = tuple(Column(str(n), {"model.filters": n}) for n in (1, 2))
    timed = (1, "cpu", 6.0), (1, "cpu-simd", 2.0), (2, "cpu", 8.0), (2, "cpu-simd", 1.0)
    jobs = [make_job(name, seconds=s, **{"model.filters": n}) for n, name, s in timed]
    assert [cell.ours for cell in as_cells(Experiment("t", "s", lines, columns), jobs)[0]] == [3.0, 8.0]


@each((LACKING, "not on this machine"), ("FAILED", "failed"), ("KILLED", "killed"), (None, "–"))
def test_what_could_not_be_run_says_why(status, why):
    table = Experiment("t", "s", (Line("a", {"backend.name": "gpu-naive"}, (4.06,)),), (Column("c"),))
    (cell,) = as_cells(table, [make_job("gpu-naive", status=status)] if status else [])[0]
    assert texts(cell) == {"paper": "4.06", "ours": why, "ours / paper": "", "ours (paper)": f"{why} (4.06)"}


def test_amdahl_with_the_papers_inputs_and_an_epoch_cut_short_is_scaled():
    assert limit(768)(make_job()._replace(metrics={"profile/parallel_share": 0.9801})) == pytest.approx(47.2, abs=0.05)
    assert limit(768)(make_job()) is None
    assert "gives 47.2; the paper prints 45.45" in EXPERIMENTS["khandait_amdahl"].notes[0]

    job = make_job(images=1000, timed=250, seconds=2.0)
    assert (epoch_s(job), seconds_per_iteration(job)) == (8.0, 0.08)
    assert per_epoch(job, "time/epoch_s") == [8.0]  # what the figure draws
    assert per_epoch(job, "test/loss") == [0.1]


def test_a_page_tells_on_how_many_images_an_epoch_was_timed():
    job = make_job(images=1000, timed=250)
    job.epochs.append({**job.epochs[0], "train/images": 400})
    facts = {"machine.load": "0.1", "machine.cores": "2"}
    result = Result(EXPERIMENTS["castanheira_fig3"], (job,), (), facts)
    assert any("timed on 250 to 400 of 1,000 images an epoch, and scaled" in note for note in page.notes(result))


def test_only_columns_with_a_published_number_have_three_headings():
    columns = (Column("seconds"), Column("ours alone"))
    table = Experiment("t", "s", (Line("a", {}, (2.0,)), Line("b")), columns)
    cells = [[Cell(2.0, 1.0), Cell(None, 3.0)], [Cell(None, None, why="failed"), Cell(None, 4.0)]]
    shown = page.table_of(Result(table, (), cells, {}))
    assert shown.titles(": ")[1:] == ["seconds: paper", "seconds: ours", "seconds: ours / paper", "ours alone: ours"]
    assert shown.rows == [["a", "2", "1.000", "0.5", "3.000"], ["b", "", "failed", "", "4.000"]]
