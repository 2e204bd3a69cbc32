"""The count of a step, end to end: its multiply-adds are those of the network, whatever the backend."""

import re

import pytest
from tables import each

pytest.importorskip("numba_cuda", reason="runs numba-cuda: pip install cnnexp[gpu]")

import softgpu
from benchmarks import gpu_count
from softgpu.gpus import GPUS, H200, T4

needs_softgpu = pytest.mark.skipif(bool(softgpu.unavailable()), reason=softgpu.unavailable())


@each(
    ("model=lenet", r"model=lenet: must be one of one_conv, "),
    ("gpu=H300", r"gpu=H300: must be one of H200, A100, T4, RTX 4090"),
    ("batch=many", r"batch=many: must be a number"),
    ("batch=0", r"batch=0: must be >= 1"),
    ("backend=cpu", r"backend=cpu: must be among gpu-naive"),
    ("model.depth=3", r"model\.depth: one_conv has filters, "),
    ("size=3", r"size=3: no such key; there are model, batch"),
)
def test_a_wrong_argument_is_one_line(capsys, argument, says):
    assert gpu_count.main([argument]) == 2
    told = capsys.readouterr().err
    assert re.match(f"gpu_count: error: {says}", told)
    assert told.count("\n") == 1


@needs_softgpu
@pytest.mark.thorough
def test_a_step_is_counted_and_labelled_a_model(capfd):
    batch = 3
    assert gpu_count.main(["model=one_conv", "model.filters=64", f"batch={batch}", "backend=gpu-naive", "gpu=T4"]) == 0
    told = capfd.readouterr().out
    assert told.startswith("one_conv filters=64, a step of 3 images: a model of T4, never a time; no GPU was met\n")
    assert "gpu-naive: a step is 18 launches" in told
    rows = [re.split(r"  +", line) for line in told.splitlines() if re.match(r"conv2d", line)]
    assert {row[0] for row in rows} == {"conv2d", "conv2d_backward_weights"}
    wanted = batch * 2 * 26 * 26 * 9 * 64 / 1e6  # forward and backward; products of matrices are of whole tiles
    assert sum(float(row[7]) for row in rows) == pytest.approx(wanted, abs=0.05 * len(rows))


def test_gpus_are_told_apart_by_what_they_hold():
    assert list(GPUS) == ["H200", "A100", "T4", "RTX 4090"]
    # TFLOP/s, as told
    assert H200.float_lanes * H200.multiprocessors * H200.clock_ghz * 2e-3 == pytest.approx(67, abs=0.5)
    assert T4.float_lanes * T4.multiprocessors * T4.clock_ghz * 2e-3 == pytest.approx(8.1, abs=0.1)
    # by threads, by registers, by shared memory
    assert H200.resident_blocks(256, 32, 0) == 8
    assert H200.resident_blocks(256, 80, 18432) == 3
    assert T4.resident_blocks(256, 16, 20 << 10) == 3
