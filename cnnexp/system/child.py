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
from typing import Any

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
    command, pipe = [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()", place], subprocess.PIPE
    started: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "env": {**os.environ, "PYTHONPATH": path}}
    with subprocess.Popen(command, start_new_session=True, **started) as child:  # Ctrl-C is for the caller
        _children.add(child)
        try:
            answer, told = child.communicate(question, limit_s)
        except subprocess.TimeoutExpired as error:
            raise ChildDied(f"took more than {limit_s:g} s and was killed") from error
        finally:
            child.kill()
            _children.remove(child)
    if child.returncode:
        found = LAST_WORDS.search(told.decode(errors="replace"))
        raise ChildDied(ending(child.returncode, "ended") + (f" ({found[0]})" if found else ""))
    return answer


_children: set[subprocess.Popen] = set()


def end_all() -> None:
    """End the calls of all threads, which raise `ChildDied`."""
    for child in list(_children):
        child.kill()


def serve() -> None:
    """Be the child: answer one question."""
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # what a library prints is not the answer
        load_named()  # the question may hold objects of theirs
        module, _, function = sys.argv[1].partition(":")
        out.write(getattr(importlib.import_module(module), function)(sys.stdin.buffer.read()))


def ending(exit_code: int, how: str) -> str:
    """Return what a process came to; `how` a signal did it, `ended` or `killed`."""
    if exit_code < 0:
        with contextlib.suppress(ValueError):  # a real-time signal has no name
            return f"was {how} by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"
