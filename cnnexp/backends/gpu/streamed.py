"""Data sets larger than a GPU's free memory: they stay on the host, and go to the GPU some batches at a time.

The images of the steps to come are put side by side on the host, in page-locked memory, from which copies are fastest,
and copied into a window on the GPU. Batches and kernels are those of a data set that fits, and so are the parameters,
bit for bit. A copy and the work on what it brings take turns; they do not overlap.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numba import cuda

from cnnexp.backends.gpu import device
from cnnexp.backends.gpu.device import Tensor
from cnnexp.backends.gpu.kernels.index import u32
from cnnexp.backends.gpu.kernels.layers import put
from cnnexp.backends.layerwise import as_float32
from cnnexp.errors import ConfigError

WINDOW_BYTES = 2**28  # of a window, where a batch does not need more
SHARE = 4  # a window takes one part of so many of the free memory: other splits need room too
BLOCK = 256  # threads


class Streamed:
    """A split on the host, and a window on the GPU through which it is seen.

    Images are (N, *input_shape), bytes or float32, labels integers (N,). The window is the split as it is loaded where
    it fits, but of its first few images: a dataclass of device arrays, among them `images` and `labels`.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, window: Any) -> None:
        self._images, self._labels, self._window = images, labels, window
        self._staged = cuda.pinned_array(window.images.shape, window.images.dtype)
        self.room = len(self._staged)  # images of the window

    def __len__(self) -> int:
        return len(self._images)

    def show(self, indices: np.ndarray) -> Any:
        """Overwrite the window, all work on it being done; return as much of it as was."""
        count, images = len(indices), self._images[indices]
        self._staged[:count] = images if self._staged.dtype == images.dtype else as_float32(images)
        shown = replace(self._window, images=self._window.images[:count], labels=self._window.labels[:count])
        device.copy(self._staged[:count], shown.images)
        device.copy(self._labels[indices].astype(np.int32), shown.labels)
        return shown


def load(
    load_whole: Callable[[np.ndarray, np.ndarray], Any],
    images: np.ndarray,
    labels: np.ndarray,
    image_bytes: int,
    batch_size: int,
) -> Any:
    """Load a split with `load_whole` where it fits in the GPU's free memory, else make it a `Streamed` one.

    Args:
        load_whole: puts images and labels on the GPU, and returns a dataclass of them and more.
        image_bytes: what an image takes on the GPU, all in all.
        batch_size: windows are of whole batches; ConfigError is raised where not even one fits.
    """
    free, total = device.free_memory()
    if len(images) * image_bytes <= free and images.size < device.LARGEST_ARRAY:
        return load_whole(images, labels)
    batch_bytes = batch_size * image_bytes
    batches = int(min(free / SHARE, max(WINDOW_BYTES, batch_bytes)) // batch_bytes)
    if not batches:
        needs = f"the data set, {len(images):,} images, needs {len(images) * image_bytes:,} bytes of GPU memory"
        streams = f"to stream it a batch of {batch_size} needs {SHARE} times {batch_bytes:,}"
        lower = "lower trainer.batch_size or dataset.train_size"
        raise ConfigError(f"{needs}, and {streams}; {free:,} of {total:,} are free; {lower}")
    room = slice(batches * batch_size)
    return Streamed(images, labels, load_whole(images[room], labels[room]))


def parts(handle: Any, indices: np.ndarray) -> Iterator[tuple[Any, np.ndarray]]:
    """Yield (split, places in it) until all of `indices` are done: at once, but for a streamed split."""
    if isinstance(handle, Streamed):
        for start in range(0, len(indices), handle.room):
            part = indices[start : start + handle.room]
            yield handle.show(part), np.arange(len(part))
    else:
        yield handle, indices


def predicted(handle: Any, scored: Callable[[Any], Tensor]) -> np.ndarray:
    """Return the scores (N, O) of all images of a handle: one copy, and one wait for it, where the data set fits.

    `scored` enqueues what makes the scores of a split, and returns where on the GPU they will be.
    """
    found = []
    for split, _ in parts(handle, np.arange(len(handle))):
        scores = scored(split)
        device.synchronize()
        found.append(device.to_host(scores))
    return np.concatenate(found)


def enqueue_batches(scores: Tensor, batch_size: int, stream: Any, outputs: Callable[[int, int], Tensor]) -> None:
    """Enqueue what fills the scores of a split, batch by batch; `outputs` does for (first image, images)."""
    for start in range(0, len(scores), batch_size):
        y = outputs(start, min(batch_size, len(scores) - start))
        put(BLOCK).over(y.size, stream, y, scores, u32(start * (y.size // len(y))))
