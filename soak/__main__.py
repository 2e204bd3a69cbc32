"""`python -m soak [PART ...] [--seconds N] [--count N] [--seed N] [--folder F]`: try what is promised, for hours.

Every part is a run of trials; one that does not hold what is promised is a line, and the exit code is then 1. With
several parts the seconds are shared among them. A slice of a part is the same part with another seed.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from soak import faults, files, kills, long, mutants, networks, review, stores
from soak.commands import NotTried

PARTS: dict[str, Callable[[Path, int], Iterator[str | None]]] = {
    "review": review.review,
    "kills": kills.kills,
    "worker-kills": functools.partial(kills.kills, trains=kills.TOGETHER),
    "recorder": kills.recorder,
    "sweeps": kills.sweeps,
    "jobs": kills.jobs,
    "outage": stores.outage,
    "passwords": stores.passwords,
    "epochs": long.epochs,
    "configs": long.configs,
    "networks": networks.networks,
    "mutants": mutants.mutants,
    "postgres": stores.postgres,
    "training-faults": faults.training,
    "store-faults": faults.storing,
    "process-faults": faults.spawning,
    **{f"{format_}-files": files.files(format_) for format_ in files.FORMATS},
}


def main() -> None:
    """Run the parts of a command line."""
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all where none is given")
    parser.add_argument("--seconds", type=float, default=3600.0, help="to try for, all parts together")
    parser.add_argument("--count", type=int, help="most trials of each part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="to work in; a temporary one, which goes, where none is given")
    given = parser.parse_args()
    unknown = [part for part in given.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; legal: {', '.join(PARTS)}")
    parts = given.parts or list(PARTS)
    faults = 0
    for name in parts:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="cnnexp-soak-", ignore_cleanup_errors=True) as temporary:
            folder = (given.folder or Path(temporary)).resolve() / name
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            found, tried = [], 0
            try:
                for fault in PARTS[name](folder, given.seed):
                    tried += 1
                    if fault is not None:
                        found.append(fault)
                        print(f"{name}: {fault}", flush=True)
                    if tried == given.count or time.monotonic() - started >= given.seconds / len(parts):
                        break
            except NotTried as reason:
                print(f"{name}: not tried: {reason}", flush=True)
                continue
            except Exception as error:  # the others go on
                tried += 1
                found.append(f"{type(error).__name__}: {error}")
                print(f"{name}: cannot be tried: {found[-1]}", flush=True)
        faults += len(found)
        seconds = time.monotonic() - started
        print(f"{name}: {tried - len(found)} of {tried} hold, in {seconds:.0f} s", flush=True)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
