"""Where a run's time goes: a ledger of seconds per layer and pass that adds up to the wall time.

A layerwise program is clocked layer by layer, each pass until its work is done. A fused program has no layers to clock,
so its whole step is one entry. What no entry covers is shown too, as "rest".
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np

from cnnexp.backends.protocol import Program
from cnnexp.measuring.roofline import machine_limits, work_per_image
from cnnexp.network import Flatten, Network
from cnnexp.network.losses import Totals
from cnnexp.network.shapes import walk
from cnnexp.training.loop import EpochResult

REST = ("rest", "")
KERNELS = ("forward", "backward")  # passes that any number of cores can share
STEP = ("train", "gather", "update", *KERNELS)  # what a training step consists of


class Ledger:
    """Seconds by (what, layer), none counted twice: while an inner span runs, the outer one stands still.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[tuple[str, str], float] = {REST: 0.0}
        self.clock = clock
        self._open = [REST]
        self._since = clock()

    @contextlib.contextmanager
    def span(self, what: str, layer: str = "") -> Iterator[None]:
        """Charge the time of the block to an entry."""
        self._charge()
        self._open.append((what, layer))
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def inside(self, what: str) -> bool:
        """Tell whether a span of this kind is open."""
        return any(name == what for name, _ in self._open)

    def close(self) -> float:
        """Return the wall seconds since the ledger was made; they are the sum of its entries."""
        self._charge()
        return sum(self.seconds.values())

    def _charge(self) -> None:
        now = self.clock()
        entry = self._open[-1]
        self.seconds[entry] = self.seconds.get(entry, 0.0) + now - self._since
        self._since = now


class Profiled:
    """A `Program` (see `backends.protocol`) whose calls are entered into a ledger.

    Args:
        program: what computes.
        ledger: gets `transfer`, `train`, `evaluate`, and where the program can be watched each layer's passes.
        train: the name of the entry for `train`, e.g. `baseline`; only the default looks into the layers.

    Attributes:
        parts: of the steps that `layers_share` clocked last, each part's share by name; empty before.
    """

    def __init__(self, program: Program, ledger: Ledger, train: str = "train") -> None:
        self._program = cast(Any, program)  # a layerwise one has more than a `Program`
        self._ledger, self._train_entry = ledger, train
        self.layered = train == "train" and hasattr(program, "watch")
        self.parts: dict[str, float] = {}
        if self.layered:
            self._program.watch = self._watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def load(self, images: np.ndarray, labels: np.ndarray) -> Any:
        with self._ledger.span("transfer"):
            return self._program.load(images, labels)

    def train(self, handle: Any, order: np.ndarray, rate: float) -> Totals:
        with self._ledger.span(self._train_entry):
            return self._program.train(handle, order, rate)

    def layers_share(self, handle: Any, order: np.ndarray, rate: float) -> float | None:
        """Train on `order`, clocked inside whatever the entry; return the share of the steps inside layers' passes.

        The share is that of `report`. None where the program is fused, or told of no step.
        """
        if not hasattr(self._program, "watch"):
            return None
        before, inside = self._program.watch, Ledger(self._ledger.clock)
        with self._ledger.span(self._train_entry):
            Profiled(self._program, inside).train(handle, order, rate)
        self._program.watch = before
        trained, self.parts = _trained_s(inside), step_parts(inside)
        return _layers_s(inside) / trained if trained > 0 else None

    def predict(self, handle: Any) -> np.ndarray:
        with self._ledger.span("evaluate"):
            return self._program.predict(handle)

    def _watch(self, layer: str, what: str) -> AbstractContextManager:
        if not self._ledger.inside("train"):
            return contextlib.nullcontext()
        return self._span(layer, what)

    @contextlib.contextmanager
    def _span(self, layer: str, what: str) -> Iterator[None]:
        with self._ledger.span(what, layer):
            yield
            self._program.synchronize()  # a GPU returns before its work is done


def report(ledger: Ledger, program: Profiled, epochs: Sequence[EpochResult], threads: int) -> dict[str, Any]:
    """Close a ledger; return what it tells, as plain values.

    Args:
        ledger: of the whole run.
        program: that trained.
        epochs: that it trained for.
        threads: that it used.

    Returns:
        `wall_s`, `accounted` (share of it), `layered` (whether the layers were clocked one by one), `entries` (what,
        layer, seconds), `threads`, `images` (trained on, over all epochs), `machine` (`roofline.machine_limits`) and
        `share_of_gflops` (of the machine's, that all layers' passes reached); and where the layers were clocked
        `layers` (name, kind, pass, and the run's seconds, flops and bytes) and `parallel_share` (of the seconds of all
        training steps, the part inside these passes).
    """
    wall_s = ledger.close()
    images = sum(epoch.train.count for epoch in epochs)
    entries: list[dict[str, Any]] = [
        {"what": what, "layer": layer, "seconds": s} for (what, layer), s in ledger.seconds.items()
    ]
    entries.sort(key=lambda entry: -entry["seconds"])
    found: dict[str, Any] = {
        "wall_s": wall_s,
        "accounted": 1 - ledger.seconds[REST] / wall_s,
        "layered": program.layered,
        "threads": threads,
        "images": images,
        "entries": entries,
    }
    found["machine"] = machine_limits(threads)
    flops = _flops_per_image(program.network, program.batch_size) * images / _trained_s(ledger)
    found["share_of_gflops"] = flops / 1e9 / found["machine"]["gflops"]
    if program.layered:
        found["layers"] = list(_layers(ledger, program.network, images, program.batch_size))
        found["parallel_share"] = _layers_s(ledger) / _trained_s(ledger)
    return found


def metrics(found: Mapping[str, Any]) -> dict[str, float]:
    """Return a report's numbers by metric name.

    `profile/<layer>/<pass>_ms` is per image; `profile/share/<kind>/<pass>` is of the seconds of all training steps, as
    khandait's table has it.
    """
    named = {"profile/wall_s": found["wall_s"], "profile/accounted": found["accounted"]}
    named["profile/machine_gflops"] = found["machine"]["gflops"]
    named["profile/share_of_gflops"] = found["share_of_gflops"]
    for entry in found["entries"]:
        if not entry["layer"]:
            named[f"profile/{entry['what']}_s"] = entry["seconds"]
    if found["layered"]:
        named["profile/parallel_share"] = found["parallel_share"]
        trained = sum(layer["seconds"] for layer in found["layers"]) / found["parallel_share"]
        for layer in found["layers"]:
            named[f"profile/{layer['name']}/{layer['pass']}_ms"] = 1e3 * layer["seconds"] / found["images"]
            key = f"profile/share/{layer['kind']}/{layer['pass']}"
            named[key] = named.get(key, 0.0) + layer["seconds"] / trained
    return named


def step_parts(ledger: Ledger) -> dict[str, float]:
    """Return the share of a training step by part, e.g. `conv1 backward`; of a fused program all is `train`."""
    trained_s = _trained_s(ledger)
    return {
        f"{layer} {what}".strip(): seconds / trained_s
        for (what, layer), seconds in ledger.seconds.items()
        if what in STEP and trained_s > 0
    }


def _flops_per_image(network: Network, batch_size: int) -> float:
    """Return the floating-point operations that a training step needs for one image."""
    first = next(stage.name for stage in network.stages if stage.weight)
    return sum(
        work_per_image(stage, what, batch_size, needs_dx=stage.name != first)[0]
        for stage in network.stages
        for what in KERNELS
        if not isinstance(stage.layer, Flatten)
    )


def _layers(ledger: Ledger, network: Network, images: int, batch_size: int) -> Iterator[dict[str, Any]]:
    first = next(stage.name for stage in walk(network.stages) if stage.weight)
    for stage in walk(network.stages):
        if isinstance(stage.layer, Flatten):
            continue  # it computes nothing
        for what in KERNELS:
            if (what, stage.name) in ledger.seconds:
                flops, size = work_per_image(stage, what, batch_size, needs_dx=stage.name != first)
                yield {
                    "name": stage.name,
                    "kind": stage.name.split(".")[-1].rstrip("0123456789"),
                    "pass": what,
                    "seconds": ledger.seconds[what, stage.name],
                    "flops": flops * images,
                    "bytes": size * images,
                }


def _layers_s(ledger: Ledger) -> float:
    """Return the seconds inside the layers' passes; the loss is no layer."""
    return sum(s for (what, layer), s in ledger.seconds.items() if what in KERNELS and layer != "loss")


def _trained_s(ledger: Ledger) -> float:
    """Return the seconds inside training steps: their layers, gather, loss, update, and what lies between."""
    return sum(seconds for (what, _), seconds in ledger.seconds.items() if what in STEP)
