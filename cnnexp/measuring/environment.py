"""Facts of the machine and the code that a result depends on, for the record of a run."""

import contextlib
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cnnexp.errors import ConfigError, as_typed
from cnnexp.system.cores import cpu_name, usable_cores

RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")  # set by MPICH, Intel MPI, Slurm; PMIx; Open MPI
KEEPING = ("resume", "checkpoint_s", "checkpoint_batches", "keep_last", "keep_best")  # keys of `trainer`
PACKAGES = ("numpy", "numba", "numba-cuda", "mlflow-skinny", "torch", "tensorflow", "tensorflow-cpu", "keras")


def launched_rank() -> int | None:
    """Return this process's rank as its launcher has put it in the environment, None if not started by one."""
    for name in RANK_VARIABLES:
        if (rank := os.environ.get(name)) is not None:
            if not (rank.isascii() and rank.isdecimal()):
                raise ConfigError(f"{name}={rank!r}: must be a whole number, as a launcher of MPI sets it; or unset it")
            return int(rank)
    return None


def checkout() -> Path | None:
    """Return the root of the source checkout that this package runs from, None where it is installed."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").is_file() and (root / "conf").is_dir() else None


def outputs_dir() -> Path:
    """Return the absolute folder for what runs write: `outputs/` of the checkout, else of the working folder."""
    return (checkout() or Path.cwd()) / "outputs"


def machine_facts() -> dict[str, str]:
    """Return what the machine is and how busy it was, by tag name."""
    return {
        "machine.host": platform.node(),
        "machine.cpu": cpu_name(),
        "machine.cores": str(usable_cores()),
        "machine.load": f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown",
        "machine.system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, cnnexp and the installed packages that compute, by tag name."""
    from importlib import metadata  # slow to import, and of use to the recorder alone

    found = {"version.python": platform.python_version()}
    for package in ("cnnexp", *PACKAGES):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[f"version.{package}"] = metadata.version(package)
    return found


def git_facts() -> dict[str, str]:
    """Return `git.commit` and `git.dirty` of the checkout; nothing where there is no checkout or no git."""
    if (root := checkout()) is None:
        return {}
    command = ["git", "-C", str(root), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}  # not a git checkout: a tarball, or no git installed
    first, *lines = done.stdout.splitlines()  # the first is `# branch.oid COMMIT`
    is_dirty = any(not line.startswith("#") for line in lines)
    return {"git.commit": first.rpartition(" ")[2], "git.dirty": str(is_dirty).lower()}


def config_hash(config: Mapping[str, Any]) -> str:
    """Return 16 hex digits for equal values, but for what changes no result: `tracking`, `sweep`, keys of `KEEPING`."""
    counted = {key: value for key, value in config.items() if key not in ("tracking", "sweep")}
    if "trainer" in counted:
        counted["trainer"] = {key: value for key, value in counted["trainer"].items() if key not in KEEPING}
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:16]


def program_name() -> str:
    """Return how the user starts this program, for commands in messages: one that works where it is typed."""
    return as_typed("cnnexp" if Path(sys.argv[0]).name == "cnnexp" else "python -m cnnexp")
