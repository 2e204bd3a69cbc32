"""Folders that hold one run each, and runs that are gone on with."""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from commands import TINY, raises
from results import write_journal

from cnnexp.app import resume
from cnnexp.backends.layerwise import LayerwiseProgram
from cnnexp.errors import CheckpointError, ConfigError
from cnnexp.tracking.events import JOURNAL, read_journal
from cnnexp.tracking.folder import RECORDER, RunLock, is_locked
from cnnexp.tracking.journal import Run
from cnnexp.training.checkpoint import CheckpointWriter, find, list_checkpoints, load

THREE = (*TINY, "trainer.epochs=3")
WITHIN = (*TINY[:-1], "trainer.epochs=2", "trainer.batch_size=8")  # 25 batches an epoch


def parameters(folder):
    return load(find(folder)).state["parameters"]


def contents(folder):
    return {path: path.read_bytes() for path in (folder / JOURNAL, *folder.glob("checkpoints/*"))}


def test_a_folder_where_no_job_trained_is_free_and_one_that_holds_a_run_is_refused(run, mistake, tmp_path):
    assert run(*TINY, "model.filters=0")[0] == 2
    assert run(*THREE)[0] == 0
    assert read_journal(tmp_path / "run")["status"] == "FINISHED"
    before = contents(tmp_path / "run")
    said = "holds another run; choose another folder, or go on with that run by trainer.resume=auto"
    mistake(*TINY, "optimizer.lr=0.5", says=f"hydra.run.dir={tmp_path}/run: {said}")
    assert contents(tmp_path / "run") == before, "it stays as it is"


def test_a_folder_with_a_live_run_is_refused(mistake, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    script = (
        "import sys, pathlib; from cnnexp.tracking.folder import RunLock;"
        "claim = RunLock(pathlib.Path(sys.argv[1])); print(1, flush=True); input()"
    )
    command, pipes = [sys.executable, "-c", script, str(folder)], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as other:
        other.stdout.readline()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        holder = f"process {other.pid} on {re.escape(platform.node())}, boot {boot}"
        mistake(*TINY, says=f".*{holder} runs in it now; choose another folder.*")
        assert is_locked(folder)
        other.kill()
        other.wait()
    assert not is_locked(folder)  # the system frees what a killed process held
    RunLock(folder).release()


def test_a_run_goes_on_in_its_own_folder_by_itself(run, tmp_path, monkeypatch):
    """Stopped before its first epoch, after its first, and after its last, as SIGKILL leaves it."""
    assert run(*THREE)[0] == 0
    wanted, whole = parameters(tmp_path / "run"), read_journal(tmp_path / "run")
    record = Run.finished
    for lost in (0, 1, 3):
        folder = tmp_path / f"lost {lost}"
        words = (*THREE, f"hydra.run.dir='{folder}'")

        def stop(self, result, lost=lost):
            if result is not None and result.epoch == lost + 1:
                raise KeyboardInterrupt
            return record(self, result)

        with monkeypatch.context() as stopped:
            stopped.setattr(Run, "finished", stop)
            assert run(*words)[0] == (130 if lost < 3 else 0)
        lines = (folder / JOURNAL).read_text(encoding="utf-8").splitlines(keepends=True)
        half = [line for line in lines if json.loads(line)["event"] != "finish"]
        (folder / JOURNAL).write_text("".join(half) + '{"event": "epo', encoding="utf-8")  # killed while it wrote
        assert read_journal(folder)["status"] == "DIED"

        assert run(*words, "trainer.resume=auto")[::2] == (0, "")
        np.testing.assert_array_equal(parameters(folder), wanted)
        journal = read_journal(folder)
        assert journal["status"] == "FINISHED"
        assert [epoch["epoch"] for epoch in journal["epochs"]] == [1, 2, 3]
        losses = [[epoch["train/loss"] for epoch in of["epochs"]] for of in (journal, whole)]
        assert losses[0] == losses[1]
        assert (folder / JOURNAL).read_text(encoding="utf-8").count('"event": "epoch"') == 3
        with np.load(folder / "predictions.npz") as arrays:
            assert len(arrays["predicted"]) == len(arrays["labels"]) > 0


def test_auto_finds_the_newest_run_of_the_same_config(run, tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "outputs_dir", lambda: tmp_path)
    assert run(*TINY)[0] == 0
    os.rename(tmp_path / "run", tmp_path / "first")
    assert run(*TINY, "optimizer.lr=0.5", "trainer.resume=auto")[0] == 0
    os.rename(tmp_path / "run", tmp_path / "other")
    config = read_journal(tmp_path / "first")["config"]
    assert resume.find_earlier("auto", tmp_path / "run", config).folder == tmp_path / "first"
    claim = RunLock(tmp_path / "first")
    assert resume.find_earlier("auto", tmp_path / "run", config) is None  # it runs now
    claim.release()
    claim = RunLock(tmp_path / "first", RECORDER)  # it has ended, and what is left of it is sent
    threading.Timer(0.2, claim.release).start()
    assert resume.find_earlier("auto", tmp_path / "run", config).folder == tmp_path / "first"


def test_an_older_checkpoint_is_not_gone_on_from_among_later_ones(run, tmp_path):
    assert run(*THREE)[0] == 0
    older = tmp_path / "run" / "checkpoints" / "epoch-000002.ckpt"
    with pytest.raises(ConfigError, match=r"later checkpoints lie beside it; choose another hydra\.run\.dir"):
        resume.find_earlier(str(older), tmp_path / "run", {})
    assert resume.find_earlier(str(older), tmp_path / "elsewhere", {}).path == older


def finished(folder, run_id, accuracy, age_s):
    """A run's folder as far as its name can be found: a journal and a checkpoint."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "epoch-000001.ckpt").write_bytes(b"")
    finish = {"event": "finish", "status": "FINISHED", "tags": {}, "metrics": {"final/test_accuracy": accuracy}}
    write_journal(folder, {"event": "recorded", "run_id": run_id}, finish)
    os.utime(folder / JOURNAL, (1e9 - age_s, 1e9 - age_s))
    return folder / "checkpoints" / "epoch-000001.ckpt"


def test_a_run_is_named_by_latest_best_or_the_first_digits_of_its_id(tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "outputs_dir", lambda: tmp_path / "outputs")
    raises(CheckpointError, r"^latest: no run under .*outputs has a checkpoint", resume.find_run, "latest", "latest")
    old = finished(tmp_path / "outputs" / "a", "abcd" + 28 * "1", 0.99, 100)
    new = finished(tmp_path / "outputs" / "b", "abce" + 28 * "2", 0.98, 1)
    write_journal(tmp_path / "outputs" / "c", {})  # newer, but it has trained nothing
    assert (resume.find_run("latest", "x"), resume.find_run("best", "x")) == (new, old)
    assert resume.find_run("abcd", "x") == old
    assert resume.find_run("abce222", "x") == new
    finished(tmp_path / "outputs" / "d", "abcd" + 28 * "3", 0.5, 50)
    with pytest.raises(CheckpointError, match=r"^predict abcd: 2 runs begin so: abcd1+, abcd3+; give more digits"):
        resume.find_run("abcd", "predict abcd")
    raises(CheckpointError, "no such file or folder", resume.find_run, "0000", "x")


def stop_after(monkeypatch, batches):
    """End training as Ctrl-C does, so many batches after its start."""
    left, train = [batches], LayerwiseProgram.train

    def stop(self, handle, order, rate):
        totals = train(self, handle, order, rate)
        left[0] -= len(order) // 8
        if left[0] <= 0:
            signal.raise_signal(signal.SIGINT)
        return totals

    monkeypatch.setattr(LayerwiseProgram, "train", stop)


@pytest.mark.parametrize("stops", [(20, 25, 30), pytest.param((1, 50), marks=pytest.mark.thorough)])
def test_ctrl_c_keeps_what_is_trained_to_the_batch(run, mistake, tmp_path, monkeypatch, stops):
    assert run(*WITHIN)[0] == 0
    wanted, whole = parameters(tmp_path / "run"), read_journal(tmp_path / "run")
    for batches in stops:
        folder = tmp_path / str(batches)
        words = (*WITHIN, f"hydra.run.dir={folder}")
        with monkeypatch.context() as stopped:
            stop_after(stopped, batches)
            code, _, err = run(*words)
        assert code == 130
        found = load(find(folder))
        assert re.fullmatch(rf"cnnexp: error: interrupted; its checkpoint is {find(folder)}; to go on: .*\n", err)
        assert read_journal(folder)["status"] == "KILLED"
        assert found.begun is not None
        assert 25 * found.epoch + found.begun.totals.count // 8 >= batches
        if batches == 30:
            mistake(*words, "trainer.epochs=1", "trainer.resume=auto", says=".*has begun epoch 2; give as many.*")
        assert run(*words, "trainer.resume=auto")[::2] == (0, "")
        np.testing.assert_array_equal(parameters(folder), wanted)
        journal = read_journal(folder)
        assert [epoch["epoch"] for epoch in journal["epochs"]] == [1, 2]
        for epoch, then in zip(journal["epochs"], whole["epochs"], strict=True):
            assert epoch["test/loss"] == then["test/loss"]
            assert epoch["train/loss"] == pytest.approx(then["train/loss"], rel=1e-12)  # summed in other chunks


@pytest.mark.parametrize("word", ["checkpoint_batches=10", "checkpoint_s=1e-9", "checkpoint_s=null"])
def test_checkpoints_within_an_epoch_come_after_so_many_batches_or_by_the_clock(run, tmp_path, monkeypatch, word):
    written, save = [], CheckpointWriter.save

    def note(self, *arguments, **options):
        written.append(save(self, *arguments, **options))
        return written[-1]

    monkeypatch.setattr(CheckpointWriter, "save", note)
    assert run(*WITHIN, "trainer.epochs=1", f"trainer.{word}")[0] == 0
    within = [int(path.name[-14:-5]) for path in written if "images" in path.name]
    if word == "checkpoint_s=1e-9":
        assert len(within) >= 2
    else:
        assert within == ([80, 160] if word == "checkpoint_batches=10" else [])
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == "epoch-000001.ckpt"
