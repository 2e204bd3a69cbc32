"""Numba's dispatchers, compiled once and kept by `cache`."""

import pickle
from collections.abc import Callable

from numba.core import serialize
from numba.core.compiler import CompileResult
from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys

from cnnexp.backends import cache


def load_or_compile(make: Callable[[str], Dispatcher], signature: str, *described: object) -> Dispatcher:
    """Return `make(key)` compiled for a signature, e.g. `void(f4[::1], i8)`; from the disk where it has been before.

    Args:
        make: returns a dispatcher that is not compiled yet. The names of all compiled functions in it must hold the
            key: machine code of several programs meets in one process, and the linker goes by names.
        described: all that the function depends on besides the package's source; they differ in their `repr`.
    """
    key = cache.program_key(signature, described)
    if key not in _ready:
        function = make(key)

        def load(payload: bytes) -> Dispatcher:
            if not function.overloads:
                # the runtime's functions are all that such code asks for: to get ready to compile takes half a second
                rtsys.initialize(cpu_target.target_context)
                function.add_overload(CompileResult._rebuild(cpu_target.target_context, *pickle.loads(payload)))
            return function

        cache.load_or_make(key, load, lambda: compiled_bytes(function, signature))
        function.disable_compile()
        _ready[key] = function
    return _ready[key]


_ready: dict[str, Dispatcher] = {}
"""What this process has compiled or loaded."""


def compiled_bytes(function: Dispatcher, signature: str) -> bytes:
    """Compile a dispatcher for a signature; return what a file of the cache holds of it."""
    function.compile(signature)
    (made,) = function.overloads.values()
    return serialize.dumps(made._reduce())
