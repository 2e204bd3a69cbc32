"""`cpu-published`: `cpu` with the two detours of castanheira's code, for `experiment=fusion`.

The maximum of each pooling window is searched again in the backward pass, and the weight gradients of a convolution are
made image by image, then summed (sections 4.2, 5.2 and 6). `cpu-published-argmax` has the second alone, `cpu` neither.
"""

import numpy as np

from cnnexp.backends.cpu.sequential import Cpu, CpuOps
from cnnexp.backends.processor import Array
from cnnexp.network import Window


class ArgmaxOps(CpuOps):
    """`Ops` (see `protocol`) of `cpu`, with the detour of the gradients alone."""

    def conv2d_backward(
        self, x: Array, w: Array, dy: Array, window: Window, dx: Array | None, dw: Array, db: Array | None
    ) -> None:
        dws = np.empty((len(x), *dw.shape), np.float32)
        dbs = np.empty((len(x), w.shape[3]), np.float32)
        for n in range(len(x)):
            image = slice(n, n + 1)
            d_image = None if dx is None else dx[image]
            super().conv2d_backward(x[image], w, dy[image], window, d_image, dws[n], dbs[n])
        dws.sum(axis=0, out=dw)
        if db is not None:
            dbs.sum(axis=0, out=db)


class PublishedOps(ArgmaxOps):
    """Both detours."""

    def __init__(self) -> None:
        super().__init__()
        self._pooled: dict[int, tuple] = {}  # the last max_pool, by the address of what it saved

    def max_pool(self, x: Array, window: Window, y: Array, saved: Array) -> None:
        super().max_pool(x, window, y, saved)
        self._pooled[saved.ctypes.data] = x, y

    def max_pool_backward(self, saved: Array, dy: Array, window: Window, dx: Array) -> None:
        x, y = self._pooled[saved.ctypes.data]
        super().max_pool(x, window, y, saved)
        super().max_pool_backward(saved, dy, window, dx)


class CpuPublished(Cpu):
    """Both detours."""

    name = "cpu-published"
    ops = PublishedOps


class CpuPublishedArgmax(Cpu):
    """The offset of each maximum is kept, and only the gradients take their detour."""

    name = "cpu-published-argmax"
    ops = ArgmaxOps
