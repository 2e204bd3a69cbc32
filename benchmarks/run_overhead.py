"""Where the time of a whole run goes: `python -m benchmarks.run_overhead --data FOLDER`, FOLDER holding MNIST.

It runs `python -m cnnexp model=two_conv_mlp dataset=mnist trainer.epochs=3 ...` as a user would, several times, into a
temporary folder, and splits the wall time: from outside the whole, inside by clocks around the functions below. A
function's time is its own, without that of others in the list that it calls.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.runner import ROOT
from cnnexp import __main__ as entry
from cnnexp.tracking import pipe

RUN = [
    "model=two_conv_mlp",
    "optimizer=adam",
    "optimizer.lr=1e-3",
    "optimizer.beta1=0.95",
    "optimizer.beta2=0.99",
    "dataset=mnist",
    "trainer.epochs=3",
    "trainer.batch_size=64",
]
CLOCKS = {
    "cnnexp.datasets.mnist:Mnist.load": "data",
    "cnnexp.backends.simd:CpuSimd.compile": "compilation",
    "cnnexp.backends.cpu.sequential:Cpu.compile": "baseline",
    "cnnexp.training.baseline:Baseline.__init__": "baseline",
    "cnnexp.training.baseline:Baseline.sample": "baseline",
    "cnnexp.backends.simd.runtime.program:SimdProgram.load": "data",
    "cnnexp.backends.simd.runtime.program:SimdProgram.train": "training",
    "cnnexp.backends.simd.runtime.program:SimdProgram.predict": "evaluation",
    "cnnexp.training.loop:evaluate": "evaluation",
    "cnnexp.tracking.pipe:Recorder.__init__": "logging",
    "cnnexp.tracking.pipe:Recorder.close": "logging",
    "cnnexp.tracking.journal:Run.__init__": "logging",
    "cnnexp.tracking.journal:Run.begin": "logging",
    "cnnexp.tracking.journal:Run.wait": "logging",
    "cnnexp.tracking.journal:Run.finished": "logging",
    "cnnexp.tracking.journal:Run.__exit__": "logging",
    "cnnexp.tracking.journal:Run._draw": "figures",
    "cnnexp.training.checkpoint:CheckpointWriter.save": "checkpoints",
}
OUTSIDE = ("start and imports", "configuration and the rest", "end")
COUNTED = ("data", "evaluation", "logging", "figures")
"""What together should take less than a fifth of the run."""


class Clocks:
    """Seconds by label, of code in the main thread; the innermost label counts."""

    def __init__(self, clock=time.perf_counter) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._labels: list[str] = []
        self._clock, self._since = clock, clock()

    def wrap(self, function, label: str):
        @functools.wraps(function)
        def timed(*args, **kwargs):
            self._switch()
            self._labels.append(label)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._labels.pop()

        return timed

    def _switch(self) -> None:
        now = self._clock()
        self.seconds[self._labels[-1] if self._labels else OUTSIDE[1]] += now - self._since
        self._since = now

    def stop(self) -> None:
        self._switch()


def child(report: Path, arguments: list[str]) -> None:
    """Be `python -m cnnexp` with clocks in it, and write what they show."""
    started = time.time()
    clocks = Clocks()

    def start_early(database: bool) -> None:
        """Start the recorder's process as ever; only then load what the clocks are put around."""
        pipe.start_early(database)
        loading = clocks.wrap(resolve, OUTSIDE[0])
        for target, label in CLOCKS.items():
            owner, name, function = loading(target)
            setattr(owner, name, clocks.wrap(function, label))

    entry.start_early = start_early
    sys.argv = ["cnnexp", *arguments]
    entry.main()
    clocks.stop()
    report.write_text(json.dumps({"started": started, "ended": time.time(), "seconds": clocks.seconds}))


def resolve(target: str) -> tuple[Any, str, Callable]:
    """Return (the module or class, the name in it, the function) of a `module:Class.method` or `module:function`."""
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    return owner, name, getattr(owner, name)


def one_run(folder: Path, arguments: list[str]) -> dict[str, float]:
    """Run once, writing under `folder`; return seconds by label, and under `whole` the wall time from outside."""
    report = folder / "clocks.json"
    places = [f"hydra.run.dir={folder / 'run'}", f"tracking.uri=sqlite:///{folder / 'mlflow.db'}"]
    command = [sys.executable, "-m", "benchmarks.run_overhead", "--child", str(report), *arguments, *places]
    began = time.time()
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    ended = time.time()
    found = json.loads(report.read_text())
    seconds = found["seconds"]
    seconds[OUTSIDE[0]] += found["started"] - began
    seconds[OUTSIDE[2]] = ended - found["ended"]
    return seconds | {"whole": ended - began}


def table(runs: list[dict[str, float]]) -> Table:
    medians = {label: statistics.median(run.get(label, 0.0) for run in runs) for label in labels(runs)}
    shown = Table(title=f"Seconds of a run, {len(runs)} runs", title_justify="left")
    for heading in ("", "first run", "median", "share"):
        shown.add_column(heading, justify="right" if heading else "left")
    for label, seconds in sorted(medians.items(), key=lambda item: item[1]):
        shown.add_row(label, f"{runs[0].get(label, 0.0):.2f}", f"{seconds:.2f}", f"{seconds / medians['whole']:.1%}")
    return shown


def labels(runs: list[dict[str, float]]) -> list[str]:
    return list(dict.fromkeys(label for run in runs for label in run))


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), sys.argv[3:])
        return
    p = argparse.ArgumentParser(prog="python -m benchmarks.run_overhead", description=__doc__)
    p.add_argument("--data", required=True, type=Path, help="folder with the four MNIST files")
    p.add_argument(
        "--runs", type=int, default=4, help="the first makes the store and may have to compile; medians are over all"
    )
    p.add_argument("--out", type=Path, default=ROOT / "outputs" / "benchmarks" / "run_overhead.json")
    p.add_argument("overrides", nargs="*", help="more for the command line of cnnexp, e.g. trainer.baseline=null")
    options = p.parse_args()
    arguments = [*RUN, f"dataset.root={options.data.resolve()}", *options.overrides]
    with tempfile.TemporaryDirectory() as folder:  # one store for all: only the first run makes it
        runs = [one_run(Path(folder), arguments) for _ in range(options.runs)]
    shares = [sum(run.get(label, 0.0) for label in COUNTED) / run["whole"] for run in runs]
    result: dict[str, Any] = {
        "command": ["python", "-m", "cnnexp", *RUN, *options.overrides],
        "machine": machine.facts(),
        "runs": runs,
        "share_of_data_evaluation_logging_figures": shares,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    console = Console(highlight=False)
    console.print(table(runs))
    console.print(f"{', '.join(COUNTED)} together: {statistics.median(shares):.1%} of the run (median)")


if __name__ == "__main__":
    main()
