import dataclasses
import itertools
import os

import numpy as np
import pytest
from results import epoch_result

from cnnexp import SGD, Adam, Constant, Conv2d, Cosine, Flatten, Linear, Loss, Network, ReLU, train_epochs
from cnnexp.backends import backend_class
from cnnexp.datasets import Dataset, Split
from cnnexp.errors import CheckpointError
from cnnexp.training.checkpoint import Checkpoint, check_same, describe, find, list_checkpoints, load, save

NETWORK = Network((6, 6, 1), (Conv2d(2, 3), ReLU(), Flatten(), Linear(3)))
TRAINING = describe(NETWORK, Loss.SOFTMAX_CROSS_ENTROPY, Adam(), 8, Constant(), 5, "0" * 64)


def checkpoint(epoch=1, seed=0):
    rng = np.random.default_rng(seed)
    names = ("parameters", "mean", "square")
    state = {name: rng.standard_normal(NETWORK.parameter_count).astype(np.float32) for name in names}
    return Checkpoint(epoch, TRAINING, {**state, "step": np.int64(12)}, (epoch_result(epoch),), {"backend": "numpy"})


def dataset():
    rng = np.random.default_rng(3)
    images, labels = rng.random((50, 6, 6, 1), np.float32), rng.integers(0, 3, 50).astype(np.int32)
    splits = Split(images[:40], labels[:40]), Split(images[40:], labels[40:])
    return Dataset("random", *splits, None, ("a", "b", "c"), "made here", "0" * 64)


def test_what_is_saved_comes_back_bit_for_bit(tmp_path):
    saved = checkpoint()
    read = load(save(tmp_path, saved))
    assert (read.epoch, read.about) == (1, {"backend": "numpy"})
    (then,), (now,) = saved.history, read.history
    assert dataclasses.replace(now, scores=None) == dataclasses.replace(then, scores=None)
    assert read.state.keys() == saved.state.keys()
    for name, array in saved.state.items():
        np.testing.assert_array_equal(read.state[name], array)
        assert read.state[name].dtype == array.dtype
    check_same(read, TRAINING, tmp_path)


def test_every_bit_flip_and_every_truncation_is_refused(tmp_path):
    path = save(tmp_path, checkpoint())
    whole = path.read_bytes()
    for position in range(0, len(whole), 11):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError):
            load(path)
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            load(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(CheckpointError, match="SHA-256"):
        load(path)


def test_a_damaged_file_is_one_line_that_names_a_whole_one(tmp_path):
    save(tmp_path, checkpoint(1))
    newest = save(tmp_path, checkpoint(2))
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as error:
        load(newest)
    assert "epoch-000001.ckpt beside it is whole" in str(error.value)
    assert "\n" not in str(error.value)


def test_pickled_arrays_are_refused(tmp_path):
    path = tmp_path / "epoch-000001.ckpt"
    evil = Checkpoint(1, TRAINING, {"parameters": np.array([{"an": "object"}], object)})
    save(tmp_path, evil)
    with pytest.raises(CheckpointError, match="not as cnnexp writes it"):
        load(path)


def test_two_are_kept_and_the_newest_is_found(tmp_path):
    for epoch in (1, 2, 3, 10):
        save(tmp_path / "checkpoints", checkpoint(epoch))
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == [
        "epoch-000003.ckpt",
        "epoch-000010.ckpt",
    ]
    newest = tmp_path / "checkpoints" / "epoch-000010.ckpt"
    assert find(tmp_path) == find(tmp_path / "checkpoints") == find(newest) == newest


def test_nothing_to_find_is_one_line(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no checkpoint \(epoch-\*\.ckpt\)"):
        find(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        find(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(tmp_path / "nowhere.ckpt")


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_failure_at_any_moment_leaves_the_last_checkpoint_and_no_litter(tmp_path, monkeypatch, call):
    save(tmp_path, checkpoint(1))

    def full(*_):
        raise OSError(28, "No space left on device")

    if call == "write":
        monkeypatch.setattr("cnnexp.training.checkpoint._encode", full)
    else:
        monkeypatch.setattr(os, call, full)
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
        save(tmp_path, checkpoint(2))
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["epoch-000001.ckpt"]
    assert load(find(tmp_path)).epoch == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"network": Network((6, 6, 1), (Flatten(), Linear(3)))}, "network.layers is"),
        ({"optimizer": SGD()}, 'optimizer is {"type": "SGD"'),
        ({"optimizer": Adam(lr=0.5)}, '"lr": 0.5'),
        ({"batch_size": 9}, "batch_size is 9, the checkpoint's 8"),
        ({"schedule": Cosine()}, 'schedule is {"type": "Cosine"}'),
        ({"seed": 6}, "seed is 6, the checkpoint's 5"),
        ({"dataset_sha256": "1" * 64}, "dataset.sha256 is"),
    ],
)
def test_another_training_is_refused_and_what_differs_is_named(changed, message):
    same = {
        "network": NETWORK,
        "loss": Loss.SOFTMAX_CROSS_ENTROPY,
        "optimizer": Adam(),
        "batch_size": 8,
        "schedule": Constant(),
        "seed": 5,
        "dataset_sha256": "0" * 64,
    }
    with pytest.raises(CheckpointError) as error:
        check_same(checkpoint(), describe(**{**same, **changed}), "a.ckpt")
    assert message in str(error.value)
    assert str(error.value).count(", the checkpoint's") == 1


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1, momentum=0.9), Adam()])
def test_a_resumed_run_ends_bit_identical_to_one_never_stopped(tmp_path, optimizer):
    def compiled():
        return backend_class("numpy")().compile(NETWORK, Loss.SOFTMAX_CROSS_ENTROPY, optimizer, 8)

    start = {"parameters": NETWORK.initial_parameters(0)}
    unbroken = compiled()
    unbroken.restore(start)
    list(train_epochs(unbroken, dataset(), 4, seed=5))

    stopped = compiled()
    stopped.restore(start)
    results = []
    for result in itertools.islice(train_epochs(stopped, dataset(), 4, seed=5), 2):
        results.append(result)
        save(tmp_path, Checkpoint(result.epoch, TRAINING, stopped.state(), tuple(results)))

    resumed, last = compiled(), load(find(tmp_path))
    assert last.epoch == 2
    resumed.restore(last.state)
    list(train_epochs(resumed, dataset(), 4, seed=5, earlier=last.history))
    assert resumed.state().keys() == unbroken.state().keys()
    for name, array in unbroken.state().items():
        np.testing.assert_array_equal(resumed.state()[name], array)
