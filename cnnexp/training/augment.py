"""Augmentation: every epoch sees each training image moved, turned, bent or covered a little, as drawn for it anew.

What is drawn follows from the seed, the epoch, the transformation and the image's place in the data set alone
(`network.noise`). Transformations compose into one map of coordinates, through which `backends.cpu.warp` looks at each
image once: no image is resampled twice. They apply in the order of `AUGMENTATIONS`, whatever the order in the config.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cnnexp.backends.protocol import Program
from cnnexp.datasets import Split
from cnnexp.errors import ConfigError
from cnnexp.network.noise import draws, layer_key, mix
from cnnexp.system.ranges import check_fields, ranged

AHEAD_IMAGES = 512  # images made at a time, in whole batches, while the program trains on as many: some milliseconds


@dataclass(frozen=True)
class Augmentation:
    """Base: what may happen to an image; `conf/augment/<name>.yaml` explains the fields of each."""

    name: ClassVar[str]
    numbers: ClassVar[int] = 0  # that an image draws
    pixels_key: ClassVar[str] = ""  # the key that must be less than the image's shorter side

    def __post_init__(self) -> None:
        check_fields(self, f"augment.{self.name}")

    def matrix(self, u: np.ndarray, side: tuple[int, int]) -> np.ndarray | None:
        """Return which place before it is seen at a place (row, column, 1) after it, (N,3,3); None: at the same.

        u are its draws, 0 <= u < 1, float64 (N, numbers); side is an image's height and width.
        """
        return None

    def box(self, u: np.ndarray, side: tuple[int, int]) -> np.ndarray | None:
        """Return what it covers with zeros: rows from .. to, columns from .. to, int64 (N,4); None: nothing."""
        return None


def _moved(u: np.ndarray, most: int) -> np.ndarray:
    """Return the maps (N,3,3) of images moved by whole pixels from -most to most, all as likely; u (N,2)."""
    maps = np.tile(np.eye(3), (len(u), 1, 1))
    maps[:, :2, 2] = most - np.floor(u * (2 * most + 1))
    return maps


@dataclass(frozen=True)
class Shift(Augmentation):
    """Move an image by whole pixels; what comes in is 0."""

    name, numbers, pixels_key = "shift", 2, "pixels"
    pixels: int = ranged(2, ">= 1")

    def matrix(self, u: np.ndarray, side: tuple[int, int]) -> np.ndarray:
        return _moved(u, self.pixels)


@dataclass(frozen=True)
class CropFlip(Augmentation):
    """Put zeros around an image, cut a piece of its own size out of that, mirror some (He et al. 2016, CIFAR-10)."""

    name, numbers, pixels_key = "crop_flip", 3, "padding"
    padding: int = ranged(4, ">= 0")
    flip: float = ranged(0.5, ">= 0, <= 1")

    def matrix(self, u: np.ndarray, side: tuple[int, int]) -> np.ndarray:
        maps, mirrored = _moved(u[:, :2], self.padding), u[:, 2] < self.flip
        maps[mirrored, 1, 1], maps[mirrored, 1, 2] = -1, maps[mirrored, 1, 2] + side[1] - 1
        return maps


@dataclass(frozen=True)
class Affine(Augmentation):
    """Shear, turn and scale an image about its center, then move it; what comes in is 0."""

    name, numbers, pixels_key = "affine", 5, "translation"
    rotation: float = ranged(10.0, ">= 0, <= 180")
    translation: float = ranged(2.0, ">= 0")
    scale: float = ranged(0.1, ">= 0, < 1")
    shear: float = ranged(5.0, ">= 0, <= 80")

    def matrix(self, u: np.ndarray, side: tuple[int, int]) -> np.ndarray:
        s, maps, center = 2 * u - 1, np.tile(np.eye(3), (len(u), 1, 1)), (np.array(side) - 1) / 2
        angle, lean = np.radians(self.rotation) * s[:, 0], np.tan(np.radians(self.shear) * s[:, 4])
        cos, sin = (function(angle) / (1 + self.scale * s[:, 3]) for function in (np.cos, np.sin))
        # back from a place that was sheared, (row, column + lean * row), then turned, then scaled
        maps[:, 0, 0], maps[:, 0, 1] = cos, sin
        maps[:, 1, 0], maps[:, 1, 1] = -sin - lean * cos, cos - lean * sin
        maps[:, :2, 2] = center - np.einsum("nij,nj->ni", maps[:, :2, :2], center + self.translation * s[:, 1:3])
        return maps


@dataclass(frozen=True)
class Elastic(Augmentation):
    """Displace every pixel by noise from -1 to 1, blurred by a Gaussian, times alpha (Simard et al. 2003)."""

    name = "elastic"
    alpha: float = ranged(34.0, "> 0")
    sigma: float = ranged(4.0, "> 0, <= 20")

    def taps(self) -> np.ndarray:
        """Return the Gaussian's weights from its middle, that halved, to one end, float32; both halves add up to 1."""
        weights = np.exp(-0.5 * (np.arange(math.floor(3 * self.sigma + 0.5) + 1) / self.sigma) ** 2)
        weights[0] = 0.5
        return (weights / (2 * weights.sum())).astype(np.float32)


@dataclass(frozen=True)
class Cutout(Augmentation):
    """Cover a square of an image with zeros, its center any pixel (DeVries and Taylor 2017)."""

    name, numbers, pixels_key = "cutout", 2, "size"
    size: int = ranged(8, ">= 1")

    def box(self, u: np.ndarray, side: tuple[int, int]) -> np.ndarray:
        first = np.floor(u * side).astype(np.int64) - self.size // 2
        return np.stack([first.clip(0), (first + self.size).clip(0, side)], axis=2).reshape(-1, 4)


AUGMENTATIONS: dict[str, type[Augmentation]] = {kind.name: kind for kind in (Shift, CropFlip, Affine, Elastic, Cutout)}
"""By name, in the order in which they apply."""


def describe(augmentations: Sequence[Augmentation]) -> dict[str, dict[str, Any]]:
    """Return what a config says of them: by name, their keys and values."""
    return {kind.name: dataclasses.asdict(kind) for kind in augmentations}


class Augmenter:
    """Makes the images of an epoch, any of them at any time, out of images (N,H,W,C), uint8 or float32.

    ConfigError is raised where they have no height and width, or are too small.
    """

    def __init__(self, augmentations: Sequence[Augmentation], images: np.ndarray, seed: int) -> None:
        kinds = {kind.name: kind for kind in augmentations}
        if images.ndim != 4 or len(kinds) < len(augmentations):
            needs = f"each kind once, and images with height and width; these have {images.shape[1:]}"
            raise ConfigError(f"augment={[kind.name for kind in augmentations]}: needs {needs}")
        from cnnexp.backends.cpu.warp import compiled  # brings Numba

        self._images, self._seed = np.require(images, requirements=["C", "W"]), seed
        self._kinds, self._side = [kinds[name] for name in AUGMENTATIONS if name in kinds], images.shape[1:3]
        size, shorter = f"{self._side[0]} x {self._side[1]}", min(self._side)
        for kind in self._kinds:
            if (value := getattr(kind, kind.pixels_key, 0)) >= shorter:
                key = f"augment.{kind.name}.{kind.pixels_key}"
                raise ConfigError(f"{key}={value}: the images are {size} pixels; must be less than {shorter}")
        self._warp = compiled(images.dtype.name)
        self._rounding = np.float32(0.5 if images.dtype == np.uint8 else 0)
        elastic: Any = kinds.get("elastic")
        self._taps = elastic.taps() if elastic else np.empty(0, np.float32)
        self._alpha = np.float32(elastic.alpha if elastic else 0)
        self._table = mix(np.arange(2 * math.prod(self._side), dtype=np.int64)).astype(np.uint32)

    def fill(self, epoch: int, places: np.ndarray, out: np.ndarray) -> None:
        """Overwrite out (N,H,W,C) with the images at `places` (int64 (N,)) as an epoch sees them."""
        maps, boxes = np.tile(np.eye(3), (len(places), 1, 1)), np.zeros((len(places), 4), np.int64)
        for kind in self._kinds:
            key = layer_key(self._seed, epoch, f"augment.{kind.name}")
            u = draws(key, places, kind.numbers) * 2.0**-32
            matrix, box = kind.matrix(u, self._side), kind.box(u, self._side)
            maps = maps if matrix is None else maps @ matrix
            boxes = boxes if box is None else box
        matrices, key = np.ascontiguousarray(maps[:, :2], np.float32), layer_key(self._seed, epoch, "augment.elastic")
        drawn = key, self._table, self._taps, self._alpha
        self._warp(self._images, places, matrices, boxes, *drawn, self._rounding, out)


class Feed:
    """The training split, as it is or augmented: then some batches at a time, the next made while these train.

    Dropout draws by an image's place in what the program was given. So parts always begin at a multiple of `_size`
    images: a resumed epoch draws the same.
    """

    def __init__(self, program: Program, split: Split, augmenter: Augmenter | None) -> None:
        self._program, self._split, self._augmenter = program, split, augmenter
        if augmenter is None:
            self._whole = program.load(split.images, split.labels)
            return
        self._size = program.batch_size * max(1, AHEAD_IMAGES // program.batch_size)
        shape = (2, min(self._size, len(split)), *split.images.shape[1:])
        # two of each: a program may keep the array that it was given, and read it while the next is written
        self._images, self._labels = np.zeros(shape, split.images.dtype), np.zeros(shape[:2], np.int32)
        self._handles: list[Any] = [None, None]
        self._pool = ThreadPoolExecutor(1, "augment")
        # (epoch, which of its parts), what writes it
        self._making: tuple[tuple[int, int], Future[None]] = (0, 0), self._pool.submit(lambda: None)
        self._shown = (0, 0)

    def parts(self, epoch: int, order: np.ndarray, start: int, stop: int) -> Iterator[tuple[Any, np.ndarray]]:
        """Yield (handle, places in it) of an epoch's images order[start:stop]; good until the next are asked for."""
        if self._augmenter is None:
            yield self._whole, order[start:stop]
            return
        while start < stop:
            part, first = divmod(start, self._size)
            side, end = part % 2, min(stop - part * self._size, self._size)
            if self._shown != (epoch, part):  # wait until it is made, and have the next one made
                if self._making[0] != (epoch, part):
                    self._make(epoch, order, part)
                self._making[1].result()
                given = self._images[side], self._labels[side]
                self._handles[side] = self._program.refill(self._handles[side], *given, len(order))
                self._shown = epoch, part
                if (part + 1) * self._size < len(order):
                    self._make(epoch, order, part + 1)
            yield self._handles[side], np.arange(first, end)
            start = part * self._size + end

    def _make(self, epoch: int, order: np.ndarray, part: int) -> None:
        """Begin to write images and their labels into one side; they wait for those of an epoch that ended early."""
        assert self._augmenter is not None
        places, side = order[part * self._size : (part + 1) * self._size].astype(np.int64), part % 2
        self._labels[side, : len(places)] = self._split.labels[places]
        made = self._pool.submit(self._augmenter.fill, epoch, places, self._images[side, : len(places)])
        self._making = (epoch, part), made
