"""`benchmarks/gpu_check.py` where there is no GPU: what it counts, what it prints, and that its PyTorch trains."""

import dataclasses
import json
import math
import os
import re
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from commands import often, python
from conformance import is_here

from benchmarks import gpu_check
from benchmarks.gpu_check import CASES, CONFORMANCE, Contestant
from cnnexp.backends.gpu.device import Gpu
from softgpu import SoftGpu

NAMED = {case.name: case for case in CASES}


@pytest.mark.skipif(is_here("gpu-naive"), reason="this machine has a GPU")
def test_without_a_gpu_it_says_what_is_missing(capsys):
    assert gpu_check.main([]) == 4
    assert re.fullmatch(".*no GPU to compute on.*cpu-parallel.*cpu-simd.*\n", capsys.readouterr().err)


def test_the_floor_is_counted_by_hand_and_ratios_are_to_the_best_float32_pytorch():
    case = NAMED["one_conv-f256-b1000"]
    # forward 26 * 26 * 9 * 256 and 43264 * 10; the filters' gradient through 13 * 13 places, the linear layer's twice
    multiply_adds = 26 * 26 * 9 * 256 + 13 * 13 * 9 * 256 + 3 * 432_640
    # bytes twice; a float and a byte per pooled value, out and in; the parameters and their gradient, out and in
    moved = 2 * 784 + 2 * 5 * 43_264 + 4 * 4 * 435_210 / 1000
    assert gpu_check.least_bytes(case) == pytest.approx(moved)
    assert gpu_check.floor_s(case, {"fma_per_s": 1.0, "copy_bytes_per_s": 1e30}) == multiply_adds
    assert gpu_check.floor_s(case, {"fma_per_s": 1e30, "copy_bytes_per_s": 2.0}) == pytest.approx(moved / 2)

    case = NAMED["one_conv-f32-b100"]
    seconds = {"gpu-fused": [1.0, 9.0, 1.0], "torch eager": [8.0], "torch graph": [4.0], "torch graph tf32": [2.0]}
    contestants = [Contestant(name, lambda steps: None, 0.0, 10, times) for name, times in seconds.items()]
    table = gpu_check.rows(case, contestants, floor=1e-4)
    assert [row["times_best_torch"] for row in table] == [4.0, 0.5, 1.0, 2.0]
    assert table[0]["images_per_s"] == 10 * case.batch_size
    assert table[0]["epoch_ms"] == 60_000 / 1000 * 1e3
    assert table[0]["fraction_of_floor"] == pytest.approx(0.1)


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # what two_conv_pool4 asks for
@pytest.mark.parametrize("name", often(NAMED, [CASES[0].name]))
def test_pytorch_trains_the_same_network(name):
    torch = pytest.importorskip("torch")
    case = dataclasses.replace(NAMED[name], batch_size=4)
    layers = pytest.importorskip("benchmarks.torch_peer").modules(case.network.stages, channels_last=True)
    assert sum(p.numel() for layer in layers for p in layer.parameters()) == case.network.parameter_count
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (12, *case.network.input_shape), np.uint8), rng.integers(0, 10, 12)
    with torch.random.fork_rng():
        contestant = gpu_check.peer("channels_last", case, images, labels, device="cpu")
    contestant.settle(most=3)
    assert 1 <= contestant.steps <= 3


def test_every_kind_of_layer_is_held_to_the_oracle():
    layers = {type(layer).__name__ for network, _, _ in CONFORMANCE.values() for layer in network.layers}
    assert layers >= {"Conv2d", "ReLU", "Sigmoid", "MaxPool2d", "AvgPool2d", "Flatten", "Linear"}


@pytest.mark.slow
def test_a_dry_run_goes_all_the_way_on_the_software_gpu_with_no_more_than_it_says_it_needs(tmp_path):
    for absent in ("hydra", "omegaconf", "mlflow", "matplotlib", "sklearn", "pooch", "PIL", "rich", "yaml"):
        (tmp_path / f"{absent}.py").write_text(f"raise ImportError('{absent} is not there')")
    environment, out = SoftGpu().environment(), tmp_path / "dry.json"
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    command = "-m", "benchmarks.gpu_check", "--dry-run", "--quick", "--peers", f"--out={out}"
    python(*command, env=environment)
    report = json.loads(out.read_text())
    assert report["conformance"] == {"gpu-fused": {"one_of_all": "ok", "graphs and single launches": "ok"}}
    assert {"fma_per_s", "copy_bytes_per_s", "launch_us_4_arrays"} <= set(report["ceilings"])
    (row,) = report["table"]
    assert row["contestant"] == "gpu-fused"
    assert len(report["raw"]["tiny-b4"]["gpu-fused"]["seconds"]) == 2


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A made-up GPU and contestants; what would run apart runs here. Return what sets more, and the report's file."""
    gpu = Gpu(0, "a GPU", (9, 0), (13, 0), (13, 0), 132, 1024, 48 * 1024)

    def replaced(**others):
        for name, value in others.items():
            monkeypatch.setattr(gpu_check, name, value)

    replaced(
        backend_class=lambda name: lambda: SimpleNamespace(gpu=gpu),
        apart=lambda work, *arguments: work(*arguments),
        conform=lambda name, titles: {"small": "ok"},
        measure_ceilings=lambda effort: ({"fma_per_s": 1.0}, {}),
        ours=lambda name, *case: Contestant(name, lambda steps: None, 0.0),
        peer=lambda name, *case: Contestant(f"torch {name}", lambda steps: None, 0.0),
        find_spec=lambda name: True,
        _device_works=lambda: True,
        CASES=CASES[:2],
        EPOCH=1000,
    )
    return replaced, tmp_path / "new" / "report.json"


def failing(errors):
    """Return `ours` of contestants whose first step raises."""
    return lambda name, *case: Contestant(name, MagicMock(side_effect=errors.get(name)), 0.0)


def test_one_backend_that_fails_costs_no_other_its_numbers(machine, capsys):
    replaced, out = machine
    errors = {"gpu-shared": RuntimeError("out of memory\nand so on"), "gpu-naive": TypeError("does not compile")}

    def conform(name, titles):
        if name == "gpu-naive":
            raise OSError("the process died")
        return {"small": "wrong"} if name == "gpu-tuned" else {"small": "ok"}

    replaced(conform=conform, ours=failing(errors))
    assert gpu_check.main([f"--out={out}"]) == 1
    report, told = json.loads(out.read_text()), capsys.readouterr().out
    assert report["conformance"]["gpu-naive"] == {"the process": "OSError: the process died"}
    assert report["conformance"]["gpu-fused"] == {"small": "ok"}
    raced = {"gpu-shared-input", "gpu-tuned", "gpu-fused"} | {f"torch {name}" for name in gpu_check.TORCH}
    for case in CASES[:2]:
        failed = {"gpu-naive": "TypeError: does not compile", "gpu-shared": "RuntimeError: out of memory"}
        assert report["failed"][case.name] == failed
        assert set(report["raw"][case.name]) == raced
    assert "NOT OK  gpu-tuned: small: wrong" in told
    assert all(row["fraction_of_floor"] is None for row in report["table"])  # the bandwidth was not measured


def test_what_torch_lacks_is_told_and_not_held_against_us(machine, capsys):
    replaced, out = machine
    replaced(peer=MagicMock(side_effect=RuntimeError("no compiler")))
    assert gpu_check.main([f"--out={out}"]) == 0
    assert "torch compile: RuntimeError: no compiler" in capsys.readouterr().out


def test_after_a_fault_that_spoils_the_device_the_others_race_in_a_new_process(machine):
    replaced, out = machine
    race = MagicMock(side_effect=gpu_check.race)
    ours = failing({"gpu-shared": RuntimeError("an illegal memory access was encountered")})
    replaced(race=race, ours=ours, _device_works=lambda: False)
    assert gpu_check.main(["--peers", f"--out={out}"]) == 1
    without = tuple(name for name in gpu_check.BACKENDS if name != "gpu-shared")
    assert [call.args[1] for call in race.call_args_list] == [gpu_check.BACKENDS, without] * 2
    assert list(json.loads(out.read_text())["raw"][CASES[0].name]) == list(without)


def test_a_report_grows_by_cases_and_backends_and_nothing_is_done_twice(machine, capsys):
    (replaced, out), done = machine, []

    def race(case, names, peers, repeats, epoch):
        written = json.loads(out.read_text())  # after every part
        assert written["ceilings"] == {"fma_per_s": 1.0}
        assert set(names) <= written["conformance"].keys()
        done.append((case.name, names))
        return [Contestant(name, None, 0.0, 1, [1.0]) for name in names], {}

    replaced(conform=lambda name, titles: done.append(name) or {"small": "ok"}, race=race)
    first, second = (case.name for case in CASES[:2])
    command = ["--peers", f"--out={out}"]
    one = [*command, "--backends", "gpu-naive", "--cases", first]
    assert gpu_check.main([*one, "--minutes=-1"]) == 0
    left = f"left for another run of the same command: conformance of gpu-naive, ceilings, {first}\n"
    assert left in capsys.readouterr().out
    assert done == []
    for _ in range(2):
        assert gpu_check.main(one) == 0
    assert done == ["gpu-naive", (first, ("gpu-naive",))]
    assert gpu_check.main([*command, "--backends", "gpu-fused"]) == 0
    assert done[2:] == ["gpu-fused", (first, ("gpu-naive", "gpu-fused")), (second, ("gpu-fused",))]
    report = json.loads(out.read_text())
    raced = [(row["case"], row["contestant"]) for row in report["table"]]
    assert raced == [(first, "gpu-naive"), (first, "gpu-fused"), (second, "gpu-fused")]
    assert len(report["runs"]) == 4
    out.write_text(json.dumps({**report, "gpu": {"name": "another"}}))
    assert gpu_check.main(one) == 2
    assert "is of another gpu; add --out=FILE" in capsys.readouterr().err


def test_a_process_that_dies_is_an_error_and_takes_no_one_with_it():
    with pytest.raises(Exception, match="terminated abruptly"):
        gpu_check.apart(os._exit, 3)
    assert gpu_check.apart(math.hypot, 3, 4) == 5
