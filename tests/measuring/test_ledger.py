import itertools
import math
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from fakes import FakeClock, FakeProgram
from tables import each

from cnnexp import SGD, AvgPool2d, Conv2d, Flatten, Linear, Loss, MaxPool2d, Network, ReLU, Residual, Sigmoid, Totals
from cnnexp.backends import backend_class
from cnnexp.measuring import roofline
from cnnexp.measuring.amdahl import amdahl_limit
from cnnexp.measuring.ledger import REST, Ledger, Profiled, metrics, report, report_beside
from cnnexp.measuring.roofline import machine_limits, roofs, work_per_image
from cnnexp.network.shapes import walk

NETWORK = Network((12, 12, 2), (Conv2d(4, 3), ReLU(), MaxPool2d(2), Flatten(), Linear(6), Sigmoid(), Linear(3)))
LAYERS = [stage for stage in NETWORK.stages if not isinstance(stage.layer, Flatten)]
PASSES = [*itertools.product(LAYERS, ("forward", "backward"))]


def test_inner_spans_stop_the_outer_one_and_one_that_raises_is_closed():
    clock = FakeClock()
    ledger = Ledger(clock)
    clock.advance(1)
    with ledger.span("train"):
        clock.advance(2)
        with ledger.span("forward", "conv1"):
            assert ledger.inside("train")
            clock.advance(4)
        clock.advance(8)
    assert not ledger.inside("train")
    clock.advance(16)
    assert ledger.close() == 31
    assert ledger.seconds == {REST: 17, ("train", ""): 10, ("forward", "conv1"): 4}

    clock = FakeClock()
    ledger = Ledger(clock)

    def fail():
        with ledger.span("train"):
            clock.advance(3)
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    clock.advance(1)
    assert ledger.close() == 4
    assert ledger.seconds[("train", "")] == 3


def compiled(backend, ledger=None):
    program = backend.compile(NETWORK, Loss.SOFTMAX_CROSS_ENTROPY, SGD(), 16)
    if ledger is not None:
        program = Profiled(program, ledger)
    program.restore({"parameters": NETWORK.initial_parameters(0)})
    rng = np.random.default_rng(0)
    return program, program.load(rng.random((64, *NETWORK.input_shape), np.float32), rng.integers(0, 3, 64))


def profiled(name: str, clocked: bool = False) -> tuple[dict, Profiled]:
    """Train a backend for two short epochs, its clock one that ticks when looked at; return the profile and program."""
    backend = backend_class(name)()
    ledger = Ledger(time.perf_counter if clocked else itertools.count().__next__)
    with ledger.span("compile"):
        program, handle = compiled(backend.clocked if clocked else backend, ledger)
    for _ in range(2):
        program.train(handle, np.arange(64), 0.1)
        program.predict(handle)
    epochs = [SimpleNamespace(train=Totals(1.0, 1, 64), epoch_s=0.5)] * 2
    found = report(ledger, program, epochs, backend)
    program.close()
    return found, program


def test_every_layer_and_pass_of_a_layerwise_program_is_clocked_and_no_number_changes():
    found, watched = profiled("numpy")
    assert found["layered"]
    assert sum(entry["seconds"] for entry in found["entries"]) == pytest.approx(found["wall_s"])
    assert found["accounted"] >= 0.95
    clocked = {(layer["name"], layer["pass"]) for layer in found["layers"]}
    assert clocked == {(stage.name, what) for stage, what in PASSES}
    whats = {entry["what"] for entry in found["entries"]}
    assert {"compile", "transfer", "evaluate", "gather", "update"} <= whats
    assert 0 < found["parallel_share"] < 1
    named = metrics(found)
    (conv,) = (s for s in found["layers"] if (s["name"], s["pass"]) == ("conv1", "backward"))
    assert named["profile/conv1/backward_ms"] == pytest.approx(1e3 * conv["seconds"] / 128)
    shares = [value for name, value in named.items() if name.startswith("profile/share/")]
    assert sum(shares) == pytest.approx(found["parallel_share"]) == named["profile/parallel_share"]
    assert named["profile/share/linear/forward"] > 0
    program, handle = compiled(backend_class("numpy")())
    for _ in range(2):
        program.train(handle, np.arange(64), 0.1)
    assert np.array_equal(watched.state()["parameters"], program.state()["parameters"])


def test_a_fused_program_is_one_entry():
    found, _ = profiled("cpu-simd")
    assert not found["layered"]
    assert "parallel_share" not in found
    assert {entry["what"] for entry in found["entries"] if entry["seconds"]} >= {"train", "evaluate", "compile"}
    named = metrics(found)
    assert named["profile/train_s"] > 0
    assert not any(name.startswith("profile/share/") for name in named)
    # multiply-adds that the shapes need, over what a matrix product of NumPy's reaches here in the same seconds
    flops = 128 * sum(work_per_image(stage, what, 16, needs_dx=stage.name != "conv1")[0] for stage, what in PASSES)
    reached = flops / named["profile/train_s"] / 1e9
    assert named["profile/share_of_gflops"] == pytest.approx(reached / found["machine"]["gflops"])


def test_the_share_of_the_limit_counts_the_layers_within_a_residual(monkeypatch):
    layers = Residual((Conv2d(4, 3, padding="same"),)), Flatten(), Linear(3)
    monkeypatch.setattr(sys.modules[__name__], "NETWORK", network := Network((6, 6, 4), layers))
    found, _ = profiled("cpu-simd")
    passes = itertools.product(walk(network.stages), ("forward", "backward"))
    flops = 128 * sum(work_per_image(stage, what, 16, not stage.name.endswith("conv1"))[0] for stage, what in passes)
    reached = flops / metrics(found)["profile/train_s"] / 1e9
    assert found["share_of_gflops"] == pytest.approx(reached / found["machine"]["gflops"])


def test_a_fused_program_that_clocks_itself_tells_its_groups_of_layers():
    found, program = profiled("cpu-simd", clocked=True)
    assert found["layered"]
    own = dict(program.clocked())
    entries = {(entry["what"], entry["layer"]): entry["seconds"] for entry in found["entries"]}
    assert sum(entries.values()) == pytest.approx(found["wall_s"])
    step = sum(entries[part.what, part.name] for part in {(p.what, p.name): p for p in own}.values())
    assert step == pytest.approx(sum(own.values())), "the parts are taken out of the step's one entry"
    layers = {(layer["name"], layer["pass"]): layer for layer in found["layers"]}
    assert {("conv1 relu1 maxpool1", "forward"), ("linear2", "backward")} <= layers.keys()
    conv = layers["conv1 relu1 maxpool1", "backward"]
    assert conv["multiply_adds"] in (128 * 100 * 4 * 18, 128 * 25 * 4 * 18), "all outputs, or each window's maximum"
    # the input, the pooled output, and twice the weights once a batch
    assert conv["bytes"] == 128 * 4 * (288 + 100 + 2 * 76 / 16)
    assert sum(conv["kernels"].values()) == pytest.approx(conv["seconds"])
    assert conv["at_once"]
    seconds, flops = (sum(layer[what] for layer in found["layers"]) for what in ("seconds", "flops"))
    done = flops / (seconds / found["parallel_share"]) / 1e9
    assert found["share_of_gflops"] == pytest.approx(done / found["machine"]["gflops"]), "not of what is left out"
    named = metrics(found)
    assert named["profile/conv1 relu1 maxpool1/backward_ms"] == pytest.approx(1e3 * conv["seconds"] / 128)
    assert 0 < named["profile/parallel_share"] < 1


def test_a_baseline_is_told_as_a_run_is():
    clock = FakeClock()
    program = Stepper(clock)
    beside = Profiled(program, Ledger(clock), train="baseline")
    backend = SimpleNamespace(name="cpu", threads=1, on_gpu=False)
    epochs = [SimpleNamespace(train=Totals(1.0, 1, 50), comparison=None)]
    assert report_beside(beside, backend, epochs) is None
    beside.layers_share("handle", np.arange(4), 0.1)
    beside.layers_share("handle", np.arange(4), 0.1)
    epochs.append(SimpleNamespace(train=Totals(1.0, 1, 50), comparison=SimpleNamespace(seconds_per_image=0.002)))
    found = report_beside(beside, backend, epochs)
    assert (found["us_per_image"], found["images"]) == (2000.0, 100)
    entries = {(entry["what"], entry["layer"]): entry["seconds"] for entry in found["entries"]}
    assert sum(entries.values()) == pytest.approx(0.2), "shares of the steps that were clocked, of the median"
    assert entries["backward", "conv1"] == pytest.approx(0.2 * 12 / 20)
    conv = next(layer for layer in found["layers"] if layer["pass"] == "backward")
    assert conv["multiply_adds"] == 100 * 100 * 4 * 18


class Stepper:
    """A layerwise program whose passes take what the test says."""

    network, batch_size = NETWORK, 4

    def __init__(self, clock):
        self.clock, self.heard = clock, None

    def watch(self, watch):
        self.heard = watch
        return True

    def train(self, handle, order, rate):
        self.clock.advance(0.5)  # between the layers
        passes = [("batch", "gather", 1), ("conv1", "forward", 4), ("loss", "forward", 2), ("conv1", "backward", 12)]
        for layer, what, seconds in [*passes, ("parameters", "update", 0.5)]:
            with self.heard(layer, what):
                self.clock.advance(seconds)


def test_the_layers_share_of_a_step_is_that_of_their_passes_alone_and_a_fused_one_has_none():
    clock = FakeClock()
    ledger, program = Ledger(clock), Stepper(clock)
    baseline = Profiled(program, ledger, train="baseline")
    assert baseline.layers_share("handle", np.arange(4), 0.1) == pytest.approx((4 + 12) / 20)
    assert ledger.seconds[("baseline", "")] == 20  # and none of it under the run's own entries
    assert set(ledger.seconds) == {REST, ("baseline", "")}
    assert program.heard is None  # steps that are timed are not clocked inside

    clock = FakeClock()
    program = FakeProgram(clock, 0.1)
    assert Profiled(program, Ledger(clock), train="baseline").layers_share(None, np.arange(4), 0.1) is None
    assert not program.orders  # and is not trained for nothing


@each(
    # 6x6 outputs of 4 filters, each 3x3x2 multiply-adds
    (Conv2d(4, 3), (8, 8, 2), "forward", {}, 2 * 36 * 4 * 18, 128 + 144 + 76),
    (Conv2d(4, 3), (8, 8, 2), "backward", {}, 2 * 2 * 36 * 4 * 18, 128 + 144 + 2 * 76 + 128),
    (Conv2d(4, 3), (8, 8, 2), "backward", {"needs_dx": False}, 2 * 36 * 4 * 18, 128 + 144 + 2 * 76),
    (Linear(5), (7,), "forward", {}, 2 * 35, 7 + 5 + 40),
    (Linear(5), (7,), "forward", {"batch_size": 10}, 2 * 35, 7 + 5 + 4),  # weights are read once a batch
    (MaxPool2d(2), (4, 4, 3), "forward", {}, 4 * 12, 48 + 12 + 12),
    (MaxPool2d(2), (4, 4, 3), "backward", {}, 12, 48 + 12 + 12),
    (AvgPool2d(2), (4, 4, 3), "forward", {}, 4 * 12, 48 + 12),
    (ReLU(), (4, 4, 3), "forward", {}, 48, 96),
    (ReLU(), (4, 4, 3), "backward", {}, 48, 144),
    (Sigmoid(), (4, 4, 3), "forward", {}, 4 * 48, 96),
)
def test_operations_and_bytes_by_hand(layer, shape, what, options, flops, numbers):
    network = Network(shape, (layer, Flatten(), Linear(1)) if len(shape) == 3 else (layer,))
    assert work_per_image(network.stages[0], what, **{"batch_size": 1, **options}) == (flops, 4 * numbers)


def test_machine_limits_are_measured_and_some_where_no_cache_is_known(tmp_path, monkeypatch):
    sizes = ("Data", 1, "32K"), ("Instruction", 1, "64K"), ("Unified", 2, "512K"), ("Unified", 3, "16M")
    for i, facts in enumerate(sizes):
        (tmp_path / f"index{i}").mkdir()
        for name, fact in zip(("type", "level", "size"), facts, strict=True):
            (tmp_path / f"index{i}" / name).write_text(f"{fact}\n")
    monkeypatch.setattr(roofline.cores, "CACHES", tmp_path)
    assert roofline.cores.cache_sizes(tmp_path) == {1: 32 << 10, 2: 512 << 10, 3: 16 << 20}
    measured = {}
    monkeypatch.setattr(roofline, "_gb_per_s", lambda size, threads: measured.setdefault(size, 1.0 + threads))
    assert list(machine_limits(2)) == ["gflops", "gb_per_s", "l3_gb_per_s", "l2_gb_per_s", "l1_gb_per_s"]
    assert list(measured) == [1 << 26, 2 << 20, 384 << 10, 24 << 10], "what a thread works on fits where it is meant to"
    assert "l3_gb_per_s" not in machine_limits(4), "a thread's share of it is hardly more than its second cache"
    assert list(roofs(machine_limits(2))) == ["memory", "L3 cache", "L2 cache", "L1 cache"]

    monkeypatch.setattr(roofline.cores, "CACHES", tmp_path / "nothing")
    limits = machine_limits(2)
    assert set(limits) == {"gflops", "gb_per_s"}
    assert all(0.1 < value < 1e6 for value in limits.values())


@each((0.0, 8, 1.0), (1.0, 8, 8.0), (0.5, math.inf, 2.0), (0.9801, 768, 47.2))
def test_amdahls_law(share, speedup, expected):
    assert amdahl_limit(share, speedup) == pytest.approx(expected, abs=0.05)
