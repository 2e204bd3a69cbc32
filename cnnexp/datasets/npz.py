"""`npz`: your own arrays, from one NumPy `.npz` file; never unpickled."""

import logging
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cnnexp.datasets.base import MAX_CLASSES, Dataset, Source, Split, shown
from cnnexp.errors import MOST_SAID, DataError, refused
from cnnexp.system import memory
from cnnexp.system.files import open_regular
from cnnexp.system.ranges import ranged

log = logging.getLogger(__name__)

ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


@dataclass(frozen=True, kw_only=True, repr=False)
class Npz(Source):
    """Arrays train_images, train_labels, test_images and test_labels, as `numpy.savez` writes them.

    Images are uint8 (value / 255) or floats, (N, H, W, C), (N, H, W) or (N, D); labels are integers (N,) from 0.
    """

    name = "npz"
    given: ClassVar = {"path": ("a file of arrays " + ", ".join(ARRAYS), "photos.npz")}
    path: str | None = None
    classes: int | None = ranged(None, f"a whole number 2 .. {MAX_CLASSES}")

    def load(self) -> Dataset:
        train_images, train_labels, test_images, test_labels = self._read()
        if train_images.ndim == 4 and train_images.shape[1] in (1, 3) and min(train_images.shape[2:]) > 4:
            # (N, 1 or 3, H, W) would be taken for low images of many channels
            fits = "channels come last, (N, height, width, channels); write numpy.moveaxis(images, 1, 3)"
            raise DataError(f"npz: images of shape {train_images.shape}: {fits}")
        # labels that are no integers are refused later, with a reason
        whole = train_labels.size and train_labels.dtype.kind in "iu"
        count = self.classes or int(train_labels.max() if whole else 1) + 1
        if whole and train_labels.min() == 1 and not self.classes:
            log.warning("npz: labels from 1: class 0, which no image is of, gets an output; write labels from 0")
        if count > MAX_CLASSES:
            wrong = f"train_labels up to {count - 1}; there can be {MAX_CLASSES} classes"
            raise DataError(f"dataset.path={shown(self.path)}: {wrong}")
        train, test = Split(train_images, train_labels), Split(test_images, test_labels)
        return self._dataset(train, test, tuple(map(str, range(max(count, 2)))), str(self.path))

    def _read(self) -> list[np.ndarray]:
        where = f"dataset.path={shown(self.path)}"
        with refused(DataError, where, ": damaged"), open_regular(self._path("path")) as stream:
            if not zipfile.is_zipfile(stream):
                raise DataError(f"{where}: not a whole .npz file; write one with numpy.savez")
            with zipfile.ZipFile(stream) as archive:
                wanted = [member for member in archive.infolist() if member.filename.removesuffix(".npy") in ARRAYS]
            size = sum(member.file_size for member in wanted)
            memory.need([memory.Part(f"the arrays of {where}", size, "the file's size")])
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as file:
                if missing := [name for name in ARRAYS if name not in file]:
                    found = " ".join(", ".join(file.files).split())[:MOST_SAID] or "nothing"
                    raise DataError(f"{where}: holds no {missing[0]}, but {found}; needs {', '.join(ARRAYS)}")
                return [_array(file, name) for name in ARRAYS]


def _array(file: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    try:
        array = file[name]
    except ValueError as error:
        if "allow_pickle" in str(error):
            raise DataError(f"npz: {name} is an array of Python objects: pickled data refused") from error
        raise
    if not isinstance(array, np.ndarray):  # a member that does not begin as an array is its bytes
        raise DataError(f"npz: {name} is no array; write the file with numpy.savez")
    return array
