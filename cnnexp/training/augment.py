"""Augmentation: every epoch sees each training image moved, turned, bent or covered a little, as drawn for it anew.

What is drawn follows from the seed, the epoch, the transformation and the image's place in the data set alone
(`network.noise`). Transformations compose into one map of coordinates, through which `backends.cpu.warp` looks at each
image once: no image is resampled twice. They apply in the order of `AUGMENTATIONS`, whatever the order in the config.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cnnexp.backends.protocol import Program
from cnnexp.datasets import Split
from cnnexp.errors import ConfigError
from cnnexp.network.noise import draws, layer_key, mix
from cnnexp.system.ranges import check_range

AHEAD_IMAGES = 512  # images made at a time, in whole batches, while the program trains on as many: some milliseconds

Side = tuple[int, int]
"""Height and width of an image, in pixels."""


@dataclass(frozen=True)
class Augmentation:
    """Base: what may happen to an image; the fields of each are the keys of `conf/augment/<name>.yaml`.

    Attributes:
        name: in the config.
        numbers: how many random numbers it draws for an image.
        ranges: of its keys, in the words of `system.ranges`.
    """

    name: ClassVar[str]
    numbers: ClassVar[int] = 0
    ranges: ClassVar[Mapping[str, str]]

    def __post_init__(self) -> None:
        for key, legal in self.ranges.items():
            check_range(f"augment.{self.name}.{key}", getattr(self, key), legal)

    def check(self, side: Side) -> None:
        """Raise ConfigError where images of this size are too small for it."""

    def matrix(self, u: np.ndarray, side: Side) -> np.ndarray | None:
        """Return which place before it is seen at a place (row, column, 1) after it, (N,3,3); None: at the same.

        Args:
            u: its draws, 0 <= u < 1, float64 (N, numbers).
        """
        return None

    def box(self, u: np.ndarray, side: Side) -> np.ndarray | None:
        """Return what it covers with zeros: rows from .. to, columns from .. to, int64 (N,4); None: nothing."""
        return None

    def _check_less(self, key: str, most: int, side: Side) -> None:
        value = getattr(self, key)
        if value > most:
            raise ConfigError(
                f"augment.{self.name}.{key}={value}: the images are {side[0]} x {side[1]} pixels; use at most {most}"
            )


def _whole(u: np.ndarray, most: int) -> np.ndarray:
    """Return whole numbers from -most to most, all as likely."""
    return np.floor(u * (2 * most + 1)) - most


def _moved(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return the maps (N,3,3) of images that were moved down and to the right by so many pixels."""
    maps = np.tile(np.eye(3), (len(rows), 1, 1))
    maps[:, 0, 2], maps[:, 1, 2] = -rows, -columns
    return maps


@dataclass(frozen=True)
class Shift(Augmentation):
    """Move an image by whole pixels, down or up and to a side; what comes in is 0.

    Attributes:
        pixels: the most in each direction, >= 1 and less than the image's side.
    """

    name: ClassVar[str] = "shift"
    numbers: ClassVar[int] = 2
    ranges: ClassVar[Mapping[str, str]] = {"pixels": ">= 1"}
    pixels: int = 2

    def check(self, side: Side) -> None:
        self._check_less("pixels", min(side) - 1, side)

    def matrix(self, u: np.ndarray, side: Side) -> np.ndarray:
        return _moved(*_whole(u, self.pixels).T)


@dataclass(frozen=True)
class CropFlip(Augmentation):
    """Put zeros around an image, cut a piece of its own size out of that, and mirror some (He et al. 2016, CIFAR-10).

    Attributes:
        padding: zeros on every side in pixels, >= 0 and less than the image's side.
        flip: share of the images whose left and right change sides, 0 .. 1.
    """

    name: ClassVar[str] = "crop_flip"
    numbers: ClassVar[int] = 3
    ranges: ClassVar[Mapping[str, str]] = {"padding": ">= 0", "flip": ">= 0, <= 1"}
    padding: int = 4
    flip: float = 0.5

    def check(self, side: Side) -> None:
        self._check_less("padding", min(side) - 1, side)

    def matrix(self, u: np.ndarray, side: Side) -> np.ndarray:
        maps = _moved(*_whole(u[:, :2], self.padding).T)
        mirrored = u[:, 2] < self.flip
        maps[mirrored, 1, 1], maps[mirrored, 1, 2] = -1, maps[mirrored, 1, 2] + side[1] - 1
        return maps


@dataclass(frozen=True)
class Affine(Augmentation):
    """Shear an image, turn it, scale it, all about its center, and move it; what comes in is 0.

    Each amount is drawn from minus to plus what its key says, all as likely.

    Attributes:
        rotation: degrees, 0 .. 180.
        translation: pixels in each direction, >= 0 and less than the image's side.
        scale: the factor is from 1 - scale to 1 + scale, >= 0 and < 1.
        shear: degrees by which columns lean, 0 .. 80.
    """

    name: ClassVar[str] = "affine"
    numbers: ClassVar[int] = 5
    ranges: ClassVar[Mapping[str, str]] = {
        "rotation": ">= 0, <= 180",
        "translation": ">= 0",
        "scale": ">= 0, < 1",
        "shear": ">= 0, <= 80",
    }
    rotation: float = 10.0
    translation: float = 2.0
    scale: float = 0.1
    shear: float = 5.0

    def check(self, side: Side) -> None:
        self._check_less("translation", min(side) - 1, side)

    def matrix(self, u: np.ndarray, side: Side) -> np.ndarray:
        s = 2 * u - 1
        angle, lean = np.radians(self.rotation) * s[:, 0], np.tan(np.radians(self.shear) * s[:, 4])
        down, across = self.translation * s[:, 1], self.translation * s[:, 2]
        cos, sin = np.cos(angle) / (1 + self.scale * s[:, 3]), np.sin(angle) / (1 + self.scale * s[:, 3])
        maps = np.tile(np.eye(3), (len(u), 1, 1))
        # the inverse of turning what was sheared: (row, column) -> (row, column + lean * row) was first
        maps[:, 0, 0], maps[:, 0, 1] = cos, sin
        maps[:, 1, 0], maps[:, 1, 1] = -sin - lean * cos, cos - lean * sin
        center = (np.array(side) - 1) / 2
        from_center = center + np.stack([down, across], axis=1)
        maps[:, :2, 2] = center - np.einsum("nij,nj->ni", maps[:, :2, :2], from_center)
        return maps


@dataclass(frozen=True)
class Elastic(Augmentation):
    """Displace every pixel by smoothed noise (Simard, Steinkraus and Platt 2003, section 2).

    Displacements, uniform from -1 to 1 for each pixel and direction, are blurred by a Gaussian and multiplied.

    Attributes:
        alpha: what they are multiplied by, > 0 pixels.
        sigma: the Gaussian's standard deviation, > 0 and <= 20 pixels; it is cut off at 3 of them.
    """

    name: ClassVar[str] = "elastic"
    ranges: ClassVar[Mapping[str, str]] = {"alpha": "> 0", "sigma": "> 0, <= 20"}
    alpha: float = 34.0
    sigma: float = 4.0

    def taps(self) -> np.ndarray:
        """Return the Gaussian's weights from its middle to one end, float32; those of both sides add up to 1."""
        weights = np.exp(-0.5 * (np.arange(math.floor(3 * self.sigma + 0.5) + 1) / self.sigma) ** 2)
        return (weights / (2 * weights.sum() - 1)).astype(np.float32)


@dataclass(frozen=True)
class Cutout(Augmentation):
    """Cover a square of an image with zeros (DeVries and Taylor 2017); part of it may lie outside.

    Attributes:
        size: side of the square in pixels, >= 1 and at most the image's; its center is any pixel.
    """

    name: ClassVar[str] = "cutout"
    numbers: ClassVar[int] = 2
    ranges: ClassVar[Mapping[str, str]] = {"size": ">= 1"}
    size: int = 8

    def check(self, side: Side) -> None:
        self._check_less("size", min(side), side)

    def box(self, u: np.ndarray, side: Side) -> np.ndarray:
        first = np.floor(u * side).astype(np.int64) - self.size // 2
        return np.stack([first.clip(0), (first + self.size).clip(0, side)], axis=2).reshape(-1, 4)


AUGMENTATIONS: dict[str, type[Augmentation]] = {kind.name: kind for kind in (Shift, CropFlip, Affine, Elastic, Cutout)}
"""By name, in the order in which they apply."""


def describe(augmentations: Sequence[Augmentation]) -> dict[str, Any]:
    """Return what decides the images that are trained on, as plain values, for a checkpoint; empty where none do."""
    kinds = {kind.name: dataclasses.asdict(kind) for kind in augmentations}
    return {"augment": kinds} if kinds else {}


class Augmenter:
    """Makes the images of an epoch, any of them at any time.

    Args:
        augmentations: of different kinds.
        images: of the training split, (N,H,W,C), uint8 or float32.
        seed: of the run.

    Raises:
        ConfigError: the images have no height and width, or are too small.
    """

    def __init__(self, augmentations: Sequence[Augmentation], images: np.ndarray, seed: int) -> None:
        kinds = [kind.name for kind in augmentations]
        if images.ndim != 4:
            raise ConfigError(f"augment={kinds}: needs images with height and width, these have {images.shape[1:]}")
        if len(set(kinds)) < len(kinds):
            raise ConfigError(f"augment={kinds}: each kind once")
        from cnnexp.backends.cpu.warp import compiled  # brings Numba

        order = list(AUGMENTATIONS)
        self._images = np.require(images, requirements=["C", "W"])
        self._kinds = sorted(augmentations, key=lambda kind: order.index(kind.name))
        self._side, self._seed = images.shape[1:3], seed
        for kind in self._kinds:
            kind.check(self._side)
        self._warp = compiled(images.dtype.name)
        self._rounding = np.float32(0.5 if images.dtype == np.uint8 else 0)
        elastic = next((kind for kind in augmentations if isinstance(kind, Elastic)), None)
        self._taps = elastic.taps() if elastic else np.empty(0, np.float32)
        self._alpha = np.float32(elastic.alpha if elastic else 0)
        self._table = mix(np.arange(2 * math.prod(self._side), dtype=np.int64)).astype(np.uint32)

    def fill(self, epoch: int, places: np.ndarray, out: np.ndarray) -> None:
        """Overwrite out (N,H,W,C) with the images at `places` (int64 (N,)) as an epoch sees them."""
        count, key = len(places), 0
        maps, boxes = np.tile(np.eye(3), (count, 1, 1)), np.zeros((count, 4), np.int64)
        for kind in self._kinds:
            key = layer_key(self._seed, epoch, f"augment.{kind.name}")
            u = draws(key, places, kind.numbers) * 2.0**-32
            matrix, box = kind.matrix(u, self._side), kind.box(u, self._side)
            maps = maps if matrix is None else maps @ matrix
            boxes = boxes if box is None else box
        matrices = np.ascontiguousarray(maps[:, :2], np.float32)
        key = layer_key(self._seed, epoch, "augment.elastic")
        self._warp(
            self._images, places, matrices, boxes, key, self._table, self._taps, self._alpha, self._rounding, out
        )


class Stream:
    """The training split as an epoch sees it, a few batches at a time: the next are made while these are trained on.

    A batch's random numbers in the network (Dropout's) follow from its images' places in what the program is given, so
    what it is given begins at the same images in every run of a seed: at multiples of so many.

    Args:
        program: that trains.
        split: the images as they are.
        augmenter: makes others of them.
        threads: that do.
    """

    def __init__(self, program: Program, split: Split, augmenter: Augmenter, threads: int = 1) -> None:
        self._program, self._split, self._augmenter, self._threads = program, split, augmenter, threads
        self._size = program.batch_size * max(1, AHEAD_IMAGES // program.batch_size)
        shape = (2, min(self._size, len(split)), *split.images.shape[1:])
        # two of each: a program may keep the array that it was given, and read it while the next is written
        self._images, self._labels = np.zeros(shape, split.images.dtype), np.zeros(shape[:2], np.int32)
        self._handles: list[Any] = [None, None]
        self._pool = ThreadPoolExecutor(threads, "augment")
        # (epoch, number of so many images in it), epochs count from 1
        self._making: tuple[tuple[int, int], list[Future[None]]] = ((0, 0), [])
        self._shown = (0, 0)

    def parts(self, epoch: int, order: np.ndarray, start: int, stop: int) -> Iterator[tuple[Any, np.ndarray]]:
        """Yield (handle, places in it) of the images order[start:stop] of an epoch, one after another.

        A handle is good until the next is asked for.
        """
        while start < stop:
            number, first = start // self._size, start % self._size
            end = min(stop - number * self._size, self._size)
            yield self._show(epoch, order, number), np.arange(first, end)
            start = number * self._size + end

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _show(self, epoch: int, order: np.ndarray, number: int) -> Any:
        """Return the handle of an epoch's images number * size and on, once they are made; have the next ones made."""
        side = number % 2
        if self._shown != (epoch, number):
            self._await()  # the images wanted, or those of an epoch that ended early
            if self._making[0] != (epoch, number):
                self._make(epoch, order, number)
                self._await()
            given = self._images[side], self._labels[side]
            self._handles[side] = self._program.refill(self._handles[side], *given, len(order))
            self._shown = epoch, number
            if (number + 1) * self._size < len(order):
                self._make(epoch, order, number + 1)
        return self._handles[side]

    def _await(self) -> None:
        for made in self._making[1]:
            made.result()

    def _make(self, epoch: int, order: np.ndarray, number: int) -> None:
        """Begin to write images and their labels into one side, a share by each thread."""
        places = order[number * self._size : (number + 1) * self._size].astype(np.int64)
        self._labels[number % 2, : len(places)] = self._split.labels[places]
        out, bounds = self._images[number % 2], [len(places) * i // self._threads for i in range(self._threads + 1)]
        shares = [slice(*ends) for ends in itertools.pairwise(bounds)]
        made = [self._pool.submit(self._augmenter.fill, epoch, places[s], out[s]) for s in shares]
        self._making = (epoch, number), made


class Loaded:
    """The training split as it is, all of it where the program wants it; see `Stream`."""

    def __init__(self, program: Program, split: Split) -> None:
        self._handle = program.load(split.images, split.labels)

    def parts(self, epoch: int, order: np.ndarray, start: int, stop: int) -> Iterator[tuple[Any, np.ndarray]]:
        """Yield the handle and order[start:stop]."""
        yield self._handle, order[start:stop]

    def close(self) -> None:
        """Nothing to end."""
