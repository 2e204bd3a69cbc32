"""What `step` compiles and `program` calls: the modes and the arguments of one compiled function."""

from typing import Annotated, NamedTuple, get_type_hints

import numpy as np

GRADIENTS, APPLY, TRAIN = range(3)
"""What it does: forward and backward; the optimizer alone; training steps."""

LINE = 8
"""Numbers of 8 bytes per cache line: what a thread writes has lines of its own."""


class Array(NamedTuple):
    """An argument that is a C-contiguous array.

    Attributes:
        kind: NumPy's name of the type of its elements. dimensions: how many. written: whether the function may write.
    """

    kind: str
    dimensions: int = 1
    written: bool = False


Bytes = Annotated[np.ndarray, Array("uint8")]
Floats = Annotated[np.ndarray, Array("float32")]
Labels = Annotated[np.ndarray, Array("int32")]
Indices = Annotated[np.ndarray, Array("int64")]
Buffer = Annotated[np.ndarray, Array("float32", 1, written=True)]
Buffers = Annotated[np.ndarray, Array("float32", 2, written=True)]
Sums = Annotated[np.ndarray, Array("float64", 2, written=True)]
Flags = Annotated[np.ndarray, Array("int64", 1, written=True)]
Counts = Annotated[np.ndarray, Array("int64", 2, written=True)]


class Call(NamedTuple):
    """What one thread gets, in order; what is no array is an int64.

    Attributes:
        rank: of this thread. threads: how many there are. mode: see `GRADIENTS`, ...
        bytes_, floats: the images, flat, one of the two empty. nan_mask: (N,), NaN where an image has one.
        labels: (N,). order: the images to run. batch: images per step.
        parameters: (size,). running: the running averages, with room for a vector past them. slots: (2, size).
        gradients: (shares, size), zero before and after a step.
        arenas: (shares, ...), or (tiles of a share * shares, ...) where the step has seams.
        totals: (shares, LINE), added to: losses and hits. flags: (shares * LINE,), for the barrier.
        counts: (shares, at least 6 + arenas), room for what `owned_updates` and seams know of shares and images.
        numbers: (steps, 3 + dropouts), by step: the learning rate, the optimizer's two constants, the dropouts' keys.
    """

    rank: int
    threads: int
    mode: int
    bytes_: Bytes
    floats: Floats
    nan_mask: Floats
    labels: Labels
    order: Indices
    batch: int
    parameters: Buffer
    running: Buffer
    slots: Buffers
    gradients: Buffers
    arenas: Buffers
    totals: Sums
    flags: Flags
    counts: Counts
    numbers: Buffers


class Forward(NamedTuple):
    """What one thread gets of a program that only predicts; names as in `Call`.

    Attributes:
        job: what all threads do; see `COUNT` and those after it. order: 0, 1, ...
    """

    rank: int
    job: Flags
    order: Indices
    parameters: Buffer
    arenas: Buffers


COUNT, IMAGES, ARE_BYTES, SCORES, PROBABILITIES, TURNS = range(6)
"""Places in a job: how many images, their address, whether they are bytes, the scores' address, whether to make
probabilities of them, how many turns to wait for the next job. With 0 images kernels only prepare new parameters."""

TICKETS, DONE, HERE = LINE, 2 * LINE, 3 * LINE
"""Places in a job: the next part to take, how many are done, and from `HERE` on, by rank, whether a thread is awake:
set by who wakes it, cleared by itself when it goes to sleep."""


def arguments(call: type[Call | Forward]) -> dict[str, Array | None]:
    """Return those of the compiled function, by name."""
    hints = get_type_hints(call, include_extras=True)
    return {name: hint.__metadata__[0] if hasattr(hint, "__metadata__") else None for name, hint in hints.items()}
