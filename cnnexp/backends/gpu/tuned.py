"""`gpu-tuned`: `gpu-shared` with the tiles of each convolution measured and chosen on this GPU (chavan, section IV.D).

Each convolution of a network is timed with a few tiles, on random data at the batch size in use; the fastest is kept in
a file, by GPU and shape, so that the search is paid once. No choice changes the order of a sum, nor so a bit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from cnnexp.backends.gpu import device
from cnnexp.backends.gpu.backend import BLOCK, GpuBackend
from cnnexp.backends.gpu.device import Gpu, Tensor
from cnnexp.backends.gpu.graphs import Graphs
from cnnexp.backends.gpu.kernels import ConvSizes
from cnnexp.backends.gpu.shared import CONV_TILE, SharedOps
from cnnexp.backends.gpu.tiled import ConvTile, conv_tile
from cnnexp.errors import ConfigError

BLOCKS = (128, 256)
TILES_AND_FILTERS = ((4, 8), (8, 4), (8, 8), (16, 2), (16, 4))
LAUNCHES, REPEATS = 5, 5


def candidates(sizes: ConvSizes, gpu: Gpu) -> list[ConvTile]:
    """Return the plans worth timing: those that fit on the GPU."""
    plans = []
    for block in BLOCKS:
        for tile, filters in TILES_AND_FILTERS:
            try:
                plan = conv_tile(sizes, block, tile, gpu.shared_bytes, filters)
            except ConfigError:
                continue  # this tile needs more shared memory than there is
            if block <= gpu.block_threads and plan not in plans:
                plans.append(plan)
    return plans or [conv_tile(sizes, min(BLOCK, gpu.block_threads), 1, gpu.shared_bytes, 1)]


def fastest(plans: Sequence[ConvTile], seconds: Callable[[ConvTile], float]) -> ConvTile:
    """Return the plan with the smallest median of `REPEATS` timings, the plans taking turns so that drift hits all."""
    timings: dict[ConvTile, list[float]] = {plan: [] for plan in plans}
    for plan in plans:
        seconds(plan)  # compiles and warms up
    for _ in range(REPEATS):
        for plan in plans:
            timings[plan].append(seconds(plan))
    return min(plans, key=lambda plan: float(np.median(timings[plan])))


class Choices:
    """The chosen plans, by GPU and shape, in a JSON file.

    Args:
        path: the file; made when the first choice is kept. One that does not parse is measured anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, key: str) -> ConvTile | None:
        plan = self._read().get(key)
        return ConvTile(**plan) if plan else None

    def keep(self, key: str, plan: ConvTile) -> None:
        everything = {**self._read(), key: asdict(plan)}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        whole = self._path.with_suffix(f".{os.getpid()}")
        whole.write_text(json.dumps(everything, indent=1, sort_keys=True))
        whole.replace(self._path)  # at once, so that no other process reads half a file

    def _read(self) -> dict[str, dict[str, int]]:
        try:
            return json.loads(self._path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}


@cache
def choices() -> Choices:
    """Return this user's choices: `cnnexp/gpu-tuned.json` in the cache folder."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Choices(Path(folder) / "cnnexp" / "gpu-tuned.json")


class TunedOps(SharedOps):
    """`SharedOps` that times the tiles of each convolution when it first meets it.

    Args:
        gpu: what they are timed on.
        batch_size: images per launch.
        kept: where choices are looked up and kept.
    """

    def __init__(self, gpu: Gpu, batch_size: int, kept: Choices) -> None:
        super().__init__(gpu, BLOCK, CONV_TILE)
        self._gpu, self._batch_size, self._kept = gpu, batch_size, kept
        self._chosen: dict[tuple[ConvSizes, bool], ConvTile] = {}

    def _plan(self, sizes: ConvSizes, is_turned: bool) -> ConvTile:
        if (sizes, is_turned) not in self._chosen:
            self._chosen[sizes, is_turned] = self._choose(sizes, is_turned)
        return self._chosen[sizes, is_turned]

    def _choose(self, sizes: ConvSizes, is_turned: bool) -> ConvTile:
        key = f"{self._gpu.name} batch {self._batch_size} {'input gradient' if is_turned else 'forward'} {sizes}"
        plan = self._kept.get(key)
        if plan is None:
            plan = fastest(candidates(sizes, self._gpu), self._timer(sizes, is_turned))
            self._kept.keep(key, plan)
        return plan

    def _timer(self, sizes: ConvSizes, is_turned: bool) -> Callable[[ConvTile], float]:
        """Return what tells the seconds of `LAUNCHES` convolutions of random data, in a graph: no host is timed."""
        rng, batch = np.random.default_rng(0), self._batch_size
        x = self.to_device(rng.random((batch, sizes.H, sizes.W, sizes.C), np.float32))
        w = self.to_device(rng.random(sizes.K * sizes.K * sizes.C * sizes.F, np.float32))
        y = self.empty((batch, sizes.P, sizes.Q, sizes.F), np.float32)
        self._convolve_often(1, candidates(sizes, self._gpu), sizes, is_turned, x, w, y)  # compiled before captured
        device.synchronize()
        graphs = Graphs(self._gpu.index)
        captured: dict[ConvTile, Any] = {}

        def seconds(plan: ConvTile) -> float:
            if plan not in captured:
                captured[plan] = graphs.capture(
                    partial(self._convolve_often, LAUNCHES, [plan], sizes, is_turned, x, w, y)
                )
            return graphs.seconds(captured[plan])

        return seconds

    def _convolve_often(
        self,
        times: int,
        plans: Sequence[ConvTile],
        sizes: ConvSizes,
        is_turned: bool,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        stream: Any = 0,
    ) -> None:
        own, self.stream = self.stream, stream
        for plan in plans:
            for _ in range(times):
                self._convolve_by(plan, sizes, is_turned, x, w, None, y)
        self.stream = own


@dataclass(frozen=True)
class GpuTuned(GpuBackend):
    """Shared memory with measured tiles."""

    name: ClassVar[str] = "gpu-tuned"

    def ops(self, batch_size: int) -> TunedOps:
        return TunedOps(self.gpu, batch_size, choices())
