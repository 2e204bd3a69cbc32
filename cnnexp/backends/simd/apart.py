"""Compiling in a process of its own: what LLVM cannot do ends the process it runs in, and no exception tells of it.

Only a program that is not in the cache comes here, so a warm start pays nothing. The child makes the very bytes that
the cache keeps and hands them back: nothing is compiled twice, whether or not the cache can be written. It costs a
second interpreter with Numba in it: 0.8 s, measured, on top of a start that compiles for one.
"""

from __future__ import annotations

import pickle

from cnnexp.backends import cache, child
from cnnexp.backends.cache import host
from cnnexp.backends.simd.emit import Target
from cnnexp.backends.simd.plan import Plan
from cnnexp.backends.simd.step import SIGNATURE, make_work
from cnnexp.errors import CompilerDied
from cnnexp.network import Network
from cnnexp.network.losses import Loss
from cnnexp.optimizers import Optimizer

LIMIT_S = 600.0
"""As long may the child take: the papers' networks take it 2 to 5 s."""


def compile_apart(
    key: str, network: Network, loss: Loss, optimizer: Optimizer, target: Target, groups: int, share: int
) -> bytes | None:
    """Return a program's machine code as the cache keeps it, None where the child raised or could not be asked.

    The caller then compiles it itself, and gets the exception where there is one.

    Args:
        key: the program's, see `cache.program_key`.
        groups: vectors of images that go through the layers at once. share: images of a thread in a step.

    Raises:
        CompilerDied: the child did not live to answer.
    """
    try:
        question = pickle.dumps((key, network, loss, optimizer, target, groups, share))
    except (AttributeError, TypeError, pickle.PicklingError):
        return None  # what describes the program is known to this process alone
    try:
        return child.call(f"{__name__}:answer", question, LIMIT_S) or None
    except OSError:
        return None  # no process may be started here
    except child.ChildDied as death:
        nodes = ", ".join(type(node).__name__ for node in Plan(network, target, groups, share).nodes)
        raise CompilerDied(
            f"backend=cpu-simd: the compiler {death}, for {host()[1]} with {target.lanes} lanes, on {nodes}; "
            "backend.fallback=true goes on with cpu-parallel"
        ) from death


def answer(question: bytes) -> bytes:
    """Return the machine code of the program that a question describes, nothing after an exception of Python's."""
    try:
        key, *described = pickle.loads(question)
        if cache.program_key(SIGNATURE, tuple(described)) != key:
            return b""  # this process would compile something else
        network, loss, optimizer, target, groups, share = described
        return cache.compiled_bytes(make_work(Plan(network, target, groups, share), loss, optimizer, key), SIGNATURE)
    except Exception:
        return b""
