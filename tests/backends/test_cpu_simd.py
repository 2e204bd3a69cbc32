"""What is particular to `cpu-simd`; the contract it shares with all backends is in test_conformance."""

import _thread
import gc
import platform
import threading
import time
import tracemalloc
from dataclasses import replace

import networks
import numpy as np
import pytest
from backends.on_target import AVX2, AVX512, HOST, TARGETS, OnTarget
from commands import wait_for
from conformance import assert_same_state, check_case, check_training, make_case, started

from cnnexp import SGD, Adam, Conv2d, Flatten, Linear, Loss, MaxPool2d, Network, OneConv, ReLU, Sigmoid, TwoConvMlp
from cnnexp.backends.simd import CpuSimd
from cnnexp.backends.simd.compiler import intrinsics
from cnnexp.backends.simd.lowering import Plan
from cnnexp.backends.simd.runtime.limit import CHAINS, fma_loop
from cnnexp.backends.simd.runtime.program import ForwardProgram, make_plan, paying_threads
from cnnexp.backends.simd.runtime.thread_pool import ThreadPool
from cnnexp.errors import DataError
from cnnexp.network.losses import compute

LOSS = Loss.SOFTMAX_CROSS_ENTROPY
TINY = Network((2,), (Linear(3), ReLU(), Linear(2)))
WIDE = Network((37,), (Linear(50), ReLU(), Linear(33), ReLU(), Linear(21)))


@pytest.mark.parametrize("images", [2, 5, 140])
def test_wide_layers_of_any_batch(images):
    """The last tile of images ends with the last one; a wide input gradient takes several groups at a time."""
    check_case(OnTarget(threads=1), make_case(WIDE, images=images))


@pytest.mark.parametrize(("target", "images"), [("host", 2), ("sse", 3), ("neon", 2), ("avx2", 4), ("wide", 8)])
def test_wide_layers_of_few_images(target, images):
    """Their input's gradient has outputs in the lanes: more features than have sums near, and vectors in part."""
    network = Network((37,), (Linear(301), ReLU(), Linear(45), ReLU(), Linear(33)))
    nodes = make_plan(network, TARGETS[target], images - 1).nodes
    assert [(node.algorithm, node.few) for node in nodes] == [("wide", True)] * 3
    check_case(OnTarget(TARGETS[target], threads=1), make_case(network, images=images))


def test_threads_are_as_many_as_pay():
    large = Network((28, 28, 1), (Flatten(), Linear(1024), ReLU(), Linear(1024), ReLU(), Linear(10)))
    khandait = Network((2,), (Linear(64), ReLU(), Linear(1), Sigmoid()))
    mlp = TwoConvMlp().network((28, 28, 1), 10)
    smallest = Network((64,), (Linear(30), ReLU(), Linear(10)))
    assert paying_threads(khandait, 50, AVX512, 8) == 1
    assert paying_threads(smallest, 128, AVX512, 8) == 1
    assert paying_threads(khandait, 100_000, AVX512, 8) == 8
    assert paying_threads(mlp, 64, AVX512, 8) == 8
    assert paying_threads(mlp, 1, AVX512, 8) == 1, "one image is not worth sharing"
    assert paying_threads(large, 1, AVX512, 2) == 2, "but many parameters are"


@pytest.mark.parametrize(("images", "owns"), [(11, True), (140, False)])
def test_threads_own_wide_weights_where_a_batch_is_one_tile(images, owns):
    plan = make_plan(WIDE, HOST, -(-(images - 1) // 2))
    assert plan.owns == bool(plan.parameters.owned) == owns
    check_training(OnTarget(), make_case(WIDE, images=images), Adam())


@pytest.mark.parametrize(
    ("target", "threads", "images", "owns"),
    [
        *((target, 3 - n, 141, n == 1) for target in ("sse", "avx2", "wide") for n in (1, 2)),
        *(("host", threads, 2, True) for threads in (1, 2)),
    ],
)
def test_features_that_no_image_has_are_left_out(target, threads, images, owns):
    """So a weight of theirs may be anything, and stays so where no slot moves it; some batches lack one, others not."""
    network = Network((301,), (Linear(40), ReLU(), Linear(21)))
    case, rng = make_case(network, images=images), np.random.default_rng(0)
    target = replace(TARGETS[target], l2_bytes=16 << 10, part_cycles=100)
    assert make_plan(network, target, -(-(images - 1) // threads)).owns == owns
    absent = rng.permutation(np.arange(71, 300))[:130]
    case.images[:, absent], case.images[1:, [70, 300]] = 0, 0
    check_case(OnTarget(target, threads), case, Adam())
    found = []
    for anything in (0, np.nan):
        network.parameters[0].view(case.parameters)[absent] = anything
        program, handle = started(OnTarget(target, threads), case, SGD(lr=0.1), images - 1)
        totals, weights = program.train(handle, np.arange(images)[::-1], 0.1), program.state()["parameters"]
        predicting = ForwardProgram(network, case.loss, SGD(), 1, target, threads)
        predicting.restore({"parameters": case.parameters})
        scores = predicting.predict(predicting.load(case.images[:1], case.labels[:1]))
        found.append((totals.loss, scores, np.nan_to_num(weights)))
        assert np.isnan(weights).sum() == np.isnan(anything) * absent.size * 40
    assert np.isfinite([found[1][0], *found[1][1].ravel()]).all()
    for zeros, others in zip(*found, strict=True):
        np.testing.assert_array_equal(zeros, others)


@pytest.mark.parametrize("target", [TARGETS["sse"], AVX2, AVX512])
def test_a_tile_grows_with_what_outweighs_what(target):
    """Heavy weights are gone over once for 128 images, by any width; heavy activations stay in a core's part of L3."""
    target = replace(target, l2_bytes=512 << 10)
    wide, conv = Network((784,), (Linear(900), ReLU()) * 4), OneConv(filters=256).network((28, 28, 1), 10)
    assert [make_plan(wide, target, images).arena.images for images in (128, 300)] == [128, 128]
    assert make_plan(wide, target, 128).owns
    assert make_plan(conv, target, 250).arena.images == 16


def test_the_limit_of_the_arithmetic_is_measured():
    assert 0.1 < CpuSimd(threads=1).limits()["gflops"] < 1e4
    assert set(CpuSimd(threads=2).limits()) == {"gflops"}
    loop, per_turn, lanes = fma_loop()
    executed = sum(asm.count(name) for asm in loop.inspect_asm().values() for name in ("fmadd", "fmla", "mulps"))
    assert executed * lanes == per_turn == CHAINS * lanes  # LLVM leaves out what it knows the result of
    assert loop(2) == pytest.approx(sum(chain * 0.999**2 + 0.001 * 1.999 for chain in range(CHAINS)), rel=1e-5)


def test_memory_is_bounded():
    """By the tile, not by the batch; and a plan which outlives its program holds less than a byte a parameter."""
    program = CpuSimd(1).compile(OneConv(filters=256).network((28, 28, 1), 10), LOSS, SGD(), 1000)
    assert sum(a.nbytes for a in vars(program).values() if isinstance(a, np.ndarray)) < 30e6
    large = Network((224, 224, 3), (Conv2d(16, 3, padding="same"), ReLU(), MaxPool2d(2), Flatten(), Linear(3, False)))
    assert make_plan(large, AVX512, 256).arena.groups == 1
    large_window = Network((17, 34, 1), (Conv2d(3, 1), ReLU(), MaxPool2d(17), Flatten(), Linear(3)))
    assert make_plan(large_window, AVX512, 256).arena.groups == 2
    network = Network((1024,), (Linear(1024), ReLU(), Linear(10)))
    tracemalloc.start()
    plan = Plan(network, AVX512, 1, 16)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < network.parameter_count <= plan.parameters.size


def test_indices_and_labels_are_checked_before_compiled_code_trusts_them():
    case = make_case(TINY, images=3)
    program, handle = started(CpuSimd(1), case, SGD(), 4)
    for order in (np.array([0, 3]), np.array([-1])):
        with pytest.raises(IndexError, match="there are 3"):
            program.train(handle, order, 0.1)
        with pytest.raises(IndexError, match="there are 3"):
            program.gradients(handle, order)
    for labels in ([0, 1, 2], [0, -1, 1]):
        with pytest.raises(DataError, match="2 classes"):
            program.load(case.images, np.array(labels))
    with pytest.raises(DataError, match="3 images but 4 labels"):
        program.load(case.images, np.zeros(4, int))
    alone = make_case(Network((4, 4, 1), (Flatten(), Linear(1))), Loss("mean_squared_error"), images=1)
    with pytest.raises(DataError, match="1 classes"):
        CpuSimd(1).compile(alone.network, alone.loss, SGD(), 4).load(alone.images, np.ones(1, int))


def test_a_missing_number_reaches_the_loss():
    # a maximum over a window drops it in any order of comparison but one
    case = make_case(Network((6, 6, 1), (Conv2d(2, 1), ReLU(), MaxPool2d(3), Flatten(), Linear(2))))
    program, whole = started(CpuSimd(1), case, SGD(), 5)
    assert np.isfinite(program.train(whole, np.arange(5), 0.0).loss)
    for row, column in np.ndindex(3, 3):
        images = case.images.copy()
        images[2, row, column] = np.nan
        program.restore(case.state)
        assert np.isnan(program.train(program.load(images, case.labels), np.arange(5), 0.0).loss)


def test_ctrl_c_ends_training_soon_and_leaves_the_program_whole(request):
    gc.disable()  # in the callback that Hypothesis hangs on the collector, Python swallows a Ctrl-C
    request.addfinalizer(gc.enable)
    program, handle = started(OnTarget(), make_case(TINY, images=2000), SGD(), 8)
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
    assert_same_state(program.state(), state)
    assert program.train(handle, order[:80], 0.01).count == 80
    assert program.state()["step"] == state["step"] + 10


def test_threads_end_with_the_program():
    def mine():
        return {t for t in threading.enumerate() if t.name.startswith("cpu-simd")} - others

    others = set(threading.enumerate())
    program, handle = started(OnTarget(), make_case(TINY), SGD(), 8)
    program.train(handle, np.zeros(8, np.int64), 0.1)
    assert len(mine()) == 2
    del program
    gc.collect()
    wait_for(lambda: not mine())


def test_an_update_rounds_as_numpy_does(optimizer):
    network = Network(*networks.NETWORKS["one_conv"])
    program = CpuSimd().compile(network, LOSS, optimizer, 5)
    parameters, gradient, *slots = np.random.default_rng(0).random((4, network.parameter_count), np.float32) + 0.1
    state = {"parameters": parameters, **dict(zip(optimizer.slots, slots, strict=False)), "step": np.int64(2)}
    program.restore(state)
    program.apply(gradient, 0.01)
    optimizer.apply(parameters, gradient, slots[: len(optimizer.slots)], 0.01, 3)
    assert_same_state(program.state(), {**state, "step": 3})


def test_exp_is_as_accurate_as_it_says():
    """Seen through a Sigmoid, which is exp(x) far below 0."""
    program = CpuSimd().compile(Network((1,), (Linear(1), Sigmoid())), Loss.BINARY_CROSS_ENTROPY, SGD(), 4)
    program.restore({"parameters": np.array([1, 0], np.float32)})
    x = np.linspace(-80, 87, 1 << 16).astype(np.float32)
    exact = 1 / (1 + np.exp(-x.astype(np.float64)))
    x, exact = np.append(x, np.float32([np.nan, -1e30, 1e30, 0])), np.append(exact, [np.nan, 0, 1, 0.5])
    y = program.predict(program.load(x[:, np.newaxis], np.zeros(len(x), np.int32)))[:, 0]
    np.testing.assert_allclose(y, exact, rtol=2.5e-7, atol=1e-36)


@pytest.mark.parametrize("target", ["host", "sse", "avx2", "wide"])
@pytest.mark.parametrize("outputs", [2, 10, 21])
def test_the_softmax_of_any_scores(target, outputs):
    """In whole vectors, in part and in both: near each other and far apart, equal ones, too large to add up, a NaN."""
    scores = np.random.default_rng(0).normal(0, 3, (6, outputs)).astype(np.float32)
    scores[1] *= 100
    scores[2] = 7
    scores[3, 0], scores[4, 1], scores[5, 1] = 3e38, -3e38, np.nan
    labels, loss = np.arange(6, dtype=np.int32) % outputs, Loss("softmax_cross_entropy", label_smoothing=0.1)
    program = OnTarget(TARGETS[target]).compile(Network((outputs,), (Linear(outputs),)), loss, SGD(), 1)
    program.restore({"parameters": np.append(np.eye(outputs, dtype=np.float32), np.zeros(outputs, np.float32))})
    losses, expected = np.empty(6), np.empty((6, outputs))
    compute(loss, scores.astype(np.float64), labels, 1, expected, losses, np.empty(6, np.uint8))
    handle = program.load(scores, labels)
    for image in range(6):
        totals, gradient = program.gradients(handle, np.array([image]))
        np.testing.assert_allclose(totals.loss, losses[image], rtol=1e-6)
        np.testing.assert_allclose(gradient[-outputs:], expected[image], atol=3e-7)


def test_an_intrinsic_without_its_feature_is_refused():
    """LLVM would end the process."""
    for name, feature in intrinsics.NEEDS.items():
        with pytest.raises(ValueError, match=f"{name} needs {feature}"):
            intrinsics.call(None, ("neon",), name, None, [])
    with pytest.raises(KeyError, match="experimental"):
        intrinsics.call(None, ("avx512f",), "llvm.experimental.vector.compress.v8f32", None, [])


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="only x86 code flushes denormals")
def test_momenta_end_at_zero_not_in_slow_denormals():
    program = CpuSimd().compile(TINY, LOSS, Adam(beta1=0.9), 4)
    ones = np.ones(TINY.parameter_count, np.float32)
    program.restore({"parameters": ones, "mean": ones * np.finfo(np.float32).smallest_normal, "square": ones})
    program.apply(ones * 0, 0.1)
    state = program.state()
    assert not state["mean"].any()
    np.testing.assert_array_equal(state["parameters"], 1)


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
