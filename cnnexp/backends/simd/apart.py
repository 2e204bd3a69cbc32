"""Compiling in a process of its own: what LLVM cannot do ends the process it runs in, and no exception tells of it.

Only a program that is not in the cache comes here, so a warm start pays nothing. The child makes the very bytes that
the cache keeps and hands them back: nothing is compiled twice, whether or not the cache can be written. It is started
anew, never forked: locks that other threads of this process hold would stay locked in a fork. That costs the import of
Numba, about half a second beside the seconds of compiling.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path

from cnnexp.backends.simd import cache
from cnnexp.backends.simd.emit import Target
from cnnexp.backends.simd.host import host
from cnnexp.backends.simd.plan import Plan
from cnnexp.backends.simd.step import SIGNATURE, make_work
from cnnexp.errors import CompilerDied
from cnnexp.network import Network
from cnnexp.network.losses import Loss
from cnnexp.optimizers import Optimizer

LIMIT_S = 600.0
"""As long may the child take: the papers' networks take it 2 to 5 s."""

RAISED = 3
"""The child's exit code after an exception of Python's; LLVM's own ways out are a signal, or 1."""

PACKAGE_ROOT = Path(__file__).resolve().parents[3]
LAST_WORDS = re.compile(r"(?:Assertion .* failed|LLVM ERROR: .*)")


def compile_apart(
    key: str, network: Network, loss: Loss, optimizer: Optimizer, target: Target, groups: int
) -> bytes | None:
    """Return a program's machine code as the cache keeps it, None where the child raised or could not be asked.

    The caller then compiles it itself, and gets the exception where there is one.

    Args:
        key: the program's, see `cache.program_key`.
        groups: vectors of images that go through the layers at once.

    Raises:
        CompilerDied: the child did not live to answer.
    """
    path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", f"from {__name__} import answer; answer()"],
            input=pickle.dumps((key, network, loss, optimizer, target, groups)),
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
            start_new_session=True,  # Ctrl-C is for the caller, who ends the child
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        ending = f"took more than {LIMIT_S:.0f} s and was killed"
    except (OSError, ValueError, TypeError, AttributeError, pickle.PicklingError):
        return None  # no process may be started here, or what describes the program is known to this one alone
    else:
        if done.returncode == 0:
            return done.stdout
        if done.returncode == RAISED:
            return None
        ending = f"{_ending(done.returncode)}{_last_words(done.stderr.decode(errors='replace'))}"
    nodes = ", ".join(type(node).__name__ for node in Plan(network, target, groups).nodes)
    raise CompilerDied(
        f"backend=cpu-simd: the compiler {ending}, for {host()[1]} with {target.lanes} lanes, on {nodes}; take "
        "backend=cpu-parallel, or backend.fallback=true, which does so by itself"
    )


def answer() -> None:
    """Be the child: read a question on standard input, write the machine code to standard output."""
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # what Numba or LLVM may print is not the answer
        try:
            key, network, loss, optimizer, target, groups = pickle.load(sys.stdin.buffer)
            described = (network, loss, optimizer, target, groups)
            if cache.program_key(SIGNATURE, described) != key:
                raise ValueError("this process would compile something else")
            machine_code = cache.compiled_bytes(
                make_work(Plan(network, target, groups), loss, optimizer, key), SIGNATURE
            )
        except Exception:
            sys.exit(RAISED)
        out.write(machine_code)


def _ending(exit_code: int) -> str:
    if exit_code < 0:
        with contextlib.suppress(ValueError):  # a real-time signal has no name
            return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def _last_words(printed: str) -> str:
    found = LAST_WORDS.search(printed)
    return f" ({found[0]})" if found else ""
