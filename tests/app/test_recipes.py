"""Runs with every option of a recipe at once: what is recorded, resumed and predicted; and `find-rate`."""

import dataclasses
import re

import numpy as np
import pytest
from commands import TINY, raises
from conformance import assert_same_state

from cnnexp.app import find_rate
from cnnexp.app.hydra_app import settings_of
from cnnexp.backends import backend
from cnnexp.errors import NetworkError
from cnnexp.optimizers import SGD
from cnnexp.tracking.events import read_journal
from cnnexp.tracking.metrics import class_metrics
from cnnexp.tracking.model import Classifier
from cnnexp.training.checkpoint import find, load

RECIPE = (
    *(*TINY, "trainer.epochs=3", "optimizer=adamw", "optimizer.lr=0.02", "optimizer.decay_biases=false"),
    *("trainer.warmup=1", "trainer.schedule=one_cycle", "trainer.clip_norm=1", "trainer.accumulate=2"),
    *("trainer.ema=0.9", "trainer.class_weights=balanced"),
)
OTHERS = {  # a word of another recipe, and what is said of it
    "trainer.clip_norm=2": "clip_norm is 2.0, the checkpoint's 1.0",
    "trainer.ema=null": "ema is null, the checkpoint's 0.9",
    "trainer.class_weights=null": "loss.class_weights is null",
    "optimizer.decay_biases=true": "optimizer is",
    "trainer.peak=0.5": "schedule is",
}


@pytest.mark.parametrize("workers", [(), ("workers=local",)], ids=["alone", "two workers"])
def test_a_run_with_every_option_goes_on_to_the_same_bits_and_predicted_is_the_average(run, mistake, tmp_path, workers):
    words = (*RECIPE, *workers)
    assert run(*words, f"hydra.run.dir={tmp_path / 'whole'}")[0] == 0
    assert run(*words, "trainer.target=0.01", f"hydra.run.dir={tmp_path / 'first'}")[0] == 0  # reached in epoch 1
    stopped = tmp_path / "first" / "checkpoints" / "epoch-000001.ckpt"
    assert run(*words, f"trainer.resume={stopped}", f"hydra.run.dir={tmp_path / 'rest'}")[0] == 0
    whole, rest = (load(find(tmp_path / folder)).state for folder in ("whole", "rest"))
    assert set(whole) == {"parameters", "step", "mean", "square", "average_parameters"}
    assert_same_state(rest, whole)
    assert int(whole["step"]) == 3 * 2  # of 200 images in batches of 50, two to a step
    classifier, test = Classifier(find(tmp_path / "whole"), backend("numpy")), settings_of(RECIPE).dataset.load().test
    np.testing.assert_array_equal(classifier.state["parameters"], whole["average_parameters"])
    assert np.abs(whole["average_parameters"] - whole["parameters"]).max() > 1e-4
    accuracy = (classifier.predict(test.images).argmax(axis=1) == test.labels).mean()
    assert read_journal(tmp_path / "whole")["metrics"]["final/test_accuracy"] == pytest.approx(accuracy)
    for word, said in OTHERS.items() if not workers else ():
        there = (f"trainer.resume={tmp_path / 'first'}", f"hydra.run.dir={tmp_path / 'other'}")
        mistake(*words, word, *there, says=f".*{said}.*", code=6)


def test_options_that_cannot_be_are_one_line(mistake):
    for words, said in {
        ("workers=local", "workers.sync=parameters"): "workers.sync=parameters: takes no trainer.clip_norm, ",
        ("trainer.class_weights=[1,2]",): r"trainer.class_weights=\[1.0, 2.0\]: must be 10, one for each class",
    }.items():
        mistake(*RECIPE, *words, says=f"{said}.*")


def test_metrics_by_class_are_counted_one_image_at_a_time():
    rng = np.random.default_rng(4)
    classes, labels = [*"abcdefg", "*"], rng.integers(0, 8, 200)
    labels[(labels == 6) | (labels == 7)] = 0  # no image of "g" ..
    scores = rng.normal(size=(200, 8)) + 2 * np.eye(8)[labels]
    scores[:, 7] = -9  # .. and none is taken for "*"
    predicted, found = scores.argmax(axis=1), class_metrics(scores, labels, classes)
    f1s = []
    for i, name in enumerate([*"abcdefg", "class 7"]):
        right = sum(p == t == i for p, t in zip(predicted, labels, strict=True))
        precision = right / max(1, sum(predicted == i))
        recall = right / max(1, sum(labels == i))
        f1s.append(2 * precision * recall / (precision + recall) if right else 0.0)
        assert (found[f"precision/{name}"], found[f"recall/{name}"]) == pytest.approx((precision, recall))
        assert found[f"f1/{name}"] == pytest.approx(f1s[-1])
    assert found["test/f1"] == pytest.approx(np.mean(f1s[:7]))
    among = [label in sorted(range(8), key=lambda o: -row[o])[:5] for row, label in zip(scores, labels, strict=True)]
    assert found["test/top5_accuracy"] == pytest.approx(np.mean(among))
    few = class_metrics(scores[:, :3], labels % 3, ["a", "b", 100 * "c"])
    assert {"f1/b", "f1/class 2"} <= few.keys(), "a longer name is none that MLflow takes"
    assert "test/top5_accuracy" not in few
    many = class_metrics(np.zeros((4, 21)), np.arange(4), list(map(str, range(21))))
    assert many.keys() == {"test/f1", "test/top5_accuracy"}


def test_find_rate_suggests_a_rate_that_trains_and_draws_the_curve(run, monkeypatch, tmp_path):
    monkeypatch.setattr(find_rate, "outputs_dir", lambda: tmp_path)
    words = ("dataset=digits", "dataset.train_size=600", "model.filters=8", "backend=numpy")
    code, out, _ = run("find-rate", *words)
    assert code == 0
    rate = float(re.search(r"^optimizer.lr=(\S+): ", out, re.MULTILINE)[1])
    assert (tmp_path / "find-rate.png").read_bytes().startswith(b"\x89PNG")
    rows = [[float(number) for number in re.findall(r"\d\S+", line)] for line in out.splitlines()[:-2]]
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert rows[0][1] == pytest.approx(np.log(10), abs=0.2)  # of ten classes, before anything is learned

    def accuracy(lr, folder):
        more = ("tracking=none", "trainer.baseline=null", "trainer.epochs=3", f"hydra.run.dir={tmp_path / folder}")
        assert run(*words, *more, f"optimizer.lr={lr}")[0] == 0
        return read_journal(tmp_path / folder)["metrics"]["final/test_accuracy"]

    assert accuracy(rate, "suggested") > max(0.8, accuracy(rate / 1000, "lower"))


def test_find_rate_ends_where_the_loss_explodes(monkeypatch):
    settings = settings_of(["dataset=digits", "backend=numpy", "model.filters=4"])
    rows = find_rate._train(settings, np.geomspace(1e-3, 1e6, 40))
    assert 5 < len(rows) < 40
    assert np.isfinite(rows).all()


def test_find_rate_refuses_a_plugins_rule_as_a_run_does():
    wrong = type("Wrong", (SGD,), {"rule": lambda *_: lambda w, *_: w})
    settings = dataclasses.replace(settings_of(["dataset=digits", "backend=numpy"]), optimizer=wrong())
    raises(NetworkError, "optimizer Wrong: its rule must return three", find_rate._train, settings, np.ones(2))


def test_find_rate_says_so_where_not_even_the_first_loss_is_finite(mistake, monkeypatch):
    monkeypatch.setattr(find_rate, "_train", lambda settings, rates: np.empty((0, 3)))
    mistake("find-rate", says="find-rate: the loss falls at no rate from 1e-06 on; .*")


@pytest.mark.parametrize("words", [("-m",), ("optimizer.lrr=1",), ("optimizer.lr=x",), ("nonsense=1",), ("model=",)])
def test_find_rate_refuses_in_one_line(mistake, words):
    mistake("find-rate", *words, says=r"\S+.*")
