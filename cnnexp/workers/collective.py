"""What workers do together, stated once; `local` and `mpi` say how."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np


class Collective(Protocol):
    """One worker's end of a group. All workers call the same methods in the same order."""

    rank: int  # 0 .. size - 1; rank 0 leads
    size: int  # how many workers there are
    host_size: int  # how many of them share this machine's cores
    host_rank: int  # 0 .. host_size - 1 among those

    def all_reduce(self, buffer: np.ndarray) -> None:
        """Replace `buffer` (float32 or 64, one axis) by its sum over the workers, the same bits on every worker."""

    def all_gather(self, part: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
        """Return the workers' parts (float32, one axis, `sizes[rank]` long) one after another, on every worker."""

    def broadcast(self, array: np.ndarray) -> None:
        """Replace `array` (contiguous, same shape and dtype everywhere) by rank 0's."""

    def barrier(self) -> None:
        """Return once every worker has come here."""


class Timed:
    """A collective that counts the seconds spent in it; waiting for slower workers is part of them."""

    def __init__(self, collective: Collective) -> None:
        self._collective, self.seconds = collective, 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._collective, name)
        return functools.partial(self._time, found) if callable(found) else found

    def _time(self, method: Callable, *arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return method(*arguments)
        finally:
            self.seconds += time.perf_counter() - started


def share(count: int, size: int, rank: int) -> slice:
    """Return which of `count` things are worker `rank`'s: consecutive, shares differing by at most one."""
    least, more = divmod(count, size)
    start = rank * least + min(rank, more)
    return slice(start, start + least + (rank < more))


def shares(count: int, size: int) -> list[int]:
    """Return how many of `count` things each worker has."""
    return [count // size + (rank < count % size) for rank in range(size)]
