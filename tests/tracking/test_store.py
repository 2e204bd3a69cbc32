import json
import os
import sqlite3
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from commands import mlflow_warns, raises
from tables import each

from cnnexp.errors import ConfigError, TrackingError
from cnnexp.measuring import environment
from cnnexp.tracking import address, liveness, view
from cnnexp.tracking import store as stores
from cnnexp.tracking.events import FOLDER, JOURNAL, note
from cnnexp.tracking.pipe import Recorder

pytestmark = mlflow_warns


@pytest.fixture(scope="module")
def store(tmp_path_factory, new_store):
    """One store for the module. Its path holds what breaks careless URIs."""
    folder = tmp_path_factory.mktemp("stores") / "a b ü #1 %41 ?"
    folder.mkdir()
    new_store(folder)
    return stores.Store(address.sqlite_uri(folder / "mlflow.db"), "first")


def read(store, run_id):
    return store._client.get_run(run_id)


def history(store, run_id, key="train/loss"):
    return [(m.step, m.value) for m in store._client.get_metric_history(run_id, key)]


def test_addresses_are_made_absolute_and_the_default_one_depends_on_no_working_folder(monkeypatch, tmp_path):
    before = address.store_uri(None)
    monkeypatch.chdir(tmp_path)
    assert address.store_uri(None) == before == f"sqlite:///{environment.outputs_dir()}/mlflow.db"
    assert address.store_uri("sqlite:///my/runs.db") == f"sqlite:///{tmp_path}/my/runs.db"
    assert address.store_uri("http://host:5000") == "http://host:5000"
    monkeypatch.setattr(environment, "checkout", lambda: None)  # of an installed package
    assert environment.outputs_dir() == tmp_path / "outputs"


@each(
    ("must start with .*did you mean 'http'", ["htp://host"]),
    ("must start with .*sqlite:///", ["file:///mlruns", "mlruns"]),
    ("no address of a store", ["http://[::1", "http://[x]/y", "http://host:99999", "postgresql://me:pw@[::1/db"]),
    ("names no file; write sqlite:///path/", ["sqlite:", "sqlite://x.db", "sqlite:///", "sqlite:///:memory:"]),
)
def test_what_is_no_address_is_a_config_error(said, uris):
    for uri in uris:
        assert "pw" not in str(raises(ConfigError, rf"^tracking\.uri=.*: {said}", address.store_uri, uri))


def write(folder, *events):
    with (folder / JOURNAL).open("a") as journal:
        for event, facts in events:
            note(journal, event, **facts)


def begun(folder, key="k1"):
    return "begin", {"name": "a run", "params": {}, "tags": {FOLDER: str(folder), "workers": "1"}, "key": key}


def epoch(number, time_ms=1):
    return "epoch", {"epoch": number, "metrics": {"train/loss": float(number)}, "time_ms": time_ms}


def test_a_journal_is_followed_as_it_grows(store, tmp_path):
    folder = str(tmp_path)
    assert store.follow(folder) is None, "nothing is there yet"
    write(tmp_path, begun(tmp_path, "grows"))
    run_id = store.follow(folder)
    assert read(store, run_id).info.status == "RUNNING"
    now_ms = int(time.time() * 1000)
    write(tmp_path, epoch(1, now_ms))
    with (tmp_path / JOURNAL).open("a") as journal:
        journal.write('{"event": "epoch", "epoch": 2, "metrics"')
    assert store.follow(folder) == run_id
    assert history(store, run_id) == [(1, 1.0)]
    with (tmp_path / JOURNAL).open("a") as journal:
        journal.write(f': {{"train/loss": 2.0}}, "time_ms": {now_ms}}}\n')
    store._followed[folder].look_at = time.monotonic() + 1000.0
    store.look()
    assert history(store, run_id) == [(1, 1.0)], "another was sent just now"
    store.follow(folder)
    assert history(store, run_id) == [(1, 1.0), (2, 2.0)]
    used = dict(history(store, run_id, "system/cpu_utilization_percentage"))
    assert used.keys() == {1, 2}, "by epoch"
    assert all(0 <= percent <= 100 for percent in used.values())
    metrics = read(store, run_id).data.metrics
    assert 1 < metrics["system/process_memory_usage_megabytes"] < 1e6
    assert 0 < metrics["system/system_memory_usage_percentage"] < 100
    (tmp_path / "report.md").write_text("well")
    ended = {"status": "FINISHED", "tags": {"note": "done"}, "metrics": {"final/test_accuracy": 1 / 3}, "time_ms": 9}
    write(tmp_path, ("finish", ended))
    store.follow(folder)
    run = read(store, run_id)
    assert (run.info.status, run.data.tags["note"]) == ("FINISHED", "done")
    assert run.data.metrics["final/test_accuracy"] == 0.333333  # a column of MLflow's list, which cuts longer ones
    artifacts = address.database_of(store._uri).parent / "mlartifacts" / run_id / "artifacts"
    assert [path.name for path in artifacts.iterdir()] == ["report.md"]
    assert folder not in store._followed


def test_an_outage_loses_no_metric_and_doubles_none_and_says_which_store(store, tmp_path, monkeypatch):
    write(tmp_path, begun(tmp_path, "outage"))
    run_id = store.follow(str(tmp_path))
    write(tmp_path, epoch(1), epoch(2))
    with monkeypatch.context() as outage:
        outage.setattr(store._client, "log_batch", MagicMock(side_effect=ConnectionError("down")))
        raises(TrackingError, "cannot be written: down", store.follow, str(tmp_path))
        outage.setattr(store._client, "set_terminated", MagicMock(side_effect=ConnectionError("gone\nx")))
        raises(TrackingError, r"^tracking.uri=sqlite.*: stopped answering: gone$", store.finish, run_id, "FINISHED", {})
    write(tmp_path, epoch(3))
    store.follow(str(tmp_path), now=False)
    assert history(store, run_id) == []  # kept: it is not asked again at once
    store.follow(str(tmp_path))
    assert history(store, run_id) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    store._followed.clear()
    store.follow(str(tmp_path))  # as another recorder does
    assert history(store, run_id) == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_epochs_of_an_earlier_record_in_a_journal_are_not_sent_again(store, tmp_path):
    write(tmp_path, begun(tmp_path, "first1"), epoch(1), epoch(2))
    write(tmp_path, begun(tmp_path, "second"), epoch(1))
    assert history(store, store.follow(str(tmp_path))) == [(1, 1.0)]


def test_a_locked_database_is_asked_again_while_its_run_lives(monkeypatch):
    monkeypatch.setattr(stores, "LOCKED_S", 0.0)
    locked = sqlite3.OperationalError(stores.LOCKED)
    call = MagicMock(side_effect=[*[locked] * 5, "done", locked])
    assert stores._retry(os.getpid(), call) == "done"
    raises(sqlite3.OperationalError, "locked", stores._retry, -1, call)


def test_a_killed_machine_leaves_no_run_running(store):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stale, live = (store.begin("a run", {}, {}) for _ in range(2))
    store._client.set_tag(stale, "machine.pid", str(gone.pid))
    for name, value in liveness.describe(os.getpid()).items():
        store._client.set_tag(live, name, value)
    stores.Store(store._uri, "first")
    assert (read(store, stale).info.status, read(store, live).info.status) == ("KILLED", "RUNNING")


def test_a_heartbeat_is_of_the_run_and_its_sweep(store, monkeypatch):
    parent = store.begin("parent", {}, {})
    child = store.begin("child", {}, {}, parent=parent)
    for run_id in (parent, child):
        store._client.set_tag(run_id, liveness.HEARTBEAT, "1")
    monkeypatch.setattr(store, "_followed", {"": SimpleNamespace(run_id=child)})
    monkeypatch.setattr(store, "follow", MagicMock())
    store._beat_at = 0.0
    store.look()
    assert all(int(read(store, run_id).data.tags[liveness.HEARTBEAT]) > 1 for run_id in (parent, child))


def test_a_journal_that_is_not_as_we_write_it_is_one_line(store, tmp_path):
    write(tmp_path, ("begin", {"key": "abc", "name": 1}), ("epoch", {"epoch": 1, "metrics": {"a": "x"}}))
    raises(TrackingError, r"^tracking\.uri=sqlite.*: cannot be written: ", store.sync, str(tmp_path))
    (tmp_path / "nothing").mkdir()
    assert store.sync(str(tmp_path / "nothing")) is None


def test_a_server_that_is_gone_at_the_end_is_no_traceback(store, tmp_path, monkeypatch):
    write(tmp_path, begun(tmp_path, "open"))
    run_id = store.follow(str(tmp_path))
    said = "API request failed: Max retries exceeded (Caused by ReadTimeoutError('timed out'))"
    with monkeypatch.context() as down:
        down.setattr(store._client, "search_runs", MagicMock(side_effect=ConnectionError(said)))
        raises(TrackingError, r": cannot be read: ReadTimeoutError\('timed out'\)$", store.finished, "any")
        store.close()
    assert read(store, run_id).info.status == "RUNNING"
    store.sync(str(tmp_path))
    assert read(store, run_id).info.status == "KILLED"


def test_deleted_experiment_says_how_to_restore_it(store):
    experiment_id = stores.Store(store._uri, "gone")._experiment_id
    store._client.delete_experiment(experiment_id)
    with pytest.raises(TrackingError, match=f"tracking.experiment='gone': deleted.*--experiment-id {experiment_id}"):
        stores.Store(store._uri, "gone")


def test_what_cannot_be_opened_is_told_at_once(tmp_path, monkeypatch):
    # its client's own attempts at it go on for minutes
    monkeypatch.setattr("mlflow.tracking.MlflowClient", lambda **uris: pytest.fail("MLflow was asked"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"not a database " * 100)
    for uri, said in (
        ("http://me:secret@127.0.0.1:9", r"=http://\*\*\*@127\.0\.0\.1:9: cannot be opened: .*refused"),
        (f"sqlite:///{tmp_path}/folder", "folder: cannot be opened: unable to open database"),
        (f"sqlite:///{tmp_path}/file", "file: cannot be opened: file is not a database"),
    ):
        raises(TrackingError, rf"^tracking\.uri.*{said}", stores.Store, uri, "first")


def test_a_store_is_made_whole_or_not_at_all(tmp_path, monkeypatch):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    with monkeypatch.context() as killed:
        made = SimpleNamespace(search_experiments=lambda **_: None)
        killed.setattr("mlflow.tracking.MlflowClient", lambda *_: made)
        killed.setattr(os, "replace", MagicMock(side_effect=OSError(28, "No space left on device")))
        raises(TrackingError, r"cannot be opened: .*No space left on device", stores.Store, uri, "first")
    assert not (tmp_path / "mlflow.db").exists()
    (tmp_path / "mlflow.db.0123abcd.new").write_bytes(b"half of it")
    (tmp_path / "mlflow.db").write_bytes(b"")
    stores.Store(uri, "first")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mlflow.db", "mlflow.db.lock"]


@pytest.mark.thorough
def test_processes_that_start_at_once_share_a_new_store(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    recorders = [Recorder(uri, "together") for _ in range(2)]
    call = {"params": {}, "tags": {}, "parent": {"name": "sweep", "params": {}, "tags": {}, "key": "k"}}
    answers = [recorder.ask("begin", name=f"run {i}", **call) for i, recorder in enumerate(recorders)]
    runs = [answer.result() for answer in answers]
    for recorder, run_id in zip(recorders, runs, strict=True):
        recorder.call("finish", run_id=run_id, status="FINISHED", tags={})
        recorder.close()
    store = stores.Store(uri, "together")
    assert {run.info.run_id for run in store._search("attributes.status = 'FINISHED'", 10)} == set(runs)
    assert len({read(store, run_id).data.tags["mlflow.parentRunId"] for run_id in runs}) == 1


def test_of_two_that_make_the_run_of_a_key_at_once_the_first_stays(store, monkeypatch):
    create, made = store._client.create_run, []

    def create_late(*given, **named):
        made.append(create(*given, **named))
        time.sleep(0.01)  # it is told by milliseconds
        return create(*given, **named)

    monkeypatch.setattr(store._client, "create_run", create_late)
    assert store.begin("twice", {}, {}, key="twice") == made[0].info.run_id
    assert len(store._search("tags.`record.key` = 'twice'", 10)) == 1


def test_an_experiment_has_our_view_and_an_older_one_gets_it(store):
    def tags():
        return store._client.get_experiment(store._experiment_id).tags

    assert tags()["mlflow.experimentKind"] == "custom_model_development"
    assert json.loads(tags()[view.TAG])["orderByKey"] == "metrics.`speedup/median`"
    store._client.set_experiment_tag(store._experiment_id, view.TAG, "of an older cnnexp")
    stores.Store(store._uri, "first")
    assert tags()[view.TAG] == view.state()
    assert len(view.state()) < 5000  # as long as a tag may be


def test_link_to_an_experiment(store):
    runs = f"http://127.0.0.1:5000/#/experiments/{store._experiment_id}/runs"
    assert store.link().startswith(f"{runs}?viewStateShareKey=")
    assert view.address("https://me:secret@host:8080/", "7").startswith("https://***@host:8080/#/experiments/7/runs?")
    assert view.address("sqlite:///x.db", "7", False, 6) == "http://127.0.0.1:6/#/experiments/7/runs?" + view.MODE
    assert view.address("sqlite:///x.db", None) == "http://127.0.0.1:5000/#/experiments?workflowType=machine_learning"
