"""What is particular to `cpu-simd`; the contract it shares with all backends is in test_conformance."""

import _thread
import gc
import hashlib
import os
import platform
import subprocess
import sys
import threading
import time
import tracemalloc
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from conformance import check_case, check_training, make_case
from numba import float32, int64, njit

from cnnexp.backends import cache, simd
from cnnexp.backends.cpu import dispatchers
from cnnexp.backends.cpu.dispatchers import load_or_compile
from cnnexp.backends.simd import CpuSimd
from cnnexp.backends.simd.algorithms import update
from cnnexp.backends.simd.compiler import intrinsics
from cnnexp.backends.simd.compiler.compose import compose
from cnnexp.backends.simd.compiler.emit import INDEX, Target
from cnnexp.backends.simd.compiler.host import cache_bytes, host_target
from cnnexp.backends.simd.compiler.intrinsics import NEEDS
from cnnexp.backends.simd.compiler.trace import exp
from cnnexp.backends.simd.layouts import round_up
from cnnexp.backends.simd.lowering import Plan
from cnnexp.backends.simd.planner import allowed, split
from cnnexp.backends.simd.runtime.limit import CHAINS, fma_loop
from cnnexp.backends.simd.runtime.program import SimdProgram, make_plan, paying_threads
from cnnexp.backends.simd.runtime.thread_pool import ThreadPool
from cnnexp.errors import DataError
from cnnexp.network import AvgPool2d, Conv2d, Flatten, Linear, MaxPool2d, Network, ReLU, Sigmoid
from cnnexp.network.losses import Loss
from cnnexp.network.models import OneConv, TwoConvMlp, TwoConvPool4
from cnnexp.optimizers import OPTIMIZERS, SGD, Adam

AVX2 = Target(lanes=8, registers=16, features=("avx", "avx2"))
AVX512 = Target(lanes=16, registers=32, features=("avx2", "avx512f"))
TARGETS = {
    "sse": Target(lanes=4, registers=16),
    "neon": Target(lanes=4, registers=32),
    "avx2": Target(lanes=8, registers=16),
    "wide": Target(lanes=16, registers=32),
}
TINY = Network((2,), (Linear(3), ReLU(), Linear(2)))
SPARSE = Network(
    (12, 12, 1),
    (
        *(Conv2d(8, 3), ReLU(), Conv2d(6, 3, padding="valid"), ReLU(), MaxPool2d(2, padding="valid", stride=3)),
        *(Flatten(), Linear(21), ReLU(), Linear(5, bias=False)),
    ),
)
FILTERS = Network((10, 8, 1), (Conv2d(32, 3, padding="same"), ReLU(), MaxPool2d(2), Flatten(), Linear(10)))
WINDOWS = Network(
    (30, 27, 1),
    (
        *(Conv2d(5, 2), ReLU(), MaxPool2d(4, padding="floor"), Conv2d(7, 2), MaxPool2d(3, padding="floor"), ReLU()),
        *(Flatten(), Linear(3)),
    ),
)
GENERAL = Network(
    (7, 9, 2),
    (
        *(Conv2d(5, 3, 2, "auto"), Sigmoid(), AvgPool2d(3, 2, "auto"), Conv2d(3, 2, 1, "full"), MaxPool2d(2, 1)),
        *(Flatten(), Linear(17), Sigmoid(), Linear(14)),
    ),
)


@dataclass
class OnTarget:
    """A backend for a CPU that this one may not be: LLVM splits or joins the vectors as it must."""

    target: Target
    threads: int = 2

    def compile(self, network, loss, optimizer, batch_size):
        return SimdProgram(network, loss, optimizer, batch_size, self.target, self.threads)


def computed(network, target, algorithm):
    """Return the target on which every convolution is computed by one algorithm."""
    names = [stage.name for stage in network.stages if isinstance(stage.layer, Conv2d)]
    return replace(target, forced=tuple((name, algorithm) for name in names))


def thorough(value):
    """Return a parameter that not every run of the tests tries."""
    return pytest.param(value, marks=pytest.mark.thorough)


@pytest.mark.parametrize(
    "network",
    [
        pytest.param(SPARSE, id="sparse"),
        pytest.param(FILTERS, id="filters"),
        pytest.param(WINDOWS, id="windows", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("target", ["avx2", *map(thorough, ("sse", "neon", "wide"))])
def test_other_vectors(target, network):
    check_case(OnTarget(TARGETS[target]), make_case(network, images=19))


def test_general_kernels_on_narrow_vectors():
    check_case(OnTarget(TARGETS["sse"]), make_case(GENERAL, images=7))


@pytest.mark.parametrize(
    "conv",
    [
        *(Conv2d(32, 3, stride=1, padding=2), Conv2d(19, 5)),
        *map(thorough, (Conv2d(32, 5), Conv2d(32, 3, padding="same", bias=False))),
        *map(thorough, (Conv2d(50, 3, padding=2), Conv2d(6, 3, padding="same", bias=False))),
    ],
    ids=str,
)
def test_many_filters(conv):
    pool = MaxPool2d(2, padding="valid")
    network = Network((10, 12, 1), (conv, pool, Flatten(), Linear(14), ReLU(), Linear(3)))
    found = allowed(split(network.stages), AVX512, {}, first=True)
    assert ("filters", 1) in [(node.algorithm, node.spans) for node in found]
    check_case(OnTarget(computed(network, host_target(), "filters")), make_case(network, images=5))


@pytest.mark.parametrize("conv", [Conv2d(19, 5), Conv2d(6, 3, padding="same", bias=False)], ids=str)
def test_filters_that_do_not_fill_their_vectors_lead_into_few_outputs(conv):
    network = Network((10, 12, 1), (conv, ReLU(), MaxPool2d(2, padding="valid"), Flatten(), Linear(3)))
    target = replace(host_target(), forced=(("conv1", "filters-fused"),))
    check_case(OnTarget(target), make_case(network, images=5))


@pytest.mark.skipif(not set(AVX2.features) <= set(host_target().features), reason="needs a CPU with AVX2")
@pytest.mark.parametrize("algorithm", ["filters", "filters-fused"])
@pytest.mark.parametrize(
    "conv",
    [
        *(Conv2d(24, 3, 2, "floor"), Conv2d(19, 3, padding="same")),
        *map(thorough, (Conv2d(8, 3, padding="same"), Conv2d(32, 2, padding="valid"), Conv2d(24, 1))),
        *map(thorough, (Conv2d(8, 1, 2, "floor"), Conv2d(5, 2, padding="valid"))),
    ],
    ids=str,
)
def test_windows_of_four_pixels_on_avx2(conv, algorithm):
    channels = {1: 5, 2: 2, 3: 1}[conv.kernel]
    layers = conv, ReLU(), MaxPool2d(2, padding="floor"), Flatten(), Linear(3)
    network, target = Network((9, 12, channels), layers), replace(AVX2, forced=(("conv1", algorithm),))
    node = Plan(network, target, 1, 5).nodes[0]
    assert getattr(node, "conv", node).bank.gather == "pick"
    check_case(OnTarget(target), make_case(network, images=5))


def test_many_channels_in_wide_rows():
    """The sums of a weight gradient and a piece of a row no longer fit L1: both go in parts."""
    first, second = Conv2d(50, 1, padding="valid"), Conv2d(9, 3, padding="same")
    network = Network((5, 12, 1), (first, ReLU(), second, ReLU(), Conv2d(2, 3), Flatten(), Linear(3)))
    check_case(OnTarget(computed(network, host_target(), "lanes")), make_case(network, images=5))


CHANNELS = {
    "pools": (
        (8, 12, 3),
        (
            *(Conv2d(8, 3, padding="same"), ReLU(), Conv2d(11, 3, padding="same"), ReLU(), MaxPool2d(2)),
            *(Conv2d(7, 3), MaxPool2d(2), Flatten(), Linear(3)),
        ),
    ),
    "strides": (
        (9, 7, 3),
        (Conv2d(8, 3, 2, 1), ReLU(), Conv2d(6, 2, 2, "auto"), ReLU(), Conv2d(4, 1, 2, "auto"), Flatten()),
    ),
    "between_other_layers": (
        (6, 5, 4),
        (
            *(ReLU(), Conv2d(4, 3, padding="full"), Conv2d(8, 3, 3, "auto"), AvgPool2d(2, 1), Sigmoid()),
            *(Conv2d(4, 2), Flatten(), Linear(3)),
        ),
    ),
    "general": (GENERAL.input_shape, GENERAL.layers),
}


@pytest.mark.parametrize("target", ["avx2", *map(thorough, ("sse", "wide"))])
@pytest.mark.parametrize("name", CHANNELS)
def test_channels_in_lanes(target, name):
    network = Network(*CHANNELS[name])
    shaped = computed(network, TARGETS[target], "channels")
    check_case(OnTarget(shaped), make_case(network, images=19))


@pytest.mark.parametrize("target", ["avx2", thorough("wide")])
def test_gradients_of_many_channels_follow_the_argmax(target):
    network = Network(
        (9, 13, 2),
        (
            *(Conv2d(24, 3, padding="same"), ReLU(), Conv2d(32, 2), MaxPool2d(2), Conv2d(21, 3, padding="full")),
            *(ReLU(), MaxPool2d(3, padding="floor"), Flatten(), Linear(3)),
        ),
    )
    forced = (("conv1", "channels"), ("conv2", "channels-argmax"), ("conv3", "channels-argmax"))
    shaped = replace(TARGETS[target], forced=forced)
    check_case(OnTarget(shaped), make_case(network, images=19))


def test_wide_layers_of_any_batch():
    """The last tile of images ends with the last one; a wide input gradient takes several groups at a time."""
    network = Network((37,), (Linear(50), ReLU(), Linear(33), ReLU(), Linear(21)))
    for images in (2, 5, 140):
        check_case(OnTarget(host_target(), threads=1), make_case(network, images=images))


def test_threads_are_as_many_as_pay():
    large = Network((28, 28, 1), (Flatten(), Linear(1024), ReLU(), Linear(1024), ReLU(), Linear(10)))
    khandait = Network((2,), (Linear(64), ReLU(), Linear(1), Sigmoid()))
    mlp = TwoConvMlp().network((28, 28, 1), 10)
    smallest = Network((64,), (Linear(30), ReLU(), Linear(10)))
    assert paying_threads(khandait, 50, AVX512, 8) == 1
    assert paying_threads(smallest, 128, AVX512, 8) == 1
    assert paying_threads(khandait, 100_000, AVX512, 8) == 8
    assert paying_threads(mlp, 64, AVX512, 8) == 8
    assert paying_threads(mlp, 1, AVX512, 8) == 1, "one image cannot be shared"
    assert paying_threads(large, 1, AVX512, 2) == 2, "but the update of many parameters can"


@pytest.mark.parametrize(("images", "owns"), [(11, True), (140, False)])
def test_threads_own_wide_weights_where_a_batch_is_one_tile(images, owns):
    network = Network((37,), (Linear(50), ReLU(), Linear(33), ReLU(), Linear(3)))
    backend, case = OnTarget(host_target(), threads=2), make_case(network, images=images)
    plan = make_plan(network, host_target(), -(-(images - 1) // 2))
    assert plan.owns is owns
    assert plan.parameters.owned == (
        sum(round_up(node.panels.size, 16) for node in plan.nodes if node.algorithm == "wide") if owns else 0
    )
    check_training(backend, case, Adam())


def test_caches_are_read_not_assumed(tmp_path):
    kinds = [("1", "Instruction", "64K"), ("1", "Data", "48K"), ("2", "Unified", "512K"), ("3", "Unified", "32M")]
    for index, facts in enumerate(kinds):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, fact in zip(("level", "type", "size"), facts, strict=True):
            (folder / name).write_text(fact + "\n")
    assert cache_bytes(1, tmp_path) == 48 << 10
    assert cache_bytes(2, tmp_path) == 512 << 10
    assert cache_bytes(2, tmp_path / "nothing") > 0


def test_the_papers_networks_get_the_special_kernels():
    one, mlp, pool4 = (
        Plan(model.network((28, 28, 1), 10), AVX512, 1, 16) for model in (OneConv(), TwoConvMlp(), TwoConvPool4())
    )
    assert [node.algorithm for node in one.nodes] == ["filters-fused"]
    row = one.nodes[0].conv.shape[1] * one.nodes[0].conv.shape[2]
    assert one.nodes[0].conv.dy.size == row, "there is room for the gradient of a row of cells alone"
    assert [node.algorithm for node in mlp.nodes if node.trains] == ["lanes", "lanes-argmax", "wide", "skinny"]
    assert [node.algorithm for node in pool4.nodes if node.trains] == ["lanes-pair", "wide", "skinny"]


def test_the_limit_of_the_arithmetic_is_measured():
    (one,), many = CpuSimd(threads=1).limits().values(), CpuSimd(threads=2).limits()
    assert set(many) == {"gflops"}
    assert 0.1 < one < 1e4
    loop, per_turn, lanes = fma_loop()
    assert per_turn == CHAINS * lanes
    assert loop(2) == pytest.approx(sum(chain * 0.999**2 + 0.001 * 1.999 for chain in range(CHAINS)), rel=1e-5)


def test_a_plan_which_outlives_its_program_holds_less_than_a_byte_a_parameter():
    network = Network((1024,), (Linear(1024), ReLU(), Linear(10)))
    tracemalloc.start()
    try:
        plan = Plan(network, AVX512, 1, 16)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < network.parameter_count <= plan.parameters.size


def test_memory_is_bounded_by_the_tile_not_the_batch():
    network = OneConv(filters=256).network((28, 28, 1), 10)
    program = CpuSimd(1).compile(network, Loss.SOFTMAX_CROSS_ENTROPY, SGD(), 1000)
    held = sum(a.nbytes for a in vars(program).values() if isinstance(a, np.ndarray))
    assert held < 30e6
    program.close()


def test_large_windows_and_large_images():
    pool = MaxPool2d(17)  # its codes need more than a byte
    network = Network((17, 34, 1), (Conv2d(3, 1), ReLU(), pool, Flatten(), Linear(3)))
    check_case(OnTarget(host_target()), make_case(network, images=3))
    large = Network((224, 224, 3), (Conv2d(16, 3, padding="same"), ReLU(), MaxPool2d(2), Flatten(), Linear(3, False)))
    assert make_plan(large, AVX512, 256).arena.groups == 1
    assert make_plan(network, AVX512, 256).arena.groups == 2


def test_indices_and_labels_are_checked_before_compiled_code_trusts_them():
    program = CpuSimd(1).compile(TINY, Loss.SOFTMAX_CROSS_ENTROPY, SGD(), 4)
    images = np.zeros((3, 2), np.float32)
    handle = program.load(images, np.array([0, 1, 1]))
    for order in ([0, 3], [-1]):
        with pytest.raises(IndexError, match="there are 3"):
            program.train(handle, np.array(order), 0.1)
        with pytest.raises(IndexError, match="there are 3"):
            program.gradients(handle, np.array(order))
    for labels in ([0, 1, 2], [0, -1, 1]):
        with pytest.raises(DataError, match="2 classes"):
            program.load(images, np.array(labels))
    program.close()


def test_more_threads_than_images_and_batches_beyond_one_tile():
    case = make_case(TINY, images=9000)
    program = OnTarget(host_target(), threads=3).compile(TINY, case.loss, SGD(), 1)
    program.restore({"parameters": case.parameters})
    handle = program.load(case.images, case.labels)
    totals = program.train(handle, np.arange(5), 0.1)
    assert totals.count == 5
    one = OnTarget(host_target(), threads=1).compile(TINY, case.loss, SGD(), 1)
    one.restore({"parameters": case.parameters})
    np.testing.assert_allclose(one.train(handle, np.arange(5), 0.1).loss, totals.loss, rtol=1e-6)
    one.restore(program.state())
    np.testing.assert_array_equal(one.predict(handle), program.predict(handle))


def test_a_missing_number_reaches_the_loss():
    # a maximum over a window drops it in any order of comparison but one
    network = Network((6, 6, 1), (Conv2d(2, 1), ReLU(), MaxPool2d(3), Flatten(), Linear(2)))
    case = make_case(network)
    program = CpuSimd(1).compile(network, case.loss, SGD(), 5)
    program.restore({"parameters": case.parameters})
    for pixel in range(9):
        images = case.images.copy()
        images[2, pixel // 3, pixel % 3] = np.nan
        assert np.isnan(program.train(program.load(images, case.labels), np.arange(5), 0.0).loss)
        program.restore({"parameters": case.parameters})
    assert np.isfinite(program.train(program.load(case.images, case.labels), np.arange(5), 0.0).loss)
    program.close()


@pytest.fixture
def no_collection():
    """Keep the garbage collector still: in the callback that Hypothesis hangs on it, Python swallows a Ctrl-C."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_ctrl_c_ends_training_soon_and_leaves_the_program_whole():
    case = make_case(TINY, images=2000)
    program = OnTarget(host_target()).compile(TINY, case.loss, SGD(), 8)
    program.restore({"parameters": case.parameters})
    handle = program.load(case.images, case.labels)
    order = np.random.default_rng(0).integers(0, 2000, 60_000_000)

    def interrupt():
        while not program._step:
            time.sleep(0.01)
        _thread.interrupt_main()

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        program.train(handle, order, 0.01)
    state = program.state()
    assert 0 < state["step"] < len(order) / 8 / 2  # what had begun was finished, and no more
    np.testing.assert_array_equal(program.state()["parameters"], state["parameters"])
    assert program.train(handle, order[:80], 0.01).count == 80
    assert program.state()["step"] == state["step"] + 10
    program.close()


@pytest.mark.usefixtures("no_collection")
def test_an_interrupted_pool_finishes_its_task_first():
    pool, entered, interrupted, seen = ThreadPool(2), threading.Barrier(3), threading.Event(), []

    def task(rank):
        entered.wait()
        interrupted.wait()
        seen.append(rank)

    def interrupt():
        entered.wait()
        _thread.interrupt_main()
        interrupted.set()

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        pool.run(task)
    pool.drain()
    assert sorted(seen) == [0, 1]
    pool.close()
    pool.close()


def test_threads_end_with_the_program():
    def mine():
        return {t for t in threading.enumerate() if t.name.startswith("cpu-simd")} - others

    others = set(threading.enumerate())
    case = make_case(TINY)
    program = OnTarget(host_target()).compile(TINY, case.loss, SGD(), 8)
    program.predict(program.load(case.images, case.labels))
    assert len(mine()) == 2
    del program
    gc.collect()
    deadline = time.monotonic() + 60
    while mine() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not mine()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_traced_rule_rounds_as_numpy_does(name):
    optimizer = OPTIMIZERS[name](weight_decay=0.01)
    if hasattr(optimizer, "momentum"):
        optimizer = replace(optimizer, momentum=0.9)
    compiled = compose("update", host_target(), [("update", lambda k: update.update(k, optimizer))])

    @njit
    def run(w, g, s, t, numbers):
        compiled(w, g, s, t, numbers, len(w))

    rng = np.random.default_rng(0)
    w, g, s, t = rng.random((4, 64), np.float32) + np.float32(0.1)
    expected, slots = w.copy(), [s.copy(), t.copy()][: len(optimizer.slots)]
    optimizer.apply(expected, g, slots, 0.01, 3)
    run(w, g, s, t, np.array([0.01, *optimizer.constants(3)], np.float32))
    np.testing.assert_array_equal(w, expected)
    for actual, wanted in zip((s, t), slots, strict=False):
        np.testing.assert_array_equal(actual, wanted)
    assert not g.any(), "gradients are cleared for the next step"


def test_exp_is_as_accurate_as_it_says():
    def kernel(k):
        with k.loop(k.groups(k.lanes)) as i:
            k.store(exp(k, k.load(k.parameters.at(i, k.lanes))), k.gradients.at(i, k.lanes))

    compiled = compose("exp", host_target(), [("exp", kernel)])

    @njit
    def run(x, y):
        compiled(x, y, y, len(x))

    x = np.linspace(-87, 80, 1 << 16).astype(np.float32)
    y = np.empty_like(x)
    run(x, y)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(y - exact) / exact).max() < 1e-7
    x = np.repeat(np.float32([np.nan, -1e30, -np.inf, -200, 0]), 16)
    y = np.empty_like(x)
    run(x, y)
    np.testing.assert_array_equal(y[::16], [np.nan, 0, 0, 0, 1])


PLAIN = [Target(lanes, 16) for lanes in (4, 8, 16)]
NATIVE = [t for t in (AVX2, AVX512) if set(t.features) <= set(host_target().features)]


@pytest.mark.parametrize("target", [*PLAIN, *NATIVE], ids=str)
def test_lanes_under_a_mask_come_together(target):
    def kernel(k):
        count = k.variable(INDEX(0))
        with k.loop(k.groups(k.lanes)) as i:
            x = k.load(k.parameters.at(i, k.lanes))
            alive = k.builder.fcmp_unordered("!=", x, k.zero())
            twice = k.add(x, x)
            count.set(k.append(alive, count.get(), [(x, k.gradients), (twice, k.arena)]))

    compiled = compose("append", target, [("append", kernel)])

    @njit
    def run(x, y, z):
        compiled(x, y, z, len(x))

    every_mask = (np.arange(1 << min(target.lanes, 8))[:, None] >> np.arange(target.lanes) % 8) & 1
    x = (every_mask * np.arange(1, every_mask.size + 1).reshape(every_mask.shape)).astype(np.float32).ravel()
    y, z = np.zeros((2, len(x) + target.lanes), np.float32)
    run(x, y, z)
    alive = x[x != 0]
    np.testing.assert_array_equal(y[: len(alive)], alive)
    np.testing.assert_array_equal(z[: len(alive)], 2 * alive)


def test_an_intrinsic_without_its_feature_is_refused():
    """LLVM would end the process."""
    for name, feature in NEEDS.items():
        with pytest.raises(ValueError, match=f"{name} needs {feature}"):
            intrinsics.call(None, ("neon",), name, None, [])
    with pytest.raises(KeyError, match="experimental"):
        intrinsics.call(None, ("avx512f",), "llvm.experimental.vector.compress.v8f32", None, [])


def tripled(key):
    def triple(x):
        return 3 * x

    triple.__qualname__ = f"triple_{key}"
    return njit(triple)


TRIPLE = float32(float32)


def test_the_cache_compiles_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(dispatchers, "_ready", {})
    assert load_or_compile(tripled, TRIPLE, "a")(np.float32(2)) == 6
    (file,) = cache.cache_folder().iterdir()
    content = file.read_bytes()

    monkeypatch.setattr(dispatchers, "_ready", {})
    monkeypatch.setattr(cache, "write_private", lambda *_: pytest.fail("compiled again"))
    assert load_or_compile(tripled, TRIPLE, "a")(np.float32(2)) == 6
    monkeypatch.undo()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for damaged in (content[:-1], b"", content[:40] + b"x" + content[41:]):
        file.write_bytes(damaged)
        monkeypatch.setattr(dispatchers, "_ready", {})
        assert load_or_compile(tripled, TRIPLE, "a")(np.float32(2)) == 6
        replaced = file.read_bytes()
        digest, body = replaced[: cache.DIGEST_BYTES], replaced[cache.DIGEST_BYTES :]
        assert digest == hashlib.sha256(body).digest()


def test_the_cache_tells_programs_cpus_and_sources_apart(tmp_path, monkeypatch):
    assert set(Path(simd.__file__).parent.rglob("*.py")) < set(cache.source_files())
    key = cache.program_key(TRIPLE, ("a",))
    assert cache.program_key(TRIPLE, ("b",)) != key
    assert cache.program_key(int64(int64), ("a",)) != key
    with monkeypatch.context() as patch:
        patch.setattr(cache, "host", lambda: ("x86_64", "another", "+sse2"))
        assert cache.program_key(TRIPLE, ("a",)) != key
    with monkeypatch.context() as patch:
        changed = tmp_path / "step.py"
        changed.write_text("# changed")
        patch.setattr(cache, "source_files", lambda: [changed])
        assert cache.program_key(TRIPLE, ("a",)) != key
    assert cache.program_key(TRIPLE, ("a",)) == key


def test_the_cache_forgets_what_was_not_used_for_longest(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "KEEP", 3)
    for age, name in enumerate("dcba"):
        cache.write_private(tmp_path / f"{name}.bin", b"code", cache.KEEP)
        os.utime(tmp_path / f"{name}.bin", (1000 + age, 1000 + age))
    (tmp_path / f"half-written{cache.MAKING}").write_bytes(b"co")
    os.utime(tmp_path / f"half-written{cache.MAKING}", (1000, 1000))
    cache.write_private(tmp_path / "e.bin", b"code", cache.KEEP)
    assert {p.stem for p in tmp_path.iterdir()} == {"a", "b", "e"}


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_cannot_be_written_costs_a_compilation_only(tmp_path, monkeypatch):
    tmp_path.chmod(0o500)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(dispatchers, "_ready", {})
    assert load_or_compile(tripled, TRIPLE)(np.float32(2)) == 6


SCRIPT = """
import numpy as np
from cnnexp.backends.simd import CpuSimd
from cnnexp.errors import DataError
from cnnexp.network.losses import Loss
from cnnexp.network import Linear, Network
from cnnexp.optimizers import Adam
program = CpuSimd(1).compile(Network((2,), (Linear(2),)), Loss.SOFTMAX_CROSS_ENTROPY, Adam(), 4)
program.restore({"parameters": np.arange(6, dtype=np.float32)})
print(program.predict(program.load(np.ones((1, 2), np.float32), np.zeros(1, int))))
"""


@pytest.mark.thorough
def test_processes_that_start_at_once_share_the_cache(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT]
    for _ in range(2):
        running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        assert {p.communicate(timeout=300)[0].strip() for p in running} == {"[[6. 9.]]"}
        assert {p.returncode for p in running} == {0}
        assert len(list(tmp_path.rglob("*.bin"))) == len([p for p in tmp_path.rglob("*") if p.is_file()]) == 1


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="only x86 code flushes denormals")
def test_momenta_end_at_zero_not_in_slow_denormals():
    program = CpuSimd(2).compile(TINY, Loss.SOFTMAX_CROSS_ENTROPY, Adam(beta1=0.9), 4)
    size, smallest = TINY.parameter_count, np.finfo(np.float32).smallest_normal
    values = {"parameters": np.ones(size), "mean": np.full(size, smallest), "square": np.ones(size)}
    program.restore({name: value.astype(np.float32) for name, value in values.items()})
    program.apply(np.zeros(size, np.float32), 0.1)
    state = program.state()
    assert not state["mean"].any()
    np.testing.assert_array_equal(state["parameters"], 1)
    program.close()


def test_adam_counts_its_steps():
    program = CpuSimd(1).compile(TINY, Loss.SOFTMAX_CROSS_ENTROPY, Adam(), 4)
    program.apply(np.zeros(TINY.parameter_count, np.float32), 0.1)
    assert program.state()["step"] == 1
    program.close()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_a_thread_of_the_pool_raises_reaches_the_caller(rank):
    pool, seen = ThreadPool(3), []

    def task(own):
        if own == rank:
            raise OverflowError(f"of thread {own}")

    for _ in range(2):  # the pool lives on
        with pytest.raises(OverflowError, match=f"of thread {rank}"):
            pool.run(task)
    pool.run(seen.append)
    assert sorted(seen) == [0, 1, 2]
    pool.close()
