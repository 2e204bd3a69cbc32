"""Networks as ONNX files, by the command line."""

import sys

import numpy as np
import pytest
from checkpoints import saved
from commands import one_line

from cnnexp import tracking
from cnnexp.app import export
from cnnexp.backends import backend
from cnnexp.errors import BackendUnavailable, CheckpointError, CnnexpError, ConfigError
from cnnexp.network.models import MODELS
from cnnexp.tracking.model import Classifier
from cnnexp.training.checkpoint import FOLDER


@pytest.fixture
def onnxruntime():
    pytest.importorskip("onnx", reason="no onnx is installed")
    return pytest.importorskip("onnxruntime", reason="no onnxruntime is installed")


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("custom", "onnx")])
def test_the_file_of_every_model_agrees_with_predict(onnxruntime, tmp_path, capsys, name):
    model = MODELS[name]()
    layers = model.network((28, 28, 1), 10).layers
    path, _ = saved(tmp_path / FOLDER, layers, (28, 28, 1), model.loss)
    export.command([str(tmp_path)])
    file, facts, check = capsys.readouterr().out.splitlines()
    assert file == str(tmp_path / "model.onnx")
    assert facts.startswith("images: uint8, N x 28 x 28 x 1; probabilities: float32, N x ")
    assert check.startswith("onnxruntime ")
    images = np.random.default_rng(2).integers(0, 256, (3, 28, 28, 1)).astype(np.uint8)
    (found,) = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, {"images": images})
    predicted = Classifier(path, backend("numpy")).predict(images)
    np.testing.assert_allclose(found, predicted, rtol=0, atol=1e-5)


def test_a_model_of_points_takes_floats_and_what_differs_is_not_written(onnxruntime, tmp_path, capsys, monkeypatch):
    path, _ = saved(tmp_path, MODELS["ffn"]().network((2,), 2).layers, (2,), MODELS["ffn"]().loss, pixels="float32")
    export.command([str(path), str(tmp_path / "points.onnx")])
    assert "images: float32, N x 2; probabilities: float32, N x 2" in capsys.readouterr().out
    assert (tmp_path / "points.onnx").is_file()

    predict = Classifier.predict
    monkeypatch.setattr(Classifier, "predict", lambda self, images: predict(self, images) + 2e-4)
    with pytest.raises(CnnexpError, match=r"differ from predict's by 2\.\de-04"):
        export.command([str(path), str(tmp_path / "other.onnx")])
    assert not (tmp_path / "other.onnx").exists()


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime"])
def test_without_the_extra_one_line_says_what_installs_it(tmp_path, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "cnnexp.tracking.graph", raising=False)
    monkeypatch.delattr(tracking, "graph", raising=False)
    with one_line(BackendUnavailable, r"export: ONNX cannot be imported .*; pip install '\.\[onnx\]'"):
        export.command([str(saved(tmp_path)[0])])


def test_a_mistake_is_one_line(onnxruntime, tmp_path):
    for arguments in ([], ["a", "b", "c"], ["a", "--fast"]):
        with pytest.raises(ConfigError, match="export: give a run"):
            export.command(arguments)
    with pytest.raises(CheckpointError, match="export nowhere: no such file or folder"):
        export.command(["nowhere"])
