"""Who takes part: each name, where it is defined and whether its interpreter is ours or the peers'."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from benchmarks.cases import Case, Data

Side = Literal["ours", "peer", "limit"]


class Contestant(Protocol):
    """A case compiled and warm in one framework, its data already in that framework's memory.

    Attributes:
        batch_size: images per step; less than the case's where a contestant is too slow for a whole batch.
        compile_s: seconds that compiling took, before anything is timed.
        facts: what it runs on, for the record: versions, threads, threading layer.
    """

    batch_size: int
    compile_s: float
    facts: dict[str, Any]

    def reset(self) -> None:
        """Go back to the first parameters and a fresh optimizer."""
        ...

    def train(self, steps: int) -> None:
        """Take training steps over the batches, from the first one on; return when the work is done."""
        ...

    def gradient(self) -> tuple[float, np.ndarray]:
        """Return the mean loss of the first batch and its flat gradient, laid out as `Network.parameters`."""
        ...

    def parameters(self) -> np.ndarray:
        """Return the flat parameters, laid out as `Network.parameters`."""
        ...

    def draw(self, on: bool) -> bool:
        """Have Dropout leave numbers out from now on, or not; return whether it does, and as the oracle draws them.

        Who draws as the oracle does may be compared with it, and need not stop.
        """
        ...


@dataclass(frozen=True)
class Entry:
    """A contestant's name and how to make it.

    Attributes:
        name: as in tables and `--contestants`.
        side: one of our backends, a peer, or a measure of the machine itself.
        target: `module:Class` under `benchmarks`; called as `Class(case, data, threads, **options)`.
        module: what must be importable for it to take part.
        options: passed on.
        infers: whether it predicts, in the cases of the group `inference`, and does not train.
    """

    name: str
    side: Side
    target: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    infers: bool = False

    def make(self, case: Case, data: Data, threads: int) -> Any:
        module, cls = self.target.split(":")
        return getattr(importlib.import_module(f"benchmarks.{module}"), cls)(case, data, threads, **self.options)


def _ours(name: str, slow: bool = False) -> Entry:
    return Entry(name, "ours", "ours:Ours", "cnnexp", {"backend": name, "slow": slow})


ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("fma-loop", "limit", "machine:FmaLoop", "numba"),
        Entry("sgemm", "limit", "machine:Sgemm", "numpy"),
        _ours("cpu-simd"),
        _ours("cpu-parallel"),
        _ours("cpu"),
        _ours("unrolled-parallel", slow=True),
        _ours("unrolled", slow=True),
        _ours("numpy-parallel", slow=True),
        _ours("numpy", slow=True),
        _ours("python", slow=True),
        Entry("torch", "peer", "torch_peer:Torch", "torch"),
        Entry("torch channels_last", "peer", "torch_peer:Torch", "torch", {"channels_last": True}),
        Entry("torch compiled", "peer", "torch_peer:Torch", "torch", {"compiled": True}),
        Entry("keras", "peer", "keras_peer:Keras", "tensorflow"),
        Entry("keras jit_compile", "peer", "keras_peer:Keras", "tensorflow", {"jit_compile": True}),
        Entry("jax", "peer", "jax_peer:Jax", "optax"),
        Entry("cpu-simd predict", "ours", "inference:Ours", "cnnexp", infers=True),
        Entry("onnxruntime", "peer", "inference:OnnxRuntime", "onnxruntime", infers=True),
        Entry("torch inference_mode", "peer", "inference:Torch", "torch", infers=True),
        Entry("torch inference_mode channels_last", "peer", "inference:Torch", "torch", {"channels_last": True}, True),
    )
}


def select(wanted: list[str]) -> list[Entry]:
    """Return the entries that names and sides in `wanted` mean, in the order of `ENTRIES`; the limits always.

    Raises:
        ValueError: nothing has that name.
    """
    for name in wanted:
        if name not in ("ours", "peer", *ENTRIES):
            raise ValueError(f"--contestants {name}: unknown; legal: ours, peer, {', '.join(ENTRIES)}")
    return [entry for entry in ENTRIES.values() if entry.side == "limit" or {entry.name, entry.side} & set(wanted)]
