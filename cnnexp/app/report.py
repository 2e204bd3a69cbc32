"""`cnnexp report`: the page of a paper's table or figure, made again from the folder of a sweep."""

import sys
from collections.abc import Sequence
from pathlib import Path

from cnnexp.errors import ConfigError, did_you_mean
from cnnexp.measuring import environment
from cnnexp.papers import EXPERIMENTS, page
from cnnexp.papers.compare import FACTS, read_facts


def command(arguments: Sequence[str]) -> None:
    """Make the report of `cnnexp report FOLDER` or `KEY` again, say where; raise ConfigError without such a sweep."""
    if len(arguments) != 1:
        raise ConfigError("report: give a sweep's folder, or an experiment: " + ", ".join(EXPERIMENTS))
    folder = Path(arguments[0])
    if not folder.is_dir():
        folder = newest(arguments[0], environment.outputs_dir() / "sweeps")
    if (key := read_facts(folder)["paper"]) is None:
        raise ConfigError(f"report {folder}: makes no table or figure of a paper; set sweep.paper when you run it")
    page.write(folder, key)
    sys.stdout.write(f"{folder / page.FOLDER / 'index.html'}\n")


def newest(key: str, sweeps: Path) -> Path:
    """Return the folder of the last sweep that made the table or figure `key` again."""
    if key not in EXPERIMENTS:
        near = did_you_mean(key, EXPERIMENTS)
        raise ConfigError(f"report {key}: neither a folder nor one of {', '.join(EXPERIMENTS)}{near}")
    found = [path.parent for path in sweeps.glob(f"*/*/{FACTS}") if read_facts(path.parent)["paper"] == key]
    if not found:
        raise ConfigError(f"report {key}: never run; run it with {environment.program_name()} experiment={key}")
    return max(found)
