"""What a person sees: of a run a row per epoch, of a sweep a row per job, below a progress bar in a terminal."""

import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console

from cnnexp.backends.parts import Part
from cnnexp.backends.protocol import Backend
from cnnexp.datasets import Dataset
from cnnexp.network import Network
from cnnexp.system.table import Group, Table, as_screen
from cnnexp.tracking import verdict
from cnnexp.training.loop import EpochResult
from cnnexp.training.loop import Progress as EpochProgress

if TYPE_CHECKING:
    from rich.progress import Progress

WIDTH = 120  # of tables where nobody says how wide the screen is
LINE = 80  # of text: wider is hard to read
NUMBERS = 8  # columns that a number of an epoch's row takes, about


class Display:
    """Context manager: shows one run's progress, by default on standard output; a `job` of a sweep has no rows here."""

    def __init__(
        self, epochs: int, baseline: str | None, shown: bool = True, console: Console | None = None, job: str = ""
    ) -> None:
        self.console = console or make_console()
        self._epochs, self._baseline, self._shown = epochs, baseline, shown
        self._bar: Progress | None = None
        self._rows, self._headed = shown and not job, False
        self._job = f"{job}  " if job else ""

    def __enter__(self) -> Self:
        if self._shown and self.console.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn  # slow to import

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(),
                expand=True,
                console=self.console,
                transient=True,
                auto_refresh=False,  # no refreshing thread: the bar is drawn between the timed parts, never beside them
            )
            self._task = self._bar.add_task("", total=None, facts="")
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.stop()

    def start(self, dataset: Dataset, network: Network, backend: Backend, compile_s: float, folder: Path) -> None:
        """Say what is about to be trained, and where the run writes to, where that is not below the user's folder."""
        if self._rows:
            splits = f"{len(dataset.train):,} images to train on, {len(dataset.test):,} to test on"
            threads = f"{backend.threads} thread{'s' if backend.threads > 1 else ''} of "
            size = f"{network.parameter_count:,} parameters"
            where = f"{backend.name} on {'' if backend.on_gpu else threads}{backend.device_name}"
            self._wrapped(f"{dataset.name}: {splits}; {size}; {where}, ready after {compile_s:.1f} s")
            say_folder(self.console, folder)

    def explain(self, kernels: Sequence[Part]) -> None:
        """Show what the compiler chose for each kernel of a step."""
        if not kernels:
            self._wrapped("backend.explain: nothing was chosen; the layers run one after another")
            return
        counts = [(f"{row.macs:,}", f"{row.share:.0%}") if row.macs else ("", "") for row in kernels]
        rows = [(row.kernel, row.algorithm, row.tile, *count) for row, count in zip(kernels, counts, strict=True)]
        table = Table([Group("multiply-adds"), Group("of limit")], rows, ["kernel", "algorithm", "tile"])
        self.console.print(as_screen(table, None, self.console.width), highlight=False)
        expected = "multiply-adds and the share of the CPU's limit, as expected by the cost model, are of one image"
        self._wrapped(f"{kernels[0].threads} threads share a batch's images; {expected}")

    def progressed(self, progress: EpochProgress) -> None:
        if self._bar:
            rate = progress.totals.count / progress.seconds if progress.seconds else 0.0
            self._bar.update(
                self._task,
                description=f"{self._job}epoch {progress.epoch}/{self._epochs}",
                completed=progress.totals.count,
                total=progress.images,
                facts=f"accuracy {progress.totals.accuracy:.2%}  {rate:,.0f} images/s",
                refresh=True,
            )

    def finished(self, result: EpochResult) -> None:
        """Show a finished epoch as a row, which stays."""
        if not self._rows:
            return
        cells = {"epoch": f"{result.epoch}/{self._epochs}"}
        for name, totals in (("train", result.train), ("valid.", result.validation), ("test", result.test)):
            if totals is not None:
                accuracy = f"{totals.accuracy:.2%}".replace("100.00", "100")  # no wider than the others
                cells |= {f"{name} loss": _short(totals.mean_loss, 4), f"{name} acc.": accuracy}
        cells |= {"seconds": f"{result.epoch_s:.3g}", "images/s": f"{result.images_per_s:,.0f}"}
        if result.comparison:
            room = LINE - NUMBERS * len(cells)
            baseline = str(self._baseline)
            cells[f"x {baseline if len(baseline) < room else 'base.'}"] = _short(result.comparison.speedup, 2)
        least = {"epoch": 2 * len(str(self._epochs)) + 2}
        widths = [max(least.get(key, 7), len(key.split()[-1]) + 1, len(cells[key]) + 1) for key in cells]
        titles = [] if self._headed else zip(*(title.rpartition(" ")[::2] for title in cells), strict=True)
        self._headed = True
        for row in (*titles, cells.values()):
            say(self.console, "".join(word.rjust(width) for word, width in zip(row, widths, strict=True)))

    def _wrapped(self, text: str) -> None:
        say(self.console, textwrap.fill(text, min(self.console.width, LINE)))


class _Screen(Console):
    """A console whose reader may leave: Rich would end the program with exit code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class JobTable:
    """The table of a sweep: a row per job as it ends. `jobs`: how many, None if unknown; `started`: `time.time()`."""

    def __init__(self, titles: Sequence[str], jobs: int | None, started: float, console: Console | None = None) -> None:
        self.console = console or make_console()
        self.shown = 0
        self._jobs, self._started = jobs, started
        self._failed: dict[str, int] = {}  # error -> the first job that it ended
        self._width = max(16, min(self.console.width, LINE) - 46)
        label = ", ".join(title.rpartition(".")[2] for title in titles) or "job"
        say(self.console, f"{self._begun('job', label)}{'epoch (s)':>11}{'speedup':>9}{'acc.':>9}  left")

    def name(self, number: int) -> str:
        """Return e.g. `job 2 of 8`."""
        return f"job {number + 1} of {self._jobs}" if self._jobs else f"job {number + 1}"

    def row(self, number: int, label: str, metrics: Mapping[str, float], error: str | None, now: float) -> None:
        """Show a job that has ended, 0 the first: what varied, its final metrics, why it failed; `now` by the clock."""
        self.shown += 1
        place = f"{number + 1}/{self._jobs}" if self._jobs else str(number + 1)
        if error is not None:
            first = self._failed.setdefault(error, number)
            why = f"FAILED: {error}" if first == number else f"FAILED, as {first + 1}"
            say(self.console, self._filled(f"{place:>6}  {label}  {why}"))
            return
        columns = ("time/median_epoch_s", 11, ".4g"), ("speedup/median", 9, ".3g"), ("final/test_accuracy", 9, ".2%")
        cells = [f"{format(metrics[name], form) if name in metrics else '':>{width}}" for name, width, form in columns]
        if self._jobs:
            cells.append(f"  {_duration((now - self._started) / self.shown * (self._jobs - self.shown))}")
        say(self.console, f"{self._begun(place, label)}{''.join(cells)}")

    def _begun(self, place: str, label: str) -> str:
        """Return the first columns of a row; a label too long for its column is shown before, whole."""
        text = f"{place:>6}  {label}"
        if len(label) > self._width:
            say(self.console, self._filled(text))
            text = ""
        return text.ljust(8 + self._width)

    def _filled(self, text: str) -> str:
        return textwrap.fill(text, min(self.console.width, LINE), subsequent_indent=" " * 8)


def _short(value: float, decimals: int) -> str:
    """Return a number with so many decimals, a large one without."""
    return f"{value:.{decimals}f}" if value < 100 else f"{value:.3g}" if value >= 1e5 else f"{value:,.0f}"


def _duration(seconds: float) -> str:
    """Return e.g. `40 s`, `3 min`, `1.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def say(console: Console, text: str) -> None:
    """Print a text as it is; the screen breaks what is longer than a line."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def say_rows(console: Console, rows: Sequence[verdict.Row]) -> None:
    say(console, verdict.screen(rows, min(console.width, LINE)))


def say_folder(console: Console, folder: Path) -> None:
    """Say where results go, unless that is below the folder in which the user works."""
    if not folder.resolve().is_relative_to(Path.cwd()):
        say(console, f"writes to {folder}")


def make_console() -> Console:
    """Return a console on standard output, wide enough for tables where it is no terminal, or has no width."""
    console = _Screen()
    return console if console.width and (console.is_terminal or "COLUMNS" in os.environ) else _Screen(width=WIDTH)
