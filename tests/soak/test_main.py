"""The soak's own command line, on parts made here; and, slow, a slice of each part that takes processes."""

import sys

import pytest
from tables import each

from soak import __main__ as soak
from soak import commands, faults, kills, mutants, networks
from soak.commands import Done, Recorded, fault_of

WHOLE = {name: [(1, 0.5), (2, 0.25)] for name in commands.ALWAYS}
SLICED = [*map(soak.PARTS.get, ("worker-kills", "training-faults", "process-faults"))]
LINE = "cnnexp: error: worker 1 of 2 (pid 7) ended with exit code 1\n"


def run(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["soak", *words])
    with pytest.raises(SystemExit) as left:
        soak.main()
    return left.value.code, capsys.readouterr().out


def test_a_part_that_does_not_hold_is_told_and_a_slice_ends_in_time(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(soak, "PARTS", {"fake": lambda folder, seed: iter([None, "lost an epoch", None, None])})
    code, out = run(monkeypatch, capsys, "fake", "--folder", str(tmp_path))
    assert code == 1
    assert out.startswith("fake: lost an epoch\nfake: 3 of 4 hold, in ")

    monkeypatch.setattr(soak, "PARTS", {"a": lambda *_: iter([None] * 9), "b": lambda *_: iter([None] * 9)})
    code, out = run(monkeypatch, capsys, "--count", "3")
    assert (code, out.count("3 of 3 hold")) == (0, 2)
    assert "1 of 1 hold" in run(monkeypatch, capsys, "a", "--seconds", "0")[1]
    assert run(monkeypatch, capsys, "c")[0] == 2


def test_a_part_that_cannot_be_tried_keeps_no_other_from_it(monkeypatch, capsys):
    def lacks(folder, seed):
        raise commands.NotTried("no server is here")
        yield

    def fails(folder, seed):
        yield None
        raise OSError("no room")

    monkeypatch.setattr(soak, "PARTS", {"a": lacks, "b": fails, "c": lambda *_: iter([None])})
    code, out = run(monkeypatch, capsys)
    assert out.startswith("a: not tried: no server is here\nb: cannot be tried: OSError: no room\nb: 1 of 2 hold")
    assert "c: 1 of 1 hold" in out
    assert code == 1
    assert run(monkeypatch, capsys, "a", "c")[0] == 0


@each(
    ([Recorded("r", "FINISHED", WHOLE)], None),
    ([Recorded("r", "FINISHED", WHOLE)] * 2, "2 MLflow runs"),
    ([], "0 MLflow runs"),
    ([Recorded("r", "RUNNING", WHOLE)], "the MLflow run is RUNNING"),
    ([Recorded("r", "FINISHED", {**WHOLE, "test/loss": [(1, 0.5)]})], "test/loss has the epochs [1]"),
    ([Recorded("r", "FINISHED", {**WHOLE, "time/epoch_s": [(1, 1), (1, 1), (2, 1)]})], "time/epoch_s has the epochs"),
)
def test_a_record_that_lacks_or_doubles_an_epoch_is_seen(runs, fault):
    found = fault_of(runs, 2)
    assert found is None if fault is None else found.startswith(fault)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are killed and watched as Linux does it")
@pytest.mark.parametrize("part", [kills.kills, kills.recorder, kills.sweeps, kills.jobs, networks.networks, *SLICED])
def test_a_short_slice_holds(tmp_path, part):
    trials = part(tmp_path, 0)
    assert [next(trials) for _ in range(2)] == [None, None]


@pytest.mark.slow
def test_a_process_that_is_killed_or_hangs_is_seen(tmp_path):
    sleeps = "import time; time.sleep(60)"
    assert commands.run([], tmp_path, kill_after_s=0.5, program=sleeps).code == -9
    assert commands.run([], tmp_path, limit_s=0.5, program=sleeps).fault.startswith("hung")
    watched = commands.run([], tmp_path, limit_s=0.5, program=sleeps, meanwhile=lambda process: process.wait())
    assert watched.fault.startswith("hung")


def test_every_guard_that_a_mutant_breaks_stands_in_its_file_once():
    root = commands.ROOT / "cnnexp"
    assert not [m for m in mutants.read() if (root / m.file).read_text("utf-8").count(m.guard) != 1]


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


@each(
    (f"{faults.TRACKER}\n{TRACKERS}{LINE}{TRACKERS}", f"{faults.TRACKER}\n{LINE}"),
    (f"{faults.TRACKER}\n{OURS}{LINE}", f"{faults.TRACKER}\n{OURS}{LINE}"),
    (f"{TRACKERS}{LINE}", f"{TRACKERS}{LINE}"),
)
def test_only_what_cpython_says_of_its_lost_tracker_is_passed_over(said, left):
    assert faults.without_tracker(Done(8, "", said, 1.0)) == Done(8, "", left, 1.0)
