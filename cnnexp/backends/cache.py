"""Compiled code on disk, so that the second start of a network takes milliseconds of compiling, not seconds.

A file is named by a hash of all that its machine code depends on: the source of the backends, of the layers and of the
optimizers' rules, Numba's and Python's versions, the CPU and its features, and the program itself. So a changed
source or CPU never meets old code; it makes a new file. A file is written under another name and then renamed, so
processes that start at once see a whole file or none; it begins with the hash of its content, and one that does not
match is compiled anew and replaced. Reading a file runs what is in it: so it is read only where it, and its folder,
belong to this user and nobody else may write them. Without such a folder everything is compiled at every start.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import logging
import os
import platform
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite

from cnnexp import network, optimizers
from cnnexp.network import Elementwise, Maths, Network, layers, shapes
from cnnexp.system.files import open_regular, remove_leftovers

log = logging.getLogger(__name__)
T = TypeVar("T")

DIGEST_BYTES = 32
KEEP = 400
"""Files kept, the latest used; a file has 20 to 200 KB."""
OTHERS_WRITE = 0o022
MAKING = ".tmp"

NO_AVX = {"corei7-avx", "core-avx-i", "sandybridge", "ivybridge", "nocona"}
"""CPUs for which Numba leaves AVX alone: LLVM does badly with it there."""

CPU_FACTS = {"vendor_id", "cpu family", "model", "stepping", "flags"}
CPU_TEXT = 1 << 14
"""Characters that hold all of a core."""


def host() -> tuple[str, str, str]:
    """Return (target triple, CPU name, features as `+avx2,-sse4a,...`) as Numba, without its 0.3 s and 60 MB."""
    triple, own, features = _asked_llvm()
    name = os.environ.get("NUMBA_CPU_NAME")
    listed = os.environ.get("NUMBA_CPU_FEATURES", "" if str(name).lower() == "generic" else None)
    name = own if name is None else name
    if listed is None:
        asked = os.environ.get("NUMBA_ENABLE_AVX")
        avx = name not in NO_AVX if asked is None else int(asked)
        present = {feature: has and bool(avx or not feature.startswith("avx")) for feature, has in features.items()}
        listed = ",".join(f"{'+' if has else '-'}{feature}" for feature, has in sorted(present.items()))
    return triple, name, listed


@functools.cache
def _asked_llvm() -> tuple[str, str, dict[str, bool]]:
    """Return (target triple, CPU, whether it has each feature) of LLVM, kept on disk: to ask takes 30 ms and 50 MB."""
    folder, facts = cache_folder("cpus"), _cpu_facts()
    known = repr((llvmlite.__version__, sys.version, facts)).encode()
    path = folder / f"{hashlib.sha256(known).hexdigest()}.bin" if folder and facts else None
    if path and (payload := read_private(path)) is not None:
        triple, name, features = json.loads(payload)
        return triple, name, features
    import llvmlite.binding as llvm

    features = {}
    with contextlib.suppress(RuntimeError):
        features = dict(llvm.get_host_cpu_features())
    found = llvm.get_process_triple(), llvm.get_host_cpu_name(), features
    if path:
        write_private(path, json.dumps(found).encode(), KEEP)
    return found


def _cpu_facts() -> list[str]:
    """Return what Linux states of the first x86-64 core, but for what changes; empty elsewhere."""
    if platform.machine() == "x86_64":
        with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as file:
            stated = file.read(CPU_TEXT).split("\n\n")[0].splitlines()
            return [line for line in stated if line.partition("\t")[0] in CPU_FACTS]
    return []


def cache_folder(name: str = "compiled") -> Path | None:
    """Return where compiled code lies, in the user's cache folder; None where there is none."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a user without a home
        return None
    return Path(base) / "cnnexp" / name


def load_or_make(key: str, load: Callable[[bytes], T], make: Callable[[], bytes]) -> T:
    """Return `load` of the bytes that lie under a key of `program_key`.

    Where none do, or `load` raises as they are not what they should be, of what `make` returns, which then lies there.
    """
    folder = cache_folder()
    if folder is None:
        return load(make())
    path = folder / f"{key}.bin"
    if (payload := read_private(path)) is not None:
        with contextlib.suppress(Exception):  # written by something else, under our name
            return load(payload)
    _say_compiling()
    payload = make()
    write_private(path, payload, KEEP)
    return load(payload)


@functools.cache
def _say_compiling() -> None:
    """Say so once: a process compiles many kernels."""
    log.info("compiling for this CPU; the next run of this network finds it compiled")


@functools.cache
def source_files() -> list[Path]:
    """Return the files that the machine code comes from: of the backends, the layers and the optimizers."""
    folder, layers_folder = Path(__file__).parent, Path(network.__file__).parent
    kernels = [*folder.glob("*.py"), *folder.glob("cpu/*.py"), *folder.glob("simd/**/*.py")]
    return sorted([*kernels, *layers_folder.glob("*.py"), Path(optimizers.__file__)])


def program_key(signature: object, described: tuple[object, ...]) -> str:
    """Return the hash of all that machine code of a signature depends on; what is `described` differs in its `repr`."""
    identities = map(_identity, described)
    facts = (sys.version, _numba_version(), llvmlite.__version__, host(), str(signature), *identities)
    return hashlib.sha256(digest(tuple(source_files())) + repr(facts).encode()).hexdigest()


@functools.cache
def _numba_version() -> str:
    """Return it as it stands in the name of Numba's metadata: to read them takes longer than all else at a start."""
    spec = importlib.util.find_spec("numba")
    if spec is not None and spec.origin is not None:
        found = [path.name for path in Path(spec.origin).parents[1].glob("numba-*.dist-info")]
        if len(found) == 1:
            return found[0]
    return importlib.import_module("importlib.metadata").version("numba")  # e.g. one that is being developed


@functools.cache
def digest(files: tuple[Path, ...]) -> bytes:
    """Return a hash over the files; they do not change while a process has imported them."""
    return hashlib.sha256(b"\0".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).digest()


def _identity(described: object) -> object:
    """Return what says a thing whole: a network's own text is one line, which many share.

    The rules of layers and optimizers may be from outside this package. Of an optimizer's numbers it has all but the
    learning rate, which comes with every step, so that a search for one compiles once; a rule may close over it.
    """
    match described:
        case Network():
            placed = (stage.layer for stage in shapes.walk(described.stages))
            rules = [fingerprint(layer) for layer in placed if isinstance(layer, Elementwise)]
            return described.input_shape, [layers.describe_layer(layer) for layer in described.layers], rules
        case optimizers.Optimizer():
            numbers = {**dataclasses.asdict(described), "lr": None}
            return type(described), numbers, code_of(described.rule())
    return described


def fingerprint(layer: Elementwise) -> str:
    """Return what changes with a layer's rules and numbers, for caches that look at files or names alone."""
    unbound = Maths(*[cast(Callable, None)] * len(Maths._fields))
    facts = type(layer).__module__, layer, code_of(layer.rule(unbound)), code_of(layer.derivative(unbound))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def code_of(value: Any, names: tuple[str, ...] = (), seen: tuple[Any, ...] = ()) -> object:
    """Return what distinguishes the functions that one definition makes, those that they call included.

    Of a function outside this package, whose files are hashed, that is also what it reads of globals and attributes:
    `names` of them. What is `seen` on the way is told there.
    """
    value = getattr(value, "py_func", getattr(value, "__func__", value))  # of what Numba compiles, of a method
    if any(value is one for one in seen):
        return "seen"
    match value:
        case types.FunctionType():
            codes = [value.__code__] * (str(value.__module__).partition(".")[0] != __name__.partition(".")[0])
            for code in codes:
                codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
            names, found = tuple(name for code in codes for name in code.co_names), value.__globals__
            inside = [*(cell.cell_contents for cell in value.__closure__ or ()), *(value.__defaults__ or ())]
            inside += [*(value.__kwdefaults__ or {}).values(), *(found[name] for name in names if name in found)]
            parts = [code_of(part, names, (*seen, value)) for part in inside]
            return value.__module__, value.__qualname__, code_of(value.__code__), parts
        case types.CodeType():
            return value.co_code, value.co_names, [code_of(constant) for constant in value.co_consts]
        case tuple() | list():
            return [code_of(part, names, seen) for part in value]
    within = names if isinstance(value, types.ModuleType) else ()
    read = [code_of(getattr(value, name), within, (*seen, value)) for name in names if hasattr(value, name)]
    return type(value).__name__, getattr(value, "__module__", ""), getattr(value, "__name__", None) or repr(value), read


def read_private(path: Path) -> bytes | None:
    """Return the content of a file, None if there is none, it is damaged, or others may have written it."""
    try:
        if not _is_private(os.stat(path.parent)):
            return None
        with open_regular(path) as file:
            if not _is_private(os.fstat(file.fileno())):
                return None
            content = file.read()
        os.utime(path)
    except OSError:
        return None
    digest, payload = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    return payload if hashlib.sha256(payload).digest() == digest else None


def _is_private(found: os.stat_result) -> bool:
    """Return whether a file or folder is this user's own and nobody else may write it."""
    if not hasattr(os, "geteuid"):
        return True  # no number names its owner there
    return found.st_uid == os.geteuid() and not found.st_mode & OTHERS_WRITE


def write_private(path: Path, payload: bytes, keep: int) -> None:
    """Put a file in place whole, for `read_private`, where its folder can be written; the `keep` used last stay."""
    # compiling again is all that a read-only home costs
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(os.stat(path.parent)):
            return
        remove_leftovers(path.parent, f"*{MAKING}")
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=MAKING, delete=False) as file:
            file.write(hashlib.sha256(payload).digest() + payload)
        os.replace(file.name, path)
        for old in sorted(path.parent.glob("*.bin"), key=lambda p: p.stat().st_mtime)[:-keep]:
            old.unlink(missing_ok=True)
