"""`cnnexp doctor`: what this machine can run, and for what it cannot, what is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from importlib import metadata, util
from pathlib import Path
from urllib.parse import urlsplit

from rich.table import Table

from cnnexp import environment
from cnnexp.app.console import make_console
from cnnexp.backends import BACKENDS, backend_class
from cnnexp.datasets import DATASETS
from cnnexp.datasets.idx import IdxSet
from cnnexp.errors import CnnexpError, ConfigError
from cnnexp.tracking.store import store_uri

FLOAT_BITS = 32
# importing these takes seconds, so it is only asked whether they are installed
SLOW = {"torch": ("torch",), "keras": ("keras", "tensorflow")}


def command(arguments: Sequence[str]) -> None:
    """Print a table of the machine, the backends, and where runs and data sets are kept.

    Raises:
        ConfigError: an argument was given.
    """
    if arguments:
        raise ConfigError(f"doctor {arguments[0]}: takes no arguments")
    table = Table(show_header=False, pad_edge=False)
    for title, rows in (
        ("machine", _machine()),
        ("backends", _backends()),
        ("around", _around()),
        ("versions", _versions()),
    ):
        table.add_section()
        for i, (what, found) in enumerate(rows):
            table.add_row("" if i else title, what, found)
    make_console().print(table, markup=False, highlight=False)


def _machine() -> Iterator[tuple[str, str]]:
    facts = environment.machine_facts()
    yield "CPU", facts["machine.cpu"]
    yield "cores", f"{facts['machine.cores']} usable, {facts['machine.load']} processes running in the last minute"
    try:
        from cnnexp.backends.simd.host import host_target

        lanes = host_target().lanes
        yield "vectors", f"{lanes * FLOAT_BITS} bits, {lanes} float32 at once"
    except Exception as error:  # whatever a broken Numba raises: its backends say the same below
        yield "vectors", _why(error)
    yield "system", facts["machine.system"]


def _backends() -> Iterator[tuple[str, str]]:
    """Yield the backends, those with the same answer together."""
    answers: dict[str, list[str]] = {}
    for name in BACKENDS:
        answers.setdefault(_try_backend(name), []).append(name)
    for answer, names in answers.items():
        yield ", ".join(names), answer


def _try_backend(name: str) -> str:
    """Return what a backend would compute on, or in one line why it cannot."""
    if name in SLOW and all(util.find_spec(package) for package in SLOW[name]):
        return "installed: " + ", ".join(f"{package} {_version(package)}" for package in SLOW[name])
    try:
        backend = backend_class(name)()
    except Exception as error:  # also what a broken installation raises: it is this command's news
        return _why(error)
    threads = f"{backend.threads} thread{'s' if backend.threads > 1 else ''} of " if not hasattr(backend, "gpu") else ""
    return f"yes, on {threads}{backend.device_name}"


def _around() -> Iterator[tuple[str, str]]:
    mpi = "mpi4py " + _version("mpi4py") if util.find_spec("mpi4py") else "no mpi4py: install cnnexp[mpi]"
    yield "MPI", f"{mpi}; {shutil.which('mpiexec') or 'no mpiexec on the PATH'}"
    store = store_uri(None)
    database = Path(urlsplit(store).path)
    yield "store", f"{store} ({database.stat().st_size / 1e6:.1f} MB)" if database.exists() else f"{store} (no run yet)"
    import pooch

    cache = Path(pooch.os_cache("cnnexp"))
    for name, source in DATASETS.items():
        if issubclass(source, IdxSet):
            files = [cache / name / f"{file.name}.gz" for file in source.files]
            missing = sum(not file.exists() for file in files)
            yield (
                name,
                f"in {cache / name}" if not missing else f"not yet in {cache / name}: its first use downloads it",
            )


def _versions() -> Iterator[tuple[str, str]]:
    for tag, version in environment.versions().items():
        yield tag.removeprefix("version."), version


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(its distribution has another name)"


def _why(error: Exception) -> str:
    text = str(error).splitlines() or [""]
    return f"no: {text[0]}" if isinstance(error, CnnexpError) else f"no: {type(error).__name__}: {text[0]}"
