"""Runs a few lines of PTX on the software GPU: one thread for each row of `x`, %rd1 at its row, %rd2 at its result."""

import numpy as np
from cuda.core import Device, LaunchConfig, ObjectCode, launch
from numba import cuda

from softgpu import assembler, ptx
from softgpu.cubin import Resources

TEXT = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry kernel(.param .u64 x, .param .u64 y, .param .u32 row, .param .u32 result)
{
    .reg .pred %p<20>;
    .reg .b16 %h<20>;
    .reg .b32 %r<20>;
    .reg .b64 %rd<20>;
    .reg .f32 %f<20>;
    .reg .f64 %d<20>;
    .shared .align 4 .b8 tile[128];
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [y];
    ld.param.u32 %r1, [row];
    ld.param.u32 %r2, [result];
    mov.u32 %r3, %tid.x;
    mad.wide.u32 %rd1, %r3, %r1, %rd1;
    mad.wide.u32 %rd2, %r3, %r2, %rd2;
BODY
    ret;
}
"""


def run(body: str, x: np.ndarray, threads: int, dtype=np.float32) -> np.ndarray:
    """Return what the threads stored, one of `dtype` each."""
    device = Device(0)
    device.set_current()
    (entry,) = ptx.parse(TEXT.replace("BODY", body))
    kernel = ObjectCode.from_cubin(assembler.image(entry, Resources(32, 0, 0))).get_kernel("kernel")
    y = cuda.to_device(np.zeros(threads, dtype))
    given = cuda.to_device(np.ascontiguousarray(x).view(np.uint8).reshape(-1))
    row, result = np.uint32(x.nbytes // threads), np.uint32(y.dtype.itemsize)
    places = (array.gpu_data.device_ctypes_pointer.value for array in (given, y))
    launch(device.default_stream, LaunchConfig(grid=1, block=threads), kernel, *places, row, result)
    cuda.synchronize()
    return y.copy_to_host()
