"""Run contestants in turn, each in a process of its own, and keep every sample."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cases import Case, multiply_adds
from benchmarks.contestants import Entry

ROOT = Path(__file__).parents[1]
PAUSE_S = 0.15  # for the threads of the one before: OpenBLAS's and OpenMP's wait busily for a while
LONG_SAMPLE = 20  # a command may take this many times the seconds it should, and a minute more


class WorkerFailed(Exception):
    """A contestant's process answered an error, died, or did not answer in time."""


class Worker:
    """A contestant's process; see `worker` for its commands.

    Args:
        entry: the contestant.
        python: the interpreter that has what it needs.
        stderr: where its standard error goes.
        environment: added to this process's.
    """

    def __init__(self, entry: Entry, python: str, stderr: Path, environment: dict[str, str] | None = None) -> None:
        self.entry, self._stderr = entry, stderr
        with stderr.open("wb") as errors:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
                text=True,
            )

    def ask(self, do: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Send one command and return its answer.

        Raises:
            WorkerFailed: with the reason, in one line.
        """
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(timeout_s, give_up)
        timer.start()
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if late.is_set():
            raise WorkerFailed(f"no answer to {do} within {timeout_s:.0f} s")
        if not line:
            lines = self._stderr.read_text(errors="replace").strip().splitlines() or ["no message"]
            raise WorkerFailed(f"died with exit code {self._process.wait()}: {lines[-1]}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(answer["error"])
        return answer

    def end(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


@dataclass
class Row:
    """What is known of one contestant on one case.

    Attributes:
        contestant, side: who.
        error: why it has no samples, or None.
        per_step: images (for a limit: multiply-adds) of one step; less than the batch where one is too slow for more.
        steps: steps of one sample.
        samples: seconds of each.
        setup: the answer to `setup`: compile_s, check, facts...
        peak_bytes: most memory resident in its process.
    """

    contestant: str
    side: str
    error: str | None = None
    per_step: int = 0
    steps: int = 0
    samples: list[float] = field(default_factory=list)
    setup: dict[str, Any] = field(default_factory=dict)
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Plan:
    """How to measure.

    Attributes:
        rounds: samples of each contestant.
        seconds: how long a sample takes; longer where one step does.
        setup_timeout_s: how long a contestant may take to import, compile and check.
        peer_python: the interpreter that has the peers.
        cores: the cores that may be used; n threads run on the first n.
        mnist: a folder with MNIST, or None for made-up images.
        environment: of the contestants, added to this process's.
    """

    rounds: int
    seconds: float
    setup_timeout_s: float
    peer_python: str
    cores: list[int]
    mnist: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


class Match:
    """One case at one number of threads: all contestants ready at once, then timed in turn."""

    def __init__(self, case: Case, threads: int, plan: Plan, oracle: Path) -> None:
        self.case, self.threads, self._plan, self._oracle = case, threads, plan, oracle
        self._cores = plan.cores[:threads]
        self._workers: dict[str, Worker] = {}
        self.rows: dict[str, Row] = {}
        self.load_averages: list[float] = []

    def run(self, entries: list[Entry], show) -> None:
        """Fill `rows`; `show(text)` is called as it goes on."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                self._start(entries, Path(folder), show)
                self._calibrate()
                for turn in range(self._plan.rounds):
                    show(f"round {turn + 1} of {self._plan.rounds}")
                    self._round(turn)
                for row in self._running():
                    row.peak_bytes = self._ask(row, "close", 60).get("peak_bytes")
            finally:
                for worker in self._workers.values():
                    worker.end()

    def record(self) -> dict[str, Any]:
        """Return everything that was found, ready for JSON."""
        through, dense = multiply_adds(self.case.network)
        return {
            "case": self.case.name,
            "group": self.case.group,
            "title": self.case.title,
            "grows": self.case.grows,
            "batch_size": self.case.batch_size,
            "optimizer": repr(self.case.optimizer),
            "network": repr(self.case.network),
            "parameters": self.case.network.parameter_count,
            "multiply_adds_per_image": {"through_argmax": through, "dense": dense},
            "threads": self.threads,
            "load_averages": self.load_averages,
            "rows": [vars(row) for row in self.rows.values()],
        }

    def _start(self, entries: list[Entry], folder: Path, show) -> None:
        """Set up all contestants, as many at once as there are cores; none is timed yet."""
        for number, entry in enumerate(entries):
            python = self._plan.peer_python if entry.side == "peer" else sys.executable
            self.rows[entry.name] = Row(entry.name, entry.side)
            self._workers[entry.name] = Worker(entry, python, folder / f"{number}.txt", self._plan.environment)

        def set_up(number: int) -> None:
            row = self.rows[entries[number].name]
            show(f"setting up {row.contestant}")
            # those that share one core when timed would wait for each other here
            spread = len(self._plan.cores) // self.threads
            first = number % spread * self.threads
            row.setup = self._ask(
                row,
                "setup",
                self._plan.setup_timeout_s,
                contestant=row.contestant,
                case=self.case.name,
                threads=self.threads,
                cores=self._plan.cores[first : first + self.threads],
                oracle=str(self._oracle),
                mnist=self._plan.mnist,
            )
            row.per_step = row.setup.get("per_step", 0)

        with ThreadPoolExecutor(len(self._plan.cores)) as pool:
            list(pool.map(set_up, range(len(entries))))

    def _calibrate(self) -> None:
        """Bind all to the cores they share and find how many steps make a sample."""
        for row in self._running():
            self._ask(row, "pin", 60, cores=self._cores)
            row.steps = max(1, round(self._plan.seconds / row.setup["step_s"]))
            answer = self._sample(row) if row.steps > 1 else {}
            if answer:
                row.steps = max(1, round(row.steps * self._plan.seconds / answer["seconds"]))

    def _round(self, turn: int) -> None:
        """Let each take one sample, another one first each round."""
        running = self._running()
        for row in running[turn % len(running) :] + running[: turn % len(running)] if running else []:
            time.sleep(PAUSE_S)
            answer = self._sample(row)
            if row.error is None:
                row.samples.append(answer["seconds"])
        if hasattr(os, "getloadavg"):
            self.load_averages.append(os.getloadavg()[0])

    def _sample(self, row: Row) -> dict[str, Any]:
        expected = row.steps * row.setup["step_s"] + self._plan.seconds
        return self._ask(row, "run", 60 + LONG_SAMPLE * expected, steps=row.steps)

    def _running(self) -> list[Row]:
        return [row for row in self.rows.values() if row.error is None]

    def _ask(self, row: Row, do: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Return the answer of a row's worker, or {} when it failed, which the row then says."""
        try:
            return self._workers[row.contestant].ask(do, timeout_s, **arguments)
        except WorkerFailed as failure:
            row.error = str(failure)
            return {}


def installed(python: str, modules: set[str]) -> set[str]:
    """Return which of the modules an interpreter can import."""
    program = "import importlib.util as u, sys; print(*(m for m in sys.argv[1:] if u.find_spec(m)))"
    found = subprocess.run([python, "-c", program, *modules], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(found.stdout.split())


def make_oracle(case: Case, path: Path, mnist: str | None = None) -> None:
    """Have the float64 oracle write what is right for a case, in a process that then gives its memory back."""
    command = [sys.executable, "-m", "benchmarks.oracle", case.name, str(path), *([mnist] if mnist else [])]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
