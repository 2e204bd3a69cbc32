"""`benchmarks/gpu_check.py` where there is no GPU: what it counts, what it prints, and that its PyTorch trains."""

import dataclasses

import numpy as np
import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import CASES, CONFORMANCE, Contestant
from cnnexp.backends import backend_class
from cnnexp.errors import BackendUnavailable


def test_without_a_gpu_it_says_what_is_missing(capsys):
    try:
        backend_class("gpu-naive")()
    except BackendUnavailable:
        assert gpu_check.main([]) == 4
        line = capsys.readouterr().err
        assert "no GPU to compute on" in line
        assert "cpu-parallel" in line
        assert "cpu-simd" in line
        assert line.count("\n") == 1
    else:
        pytest.skip("this machine has a GPU")


def test_the_floor_of_one_conv_is_counted_by_hand():
    case = CASES[0]  # 256 filters, batch 1000, SGD
    # forward 26 * 26 * 9 * 256 and 43264 * 10; the filters' gradient through 13 * 13 places, the linear layer's twice
    multiply_adds = 26 * 26 * 9 * 256 + 13 * 13 * 9 * 256 + 3 * 432_640
    # bytes twice; a float and a byte per pooled value, out and in; the parameters and their gradient, out and in
    moved = 2 * 784 + 2 * 5 * 43_264 + 4 * 4 * 435_210 / 1000
    assert gpu_check.least_bytes(case) == pytest.approx(moved)
    assert gpu_check.floor_s(case, {"fma_per_s": 1.0, "copy_bytes_per_s": 1e30}) == multiply_adds
    assert gpu_check.floor_s(case, {"fma_per_s": 1e30, "copy_bytes_per_s": 2.0}) == pytest.approx(moved / 2)


def test_ratios_are_to_the_best_float32_pytorch_by_medians():
    case = CASES[1]
    seconds = {"gpu-fused": [1.0, 9.0, 1.0], "torch eager": [8.0], "torch graph": [4.0], "torch graph tf32": [2.0]}
    contestants = [Contestant(name, lambda steps: None, 0.0, 10, times) for name, times in seconds.items()]
    table = gpu_check.rows(case, contestants, floor=1e-4)
    assert [row["times_best_torch"] for row in table] == [4.0, 0.5, 1.0, 2.0]
    assert table[0]["images_per_s"] == 10 * case.batch_size
    assert table[0]["epoch_ms"] == 60_000 / 1000 * 1e3
    assert table[0]["fraction_of_floor"] == pytest.approx(0.1)


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # what two_conv_pool4 asks for
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pytorch_trains_the_same_network(case):
    torch = pytest.importorskip("torch")
    case = dataclasses.replace(case, batch_size=4)
    model = gpu_check.torch_model(case.network)
    assert sum(p.numel() for p in model.parameters()) == case.network.parameter_count
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (12, 28, 28, 1), np.uint8), rng.integers(0, 10, 12)
    with torch.random.fork_rng():
        contestant = gpu_check.peer("channels_last", case, images, labels, device="cpu")
    contestant.settle(most=3)
    assert 1 <= contestant.steps <= 3


def test_every_kind_of_layer_is_held_to_the_oracle():
    layers = {type(layer).__name__ for network, _, _ in CONFORMANCE.values() for layer in network.layers}
    assert layers == {"Conv2d", "ReLU", "Sigmoid", "MaxPool2d", "AvgPool2d", "Flatten", "Linear"}
