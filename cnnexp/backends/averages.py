"""What `Program.gradients` leaves for `Program.apply`: where a batch moves the running averages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from cnnexp.network import Network


class PendingAverages:
    """Running averages between `Program.gradients`, which changes no state, and `apply`, which moves them.

    Attributes:
        moved: where `apply` moves them, flat float32; None where it leaves them. Who trains with others may replace it.

    Args:
        network: one without running averages has nothing to wait.
        read: returns a copy of a program's running averages (flat float32).
        write: overwrites them.
    """

    def __init__(self, network: Network, read: Callable[[], np.ndarray], write: Callable[[np.ndarray], None]) -> None:
        self._needed, self._read, self._write = bool(network.running), read, write
        self.moved: np.ndarray | None = None

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Put the averages back after a pass that moves them, and keep where it moved them for `commit`."""
        self.drop()
        before = self._read() if self._needed else None
        try:
            yield
            self.moved = self._read() if self._needed else None
        finally:
            if before is not None:
                self._write(before)

    def commit(self) -> None:
        """Move the averages as the last `hold` did, once."""
        if self.moved is not None:
            self._write(self.moved)
        self.drop()

    def drop(self) -> None:
        """Forget what waits."""
        self.moved = None
