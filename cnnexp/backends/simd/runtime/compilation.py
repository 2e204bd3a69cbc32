"""Compiling in a process of its own: what LLVM cannot do ends the process it runs in, with no exception raised.

Only a program that is not in the cache comes here, so a warm start pays nothing. The child makes the very bytes that
the cache keeps and hands them back: nothing is compiled twice, even without a cache, and only the child needs Numba.
"""

import gc
import pickle

from cnnexp.backends.cache import host, program_key
from cnnexp.backends.simd.compiler.emit import Target
from cnnexp.backends.simd.compiler.entry import Array, Call, Forward, arguments
from cnnexp.backends.simd.lowering import Plan
from cnnexp.errors import CompilerDied
from cnnexp.network import Network
from cnnexp.network.losses import Loss
from cnnexp.optimizers import Optimizer
from cnnexp.system import child

LIMIT_S = 600.0
"""As long may the child take: the papers' networks take it 2 to 5 s, ResNet-20 and 56 take it some 10."""

Described = tuple[Network, Loss, Optimizer, Target, float, int]
"""A program. The numbers: vectors of images that go through the layers at once, and images of a thread in a step."""


def arguments_of(described: Described) -> dict[str, Array | None]:
    """Return the arguments of a program's function, by name."""
    return arguments(Forward if described[3].forward_only else Call)


def compile_in_process(key: str, described: Described) -> bytes:
    """Return a program's machine code as the cache keeps it, under a key: see `cache.program_key`."""
    from cnnexp.backends.simd.runtime.step import machine_code  # brings Numba

    network, loss, optimizer, target, groups, share = described
    return machine_code(Plan(network, target, groups, share), loss, optimizer, key).to_bytes()


def compile_in_subprocess(key: str, described: Described) -> bytes | None:
    """Return the child's answer, None where it raised or could not be asked; `compile_in_process` then raises it.

    Raises:
        CompilerDied: the child did not live to answer.
    """
    try:
        question = pickle.dumps((key, described))
    except (AttributeError, TypeError, pickle.PicklingError):
        return None  # what describes the program is known to this process alone
    try:
        return child.call(f"{__name__}:answer", question, LIMIT_S) or None
    except OSError:
        return None  # no process may be started here
    except child.ChildDied as death:
        network, _, _, target, groups, share = described
        nodes = ", ".join(node.algorithm for node in Plan(network, target, groups, share).nodes)
        raise CompilerDied(
            f"backend=cpu-simd: the compiler {death}, for {host()[1]} with {target.lanes} lanes, on {nodes}; "
            "backend.fallback=true goes on with cpu-parallel"
        ) from death


def answer(question: bytes) -> bytes:
    """Return the machine code of the program that a question describes, nothing after an exception of Python's."""
    gc.disable()  # a fifth of the time is its search for garbage, and the process ends with the answer
    try:
        key, described = pickle.loads(question)
        if program_key(arguments_of(described), described) != key:
            return b""  # this process would compile something else
        return compile_in_process(key, described)
    except Exception:
        return b""
