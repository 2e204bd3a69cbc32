import json

import pytest
from commands import mlflow_warns, raises
from results import CONFIG, epoch_result, train

from cnnexp.app import sync
from cnnexp.errors import ConfigError, TrackingError
from cnnexp.tracking import store as stores
from cnnexp.tracking.events import JOURNAL, read_journal
from cnnexp.tracking.journal import Run

pytestmark = mlflow_warns


def leave_behind(folder, uri, epochs=2, ended=True):
    """A run that no store was told of, in its folder alone."""
    run = Run(folder, {**CONFIG, "tracking": {"name": "mlflow", "uri": uri, "experiment": "sent"}})
    train(run, map(epoch_result, range(1, epochs + 1)))
    if ended:
        run.__exit__(None, None, None)
    else:
        run._journal.close()
        run._locks.close()


def test_what_journals_hold_is_sent_once(tmp_path, capsys, monkeypatch, new_store):
    monkeypatch.setenv("STORE", new_store(tmp_path))
    leave_behind(tmp_path / "runs" / "ended", "${oc.env:STORE}")
    leave_behind(tmp_path / "runs" / "killed", "${oc.env:STORE}", epochs=1, ended=False)
    sync.command([str(tmp_path / "runs")])
    out = capsys.readouterr().out
    assert "(2 epochs, FINISHED) of " in out
    assert "(1 epochs, DIED) of " in out
    assert out.endswith("2 runs sent\n")
    store = stores.Store(f"sqlite:///{tmp_path}/mlflow.db", "sent")
    found = {run.info.status: run for run in store._search("", 10)}
    assert found.keys() == {"FINISHED", "KILLED"}
    assert found["FINISHED"].data.metrics["final/test_accuracy"] == 0.5
    assert found["FINISHED"].data.params["model.filters"] == "4"
    history = store._client.get_metric_history(found["FINISHED"].info.run_id, "train/loss")
    assert [(m.step, m.value) for m in history] == [(1, 1.0), (2, 0.5)]
    journal = read_journal(tmp_path / "runs" / "ended")
    assert [m.timestamp for m in history] == [journal["times_ms"][epoch] for epoch in (1, 2)]
    assert found["KILLED"].data.tags["error"] == "the training process died"

    sync.command([str(tmp_path / "runs")])
    assert capsys.readouterr().out == "nothing to send: the stores have all that the journals hold\n"
    assert len(store._search("", 10)) == 2


def test_a_run_that_runs_now_and_a_damaged_journal_are_left_alone(tmp_path, capsys):
    run = Run(tmp_path / "run", {**CONFIG, "tracking": {"name": "mlflow", "uri": None}})
    train(run, [epoch_result(1)])
    (tmp_path / "damaged").mkdir()
    content = b"\xff\x00" + json.dumps({"event": "begin"}).encode() + b"\n[1]\n"
    (tmp_path / "damaged" / JOURNAL).write_bytes(content)
    sync.command([str(tmp_path), f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"])
    assert capsys.readouterr().out.startswith("nothing to send")
    run.__exit__(None, None, None)


def test_what_cannot_be_sent_is_said(tmp_path):
    raises(ConfigError, r"^sync nowhere: no such folder; give the folders of runs", sync.command, ["nowhere"])
    leave_behind(tmp_path / "run", "${oc.env:NEVER_SET_HERE}")
    raises(ConfigError, r"NEVER_SET_HERE.*; set it, or give tracking\.uri=STORE", sync.command, [str(tmp_path)])
    (tmp_path / "file").write_text("")
    with pytest.raises(TrackingError, match="cannot be opened"):
        sync.command([str(tmp_path / "run"), f"tracking.uri=sqlite:///{tmp_path}/file/mlflow.db"])
    assert not read_journal(tmp_path / "run")["stored"]
