import io
from dataclasses import replace
from pathlib import Path

import pytest
from machine_code import CPUS
from results import DATASET, NETWORK, Backend, epoch_result
from rich.console import Console

from cnnexp import Totals, TwoConvMlp
from cnnexp.app.console import Display, JobTable
from cnnexp.app.hydra_app import CONF
from cnnexp.backends.simd.lowering import Plan
from cnnexp.training.baseline import Comparison
from cnnexp.training.loop import Progress

TWICE = Comparison(0.01, 32, 3, 2.0)
RESULT = replace(epoch_result(1), train=Totals(50.0, 80, 100), test=Totals(5.0, 9, 10), comparison=TWICE)
METRICS = {"time/median_epoch_s": 0.0123, "speedup/median": 35.2, "final/test_accuracy": 0.952}


def show(terminal, shown=True, epochs=2, results=(RESULT,), job="", baseline="cpu", folder=Path()):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80)
    with Display(epochs, baseline, shown, console, job=job) as display:
        display.start(DATASET, NETWORK, Backend(), 1.5, folder)
        display.progressed(Progress(1, Totals(30.0, 40, 60), 100, 0.25))
        for result in results:
            display.finished(result)
    return out.getvalue()


def test_a_row_per_epoch_under_one_line_of_titles():
    lines = show(False, results=[RESULT, replace(RESULT, epoch=2, epoch_s=12.5, test=Totals(5.0, 9, 9))]).splitlines()
    assert lines[0] == "points: 8 images to train on, 4 to test on; 15 parameters; numpy on 2 threads of"
    assert lines[2:4] == [
        "        train  train   test   test                       x",
        " epoch   loss   acc.   loss   acc. seconds images/s    cpu",
    ]
    assert lines[4] == "   1/2 0.5000 80.00% 0.5000 90.00%     0.5      200   2.00"
    assert lines[5] == "   2/2 0.5000 80.00% 0.5556   100%    12.5        8   2.00"
    assert len(lines) == 6


def test_where_results_go_is_said_where_that_is_not_below_the_users_folder(tmp_path, monkeypatch):
    assert show(False, folder=tmp_path / "run").splitlines()[2] == f"writes to {tmp_path / 'run'}"
    monkeypatch.chdir(tmp_path)
    assert "writes to" not in show(False, folder=tmp_path / "run")


@pytest.mark.parametrize("validation", [None, Totals(5e6, 10, 10)])
def test_nothing_is_wider_than_80_columns_and_the_longest_name_of_a_baseline_fits(validation):
    totals = {"train": Totals(5e6, 80, 100_000), "test": Totals(1e3, 10, 10), "validation": validation}
    comparison = Comparison(0.01, 32, 3, 1234.56)
    wide = replace(RESULT, epoch=999, epoch_s=0.0123, comparison=comparison, **totals)
    longest = max((path.stem for path in CONF.glob("backend/*.yaml")), key=len)
    out = show(False, epochs=1000, results=[wide], baseline=longest)
    assert max(map(len, out.splitlines())) <= 80
    assert (longest in out) == (validation is None)


def test_the_kernels_of_a_step_fit_and_none_is_clipped():
    network = TwoConvMlp().network((28, 28, 1), 10)
    rows = Plan(network, CPUS["avx512"].target, 2, 32).explain(2)
    out = io.StringIO()
    Display(1, None, console=Console(file=out, width=80)).explain(rows)
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert all(row.kernel in out.getvalue() for row in rows)
    assert "\u2026" not in out.getvalue()


def test_a_validation_split_has_columns_and_a_terminal_a_bar_above_finished_epochs_but_not_of_a_job():
    validated = replace(RESULT, validation=Totals(2.0, 1, 4))
    assert "25.00%" in show(False, results=[validated])
    assert "25.00%" not in show(False)

    text = show(terminal=True)
    assert "epoch 1/2" in text
    assert "accuracy 66.67%  240 images/s" in text
    assert text.count("90.00%") == 1
    text = show(terminal=True, job="job 2 of 8")
    assert "job 2 of 8  epoch 1/2" in text
    assert "90.00%" not in text
    assert show(terminal=False, job="job 2 of 8") == ""


def test_nothing_and_no_colour_where_none_is_wanted(monkeypatch):
    assert show(terminal=True, shown=False) == show(terminal=False, shown=False) == ""
    assert "\x1b[38;5;" in show(terminal=True) or "\x1b[3" in show(terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in show(terminal=True)


def job_table(rows, jobs=4, titles=("backend", "model.filters"), width=80):
    out = io.StringIO()
    table = JobTable(titles, jobs, 100.0, Console(file=out, width=width))
    for number, (label, metrics, error) in enumerate(rows):
        table.row(number, label, metrics, error, 110.0 + 10 * number)
    return out.getvalue().splitlines()


def test_a_sweep_is_a_table_that_fills_in_with_the_time_left():
    title, first, second = job_table([("cpu filters=8", METRICS, None), ("cpu filters=16", {}, None)])
    assert title.split() == ["job", "backend,", "filters", "epoch", "(s)", "speedup", "acc.", "left"]
    assert first.split() == ["1/4", "cpu", "filters=8", "0.0123", "35.2", "95.20%", "30", "s"]
    assert second.split() == ["2/4", "cpu", "filters=16", "20", "s"]
    assert first.index("0.0123") + 6 == title.index("(s)") + 3
    (_, row) = job_table([("x", METRICS, None)], jobs=None)
    assert row.split() == ["1", "x", "0.0123", "35.2", "95.20%"], "of unknown length, it tells no time left"


def test_one_cause_that_fails_every_job_is_told_once():
    _, *lines = job_table([("a", {}, "no GPU"), ("b", {}, "no GPU"), ("c", {}, "no data")])
    assert [*map(str.strip, lines)] == ["1/4  a  FAILED: no GPU", "2/4  b  FAILED, as 1", "3/4  c  FAILED: no data"]


@pytest.mark.parametrize("width", [80, 120])
def test_no_row_of_a_sweep_is_wider_than_80_columns(width):
    rows = [("cpu-parallel " + "filters=8 " * 5, METRICS, None), ("cpu", {}, "a reason that goes on " * 10)]
    titles = ["backend", *(f"trainer.a_key_of_some_length_{i}" for i in range(5))]
    lines = job_table(rows, titles=titles, width=width)
    assert max(map(len, lines)) <= 80
    assert all(title.removeprefix("trainer.") in " ".join(lines) for title in titles)
    assert " ".join(lines).count("goes") == 10
