"""Checkpoints of networks that nobody trained."""

from cnnexp import SGD, Constant, Flatten, Linear, Loss, Network
from cnnexp.training.checkpoint import CheckpointWriter, describe

GRAY = (4, 4, 1)
DENSE = (Flatten(), Linear(3))


def saved(folder, layers=DENSE, shape=GRAY, loss=Loss.SOFTMAX_CROSS_ENTROPY, **about):
    """Save a checkpoint of an untrained network; return its file and the parameters."""
    network = Network(shape, layers)
    state = network.initial_state(0)
    training = describe(network, loss, SGD(), 8, Constant(), 0, "0" * 64)
    return CheckpointWriter(folder, training).save(state, about), state["parameters"]
