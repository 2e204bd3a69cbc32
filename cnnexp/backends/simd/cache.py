"""Compiled programs on disk, so that the second start of a network takes milliseconds of compiling, not seconds.

A file is named by a hash of all that its machine code depends on: the source of this package and of what it compiles
(the optimizers' rules), Numba's and Python's versions, the CPU and its features, and the program itself. So a changed
source or CPU never meets old code; it makes a new file. A file is written under another name and then renamed, so
processes that start at once see a whole file or none; it begins with the hash of its content, and one that does not
match is compiled anew and replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import llvmlite
import numba
from numba.core import serialize
from numba.core.compiler import CompileResult
from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target
from numba.core.typing.templates import Signature

from cnnexp import optimizers
from cnnexp.backends.simd.host import host
from cnnexp.network import Elementwise, Network, Residual, elementwise, layers, losses, shapes

DIGEST_BYTES = 32
KEEP = 200
"""Files kept, the latest used; a file is about 200 KB."""


def cache_folder() -> Path:
    """Return where compiled programs lie: the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "cnnexp" / "cpu-simd"


def load_or_compile(
    make: Callable[[str], Dispatcher],
    signature: Signature,
    *described: object,
    elsewhere: Callable[..., bytes | None] = lambda key, *described: None,
) -> Dispatcher:
    """Return `make(key)` compiled for a signature, from the disk where it has been compiled before.

    Args:
        make: returns a dispatcher that is not compiled yet. The names of all compiled functions in it must hold the
            key: machine code of several programs meets in one process, and the linker goes by names.
        described: all that the function depends on besides the package's source; their `repr` tells them apart.
        elsewhere: asked, with the key and `described`, for the `compiled_bytes` of what is not on the disk; None from
            it means to compile here.
    """
    key = program_key(signature, described)
    if key not in _ready:
        _ready[key] = _load_or_compile(
            make(key), signature, cache_folder() / f"{key}.bin", lambda: elsewhere(key, *described)
        )
    return _ready[key]


_ready: dict[str, Dispatcher] = {}
"""What this process has compiled or loaded."""


def compiled_bytes(function: Dispatcher, signature: Signature) -> bytes:
    """Compile a dispatcher for a signature; return what a file of the cache holds of it."""
    function.compile(signature)
    return serialize.dumps(function.overloads[signature.args]._reduce())


def _load_or_compile(
    function: Dispatcher, signature: Signature, path: Path, elsewhere: Callable[[], bytes | None]
) -> Dispatcher:
    payload = _read(path)
    if payload is None:
        payload = elsewhere()
        _write(path, payload or compiled_bytes(function, signature))
    if payload is not None:
        # a context that has not compiled anything yet knows no runtime functions
        cpu_target.target_context.refresh()
        # made by this user's own process, and whole: a file's hash was checked
        function.add_overload(CompileResult._rebuild(cpu_target.target_context, *pickle.loads(payload)))
    function.disable_compile()
    return function


def source_files() -> list[Path]:
    """Return the files that the machine code comes from."""
    return [
        *sorted(Path(__file__).parent.glob("*.py")),
        *(Path(m.__file__) for m in (elementwise, layers, losses, optimizers, shapes)),
    ]


def program_key(signature: Signature, described: tuple[object, ...]) -> str:
    """Return the hash of all that the machine code depends on."""
    rules = [rule for thing in described for rule in _rules(thing)]
    facts = (sys.version, numba.__version__, llvmlite.__version__, host(), str(signature), *rules, *described)
    return hashlib.sha256(b"\0".join([*(p.read_bytes() for p in source_files()), repr(facts).encode()])).hexdigest()


def _rules(described: object) -> list[object]:
    """Return what tells the rules of layers and optimizers, which may be a user's, from nowhere in this package."""
    match described:
        case Network(layers=layers) | Residual(layers=layers):
            return [rule for layer in layers for rule in _rules(layer)]
        case Elementwise():
            return [elementwise.fingerprint(described)]
        case optimizers.Optimizer():
            return [elementwise.code_of(described.rule())]
    return []


def _read(path: Path) -> bytes | None:
    """Return the content of a file, None if there is none or it is damaged."""
    try:
        content = path.read_bytes()
        os.utime(path)
    except OSError:
        return None
    digest, payload = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    return payload if hashlib.sha256(payload).digest() == digest else None


def _write(path: Path, payload: bytes) -> None:
    """Put a file in place whole, and remove those not used for longest; a folder that cannot be written stays as is."""
    # compiling again is all that a read-only home costs
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(payload).digest() + payload)
        os.replace(file.name, path)
        for old in sorted(path.parent.glob("*.bin"), key=lambda p: p.stat().st_mtime)[:-KEEP]:
            old.unlink(missing_ok=True)
