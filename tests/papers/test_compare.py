import pytest
from papers.jobs import make_job

from cnnexp.papers import compare
from cnnexp.papers.experiment import Column, Experiment, Line
from cnnexp.papers.measures import accuracy
from cnnexp.papers.page import texts
from cnnexp.tracking.events import LACKING


def as_cells(experiment: Experiment, jobs) -> list[list[compare.Cell]]:
    return [
        [compare._cell(experiment, line, column, i, jobs) for i, column in enumerate(experiment.columns)]
        for line in experiment.lines
    ]


def test_cells_have_the_mean_over_seeds_its_spread_and_the_ratio():
    table = Experiment("t", "s", "q", (Line("a", {"backend.name": "numpy"}, (25.0,)),), (Column("c"),), accuracy)
    (cell,) = as_cells(table, [make_job(accuracy=0.4), make_job(accuracy=0.6), make_job("cpu", accuracy=0.9)])[0]
    assert (cell.ours, cell.published, cell.ratio) == pytest.approx((50.0, 25.0, 2.0))
    assert cell.spread == pytest.approx(14.142, abs=1e-3)
    assert texts(cell) == ("25", "50.00 ± 14.14", "2")


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
    assert texts(cell) == ("4.06", why, "")
