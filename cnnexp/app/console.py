"""What a person sees of a run: a progress bar in a terminal, a line per epoch elsewhere, a table at the end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cnnexp.backends.protocol import Backend
from cnnexp.datasets import Dataset
from cnnexp.network import Network
from cnnexp.network.losses import Totals
from cnnexp.training.loop import EpochResult
from cnnexp.training.loop import Progress as EpochProgress

WIDTH = 120  # of tables where nobody says how wide the screen is


class Display:
    """Context manager: shows one run's progress.

    Args:
        epochs: how many there will be at most.
        baseline: name of the backend it is compared with, or None.
        shown: False shows nothing before the table.
        console: where to; standard output by default.
        timed: False leaves times out: those of a simulated GPU mean nothing.
    """

    def __init__(
        self,
        epochs: int,
        baseline: str | None = None,
        shown: bool = True,
        console: Console | None = None,
        timed: bool = True,
    ) -> None:
        self.console = console or make_console()
        self._epochs, self._baseline, self._shown, self._timed = epochs, baseline, shown, timed
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._shown and self.console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(),
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

    def start(self, dataset: Dataset, network: Network, backend: Backend, compile_s: float) -> None:
        """Say what is about to be trained."""
        if self._shown:
            splits = f"{len(dataset.train):,} images to train on, {len(dataset.test):,} to test on"
            threads = f"{backend.threads} thread{'s' if backend.threads > 1 else ''} of " if backend.threads else ""
            self._line(
                f"{dataset.name}: {splits}; {network.parameter_count:,} parameters; "
                f"{backend.name} on {threads}{backend.device_name}"
                + (f", ready after {compile_s:.1f} s" if self._timed else "; simulated: its times mean nothing")
            )

    def progress(self, progress: EpochProgress) -> None:
        """Move the bar."""
        if self._bar:
            rate = progress.totals.count / progress.seconds if progress.seconds else 0.0
            self._bar.update(
                self._task,
                description=f"epoch {progress.epoch}/{self._epochs}",
                completed=progress.totals.count,
                total=progress.images,
                facts=_facts(progress.totals) + (f"  {rate:,.0f} images/s" if self._timed else ""),
                refresh=True,
            )

    def epoch(self, result: EpochResult) -> None:
        """Say what an epoch was, where there is no bar."""
        if self._shown and not self._bar:
            speedup = f"  {result.comparison.speedup:.2f} x {self._baseline}" if result.comparison else ""
            times = f"  {result.epoch_s:.2f} s  {result.images_per_s:,.0f} images/s{speedup}" if self._timed else ""
            facts = f"train {_facts(result.train)}  test {_facts(result.test)}"
            self._line(f"epoch {result.epoch}/{self._epochs}  {facts}{times}")

    def table(self, results: Sequence[EpochResult]) -> None:
        """Show every epoch as a row."""
        validated = results[0].validation is not None
        table = Table()
        held_out = ("validation loss", "validation accuracy") if validated else ()
        compared = (f"speedup, {self._baseline} = 1",) if results[0].comparison else ()
        for title in ("epoch", "train loss", "train accuracy", *held_out, "test loss", "test accuracy"):
            table.add_column(title, justify="right")
        for title in ("seconds", "images/s", *compared) if self._timed else ():
            table.add_column(title, justify="right")
        for result in results:
            splits = (result.train, *([result.validation] if validated else []), result.test)
            cells = [text for totals in splits for text in (f"{totals.mean_loss:.4f}", f"{totals.accuracy:.2%}")]
            speedup = [f"{result.comparison.speedup:.2f}"] if result.comparison else []
            times = (f"{result.epoch_s:.2f}", f"{result.images_per_s:,.0f}", *speedup) if self._timed else ()
            table.add_row(str(result.epoch), *cells, *times)
        self.console.print(table)

    def _line(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)


class _Screen(Console):
    """A console whose reader may leave: Rich would end the program with exit code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console() -> Console:
    """Return a console on standard output, wide enough for tables where it is no terminal."""
    console = _Screen()
    return console if console.is_terminal or "COLUMNS" in os.environ else _Screen(width=WIDTH)


def _facts(totals: Totals) -> str:
    return f"loss {totals.mean_loss:.4f}  accuracy {totals.accuracy:.2%}"
