"""Checks that are broken on purpose: each guard of the code goes in a copy of it, and the guard's test must then fail.

The guards stand in `mutants.txt`.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from soak.commands import LIMIT_S, ROOT

MOST_BYTES = 1 << 32  # that a test takes whose guard against a large file is gone
FAILED = 1  # exit code of pytest where a test did not pass; from 2 on, where none ran
TREE = ("cnnexp", "conf", "docs", "soak", "benchmarks", "tests", "pyproject.toml")


@dataclass(frozen=True)
class Mutant:
    """A guard, and what stands in its place.

    Attributes:
        file: of `cnnexp/`, that it is in once.
        guard: as it is written there.
        instead: what it becomes.
        tests: a file of `tests/`, then what `pytest -k` picks of it; everything where it picks nothing.
    """

    file: str
    guard: str
    instead: str
    tests: str


def read() -> list[Mutant]:
    """Return the mutants of `mutants.txt`."""
    text = Path(__file__).with_suffix(".txt").read_text("utf-8")
    lines = [line.replace("\\n", "\n") for line in text.splitlines() if line and not line.startswith("#")]
    return [
        Mutant(file, guard.removeprefix("- "), instead.removeprefix("+ "), tests)
        for file, guard, instead, tests in zip(*[iter(lines)] * 4, strict=True)
    ]


def mutants(folder: Path, seed: int) -> Iterator[str | None]:
    """Break every guard once, and run its test; another seed begins further down the list."""
    tree = folder / "tree"
    for name in TREE:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        tree.mkdir(exist_ok=True)
        copy(ROOT / name, tree / name)
    found = read()
    for mutant in found[seed % len(found) :] + found[: seed % len(found)]:
        path = tree / "cnnexp" / mutant.file
        sound = path.read_text("utf-8")
        if sound.count(mutant.guard) != 1:
            yield f"{mutant.file}: {mutant.guard!r} is there {sound.count(mutant.guard)} times"
            continue
        path.write_text(sound.replace(mutant.guard, mutant.instead), "utf-8")
        try:
            code = _test(tree, mutant.tests)
        finally:
            path.write_text(sound, "utf-8")
        yield None if code == FAILED else f"{mutant.file}: {mutant.instead!r} is not caught by {mutant.tests}: {code}"


def _test(tree: Path, tests: str) -> int | None:
    """Return the exit code of pytest, None where it hangs, which no guard was there to stop."""
    file, _, picked = tests.partition(" ")
    command = [sys.executable, "-P", "-m", "pytest", "-qx", "-p", "no:cacheprovider", f"tests/{file}", "-k", picked]
    environ = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environ, capture_output=True, check=False, timeout=LIMIT_S, preexec_fn=_limit
        )
        return done.returncode
    except subprocess.TimeoutExpired:
        return None


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
