"""`synthetic`: images of any size, one random pattern per class under noise, for timings and for tests."""

from dataclasses import dataclass

import numpy as np

from cnnexp.datasets.base import MAX_CLASSES, SEED, WHOLE, Dataset, Source, Split, need_images
from cnnexp.system.ranges import ranged

SIZES = ("height", "width", "channels", "train_size", "test_size", "classes")
BLOCK = 4  # pixels; patterns are of square blocks, so that small kernels and pooling can see them


@dataclass(frozen=True, kw_only=True, repr=False)
class Synthetic(Source):
    """Images float32 (N, height, width, channels), each its class's pattern of 0s and 1s plus Gaussian noise.

    Labels go round, so every class has as many images as the next, or one more.
    """

    name = "synthetic"
    height: int = ranged(28, WHOLE)
    width: int = ranged(28, WHOLE)
    channels: int = ranged(1, WHOLE)
    classes: int = ranged(10, f"a whole number 2 .. {MAX_CLASSES}")
    train_size: int = ranged(2000, WHOLE)
    test_size: int = ranged(500, WHOLE)
    noise: float = ranged(0.5, ">= 0")
    seed: int = ranged(0, SEED)

    def load(self) -> Dataset:
        count = self.train_size + self.test_size + (self.validation_size or 0) + self.classes
        largest = max(SIZES, key=lambda key: getattr(self, key))
        need_images(count, 4 * self.height * self.width * self.channels, largest)
        blocks = (self.classes, -(-self.height // BLOCK), -(-self.width // BLOCK), self.channels)
        patterns = np.random.default_rng((self.seed, 0)).integers(0, 2, blocks).astype(np.float32)
        patterns = patterns.repeat(BLOCK, axis=1).repeat(BLOCK, axis=2)[:, : self.height, : self.width]
        train = self._draw(1, patterns, self.train_size + (self.validation_size or 0))
        test = self._draw(2, patterns, self.test_size)
        classes = tuple(f"pattern {label}" for label in range(self.classes))
        return self._dataset(train, test, classes, f"generated, seed {self.seed}")

    def _draw(self, stream: int, patterns: np.ndarray, count: int) -> Split:
        """Return `count` images; fewer are the first of more."""
        labels = np.arange(count, dtype=np.int32) % self.classes
        images = np.random.default_rng((self.seed, stream)).standard_normal((count, *patterns.shape[1:]), np.float32)
        with np.errstate(over="ignore"):  # what is too large is infinite, which is refused
            images *= np.float32(self.noise)
        for label, pattern in enumerate(patterns):
            images[label :: self.classes] += pattern
        return Split(images, labels)
