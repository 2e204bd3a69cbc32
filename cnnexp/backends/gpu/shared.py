"""`gpu-shared-input` and `gpu-shared`: tiles staged in shared memory (chavan; castanheira's future work).

A block of threads loads a tile once and all its threads read it from shared memory. `gpu-shared-input` stages the
input of the convolutions alone, `gpu-shared` their filters too. A convolution's gradients are of the same kind: that of
the input convolves dy with the flipped filters, that of the weights convolves the input with dy.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from cnnexp.backends.gpu.device import Gpu, Tensor
from cnnexp.backends.gpu.kernels import tiled
from cnnexp.backends.gpu.kernels.index import ConvSizes, conv_sizes, u32
from cnnexp.backends.gpu.kernels.tiled import ConvTile, conv_tile
from cnnexp.backends.gpu.naive import GpuNaive, NaiveOps
from cnnexp.errors import ConfigError
from cnnexp.network import Window

CONV_TILE = 8


class SharedOps(NaiveOps):
    """`NaiveOps` whose convolutions stage their input in shared memory, `tile` x `tile` outputs at a time.

    If they `stage_filters`, these too.
    """

    def __init__(self, gpu: Gpu, block: int, tile: int, stage_filters: bool = True) -> None:
        super().__init__(gpu, block)
        self._tile, self._shared_bytes, self._stage_filters = tile, gpu.shared_bytes, stage_filters

    def conv2d(self, x: Tensor, w: Tensor, b: Tensor | None, window: Window, y: Tensor) -> None:
        sizes = conv_sizes(x, w, window, y)
        if sizes.dense:
            self._convolve(sizes, False, x, w, b, y)
        else:
            super().conv2d(x, w, b, window, y)

    def _conv2d_backward_input(self, sizes: ConvSizes, w: Tensor, dy: Tensor, dx: Tensor) -> None:
        if sizes.stride > 1 or max(sizes.top, sizes.left) >= sizes.K or not sizes.dense:
            super()._conv2d_backward_input(sizes, w, dy, dx)  # not a plain convolution of dy
        else:
            self._convolve(flipped(sizes), True, dy, w, None, dx)

    def _convolve(
        self, sizes: ConvSizes, is_flipped: bool, x: Tensor, w: Tensor, b: Tensor | None, y: Tensor, plan: Any = None
    ) -> None:
        plan = plan or self._plan(sizes, is_flipped)
        kernel = tiled.conv2d(sizes, is_flipped, b is not None, self._stage_filters, plan)
        across, down, deep = plan.tiles(sizes)
        kernel.launch(x.shape[0] * across * down * deep, self.stream, x, w, self._or_nothing(b), y)

    def _plan(self, sizes: ConvSizes, is_flipped: bool) -> ConvTile:
        return conv_tile(sizes, self._block, self._tile, self._shared_bytes)

    def _conv2d_backward_weights(self, sizes: ConvSizes, x: Tensor, dy: Tensor, dw: Tensor) -> None:
        rows = tiled.rows_that_fit(sizes, self._stage_filters, self._shared_bytes)
        if rows == 0 or not sizes.dense:
            super()._conv2d_backward_weights(sizes, x, dy, dw)
            return
        partial, groups = self._slices(len(x), dw), -(-dw.size // self._block)
        kernel = tiled.conv2d_backward_weights(sizes, rows, self._stage_filters, self._block)
        kernel.launch(groups * len(partial), self.stream, x, dy, partial, u32(len(x)), u32(len(partial)))
        self.scratch.add_up(self.stream, partial, dw)


def flipped(sizes: ConvSizes) -> ConvSizes:
    """Return the sizes of the convolution of dy (N,P,Q,F) that gives dx (N,H,W,C), for stride 1."""
    top, left = sizes.K - 1 - sizes.top, sizes.K - 1 - sizes.left
    return replace(sizes, H=sizes.P, W=sizes.Q, C=sizes.F, F=sizes.C, top=top, left=left, P=sizes.H, Q=sizes.W)


@dataclass(frozen=True)
class GpuSharedInput(GpuNaive):
    """Input tiles of the convolutions in shared memory."""

    name: ClassVar[str] = "gpu-shared-input"
    tile: int = CONV_TILE  # side of a tile of outputs of a convolution
    stage_filters: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tile < 1:
            raise ConfigError(f"backend.tile={self.tile}: must be >= 1, the side of a tile of outputs")

    def ops(self, batch_size: int) -> SharedOps:
        return SharedOps(self.gpu, self.block_threads, self.tile, self.stage_filters)


@dataclass(frozen=True)
class GpuShared(GpuSharedInput):
    """Input tiles and filters of the convolutions in shared memory."""

    name: ClassVar[str] = "gpu-shared"
    stage_filters: ClassVar[bool] = True
