import sys
from pathlib import Path

import pytest
from checkpoints import saved
from commands import raises

from cnnexp import tracking
from cnnexp.app import export
from cnnexp.errors import BackendUnavailable, CheckpointError, CnnexpError, ConfigError
from cnnexp.network.models import MODELS
from cnnexp.tracking.model import Classifier
from cnnexp.training.checkpoint import FOLDER


@pytest.fixture
def onnxruntime():
    pytest.importorskip("onnx", reason="no onnx is installed")
    pytest.importorskip("onnxruntime", reason="no onnxruntime is installed")


def test_a_file_takes_what_its_model_does_and_what_differs_is_not_written(onnxruntime, tmp_path, capsys, monkeypatch):
    """That they agree is checked before they are written; test_predict and test_onnx compare them once more."""
    resnet, ffn, points = MODELS["resnet"](), MODELS["ffn"](), f"{tmp_path}/points.onnx"
    saved(tmp_path / FOLDER, resnet.network((28, 28, 1), 10).layers, (28, 28, 1), resnet.loss)
    path, _ = saved(tmp_path / "points", ffn.network((2,), 2).layers, (2,), ffn.loss, pixels="float32")
    for arguments, file, taken in (
        ([str(tmp_path)], f"{tmp_path}/model.onnx", "images: uint8, N x 28 x 28 x 1; probabilities: float32, N x 10"),
        ([str(path), points], points, "images: float32, N x 2; probabilities: float32, N x 2"),
    ):
        export.command(arguments)
        *told, check = capsys.readouterr().out.splitlines()
        assert told == [file, taken]
        assert check.startswith("onnxruntime ")
        assert Path(file).is_file()

    predict = Classifier.predict
    monkeypatch.setattr(Classifier, "predict", lambda self, images: predict(self, images) + 2e-4)
    other = [str(path), f"{tmp_path}/other.onnx"]
    raises(CnnexpError, r"differ from predict's by 2\.\de-04", export.command, other)
    assert not (tmp_path / "other.onnx").exists()


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime"])
def test_without_the_extra_one_line_says_what_installs_it(tmp_path, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "cnnexp.tracking.graph", raising=False)
    monkeypatch.delattr(tracking, "graph", raising=False)
    said = r"export: ONNX cannot be imported .*; \S*pip install -e '\.\[onnx\]'"
    raises(BackendUnavailable, said, export.command, [str(saved(tmp_path)[0])])


def test_a_mistake_is_one_line(onnxruntime, tmp_path):
    for arguments in ([], ["a", "b", "c"], ["a", "--fast"]):
        raises(ConfigError, "export: give a run", export.command, arguments)
    raises(CheckpointError, "export nowhere: no such file or folder", export.command, ["nowhere"])
