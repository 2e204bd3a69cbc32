"""The IDX format, and sets published as four IDX files: MNIST and those made in its form.

Format (Y. LeCun's MNIST page): a magic number, 0x0000 then a byte for the element type then a byte for the number of
dimensions; each dimension as a big-endian uint32; then the elements in C order.
"""

import gzip
import hashlib
import math
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar, cast

import numpy as np

from cnnexp.datasets.base import Dataset, Source, Split, shown
from cnnexp.datasets.download import fetch
from cnnexp.errors import DataError, reason_of
from cnnexp.system.files import open_regular, read_up_to

UNSIGNED_BYTE = 0x08
TYPES = {UNSIGNED_BYTE: "uint8", 0x09: "int8", 0x0B: "int16", 0x0C: "int32", 0x0D: "float32", 0x0E: "float64"}
SLACK_BYTES = 1 << 16  # more than the file unpacked, a gzipped one never has
MAX_BYTES = 2**31  # MNIST has 47 million; a header that claims more than this is not believed
# of the sets in MNIST's form, the shape of each file, by its name without `.gz`
FORM = {
    "train-images-idx3-ubyte": (60_000, 28, 28),
    "train-labels-idx1-ubyte": (60_000,),
    "t10k-images-idx3-ubyte": (10_000, 28, 28),
    "t10k-labels-idx1-ubyte": (10_000,),
}


def read_idx(path: Path, ndim: int) -> tuple[np.ndarray, str]:
    """Read an IDX file, gzipped if its name ends in `.gz`: a uint8 array of `ndim` axes, and the sha256 decompressed.

    Never reads more than its header announces, so a small file cannot unfold into a large one. DataError says what is
    wrong with the file; the caller adds which file it is.
    """
    try:
        with _open(path) as file:
            header = file.read(4 + 4 * ndim)
            shape = _shape(header, ndim)
            size = math.prod(shape)
            body = read_up_to(file, size + 1)  # the byte too many shows trailing ones, and makes gzip check its CRC
    except EOFError as error:
        raise DataError("truncated: the compressed data end early") from error
    except (zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"damaged: {error}") from error
    except OSError as error:
        raise DataError(reason_of(error)) from error
    if len(body) != size:
        found = f"{len(body)} bytes follow" if len(body) < size else "more bytes follow"
        raise DataError(f"truncated or altered: the header announces {'x'.join(map(str, shape))} = {size}, {found}")
    digest = hashlib.sha256(header)
    digest.update(body)
    return np.frombuffer(body, np.uint8).reshape(shape), digest.hexdigest()


def _open(path: Path) -> IO[bytes]:
    if path.suffix != ".gz":
        return open_regular(path)
    with open_regular(path) as file:
        start = file.read(32)
    if not start.startswith(b"\x1f\x8b"):
        html = b"<html" in start.lower() or b"<!doctype" in start.lower()
        raise DataError(f"not gzip but {'a web page' if html else 'something else'}: it begins with {start[:15]!r}")
    return cast(IO[bytes], gzip.open(path, "rb"))


def _shape(header: bytes, ndim: int) -> tuple[int, ...]:
    expected, contents = UNSIGNED_BYTE << 8 | ndim, "images" if ndim == 3 else "labels"
    if len(header) >= 4:
        (magic,) = struct.unpack_from(">I", header)
        kind, dimensions = magic >> 8, magic & 0xFF
        if dimensions == ndim and kind in TYPES and kind != UNSIGNED_BYTE:
            raise DataError(f"elements of type 0x{kind:02X} ({TYPES[kind]}); supported: 0x08 (uint8)")
        if magic != expected:
            raise DataError(f"found magic number 0x{magic:08X}, expected 0x{expected:08X} ({contents})")
    if len(header) < 4 + 4 * ndim:
        raise DataError(f"truncated: {len(header)} bytes, its header alone has {4 + 4 * ndim}")
    shape = struct.unpack_from(f">{ndim}I", header, 4)
    if not 0 < math.prod(shape) <= MAX_BYTES:
        raise DataError(f"altered: the header announces {'x'.join(map(str, shape))} bytes; legal: 1 .. {MAX_BYTES}")
    return shape


@dataclass(frozen=True, kw_only=True, repr=False)
class IdxSet(Source):
    """A set published as four IDX files; images uint8 (N, 28, 28, 1)."""

    root: str | None = None
    verify: bool = True

    mirrors: ClassVar[tuple[str, ...]]
    sha256: ClassVar[tuple[str, ...]]  # of the files, in the order of `FORM`
    gzipped: ClassVar[bool] = False  # whether those are of the gzipped files
    classes: ClassVar[tuple[str, ...]]

    def load(self) -> Dataset:
        read = self._download if self.root is None else self._find
        train_images, train_labels, test_images, test_labels = map(read, FORM, self.sha256)
        source = self.mirrors[0] if self.root is None else str(self.root)
        return self._dataset(Split(train_images, train_labels), Split(test_images, test_labels), self.classes, source)

    def _download(self, name: str, sha256: str) -> np.ndarray:
        most_bytes = math.prod(FORM[name]) + SLACK_BYTES
        return fetch(self.name, f"{name}.gz", self.mirrors, lambda path: self._read(path, name, sha256), most_bytes)

    def _find(self, name: str, sha256: str) -> np.ndarray:
        root, problem = self._path("root"), f"holds neither {name} nor {name}.gz"
        try:
            present = {entry.name for entry in os.scandir(root) if entry.is_file()}
        except OSError as error:
            present, problem = set(), reason_of(error)
        if not (found := [root / one for one in (name, f"{name}.gz") if one in present]):
            fits = f"the folder that holds the {self.name} files, or dataset.root=null to download them"
            raise DataError(f"dataset.root={shown(self.root)}: {problem}; give {fits}")
        try:
            return self._read(found[0], name, sha256)
        except DataError as error:
            expected = "" if self.gzipped else f" (sha256 {sha256} once decompressed)"
            raise DataError(f"{shown(found[0])}: {error}; download it again{expected}") from error

    def _read(self, path: Path, name: str, published: str) -> np.ndarray:
        """Return the array of a file of `FORM`, or raise DataError with what is wrong with it."""
        shape = FORM[name]
        array, sha256 = read_idx(path, len(shape))
        if not self.verify:
            return array
        if array.shape != shape:
            raise DataError(f"holds an array of {array.shape}, the published one is {shape}")
        if not self.gzipped and sha256 != published:
            raise DataError(f"altered: its content has sha256 {sha256}, the published one {published}")
        if self.gzipped and path.suffix == ".gz":
            with path.open("rb") as file:
                packed = hashlib.file_digest(file, "sha256").hexdigest()
            if packed != published:
                raise DataError(f"altered or compressed anew: it has sha256 {packed}, the published one {published}")
        return array
