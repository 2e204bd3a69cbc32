"""Writes IDX files, sound ones and broken ones, for the tests beside it."""

from __future__ import annotations

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np

from cnnexp.datasets import FashionMnist, Mnist

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx_bytes(array: np.ndarray, kind: int = 0x08) -> bytes:
    """Return a uint8 array as IDX, its element type declared as `kind`."""
    return struct.pack(f">I{array.ndim}I", kind << 8 | array.ndim, *array.shape) + array.tobytes()


def small_set() -> dict[str, bytes]:
    """Return the four files of 30 and 10 images, by name; image n is filled with n, its label is n mod 10."""
    arrays = []
    for n in (np.arange(30, dtype=np.uint8), np.arange(10, dtype=np.uint8)):
        arrays += [np.broadcast_to(n[:, None, None], (len(n), 28, 28)), n % 10]
    return dict(zip(NAMES, map(idx_bytes, arrays), strict=True))


def write(folder: Path, files: dict[str, bytes], *, gzipped: bool = True) -> Path:
    """Write files by name, as `.gz` or plain; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        target = folder / (f"{name}.gz" if gzipped else name)
        target.write_bytes(gzip.compress(content, mtime=0) if gzipped else content)
    return folder


def publish(monkeypatch, files: dict[str, bytes]) -> None:
    """Have files of a small set be those of MNIST (by sha256) and of Fashion-MNIST (by that of the gzipped file)."""
    shapes = ((30, 28, 28), (30,), (10, 28, 28), (10,))
    plain = [hashlib.sha256(content).hexdigest() for content in files.values()]
    packed = [hashlib.sha256(gzip.compress(content, mtime=0)).hexdigest() for content in files.values()]
    monkeypatch.setattr("cnnexp.datasets.idx.FORM", dict(zip(NAMES, shapes, strict=True)))
    for source, digests in ((Mnist, plain), (FashionMnist, packed)):
        monkeypatch.setattr(source, "sha256", tuple(digests))
