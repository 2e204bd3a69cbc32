import json
import os
from dataclasses import replace
from unittest.mock import MagicMock

import numpy as np
import pytest
from commands import raises
from results import epoch_result
from tables import each

from cnnexp import SGD, Adam, Constant, Conv2d, Cosine, Flatten, Linear, Loss, Network, ReLU, Totals
from cnnexp.errors import CheckpointError
from cnnexp.training.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    check_same,
    describe,
    find,
    list_checkpoints,
    load,
    plain_result,
    rebuild,
    take_history,
)
from cnnexp.training.loop import Progress

NETWORK = Network((6, 6, 1), (Conv2d(2, 3), ReLU(), Flatten(), Linear(3)))
TRAINING = describe(NETWORK, Loss.SOFTMAX_CROSS_ENTROPY, Adam(), 8, Constant(), 5, "0" * 64)


def checkpoint(epoch=1):
    rng = np.random.default_rng(0)
    names = ("parameters", "mean", "square")
    state = {name: rng.standard_normal(NETWORK.parameter_count).astype(np.float32) for name in names}
    return Checkpoint(epoch, TRAINING, {**state, "step": np.int64(12)}, about={"backend": "numpy"})


def journal(*results):
    """What a run's journal holds of its epochs, once it is read."""
    return {result.epoch: json.loads(json.dumps(plain_result(result))) for result in results}


def save(folder, given):
    """Write one checkpoint as a run would that has trained its epochs."""
    *earlier, last = [replace(epoch_result(1), epoch=epoch) for epoch in range(1, given.epoch + 1)]
    return CheckpointWriter(folder, given.training, earlier).save(given.state, given.about, last)


def test_what_is_saved_comes_back_bit_for_bit(tmp_path):
    saved = checkpoint()
    read = load(save(tmp_path, saved))
    assert (read.epoch, read.about) == (1, {"backend": "numpy"})
    (now,), then = take_history(read, journal(epoch_result(1)), tmp_path).history, epoch_result(1)
    assert replace(now, scores=None) == replace(then, scores=None)
    assert read.state.keys() == saved.state.keys()
    for name, array in saved.state.items():
        np.testing.assert_array_equal(read.state[name], array)
        assert read.state[name].dtype == array.dtype
    check_same(read, TRAINING, tmp_path)


def progress(epoch, count=8):
    return Progress(epoch, Totals(1.5, 3, count), 40, 0.25)


def test_a_checkpoint_within_an_epoch_gives_way_to_the_next(tmp_path):
    keeper = CheckpointWriter(tmp_path, TRAINING)
    state = checkpoint().state
    keeper.save(state, {})
    assert load(keeper.save(state, {}, begun=progress(1))).begun == progress(1)
    keeper.save(state, {}, begun=progress(1, 16))
    within = "epoch-000000-images-000000016.ckpt"
    assert [path.name for path in list_checkpoints(tmp_path)] == ["epoch-000000.ckpt", within]
    assert find(tmp_path).name == within
    assert load(keeper.save(state, {}, epoch_result(1))).begun is None
    assert [path.name for path in list_checkpoints(tmp_path)] == ["epoch-000000.ckpt", "epoch-000001.ckpt"]


def test_what_cannot_be_of_an_epoch_that_has_begun_is_refused(tmp_path):
    wrong = progress(3), progress(1, 0), progress(1, 41), progress(1, True), replace(progress(1), seconds=np.nan)
    for i, begun in enumerate(wrong):
        path = CheckpointWriter(tmp_path / str(i), TRAINING).save(checkpoint().state, {}, begun=begun)
        raises(CheckpointError, "not as cnnexp writes it: what it says of the epoch", load, path)


@each(
    ({}, [2, 5, 6]),
    ({"last": 1, "best": 0}, [6]),
    ({"last": 3, "best": 0}, [4, 5, 6]),
    ({"last": 1, "best": 2}, [2, 3, 6]),
    ({"last": 2, "best": 3}, [1, 2, 3, 5, 6]),
)
def test_the_last_two_and_the_best_are_kept_or_as_many_as_asked_for(tmp_path, options, kept):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / ".epoch-000001.ckpt.123.tmp").write_bytes(b"of a process that was killed")
    keeper = CheckpointWriter(folder, TRAINING, **options)
    for epoch, correct in enumerate([2, 4, 3, 0, 1, 1], 1):
        keeper.save(checkpoint().state, {}, epoch_result(epoch, correct=correct))
    names = [f"epoch-00000{epoch}.ckpt" for epoch in kept]
    assert [path.name for path in list_checkpoints(folder)] == sorted(os.listdir(folder)) == names
    newest = folder / "epoch-000006.ckpt"
    assert find(tmp_path) == find(folder) == find(newest) == newest


def test_a_run_that_goes_on_from_another_folder_keeps_the_best_of_its_own(tmp_path):
    results = [epoch_result(epoch, correct=correct) for epoch, correct in enumerate([4, 1, 3, 2, 2], 1)]
    keeper = CheckpointWriter(tmp_path, TRAINING, results[:2], last=1)
    for result in results[2:]:
        keeper.save(checkpoint().state, {}, result)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["epoch-000003.ckpt", "epoch-000005.ckpt"]


def test_every_bit_flip_and_every_truncation_is_refused(tmp_path):
    path = save(tmp_path, checkpoint())
    whole = path.read_bytes()
    for position in range(0, len(whole), 11):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        raises(CheckpointError, path.name, load, path)
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        raises(CheckpointError, path.name, load, path)
    path.write_bytes(whole + b"x")
    raises(CheckpointError, "SHA-256", load, path)


def test_a_damaged_newest_is_passed_over_and_said(tmp_path, caplog):
    first, newest = (save(tmp_path, checkpoint(epoch)) for epoch in (1, 2))
    newest.write_bytes(newest.read_bytes()[:-1])
    raises(CheckpointError, r"\A.*epoch-000001\.ckpt beside it is whole.*\Z", load, newest)
    assert load(find(tmp_path)).epoch == 1
    assert "epoch-000001.ckpt is used" in caplog.text
    caplog.clear()
    first.write_bytes(first.read_bytes()[:-1])
    raises(CheckpointError, r"\A.*: all 2 checkpoints are damaged; epoch-000002\.ckpt: .*\Z", find, tmp_path)
    assert caplog.text == ""


def test_a_history_that_is_not_the_checkpoints_own_is_refused(tmp_path):
    results = [epoch_result(epoch, speedup=2.0, validation=3) for epoch in (1, 2, 3)]
    path = CheckpointWriter(tmp_path, TRAINING, results[:1]).save(checkpoint().state, {}, results[1])
    read = load(path)
    assert (read.epoch, read.history) == (2, ())
    whole = journal(*results)  # the third's checkpoint was never written
    assert [result.epoch for result in take_history(read, whole, path).history] == [1, 2]
    other = {**whole[2], "epoch_s": 9.0}
    for damaged in ({}, {1: whole[1]}, {**whole, 2: None}, {**whole, 2: other}, {**whole, 1: []}):
        raises(CheckpointError, "lacks its epochs, or has other ones", take_history, read, damaged, path)


def test_the_three_thousandth_epoch_writes_what_the_first_did(tmp_path):
    keeper = CheckpointWriter(tmp_path, TRAINING, [epoch_result(epoch) for epoch in range(1, 3000)])
    first = CheckpointWriter(tmp_path / "first", TRAINING).save(checkpoint().state, {}, epoch_result(1))
    assert keeper.save(checkpoint().state, {}, epoch_result(3000)).stat().st_size < first.stat().st_size + 100


@each(
    ({"step": np.int64(1)}, {}),
    ({"parameters": np.zeros((2, 2), np.float32)}, {}),
    ({"parameters": np.zeros(3, np.float32), "mean": np.zeros(2, np.float32)}, {}),
    ({"parameters": np.zeros(3)}, {}),
    ({"parameters": np.zeros(3, np.float32), "step": np.float64(1)}, {}),
    ({"parameters": np.array([{"an": "object"}], object)}, {}),  # pickled
    ({"parameters": np.zeros(3, np.float32)}, [1]),
)
def test_a_whole_file_with_wrong_fields_is_refused(tmp_path, state, about):
    path = CheckpointWriter(tmp_path, TRAINING).save(state, about, epoch_result(1))
    raises(CheckpointError, "not as cnnexp writes it", load, path)


@pytest.mark.parametrize("call", ["cnnexp.training.checkpoint.CheckpointWriter._encode", "os.fsync", "os.replace"])
def test_a_failure_at_any_moment_leaves_the_last_checkpoint_and_no_litter(tmp_path, monkeypatch, call):
    keeper = CheckpointWriter(tmp_path, TRAINING)
    keeper.save(checkpoint().state, {}, epoch_result(1))
    monkeypatch.setattr(call, MagicMock(side_effect=OSError(28, "No space left on device")))
    raises(CheckpointError, "cannot be written: no space left", keeper.save, checkpoint().state, {}, epoch_result(2))
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == ["epoch-000001.ckpt"]
    assert load(find(tmp_path)).epoch == 1


def test_no_pipe_and_no_device_is_read_and_nothing_to_find_is_one_line(tmp_path):
    raises(CheckpointError, r"holds no checkpoint \(epoch-\*\.ckpt\)", find, tmp_path)
    os.mkfifo(tmp_path / "epoch-000001.ckpt")
    for path in (tmp_path / "epoch-000001.ckpt", "/dev/zero"):
        raises(CheckpointError, "not a regular file", load, path)
    raises(CheckpointError, "no such file or folder", find, tmp_path / "nowhere")
    raises(CheckpointError, "cannot be read", load, tmp_path / "nowhere.ckpt")


@each(
    ({"network": Network((6, 6, 1), (Flatten(), Linear(3)))}, "network.layers is"),
    ({"optimizer": SGD()}, 'optimizer is {"type": "SGD"'),
    ({"optimizer": Adam(lr=0.5)}, '"lr": 0.5'),
    ({"batch_size": 9}, "batch_size is 9, the checkpoint's 8"),
    ({"schedule": Cosine()}, 'schedule is {"type": "Cosine"}'),
    ({"seed": 6}, "seed is 6, the checkpoint's 5"),
    ({"dataset_sha256": "1" * 64}, "dataset.sha256 is"),
)
def test_another_training_is_refused_and_what_differs_is_named(changed, message):
    same = {"network": NETWORK, "loss": Loss.SOFTMAX_CROSS_ENTROPY, "optimizer": Adam(), "batch_size": 8}
    same |= {"schedule": Constant(), "seed": 5, "dataset_sha256": "0" * 64}
    with pytest.raises(CheckpointError) as error:
        check_same(checkpoint(), describe(**{**same, **changed}), "a.ckpt")
    assert message in str(error.value)
    assert str(error.value).count(", the checkpoint's") == 1


@each((Loss.SOFTMAX_CROSS_ENTROPY,), (Loss("softmax_cross_entropy", 0.1, (1.0, 2.0, 0.5)),))
def test_network_and_loss_are_those_that_were_described(loss):
    training = describe(NETWORK, loss, Adam(), 8, Constant(), 5, "0" * 64)
    assert rebuild(json.loads(json.dumps(training))) == (NETWORK, loss)
