import json
import pydoc
import re
from dataclasses import replace

import pytest
from commands import mlflow_warns, raises

import cnnexp
from cnnexp import SGD, AdamW, CnnexpError, Digits, OneConv, ResNet, Step, Synthetic, fit
from cnnexp.app import fit as fitting
from cnnexp.app import predict
from cnnexp.measuring import interference
from cnnexp.measuring.interference import Interference
from cnnexp.tracking import store as stores
from cnnexp.tracking.events import read_journal

DATA, SMALL = Digits(train_size=200, test_size=50), ("dataset.train_size=200", "dataset.test_size=50")


@pytest.fixture(scope="module")
def trained():
    return fit(OneConv(filters=4), DATA, backend="numpy", epochs=3, baseline="numpy")


def test_the_result_has_epochs_and_a_table(trained):
    assert [result.epoch for result in trained.epochs] == [1, 2, 3]
    assert trained.accuracy == trained.epochs[-1].test.accuracy > 0.5
    assert trained.speedup.count == 3
    above, title, *rows = trained.table.splitlines()
    assert (above.split()[-1], title.split()[-1]) == ("x", "numpy")
    assert [row.split()[0] for row in rows] == ["1/3", "2/3", "3/3"]
    assert f"{trained.accuracy:.2%}" in rows[-1]
    assert max(map(len, (above, title, *rows))) <= 80
    assert "too few for an interval" in " ".join(trained.verdict.split())


def test_it_trains_as_the_command_line_does(trained, run, tmp_path):
    run("model.filters=4", *SMALL, "backend=numpy", "trainer.epochs=3", "tracking=none", "trainer.baseline=null")
    epochs = read_journal(tmp_path / "run")["epochs"]
    assert [epoch["train/loss"] for epoch in epochs] == [result.train.mean_loss for result in trained.epochs]


def test_a_saved_result_predicts_and_a_plot_has_loss_and_accuracy(trained, tmp_path, capsys):
    trained.save(tmp_path)
    predict.command([str(tmp_path), "dataset=digits", *SMALL])
    assert f"test accuracy {trained.accuracy:.4f}" in capsys.readouterr().out
    loss, accuracy = trained.plot().axes
    assert (loss.get_ylabel(), accuracy.get_ylabel()) == ("loss", "accuracy")
    assert list(accuracy.lines[-1].get_ydata()) == [result.test.accuracy for result in trained.epochs]


def test_a_target_ends_it_and_without_a_baseline_there_is_no_speedup():
    found = fit(OneConv(filters=4), DATA.load(), "numpy", 5, optimizer=SGD(lr=0.1), baseline=None, target=0.01)
    assert len(found.epochs) == 1
    assert "trainer.target=0.01 was reached on the test images" in " ".join(found.verdict.split())
    assert found.speedup is None
    assert found.table.splitlines()[1].split()[-1] == "images/s"


def test_a_patient_one_waits_before_every_epoch_and_says_so_in_python(monkeypatch):
    limits = []
    monkeypatch.setattr(interference, "await_quiet", lambda limit_s: limits.append(limit_s) or 200.0)
    keys_of_the_trainer = {"schedule": "step", "step_every": 1, "step_factor": 0.5, "patient": True}
    found = fit(OneConv(filters=4), DATA, backend="numpy", epochs=3, baseline=None, **keys_of_the_trainer)
    assert [result.rate for result in found.epochs] == [0.1, 0.05, 0.025]
    fit(OneConv(filters=4), DATA, backend="numpy", epochs=1, baseline=None)
    assert limits == [300.0, 100.0], "patience has an end, and who has none does not wait"
    busy = replace(found, interference=Interference(0.5, 0.0, 9.0, 2, 1, 9.0))
    assert "or wait with patient=True" in " ".join(busy.verdict.split())


def test_everything_is_told_in_a_line(trained):
    data = DATA.load()
    network, epoch = trained.network, trained.epochs[0]
    outcome = (trained, network, *network.stages, epoch, epoch.train, trained.speedup, epoch.comparison)
    given = (data, data.train, Synthetic(), cnnexp.Images(root="photos"), cnnexp.Mnist(), ResNet(), AdamW(), Step())
    for thing in (*outcome, Interference(0.1, 0.0, 1.5, 2, 2, 9.0), *given, cnnexp.backend("cpu")):
        assert len(repr(thing)) <= 100
        assert "\n" not in repr(thing)
    assert repr(cnnexp.Images(root="photos", height=8)) == "Images(root='photos', height=8)"
    assert repr(trained).startswith("Fit(numpy: ")
    assert repr(trained.network) == "Network(28 x 28 x 1 to 10, 5 layers, 6,810 parameters)"


def test_help_begins_with_what_people_use_and_the_summary_adds_up(trained):
    text = pydoc.render_doc(cnnexp, renderer=pydoc.plaintext)
    told = text[: text.index("PACKAGE CONTENTS")]
    assert told.index("fit(OneConv(filters=32), Digits()") < told.index("What people use")
    assert set(cnnexp.__all__) <= set(re.findall(r"\w+", told))

    rows = [row.split() for row in trained.network.summary().splitlines()]
    assert rows[-1][1] == f"{trained.network.parameter_count:,}"
    assert rows[1] == ["input", "28", "x", "28", "x", "1"]
    sizes = [int(row[-2].replace(",", "")) for row in rows[2:-1] if row[0].startswith(("conv", "linear"))]
    assert sum(sizes) == trained.network.parameter_count


@mlflow_warns
def test_a_recorded_fit_is_a_run(tmp_path, monkeypatch, new_store):
    uri = new_store(tmp_path)
    monkeypatch.setattr(fitting, "store_uri", lambda uri_: uri)
    monkeypatch.setattr(fitting, "outputs_dir", lambda: tmp_path)
    found = fit(OneConv(filters=4), DATA, "numpy", 2, baseline=None, record=True)
    recorded = stores.Store(uri, "cnnexp")._client.get_run(found.run_id)
    assert (recorded.info.status, recorded.info.run_name) == ("FINISHED", "numpy one_conv digits")
    assert recorded.data.metrics["final/test_accuracy"] == pytest.approx(found.accuracy, rel=1e-5)
    assert recorded.data.params["model.filters"] == "4"
    (journal,) = tmp_path.rglob("journal.jsonl")
    assert json.loads(journal.read_text().splitlines()[0])["config"]["trainer"]["epochs"] == 2


def test_an_option_that_no_trainer_has_is_one_line():
    raises(CnnexpError, r"trainer\.batch=4: unknown key; .*did you mean .batch_size", fit, OneConv(), DATA, batch=4)
