"""What every data set is once loaded, and what every source of one shares: limits, checks and the hash."""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np

from cnnexp.errors import ConfigError, DataError
from cnnexp.system import memory
from cnnexp.system.ranges import check_fields, ranged

MAX_CLASSES = 100_000
ONE_SCALE = 10  # times that the largest pixel of one split may be another's
WHOLE = "a whole number >= 1"
SEED = f"a whole number 0 .. {2**63 - 1}"

log = logging.getLogger(__name__)

Rows = TypeVar("Rows", "Split", list[Any])
_OWN: tuple[Literal["C"], Literal["W"]] = ("C", "W")  # frameworks warn of arrays that they cannot write to


@dataclass(frozen=True, eq=False)
class Split:
    """Images and their labels.

    Attributes:
        images: (N, H, W, C) or (N, D); uint8 that stands for value / 255, or float32.
        labels: int32 (N,), 0 .. classes - 1.
    """

    images: np.ndarray
    labels: np.ndarray

    def __repr__(self) -> str:
        return f"Split({len(self.labels):,} images of {self.images.shape[1:]}, {self.images.dtype})"

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: slice) -> Self:
        return type(self)(self.images[rows], self.labels[rows])


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images to train on and images to test on; made by `build`, which checks them.

    Attributes:
        name: as in `conf/dataset/`.
        validation: what early stop and "best" look at instead of the test split, or None.
        classes: one name per label.
        source: where the images came from, for the record.
        sha256: hash over the images and labels of all splits, as they are used.
    """

    name: str
    train: Split
    test: Split
    validation: Split | None
    classes: tuple[str, ...]
    source: str
    sha256: str

    def __repr__(self) -> str:
        return f"Dataset({self.name}, {self.train!r}, {len(self.test):,} to test, {len(self.classes)} classes)"

    def load(self) -> Self:
        """Return itself, as a `Source` whose images are read."""
        return self

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one image, (H, W, C) or (D,)."""
        return self.train.images.shape[1:]

    @classmethod
    def build(
        cls,
        name: str,
        train: Split,
        test: Split,
        validation: Split | None = None,
        *,
        classes: tuple[str, ...],
        source: str = "arrays",
    ) -> Self:
        """Check the splits, bring them to the dtypes of `Split`, and hash them.

        Images may be uint8 or floats of any width and byte order, gray ones also (N, H, W); labels any integers.
        DataError: another dtype or shape, counts that differ, a label out of range, a pixel that is not finite.
        """
        given = {"train": train, "test": test, "validation": validation}
        splits = {key: _checked(f"{name}, {key}", s, len(classes)) for key, s in given.items() if s is not None}
        shapes = {key: s.images.shape[1:] for key, s in splits.items()}
        if len(set(shapes.values())) > 1:
            raise DataError(f"{name}: the splits hold images of different shapes: {shapes}")
        _warn(name, splits["train"], splits["test"], classes)
        digest = hashlib.sha256()
        for key, split in splits.items():
            for array in (split.images, split.labels):
                digest.update(f"{key} {array.dtype} {array.shape} ".encode())
                digest.update(array.data)
        validation = splits.get("validation")
        return cls(name, splits["train"], splits["test"], validation, classes, source, digest.hexdigest())


@dataclass(frozen=True, kw_only=True, repr=False)
class Source:
    """Base of the sources; `conf/dataset/<name>.yaml` explains the fields of each."""

    name: ClassVar[str]
    given: ClassVar[Mapping[str, tuple[str, str]]] = {}  # what a field is that has to be given, and an example
    train_size: int | None = ranged(None, WHOLE)
    test_size: int | None = ranged(None, WHOLE)
    validation_size: int | None = ranged(None, WHOLE)

    def __repr__(self) -> str:
        given = (f"{f.name}={value!r}" for f in fields(self) if (value := getattr(self, f.name)) != f.default)
        return f"{type(self).__name__}({', '.join(given)})"

    def __post_init__(self) -> None:
        for key, (what, example) in self.given.items():
            if getattr(self, key) is None:
                raise ConfigError(f"dataset.{key}: not given; it is {what}, e.g. dataset.{key}={example}")
        check_fields(self, "dataset")

    def load(self) -> Dataset:
        """Read the images.

        Raises:
            DataError: something is missing, damaged or malformed.
            ConfigError: more images are asked for than there are.
        """
        raise NotImplementedError

    def _path(self, key: str) -> Path:
        """Return the path that a field holds, with `~` expanded."""
        value = getattr(self, key)
        try:
            if "\0" in value:
                raise RuntimeError("holds a zero byte")
            return Path(value).expanduser()
        except RuntimeError as error:  # of `~nobody`, too
            raise ConfigError(f"dataset.{key}={value!r}: {error}") from error

    def _limited(self, train: Rows, test: Rows) -> tuple[Rows, Rows, Rows | None]:
        """Return what to train, test and validate on, of whole splits; raise ConfigError where one is too small."""
        count, held = len(train), self.validation_size or 0
        self._check_limit("validation_size", count - 1, f"the training split has {count} images, one must stay")
        kept = f", {held} of which are for validation" if held else ""
        self._check_limit("train_size", count - held, f"the training split has {count} images{kept}")
        self._check_limit("test_size", len(test), f"the test split has {len(test)} images")
        validation = train[count - held :] if held else None
        return train[: self.train_size or count - held], test[: self.test_size], validation

    def _check_limit(self, key: str, most: int, reason: str) -> None:
        if (size := getattr(self, key)) is not None and size > most:
            raise ConfigError(f"dataset.{key}={size}: {reason}; use at most {most}, or null")

    def _dataset(self, train: Split, test: Split, classes: tuple[str, ...], source: str) -> Dataset:
        """Apply the limits and build."""
        _check_counts(f"{self.name}, train", train)  # before a limit hides what does not agree
        _check_counts(f"{self.name}, test", test)
        return Dataset.build(self.name, *self._limited(train, test), classes=classes, source=source)


def shown(path: Path | str | None) -> str:
    """Return a path for an error message: quoted, and on one line whatever it holds."""
    return repr(str(path))


def need_images(count: int, bytes_each: int, key: str) -> None:
    """Raise OutOfMemory unless there is memory for `count` images; `key` of `conf/dataset/` makes them fewer."""
    memory.need([memory.Part(f"{count} images", count * bytes_each, f"dataset.{key}")])


def _checked(where: str, split: Split, classes: int) -> Split:
    """Return the split in the dtypes of `Split`, or raise DataError."""
    images, labels = _checked_images(where, np.asarray(split.images)), np.asarray(split.labels)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        must = "must be one integer per image (for one-hot labels, their argmax over axis 1)"
        raise DataError(f"{where}: labels of type {labels.dtype} and shape {labels.shape}; {must}")
    _check_counts(where, split)
    if not len(labels):
        raise DataError(f"{where}: no images")
    if (wrong := (labels < 0) | (labels >= classes)).any():
        found = f"{labels.min()} .. {labels.max()}, first wrong one at index {wrong.argmax()}"
        raise DataError(f"{where}: labels must be 0 .. {classes - 1} for {classes} classes; found {found}")
    return Split(images, np.require(labels, np.int32, _OWN))


def _check_counts(where: str, split: Split) -> None:
    for what, array in (("images", split.images), ("labels", split.labels)):
        if np.ndim(array) == 0:
            raise DataError(f"{where}: {what} are a single number, no array")
    if len(split.images) != len(split.labels):
        raise DataError(f"{where}: {len(split.images)} images but {len(split.labels)} labels")


def _checked_images(where: str, images: np.ndarray) -> np.ndarray:
    """Return images as contiguous uint8 or float32, (N, H, W, C) or (N, D)."""
    if images.dtype != np.uint8 and images.dtype.kind != "f":
        raise DataError(f"{where}: images of type {images.dtype}; must be uint8 (0 .. 255) or floating point")
    if images.ndim not in (2, 3, 4) or 0 in images.shape[1:]:
        must = "must be (N, height, width, channels), (N, height, width) or (N, features)"
        raise DataError(f"{where}: images of shape {images.shape}; {must}")
    if images.ndim == 3:
        images = images[..., np.newaxis]
    if images.dtype == np.uint8:
        return np.require(images, requirements=_OWN)
    with np.errstate(over="ignore"):  # a float64 too large for float32 becomes inf, reported below
        images = np.require(images, np.float32, _OWN)
    if not (finite := np.isfinite(images)).all():
        first = tuple(int(i) for i in np.unravel_index(finite.argmin(), finite.shape))
        raise DataError(f"{where}: {finite.size - finite.sum()} pixels are NaN or infinite, the first at index {first}")
    return images


def _warn(name: str, train: Split, test: Split, classes: tuple[str, ...]) -> None:
    """Warn of pixels that seem scaled twice, never, or not all; of one class alone; of classes only tested on."""
    images, advice = train.images, ""
    low, high = images.min(), images.max()
    if low == high:
        advice = "all training pixels are equal: nothing can be learned"
    elif images.dtype == np.uint8 and high <= 1:
        advice = "uint8 pixels are divided by 255; multiply these by 255, or store them as float32"
    elif images.dtype != np.uint8 and images.ndim == 4 and high > 10:
        advice = "floating-point pixels are used as they are; divide these by 255, or store them as uint8"
    if advice:
        std = images.std(dtype=np.float64)
        log.warning("%s: pixels from %g to %g, standard deviation %.3g: %s", name, low, high, std, advice)
    seen = _most(train.images), _most(test.images)
    if max(seen) > ONE_SCALE * min(seen):
        log.warning("%s: training pixels are up to %.3g, test pixels up to %.3g: scale them alike", name, *seen)
    # `unique` is slow to start
    found, tested = (set(np.flatnonzero(np.bincount(split.labels))) for split in (train, test))
    if len(found) == 1:
        one = classes[train.labels[0]]
        log.warning("%s: all training images are of one class, %s: nothing can be learned", name, one)
    if unknown := sorted(tested - found):
        shown_names = ", ".join(classes[label] for label in unknown[:10])
        log.warning("%s: %d of the classes tested on have no training image: %s", name, len(unknown), shown_names)


def _most(images: np.ndarray) -> float:
    """Return the largest pixel, with or without its sign, as a network sees it."""
    return max(float(images.max()), -float(images.min())) / (255 if images.dtype == np.uint8 else 1)
