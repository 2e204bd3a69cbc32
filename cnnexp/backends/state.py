"""A program's state: what it is made of, how it is completed, and what waits to become part of it."""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from cnnexp.errors import CheckpointError
from cnnexp.network import Network
from cnnexp.optimizers import Optimizer

State = dict[str, np.ndarray]
AVERAGES = {name: f"average_{name}" for name in ("parameters", "running")}  # what `training.steps` adds, of which array


def optimizers(network: Network, optimizer: Optimizer) -> list[tuple[slice, Optimizer]]:
    """Return which optimizer takes the step of which part of the flat buffer: one part, or one for each parameter."""
    if optimizer.decay_biases or not optimizer.weight_decay:
        return [(slice(0, network.parameter_count), optimizer)]
    return [(slice(p.offset, p.offset + p.size), optimizer.of(p.shape)) for p in network.parameters]


def complete(state: State, network: Network, optimizer: Optimizer) -> State:
    """Return a state with all of `Program.state`, what is missing as in a new run; CheckpointError: a size is wrong."""
    zeros = np.zeros(network.parameter_count, np.float32)
    slots = dict.fromkeys(optimizer.slots, zeros)
    fresh = {"parameters": zeros, "step": np.int64(0), **slots, **network.initial_rest(0)}
    whole = {name: np.asarray(state.get(name, value)) for name, value in fresh.items()}
    for name, array in whole.items():
        size = () if array.ndim == 0 else (network.running_count if name == "running" else network.parameter_count,)
        if array.shape != size:
            raise CheckpointError(f"state {name!r} has shape {array.shape}, the network needs {size}")
    return whole


class PendingAverages:
    """Running averages between `Program.gradients`, which changes no state, and `apply`, which moves them.

    A program's are copied by `read` and overwritten by `write` (flat float32); a network without has nothing to wait.

    Attributes:
        moved: where `apply` moves them, flat float32; None where it leaves them. Who trains with others may replace it.
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
        self.moved = None
