"""Random numbers that follow from where they are used: no generator, no state, no order of drawing.

What Dropout zeroes follows from the seed, the step, the layer, the image's place in what the program was given, and the
number's place in the image. So every backend, and any number of threads or workers, makes the same mask. The
arithmetic is of whole numbers below 2**32 in 64 bits, the same source for Python, NumPy, PyTorch, Numba and CUDA.
"""

import zlib
from typing import Any

import numpy as np

MASK = 0xFFFFFFFF


def mix(x: Any) -> Any:
    """Scramble 32 bits (Mueller's integer hash), a bijection; no product leaves the 63 bits of a signed number."""
    x = (x ^ (x >> 16)) * 0x45D9F3B & MASK
    x = (x ^ (x >> 16)) * 0x45D9F3B & MASK
    return x ^ (x >> 16)


def layer_key(seed: int, step: Any, name: str) -> Any:
    """Return the key of one layer in one training step, or in each of an array of them; steps count from 1."""
    key: Any = 0
    for part in (seed & MASK, seed >> 32 & MASK, step & MASK, step >> 32 & MASK, zlib.crc32(name.encode())):
        key = mix(key ^ part)
    return key


def threshold(rate: float) -> int:
    """Return below what a draw, `mix(mix(key ^ image) ^ mix(element))`, drops its number."""
    return round(rate * 2**32)


def keeps(key: int, rate: float, images: np.ndarray, size: int) -> np.ndarray:
    """Return which numbers are kept, bool (N, size), of the images at these places (int64, (N,)) in what was given."""
    return draws(key, images, size) >= threshold(rate)


def draws(key: int, images: np.ndarray, size: int) -> np.ndarray:
    """Return `size` numbers for each of the images at these places in what was given: 32 bits each, int64 (N, size)."""
    return mix(mix(key ^ images.astype(np.int64))[:, None] ^ mix(np.arange(size, dtype=np.int64)))
