import re

import pytest
from commands import raises
from results import write_journal
from tables import each

from cnnexp.app import listing
from cnnexp.errors import ConfigError
from cnnexp.tracking.folder import RunLock

RUNS = {"slow": ("cpu", 1.0, 1), "fast": ("cpu-simd", 30.5, 2), "middle": ("cpu-simd", 7.25, 3)}


@pytest.fixture
def outputs(tmp_path, monkeypatch):
    """Three runs that ended a minute apart, the first first, and one that died in between."""
    monkeypatch.setattr(listing, "outputs_dir", lambda: tmp_path / "outputs")
    monkeypatch.setenv("COLUMNS", "160")
    for name, (backend, speedup, minute) in RUNS.items():
        config = {"backend": {"name": backend}, "trainer": {"epochs": 1, "seed": minute}}
        lines = [
            {"event": "job", "name": f"{name} [x]", "overrides": [], "config": config},
            {"event": "recorded", "run_id": f"{minute}bcdef0123456789"},
            {"event": "epoch", "epoch": 1, "metrics": {"train/loss": 1.0}, "time_ms": minute * 60_000 - 1},
            {"event": "finish", "status": "FINISHED", "tags": {}, "metrics": {"speedup/median": speedup}},
        ]
        lines[-1]["time_ms"] = minute * 60_000
        write_journal(tmp_path / "outputs" / "runs" / name, *lines[: 3 if name == "slow" else 4])
    return tmp_path / "outputs"


def shown(capsys, *arguments):
    listing.command(arguments)
    return re.findall(r"(\w+) \[x\]", capsys.readouterr().out)


def test_the_newest_come_first_words_filter_sort_and_count_and_a_row_names_its_run(outputs, capsys):
    assert shown(capsys) == ["middle", "fast", "slow"]
    assert shown(capsys, "last=2") == ["middle", "fast"]
    assert shown(capsys, "sort=speedup") == ["fast", "middle", "slow"]  # what lacks it comes last
    assert shown(capsys, "sort=speedup", "last=1") == ["middle"]
    assert shown(capsys, "backend=cpu-simd") == ["middle", "fast"]
    assert shown(capsys, "backend=cpu-simd", "trainer.seed=2") == ["fast"]
    assert shown(capsys, "status=DIED") == ["slow"]
    listing.command(["backend=gpu"])
    assert capsys.readouterr().out.strip() == f"0 of 3 runs under {outputs}"

    listing.command(["status=FINISHED", "last=1"])
    out = capsys.readouterr().out
    assert re.search(r"^ *3bcdef01 +\S+ \S+ +middle \[x\] +FINISHED +1 +7\.25 *$", out, re.MULTILINE)
    assert out.endswith(f"1 of 3 runs under {outputs}\n")


@pytest.mark.parametrize("width", [30, 60])
def test_in_a_narrow_window_what_is_copied_is_whole(outputs, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    listing.command(["last=1", "status=FINISHED"])
    first, *facts, _ = capsys.readouterr().out.replace(str(outputs), "").splitlines()
    assert first == "3bcdef01"
    assert all(line.startswith("  ") and len(line) <= width for line in facts)
    assert " ".join(map(str.strip, facts)).endswith("name middle [x], status FINISHED, epochs 1, speedup 7.25")


def test_a_run_that_goes_on_now_says_so_and_one_without_a_store_is_named_by_its_folder(outputs, capsys):
    write_journal(outputs / "sweeps" / "0", {"event": "job", "name": "unsent", "overrides": [], "config": {}})
    claim = RunLock(outputs / "sweeps" / "0")
    listing.command(["status=RUNNING"])
    assert re.search(r"outputs/sweeps/0 +\S+ \S+ +unsent +RUNNING +0 *$", capsys.readouterr().out, re.MULTILINE)
    claim.release()
    listing.command(["status=DIED"])
    assert "unsent" in capsys.readouterr().out


@each(
    ("last=0", "runs last=0: must be a whole number >= 1"),
    ("last=many", "runs last=many: must be a whole number >= 1"),
    ("sort=spedup", "runs sort=spedup: legal: ended, .*; did you mean 'speedup'"),
    ("bakend=cpu", "runs bakend=cpu: legal: last, sort, status, or a key of the config; did you mean 'backend'"),
    ("cpu", "runs cpu: legal: last, sort, status"),
)
def test_a_word_that_it_does_not_know_is_one_line(outputs, word, message):
    raises(ConfigError, message, listing.command, [word])
