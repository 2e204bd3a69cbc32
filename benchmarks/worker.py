"""A contestant's process: reads one JSON command a line from standard input, answers one JSON line on standard output.

    {"do": "setup", "contestant": ..., "case": ..., "threads": 2, "cores": [0, 1], "oracle": "file.npz",
     "mnist": null}
    {"do": "pin", "cores": [0]}
    {"do": "run", "steps": 10}  ->  {"seconds": ...}
    {"do": "close"}             ->  {"peak_bytes": ...}

A failure is answered `{"error": "..."}` and ends the process.
"""

from __future__ import annotations

import ctypes.util
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cases import CASES, data
from benchmarks.contestants import ENTRIES

LOSS_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-4
PROBABILITY_TOLERANCE = 1e-5
# One Adam step moves a parameter by about the rate whatever its gradient is, so rounding in a tiny gradient shows.
UPDATE_TOLERANCES = {"SGD": 1e-4, "Adam": 1e-2}


def main() -> None:
    """Answer commands until asked to close, or until one fails."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints must not get between the answers
    session: dict[str, Any] = {}
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = COMMANDS[command.pop("do")](session, **command)
        except Exception as error:  # the other end reports it; nothing is lost
            print(json.dumps({"error": f"{type(error).__name__}: {error}".splitlines()[0]}), file=answers)
            raise
        print(json.dumps(answer), file=answers)
        if "peak_bytes" in answer:
            return


def setup(
    session: dict, contestant: str, case: str, threads: int, cores: list[int], oracle: str, mnist: str | None = None
) -> dict[str, Any]:
    """Build a contestant, prove it right, and find out how long a step takes."""
    pin(session, cores)
    entry = ENTRIES[contestant]
    job = next(c for c in CASES if c.name == case)
    started = time.perf_counter()
    made = session["contestant"] = entry.make(job, data(job, mnist), threads)
    answer = {"setup_s": time.perf_counter() - started, "compile_s": made.compile_s, "facts": made.facts}
    if entry.infers:
        answer |= {"check": check_probabilities(made, np.load(oracle))}
        forget_peak()
    elif entry.side != "limit":
        drawn = made.draw(False) and job.network.draws
        answer |= {"check": check(made, type(job.optimizer).__name__, np.load(oracle), "drawn_" if drawn else "")}
        made.draw(True)
        made.reset()
        forget_peak()
    return answer | {"per_step": made.batch_size, "step_s": step_seconds(made)}


def check(made, optimizer: str, oracle, mark: str = "") -> dict[str, float]:
    """Compare loss, gradient and one timed step with the oracle's, from the first parameters; relative 2-norms.

    Args:
        mark: what the oracle's names begin with.
    """
    n = made.batch_size
    made.reset()
    loss, gradient = made.gradient()
    made.reset()
    before = made.parameters()
    made.train(1)
    after = made.parameters()
    update = after - before
    rounding = np.finfo(np.float32).eps * np.linalg.norm(after)  # of what an update is added to
    found = {
        "loss": abs(loss - float(oracle[f"{mark}loss_{n}"])) / abs(float(oracle[f"{mark}loss_{n}"])),
        "gradient": distance(gradient, oracle[f"{mark}gradient_{n}"]),
        "update": max(0.0, distance(update, oracle[f"{mark}update_{n}"], rounding)),
    }
    legal = {"loss": LOSS_TOLERANCE, "gradient": GRADIENT_TOLERANCE, "update": UPDATE_TOLERANCES[optimizer]}
    for name, value in found.items():
        allowed = legal[name] + float(oracle[f"{mark}blur_{name}_{n}"])
        if not value <= allowed:
            raise ValueError(f"{name} is off by {value:.2g} from the float64 oracle, {allowed:.3g} is allowed")
    return found


def check_probabilities(made, oracle) -> dict[str, float]:
    """Compare the probabilities of the first batch with the oracle's; relative 2-norm."""
    off = distance(made.probabilities(), oracle["probabilities"])
    if not off <= PROBABILITY_TOLERANCE:
        raise ValueError(
            f"probabilities are off by {off:.2g} from the float64 oracle, {PROBABILITY_TOLERANCE:g} is allowed"
        )
    return {"probabilities": off}


def distance(found: np.ndarray, true: np.ndarray, free: float = 0.0) -> float:
    """Return the relative 2-norm of the difference, less what is `free`."""
    return float((np.linalg.norm(found - true) - free) / np.linalg.norm(true))


def step_seconds(made) -> float:
    """Return the seconds of one step of a warm contestant: of more and more steps, until they can be measured."""
    steps, seconds = 1, 0.0
    while seconds < 0.02 and steps < 100_000:
        started = time.perf_counter()
        made.train(steps)
        seconds = time.perf_counter() - started
        steps *= 4
    return seconds / (steps / 4)


def pin(session: dict, cores: list[int]) -> dict[str, Any]:
    """Bind every thread of this process to `cores`, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        for task in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(task.name), cores)
    return {}


def run(session: dict, steps: int) -> dict[str, Any]:
    """Time `steps` training steps from the first parameters.

    One that is not timed warms the caches, which another contestant has just used; a lone long step does that itself.
    """
    made = session["contestant"]
    if steps > 1:
        made.train(1)
    made.reset()
    started = time.perf_counter()
    made.train(steps)
    return {"seconds": time.perf_counter() - started}


def close(session: dict) -> dict[str, Any]:
    return {"peak_bytes": peak_bytes()}


def forget_peak() -> None:
    """Have the peak count from here on, where the system can: to compare with the oracle takes room of its own.

    What that has freed goes back to the system first, which the C library would keep for later.
    """
    gc.collect()
    clear, library = Path("/proc/self/clear_refs"), ctypes.util.find_library("c")
    if library and hasattr(ctypes.CDLL(library), "malloc_trim"):
        ctypes.CDLL(library).malloc_trim(0)
    if clear.exists():
        clear.write_text("5")


def peak_bytes() -> int:
    """Return the most memory this process has had resident, while it trained or, elsewhere than on Linux, ever."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count what the parent held before exec
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


COMMANDS = {"setup": setup, "pin": pin, "run": run, "close": close}

if __name__ == "__main__":
    main()
