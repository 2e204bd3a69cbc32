"""Every command that the soak's table names, in one process that forks for each."""

import os
import sys

import pytest
from commands import ROOT, python
from tables import each

from soak import review
from soak.commands import Done

LINE = "cnnexp: error: model.filters=0: must be >= 1\n"
CASE = review.tiny("model.filters=0", says="model.filters=0")


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="it forks, and reads /proc")
def test_every_command_of_the_review_ends_as_it_should(tmp_path):
    told = python("-m", "soak", "review", "--folder", tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert told.startswith(f"review: {len(review.CASES)} of {len(review.CASES)} hold")


@each(
    (Done(2, "", LINE, 1.0), 1.0, 0, None),
    (Done(None, "", "", 99.0), 1.0, 0, "hung"),
    (Done(-9, "", "", 1.0), 1.0, 0, "died of SIGKILL"),
    (Done(0, "", "", 1.0), 1.0, 0, "exit code 0, not 2"),
    (Done(2, "", "Traceback (most recent call last)", 1.0), 1.0, 0, "a traceback"),
    (Done(2, "", LINE * 2, 1.0), 1.0, 0, "exit code 2 with"),
    (Done(2, "", LINE.replace("0", "1"), 1.0), 1.0, 0, "does not say"),
    (Done(2, "", LINE, 1.0), 6.0, 0, "took 6.0 s"),
    (Done(2, "", LINE, 1.0), 1.0, 2**31, "took 2147483648 bytes"),
)
def test_what_is_no_single_line_in_seconds_is_a_fault(done, cpu_s, used, fault):
    found = review.fault_of(CASE, done, cpu_s, used)
    assert found is None if fault is None else found.startswith(fault)
