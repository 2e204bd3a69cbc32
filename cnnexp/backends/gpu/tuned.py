"""`gpu-tuned`: `gpu-shared` with the tiles of each convolution measured and chosen on this GPU (chavan, section IV.D).

Each convolution of a network is timed with a few tiles, on random data at the batch size in use; the fastest is kept in
the cache folder, by GPU and shape, so that the search is paid once. No choice changes the order of a sum, nor so a bit.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from cnnexp.backends.cache import load_or_make
from cnnexp.backends.gpu import device
from cnnexp.backends.gpu.backend import BLOCK, GpuBackend
from cnnexp.backends.gpu.kernels.index import ConvSizes
from cnnexp.backends.gpu.kernels.tiled import ConvTile, conv_tile
from cnnexp.backends.gpu.launch import Graphs, source_digest
from cnnexp.backends.gpu.shared import CONV_TILE, SharedOps
from cnnexp.errors import ConfigError

BLOCKS = (128, 256)
TILES_AND_FILTERS = ((4, 8), (8, 4), (8, 8), (16, 2), (16, 4))
LAUNCHES, REPEATS = 5, 5


def candidates(sizes: ConvSizes, gpu: device.Gpu) -> list[ConvTile]:
    """Return the plans worth timing: those that fit on the GPU."""
    plans = []
    for block in BLOCKS:
        for tile, filters in TILES_AND_FILTERS:
            with contextlib.suppress(ConfigError):  # this tile needs more shared memory than there is
                plan = conv_tile(sizes, block, tile, gpu.shared_bytes, filters)
                if block <= gpu.block_threads and plan not in plans:
                    plans.append(plan)
    return plans or [conv_tile(sizes, min(BLOCK, gpu.block_threads), 1, gpu.shared_bytes, 1)]


def fastest(plans: Sequence[ConvTile], seconds: Callable[[ConvTile], float]) -> ConvTile:
    """Return the plan with the smallest median of `REPEATS` timings, the plans taking turns so that drift hits all."""
    _, *rounds = [[seconds(plan) for plan in plans] for _ in range(1 + REPEATS)]  # the first warms up
    return plans[int(np.median(rounds, axis=0).argmin())]


class TunedOps(SharedOps):
    """`SharedOps` that times the tiles of each convolution, on a whole batch, when it first meets it."""

    def __init__(self, gpu: device.Gpu, batch_size: int) -> None:
        super().__init__(gpu, BLOCK, CONV_TILE)
        self._gpu, self._batch_size = gpu, batch_size
        self._chosen: dict[tuple[ConvSizes, bool], ConvTile] = {}

    def _plan(self, sizes: ConvSizes, is_flipped: bool) -> ConvTile:
        if (sizes, is_flipped) not in self._chosen:
            facts = self._gpu.name, self._batch_size, is_flipped, sizes
            key = hashlib.sha256(source_digest() + repr(facts).encode()).hexdigest()
            self._chosen[sizes, is_flipped] = load_or_make(
                key, lambda kept: ConvTile(**json.loads(kept)), lambda: self._measured(sizes, is_flipped)
            )
        return self._chosen[sizes, is_flipped]

    def _measured(self, sizes: ConvSizes, is_flipped: bool) -> bytes:
        """Return the fastest plan for convolutions of random data, timed in graphs: no host is timed."""
        rng, batch = np.random.default_rng(0), self._batch_size
        x = self.to_device(rng.random((batch, sizes.H, sizes.W, sizes.C), np.float32))
        w = self.to_device(rng.random(sizes.K * sizes.K * sizes.C * sizes.F, np.float32))
        y = self.empty((batch, sizes.P, sizes.Q, sizes.F), np.float32)

        def convolve(plan: ConvTile, times: int, stream: Any) -> None:
            own, self.stream = self.stream, stream
            for _ in range(times):
                self._convolve(sizes, is_flipped, x, w, None, y, plan)
            self.stream = own

        plans, graphs = candidates(sizes, self._gpu), Graphs(self._gpu.index)
        for plan in plans:
            convolve(plan, 1, 0)  # compiled before captured
        device.synchronize()
        captured = {plan: graphs.capture(partial(convolve, plan, LAUNCHES)) for plan in plans}
        return json.dumps(asdict(fastest(plans, lambda plan: graphs.seconds(captured[plan])))).encode()


@dataclass(frozen=True)
class GpuTuned(GpuBackend):
    """Shared memory with measured tiles."""

    name: ClassVar[str] = "gpu-tuned"

    def ops(self, batch_size: int) -> TunedOps:
        return TunedOps(self.gpu, batch_size)
