"""The answer that a run or a sweep ends with: how much faster, how sure, why, and whether the machine was quiet.

Rows of a title and a sentence, every figure with its unit; the screen, `report.md` and MLflow's note show the same.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cnnexp.measuring.confidence import Interval, median_interval
from cnnexp.measuring.interference import Interference
from cnnexp.system.table import rounded
from cnnexp.training.loop import EpochResult

Row = tuple[str, str]
WIDTH = 80  # of the screen, where nobody says that it is less
TITLE = len("sharing alone")  # as wide is the column of titles at least: a verdict may come in two parts
LARGEST = 4  # parts of a step that are worth naming
MORE_EPOCHS = 6  # from so many on the range of their ratios holds the median with 95 % confidence


@dataclass(frozen=True)
class Course:
    """How a run began and ended."""

    done: int = 0  # how many of its epochs an earlier process has trained
    resumed: str = ""  # where it went on and from what, e.g. `after epoch 3, from FOLDER`
    stopped: str = ""  # why it ended before its last epoch
    cut: str = ""  # what cut its epochs short
    chosen: bool = False  # whether held-out images decide when it ends: early stopping, or a target


def run_rows(
    epochs: Sequence[EpochResult],
    metrics: Mapping[str, float],
    baseline: str | None,
    contended: bool = False,
    interference: Interference | None = None,
    parts: Mapping[str, Mapping[str, float]] | None = None,
    course: Course = Course(),
) -> Iterator[Row]:
    """Yield the verdict on one run, of one epoch at least; where it has trained none, no speed is claimed.

    Of a contended run, beside which others computed, no speedup is given. `parts`: by backend, the shares of its step.
    """
    timed = len(epochs) > course.done
    if course.resumed:
        yield "resumed", course.resumed + ("" if timed else "; nothing was left to train")
    if course.stopped:
        yield "stopped", f"after epoch {len(epochs)}: {course.stopped}"
    if course.cut:
        yield "cut short", course.cut
    if timed:
        ratios = [result.comparison.speedup for result in epochs if result.comparison is not None]
        if contended:
            yield "speedup", "not given: other runs computed at the same time"
        elif ratios:
            yield "speedup", f"{speedup(median_interval(ratios), 'epoch')}; {baseline} = 1"
        if "speedup/amdahl_limit" in metrics:
            share, limit = metrics["speedup/parallel_share"], metrics["speedup/amdahl_limit"]
            text = f"{rounded(limit)} x by threads and lanes; layers: {share:.1%} of {baseline}'s step (Amdahl)"
            yield "sharing alone", text
        images_per_s, epoch_s = metrics["throughput/median_images_per_s"], metrics["time/median_epoch_s"]
        text = f"{images_per_s:,.0f} images/s, {epoch_s:.3g} s an epoch"
        if "profile/share_of_gflops" in metrics:
            share, limit = metrics["profile/share_of_gflops"], metrics["profile/machine_gflops"]
            text += f"; {share:.1%} of the {limit:,.0f} GFLOP/s measured as the limit here"
        yield "speed", text
    final, best = metrics["final/test_accuracy"], metrics["best/test_accuracy"]
    best_text = f"; the best epoch {best:.2%}" if best > final else ""
    yield "accuracy", f"{final:.2%} of the test images{best_text}"
    if epochs[-1].validation is None and (course.chosen or best > final):
        what = "when training ends" if course.chosen else "the best epoch"
        advice = "dataset.validation_size=N holds images back to choose by"
        yield "chosen by", f"the test images choose {what}, so their accuracy is optimistic; {advice}"
    if timed:
        yield "machine", machine(interference)
        for name, shares in (parts or {}).items():
            largest = sorted(shares, key=lambda part: -shares[part])[:LARGEST]
            yield f"{name} step", ", ".join(f"{part} {shares[part]:.0%}" for part in largest)


def speedup(interval: Interval, unit: str) -> str:
    """Return e.g. `9.31 x (median of 10 epochs; 8.9 to 9.6 with 98 % confidence; all 7.2 to 9.8)`."""
    every = interval.least, interval.low, interval.median, interval.high, interval.most
    least, low, median, high, most = map(rounded, every)
    if interval.count == 1:
        return f"{median} x (one {unit}: how sure is not known)"
    sure = f"{low} to {high} with {interval.confidence:.0%} confidence; all {least} to {most}"
    if interval.count < MORE_EPOCHS:
        sure = f"{least} to {most}, too few for an interval"
    return f"{median} x (median of {interval.count} {unit}s; {sure})"


def machine(interference: Interference | None) -> str:
    if interference is None:
        return "whether other work disturbed is not known here"
    cores = f"{interference.cores} core{'s' if interference.cores > 1 else ''}"
    if not interference.known:
        return f"the run was too short to say whether other work disturbed it: {interference.seconds:.2g} s on {cores}"
    stolen = f", {interference.stolen:.1%} on other machines" if interference.stolen >= 0.001 else ""
    used = f"others used {interference.others:.1%} of {cores}{stolen}; load {interference.load:.1f}"
    if not interference.disturbed:
        return f"quiet: {used}"
    return f"DISTURBED by other work: {used}; measure again, or wait with trainer.patient=true"


def to_target(target: float, metrics: Mapping[str, float]) -> str:
    """Say how long training took to reach an accuracy, to the end of the epoch that did."""
    if "time/to_target_s" not in metrics:
        return f"{target:.2%} was not reached"
    return f"{target:.2%} reached after {metrics['time/to_target_s']:.3g} s of training"


def screen(rows: Sequence[Row], width: int = WIDTH) -> str:
    """Return rows as text that no screen of this width clips; a path that is longer goes over several lines."""
    indent = max(TITLE, *(len(title) for title, _ in rows)) + 2
    width = max(width, indent + 20)
    style: dict[str, Any] = {"subsequent_indent": " " * indent, "break_long_words": False, "break_on_hyphens": False}
    return "\n".join(textwrap.fill(text, width, initial_indent=title.ljust(indent), **style) for title, text in rows)


def markdown(title: str, rows: Sequence[Row]) -> str:
    cells = [f"| {name} | {text.replace('|', chr(92) + '|')} |" for name, text in rows]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *cells, ""])
