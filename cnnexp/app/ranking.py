"""The verdict on a sweep: its jobs ranked by speedup, and which of them differ by more than chance."""

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, groupby, pairwise
from typing import Any, NamedTuple

from cnnexp.measuring.confidence import Interval, holm, median_interval, p_value
from cnnexp.tracking import verdict

SEED = "trainer.seed"  # jobs that differ in it alone are repeats of one
SIGNIFICANT = 0.05  # p-value, after Holm, below which two places differ
# what ranks: metric of every epoch -> the form of its median
MEASURES = {"speedup/vs_baseline": "{:.3g} x", "throughput/images_per_s": "{:,.0f} images/s"}
# of a job that was skipped only the median is known
MEDIANS = {"speedup/vs_baseline": "speedup/median", "throughput/images_per_s": "throughput/median_images_per_s"}
ENDED = ("FINISHED", "SKIPPED")


class Place(NamedTuple):
    """A job of a sweep, or several that differ in their seed alone."""

    label: str  # what varied but for the seed, e.g. `cpu-simd filters=32`; without anything else, what was trained
    values: tuple[float, ...]  # of the measure, one per epoch of every job; where some were skipped, one per job
    interval: Interval  # of their median
    skipped: int = 0  # jobs of runs before, whose medians alone are known


def rank(
    found: Sequence[Mapping[str, Any]], varied: Sequence[str], epochs: Mapping[str, Sequence[Mapping[str, float]]]
) -> tuple[str | None, list[Place]]:
    """Return the measure that ranks `sweep.rows`, and the places, best first; (None, []) where none can be compared."""
    finished = [row for row in found if row["status"] in ENDED and not row["contended"]]
    for measure in MEASURES:
        groups: dict[str, list[list[float]]] = {}
        skipped: Counter[str] = Counter()
        for row in finished:
            own = [(key, row[key]) for key in varied if key != SEED]
            words = [f"{key.rpartition('.')[2]}={value}" if "." in key else str(value) for key, value in own]
            label = " ".join(words) or str(row["name"]).removeprefix(f"seed={row.get(SEED)} ")
            values = [epoch[measure] for epoch in epochs[row["job"]] if measure in epoch]
            if row["status"] == "SKIPPED" and MEDIANS[measure] in row:
                values = [row[MEDIANS[measure]]]
                skipped[label] += 1
            if values:
                groups.setdefault(label, []).append(values)
        if groups:
            places = []
            for label, jobs in groups.items():
                counted = tuple(map(statistics.median, jobs) if skipped[label] else chain.from_iterable(jobs))
                places.append(Place(label, counted, median_interval(counted), skipped[label]))
            return measure, sorted(places, key=lambda place: -place.interval.median)
    return None, []


def rows(
    found: Sequence[Mapping[str, Any]], measure: str | None, places: Sequence[Place], baseline: str | None, failed: int
) -> list[verdict.Row]:
    """Return the verdict on a sweep, of `sweep.rows` and `rank`; the baseline is None where jobs differ in it."""
    order = {
        None: "none: no job was timed alone to its end",
        "speedup/vs_baseline": f"by speedup over {baseline or 'the baseline of each job'}, median of all epochs",
        "throughput/images_per_s": "by images/s, median of all epochs; trainer.baseline=cpu gives a speedup beside it",
    }
    rows: list[verdict.Row] = [("ranking", order[measure])]
    for number, place in enumerate(places, 1):
        rows.append((f"{number:>4}.", f"{place.label}: {_phrase(place, MEASURES[str(measure)])}"))
    rows += [] if any(place.skipped for place in places) else _differences(places)
    if reached := [row["time/to_target_s"] for row in found if "time/to_target_s" in row]:
        times = f"{min(reached):.3g} to {max(reached):.3g} s of training, median {statistics.median(reached):.3g} s"
        rows.append(("target", f"reached by {len(reached)} of {len(found)} jobs, after {times}"))
    if disturbed := [row["job"] for row in found if row["disturbed"]]:
        jobs = f"{len(disturbed)} of {len(found)} jobs, in folders {', '.join(disturbed)}"
        rows.append(("machine", f"DISTURBED by other work: {jobs}; measure again, or wait with trainer.patient=true"))
    elif any(row["disturbed"] is False for row in found):
        rows.append(("machine", "quiet: no job was disturbed by other work"))
    if failed:
        rows.append(("failed", f"{failed} of {len(found)} jobs"))
    return rows


def metrics(measure: str | None, places: Sequence[Place]) -> dict[str, float]:
    """Return what the page of the sweep's own run shows: every place by its label, and the best."""
    named: dict[str, float] = {}
    for number, place in enumerate(places, 1):
        key = f"ranking/{re.sub(r'[^0-9A-Za-z_. -]', ' ', place.label)[:200]}"
        while key in named:  # of another label that differs in what no key may hold, or at its end
            key += f" {number}"
        named[key] = place.interval.median
    if measure == "speedup/vs_baseline":
        named["speedup/best"] = places[0].interval.median
    return named


def _differences(places: Sequence[Place]) -> list[verdict.Row]:
    """Say which neighbours in the ranking differ, and which may have changed places by chance."""
    p_values = holm([p_value(a.values, b.values) for a, b in pairwise(places)])
    differ = [f"{i} from {i + 1} (p {p:.2g})" for i, p in enumerate(p_values, 1) if p < SIGNIFICANT]
    rows = [("differ", ", ".join(differ))] if differ else []
    alike, last = [], 0
    for unsure, group in groupby(p_values, lambda p: p >= SIGNIFICANT):
        pairs = list(group)
        first, last = last + 1, last + len(pairs)
        p = f"(p {min(pairs):.2g}{' or more' if min(pairs) < max(pairs) else ''})"
        if unsure:
            pair = f"{first} and {last + 1}" if first == last else f"each of {first} to {last} and the next"
            alike.append(f"{pair} {p}")
    if alike:
        rows.append(("not sure", f"{', '.join(alike)}: more epochs, or {SEED}=0,1,2, may tell them apart"))
    return rows


def _phrase(place: Place, form: str) -> str:
    interval = place.interval
    if place.skipped or interval.count == 1:
        how = "as recorded before" if place.skipped else "one epoch"
        if 0 < place.skipped < interval.count:
            how = f"median of the medians of {interval.count} jobs, {place.skipped} as recorded before"
        return f"{form.format(interval.median)} ({how})"
    number = form.partition("}")[0] + "}"
    sure = f" with {interval.confidence:.0%} confidence" if interval.count >= verdict.MORE_EPOCHS else ""
    ends = f"{number.format(interval.low)} to {number.format(interval.high)}{sure}"
    return f"{form.format(interval.median)} ({ends}, {interval.count} epochs)"
