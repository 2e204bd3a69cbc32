import contextlib
import csv
import io
import math
import os
import re
import sqlite3
import subprocess
import sys
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from unittest.mock import MagicMock

import pytest
from commands import ROOT, TINY, cnnexp, mlflow_warns
from omegaconf import OmegaConf
from results import CONFIG, DATASET, NETWORK, Backend, epoch_result, train, write_journal
from rich.console import Console

from cnnexp.app import hydra_app, resume, sweep, sync
from cnnexp.errors import DataError
from cnnexp.papers import EXPERIMENTS
from cnnexp.papers.compare import compare
from cnnexp.system.table import as_screen
from cnnexp.tracking import journal, pipe, store
from cnnexp.tracking.events import FALLBACK, JOURNAL
from cnnexp.tracking.journal import Run
from cnnexp.tracking.pipe import NoAnswerYet, Recorder

pytestmark = mlflow_warns


@pytest.fixture(autouse=True)
def no_sweep_left_over():
    yield
    os.environ.pop(sweep.VARIABLE, None)


def run_job(folder, number, overrides, epoch_s=0.5, error=None, recorder=None):
    """A job as `cnnexp.app.hydra_app` runs it."""
    within = sweep.current()
    job = Run(folder / str(number), CONFIG, overrides, recorder, None, within.begun, within.contended)
    if error is None:
        train(job, [epoch_result(1, epoch_s=epoch_s, speedup=2.0)])
    job.__exit__(type(error), error, None)
    return job


def printed(rows):
    out = io.StringIO()
    Console(file=out, width=200).print(as_screen(sweep.job_table(rows), None, 200))
    return out.getvalue()


def test_a_backend_that_took_over_is_told_and_its_times_are_no_others(tmp_path):
    started = sweep.SweepRecord(tmp_path, ["model.filters=2"])
    with Run(tmp_path / "0", CONFIG, ["model.filters=2"]) as job:
        job.begin(DATASET, NETWORK, Backend())
        job.tags[FALLBACK] = "cpu-parallel"
        job.finished(epoch_result(1))
    rows = started.finish()
    assert sweep.varied(rows) == []
    assert "FINISHED, on cpu-parallel" in printed(rows)
    (compared,) = compare(tmp_path, next(iter(EXPERIMENTS))).jobs
    assert compared.config["backend.name"] == "cpu-parallel"


def test_rows_tell_what_varied_and_what_became_of_each_job(tmp_path):
    started = sweep.SweepRecord(tmp_path, ["backend=numpy,cpu", "model.filters=2,10", "trainer.seed=1"])
    for number in (10, 9, 2):
        run_job(tmp_path, number, [f"model.filters={number}", "trainer.seed=1"], epoch_s=number)
    run_job(tmp_path, 11, ["model.filters=11", "trainer.seed=1"], error=DataError("no, data"))
    (tmp_path / "12").mkdir()
    job_line = (tmp_path / "10" / JOURNAL).read_text().splitlines()[0]
    (tmp_path / "12" / JOURNAL).write_text(job_line + "\n")
    rows = started.finish()
    assert [row["job"] for row in rows] == ["2", "9", "10", "11", "12"]
    assert [row["status"] for row in rows] == ["FINISHED"] * 3 + ["FAILED", "DIED"]
    assert [row["model.filters"] for row in rows] == ["2", "9", "10", "11", "10"]
    assert sweep.varied(rows) == ["model.filters"]
    assert [row.get("time/median_epoch_s") for row in rows] == [2, 9, 10, None, None]
    died = "job in folder 12 (model.filters=10): the process died"
    assert sweep.failures(rows) == ["job in folder 11 (model.filters=11): no, data", died]
    with (tmp_path / "summary.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["error"] for row in table][:4] == ["", "", "", "no, data"]
    assert [row["time/median_epoch_s"] for row in table] == ["2", "9", "10", "", ""]
    assert re.search(r"model\.filters(.|\n)* 10 (.|\n)*FAILED", printed(rows))


def test_jobs_in_other_processes_are_contended_and_a_sweep_is_over_when_it_is_finished(tmp_path):
    started = sweep.SweepRecord(tmp_path, [])
    assert not sweep.current().contended
    question = "from cnnexp.app import sweep; print(sweep.current().folder, sweep.current().contended)"
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=True, cwd=ROOT)
    assert answer.stdout.split() == [str(tmp_path), "True"]
    assert started.finish() == sweep.failures([]) == []
    assert sweep.current() is None


def test_sweep_in_mlflow_has_a_parent_with_table_and_figures(tmp_path, new_store):
    uri = new_store(tmp_path)
    recorder = Recorder(uri, "sweeps")
    started = sweep.SweepRecord(tmp_path / "jobs", ["model.filters=2,4", "trainer.seed=1"], recorder)
    jobs = [run_job(tmp_path / "jobs", i, [f"model.filters={2 + 2 * i}"], 1 + i, None, recorder) for i in range(2)]
    run_job(tmp_path / "jobs", 2, ["model.filters=0"], error=DataError("no data"), recorder=recorder)
    started.finish()
    recorder.close()

    client = store.Store(uri, "sweeps")._client
    parent = client.get_run(started.id)
    assert (parent.info.run_name, parent.info.status) == ("sweep model.filters=2,4", "FAILED")
    assert parent.data.tags.items() >= {"kind": "sweep", "jobs": "3", "jobs.failed": "1"}.items()
    for job in jobs:
        tags = client.get_run(job.id).data.tags
        assert tags["mlflow.parentRunId"] == started.id
        assert tags.keys() >= {"backend", "model", "dataset", "optimizer", "device", "threads", "config_hash"}
    artifacts = {a.path for folder in (None, "figures") for a in client.list_artifacts(started.id, folder)}
    figures = {"figures", "figures/epoch_time.png", "figures/speedup.png"}
    assert artifacts == {"summary.csv", "report.md", *figures}
    note = parent.data.tags["mlflow.note.content"]
    assert note == (tmp_path / "jobs" / "report.md").read_text()
    assert "| not sure | 1 and 2 (p 1)" in note
    assert "| 2 | 0 | FAILED |" in note
    assert parent.data.metrics == {"ranking/filters 2": 2.0, "ranking/filters 4": 2.0, "speedup/best": 2.0}


def test_jobs_of_a_sweep_whose_store_is_locked_have_one_parent_later(tmp_path, new_store, monkeypatch, caplog):
    uri = new_store(tmp_path)
    monkeypatch.setattr(sweep, "START_S", 0.2)
    monkeypatch.setattr(journal, "START_S", 0.2)
    monkeypatch.setattr(pipe, "LOOK_S", 0.1)
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        recorder = Recorder(uri, "sweeps")
        started = sweep.SweepRecord(tmp_path / "jobs", ["model.filters=2,4"], recorder)
        job = Run(tmp_path / "jobs" / "0", CONFIG, ["model.filters=2"], recorder, parent=started.begun)
        job.begin(DATASET, NETWORK, Backend())
        job.finished(epoch_result(1))
        assert (started.id, job.id) == (None, None)
    assert "no answer yet; the sweep goes on, and is recorded when it answers" in caplog.records[0].message
    job.__exit__(None, None, None)
    run_job(tmp_path / "jobs", 1, ["model.filters=4"], recorder=recorder)
    started.finish()
    recorder.close()

    opened = store.Store(uri, "sweeps")
    runs = opened._search("", 10)
    (parent,) = (run for run in runs if run.data.tags["kind"] == "sweep")
    assert parent.info.status == "FINISHED"
    assert [run.data.tags["mlflow.parentRunId"] for run in runs if run is not parent] == [parent.info.run_id] * 2


def test_a_sweep_whose_store_never_answered_is_sent_with_its_table_and_figures(tmp_path, new_store, capsys):
    folder = tmp_path / "jobs"
    silent = MagicMock(spec=Recorder, **{"call.side_effect": NoAnswerYet("no answer"), "ask.return_value": Future()})
    started = sweep.SweepRecord(folder, ["model.filters=2,4"], silent)
    for number in (0, 1):
        run_job(folder, number, [f"model.filters={2 + 2 * number}"], 1 + number)
    started.finish()
    assert str(started.lost) == "no answer"
    uri = new_store(tmp_path)
    for _ in range(2):  # the second finds all there
        sync.command([str(folder), f"tracking.uri={uri}"])
        assert "sent sweep model.filters=2,4 (FINISHED) of" in capsys.readouterr().out
    opened = store.Store(uri, "cnnexp")
    runs = opened._search("", 10)
    (parent,) = (run for run in runs if run.data.tags["kind"] == "sweep")
    assert (parent.info.status, parent.data.tags["jobs"]) == ("FINISHED", "2")
    assert parent.data.metrics == {"ranking/filters 2": 2.0, "ranking/filters 4": 2.0, "speedup/best": 2.0}
    artifacts = {artifact.path for artifact in opened._client.list_artifacts(parent.info.run_id)}
    assert artifacts == {"summary.csv", "figures", "report.md"}
    assert [run.data.tags["mlflow.parentRunId"] for run in runs if run is not parent] == [parent.info.run_id] * 2


def test_a_sweep_that_goes_on_has_the_parent_that_it_had(tmp_path, new_store, monkeypatch):
    uri, words = new_store(tmp_path), ["model.filters=2,4"]
    monkeypatch.setattr(resume, "outputs_dir", lambda: tmp_path)
    recorder, ids = Recorder(uri, "sweeps"), []
    for name, skip in (("a", False), ("a", False), ("b", True), ("c", False)):
        config = OmegaConf.create({"sweep": {"skip_finished": skip}, "trainer": {"resume": None}})
        common = {"model": {"name": "one_conv"}, "varied": {"model.filters": "2,4"}}
        earlier = hydra_app._earlier_sweep(config, tmp_path / name, common)
        started = sweep.SweepRecord(tmp_path / name, words, recorder, None, common, 2, earlier)
        run_job(tmp_path / name, len(ids), ["model.filters=2"], recorder=recorder)
        started.finish(interrupted=not skip)
        ids.append(started.id)
    recorder.close()
    opened = store.Store(uri, "sweeps")
    assert ids[0] == ids[1] == ids[2] != ids[3]
    assert opened.sync(str(tmp_path / "a")) is None, "what is there is an earlier part"
    parent = opened._client.get_run(ids[0])
    assert (parent.info.status, parent.data.tags["record.folder"]) == ("FINISHED", str(tmp_path / "b"))
    assert len(opened._search(f"tags.`mlflow.parentRunId` = '{ids[0]}'", 10)) == 3


@pytest.mark.thorough
def test_a_parallel_launcher_is_contended(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    launcher = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", f"hydra.sweep.dir={tmp_path}")
    done = cnnexp("-m", *TINY, *launcher, "model.filters=2,4")
    assert done.returncode == 0, done.stderr
    assert [row["contended"] for row in sweep.rows(tmp_path)] == [True, True]


def test_a_parallel_launcher_that_lost_a_process_is_told_in_a_line(monkeypatch, tmp_path, capsys):
    def command():
        hydra_app.SweepCallback.started = sweep.SweepRecord(tmp_path, ["model.filters=1,2,4"])
        run_job(tmp_path, 0, ["model.filters=1"])
        died = {"event": "job", "name": "killed", "overrides": ["model.filters=2"], "config": CONFIG}
        write_journal(tmp_path / "1", died)
        raise BrokenProcessPool("A worker process was unexpectedly terminated.\nThe exit codes are {SIGKILL(-9)}")

    monkeypatch.setattr(hydra_app.SweepCallback, "started", None)
    monkeypatch.setattr(hydra_app.hydra, "main", lambda **_: lambda job: command)
    monkeypatch.setattr(sys, "argv", ["cnnexp", "-m", "model.filters=1,2,4"])
    with pytest.raises(SystemExit) as left:
        hydra_app.launch()
    assert left.value.code == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "cnnexp: error: job in folder 1 (model.filters=2): the process died"
    assert second.startswith("  a process of hydra/launcher died")


def test_a_plugin_that_exits_fails_its_job_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(hydra_app, "_failures", failures := [])
    monkeypatch.setattr(hydra_app, "_folder", lambda: tmp_path)
    monkeypatch.setattr(hydra_app, "run", lambda composed: sys.exit(3))
    assert math.isnan(hydra_app.job(None))
    assert str(failures[0]).startswith("unexpected SystemExit: 3; its traceback is in ")
