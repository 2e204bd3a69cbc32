"""What the count tells of kernels whose numbers are known by hand; run by `test_softgpu.py`."""

import numpy as np
import pytest
from numba import cuda

from softgpu.count import cost, counting
from softgpu.gpus import H200

f32, u32 = np.float32, np.uint32


def counted(kernel, *arguments, blocks=1, threads=32):
    with counting(H200) as found:
        kernel[blocks, threads](*arguments)
        cuda.synchronize()
    (only,) = found
    return only


def zeros(count, dtype=np.float32):
    return cuda.to_device(np.zeros(count, dtype))


def test_instructions_multiply_adds_and_bytes():
    @cuda.jit("void(float32[::1], float32[::1])", launch_bounds=64)
    def polynomial(x, y):
        i = cuda.grid(1)
        value = x[i]
        y[i] = ((value * f32(3) + f32(2)) * value + f32(1)) * value + value

    n = 64 * 3
    found = counted(polynomial, zeros(n), zeros(n), blocks=3, threads=64)
    assert found.short_name == "polynomial"
    assert (found.launches, found.blocks, found.block_threads) == (1, 3, 64)
    assert found.multiply_adds == 3 * n
    assert found.classes["load"].threads == found.classes["store"].threads == n
    assert found.classes["load"].warps == n // 32
    assert found.different_bytes == found.requested_bytes == 2 * 4 * n
    assert found.longest_chain == 1
    assert found.divergent == 0
    assert 4 <= found.registers <= 32


@pytest.mark.parametrize(("stride", "sectors"), [(1, 4), (2, 8), (8, 32)])
def test_sectors_of_a_warp_by_its_stride(stride, sectors):
    @cuda.jit("void(float32[::1], float32[::1], uint32)")
    def gather(x, y, stride):
        y[cuda.threadIdx.x] = x[u32(cuda.threadIdx.x * stride)]

    found = counted(gather, zeros(32 * 8), zeros(32), u32(stride))
    assert found.classes["load"].sectors == sectors
    assert found.read_sectors == sectors


@pytest.mark.parametrize(("stride", "turns"), [(0, 1), (1, 1), (2, 2), (8, 8), (32, 32), (33, 1)])
def test_bank_conflicts_by_stride(stride, turns):
    @cuda.jit("void(float32[::1], uint32)")
    def conflict(y, stride):
        tile = cuda.shared.array(33 * 32, np.float32)
        i = cuda.threadIdx.x
        for k in range(33):
            tile[k * 32 + i] = f32(k)
        cuda.syncthreads()
        y[i] = tile[u32(i * stride)]

    found = counted(conflict, zeros(32), u32(stride))
    assert found.classes["shared load"].wavefronts == turns
    assert found.classes["shared store"].wavefronts == found.classes["shared store"].warps == 33
    assert found.shared_bytes == 4 * 33 * 32


def test_loads_that_wait_for_one_another_are_a_chain_and_others_are_not():
    @cuda.jit("void(uint32[::1], uint32[::1], uint32)")
    def chase(following, y, steps):
        place = u32(0)
        for _ in range(steps):
            place = following[place]
        y[0] = place

    @cuda.jit("void(float32[::1], float32[::1])")
    def together(x, y):
        y[0] = (x[0] + x[8]) + (x[16] + x[24])

    following = cuda.to_device(np.roll(np.arange(64, dtype=np.uint32), -1))
    found = counted(chase, following, zeros(1, np.uint32), u32(20), threads=1)
    assert found.longest_chain == 20
    assert found.longest_cycles > 3 * H200.load_cycles + 17 * H200.cached_cycles  # 20 words lie in 3 sectors
    assert found.longest_cycles < 4 * H200.load_cycles + 25 * (H200.cached_cycles + 20)
    assert counted(together, zeros(64), zeros(1), threads=1).longest_chain == 1


def test_branches_that_split_a_warp():
    @cuda.jit("void(float32[::1], uint32)")
    def split(y, least):
        i = cuda.threadIdx.x
        if i >= least:
            for k in range(y.size):
                y[i] += f32(k)

    assert counted(split, zeros(32), u32(32)).divergent == 0
    assert counted(split, zeros(32), u32(16)).divergent == 1


def test_a_cost_is_that_of_the_scarcest_resource():
    @cuda.jit("void(float32[::1], uint32)")
    def busy(y, turns):
        a = b = c = d = y[cuda.threadIdx.x]
        for _ in range(turns):
            a, b, c, d = a * a + f32(1), b * b + f32(2), c * c + f32(3), d * d + f32(4)
        y[cuda.grid(1)] = (a + b) + (c + d)

    spent = cost(counted(busy, zeros(132 * 2 * 256), u32(64), blocks=132 * 2, threads=256), H200)
    assert spent.resident == 8
    per_multiprocessor = 2 * 256 * (64 * 4 + 3)  # two blocks; sums of the end are floating point as well
    wanted = per_multiprocessor / H200.float_lanes / H200.clock_ghz * 1e-3
    assert spent.parts["multiply-add"] == pytest.approx(wanted, rel=0.01)
    assert spent.parts["multiply-add"] <= spent.bound_us <= spent.model_us
    assert spent.parts["memory"] == 0  # it all fits in the second cache
