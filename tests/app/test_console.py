import dataclasses
import io

import numpy as np
import pytest
from rich.console import Console

from cnnexp.app.console import Display
from cnnexp.network.losses import Totals
from cnnexp.training.baseline import Comparison
from cnnexp.training.loop import EpochResult, Progress

RESULT = EpochResult(
    epoch=1,
    rate=0.1,
    train=Totals(50.0, 80, 100),
    test=Totals(5.0, 9, 10),
    validation=None,
    epoch_s=0.5,
    evaluate_s=0.1,
    comparison=Comparison(0.01, 32, 3, 2.0),
    scores=np.zeros((10, 10), np.float32),
)


def show(terminal: bool, shown: bool = True) -> str:
    out = io.StringIO()
    with Display(2, "cpu", shown, Console(file=out, force_terminal=terminal, width=120)) as display:
        display.progress(Progress(1, Totals(30.0, 40, 60), 100, 0.25))
        display.epoch(RESULT)
    return out.getvalue()


def test_lines_where_there_is_no_terminal():
    line = "epoch 1/2  train loss 0.5000  accuracy 80.00%  test loss 0.5000  accuracy 90.00%  0.50 s  200 images/s"
    assert show(terminal=False) == f"{line}  2.00 x cpu\n"


def test_a_bar_in_a_terminal():
    text = show(terminal=True)
    assert "epoch 1/2" in text
    assert "loss 0.5000  accuracy 66.67%  240 images/s" in text
    assert "train loss" not in text


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_where_none_is_wanted(terminal):
    assert show(terminal, shown=False) == ""


@pytest.mark.parametrize("validated", [True, False])
def test_the_table_has_a_row_per_epoch(validated):
    result = dataclasses.replace(RESULT, validation=Totals(2.0, 1, 4) if validated else None)
    out = io.StringIO()
    Display(2, "cpu", console=Console(file=out, width=200)).table([result, dataclasses.replace(result, epoch=2)])
    rows = [line for line in out.getvalue().splitlines() if line.startswith("│")]
    assert [row.split()[1] for row in rows] == ["1", "2"]
    assert ("25.00%" in rows[0]) is validated
    assert "90.00%" in rows[0]
    assert rows[0].split()[-2] == "2.00"
