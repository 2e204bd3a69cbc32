"""`cnnexp doctor`: what this machine can run, and for what it cannot, what is missing.

Every backend trains a small network in a process of its own, which alone may die, and is compared: see `testing`.
"""

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata, util
from pathlib import Path

from cnnexp.app.console import make_console
from cnnexp.backends import BACKENDS, backend_class
from cnnexp.datasets import DATASETS
from cnnexp.datasets.idx import FORM, IdxSet
from cnnexp.errors import CnnexpError, ConfigError, first_line, installing
from cnnexp.measuring import environment
from cnnexp.system import child
from cnnexp.system.cores import usable_cores
from cnnexp.system.table import Table, as_screen
from cnnexp.testing import examine, reference_of
from cnnexp.tracking.address import database_of, store_uri

FLOAT_BITS = 32
VECTORS = "vectors"
LIMIT_S = 600.0  # as long may a backend take to its answer; the first time on a machine it compiles
TRIAL = "max-pool"  # of `testing.NETWORKS`: convolution, ReLU, max-pool, linear


def command(arguments: Sequence[str]) -> None:
    """Print a table of the machine, the backends, where runs and data sets are; raise ConfigError given an argument."""
    if arguments:
        raise ConfigError(f"doctor {arguments[0]}: takes no arguments")
    versions = ((tag.removeprefix("version."), version) for tag, version in environment.versions().items())
    parts = {"machine": _machine(), "backends": _backends(), "around": _around(), "versions": versions}
    rows = [("" if i else title, *row) for title, found in parts.items() for i, row in enumerate(found)]
    console = make_console()
    console.print(as_screen(Table([], rows, ["", "", ""]), None, console.width), markup=False, highlight=False)


def _machine() -> Iterator[tuple[str, str]]:
    facts = environment.machine_facts()
    yield "CPU", facts["machine.cpu"]
    yield "cores", f"{facts['machine.cores']} usable, {facts['machine.load']} processes running in the last minute"
    yield "vectors", _ask(VECTORS)
    yield "system", facts["machine.system"]


def _backends() -> Iterator[tuple[str, str]]:
    """Yield the backends, those with the same answer together."""
    answers: dict[str, list[str]] = {}
    with make_console().status("every backend trains a step"), ThreadPoolExecutor(usable_cores()) as asking:
        for name, answer in zip(BACKENDS, asking.map(_ask, BACKENDS), strict=True):
            answers.setdefault(answer, []).append(name)
    for answer, names in answers.items():
        yield ", ".join(names), answer


def _ask(question: str) -> str:
    """Return what `answer` says in a process of its own, or how that process ended."""
    try:
        return child.call(f"{__name__}:answer", question.encode(), LIMIT_S).decode()
    except child.ChildDied as death:
        return f"no: its process {death}"


def answer(question: bytes) -> bytes:
    """Answer how wide the `VECTORS` are, or what the backend of a name computes on; or in one line why it cannot."""
    name = question.decode()
    try:
        if name == VECTORS:
            from cnnexp.backends.simd.compiler.host import host_target

            lanes = host_target().lanes
            return f"{lanes * FLOAT_BITS} bits, {lanes} float32 at once".encode()
        backend = backend_class(name)()
        verdict, text = examine(backend, backend_class(reference_of(name))(), TRIAL)
        if verdict != "right":
            return f"no: {text}".encode()
        threads = f"{backend.threads} thread{'s' if backend.threads > 1 else ''} of " if not backend.on_gpu else ""
        return f"yes, on {threads}{backend.device_name}".encode()
    except Exception as error:  # also what a broken installation raises: it is this command's news
        kind = "" if isinstance(error, CnnexpError) else f"{type(error).__name__}: "
        return f"no: {kind}{first_line(error)}".encode()


def _around() -> Iterator[tuple[str, str]]:
    mpi = f"no mpi4py: {installing('mpi')}"
    if util.find_spec("mpi4py"):
        named = list(metadata.distributions(name="mpi4py"))
        mpi = f"mpi4py {named[0].version if named else '(its distribution has another name)'}"
    yield "MPI", f"{mpi}; {shutil.which('mpiexec') or 'no mpiexec on the PATH'}"
    store = store_uri(None)
    database = database_of(store)
    yield "store", f"{store} ({database.stat().st_size / 1e6:.1f} MB)" if database.exists() else f"{store} (no run yet)"
    import pooch

    cache = Path(pooch.os_cache("cnnexp"))
    for name, source in DATASETS.items():
        if issubclass(source, IdxSet):
            there = all((cache / name / f"{file}.gz").exists() for file in FORM)
            yield name, f"in {cache / name}" if there else f"not yet in {cache / name}: its first use downloads it"
