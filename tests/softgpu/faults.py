"""Kernels and host code with one fault each, and what the checks say of it; run by `test_softgpu.py`, on two GPUs.

Numba compiles the kernels, so what is checked is what it makes of them. Beside a fault stands the same kernel without.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from cuda.core import Device
from numba import cuda
from ptx_runner import run as run_ptx
from tables import each

import softgpu

f32 = np.float32
THREADS = 64


@pytest.fixture(autouse=True)
def new():
    softgpu.revive()
    yield
    softgpu.revive()


def found(check: str, *words: str) -> bool:
    """Return whether this is all that was found, and says all of that."""
    lines = softgpu.findings() or [""]
    return all(line.startswith(f"{check}: ") for line in lines) and all(word in lines[0] for word in words)


def launch(kernel, *arguments, blocks=1, threads=THREADS):
    kernel[blocks, threads](*arguments)
    cuda.synchronize()


def silent(kernel, *arguments, **where):
    launch(kernel, *arguments, **where)
    assert softgpu.findings() == []


def lost(words, run, *arguments, **where):
    """Run what reads or writes where nothing is: the context is lost, as on a GPU, and one finding says so."""
    with pytest.raises(Exception, match="ILLEGAL_ADDRESS"):
        run(*arguments, **where)
    assert found("memcheck", *words)


def zeros(count=THREADS, dtype=np.float32):
    return cuda.to_device(np.zeros(count, dtype))


@cuda.jit("void(float32[::1], float32[::1], uint32)")
def shift(x, y, first):
    i = cuda.grid(1)
    y[i] = x[i + first]


@cuda.jit("void(float32[::1], uint32)")
def fill(x, count):
    x[cuda.threadIdx.x] = f32(count)


FAULTS = []


def fault(right, wrong, check, *words, **where):
    """Note a kernel (array, number) that is silent with the right number and told of with the wrong one."""
    return lambda kernel: FAULTS.append(pytest.param(kernel, right, wrong, check, words, where, id=kernel.__name__))


@fault(0, 1, "memcheck", "a write", "shared address 0x100", "st.shared")
def past_shared_memory(y, first):
    tile = cuda.shared.array(THREADS, np.float32)
    i = cuda.threadIdx.x
    tile[np.uint32(i + first)] = f32(1)
    cuda.syncthreads()
    y[i] = tile[i]


@fault(2, 1, "initcheck", "shared address", "nobody wrote", blocks=2)
def shared_memory_is_new_in_every_block(y, writers):
    tile = cuda.shared.array(THREADS, np.float32)
    i = cuda.threadIdx.x
    if cuda.blockIdx.x < writers:
        tile[i] = f32(1)
    cuda.syncthreads()
    y[cuda.grid(1)] = tile[i]


@fault(1, 0, "racecheck", "shared")
def a_tile_that_is_overwritten_while_it_is_read(y, barrier):
    tile = cuda.shared.array(THREADS, np.float32)
    i = cuda.threadIdx.x
    total = f32(0)
    for turn in range(3):
        tile[i] = f32(i + turn)
        cuda.syncthreads()
        total += tile[THREADS - 1 - i]
        if barrier:
            cuda.syncthreads()
    y[i] = total


@fault(1, 0, "racecheck", "shared", threads=32)
def lanes_of_a_warp_that_do_not_wait(y, synchronized):
    tile = cuda.shared.array(32, np.float32)
    i = cuda.threadIdx.x
    tile[i] = f32(i)
    if synchronized:
        cuda.syncwarp()
    y[i] = tile[31 - i]


@fault(1, 2, "racecheck", "a write", "global", "block 0", blocks=2)
def two_blocks_that_write_in_one_place(y, writers):
    if cuda.threadIdx.x == 0 and cuda.blockIdx.x < writers:
        y[0] = f32(cuda.blockIdx.x)


@fault(0, THREADS, "racecheck", "global", blocks=2)
def a_block_that_reads_what_another_writes(y, further):
    i = cuda.grid(1)
    value = y[np.uint32(i + further) % cuda.gridsize(1)]
    cuda.syncthreads()
    y[i] = value


@fault(THREADS, 40, "synccheck", "24 are gone", "bar.sync")
def a_barrier_that_some_have_left_for_good(y, stay):
    i = cuda.threadIdx.x
    if i >= stay:
        return
    y[i] = f32(1)
    cuda.syncthreads()
    y[i] += f32(1)


@fault(0, 32, "synccheck", "wait at different barriers")
def a_barrier_in_a_branch(y, least):
    i = cuda.threadIdx.x
    if i >= least:
        y[i] = f32(1)
        cuda.syncthreads()
        y[i] += f32(1)
    else:
        y[i] = f32(2)
        cuda.syncthreads()


@each(*FAULTS)
def test_a_fault_is_found_and_the_same_kernel_without_is_silent(kernel, right, wrong, check, words, where):
    compiled = cuda.jit("void(float32[::1], uint32)")(kernel)
    silent(compiled, zeros(2 * THREADS), np.uint32(right), **where)
    given = compiled, zeros(2 * THREADS), np.uint32(wrong)
    if check == "memcheck":
        lost(words, launch, *given, **where)
    else:
        launch(*given, **where)
        assert found(check, *words)


def test_memcheck_an_index_off_by_one_leaves_the_allocation():
    x, y = zeros(), zeros()
    silent(shift, x, y, np.uint32(0))
    words = "a read of 4 bytes", "outside every allocation", "shift", "ld.global"
    lost(words, launch, shift, x, y, np.uint32(1))
    lost(words, zeros)


def test_memcheck_memory_that_was_given_back():
    memory = Device(0).allocate(4 * THREADS, stream=Device(0).default_stream)
    interface = {"shape": (THREADS,), "typestr": "<f4", "data": (int(memory.handle), False), "version": 3}
    x = cuda.as_cuda_array(SimpleNamespace(__cuda_array_interface__=interface), sync=False)
    silent(fill, x, np.uint32(1))
    memory.close()
    lost(("a write", "outside every allocation"), launch, fill, x, np.uint32(1))


def test_memcheck_a_vector_that_is_not_aligned():
    ptx = """
    ld.global.v2.f32 {%f1, %f2}, [%rd1+OFFSET];
    add.f32 %f1, %f1, %f2;
    st.global.f32 [%rd2], %f1;
    """
    run_ptx(ptx.replace("OFFSET", "8"), np.ones(8, np.float32), 1)
    assert softgpu.findings() == []
    words = "8 bytes at the misaligned address", "ld.global.v2.f32"
    lost(words, run_ptx, ptx.replace("OFFSET", "4"), np.ones(8, np.float32), 1)


def test_memcheck_memory_of_another_gpu():
    with cuda.gpus[1]:
        x = zeros()
    lost(("memory of GPU 1, by a kernel on GPU 0",), launch, shift, x, zeros(), np.uint32(0))


def test_initcheck_memory_that_nobody_wrote_is_read_or_copied_to_the_host():
    launch(shift, cuda.device_array(THREADS, np.float32), zeros(), np.uint32(0))
    assert found("initcheck", "nobody wrote", "ld.global")
    softgpu.revive()
    cuda.device_array(4, np.float32).copy_to_host()
    assert found("initcheck", "a copy to the host of 16 bytes")


def test_racecheck_knows_bytes_apart_and_lets_atomics_be():
    @cuda.jit("void(uint8[::1], int32[::1], uint32)")
    def kernel(y, total, share):
        y[cuda.grid(1) // share] = np.uint8(1)
        cuda.atomic.add(total, 0, np.int32(2))

    y, total = zeros(2 * THREADS, np.uint8), zeros(1, np.int32)
    silent(kernel, y, total, np.uint32(1), blocks=2)
    assert total.copy_to_host()[0] == 4 * THREADS
    launch(kernel, y, total, np.uint32(2))
    assert found("racecheck", "a write", "st.global.u8")


def test_synccheck_a_value_from_a_lane_that_is_not_there():
    @cuda.jit("void(int32[::1])")
    def kernel(y):
        i = cuda.threadIdx.x
        if i < 8:
            y[i] = cuda.shfl_sync(0xFF, i, 20)

    launch(kernel, zeros(32, np.int32), threads=32)
    assert found("synccheck", "from lane 20, which is not there")


@each(
    (np.zeros(8, np.float64), np.uint32(3), "launch argument 0 is array(float64, 1d, C)"),
    (np.zeros((8, 1), np.float32), np.uint32(3), "launch argument 0 is array(float32, 2d, C)"),
    (np.zeros(8, np.float32), 3, "launch argument 1 is int64, the kernel takes uint32"),
)
def test_argcheck(array, count, says):
    launch(fill, cuda.to_device(array), count, threads=4)
    assert found("argcheck", says)


def test_argcheck_an_argument_too_few():
    (compiled,) = fill.overloads.values()
    with pytest.raises(TypeError, match="1 launch arguments"):
        compiled.launch((zeros(),), (1, 1, 1), (4, 1, 1))
    assert found("argcheck", "1 launch arguments for a kernel of 2")


def test_contextcheck_a_copy_in_another_gpus_context():
    with cuda.gpus[1]:
        x = zeros(4)
        x.copy_to_device(np.ones(4, np.float32))
    assert softgpu.findings() == []
    x.copy_to_device(np.ones(4, np.float32))
    assert found("contextcheck", "16 bytes of GPU 1, in the context of GPU 0")
