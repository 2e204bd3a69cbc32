"""What the soak compares: one bit of a weight, one metric, one epoch, one file too many, and it must be told."""

import numpy as np
from results import write_journal
from tables import each

from cnnexp import SGD, Constant, Flatten, Linear, Loss, Network
from cnnexp.training.checkpoint import FOLDER, CheckpointWriter, describe
from soak import commands, kills, long, stores
from soak.commands import Recorded

NETWORK = Network((2, 2, 1), (Flatten(), Linear(2)))
STEPS = range(1, kills.EPOCHS + 1)


def recorded(epochs, status="FINISHED"):
    return Recorded("r", status, {name: [(epoch, 1 / epoch) for epoch in epochs] for name in commands.ALWAYS})


def weights(folder, parameters):
    """Return the weights that a run with a checkpoint of them leaves."""
    training = describe(NETWORK, Loss.SOFTMAX_CROSS_ENTROPY, SGD(), 8, Constant(), 5, "0" * 64)
    CheckpointWriter(folder / FOLDER, training).save({"parameters": parameters}, {})
    return commands.weights(folder)


def journal(folder, epochs=STEPS, ended=("finish", "stored"), times_ms=None):
    events = [{"event": "job"}]
    events += [{"event": "epoch", "epoch": e, "metrics": {}, "time_ms": (times_ms or {}).get(e, e)} for e in epochs]
    events += [{"event": event, "status": "FINISHED", "metrics": {}, "tags": {}} for event in ended]
    write_journal(folder, *events)


@each(
    ("nothing", None),
    ("a weight", "the weights differ"),
    ("a test loss", "the test losses differ"),
    ("a training loss", "the training losses differ"),
    ("a metric", "test/accuracy has the epochs"),
    ("an epoch", "the journal has other epochs"),
    ("the end", "the journal says DIED"),
    ("the store", "the journal says FINISHED, stored: False"),
    ("a file", "left behind: ['.x.7.tmp']"),
)
def test_what_a_kill_may_change_is_seen(tmp_path, monkeypatch, change, fault):
    parameters = np.zeros(NETWORK.parameter_count, np.float32)
    wanted = weights(tmp_path / "run", parameters)
    if change == "a weight":  # by one bit
        parameters[3] = np.nextafter(parameters[3], np.float32(2))
        wanted = weights(tmp_path / "other", parameters)
    metrics = recorded(STEPS).metrics
    if change == "a metric":
        del metrics["test/accuracy"][2]
    elif change in ("a test loss", "a training loss"):
        name = change[2:].replace("training", "train").replace(" ", "/")
        metrics[name][2] = (3, metrics[name][2][1] * (1 + 1e-9))
    ended = {"the end": (), "the store": ("finish",)}.get(change, ("finish", "stored"))
    journal(tmp_path / "run", [*STEPS][: -1 if change == "an epoch" else None], ended)
    if change == "a file":
        (tmp_path / "run" / ".x.7.tmp").write_bytes(b"")
    monkeypatch.setattr(kills, "recorded", lambda *_: [Recorded("r", "FINISHED", metrics)])
    found = kills._compare(tmp_path, tmp_path / "mlflow.db", "x", wanted, recorded(STEPS).metrics)
    assert found is None if fault is None else found.startswith(fault)


def test_a_job_that_is_missing_or_still_running_is_seen(tmp_path, monkeypatch):
    for runs, fault in (
        (["FINISHED", "FINISHED", "KILLED"], None),
        (["FINISHED", "RUNNING"], "1 of 2 MLflow runs are RUNNING"),
        (["FINISHED", "KILLED"], "1 of 2 jobs are FINISHED"),
    ):
        found = [recorded((1, 2), status) for status in runs]
        monkeypatch.setattr(kills, "recorded", lambda *_, found=found: found)
        assert kills._sweep_fault(tmp_path, "x", 2) == fault


@each(
    (0, 0, 0.0, None),
    (90, 0, 0.0, None),  # other work on the machine
    (0, 9, 0.0, None),
    (0, 15, 0.0, "epoch 16 waited for 15% of one; "),
    (0, 0, 0.2, "the recorder computed for 200 ms of 1000; "),
)
def test_an_epoch_that_waits_for_a_store_is_seen(tmp_path, monkeypatch, kept_ms, waited_ms, recorder, said):
    monkeypatch.setattr(stores, "EPOCHS", 30)
    times, now, samples = {}, 0.0, []
    for epoch in range(1, 31):
        times[epoch] = now
        samples.append((now, now - (waited_ms if epoch > 15 else 0), recorder * now))
        now += 100 + (kept_ms + waited_ms if epoch == 15 else 0)
    journal(tmp_path / "run", range(1, 31), times_ms=times)
    runs, stopped = [recorded(range(1, 31))], (times[10], times[10] + 1000)
    found = stores._fault(tmp_path / "run", runs, stopped, samples)
    assert found is None if said is None else found.startswith(said)
    assert "too few to judge by" in stores._fault(tmp_path / "run", runs, (times[29], times[30]), samples)


@each(
    (10, 0, (0, 0), True),
    (13, 0, (0, 0), False),
    (13, 3, (0, 0), True),  # others had the cores
    (10, 0, (long.MOST_BYTES + 1, 0), False),
    (10, 0, (0, 3), False),
)
def test_time_memory_and_files_that_grow_are_seen(tmp_path, monkeypatch, last_ms, kept_ms, more, holds):
    monkeypatch.setattr(long, "EPOCHS", 100)
    times = {epoch: epoch * 10 if epoch < 80 else 800 + (epoch - 80) * last_ms for epoch in range(1, 101)}
    journal(tmp_path, range(1, 101), times_ms=times)
    samples = [
        (times[epoch], max(0, epoch - 80) * kept_ms, 1000 + (more[0] if epoch > 50 else 0), 9 + (epoch > 50) * more[1])
        for epoch in times
    ]
    assert (long._growth(tmp_path, samples) is None) == holds
