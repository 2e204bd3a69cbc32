import contextlib
import errno
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time

import numpy as np
import pytest
from results import CONFIG, DATASET, NETWORK, Backend, epoch_result

from cnnexp.errors import Diverged, TrackingError
from cnnexp.tracking import pipe
from cnnexp.tracking import store as stores
from cnnexp.tracking.events import KEY, read_journal
from cnnexp.tracking.journal import Run
from cnnexp.tracking.metrics import default_name, flatten, predicted_classes
from cnnexp.tracking.pipe import NoAnswerYet, Recorder

# MLflow and what it imports warn of each other; the recorder's process silences them
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def uri(tmp_path_factory, new_store):
    return new_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def store(uri):
    """A second pair of eyes on the store that the recorder writes."""
    return stores.Store(uri, "runs")


@pytest.fixture(scope="module")
def live(uri, store):
    recorder = Recorder(uri, "runs")
    recorder.call("link")  # it is ready
    yield recorder
    recorder.close()


def run_epochs(run, results):
    run.begin(DATASET, NETWORK, Backend())
    run.wait()
    for result in results:
        run.finished(result)


def record(folder, recorder, results, error=None):
    """Record a run that ends with `error`."""
    with Run(folder, CONFIG, (), recorder) as run:
        run_epochs(run, results)
        if error is not None:
            raise error


def read(store, run_id):
    return store._client.get_run(run_id)


def latest(store):
    return store._client.search_runs([store._experiment_id], max_results=1)[0]


def test_run_records_everything(live, store, tmp_path):
    with Run(tmp_path, CONFIG, ["model.filters=4"], live) as run:
        run_epochs(
            run, [epoch_result(1, correct=4, epoch_s=0.5, speedup=2.0), epoch_result(2, epoch_s=0.25, speedup=3)]
        )
        run.summarize({"time/compile_s": 1.5})
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / "2.npz").write_bytes(b"state")
        run.add_artifact(tmp_path / "checkpoints", "checkpoints")
        run.add_artifact(tmp_path / "never made")

    recorded = read(store, run.id)
    assert recorded.info.status == "FINISHED"
    assert recorded.info.run_name == "filters=4 numpy one_conv points"
    machine = {key for key in recorded.data.metrics if key.startswith("system/")}
    assert "system/cpu_utilization_percentage" in machine
    assert {key: value for key, value in recorded.data.metrics.items() if key not in machine} == pytest.approx(
        {
            "train/loss": 0.5,
            "train/accuracy": 0.5,
            "train/images": 8,
            "test/loss": 0.5,
            "test/accuracy": 0.5,
            "time/epoch_s": 0.25,
            "time/evaluate_s": 0.01,
            "throughput/images_per_s": 32.0,
            "speedup/vs_baseline": 3.0,
            "speedup/baseline_images": 4,
            "train/learning_rate": 0.1,
            "time/compile_s": 1.5,
            "time/median_epoch_s": 0.375,
            "final/test_accuracy": 0.5,
            "best/test_accuracy": 1.0,
            "throughput/median_images_per_s": 24.0,
            "speedup/median": 2.5,
            "speedup/low": 2.0,
            "speedup/high": 3.0,
            "model/parameters": 15,
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
    assert recorded.data.params["model.filters"] == "4"
    assert recorded.data.params["dataset.root"] == "${oc.env:SECRET}"
    assert tags["mlflow.note.content"] == (tmp_path / "report.md").read_text()
    assert f"| run | {run.id} |" in tags["mlflow.note.content"]
    artifacts = {a.path for a in store._client.list_artifacts(run.id)}
    figures = {a.path for a in store._client.list_artifacts(run.id, "figures")}
    assert artifacts == {"config.json", "figures", "predictions.npz", "checkpoints", "report.md"}
    assert figures == {f"figures/{name}.png" for name in ("learning", "epoch_time", "confusion", "recall")}
    with np.load(tmp_path / "predictions.npz", allow_pickle=False) as arrays:
        assert arrays["predicted"].tolist() == [0, 1, 2, 1]


@pytest.mark.parametrize(
    ("error", "status", "tags"),
    [
        (KeyboardInterrupt(), "KILLED", {"error": "KeyboardInterrupt"}),
        (SystemExit(143), "KILLED", {"error": "143"}),
        (ValueError("no\ngood"), "FAILED", {"error": "no"}),
        (Diverged("the loss became nan"), "FAILED", {"error": "the loss became nan", "diverged": "true"}),
    ],
)
def test_an_exception_ends_the_run_and_goes_on(live, store, tmp_path, error, status, tags):
    with pytest.raises(type(error)):
        record(tmp_path, live, [epoch_result(1)], error)
    recorded = latest(store)
    assert recorded.info.status == status
    assert {key: recorded.data.tags.get(key) for key in tags} == tags
    assert ("diverged" in recorded.data.tags) == ("diverged" in tags)
    assert recorded.data.metrics["final/test_accuracy"] == 0.5
    assert read_journal(tmp_path)["status"] == status


def test_contended_run_claims_no_speedup(live, store, tmp_path):
    with Run(tmp_path, CONFIG, (), live, contended=True) as run:
        run_epochs(run, [epoch_result(1, speedup=5.0)])
    recorded = read(store, run.id)
    assert recorded.data.tags["timing.contended"] == "true"
    assert not [name for name in recorded.data.metrics if name.startswith("speedup/")]


def test_finished_config_is_skipped(live, tmp_path):
    config = {**CONFIG, "trainer": {"seed": 77}}
    with Run(tmp_path / "1", config, (), live) as first:
        assert not first.skip_if_finished()
        run_epochs(first, [epoch_result(1)])
    elsewhere = {**config, "tracking": {"name": "mlflow", "run_name": "another"}}
    with Run(tmp_path / "2", elsewhere, (), live) as second:
        assert second.skip_if_finished()
    journal = read_journal(tmp_path / "2")
    assert journal["status"] == "SKIPPED"
    assert journal["metrics"]["final/test_accuracy"] == 0.5


def test_a_config_that_a_silent_store_may_have_is_trained(live, tmp_path, monkeypatch):
    def call(method, **arguments):
        raise NoAnswerYet("nothing yet")

    monkeypatch.setattr(live, "call", call)
    with Run(tmp_path, CONFIG, (), live) as run:
        assert not run.skip_if_finished()
    assert read_journal(tmp_path)["status"] == "FINISHED"


def test_without_a_recorder_the_journal_tells_all(tmp_path):
    with Run(tmp_path, CONFIG, ["model.filters=4"]) as run:
        assert not run.skip_if_finished()
        run_epochs(run, [epoch_result(1), epoch_result(2)])
    journal = read_journal(tmp_path)
    assert (journal["status"], journal["error"], journal["overrides"]) == ("FINISHED", None, ["model.filters=4"])
    assert [epoch["epoch"] for epoch in journal["epochs"]] == [1, 2]
    assert journal["epochs"][1]["train/loss"] == 0.5
    assert journal["metrics"]["time/median_epoch_s"] == 0.5


def test_journal_of_a_run_that_never_ended(tmp_path):
    run = Run(tmp_path, CONFIG)
    run_epochs(run, [epoch_result(1)])
    journal = read_journal(tmp_path)
    assert (journal["status"], len(journal["epochs"])) == ("DIED", 1)
    run.__exit__(None, None, None)


def test_best_goes_by_the_validation_split(tmp_path):
    with Run(tmp_path, CONFIG) as run:
        run_epochs(run, [epoch_result(1, correct=1, validation=4), epoch_result(2, correct=3, validation=2)])
    assert run.metrics["best/test_accuracy"] == 0.25
    assert run.metrics["final/test_accuracy"] == 0.75


def kill(recorder):
    recorder._process.kill()
    recorder._process.wait()


def history(store, run_id, key="train/loss"):
    return [(m.step, m.value) for m in store._client.get_metric_history(run_id, key)]


@pytest.mark.parametrize(
    "when",
    ["between epochs", *(pytest.param(w, marks=pytest.mark.thorough) for w in ("before it begins", "at the end"))],
)
def test_another_recorder_takes_over_from_a_dead_one(uri, store, tmp_path, monkeypatch, when):
    doomed = Recorder(uri, "runs")
    draw = Run._draw

    def die_once(self):
        monkeypatch.setattr(Run, "_draw", draw)
        kill(doomed)
        return draw(self)

    if when == "at the end":
        monkeypatch.setattr(Run, "_draw", die_once)
    with Run(tmp_path, CONFIG, (), doomed) as run:
        if when == "before it begins":
            kill(doomed)
        run.begin(DATASET, NETWORK, Backend())
        run.finished(epoch_result(1))
        if when == "between epochs":
            kill(doomed)
        for epoch in (2, 3, 4):
            run.finished(epoch_result(epoch))
    doomed.close()
    recorded = read(store, run.id)
    assert recorded.info.status == "FINISHED"
    assert history(store, run.id) == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]
    assert recorded.data.metrics["final/test_accuracy"] == 0.5
    assert {a.path for a in store._client.list_artifacts(run.id)} >= {"config.json", "figures", "predictions.npz"}
    assert len(store._search(f"tags.`{KEY}` = '{recorded.data.tags[KEY]}'", 10)) == 1
    journal = read_journal(tmp_path)
    assert (journal["status"], journal["stored"], journal["run_id"]) == ("FINISHED", True, run.id)


def test_recorders_that_die_at_once_lose_no_epoch_and_it_is_said_how_to_send_them(uri, store, tmp_path, monkeypatch):
    doomed = Recorder(uri, "runs")

    def start_dead():
        dead = subprocess.Popen(
            [sys.executable, "-c", ""], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        dead.wait()
        return dead

    monkeypatch.setattr(pipe, "_start_process", start_dead)

    def results():
        yield epoch_result(1)
        doomed._look.result(100)
        kill(doomed)
        yield from map(epoch_result, range(2, 9))

    with pytest.raises(
        TrackingError, match=f"recorder process has died; all 8 epochs are in {tmp_path}.* sync {tmp_path}"
    ):
        record(tmp_path, doomed, results())
    assert len(read_journal(tmp_path)["epochs"]) == 8
    doomed.close()
    stale = latest(store)
    assert stale.info.status == "RUNNING"
    assert store.sync(str(tmp_path)) == stale.info.run_id
    assert read(store, stale.info.run_id).info.status == "FINISHED"  # as the journal says
    assert [step for step, _ in history(store, stale.info.run_id)] == list(range(1, 9))
    assert read_journal(tmp_path)["stored"]


def test_a_recorder_that_cannot_be_started_is_told_in_a_line(uri, monkeypatch):
    def refused(database=False):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(pipe, "_start_process", refused)
    pipe.start_early()
    with pytest.raises(TrackingError, match="process cannot be started: Resource temporarily unavailable; tracking=no"):
        Recorder(uri, "runs")


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="a process is stopped by a POSIX signal")
def test_a_recorder_that_computes_is_waited_for_longer(uri, monkeypatch):
    stopped, looks = Recorder(uri, "runs"), []
    stopped._process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(pipe, "ANSWER_S", 0.05)
    monkeypatch.setattr(pipe, "LOOK_S", 0.01)
    monkeypatch.setattr(pipe, "_computed_s", lambda pid: looks.append(pid) or min(len(looks), 30))
    with pytest.raises(TrackingError, match=r"no answer in 0\.05 s"):
        stopped.call("link")
    assert len(looks) == 35
    stopped.close()


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="a process is stopped by a POSIX signal")
def test_a_recorder_that_hangs_at_its_end_is_killed(tmp_path, monkeypatch):
    hung = Recorder(f"sqlite:///{tmp_path}/mlflow.db", "runs")
    hung._process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(pipe, "ANSWER_S", 0.1)
    with pytest.raises(TrackingError, match="hung at its end and was killed"):
        hung.close()
    assert hung._process.wait(10) == -signal.SIGKILL


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="a process is stopped by a POSIX signal")
def test_a_run_never_waits_for_a_store_that_stands_still(uri, store, tmp_path):
    slow = Recorder(uri, "runs")
    with Run(tmp_path, CONFIG, (), slow) as run:
        run.begin(DATASET, NETWORK, Backend())
        slow._look.result(100)
        slow._process.send_signal(signal.SIGSTOP)
        for epoch in range(1, 301):  # more than a pipe holds
            run.finished(epoch_result(epoch))
        slow._process.send_signal(signal.SIGCONT)
    slow.close()
    assert [m.step for m in store._client.get_metric_history(run.id, "test/loss")] == list(range(1, 301))


@contextlib.contextmanager
def locked(database):
    """Have an sqlite file locked, for readers and writers of other processes."""
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        yield


@pytest.mark.parametrize(
    "held_s", [0.0, pytest.param(25.0, marks=pytest.mark.thorough)]
)  # MLflow's client waits for 20 s
def test_a_store_that_is_locked_at_the_start_has_all_later(new_store, tmp_path, held_s):
    uri = new_store(tmp_path)
    with locked(tmp_path / "mlflow.db"):
        recorder = Recorder(uri, "runs")
        run = Run(tmp_path / "run", CONFIG, (), recorder)
        run_epochs(run, map(epoch_result, (1, 2, 3)))
        time.sleep(held_s)
        assert run.id is None
        assert [epoch["epoch"] for epoch in read_journal(tmp_path / "run")["epochs"]] == [1, 2, 3]
    run.__exit__(None, None, None)
    recorder.close()
    store = stores.Store(uri, "runs")
    assert read(store, run.id).info.status == "FINISHED"
    assert history(store, run.id) == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert read_journal(tmp_path / "run")["stored"]


def test_a_store_that_answers_in_mid_run_has_all_then(uri, store, tmp_path):
    slow = Recorder(uri, "runs")
    slow._process.send_signal(signal.SIGSTOP)
    with Run(tmp_path, CONFIG, (), slow) as run:
        run_epochs(run, [epoch_result(1)])
        assert run.id is None
        slow._process.send_signal(signal.SIGCONT)
        run_id = slow._look.result(100)
        run.finished(epoch_result(2))
        assert run.id == run_id
        assert read_journal(tmp_path)["run_id"] == run_id
        slow.call("follow", folder=str(tmp_path))
        assert history(store, run_id) == [(1, 1.0), (2, 0.5)]
    slow.close()
    assert read(store, run.id).info.status == "FINISHED"


def test_a_recorder_finds_by_itself_what_it_is_not_asked_for(live, store, tmp_path, monkeypatch):
    with Run(tmp_path, CONFIG, (), live) as run:
        run_epochs(run, [])
        run_id = live._look.result(100)
        monkeypatch.setattr(live, "follow", lambda folder: live._look)
        run.finished(epoch_result(1))
        deadline = time.monotonic() + 100
        while not history(store, run_id) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert history(store, run_id) == [(1, 1.0)]


@pytest.mark.parametrize("where", ["the same folder", "another folder"])
def test_a_run_goes_on_in_its_record_with_every_epoch_once(live, store, tmp_path, where):
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path / "a", live, map(epoch_result, (1, 2, 3)), KeyboardInterrupt())
    first = read_journal(tmp_path / "a")["run_id"]
    assert read(store, first).info.status == "KILLED"
    folder = tmp_path / ("a" if where == "the same folder" else "b")
    with Run(folder, CONFIG, (), live, earlier=tmp_path / "a") as second:
        second.begin(DATASET, NETWORK, Backend())
        second.resume([epoch_result(1), epoch_result(2)])  # no checkpoint was written after the third
        live._look.result(100)
        assert read(store, first).info.status == "RUNNING"
        second.finished(epoch_result(3, epoch_s=9.0))
        second.finished(epoch_result(4))
    assert second.id == first
    assert [result.epoch_s for result in second.epochs] == [0.5] * 4, (
        "as it was first recorded: checkpoints count on it"
    )
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
    with pytest.raises(KeyboardInterrupt):
        record(first, live, map(epoch_result, (1, 2)), KeyboardInterrupt())
    killed = Run(second, CONFIG, (), live, earlier=first)
    killed.begin(DATASET, NETWORK, Backend())
    live._look.result(100)
    killed._locks.close()
    killed._journal.close()
    with Run(third, CONFIG, (), live, earlier=second) as last:  # which holds no checkpoint: all is trained again
        run_epochs(last, [epoch_result(epoch, epoch_s=9.0) for epoch in (1, 2, 3)])
    assert history(store, last.id) == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert history(store, last.id, "time/epoch_s") == [(1, 0.5), (2, 0.5), (3, 9.0)]
    assert [epoch["epoch"] for epoch in read_journal(third)["epochs"]] == [1, 2, 3]


def test_a_run_of_another_config_gets_a_record_of_its_own(live, store, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path, live, [epoch_result(1)], KeyboardInterrupt())
    first = read_journal(tmp_path)["run_id"]
    with Run(tmp_path, {**CONFIG, "optimizer": {"name": "adam", "lr": 0.2}}, (), live, earlier=tmp_path) as second:
        second.begin(DATASET, NETWORK, Backend())
        second.resume([epoch_result(1)])
        second.finished(epoch_result(2))
    assert second.id != first
    assert history(store, second.id) == [(1, 1.0), (2, 0.5)]
    assert read(store, first).info.status == "KILLED"


@pytest.fixture
def hopeless(tmp_path):
    """A recorder whose store cannot be made: its folder is a file."""
    (tmp_path / "file").write_text("")
    recorder = Recorder(f"sqlite:///{tmp_path}/file/mlflow.db", "runs")
    yield recorder
    recorder.close()


def test_a_store_that_cannot_be_opened_stops_the_run_before_training(hopeless, tmp_path):
    with pytest.raises(TrackingError, match=r"tracking\.uri=.*cannot be opened"):
        record(tmp_path, hopeless, [epoch_result(1)])
    assert read_journal(tmp_path)["epochs"] == []


def test_a_store_that_turns_out_to_be_none_ends_no_training(hopeless, tmp_path, monkeypatch):
    monkeypatch.setattr(hopeless, "check", lambda: None)
    run = Run(tmp_path, CONFIG, (), hopeless)
    run.begin(DATASET, NETWORK, Backend())
    for epoch in (1, 2):
        run.finished(epoch_result(epoch))
    with pytest.raises(TrackingError, match=f"cannot be opened: .*; all 2 epochs are in {tmp_path}/journal.jsonl"):
        run.__exit__(None, None, None)
    assert (read_journal(tmp_path)["status"], read_journal(tmp_path)["stored"]) == ("FINISHED", False)


def test_the_error_of_the_store_hides_no_error_of_the_run(hopeless, tmp_path, monkeypatch):
    monkeypatch.setattr(hopeless, "check", lambda: None)
    run = Run(tmp_path, CONFIG, (), hopeless)
    run.begin(DATASET, NETWORK, Backend())
    assert not run.__exit__(ValueError, ValueError("mine"), None)
    assert read_journal(tmp_path)["error"] == "mine"


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
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), uri],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    run_id, imported = done.stdout.split()
    assert imported == "False"
    deadline = time.monotonic() + 120
    while read(store, run_id).info.status == "RUNNING" and time.monotonic() < deadline:
        time.sleep(0.1)
    recorded = read(store, run_id)
    assert (recorded.info.status, recorded.data.tags["error"]) == ("KILLED", "the training process died")
    assert recorded.data.metrics["test/accuracy"] == 0.5


def test_an_interrupted_wait_does_not_mix_up_answers(live):
    forgotten = live.ask("finished", config_hash="none")
    assert live.call("load") is None
    assert isinstance(live.call("begin", name="x", params={}, tags={}), str)
    del forgotten


@pytest.mark.parametrize("slow", [False, True])
def test_an_epoch_is_recorded_before_the_next_is_timed_unless_the_store_is_slow(
    live, store, tmp_path, monkeypatch, slow
):
    monkeypatch.setattr(pipe, "FLUSH_S", 0.1 if slow else 60.0)
    monkeypatch.setattr(live, "_slow", False)
    with Run(tmp_path, CONFIG, (), live) as run:
        run_epochs(run, [])
        run_id = live._look.result(100)
        if slow:
            live._process.send_signal(signal.SIGSTOP)
        run.finished(epoch_result(1))
        assert live._slow is slow
        assert len(history(store, run_id)) == (0 if slow else 1)
        live._process.send_signal(signal.SIGCONT)
    assert read(store, run.id).info.status == "FINISHED"
    assert len(history(store, run.id)) == 1


def test_flatten_gives_dotted_keys():
    config = {"model": {"name": "custom", "layers": [{"type": "ReLU"}]}, "trainer": {"patience": None, "lr": 0.1}}
    assert flatten(config) == {
        "model.name": "custom",
        "model.layers": json.dumps([{"type": "ReLU"}]),
        "trainer.patience": "null",
        "trainer.lr": "0.1",
    }


def test_name_tells_the_pieces_and_what_was_changed():
    overrides = ["model.filters=8", "model=one_conv", "tracking.uri=sqlite:///x", "trainer.seed=1", "~trainer.lr"]
    assert default_name(CONFIG, overrides) == "one_conv filters=8 seed=1 numpy points"
    varied = ["trainer.seed", "model", "optimizer"]
    assert default_name(CONFIG, overrides, varied) == "seed=1 one_conv filters=8 numpy points"


def test_name_begins_with_groups_and_ends_with_what_is_long():
    path = "dataset.root=/a/very/long/path/to/photos"
    layers = "model.layers=[{type: Flatten}, {type: Linear, features: 10}]"
    overrides = [path, "trainer.epochs=3", layers, "hydra/launcher=joblib", "optimizer=adam", "+experiment=smoke"]
    assert default_name(CONFIG, overrides) == (
        "adam smoke epochs=3 numpy one_conv points root=.../photos layers=[{type: Flat...atures: 10}]"
    )
    assert default_name(CONFIG, [path], ["dataset.root"]) == "root=.../photos numpy one_conv points"


def test_predicted_classes_of_one_output():
    assert predicted_classes(np.array([[0.2], [0.5]], np.float32)).tolist() == [0, 1]
