"""`quadrants`: points of the plane, told apart by the sign of x y (khandait, section III.A)."""

from dataclasses import dataclass

import numpy as np

from cnnexp.datasets.base import SEED, WHOLE, Dataset, Source, Split, need_images
from cnnexp.system.ranges import ranged


@dataclass(frozen=True, kw_only=True, repr=False)
class Quadrants(Source):
    """Points drawn uniformly from [-1, 1]^2, float32 (N, 2): label 0 in quadrants I and III, 1 in II and IV.

    The paper does not say how many it drew.
    """

    name = "quadrants"
    train_size: int = ranged(2000, WHOLE)
    test_size: int = ranged(500, WHOLE)
    seed: int = ranged(0, SEED)

    def load(self) -> Dataset:
        larger = "train_size" if self.train_size >= self.test_size else "test_size"
        need_images(self.train_size + self.test_size + (self.validation_size or 0), 2 * 8, larger)
        train = self._draw(0, self.train_size + (self.validation_size or 0))
        test = self._draw(1, self.test_size)
        return self._dataset(train, test, ("I and III", "II and IV"), f"generated, seed {self.seed}")

    def _draw(self, stream: int, count: int) -> Split:
        """Return `count` points; fewer are the first of more."""
        points = np.random.default_rng((self.seed, stream)).uniform(-1, 1, (count, 2)).astype(np.float32)
        return Split(points, (points[:, 0] * points[:, 1] < 0).astype(np.int32))
