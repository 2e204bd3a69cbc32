"""Every GPU kernel compiled for real GPUs, with none at hand: by NVVM, then by nvJitLink, as Numba does at a launch.

Programs are made and trained as on a GPU, but arrays are NumPy's and a launch only notes the kernel. So what is
compiled is what would be launched, and the arguments have the types that the signatures promise.
"""

import contextlib
import itertools
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
from tables import each

pytest.importorskip("numba_cuda", reason="compiles with numba-cuda: pip install cnnexp[gpu]")

import numba
from cuda.core import Linker, LinkerOptions, ObjectCode
from numba import cuda
from numba.core import sigutils

from benchmarks.gpu_check import CONFORMANCE
from benchmarks.networks import NETWORKS
from cnnexp import Knm, Linear, Loss, Network, OneConv, ReLU, TwoConvMlp, TwoConvPool4
from cnnexp.backends import backend_class
from cnnexp.backends.gpu import device, limits
from cnnexp.backends.gpu.backend import GpuProgram
from cnnexp.backends.gpu.device import Gpu, Tensor
from cnnexp.backends.gpu.fused import nodes
from cnnexp.backends.gpu.kernels import direct
from cnnexp.backends.gpu.kernels.index import ConvSizes
from cnnexp.backends.gpu.launch import Kernel
from cnnexp.network import ConvStage, LinearStage
from cnnexp.optimizers import SGD, Adam, AdaMax, AdamW, RMSprop
from cnnexp.testing import LOSSES
from cnnexp.testing import NETWORKS as SHIPPED

GPU = Gpu(0, "none", (9, 0), (13, 0), (13, 0), 132, 1024, 48 * 1024)
Target = tuple[int, int, str]  # as Numba names it: "a" is code for that very GPU, which it makes from 9.0 on
HOPPER: Target = (9, 0, "a")
TARGETS: tuple[Target, ...] = ((7, 5, ""), (8, 0, ""), HOPPER, (12, 0, "a"))
MNIST = (28, 28, 1)
SOFTMAX = Loss.SOFTMAX_CROSS_ENTROPY

PROGRAMS = {
    "one_conv": (OneConv(filters=256).network(MNIST, 10), SOFTMAX, SGD(), 1000),
    "two_conv_mlp": (TwoConvMlp().network(MNIST, 10), SOFTMAX, Adam(), 64),
    "two_conv_pool4": (TwoConvPool4().network(MNIST, 10), SOFTMAX, RMSprop(momentum=0.9), 32),
    "knm_colour": (Knm().network((32, 32, 3), 10), SOFTMAX, AdaMax(), 100),
    "many_channels": (CONFORMANCE["many_channels"][0], SOFTMAX, SGD(), 64),
    "plain_loss": (Network((4,), (ReLU(), Linear(300))), SOFTMAX, SGD(momentum=0.9, nesterov=True), 4),
    **{
        title: (Network(*network), LOSSES.get(title, Loss("softmax_cross_entropy", 0.1)), AdamW(), 8)
        for title, network in SHIPPED.items()
    },
}
BACKENDS = ("gpu-naive", "gpu-shared-input", "gpu-shared", "gpu-fused")
# compiled in every run of the tests, for one GPU; all programs on all backends for all GPUs take minutes
OFTEN = {("gpu-naive", "one_conv"), ("gpu-shared", "one_conv")} | {
    *(("gpu-naive", program) for program in ("residual", "batch normalization", "dropout", "elementwise")),
    *(("gpu-fused", program) for program in ("one_conv", "two_conv_mlp", "many_channels")),
}

# Most registers of a thread, and most instructions per multiply-add in the innermost loop, on sm_90a, by module and
# kernel. 65,536 registers are 128 for each thread of two blocks of 256. One thread per element and no tiles means
# addresses, and with padding tests, for every product; that is gpu-naive.
BUDGETS = {
    "direct.conv2d": (48, 36.0),
    "tiled.conv2d": (48, 16.0),  # of several channels: each row of a filter is unrolled, not all of it
    "tiled.conv2d of one_conv": (48, 9.0),
    "tiled.conv2d of many_channels": (48, 19.0),  # a filter of one pixel: nothing is unrolled
    "sums.matmul": (48, 4.0),
    "conv_kernels.conv2d": (64, 9.5),
    "conv_kernels.conv2d_backward_weights": (96, 9.0),  # of a window: its place and its gradient are loaded, too
    "conv_kernels.conv2d_backward_input": (80, 4.0),
    "linear_kernels.linear_head": (96, 6.0),
    "product_kernels.product": (128, 1.6),
    **{f"product_kernels.product of {name}": (128, 2.1) for name in ("two classes", "padded residual")},  # few columns
}
compiled: set[tuple] = set()  # kernels are kept by their sizes, so two backends share some


@pytest.fixture
def launched(monkeypatch) -> dict[Kernel, list]:
    """The kernels that programs launch, with the Numba types of the arguments."""
    kernels: dict[Kernel, list] = {}

    def launch(self, blocks, stream, *arguments):
        assert type(blocks) is int
        assert 1 <= blocks < 2**31
        assert self.block <= GPU.block_threads
        types = [numba.typeof(a.flat if isinstance(a, Tensor) else a) for a in arguments]
        assert kernels.setdefault(self, types) == types

    monkeypatch.setattr(Kernel, "launch", launch)
    monkeypatch.setattr(device, "open_gpu", lambda index: GPU)
    monkeypatch.setattr(device, "on", lambda gpu: contextlib.nullcontext())
    monkeypatch.setattr(device, "free_memory", lambda: (math.inf, math.inf))
    monkeypatch.setattr(device, "synchronize", lambda: None)
    monkeypatch.setattr(device, "empty", lambda shape, dtype: Tensor(np.zeros(max(math.prod(shape), 1), dtype), shape))
    monkeypatch.setattr(device, "to_device", lambda array: Tensor(array.flatten(), array.shape))
    monkeypatch.setattr(device, "to_host", lambda tensor: tensor.flat[: tensor.size].reshape(tensor.shape))
    monkeypatch.setattr(device, "copy", lambda source, target: None)
    monkeypatch.setattr(GpuProgram, "_captured", lambda self: None)
    # a device function asks for the GPU at hand when it is compiled
    monkeypatch.setattr("numba.cuda.dispatcher.get_current_device", lambda: SimpleNamespace(compute_capability=(7, 5)))
    return kernels


def train(backend, network, loss, optimizer, batch_size) -> None:
    """Take every path of a program once."""
    program = backend.compile(network, loss, optimizer, batch_size)
    images = np.zeros((batch_size + 1, *network.input_shape), np.float32)
    handle = program.load(images, np.zeros(len(images), np.int64))
    program.train(handle, np.arange(len(images)), 0.1)
    program.gradients(handle, np.arange(2))
    program.apply(np.zeros(network.parameter_count, np.float32), 0.1)
    program.predict(handle)
    program.close()


def make(name: str):
    return backend_class(name)(graphs=False) if name == "gpu-fused" else backend_class(name)()


@each(
    *(pytest.param(*often, (HOPPER,), marks=pytest.mark.thorough) for often in sorted(OFTEN)),
    *(pytest.param(*pair, TARGETS, marks=pytest.mark.slow) for pair in itertools.product(BACKENDS, PROGRAMS)),
)
def test_kernels_compile_within_their_budgets(launched, name, program, targets):
    train(make(name), *PROGRAMS[program])
    assert len(launched) >= 5
    for kernel, types in launched.items():
        if (kernel, targets) in compiled:
            continue
        compiled.add((kernel, targets))
        what = f"{kernel.function.__name__} of {name}, {program}"
        promised, _ = sigutils.normalize_signature(kernel.signature)
        assert [plain(t) for t in promised] == [plain(t) for t in types], what
        key = f"{kernel.function.__module__.rpartition('.')[2]}.{kernel.function.__name__}"
        if (name, key) == ("gpu-shared-input", "tiled.conv2d"):
            key = "direct.conv2d"  # its filters, too, come from global memory by an address for each product
        most, per_fma = BUDGETS.get(f"{key} of {program}", BUDGETS.get(key, (128, math.inf)))
        for target in targets:
            ptx, registers, spills, shared = compiled_code(kernel, target)
            assert re.search(rf"^\.target sm_{target[0]}{target[1]}{target[2]}\s*$", ptx, re.MULTILINE), what
            assert ".f64" not in ptx, f"{what} computes in float64"
            assert ".local" not in ptx, f"{what} uses local memory"
            assert spills == 0, f"{what} spills"
            assert registers * kernel.block <= 65536, f"{what} cannot be launched with {kernel.block} threads"
            assert shared <= GPU.shared_bytes, f"{what} takes {shared} bytes of shared memory"
            if target == HOPPER:
                assert registers <= most, f"{what} takes {registers} registers, at most {most}"
                found = instructions_per_fma(ptx)
                assert found <= per_fma, f"{what} takes {found:.1f} instructions per multiply-add, at most {per_fma}"


def plain(given) -> tuple:
    """Return what of an array's type has to match; alignment and mutability do not."""
    return (given.dtype, given.ndim, given.layout) if isinstance(given, numba.types.Array) else (given,)


def compiled_code(kernel: Kernel, target: Target) -> tuple[str, int, int, int]:
    """Compile and link; return PTX, the registers, the bytes spilled and the bytes of shared memory."""
    options = {"device": False, "abi": "numba", "cc": target if target[2] else target[:2], "output": "ltoir"}
    code, _ = cuda.compile(kernel.function, kernel.signature, **options, **kernel.options)
    code, link = ObjectCode.from_ltoir(code), {"arch": "sm_{}{}{}".format(*target), "link_time_optimization": True}
    ptx = Linker(code, options=LinkerOptions(**link, ptx=True)).link("ptx").code.decode().rstrip("\0")
    linker = Linker(code, options=LinkerOptions(**link, ptxas_options=["-v"]))
    linker.link("cubin")
    log = linker.get_info_log()
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log))
    shared = sum(int(n) for n in re.findall(r"(\d+) bytes smem", log))
    return ptx, int(re.search(r"Used (\d+) registers", log)[1]), spills, shared


def instructions_per_fma(ptx: str) -> float:
    """Return the ratio in the straight run of instructions with most multiply-adds: the innermost loop, unrolled."""
    runs: list[list[str]] = [[]]
    for line in ptx[ptx.index("{") :].splitlines():
        if re.match(r"\s*\$L\w+:", line) or re.match(r"\s*(@!?%p\d+\s+)?bra", line):
            runs.append([])
        elif re.match(r"\s+(@!?%p\d+\s+)?[a-z][\w.]*\s", line) and not line.strip().startswith("."):
            runs[-1].append(line)
    hottest = max(runs, key=lambda run: sum("fma.rn.f32" in line for line in run))
    return len(hottest) / max(sum("fma.rn.f32" in line for line in hottest), 1)


@pytest.mark.parametrize("name", ["gpu-naive", "gpu-shared-input", "gpu-shared"])
def test_sums_and_products_of_a_large_batch_take_the_whole_gpu(launched, name, monkeypatch):
    blocks: dict[str, list[int]] = {}
    program, note = make(name).compile(*PROGRAMS["one_conv"]), Kernel.launch

    def launch(self, count, stream, *arguments):
        blocks.setdefault(self.function.__name__, []).append(count)
        note(self, count, stream, *arguments)

    monkeypatch.setattr(Kernel, "launch", launch)
    handle = program.load(np.zeros((1000, *MNIST), np.float32), np.zeros(1000, np.int64))
    program.train(handle, np.arange(1000), 0.1)
    for most in (min(blocks["matmul"]), max(blocks["column_sums"]), max(blocks["conv2d_backward_weights"])):
        assert most >= 2 * GPU.multiprocessors, blocks


def test_every_product_of_the_benchmarks_networks_has_a_fused_kernel(launched):
    for title, network, _ in NETWORKS.values():
        made = make("gpu-fused").compile(network, SOFTMAX, SGD(), 128)._nodes
        plain = [node._stage for node in made if isinstance(node, nodes.PlainLayer)]
        products = [stage for stage in plain if isinstance(stage, ConvStage | LinearStage)]
        assert not [stage for stage in products if isinstance(stage, LinearStage) or stage.dense], title


def test_the_multiply_adds_that_are_timed_are_all_there_is():
    kernel, each = limits.multiply_add(limits.TURNS)
    ptx, _, spills, _ = compiled_code(kernel, HOPPER)
    assert spills == 0
    assert ".f64" not in ptx
    assert ".local" not in ptx
    assert ptx.count("fma.rn.f32") % each == 0
    assert instructions_per_fma(ptx) < 1.1  # else counting would be timed


@pytest.mark.parametrize("target", TARGETS, ids="sm_{0[0]}{0[1]}{0[2]}".format)
def test_a_block_of_as_many_threads_as_may_be_has_registers_enough(target):
    sizes = ConvSizes(H=28, W=28, C=1, K=3, F=256, stride=1, top=0, left=0, P=26, Q=26)
    kernel = direct.conv2d_backward_weights(sizes, GPU.block_threads)  # left to itself it takes up to 96 registers
    _, registers, _, _ = compiled_code(kernel, target)
    assert registers <= 65536 // GPU.block_threads
