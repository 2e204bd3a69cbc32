"""`digits`: 1,797 handwritten digits (Alpaydin, Kaynak 1998), brought to 28x28.

The file is the test set of UCI's "Optical Recognition of Handwritten Digits" (CC BY 4.0), as scikit-learn ships it:
57 kB, where scikit-learn and what it needs would be a third of an installation.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cnnexp.datasets.base import SEED, Dataset, Source, Split, shown
from cnnexp.errors import DataError
from cnnexp.system.ranges import ranged

SIDE = 28
FILE = Path(__file__).with_name("digits.csv.gz")
TRAINING = 1500  # of 1,797, after shuffling by seed
BRIGHTEST = 16  # pixels are 0 .. 16


@dataclass(frozen=True, kw_only=True, repr=False)
class Digits(Source):
    """1,500 training and 297 test images, uint8 (N, 28, 28, 1), chosen by seed; needs no network."""

    name = "digits"
    seed: int = ranged(0, SEED)

    def load(self) -> Dataset:
        try:
            table = np.loadtxt(FILE, np.int64, delimiter=",")  # of each image 64 pixels, then its label
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise DataError(f"{shown(FILE)}: {error}; install cnnexp anew") from error
        if table.shape != (1797, 65):
            raise DataError(f"{shown(FILE)}: altered: holds {table.shape} numbers, not (1797, 65); install cnnexp anew")
        table = table[np.random.default_rng(self.seed).permutation(len(table))]
        whole = Split(enlarge(table[:, :64].reshape(-1, 8, 8)), table[:, 64])
        return self._dataset(whole[:TRAINING], whole[TRAINING:], tuple("0123456789"), "UCI, handwritten digits")


def enlarge(images: np.ndarray) -> np.ndarray:
    """Return 8x8 images of 0 .. 16 as uint8 (N, 28, 28, 1), interpolated linearly in both directions.

    Pixel centres are aligned: row i of 28 lies at (i + 1/2) * 8/28 - 1/2 = (4 i - 5) / 14 of 8, so all weights are
    fourteenths. In whole numbers the result, and so the hash of the data set, is the same on every machine.
    """
    at = np.clip(4 * np.arange(SIDE) - 5, 0, 14 * 7)
    below = np.minimum(at // 14, 6)
    far = (at - 14 * below).astype(np.int32)
    near, images = 14 - far, images.astype(np.int32)
    rows = images[:, below] * near[:, None] + images[:, below + 1] * far[:, None]
    whole = 14 * 14 * BRIGHTEST
    pixels = ((rows[:, :, below] * near + rows[:, :, below + 1] * far) * 255 + whole // 2) // whole
    return pixels.astype(np.uint8)[..., np.newaxis]
