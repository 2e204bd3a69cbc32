"""What the `Ops` of every CPU backend have in common: NumPy arrays, and what layers keep in them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cnnexp.network import BatchNorm2d, MaxPool2d, Stage

Array = np.ndarray


class HostOps:
    """The part of `Ops` (see `protocol`) that computes nothing.

    A max-pool keeps the place, row * size + column, of each window's maximum, int32 (N,U,V,C); a BatchNorm2d the mean
    and the inverse deviation of each channel, float32 (2,C).
    """

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.full(shape, 0, dtype)

    def saved(self, stage: Stage, batch_size: int) -> np.ndarray | None:
        match stage.layer:
            case MaxPool2d():
                return self.empty((batch_size, *stage.output_shape), np.int32)
            case BatchNorm2d():
                return self.empty((2, stage.output_shape[2]), np.float32)
        return None

    def to_device(self, array: np.ndarray) -> np.ndarray:
        return array

    def to_host(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        target[...] = source
