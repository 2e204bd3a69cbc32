from dataclasses import replace

import pytest
from papers.jobs import make_job

from cnnexp.papers import EXPERIMENTS
from cnnexp.papers.measures import epoch_s, limit, per_epoch, seconds_per_iteration


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
