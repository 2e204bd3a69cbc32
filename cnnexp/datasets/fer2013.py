"""`fer2013`: 35,887 faces with seven expressions (Goodfellow et al. 2013), 48x48, gray; chavan's second data set."""

import csv
import io
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from cnnexp.datasets.base import Dataset, Source, Split, shown
from cnnexp.errors import DataError, refused
from cnnexp.system.files import open_regular

SIDE = 48
MOST_BYTES = 2**31  # the published file has 300 million
COLUMNS = ["emotion", "pixels", "Usage"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Fer2013(Source):
    """The published CSV: rows of Usage Training (28,709) are trained on, PrivateTest (3,589) tested on.

    `validation_size` takes the first rows of PublicTest (3,589). Kaggle gives the file to its users only.
    """

    name = "fer2013"
    rows: ClassVar[dict[str, int]] = {"Training": 28_709, "PublicTest": 3_589, "PrivateTest": 3_589}
    given: ClassVar = {"path": ("the file fer2013.csv from Kaggle's 2013 facial expression challenge", "fer2013.csv")}
    classes = ("angry", "disgust", "fear", "happy", "sad", "surprise", "neutral")

    path: str | None = None
    verify: bool = True

    def load(self) -> Dataset:
        where = f"dataset.path={shown(self.path)}"
        with refused(DataError, where), warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # NumPy's way to say that text is not all numbers
            try:
                splits = _parse(self._path("path"))
            except (DataError, UnicodeDecodeError, csv.Error) as error:
                raise DataError(f"{where}: {error}; is it the fer2013.csv that Kaggle published?") from error
        for usage, expected in self.rows.items():
            found = len(splits[usage])
            if self.verify and found != expected:
                altered = f"truncated or altered: {found} rows of Usage {usage}, published were {expected}"
                again = "download it again, or take it as it is with dataset.verify=false"
                raise DataError(f"{where}: {altered}; {again}")
        # its validation split is a set of its own, so nothing is held back from the training split
        unheld, public = replace(self, validation_size=None), splits["PublicTest"]
        train, test, _ = unheld._limited(splits["Training"], splits["PrivateTest"])
        self._check_limit("validation_size", len(public), f"PublicTest has {len(public)} images")
        validation = public[: self.validation_size] if self.validation_size else None
        return Dataset.build(self.name, train, test, validation, classes=self.classes, source=str(self.path))


def _parse(path: Path) -> dict[str, Split]:
    """Return one split per Usage."""
    pixels = {usage: bytearray() for usage in Fer2013.rows}
    labels: dict[str, list[int]] = {usage: [] for usage in Fer2013.rows}
    with io.TextIOWrapper(open_regular(path, MOST_BYTES), encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        if (header := next(rows, [])) != COLUMNS:
            raise DataError(f"begins with {','.join(header)[:60]!r}, expected {','.join(COLUMNS)!r}")
        for row in rows:
            usage, label, image = _parse_row(row, rows.line_num)
            labels[usage].append(label)
            pixels[usage] += image
    images = {usage: np.frombuffer(found, np.uint8).reshape(-1, SIDE, SIDE, 1) for usage, found in pixels.items()}
    return {usage: Split(images[usage], np.array(labels[usage], np.int32)) for usage in images}


def _parse_row(row: list[str], line: int) -> tuple[str, int, bytes]:
    if len(row) != len(COLUMNS):
        raise DataError(f"line {line}: {len(row)} columns, expected {len(COLUMNS)}")
    emotion, text, usage = row
    if usage not in Fer2013.rows:
        raise DataError(f"line {line}: Usage is {usage[:30]!r}; legal: {', '.join(Fer2013.rows)}")
    try:
        label, image = int(emotion), np.fromstring(text, np.int64, sep=" ")
    except (ValueError, DeprecationWarning) as error:
        raise DataError(f"line {line}: emotion and pixels must be whole numbers") from error
    if len(image) != SIDE * SIDE:
        raise DataError(f"line {line}: {len(image)} pixels, expected {SIDE} x {SIDE} = {SIDE * SIDE}")
    if not 0 <= label < len(Fer2013.classes):
        raise DataError(f"line {line}: emotion {label}; legal: 0 .. {len(Fer2013.classes) - 1}")
    if image.min() < 0 or image.max() > 255:
        raise DataError(f"line {line}: pixels {image.min()} .. {image.max()}; legal: 0 .. 255")
    return usage, label, image.astype(np.uint8).tobytes()
