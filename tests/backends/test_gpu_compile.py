"""Every GPU kernel compiled for real GPUs, with none at hand: by NVVM to PTX, by nvJitLink to machine code.

Programs are made and trained as on a GPU, but arrays are NumPy's and a launch only notes the kernel. So what is
compiled is what would be launched, and the arguments have the types that the signatures promise.
"""

import math
import re
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="compiles with numba-cuda: pip install cnnexp[gpu]")

import numba
from cuda.core import Linker, LinkerOptions, ObjectCode
from numba import cuda
from numba.core import sigutils

from cnnexp.backends import backend_class, gpu_device
from cnnexp.backends.gpu_device import Gpu, Kernel, Tensor
from cnnexp.losses import Loss
from cnnexp.models import Knm, OneConv, TwoConvMlp, TwoConvPool4
from cnnexp.network import AvgPool2d, Conv2d, Flatten, Linear, MaxPool2d, Network, ReLU, Sigmoid
from cnnexp.optimizers import SGD, Adam, AdaMax, RMSprop

pytestmark = pytest.mark.skipif(gpu_device.SIMULATED, reason="the simulator compiles nothing")

GPU = Gpu(0, "none", (9, 0), (13, 0), (13, 0), 132, 1024, 48 * 1024)
CAPABILITIES = ((7, 5), (8, 0), (9, 0))
MNIST = (28, 28, 1)
SOFTMAX, BINARY = Loss.SOFTMAX_CROSS_ENTROPY, Loss.BINARY_CROSS_ENTROPY

PROGRAMS = {
    "one_conv": (OneConv(filters=256).network(MNIST, 10), SOFTMAX, SGD(), 1000),
    "two_conv_mlp": (TwoConvMlp().network(MNIST, 10), SOFTMAX, Adam(), 64),
    "two_conv_pool4": (TwoConvPool4().network(MNIST, 10), SOFTMAX, RMSprop(momentum=0.9), 32),
    "knm_colour": (Knm().network((32, 32, 3), 10), SOFTMAX, AdaMax(), 100),
    "other_layers": (
        Network(
            (9, 9, 2),
            (Conv2d(4, 3, 2, 1), Sigmoid(), MaxPool2d(3, 2, "auto"), AvgPool2d(2, 1), Flatten(), Linear(1), Sigmoid()),
        ),
        BINARY,
        SGD(momentum=0.9, nesterov=True),
        8,
    ),
    "plain_loss": (Network((4,), (ReLU(), Linear(300))), SOFTMAX, SGD(), 4),
}

# Most registers of a thread, and most instructions per multiply-add in the innermost loop, on sm_90, by module and
# kernel. 65,536 registers are 128 for each thread of two blocks of 256. One thread per element and no tiles means
# addresses, and with padding tests, for every product; that is gpu-naive.
BUDGETS = {
    "gpu_naive.conv2d": (48, 36.0),
    "gpu_naive.matmul": (48, 12.0),
    "gpu_shared.conv2d": (48, 9.0),
    "gpu_shared.matmul": (48, 4.0),
    "one_conv.forward": (96, 2.5),
    "one_conv.backward": (96, 2.5),
    "conv_kernels.conv_forward": (64, 9.5),
    "conv_kernels.conv_backward_weights": (96, 6.0),
    "conv_kernels.conv_backward_input": (64, 4.0),
    "linear_kernels.linear_head": (96, 6.0),
}
REGISTERS = 128  # of any other kernel


@pytest.fixture
def launched(monkeypatch) -> dict[Kernel, list]:
    """The kernels that programs launch, with the Numba types of the arguments."""
    kernels: dict[Kernel, list] = {}

    def launch(self, blocks, stream, *arguments):
        assert blocks >= 1
        assert self.block <= GPU.block_threads
        types = [numba.typeof(a.flat if isinstance(a, Tensor) else a) for a in arguments]
        assert kernels.setdefault(self, types) == types

    monkeypatch.setattr(Kernel, "launch", launch)
    monkeypatch.setattr(gpu_device, "open_gpu", lambda index: GPU)
    monkeypatch.setattr(gpu_device, "check_memory", lambda needed, what: None)
    monkeypatch.setattr(gpu_device, "synchronize", lambda: None)
    monkeypatch.setattr(
        gpu_device, "empty", lambda shape, dtype: Tensor(np.zeros(max(math.prod(shape), 1), dtype), shape)
    )
    monkeypatch.setattr(gpu_device, "to_device", lambda array: Tensor(array.flatten(), array.shape))
    monkeypatch.setattr(gpu_device, "to_host", lambda tensor: tensor.flat[: tensor.size].reshape(tensor.shape))
    monkeypatch.setattr(gpu_device, "copy", lambda source, target: None)
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


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", ["gpu-naive", "gpu-shared-input", "gpu-shared", "gpu-fused"])
def test_kernels_compile_within_their_budgets(launched, name, program):
    train(make(name), *PROGRAMS[program])
    assert len(launched) >= 5
    for kernel, types in new(launched):
        what = f"{kernel.function.__name__} of {name}, {program}"
        promised, _ = sigutils.normalize_signature(kernel.signature)
        assert [plain(t) for t in promised] == [plain(t) for t in types], what
        for capability in CAPABILITIES:
            ptx, _ = cuda.compile_ptx(kernel.function, kernel.signature, cc=capability)
            lines = [line.strip() for line in ptx.splitlines()]
            assert f".target sm_{capability[0]}{capability[1]}" in lines, what
            assert not [line for line in lines if ".f64" in line], f"{what} computes in float64"
            assert not [line for line in lines if ".local" in line], f"{what} uses local memory"
        registers, spills, shared = machine_code(ptx, "sm_90")
        key = f"{kernel.function.__module__.rpartition('.')[2]}.{kernel.function.__name__}"
        most, per_fma = BUDGETS.get(key, (REGISTERS, math.inf))
        assert spills == 0, f"{what} spills"
        assert registers <= most, f"{what} takes {registers} registers, at most {most}"
        assert registers * kernel.block <= 65536, f"{what} cannot be launched with {kernel.block} threads"
        assert shared <= GPU.shared_bytes, f"{what} takes {shared} bytes of shared memory"
        found = instructions_per_fma(ptx)
        assert found <= per_fma, f"{what} takes {found:.1f} instructions per multiply-add, at most {per_fma}"


compiled: set[Kernel] = set()  # kernels are kept by their sizes, so two backends share some


def new(launched) -> Iterator[tuple[Kernel, list]]:
    for kernel, types in launched.items():
        if kernel not in compiled:
            compiled.add(kernel)
            yield kernel, types


def plain(numba_type) -> tuple:
    """Return what of an array's type has to match; alignment and mutability do not."""
    if isinstance(numba_type, numba.types.Array):
        return numba_type.dtype, numba_type.ndim, numba_type.layout
    return (numba_type,)


def machine_code(ptx: str, architecture: str) -> tuple[int, int, int]:
    """Assemble; return the registers, the bytes spilled and the bytes of shared memory."""
    options = LinkerOptions(arch=architecture, ptxas_options=["-v"])
    linker = Linker(ObjectCode.from_ptx(ptx.encode()), options=options)
    linker.link("cubin")
    log = linker.get_info_log()
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log))
    shared = [int(size) for size in re.findall(r"\.shared [^;]*\[(\d+)\];", ptx)]
    return int(re.search(r"Used (\d+) registers", log)[1]), spills, sum(shared)


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
