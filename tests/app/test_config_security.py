"""What a config from elsewhere may not do."""

import os
import pickle
import re
import time

import pytest
import yaml
from commands import TINY

from cnnexp.app import trust
from cnnexp.errors import ConfigError
from cnnexp.tracking.events import read_journal

MARK = "+hydra.callbacks.x._target_="


@pytest.mark.parametrize(
    "words",
    [
        [f"{MARK}shutil.copyfile", "+hydra.callbacks.x.src=FILE", "+hydra.callbacks.x.dst=MARKER"],
        [f"{MARK}builtins.open", "+hydra.callbacks.x.file=MARKER", "+hydra.callbacks.x.mode=w"],
        ["hydra.launcher._target_=builtins.open", "+hydra.launcher.file=MARKER", "+hydra.launcher.mode=w"],
        ["hydra.sweeper._target_=builtins.open"],
        ["+hydra.job_logging.handlers.x={class: builtins.open, filename: MARKER, mode: w}"],
        ["+hydra.job_logging.handlers.x={class: logging.StreamHandler, stream: 'ext://os.environ'}"],
        ["+evil={x: {_target_: builtins.open, file: MARKER, mode: w}}", "hydra.callbacks=${evil}"],
        ["+evil={handlers: {}}", "hydra.job_logging=${evil}"],
        ["+hydra.job_logging.handlers.x={class: logging.FileHandler, filename: MARKER}"],
        ["hydra.job_logging.handlers.file.filename=MARKER"],
        ["+hydra.job.env_set.PYTHONPATH=FILE"],
        ["hydra.output_subdir=MARKER"],
        ["hydra.job.name=../x"],
        ["--experimental-rerun", "FILE"],
        ["--exp=FILE"],
        ["-m", f"{MARK}builtins.open", "+hydra.callbacks.x.file=MARKER", "+hydra.callbacks.x.mode=w"],
    ],
)
def test_keys_that_name_code_are_refused_and_nothing_runs(run, tmp_path, monkeypatch, words):
    marker, file = tmp_path / "marker", tmp_path / "file"
    file.write_bytes(pickle.dumps(Evil(marker)))
    words = [word.replace("MARKER", str(marker)).replace("FILE", str(file)) for word in words]
    code, _, err = run(*TINY, *words)
    assert code == 2
    assert re.fullmatch(r"cnnexp: error: \S.*: refused; .*\n", err)
    assert not marker.exists()


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("section", ["callbacks", "job_logging"])
def test_a_config_file_from_elsewhere_runs_no_code(run, tmp_path, section):
    marker = tmp_path / "marker"
    code = {"file": str(marker), "mode": "w"}
    parts = {
        "callbacks": {"x": {"_target_": "builtins.open", **code}},
        "job_logging": {"handlers": {"x": {"()": "builtins.open", **code}}},
    }
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    text = "# @package _global_\n" + yaml.safe_dump({"hydra": {section: parts[section]}})
    (tmp_path / "conf" / "experiment" / "evil.yaml").write_text(text)
    code, _, err = run("--config-dir", str(tmp_path / "conf"), *TINY[1:], "experiment=evil")
    assert code == 2
    assert ": refused; " in err
    assert not marker.exists()


def test_a_bomb_of_aliases_is_refused_at_once(run, tmp_path):
    (tmp_path / "experiment").mkdir()
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    (tmp_path / "experiment" / "bomb.yaml").write_text("\n".join(lines))
    started = time.monotonic()
    code, _, err = run("--config-dir", str(tmp_path), "experiment=bomb")
    assert (code, time.monotonic() - started < 60) == (2, True)
    assert err == f"cnnexp: error: {tmp_path}/experiment/bomb.yaml: unfolds to more than 100000 values by its aliases\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe", "not UTF-8 text"),
        (b"a: &a [*a]", "unfolds to more than"),
        (b"x" * (trust.MOST_BYTES + 1), "more than the"),
    ],
)
def test_other_files_that_no_config_is(tmp_path, content, said):
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"x.yaml: .*{said}"):
        trust.check_file(path)


def contents(folder):
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


@pytest.mark.parametrize("way", ["typed", "environment", "sweep"])
def test_a_password_is_nowhere(run, tmp_path, monkeypatch, way):
    words = [word for word in TINY if word != "tracking=none"]
    monkeypatch.setenv("STORE", "http://me:s3cr3t@127.0.0.1:9")
    uri = "tracking.uri=${oc.env:STORE}" if way == "environment" else "tracking.uri=http://me:s3cr3t@127.0.0.1:9"
    code, out, err = run(*words, uri, *(["-m", "model.filters=2,3"] if way == "sweep" else []))
    assert code == 5
    assert "http://me:***@127.0.0.1:9: cannot be opened" in err
    assert "s3cr3t" not in out + err
    assert b"s3cr3t" not in contents(tmp_path)
    if way != "sweep":
        assert "${oc.env:" in read_journal(tmp_path / "run")["config"]["tracking"]["uri"]
    monkeypatch.delenv(trust.PASSWORD, raising=False)


def test_a_password_in_a_config_file_is_refused_before_it_is_copied(run, tmp_path):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ntracking: {uri: 'postgresql://me:s3cr3t@host/db'}\n"
    )
    words = [word for word in TINY[1:] if word != "tracking=none"]
    code, _, err = run("--config-dir", str(tmp_path / "conf"), *words, "experiment=mine")
    assert code == 2
    assert "tracking.uri: a password in a config file would be copied" in err
    assert not (tmp_path / "run").exists()


def test_a_command_line_may_have_its_flag_in_the_middle(run, tmp_path):
    code, _, err = run(*TINY, "-m", "model.filters=2,3")
    assert (code, err) == (0, "")
    assert len([*(tmp_path / "sweep").glob("*/journal.jsonl")]) == 2
    assert os.path.isdir(tmp_path / "sweep" / "1")
