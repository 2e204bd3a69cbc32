"""What a program's state is made of, and how one that lacks something is completed."""

from __future__ import annotations

import numpy as np

from cnnexp.backends.protocol import State
from cnnexp.errors import CheckpointError
from cnnexp.network import Network
from cnnexp.optimizers import Optimizer


def optimizers(network: Network, optimizer: Optimizer) -> list[tuple[slice, Optimizer]]:
    """Return which optimizer takes the step of which part of the flat buffer: one part, or one for each parameter."""
    if optimizer.decay_biases or not optimizer.weight_decay:
        return [(slice(0, network.parameter_count), optimizer)]
    return [(slice(p.offset, p.offset + p.size), optimizer.of(p.shape)) for p in network.parameters]


def complete(state: State, network: Network, optimizer: Optimizer) -> State:
    """Return a state with all that `Program.state` has; what is missing starts as in a run that begins.

    Raises:
        CheckpointError: an array is not of the network's size.
    """
    zeros = np.zeros(network.parameter_count, np.float32)
    fresh = {"parameters": zeros, "step": np.int64(0), **dict.fromkeys(optimizer.slots, zeros)}
    if network.running:
        fresh["running"] = network.initial_running()
    if network.draws:
        fresh["seed"] = np.int64(0)
    whole = {name: np.asarray(state.get(name, value)) for name, value in fresh.items()}
    for name, array in whole.items():
        size = () if array.ndim == 0 else (network.running_count if name == "running" else network.parameter_count,)
        if array.shape != size:
            raise CheckpointError(f"state {name!r} has shape {array.shape}, the network needs {size}")
    return whole
