"""Epochs as `train_epochs` would yield them, and the config of a run, for tests of what is recorded."""

import json

import numpy as np

from cnnexp import EpochResult, Flatten, Linear, Network, Split, Totals
from cnnexp.datasets import Dataset
from cnnexp.tracking.events import JOURNAL
from cnnexp.training.baseline import Comparison

CONFIG = {
    "model": {"name": "one_conv", "filters": 4, "layers": [1, 2]},
    "backend": {"name": "numpy", "threads": None},
    "dataset": {"name": "points", "root": "${oc.env:SECRET}"},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "trainer": {"seed": 3},
    "tracking": {"name": "mlflow", "uri": None},
    "sweep": {"skip_finished": False},
}
NETWORK = Network((2, 2, 1), (Flatten(), Linear(3)))
LABELS = np.array([0, 1, 2, 2], np.int32)
SCORES = np.eye(3, dtype=np.float32)[[0, 1, 2, 1]]  # the last image is taken for a 1
_IMAGES = np.zeros((4, 2, 2, 1), np.uint8)
_SPLITS = Split(np.zeros((8, 2, 2, 1), np.uint8), np.arange(8, dtype=np.int32) % 3), Split(_IMAGES, LABELS)
DATASET = Dataset("points", *_SPLITS, None, ("a", "b", "c"), source="made up", sha256="0123456789abcdef" * 4)


def write_journal(folder, *events):
    """Leave the journal of a run, an event a line."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JOURNAL).write_text("".join(json.dumps(event) + "\n" for event in events))


def train(run, results):
    """Have a run record epochs, as `app/run` does."""
    run.begin(DATASET, NETWORK, Backend())
    run.wait()
    for result in results:
        run.finished(result)


class Backend:
    name, threads, device_name = "numpy", 2, "a CPU"
    on_gpu, facts, next_best = False, {}, None


def epoch_result(epoch, correct=2, epoch_s=0.5, speedup=None, validation=None):
    """One epoch of 8 training and 4 test images, `correct` of the test images right."""
    train, test = Totals(8.0 / epoch, 4, 8), Totals(2.0, correct, 4)
    held_out = None if validation is None else Totals(1.0, validation, 4)
    compared = None if speedup is None else Comparison(epoch_s * speedup / 8, 4, 3, speedup)
    return EpochResult(epoch, 0.1, train, test, held_out, epoch_s, evaluate_s=0.01, comparison=compared, scores=SCORES)
