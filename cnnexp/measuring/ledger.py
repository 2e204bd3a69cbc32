"""Where a run's time goes: a ledger of seconds per layer and pass that adds up to the wall time.

A layerwise program is clocked layer by layer, each pass until its work is done. A fused program clocks its own parts
(`backends.parts`) where it was compiled to; else its whole step is one entry. What no entry covers is the "rest".
"""

import contextlib
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from cnnexp.backends.parts import Part
from cnnexp.backends.protocol import Backend, Program
from cnnexp.measuring.roofline import fused_work, machine_limits, work_per_image
from cnnexp.network import Flatten, Network
from cnnexp.network.shapes import walk
from cnnexp.training.loop import EpochResult, Observer

REST = ("rest", "")
KERNELS = ("forward", "backward")  # passes that any number of cores can share
CALLS = "train"  # what no part of a step covers
BETWEEN = "between the parts"  # the same where parts are known
STEP = (CALLS, "gather", "update", "wait", *KERNELS)  # what a training step consists of


class Ledger:
    """Seconds of `clock` by (what, layer), none counted twice: while an inner span runs, the outer one stands still."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[tuple[str, str], float] = defaultdict(float, {REST: 0.0})
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
        self.seconds[self._open[-1]] += now - self._since
        self._since = now


class Charged:
    """An observer of training whose time after every epoch is charged to the entry `record`."""

    def __init__(self, observer: Observer, ledger: Ledger) -> None:
        self.progressed = observer.progressed
        self.finished = ledger.span("record")(observer.finished)


class Profiled:
    """A `Program` (see `backends.protocol`) whose calls are entered into a ledger.

    It gets `transfer`, `train`, `evaluate`, and where the program can be watched each layer's passes. The entry for
    `train` may have another name, e.g. `baseline`; only the default looks into the layers.
    """

    def __init__(self, program: Program, ledger: Ledger, train: str = "train") -> None:
        self._program, self._ledger = program, ledger
        self._entries = {"load": "transfer", "train": train, "predict": "evaluate"}
        self._shared_s: dict[tuple[str, str], float] = defaultdict(float)
        self._is_watched = train == "train" and program.watch(self._watch)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._program, name)
        return self._ledger.span(self._entries[name])(found) if name in self._entries else found

    def layers_share(self, handle: Any, order: np.ndarray, rate: float) -> float | None:
        """Train on `order`, clocked; return the share of `report` inside layers' passes, None of a fused program."""
        inside = Ledger(self._ledger.clock)
        inner = Profiled(self._program, inside)
        if not inner._is_watched:
            return None
        with self._ledger.span(self._entries["train"]):
            inner.train(handle, order, rate)
        self._program.watch(None)
        for entry, seconds in inside.seconds.items():
            self._shared_s[entry] += seconds
        trained = _trained_s(inside.seconds)
        return _layers_s(inside.seconds) / trained if trained > 0 else None

    def shares(self) -> dict[tuple[str, str], float]:
        """Return the share of the steps that `layers_share` clocked by (what, layer); empty before."""
        return _shares(self._shared_s)

    def _watch(self, layer: str, what: str) -> AbstractContextManager:
        return self._ledger.span(what, layer) if self._ledger.inside("train") else contextlib.nullcontext()


def report(ledger: Ledger, program: Profiled, epochs: Sequence[EpochResult], backend: Backend) -> dict[str, Any]:
    """Close the ledger of a whole run, in which a program trained for some epochs; return plain values by name.

    `backend`, `threads`, `device` (its GPU; empty on a CPU), `wall_s`, `accounted` (share of it), `layered` (whether
    layers were clocked), `entries` (what, layer, seconds), `images` (trained on, over all epochs), `us_per_image` (of
    training, by the epochs' own clock), `machine` (`roofline.machine_limits`, or the GPU's), `ways` (by layers, which
    of several ways to compute them was taken) and `share_of_gflops` (of the machine's, that all layers' passes
    reached); and where layers were clocked `layers` (name, layers, kind, pass, and the run's seconds, flops, bytes and
    multiply_adds, and if fused kernels by seconds, at_once, fewer) and `parallel_share` (their share of all steps).
    """
    wall_s = ledger.close()
    images = sum(epoch.train.count for epoch in epochs)
    own = dict(program.clocked())  # of a fused program
    for part, seconds in own.items():
        ledger.seconds[part.what, part.name] += seconds
        ledger.seconds["train", ""] -= seconds
    largest_first = dict(sorted(ledger.seconds.items(), key=lambda entry: -entry[1]))
    found = _step(backend, images, sum(epoch.epoch_s for epoch in epochs), largest_first)
    found |= {"wall_s": wall_s, "accounted": 1 - ledger.seconds[REST] / wall_s}
    limits = dict(backend.limits())
    found["machine"] = limits if "gb_per_s" in limits else {**machine_limits(backend.threads), **limits}
    trained_s = _trained_s(ledger.seconds)
    found["ways"] = {row.name: row.algorithm for row in program.explain() if row.layers} or {
        part.name: part.kernel for part in own if part.what == "forward" and part.multiply_adds
    }
    layers = list(_fused(own, program, images) if own else _layers(ledger.seconds, program, images))
    found["layered"] = bool(layers)
    # a fused program leaves out what the layers one by one would compute in vain
    flops = sum(layer["flops"] for layer in layers) or images * sum(
        work_per_image(stage, what, program.batch_size, stage.name != _first_trained(program.network))[0]
        for stage, what in itertools.product(walk(program.network.stages), KERNELS)
    )
    found["share_of_gflops"] = flops / trained_s / 1e9 / found["machine"]["gflops"]
    if layers:
        found["layers"] = layers
        found["parallel_share"] = _layers_s(ledger.seconds) / trained_s
    return found


def report_beside(program: Profiled, backend: Backend, epochs: Sequence[EpochResult]) -> dict[str, Any] | None:
    """Return what a baseline's steps took, as `report` has a run's; None where it was not timed.

    Its microseconds are a median over the epochs. Its parts are of some steps clocked before: shares of that median.
    """
    timed = [result.comparison.seconds_per_image for result in epochs if result.comparison is not None]
    if not timed:
        return None
    images = sum(epoch.train.count for epoch in epochs)
    trained_s = statistics.median(timed) * images
    seconds = {entry: share * trained_s for entry, share in program.shares().items()}
    step = _step(backend, images, trained_s, seconds)
    return {**step, "layers": list(_layers(seconds, program, images)), "machine": {}}


def _step(backend: Backend, images: int, trained_s: float, seconds: Mapping[tuple[str, str], float]) -> dict[str, Any]:
    """Return what a run's report and its baseline's both have."""
    return {
        "backend": backend.name,
        "threads": backend.threads,
        "device": backend.device_name if backend.on_gpu else "",
        "images": images,
        "us_per_image": 1e6 * trained_s / images,
        "entries": [{"what": what, "layer": layer, "seconds": s} for (what, layer), s in seconds.items()],
    }


def metrics(found: Mapping[str, Any]) -> dict[str, float]:
    """Return a report's numbers by metric name.

    `profile/<layer>/<pass>_ms` is per image; `profile/share/<kind>/<pass>` of all steps' seconds (khandait's table).
    """
    named = {f"profile/{what}": found[what] for what in ("wall_s", "accounted", "share_of_gflops")}
    named["profile/machine_gflops"] = found["machine"]["gflops"]
    named |= {f"profile/{entry['what']}_s": entry["seconds"] for entry in found["entries"] if not entry["layer"]}
    if found["layered"]:
        named["profile/parallel_share"] = found["parallel_share"]
        trained = sum(layer["seconds"] for layer in found["layers"]) / found["parallel_share"]
        for layer in found["layers"]:
            named[f"profile/{layer['name']}/{layer['pass']}_ms"] = 1e3 * layer["seconds"] / found["images"]
            key = f"profile/share/{layer['kind']}/{layer['pass']}"
            named[key] = named.get(key, 0.0) + layer["seconds"] / trained
    return named


def step_parts(seconds: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """Return a ledger's seconds as shares of a step, e.g. `conv1 backward`; of a fused program all may be `train`."""
    shares = _shares(seconds)
    return {
        BETWEEN if what == CALLS and len(shares) > 1 else f"{layer} {what}".strip(): share
        for (what, layer), share in shares.items()
    }


def _layers(seconds: Mapping[tuple[str, str], float], program: Profiled, images: int) -> Iterator[dict[str, Any]]:
    """Yield the passes of the layers that ran one by one."""
    for stage, what in itertools.product(walk(program.network.stages), KERNELS):
        if (what, stage.name) in seconds and not isinstance(stage.layer, Flatten):  # which computes nothing
            needs_dx = stage.name != _first_trained(program.network)
            flops, size = work_per_image(stage, what, program.batch_size, needs_dx)
            multiply_adds = stage.multiply_adds(what, needs_dx) if stage.weight else 0
            yield _row((stage.name,), what, seconds[what, stage.name], images, flops, size, multiply_adds)


def _fused(parts: Mapping[Part, float], program: Profiled, images: int) -> Iterator[dict[str, Any]]:
    """Yield the passes of the groups of layers that a fused program computes at once."""
    stages = {stage.name: stage for stage in walk(program.network.stages)}
    first = _first_trained(program.network)
    own_passes = (part for part in parts if part.what in KERNELS and part.layers != ("loss",))
    for what, layers in dict.fromkeys((part.what, part.layers) for part in own_passes):
        own = {part: seconds for part, seconds in parts.items() if (part.what, part.layers) == (what, layers)}
        group = [stages[name] for name in layers if name in stages]
        any_part = next(iter(own))
        flops, size = fused_work(group, what, program.batch_size, first not in layers, any_part.multiply_adds)
        row = _row(layers, what, sum(own.values()), images, flops, size, any_part.multiply_adds)
        kernels = {part.kernel: seconds for part, seconds in own.items()}
        at_once = max(own, key=lambda part: own[part]).at_once
        yield {**row, "kernels": kernels, "at_once": at_once, "fewer": any_part.fewer}


def _row(
    layers: tuple[str, ...], what: str, seconds: float, images: int, flops: float, size: float, multiply_adds: int
) -> dict[str, Any]:
    return {
        "name": " ".join(layers),
        "layers": list(layers),
        "kind": layers[0].split(".")[-1].rstrip("0123456789"),
        "pass": what,
        "seconds": seconds,
        "flops": flops * images,
        "bytes": size * images,
        "multiply_adds": multiply_adds * images,
        **{"kernels": {}, "at_once": "", "fewer": ""},
    }


def _first_trained(network: Network) -> str:
    return next(stage.name for stage in walk(network.stages) if stage.weight)


def _layers_s(seconds: Mapping[tuple[str, str], float]) -> float:
    """Return the seconds inside the layers' passes; the loss is no layer."""
    return sum(s for (what, layer), s in seconds.items() if what in KERNELS and layer != "loss")


def _shares(seconds: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """Return the shares of what training steps took; none where they took nothing."""
    trained_s = _trained_s(seconds)
    return {entry: s / trained_s for entry, s in seconds.items() if entry[0] in STEP and trained_s > 0}


def _trained_s(seconds: Mapping[tuple[str, str], float]) -> float:
    """Return the seconds inside training steps: their layers, gather, loss, update, and what lies between."""
    return sum(s for (what, _), s in seconds.items() if what in STEP)
