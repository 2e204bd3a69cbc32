"""What `step` compiles and `program` calls: the modes and the arguments of one compiled function."""

from __future__ import annotations

from typing import NamedTuple

PREDICT, GRADIENTS, APPLY, TRAIN = 0, 1, 2, 3
"""What it does: forward only; forward and backward; the optimizer alone; training steps."""

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


ARGUMENTS: dict[str, Array | None] = {
    "rank": None,
    "crew": None,
    "mode": None,
    "bytes_": Array("uint8"),
    "floats": Array("float32"),
    "nan_mask": Array("float32"),
    "labels": Array("int32"),
    "order": Array("int64"),
    "batch": None,
    "parameters": Array("float32", 1, written=True),
    "slots": Array("float32", 2, written=True),
    "gradients": Array("float32", 2, written=True),
    "arenas": Array("float32", 2, written=True),
    "scores": Array("float32", 2, written=True),
    "totals": Array("float64", 2, written=True),
    "flags": Array("int64", 1, written=True),
    "counts": Array("int64", 2, written=True),
    "numbers": Array("float32", 2, written=True),
}
"""By name, in order; what is no array is an int64. `step.make_work` says what they mean."""
