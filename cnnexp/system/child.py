"""One call in a process of its own, for what may end the process it runs in: a compiler, a driver.

The process is started anew, never forked: locks that other threads of this one hold would stay locked in a fork.
"""

import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from cnnexp.system.registry import load_named

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
LAST_WORDS = re.compile(r"Assertion .* failed|LLVM ERROR: .*")


class ChildDied(Exception):
    """The process did not live to answer; the text goes on after its name, e.g. `was ended by SIGABRT`."""


def call(place: str, question: bytes, limit_s: float) -> bytes:
    """Return `place(question)`, a `module:function` of this package, which should catch its own exceptions.

    Raises:
        ChildDied: the process ended without an answer, or took too long.
        OSError: none can be started here.
    """
    path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()", place],
            input=question,
            capture_output=True,
            timeout=limit_s,
            check=False,
            start_new_session=True,  # Ctrl-C is for the caller, who ends the child
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired as error:
        raise ChildDied(f"took more than {limit_s:g} s and was killed") from error
    if done.returncode:
        found = LAST_WORDS.search(done.stderr.decode(errors="replace"))
        raise ChildDied(_ending(done.returncode) + (f" ({found[0]})" if found else ""))
    return done.stdout


def serve() -> None:
    """Be the child: answer one question."""
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # what a library prints is not the answer
        load_named()  # the question may hold objects of theirs
        module, _, function = sys.argv[1].partition(":")
        out.write(getattr(importlib.import_module(module), function)(sys.stdin.buffer.read()))


def _ending(exit_code: int) -> str:
    if exit_code < 0:
        with contextlib.suppress(ValueError):  # a real-time signal has no name
            return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"
