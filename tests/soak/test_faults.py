"""What the soak's faults make of what a process has printed."""

import pytest

from soak import faults
from soak.commands import Done

TRACKERS = """Traceback (most recent call last):
  File "<string>", line 1, in <module>
  File "/lib/python3.11/multiprocessing/spawn.py", line 132, in _main
    self = reduction.pickle.load(from_parent)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/lib/python3.11/multiprocessing/synchronize.py", line 110, in __setstate__
    self._semlock = _multiprocessing.SemLock._rebuild(*state)
FileNotFoundError: [Errno 2] No such file or directory
"""
OURS = TRACKERS.replace("multiprocessing/synchronize.py", "cnnexp/workers/local.py")
LINE = "cnnexp: error: worker 1 of 2 (pid 7) ended with exit code 1\n"


@pytest.mark.parametrize(
    ("said", "left"),
    [
        (f"{faults.TRACKER}\n{TRACKERS}{LINE}{TRACKERS}", f"{faults.TRACKER}\n{LINE}"),
        (f"{faults.TRACKER}\n{OURS}{LINE}", f"{faults.TRACKER}\n{OURS}{LINE}"),
        (f"{TRACKERS}{LINE}", f"{TRACKERS}{LINE}"),
    ],
)
def test_only_what_cpython_says_of_its_lost_tracker_is_passed_over(said, left):
    assert faults.without_tracker(Done(8, "", said, 1.0)) == Done(8, "", left, 1.0)
