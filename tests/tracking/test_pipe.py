import contextlib
import errno
import os
import signal
import sqlite3
import subprocess
import sys
import time
from unittest.mock import MagicMock

import numpy as np
import pytest
from commands import mlflow_warns, raises, wait_for
from results import CONFIG, DATASET, NETWORK, Backend, epoch_result, train
from tables import each
from tracking.test_store import history, read

from cnnexp.errors import Diverged, TrackingError
from cnnexp.tracking import pipe
from cnnexp.tracking import store as stores
from cnnexp.tracking.events import KEY, read_journal
from cnnexp.tracking.journal import Run
from cnnexp.tracking.metrics import default_name, flatten, predicted_classes
from cnnexp.tracking.pipe import NoAnswerYet, Recorder

pytestmark = mlflow_warns
PATH = "dataset.root=/a/very/long/path/to/photos"
CHANGED = ["model.filters=8", "model=one_conv", "tracking.uri=sqlite:///x", "trainer.seed=1", "~trainer.lr"]
LAYERS = "model.layers=[{type: Flatten}, {type: Linear, features: 10}]"
MANY = [PATH, "trainer.epochs=3", LAYERS, "hydra/launcher=joblib", "optimizer=adam", "+experiment=smoke"]


@pytest.fixture(scope="module")
def uri(tmp_path_factory, new_store):
    return new_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def store(uri):
    """A second pair of eyes on the store that the recorder writes."""
    return stores.Store(uri, "runs")


@pytest.fixture(scope="module")
def live(uri):
    recorder = Recorder(uri, "runs")
    recorder.call("link")  # it is ready
    yield recorder
    recorder.close()


Undrawn = type("Undrawn", (Run,), {"_draw": lambda run: None})  # its figures take longer than all else of a run


def record(folder, recorder, results, error=None, config=CONFIG, **options):
    """Record a run that ends with `error`; return it."""
    with Undrawn(folder, config, (), recorder, **options) as run:
        train(run, results)
        if error is not None:
            raise error
    return run


def interrupted(folder, recorder, *epochs):
    """Record a run that Ctrl-C ends; return its id."""
    with pytest.raises(KeyboardInterrupt):
        record(folder, recorder, map(epoch_result, epochs), KeyboardInterrupt())
    return read_journal(folder)["run_id"]


@contextlib.contextmanager
def stopped(recorder):
    """Have the process of a recorder stand still."""
    recorder._process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        recorder._process.send_signal(signal.SIGCONT)


def test_run_records_everything(live, store, tmp_path):
    config = CONFIG | {"more": {f"key{i}": i for i in range(250)}}  # than MLflow takes at once
    with Run(tmp_path, config, ["model.filters=4"], live) as run:
        train(run, [epoch_result(1, correct=4, speedup=2), epoch_result(2, epoch_s=0.25, speedup=3)])
        run.metrics.update({"time/compile_s": 1.5})
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / "2.npz").write_bytes(b"state")
        run.artifacts.append(tmp_path / "checkpoints")
        run.artifacts.append(tmp_path / "never made")

    recorded = read(store, run.id)
    assert (recorded.info.status, recorded.info.run_name) == ("FINISHED", "filters=4 numpy one_conv points")
    machine = {key for key in recorded.data.metrics if key.startswith("system/")}
    assert "system/cpu_utilization_percentage" in machine
    assert {key: value for key, value in recorded.data.metrics.items() if key not in machine} == pytest.approx(
        {
            **{"train/loss": 0.5, "train/accuracy": 0.5, "train/images": 8, "test/loss": 0.5, "test/accuracy": 0.5},
            **{"time/epoch_s": 0.25, "time/evaluate_s": 0.01, "time/compile_s": 1.5, "time/median_epoch_s": 0.375},
            **{"throughput/images_per_s": 32.0, "throughput/median_images_per_s": 21.3333, "train/learning_rate": 0.1},
            **{"speedup/vs_baseline": 3.0, "speedup/baseline_images": 4, "model/parameters": 15},
            **{"speedup/median": 2.5, "speedup/low": 2.0, "speedup/high": 3.0},
            **{"final/test_accuracy": 0.5, "best/test_accuracy": 1.0},
            **{"precision/a": 1, "precision/b": 0.5, "precision/c": 1, "recall/a": 1, "recall/b": 1, "recall/c": 0.5},
            **{"f1/a": 1, "f1/b": 2 / 3, "f1/c": 2 / 3, "test/f1": 7 / 9},
        }
    )
    assert [m.step for m in store._client.get_metric_history(run.id, "time/epoch_s")] == [1, 2]
    tags = recorded.data.tags
    wanted = {"backend": "numpy", "model": "one_conv", "dataset": "points", "optimizer": "sgd", "device": "a CPU"}
    wanted |= {"threads": "2", "seed": "3", "kind": "run", "timing.contended": "false"}
    assert {key: tags[key] for key in wanted} == wanted
    assert len(tags["config_hash"]) == 16
    assert {"machine.cpu", "machine.cores", "version.numpy"} <= tags.keys()
    assert recorded.data.params == flatten(config)
    assert recorded.inputs.dataset_inputs[0].dataset.digest == DATASET.sha256[:36]
    curves = f"![learning curves](get-artifact?path=figures/curves.png&run_uuid={run.id})\n\n"
    assert tags["mlflow.note.content"] == curves + (tmp_path / "report.md").read_text()
    assert f"| run | {run.id} |" in tags["mlflow.note.content"]
    artifacts = {a.path for a in store._client.list_artifacts(run.id)}
    figures = {a.path for a in store._client.list_artifacts(run.id, "figures")}
    assert artifacts == {"config.json", "figures", "predictions.npz", "checkpoints", "report.md"}
    assert figures == {f"figures/{name}.png" for name in ("learning", "curves", "epoch_time", "confusion", "recall")}
    with np.load(tmp_path / "predictions.npz", allow_pickle=False) as arrays:
        assert arrays["predicted"].tolist() == [0, 1, 2, 1]


@each(
    (KeyboardInterrupt(), "KILLED", {"error": "KeyboardInterrupt"}),
    (SystemExit(143), "KILLED", {"error": "exit code 143"}),
    (ValueError("no\ngood"), "FAILED", {"error": "no"}),
    (Diverged("the loss became nan"), "FAILED", {"error": "the loss became nan", "diverged": "true"}),
)
def test_an_exception_ends_the_run_and_goes_on(live, store, tmp_path, error, status, tags):
    with pytest.raises(type(error)):
        record(tmp_path, live, [epoch_result(1)], error)
    recorded = read(store, read_journal(tmp_path)["run_id"])
    assert recorded.info.status == status
    assert {key: recorded.data.tags.get(key) for key in tags} == tags
    assert ("diverged" in recorded.data.tags) == ("diverged" in tags)
    assert recorded.data.metrics["final/test_accuracy"] == 0.5
    assert read_journal(tmp_path)["status"] == status


def test_contended_run_claims_no_speedup(live, store, tmp_path):
    run = record(tmp_path, live, [epoch_result(1, speedup=5.0)], contended=True)
    recorded = read(store, run.id)
    assert recorded.data.tags["timing.contended"] == "true"
    assert not [name for name in recorded.data.metrics if name.startswith("speedup/")]


def test_finished_config_is_skipped_unless_the_store_is_silent(live, tmp_path, monkeypatch):
    config = {**CONFIG, "trainer": {"seed": 77}}
    raises(ValueError, "failed", record, tmp_path / "0", live, [epoch_result(1)], ValueError("failed"), config)
    with Undrawn(tmp_path / "1", config, (), live) as first:
        assert not first.skip_if_finished()
        train(first, [epoch_result(1)])
    elsewhere = {**config, "tracking": {"name": "mlflow", "run_name": "another"}}
    with Run(tmp_path / "2", elsewhere, (), live) as second:
        assert second.skip_if_finished()
    journal = read_journal(tmp_path / "2")
    assert (journal["status"], journal["metrics"]["final/test_accuracy"]) == ("SKIPPED", 0.5)

    monkeypatch.setattr(live, "call", MagicMock(side_effect=NoAnswerYet("nothing yet")))
    with Run(tmp_path / "3", config, (), live) as third:
        assert not third.skip_if_finished()
    assert read_journal(tmp_path / "3")["status"] == "FINISHED"


def test_without_a_recorder_the_journal_tells_all_and_best_goes_by_the_validation_split(tmp_path):
    run = Run(tmp_path, CONFIG, ["model.filters=4"])
    assert not run.skip_if_finished()
    train(run, [epoch_result(1, correct=1, validation=4), epoch_result(2, correct=3, validation=2)])
    assert read_journal(tmp_path)["status"] == "DIED"  # as long as it has not ended
    run.__exit__(None, None, None)
    journal = read_journal(tmp_path)
    assert (journal["status"], journal["error"], journal["overrides"]) == ("FINISHED", None, ["model.filters=4"])
    assert [(epoch["epoch"], epoch["train/loss"]) for epoch in journal["epochs"]] == [(1, 1.0), (2, 0.5)]
    assert journal["metrics"]["time/median_epoch_s"] == 0.5
    assert (run.metrics["best/test_accuracy"], run.metrics["final/test_accuracy"]) == (0.25, 0.75)


def test_another_recorder_takes_over_from_a_dead_one(live, store, tmp_path):
    with Run(tmp_path, CONFIG, (), live) as run:
        run.begin(DATASET, NETWORK, Backend())
        run.finished(epoch_result(1))
        live._process.kill()
        live._process.wait()
        for epoch in (2, 3, 4):
            run.finished(epoch_result(epoch))
    recorded = read(store, run.id)
    assert recorded.info.status == "FINISHED"
    assert history(store, run.id) == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]
    assert recorded.data.metrics["final/test_accuracy"] == 0.5
    assert {a.path for a in store._client.list_artifacts(run.id)} >= {"config.json", "figures", "predictions.npz"}
    assert len(store._search(f"tags.`{KEY}` = '{recorded.data.tags[KEY]}'", 10)) == 1
    journal = read_journal(tmp_path)
    assert (journal["status"], journal["stored"], journal["run_id"]) == ("FINISHED", True, run.id)
    assert f"predict {tmp_path} IMAGE" in (tmp_path / "report.md").read_text(), "ids are looked for below outputs/"


def test_a_recorder_that_cannot_be_started_is_told_in_a_line(uri, monkeypatch):
    refused = BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    monkeypatch.setattr(pipe, "_start_process", MagicMock(side_effect=refused))
    pipe.start_early()
    raises(TrackingError, "cannot be started: resource temporarily unavailable; tracking=no", Recorder, uri, "runs")


def test_a_recorder_that_computes_is_waited_for_longer(uri, monkeypatch):
    silent, looks = Recorder(uri, "runs"), []
    monkeypatch.setattr(pipe, "ANSWER_S", 0.05)
    monkeypatch.setattr(pipe, "LOOK_S", 0.01)
    monkeypatch.setattr(pipe, "_computed_s", lambda pid: looks.append(pid) or min(len(looks), 30))
    with stopped(silent):
        raises(TrackingError, r"no answer in 0\.05 s", silent.call, "link")
    assert len(looks) == 35
    silent.close()


def test_a_recorder_that_hangs_at_its_end_is_killed(uri, monkeypatch):
    hung = Recorder(uri, "runs")
    monkeypatch.setattr(pipe, "ANSWER_S", 0.1)
    monkeypatch.setattr(pipe, "LOOK_S", 0.1)
    with stopped(hung), pytest.raises(TrackingError, match="hung at its end and was killed"):
        hung.close()
    assert hung._process.wait(10) == -signal.SIGKILL


def test_a_run_never_waits_for_a_store_that_stands_still_and_it_has_all_then(live, store, tmp_path, monkeypatch):
    monkeypatch.setattr(pipe, "FLUSH_S", 60.0)
    with Undrawn(tmp_path, CONFIG, (), live) as run:
        with stopped(live):
            train(run, [epoch_result(1)])
            assert run.id is None
        run_id = live._look.result(100)
        monkeypatch.setattr(live, "_slow", False)
        run.finished(epoch_result(2))
        assert run.id == run_id == read_journal(tmp_path)["run_id"]
        live.call("follow", folder=str(tmp_path))
        assert history(store, run_id) == [(1, 1.0), (2, 0.5)]
        monkeypatch.setattr(pipe, "FLUSH_S", 0.05)
        with stopped(live):
            for epoch in range(3, 31):
                run.finished(epoch_result(epoch))
            assert live._slow
            assert len(live._waiting) == 1, "so the pipe is never full"
    assert read(store, run_id).info.status == "FINISHED"
    assert [step for step, _ in history(store, run_id)] == list(range(1, 31))


def test_an_epoch_is_recorded_before_the_next_is_timed_or_found_by_the_recorder(live, store, tmp_path, monkeypatch):
    monkeypatch.setattr(pipe, "FLUSH_S", 60.0)
    monkeypatch.setattr(live, "_slow", False)
    with Undrawn(tmp_path, CONFIG, (), live) as run:
        train(run, [])
        run_id = live._look.result(100)
        run.finished(epoch_result(1))
        assert not live._slow
        assert len(history(store, run_id)) == 1
        monkeypatch.setattr(live, "follow", lambda folder: live._look)  # it is not asked for the next
        run.finished(epoch_result(2))
        wait_for(lambda: history(store, run_id) == [(1, 1.0), (2, 0.5)])


@pytest.mark.parametrize("held_s", [0.0, pytest.param(25.0, marks=pytest.mark.thorough)])  # MLflow's client waits 20 s
def test_a_store_that_is_locked_at_the_start_has_all_later(new_store, tmp_path, held_s):
    uri = new_store(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        recorder = Recorder(uri, "runs")
        run = Undrawn(tmp_path / "run", CONFIG, (), recorder)
        train(run, map(epoch_result, (1, 2, 3)))
        time.sleep(held_s)
        assert run.id is None
        assert [epoch["epoch"] for epoch in read_journal(tmp_path / "run")["epochs"]] == [1, 2, 3]
    run.__exit__(None, None, None)
    recorder.close()
    store = stores.Store(uri, "runs")
    assert (read(store, run.id).info.status, history(store, run.id)) == ("FINISHED", [(1, 1.0), (2, 0.5), (3, 1 / 3)])
    assert read_journal(tmp_path / "run")["stored"]


@pytest.mark.parametrize("where", ["the same folder", "another folder"])
def test_a_run_goes_on_in_its_record_with_every_epoch_once(live, store, tmp_path, where):
    first = interrupted(tmp_path / "a", live, 1, 2, 3)
    assert read(store, first).info.status == "KILLED"
    folder = tmp_path / ("a" if where == "the same folder" else "b")
    with Undrawn(folder, CONFIG, (), live, earlier=tmp_path / "a") as second:
        second.begin(DATASET, NETWORK, Backend())
        second.resume([epoch_result(1), epoch_result(2)])  # no checkpoint was written after the third
        live._look.result(100)
        assert read(store, first).info.status == "RUNNING"
        second.finished(epoch_result(3, epoch_s=9.0))
        second.finished(epoch_result(4))
    assert second.id == first
    assert [result.epoch_s for result in second.epochs] == [0.5] * 4, "as first recorded: checkpoints count on it"
    recorded = read(store, first)
    assert recorded.info.status == "FINISHED"
    assert "error" not in recorded.data.tags
    assert history(store, first) == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]
    assert history(store, first, "time/epoch_s") == [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.5)]
    journal = read_journal(folder)
    assert [epoch["epoch"] for epoch in journal["epochs"]] == [1, 2, 3, 4]
    assert journal["stored"]
    if folder != tmp_path / "a":
        assert store.sync(str(tmp_path / "a")) is None  # what is there is an earlier part
        assert read(store, first).info.status == "FINISHED"


def test_a_run_that_was_gone_on_with_and_killed_at_once_has_every_epoch_once(live, store, tmp_path):
    first, second, third = (tmp_path / name for name in "abc")
    interrupted(first, live, 1, 2)
    killed = Run(second, CONFIG, (), live, earlier=first)
    killed.begin(DATASET, NETWORK, Backend())
    live._look.result(100)
    killed._locks.close()
    killed._journal.close()
    # which holds no checkpoint: all is trained again
    last = record(third, live, [epoch_result(epoch, epoch_s=9.0) for epoch in (1, 2, 3)], earlier=second)
    assert history(store, last.id) == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert history(store, last.id, "time/epoch_s") == [(1, 0.5), (2, 0.5), (3, 9.0)]
    assert [epoch["epoch"] for epoch in read_journal(third)["epochs"]] == [1, 2, 3]


def test_a_run_of_another_config_gets_a_record_of_its_own(live, store, tmp_path):
    first = interrupted(tmp_path, live, 1)
    config = {**CONFIG, "optimizer": {"name": "adam", "lr": 0.2}}
    with Undrawn(tmp_path, config, (), live, earlier=tmp_path) as second:
        second.begin(DATASET, NETWORK, Backend())
        second.resume([epoch_result(1)])
        second.finished(epoch_result(2))
    assert second.id != first
    assert history(store, second.id) == [(1, 1.0), (2, 0.5)]
    assert read(store, first).info.status == "KILLED"


def test_a_store_that_cannot_be_made_stops_no_training_that_began_and_hides_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    hopeless = Recorder(f"sqlite:///{tmp_path}/file/mlflow.db", "runs")
    raises(TrackingError, r"tracking\.uri=.*cannot be opened", record, tmp_path / "1", hopeless, [epoch_result(1)])
    assert read_journal(tmp_path / "1")["epochs"] == []

    monkeypatch.setattr(hopeless, "check", lambda: None)
    monkeypatch.setattr(Undrawn, "wait", lambda run: None)  # what is known before training begins ends the run there
    with pytest.raises(TrackingError, match=f"cannot be opened: .*; all 2 epochs are in {tmp_path}/2/journal.jsonl"):
        record(tmp_path / "2", hopeless, map(epoch_result, (1, 2)))
    assert (read_journal(tmp_path / "2")["status"], read_journal(tmp_path / "2")["stored"]) == ("FINISHED", False)
    raises(ValueError, "mine", record, tmp_path / "3", hopeless, [], ValueError("mine"))
    assert read_journal(tmp_path / "3")["error"] == "mine"
    hopeless.close()


KILLED = """
import os, signal, sys
from pathlib import Path
from results import CONFIG, DATASET, NETWORK, Backend, epoch_result
from cnnexp.tracking.journal import Run
from cnnexp.tracking.pipe import Recorder
recorder = Recorder(sys.argv[2], "runs")
run = Run(Path(sys.argv[1]), CONFIG, (), recorder)
run.begin(DATASET, NETWORK, Backend())
run.finished(epoch_result(1))
print(recorder.call("follow", folder=sys.argv[1]), "mlflow" in sys.modules, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_no_run_running_and_never_imported_mlflow(uri, store, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KILLED, str(tmp_path), uri]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    run_id, imported = done.stdout.split()
    assert imported == "False"
    wait_for(lambda: read(store, run_id).info.status != "RUNNING")
    recorded = read(store, run_id)
    assert (recorded.info.status, recorded.data.tags["error"]) == ("KILLED", "the training process died")
    assert recorded.data.metrics["test/accuracy"] == 0.5


def test_an_interrupted_wait_does_not_mix_up_answers(live):
    forgotten = live.ask("finished", config_hash="none")
    assert live.call("load") is None
    assert isinstance(live.call("begin", name="x", params={}, tags={}), str)
    del forgotten


def test_recorders_that_die_at_once_lose_no_epoch_and_it_is_said_how_to_send_them(live, store, tmp_path, monkeypatch):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}

    def start_dead():
        dead = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True, **pipes)
        dead.wait()
        return dead

    begun = []

    def results():
        yield epoch_result(1)
        begun.append(live._look.result(100))
        live._process.kill()
        live._process.wait()
        yield from map(epoch_result, range(2, 9))

    monkeypatch.setattr(pipe, "_start_process", start_dead)
    monkeypatch.setattr(live, "_deaths", 0)
    said = f"recorder process has died; all 8 epochs are in {tmp_path}.* sync {tmp_path}"
    raises(TrackingError, said, record, tmp_path, live, results())
    assert len(read_journal(tmp_path)["epochs"]) == 8
    (run_id,) = begun
    assert read(store, run_id).info.status == "RUNNING"
    assert store.sync(str(tmp_path)) == run_id
    assert read(store, run_id).info.status == "FINISHED"  # as the journal says
    assert [step for step, _ in history(store, run_id)] == list(range(1, 9))
    assert read_journal(tmp_path)["stored"]


def test_flatten_gives_dotted_keys_and_one_output_has_two_classes():
    config = {"model": {"name": "own", "layers": [{"type": "ReLU"}]}, "trainer": {"patience": None, "lr": 0.1}}
    flat = {"model.name": "own", "model.layers": '[{"type": "ReLU"}]', "trainer.patience": "null", "trainer.lr": "0.1"}
    assert flatten(config) == flat
    assert predicted_classes(np.array([[0.2], [0.5]], np.float32)).tolist() == [0, 1]


@each(
    (CHANGED, [], "one_conv filters=8 seed=1 numpy points"),
    (CHANGED, ["trainer.seed", "model", "optimizer"], "seed=1 one_conv filters=8 numpy points"),
    (MANY, [], "adam smoke epochs=3 numpy one_conv points root=.../photos layers=[{type: Flat...atures: 10}]"),
    ([PATH], ["dataset.root"], "root=.../photos numpy one_conv points"),
)
def test_name_tells_the_pieces_and_what_was_changed_and_ends_with_what_is_long(overrides, varied, name):
    assert default_name(CONFIG, overrides, varied) == name
