"""The GPU backends on the software GPU: real PTX, the real path of the host, every access checked.

Run by `test_soft_gpu.py` in a process of its own, on two GPUs. After every test the checks must have found nothing.
"""

import gc
import re
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
from commands import MNIST, needs_mnist
from conformance import Case, assert_same_state, check_case, check_training, clear_case, make_case, started
from networks import NETWORKS as OFTEN_SEEN
from tables import each

import softgpu
from benchmarks.gpu_check import CONFORMANCE, _graphs_change_nothing
from cnnexp import SGD, Adam, Loss, Mnist, OneConv, TwoConvMlp, TwoConvPool4
from cnnexp.backends import backend_class
from cnnexp.backends.cache import code_of
from cnnexp.backends.gpu import device, launch, tuned
from cnnexp.backends.gpu.backend import GpuProgram
from cnnexp.backends.gpu.fused import kernels as fused_kernels
from cnnexp.backends.gpu.kernels import layers
from cnnexp.backends.gpu.kernels.index import ConvSizes
from cnnexp.backends.gpu.kernels.tiled import ConvTile
from cnnexp.backends.gpu.streamed import Streamed
from cnnexp.backends.parts import FOLLOWED
from cnnexp.errors import ConfigError
from cnnexp.network import (
    BatchNorm2d,
    Conv2d,
    Dropout,
    Flatten,
    LeakyReLU,
    Linear,
    MaxPool2d,
    Network,
    ReLU,
    Residual,
    Structural,
    Tanh,
)
from cnnexp.testing import LOSSES
from softgpu import numba_hook

LOSS = Loss.SOFTMAX_CROSS_ENTROPY
GPU_BACKENDS = ("gpu-naive", "gpu-shared-input", "gpu-shared", "gpu-tuned", "gpu-fused")
ODD = {
    **{name: OFTEN_SEEN[name] for name in ("floor", "floor_twice", "pool_first", "batch_norm_first", "residual_first")},
    "wide_kernel": ((12, 11, 1), (Conv2d(3, 9), ReLU(), Conv2d(2, 2), Flatten(), Linear(3))),
    "no_linear": ((5, 5, 1), (Conv2d(4, 5), Flatten())),
}
TANH = Residual((Tanh(),))
SMALL = Network((6, 6, 1), (Conv2d(5, 3), ReLU(), MaxPool2d(2), Flatten(), Linear(4)))

OF_CONV = {  # multiply-adds by hand
    ("forward", ("conv1", "relu1", "maxpool1")): (4 * 4 * 5 * 9, ""),
    ("backward", ("conv1", "relu1", "maxpool1")): (2 * 2 * 5 * 9, FOLLOWED),
    ("update", ("parameters",)): (0, ""),
}
TWO_NODES = {("forward", ("linear1", "loss")): (3 * 20 * 4, ""), **OF_CONV}
NODES = {
    ("forward", ("conv2",)): (3 * 4 * 5, ""),
    ("forward", ("residual1.tanh1",)): (0, ""),
    ("forward", ("residual1",)): (0, ""),
    ("forward", ("linear1", "loss")): (3 * 3 * 4, ""),
    ("backward", ("residual1",)): (0, ""),
    ("backward", ("residual1.tanh1",)): (0, ""),
    ("backward", ("conv2",)): (3 * 4 * 5 + 2 * 2 * 5 * 4 * 3, ""),
    **OF_CONV,
}


@pytest.fixture(autouse=True)
def silent(request):
    softgpu.revive()
    softgpu.set_order(0)
    yield
    if "mutant" not in request.keywords:
        assert softgpu.findings() == []
    softgpu.revive()


@pytest.fixture(autouse=True)
def tuned_anew(monkeypatch):
    """No plan is kept, and few are compiled and timed, once: a software GPU's times are no times."""
    monkeypatch.setattr(tuned, "load_or_make", lambda key, load, make: load(make()))
    monkeypatch.setattr(tuned, "TILES_AND_FILTERS", ((4, 8), (8, 4)))
    monkeypatch.setattr(tuned, "LAUNCHES", 1)
    monkeypatch.setattr(tuned, "REPEATS", 1)


@pytest.fixture(params=GPU_BACKENDS)
def backend(request):
    return backend_class(request.param)()


def kinds_of_gpu():
    """Return the first GPU of each compute capability that this machine has, with a name for the test."""
    found = {device.open_gpu(index).compute_capability: index for index in reversed(range(device.gpu_count()))}
    return [pytest.param(index, id=f"sm_{major}{minor}") for (major, minor), index in sorted(found.items())]


def test_network_equals_the_oracle_and_training_repeats(backend):
    case = clear_case(SMALL)
    check_case(backend, case)
    softgpu.set_order(3, "random")  # of blocks, warps and streams
    check_training(backend, case, Adam(lr=0.01))


@pytest.mark.slow
@pytest.mark.parametrize("gpu", kinds_of_gpu())
@pytest.mark.parametrize("name", CONFORMANCE)
def test_every_network_equals_the_oracle(backend, name, gpu):
    network, images, exact = CONFORMANCE[name]
    case = clear_case(network, LOSSES.get(name, LOSS), images, exact)
    softgpu.set_order(1, "late")
    check_case(replace(backend, device=gpu), case, Adam(lr=0.01))


@pytest.mark.parametrize("name", ["floor_fused", *(pytest.param(name, marks=pytest.mark.slow) for name in ODD)])
def test_gpu_fused_takes_every_network(name):
    network = Network(*({**OFTEN_SEEN, **ODD}[name]))
    check_case(backend_class("gpu-fused")(), clear_case(network, images=3))


@dataclass(frozen=True)
class Mirror(Structural):
    """A layer that the host computes: its input, left and right exchanged."""

    def output_shape(self, shape):
        return shape

    def forward(self, x):
        return x[:, :, ::-1]

    def backward(self, x, y, dy):
        return dy[:, :, ::-1]


def test_one_layer_that_the_host_computes_stays_one_layer():
    """And what holds it, and a convolution of many channels, are beside it as without it."""
    many = Conv2d(16, 3, padding="same"), BatchNorm2d(), ReLU(), Residual((Mirror(), Conv2d(16, 1), Tanh()))
    network = Network((5, 6, 2), (*many, Mirror(), Dropout(0.3), Flatten(), Linear(3)))
    softgpu.set_order(1, "late")
    states = []
    for name in ("numpy", "gpu-fused"):
        program = backend_class(name)().compile(network, LOSS, SGD(momentum=0.5), 4)
        program.restore(network.initial_state(2))
        case, order = draw(10, network)
        handle = program.load(case.images, case.labels)
        totals = program.train(handle, order, 0.1)
        program.apply(program.gradients(handle, order[:4])[1], 0.1)
        states.append({**program.state(), "loss": totals.loss, "scores": program.predict(handle)})
    for key, value in states[0].items():
        np.testing.assert_allclose(states[1][key], value, rtol=1e-4, atol=1e-5, err_msg=key)


def draw(count, network=SMALL):
    """Return a case of images of bytes, and an order of them."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, *network.input_shape), np.uint8)
    labels = rng.integers(0, network.output_shape[0], count)
    return Case(network, LOSS, network.initial_parameters(seed=0), images, labels), rng.permutation(count)


def trained(backend, batch, case, order, optimizer=None):
    program, handle = started(backend, case, optimizer or SGD(lr=0.05), batch)
    return program.train(handle, order, 0.05), program.state()["parameters"]


@pytest.mark.parametrize("name", ["gpu-shared", "gpu-fused"])
def test_the_order_of_blocks_warps_and_streams_changes_no_bit(name):
    found = []
    for seed, streams in ((0, "now"), (1, "late"), (2, "random")):
        softgpu.set_order(seed, streams)
        totals, parameters = trained(backend_class(name)(), 4, *draw(40), Adam())
        found.append((totals, parameters.tobytes()))
    assert found == found[:1] * 3


@pytest.mark.slow
@pytest.mark.parametrize("gpu", kinds_of_gpu())
@pytest.mark.parametrize("batch", [64, 100, 1000])
@pytest.mark.parametrize("model", [OneConv(32), TwoConvMlp(), TwoConvPool4()], ids=lambda model: type(model).__name__)
def test_a_step_of_real_size_ends_where_the_cpu_ends(backend, model, batch, gpu, monkeypatch):
    if batch == 1000:  # that `gpu-tuned` chooses is seen with the smaller ones; here every plan takes minutes
        monkeypatch.setattr(tuned, "BLOCKS", tuned.BLOCKS[-1:])
        monkeypatch.setattr(tuned, "TILES_AND_FILTERS", tuned.TILES_AND_FILTERS[-1:])
    drawn = draw(batch + batch // 3, model.network((28, 28, 1), 10))
    softgpu.set_order(7, "random")
    _, ours = trained(replace(backend, device=gpu), batch, *drawn)
    _, theirs = trained(backend_class("cpu")(), batch, *drawn)
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())


def test_bytes_are_divided_to_the_last_bit():
    images = device.to_device(np.arange(256, dtype=np.uint8))
    order, x = device.to_device(np.zeros(2, np.uint32)), device.to_device(np.zeros(256, np.float32))
    fused_kernels.gather(256, True).over(256, 0, images, order, np.uint32(0), x)
    assert np.array_equal(device.to_host(x), np.arange(256, dtype=np.float32) / np.float32(255))


@pytest.mark.parametrize("graphs", [True, False])
def test_gpu_fused_tells_where_a_step_goes(graphs):
    """Every pass is told, with its layers and what it multiplies; readings change no bit of the parameters."""
    backend = backend_class("gpu-fused")(graphs=graphs)
    deep = Network((6, 6, 1), (Conv2d(5, 3), ReLU(), MaxPool2d(2), Conv2d(3, 2), TANH, Flatten(), Linear(4)))
    for network, expected in ((SMALL, TWO_NODES), (deep, NODES)):
        case, order = draw(60, network)
        assert len(backend.compile(network, LOSS, SGD(), 4).clocked()) == 0
        program, handle = started(backend.clocked, case, SGD(), 4)
        assert program.clocked() == [], "what warmed up is not told"
        program.train(handle, order, 0.05)
        told = {(part.what, part.layers): (part.multiply_adds, part.fewer, s) for part, s in program.clocked()}
        assert {key: found[:2] for key, found in told.items()} == expected
        assert all(seconds > 0 for *_, seconds in told.values())
        again = program.clocked()
        program.gradients(handle, order[:4])
        program.predict(handle)
        assert program.clocked() == again, "what is no training is not told"
        _, plain = trained(backend, 4, case, order)
        assert np.array_equal(program.state()["parameters"], plain)


def test_graphs_are_captured_before_the_clock_runs_and_change_nothing(monkeypatch):
    assert _graphs_change_nothing() == "ok"
    case, order = draw(40)
    program, handle = started(backend_class("gpu-fused")(), case, SGD(), 4)
    assert sorted(handle.graphs) == [1, 8]
    monkeypatch.setattr(program._graphs, "capture", None)
    assert program.train(handle, order, 0.1).count == 40  # graphs of 8 steps and of one


@pytest.mark.parametrize("name", ["gpu-naive", "gpu-fused"])
def test_images_take_the_place_of_others(name, monkeypatch):
    case, order = draw(16)
    program, loaded = started(backend_class(name)(), case, SGD(lr=0.1), 4)
    found, handle = [], program.refill(None, case.images[::-1].copy(), case.labels[::-1], 99)
    if name == "gpu-fused":
        monkeypatch.setattr(program._graphs, "capture", None)  # those of the first images serve
    handle = program.refill(handle, case.images, case.labels, 99)
    monkeypatch.undo()
    for images in (handle, loaded):
        program.restore(case.state)
        program.train(images, order, 0.1)
        found.append(program.state())
    assert_same_state(*found)


@pytest.mark.parametrize("name", ["gpu-naive", "gpu-tuned"])
def test_a_layerwise_step_is_three_launches_and_two_graphs(name, monkeypatch):
    """Captured before the clock runs; a shorter batch goes kernel by kernel, and so do steps that draw numbers."""
    case, order = draw(11)
    program, handle = started(backend_class(name)(), case, SGD(), 4)
    launched, note = [], launch.Kernel.launch

    def noted(self, blocks, stream, *arguments):
        launched.append(self.function.__name__)
        note(self, blocks, stream, *arguments)

    monkeypatch.setattr(launch.Kernel, "launch", noted)
    found = []
    for graphs in (program._passes, None):
        program._passes = graphs
        program.restore(case.state)
        program.train(handle, order, 0.05)
        found.append((program.state()["parameters"], launched.copy()))
        launched.clear()
    (replayed, few), (launched_alone, many) = found
    assert few[:6] == ["gather", "loss", "update"] * 2
    assert few[6:] == many[-len(few[6:]) :]
    assert len(many) == 3 * len(few[6:]) > 30
    assert np.array_equal(replayed, launched_alone)

    random = Network((4,), (Linear(3), Dropout(0.5), Linear(2)))
    assert backend_class(name)().compile(random, LOSS, SGD(), 4)._passes is None


def test_a_kernel_is_compiled_once_and_then_comes_from_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "cache_folder", lambda name: tmp_path / "gpu")
    kernel, x = fused_kernels.advance.__wrapped__(64), device.to_device(np.ones(3, np.uint32))
    kernel.launch(1, 0, x, np.uint32(2))
    (kept,) = (tmp_path / "gpu").iterdir()
    again = fused_kernels.advance.__wrapped__(64)
    with monkeypatch.context() as patch:
        patch.setattr("numba.cuda.jit", lambda *_, **__: pytest.fail("compiled again"))
        again.launch(1, 0, x, np.uint32(3))
    assert device.to_host(x).tolist() == [6, 1, 1]
    kept.write_bytes(kept.read_bytes()[:-1])  # damaged: compiled anew
    fused_kernels.advance.__wrapped__(64).launch(1, 0, x, np.uint32(6))
    assert device.to_host(x).tolist() == [12, 1, 1]
    fused_kernels.advance.__wrapped__(32).launch(1, 0, x, np.uint32(2))
    assert len(list((tmp_path / "gpu").iterdir())) == 2


def test_what_tells_kernels_apart_is_the_same_in_every_process():
    made = [kernel for kernel in gc.get_objects() if isinstance(kernel, launch.Kernel)]
    assert len(made) > 20  # of the tests before
    told = [repr((code_of(kernel.function), kernel.signature, kernel.block)) for kernel in made]
    assert not [text for text in told if " at 0x" in text]
    rules = {repr(code_of(layers.elementwise(one, 64).function)) for one in (Tanh(), ReLU(), LeakyReLU(0.1))}
    assert len(rules) == 3


def test_arguments_of_another_type_are_refused_and_what_is_tuned_changes_no_bit():
    kernel, x, two = fused_kernels.advance(64), device.to_device(np.ones(3, np.uint32)), np.uint32(2)
    for given, says in (
        ((device.to_device(np.ones(3)), two), "advance: argument 0 is an array of float64, the kernel takes an array"),
        ((x, 2), "advance: argument 1 is int, the kernel takes uint32"),
        ((x, x), "advance: argument 1 is an array of uint32, the kernel takes uint32"),
        ((x,), "advance takes 2 arguments, 1 given"),
    ):
        with pytest.raises(TypeError, match=says):
            kernel.launch(1, 0, *given)

    sizes = ConvSizes(H=6, W=6, C=3, K=3, F=5, stride=1, top=0, left=0, P=4, Q=4)
    rng, ops = np.random.default_rng(0), backend_class("gpu-shared")().ops(2)
    x, w = (device.to_device(rng.standard_normal(shape, np.float32)) for shape in ((2, 6, 6, 3), (3, 3, 3, 5)))
    found = []
    for block, tile, filters, channels in ((256, 8, 4, 3), (128, 4, 2, 1), (128, 2, 5, 2)):
        y = device.to_device(np.zeros((2, 4, 4, 5), np.float32))
        ops._convolve(sizes, False, x, w, None, y, ConvTile(block, tile, tile + 2, filters, channels))
        found.append(device.to_host(y).tobytes())
    assert len(set(found)) == 1


@pytest.mark.parametrize("name", ["gpu-naive", "gpu-fused"])
def test_a_data_set_that_is_streamed_to_the_second_gpu_leaves_the_same_bits(name, monkeypatch):
    # drops by the images' places in the data set, not in what is shown of it
    case, order = draw(40, Network(SMALL.input_shape, (*SMALL.layers[:-2], Dropout(0.3), *SMALL.layers[-2:])))
    program = backend_class(name)(device=1).compile(case.network, case.loss, Adam(lr=0.01), 4)
    found, little = [], {"gpu-naive": 5000, "gpu-fused": 2500}[name]  # bytes: windows of one batch or two
    for free in (np.inf, little):
        softgpu.set_order(2, "late")
        monkeypatch.setattr(device, "free_memory", lambda free=free: (free, free))
        program.restore({"parameters": case.parameters})
        handle = program.load(case.images, case.labels)
        assert isinstance(handle, Streamed) == (free == little)
        program.train(handle, order, 0.01)
        _, gradient = program.gradients(handle, order[:4])
        found.append({**program.state(), "gradient": gradient, "scores": program.predict(handle)})
    assert_same_state(found[1], found[0])


@pytest.mark.parametrize("name", ["gpu-naive", "gpu-fused"])
@pytest.mark.parametrize("loss", ["softmax_cross_entropy", "mean_squared_error"])
def test_a_recipe_ends_where_numpy_ends(name, loss):
    """A rate for each step, weights of classes, biases that do not decay; and the same step in two halves."""
    network = Network((6, 6, 1), (Conv2d(3, 3), ReLU(), MaxPool2d(2), Flatten(), Linear(4), ReLU(), Linear(3)))
    rng, weighted = np.random.default_rng(1), Loss(loss, class_weights=(0.5, 2.0, 3.0))
    images, labels = rng.random((10, 6, 6, 1), np.float32), rng.integers(0, 3, 10)
    optimizer, rates = SGD(momentum=0.5, weight_decay=0.3, decay_biases=False), np.array([0.1, 0.02, 0.3])
    states = []
    for backend in ("numpy", name):
        program = backend_class(backend)().compile(network, weighted, optimizer, 4)
        program.restore(network.initial_state(2))
        handle = program.load(images, labels)
        totals = program.train(handle, np.arange(10)[::-1], rates)
        program.apply(program.gradients(handle, np.arange(4))[1], 0.1)
        states.append({**program.state(), "loss": totals.loss})
    for key, value in states[0].items():
        np.testing.assert_allclose(states[1][key], value, rtol=1e-4, atol=1e-6)


@each(
    ("gpu-shared", {"block": 3, "tile": 3}),
    pytest.param("gpu-naive", {"block": 3}, marks=pytest.mark.slow),
    pytest.param("gpu-shared-input", {"block": 7, "tile": 1}, marks=pytest.mark.slow),
)
def test_any_block_and_tile_give_the_same_numbers(name, settings):
    check_case(backend_class(name)(**settings), make_case(Network(*OFTEN_SEEN["auto_padding"]), images=2))


@pytest.mark.parametrize("name", ["gpu-naive", "gpu-fused"])
def test_what_does_not_fit_on_the_gpu_is_refused(name, monkeypatch):
    backend, network = backend_class(name)(), Network((100,), (Linear(2),))
    program = backend.compile(network, LOSS, Adam(), 2)
    monkeypatch.setattr(device, "free_memory", lambda: (3000, 5000))
    needs = {"gpu-fused": ("3,488", "872"), "gpu-naive": ("3,336", "834")}[name]
    says = rf"8 images, needs {needs[0]} bytes.* batch of 2 needs 4 times {needs[1]}; 3,000 of 5,000"
    with pytest.raises(ConfigError, match=says):
        program.load(np.zeros((8, 100), np.float32), np.zeros(8, np.int32))
    with pytest.raises(ConfigError, match=r"needs [\d,]+ bytes of GPU memory, 3,000 of 5,000 are free"):
        backend.compile(network, LOSS, Adam(), 50)


@each(
    ("gpu-naive", {"block": 2048}, r"backend.block=2048: must be 1 \.\. 1024 threads"),
    ("gpu-shared", {"block": 0}, r"backend.block=0: must be 1 \.\. 1024 threads, the limit of software GPU"),
    ("gpu-naive", {"device": 9}, r"backend.device=9: must be 0 \.\. "),
    ("gpu-shared", {"tile": 0}, r"backend.tile=0: must be >= 1"),
    ("gpu-shared", {"tile": 200}, r"backend.tile=200: .* needs 163,252 bytes of shared memory, a block has 49,152"),
)
def test_settings_beyond_the_gpu_are_refused(name, settings, says):
    network = Network((8, 8, 1), (Conv2d(1, 3), Flatten(), Linear(2)))
    with pytest.raises(ConfigError, match=says):
        backend_class(name)(**settings).compile(network, LOSS, Adam(), 1)


def test_too_large_an_array_is_refused_and_two_gpus_are_taken_in_turn(monkeypatch):
    monkeypatch.setattr(device, "free_memory", lambda: (np.inf, np.inf))
    network = Network((64, 64, 64), (Conv2d(512, 1), Flatten(), Linear(2)))
    with pytest.raises(ConfigError, match=r"2,147,483,648 elements"):
        backend_class("gpu-naive")().compile(network, LOSS, Adam(), 1024)
    backend = backend_class("gpu-naive")(device=1, block=64)
    assert [backend.of_worker(rank).device for rank in range(4)] == [1, 0, 1, 0]
    assert backend.of_worker(1).block == 64

    case, order = draw(8)
    programs = [started(backend_class("gpu-fused")(device=index), case, SGD(), 4) for index in (0, 1)]
    for program, handle in programs * 2:
        program.train(handle, order, 0.1)
    assert_same_state(*(program.state() for program, _ in programs))


@pytest.mark.slow
@needs_mnist
def test_an_epoch_of_2000_mnist_images_ends_where_the_cpu_ends(backend, capsys):
    train = Mnist(root=str(MNIST), train_size=2000).load().train
    case, order = draw(2000, OneConv(32).network((28, 28, 1), 10))
    case.images, case.labels = train.images, train.labels
    softgpu.set_order(1, "random")
    before, started = softgpu.executed(), time.process_time()
    totals, ours = trained(backend, 100, case, order)
    billions, cpu_s = 32 * (softgpu.executed() - before) / 1e9, time.process_time() - started
    expected, theirs = trained(backend_class("cpu")(), 100, case, order)
    apart = np.abs(ours - theirs).max() / np.abs(theirs).max()
    with capsys.disabled():
        print(  # noqa: T201
            f"\n{backend.name}: parameters apart by {apart:.1e}, {totals.correct} and {expected.correct} right; "
            f"{billions:.1f} billion instructions of threads in {cpu_s:.0f} s of CPU, compiling included"
        )
    assert apart < 1e-4
    assert totals.correct > 1000


# Faults, each of which must be found.


def forget_kernels(names):
    """Have kernels of these names compiled and loaded again."""
    for kernel in gc.get_objects():
        if isinstance(kernel, launch.Kernel) and re.fullmatch(names, kernel.function.__name__):
            kernel._loaded.clear()
            kernel._compiled = None


@pytest.mark.mutant
@pytest.mark.parametrize(("name", "kernel"), [("gpu-shared", "conv2d"), ("gpu-fused", "linear_head")])
def test_a_barrier_removed_is_found(name, kernel, monkeypatch):
    removed = []

    def without_a_barrier(text):  # the first after something was written to shared memory
        if removed or not re.search(rf"\.entry \w*\d({kernel})B", text) or "bar.sync" not in text:
            return text
        removed.append(text)
        before, store, after = text.partition("st.shared")
        return before + store + re.sub(r"bar\.sync\s+0;", "", after, count=1)

    monkeypatch.setattr(numba_hook, "edit_ptx", without_a_barrier)
    monkeypatch.setattr(launch, "cache_folder", lambda name: None)  # kernels are compiled anew, and not kept on disk
    forget_kernels(kernel)
    trained(backend_class(name)(), 4, *draw(40))
    forget_kernels(kernel)
    assert removed
    assert {line.partition(":")[0] for line in softgpu.findings()} & {"racecheck", "initcheck"}


@pytest.mark.mutant
def test_work_in_the_wrong_context_is_found(monkeypatch):
    case, order = draw(40)
    program = backend_class("gpu-naive")(device=1).compile(SMALL, LOSS, SGD(), 4)
    monkeypatch.setattr(device, "free_memory", lambda: (5000, 5000))  # so small that data is streamed
    handle = program.load(case.images, case.labels)
    assert softgpu.findings() == []
    monkeypatch.setattr(GpuProgram, "train", GpuProgram.train.__wrapped__)
    program.train(handle, order, 0.1)
    assert softgpu.findings()[0].startswith("contextcheck: a copy to the GPU")
