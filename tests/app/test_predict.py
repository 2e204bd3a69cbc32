"""Classifying with what a run has trained: from the command line, and through MLflow."""

import base64
import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
from checkpoints import GRAY, saved
from commands import ROOT, cnnexp, mlflow_warns, raises, serving, wait_for
from PIL import Image
from renderings import opaque, png
from tables import each

from cnnexp import Flatten, Linear, Loss, ReLU, Sigmoid
from cnnexp.app import draw, export, predict, resume
from cnnexp.app.config import named
from cnnexp.backends import BACKENDS, backend
from cnnexp.datasets import Digits, photograph
from cnnexp.errors import BackendUnavailable, CheckpointError, ConfigError, DataError
from cnnexp.tracking.browser import answers, free_port
from cnnexp.tracking.events import read_journal
from cnnexp.tracking.model import Classifier
from cnnexp.training import checkpoint
from cnnexp.training.checkpoint import CheckpointWriter

IMAGES = np.random.default_rng(1).integers(0, 256, (5, *GRAY)).astype(np.uint8)


def test_probabilities_are_the_softmax_of_the_outputs(tmp_path):
    path, parameters = saved(tmp_path)
    weight, bias = parameters[:48].reshape(16, 3).astype(np.float64), parameters[48:]
    powers = np.exp(IMAGES.reshape(5, 16) / 255 @ weight + bias)
    expected = powers / powers.sum(axis=1, keepdims=True)
    for name in ("numpy", "cpu"):
        classifier = Classifier(path, backend(name))
        for given in (IMAGES, IMAGES / 255, IMAGES[..., 0].astype(np.int64)):  # floats as they are
            np.testing.assert_allclose(classifier.predict(given), expected, rtol=1e-5)
    assert classifier.classes == ("0", "1", "2")


def test_one_output_is_the_probability_of_the_second_class(tmp_path):
    path, parameters = saved(tmp_path, (Linear(1), Sigmoid()), (2,), Loss.BINARY_CROSS_ENTROPY, classes=["no", "yes"])
    points = np.array([[0.5, -1.0], [3.0, 2.0]])
    yes = 1 / (1 + np.exp(-(points @ parameters[:2] + parameters[2])))
    classifier = Classifier(path, backend("numpy"))
    np.testing.assert_allclose(classifier.predict(points), np.stack([1 - yes, yes], axis=1), rtol=1e-5)
    assert classifier.classes == ("no", "yes")
    # lists of whole numbers are floats to a model of floats
    classifier = Classifier(saved(tmp_path / "floats", (Linear(3),), (2,), pixels="float32")[0], backend("numpy"))
    points = [[0, 300], [-1, 2]]
    np.testing.assert_array_equal(classifier.predict(points), classifier.predict(np.array(points, np.float32)))


@each(
    (np.zeros((2, 5, 4, 1)), r"images of shape \(2, 5, 4, 1\): the model takes \(N, 4, 4, 1\)"),
    (np.zeros(GRAY), r"the model takes \(N, 4, 4, 1\)"),
    (np.full((1, *GRAY), 256), "must be 0 .. 255; found 256 .. 256"),
    (np.full((1, *GRAY), "a"), "of type <U1"),
    (["no base64!"], "image 0: no picture in base64"),
    ([base64.b64encode(b"no picture").decode()], "image 0: not a picture that Pillow can read"),
    ([[1, 2], [3]], "images of several shapes"),
    ([[["a"]]], "of type <U1|of shape"),
)
def test_images_that_the_model_does_not_take(tmp_path, given, message):
    classifier = Classifier(saved(tmp_path)[0], backend("numpy"))
    raises(DataError, message, classifier.predict, given)


def test_a_checkpoint_without_a_network_is_one_line(tmp_path):
    path = CheckpointWriter(tmp_path, {"loss": "none"}).save({"parameters": np.zeros(1, np.float32)}, {})
    raises(CheckpointError, r"epoch-000000.ckpt: holds no network", Classifier, path, backend("numpy"))


def test_pictures_are_brought_to_what_the_model_takes(tmp_path, capsys):
    path, _ = saved(tmp_path / "gray", classes=["a", "b", "c"])
    pixels = IMAGES[0]
    Image.fromarray(pixels[..., 0]).save(tmp_path / "as it is.png")
    Image.fromarray(np.repeat(pixels, 3, axis=2).repeat(2, axis=0).repeat(2, axis=1)).save(tmp_path / "x=large.png")
    predict.command([str(tmp_path / "gray"), str(tmp_path / "as it is.png"), str(tmp_path / "x=large.png")])
    (probabilities,) = Classifier(path, backend("numpy")).predict(pixels[np.newaxis])
    best = probabilities.argmax()
    small, large = capsys.readouterr().out.splitlines()
    assert small.startswith(f"{tmp_path}/as it is.png  {'abc'[best]}  {probabilities[best]:.4f}")
    assert ("unsure: or" in small) is bool(probabilities[best] < predict.SURE)
    assert re.match(rf"{tmp_path}/x=large\.png  [abc]  [01]\.\d{{4}}", large)


def test_what_shows_no_stroke_gets_no_class_and_two_things_are_said(tmp_path, capsys):
    data = Digits().load()
    look = photograph.describe(data.train.images, data.train.labels, 10)
    path, _ = saved(tmp_path / "run", (Flatten(), Linear(10)), (28, 28, 1), look=look)
    pixels = data.test.images[:2, :, :, 0]
    Image.fromarray(np.full((60, 60), 200, np.uint8)).save(tmp_path / "blank.png")
    Image.fromarray(np.pad(np.hstack(list(pixels)), 20)).save(tmp_path / "two.png")
    predict.command([str(path), str(tmp_path / "blank.png"), str(tmp_path / "two.png")])
    blank, two = capsys.readouterr().out.splitlines()
    assert blank == f"{tmp_path}/blank.png  no stroke: the picture is blank"
    assert re.match(rf"{tmp_path}/two\.png  \d  .*  two things: give a picture of one$", two)


def test_a_data_sets_test_split_gets_an_accuracy(tmp_path, capsys):
    path, _ = saved(tmp_path, (Flatten(), Linear(10)), (28, 28, 1))
    test = Digits(test_size=200).load().test
    predicted = Classifier(path, backend("numpy")).predict(test.images).argmax(axis=1)
    right = (predicted == test.labels).sum()
    assert 0 < right < 200
    predict.command([str(path), "dataset=digits", "dataset.test_size=200", "backend=unrolled"])
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [str(found) for found in predicted]
    wrong = [str(label) for label, found in zip(test.labels, predicted, strict=True) if label != found]
    assert [line.split()[4] for line in lines if "wrong" in line] == wrong
    assert last == f"test accuracy {right / 200:.4f}, {right} of 200 images"


def test_classes_of_other_names_are_not_compared_by_number(tmp_path, monkeypatch):
    names = [*"abcdefghij"]
    path, _ = saved(tmp_path, (Flatten(), Linear(10)), (28, 28, 1), classes=names)
    said = "its classes are j, i, .*; the model tells a, b, "
    ways = ((names, contextlib.nullcontext()), ([*"0123456789"], contextlib.nullcontext()))
    for other, outcome in (*ways, (names[::-1], pytest.raises(DataError, match=said))):
        data = replace(Digits(test_size=20).load(), classes=tuple(other))
        monkeypatch.setattr(Digits, "load", lambda self, data=data: data)
        with outcome:
            predict.command([str(path), "dataset=digits"])
        monkeypatch.undo()


@each(
    ([], ConfigError, "give a run and either images or a data set"),
    (["MODEL"], ConfigError, "give a run and either images or a data set"),
    (["MODEL", "a.png", "dataset=digits"], ConfigError, "give a run and either images or a data set"),
    (["MODEL", "datset=digits"], ConfigError, "predict datset=digits: unknown; legal: dataset=NAME"),
    (["MODEL", "--fast"], ConfigError, "predict --fast: unknown"),
    (["MODEL", "dataset=digit"], ConfigError, "dataset.name='digit': unknown; .*did you mean 'digits'"),
    (["MODEL", "dataset=digits", "dataset.test_siz=1"], ConfigError, "dataset.test_siz=1: unknown key"),
    (["MODEL", "dataset=digits", "dataset.seed=[1"], ConfigError, "dataset.seed="),
    (["MODEL", "dataset=digits", "backend=nump"], ConfigError, "backend.name='nump': unknown"),
    (["MODEL", "dataset=digits"], DataError, r"inputs of shape \(28, 28, 1\) and 10 classes; the mo"),
    (["MODEL", "nowhere.png"], DataError, "nowhere.png"),
    (["nowhere", "dataset=digits"], CheckpointError, "predict nowhere: no such file or folder"),
    (["0" * 32, "dataset=digits"], CheckpointError, "predict 0{32}: no such file or folder"),
)
def test_a_mistake_is_one_line(tmp_path, arguments, error, message):
    path, _ = saved(tmp_path)
    raises(error, message, predict.command, [str(path) if word == "MODEL" else word for word in arguments])


@each(
    ({"layers": (Linear(1), Sigmoid()), "shape": (2,), "loss": Loss.BINARY_CROSS_ENTROPY}, "no pictures"),
    ({"layers": (Flatten(), ReLU(), Linear(3)), "shape": (4, 4, 2)}, "no pictures"),
    ({"pixels": "float32"}, "trained on floating-point images"),
)
def test_models_that_take_no_picture_files(tmp_path, model, message):
    path, _ = saved(tmp_path, **model)
    raises(ConfigError, message, predict.command, [str(path), "a.png"])


def test_a_backend_that_the_machine_lacks_is_said_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(type(BACKENDS), "__getitem__", MagicMock(side_effect=BackendUnavailable("no GPU")))
    raises(BackendUnavailable, "no GPU", predict.command, ["nowhere", "dataset=digits", "backend=gpu"])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, new_store):
    """A real run, recorded in a store of its own: its folder and the store."""
    folder = tmp_path_factory.mktemp("recorded")
    uri = new_store(folder)
    small = ["model.filters=4", "dataset.train_size=300", "dataset.test_size=50", "trainer.epochs=2"]
    words = ["backend=numpy", "trainer.baseline=cpu", f"tracking.uri={uri}", f"hydra.run.dir={folder}/runs/1"]
    assert cnnexp(*small, *words).returncode == 0
    return folder / "runs" / "1", uri


@mlflow_warns
@pytest.mark.thorough
def test_mlflow_loads_the_model_of_a_run(recorded, monkeypatch):
    import mlflow

    folder, uri = recorded
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    (run,) = mlflow.MlflowClient(uri).search_runs(["1"], "tags.kind = 'run'")
    artifacts = [artifact.path for artifact in mlflow.MlflowClient(uri).list_artifacts(run.info.run_id, "model")]
    # MLmodel, its data and an image: no pickle, no code
    assert sorted(Path(path).suffix for path in artifacts) == ["", ".ckpt", ".json"]
    model = mlflow.pyfunc.load_model(f"runs:/{run.info.run_id}/model")
    with np.load(folder / "predictions.npz") as arrays:
        predicted = arrays["predicted"]
    test = images_of(folder)
    np.testing.assert_array_equal(model.predict(test).argmax(axis=1), predicted)
    assert model.metadata.signature.inputs.inputs[0].shape == (-1, *test.shape[1:])
    example = model.metadata.load_input_example(str(folder / "model"))
    np.testing.assert_array_equal(example, test[:1])
    np.testing.assert_allclose(model.predict(example), model.predict(test)[:1], rtol=1e-5)
    assert [logged.step for logged in mlflow.MlflowClient(uri).get_run(run.info.run_id).outputs.model_outputs] == [2]
    other = mlflow.pyfunc.load_model(f"runs:/{run.info.run_id}/model", model_config={"backend": "cpu"})
    np.testing.assert_allclose(other.predict(test), model.predict(test), rtol=1e-4, atol=1e-6)


@mlflow_warns
def test_a_model_of_mlflows_takes_arrays_lists_and_pictures_in_base64(recorded):
    import mlflow

    folder, _ = recorded
    model = mlflow.pyfunc.load_model(str(folder / "model"))
    classifier = Classifier(checkpoint.find(folder), backend("numpy"))
    images = images_of(folder)[:3]
    expected = classifier.predict(images)
    large = images[0].repeat(5, axis=0).repeat(5, axis=1)
    as_photograph = classifier.predict(classifier.prepare(opaque(large[:, :, 0]))[np.newaxis])
    for given, wanted in (
        (images, expected),
        (images.tolist(), expected),
        ((images / 255).tolist(), expected),
        ([in_base64(image) for image in images], expected),
        (np.array([in_base64(image) for image in images]), expected),
        (f"data:image/png;base64,{in_base64(images[0])}", expected[:1]),
        ([in_base64(large)], as_photograph),
    ):
        np.testing.assert_allclose(model.predict(given), wanted, rtol=0, atol=1e-5)


def test_served_exported_and_drawn_the_model_gives_the_scores_of_predict(recorded, tmp_path, capsys):
    onnxruntime = pytest.importorskip("onnxruntime", reason="no onnxruntime is installed")
    folder, _ = recorded
    images = images_of(folder)[:8]
    expected = Classifier(checkpoint.find(folder), backend("numpy")).predict(images)
    with mlflow_serving(folder / "model", tmp_path) as address:
        by_lists, by_pictures = (posted(address, given) for given in (images.tolist(), [in_base64(i) for i in images]))
        with pytest.raises(urllib.error.HTTPError) as refused:
            posted(address, images[:, :5].tolist())
        with refused.value as error:
            answer = json.load(error)
    assert refused.value.code == 400
    assert answer["message"] == "images of shape (8, 5, 28, 1): the model takes (N, 28, 28, 1)"
    assert "stack_trace" not in answer
    export.command([str(folder), str(tmp_path / "exported.onnx")])
    session = onnxruntime.InferenceSession(capsys.readouterr().out.splitlines()[0], providers=["CPUExecutionProvider"])
    (exported,) = session.run(["probabilities"], {"images": images})
    with draw.Server(Classifier(checkpoint.find(folder), backend("numpy")), "drawn") as server:
        drawn = [server.look(png(image[:, :, 0]))["probabilities"] for image in images]
    for found in (by_lists, by_pictures, exported, drawn):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@contextlib.contextmanager
def mlflow_serving(model, folder):
    uvicorn = folder / "uvicorn"  # MLflow looks for it where the shell would
    uvicorn.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m uvicorn "$@"\n')
    uvicorn.chmod(0o755)
    port = free_port(5400)
    where = ("--model-uri", str(model), "--env-manager", "local", "--host", "127.0.0.1", "--port", str(port))
    command = [sys.executable, "-m", "mlflow", "models", "serve", *where]
    environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    with serving(*command, env=environ, stdout=subprocess.DEVNULL) as process:
        address = f"http://127.0.0.1:{port}"
        wait_for(lambda: answers(address), process)
        yield address


def posted(address, inputs):
    body = json.dumps({"inputs": inputs}).encode()
    request = urllib.request.Request(f"{address}/invocations", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.load(answer)["predictions"]
    assert [max(row["probabilities"], key=row["probabilities"].get) for row in found] == [row["class"] for row in found]
    return [[row["probabilities"][name] for name in map(str, range(10))] for row in found]


def test_a_recorded_run_is_found_by_its_id_and_has_a_limit(recorded, monkeypatch, capsys):
    folder, _ = recorded
    journal = read_journal(folder)
    run_id, dataset, metrics = journal["run_id"], journal["config"]["dataset"], journal["metrics"]
    monkeypatch.setattr(resume, "outputs_dir", lambda: folder.parent)
    keys = [f"dataset.{key}={'null' if value is None else value}" for key, value in dataset.items() if key != "name"]
    predict.command([run_id, f"dataset={dataset['name']}", *keys])
    told = capsys.readouterr().out
    assert f"test accuracy {metrics['final/test_accuracy']:.4f}," in told
    for name in (run_id[:6], "latest", "best"):
        predict.command([name, f"dataset={dataset['name']}", *keys])
        assert capsys.readouterr().out == told
    share, limit = metrics["speedup/parallel_share"], metrics["speedup/amdahl_limit"]
    assert 0 < share < 1
    assert 1 < limit < 1 / (1 - share)


def images_of(folder):
    return named("dataset", read_journal(folder)["config"]["dataset"]).load().test.images


def in_base64(image):
    """Return a gray image (H, W, 1) as a PNG file in base64."""
    return base64.b64encode(png(image[:, :, 0])).decode()
