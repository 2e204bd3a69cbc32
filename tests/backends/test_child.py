"""A call in a process of its own: its answer, and every way to end without one."""

import os

import pytest
from tables import each

from cnnexp.system import child

MODULE = """
import os, sys, time

def reverse(question):
    print("a library talks")
    os.write(1, b"so does one in C")
    return question[::-1]

def abort(question):
    os.abort()

def fatal(question):
    os.write(2, b"LLVM ERROR: Cannot select: 0x1\\nStack dump\\n")
    os._exit(1)

def hang(question):
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    (tmp_path / "calls.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_the_answer_is_what_the_function_returns_and_nothing_else():
    assert child.call("calls:reverse", b"\0\xff", 60) == b"\xff\0"


@pytest.mark.skipif(os.name == "nt", reason="an abort is a signal on POSIX alone")
@each(
    ("abort", 60, "was ended by SIGABRT"),
    ("fatal", 60, "ended with exit code 1 (LLVM ERROR: Cannot select: 0x1)"),
    ("missing", 60, "ended with exit code 1"),
    ("hang", 0.5, "took more than 0.5 s and was killed"),
)
def test_a_death_says_how(function, limit_s, said):
    with pytest.raises(child.ChildDied) as death:
        child.call(f"calls:{function}", b"", limit_s)
    assert str(death.value) == said
