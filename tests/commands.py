"""Command lines that several tests run, and how they wait for what comes of them."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cnnexp.errors import DataError

TINY = ("experiment=smoke", "backend=numpy", "tracking=none", "trainer.baseline=null", "trainer.epochs=1")

ROOT = Path(__file__).resolve().parents[1]
MNIST = ROOT.parent / "shared" / "data" / "mnist"
needs_mnist = pytest.mark.skipif(not MNIST.is_dir(), reason="needs the four IDX files of MNIST in ../shared/data/mnist")
mlflow_warns = pytest.mark.filterwarnings("default")  # as what it imports does; the recorder's process silences both
RECORD_NOTHING = {"--cfg", "check", "explain", "help", "predict"}


def cnnexp(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """Return a command line of cnnexp after it has run, in a process of its own."""
    return subprocess.run([sys.executable, "-m", "cnnexp", *words], capture_output=True, text=True, cwd=cwd)


def python(*words: object, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Return what a Python program prints that ends well, in a process of its own."""
    done = subprocess.run([sys.executable, *map(str, words)], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-2000:]}"
    return done.stdout


def suite(*arguments: str, environ: dict[str, str]) -> str:
    """Return what tests print that run, and pass, in a process of its own with an environment."""
    environ = {name: value for name, value in environ.items() if name != "PYTEST_XDIST_WORKER"}
    printed = python("-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments, env=environ)
    assert " passed" in printed
    return printed


@contextlib.contextmanager
def starting(*words: str, **options) -> Iterator[subprocess.Popen]:
    """Give a command line of cnnexp that runs, in a process of its own whose streams are read as they come."""
    pipes = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-u", "-m", "cnnexp", *words], **{**pipes, **options}) as process:
        yield process


@contextlib.contextmanager
def serving(*command: str, env: dict[str, str], stdout: int = subprocess.PIPE) -> Iterator[subprocess.Popen]:
    """Give a server that runs until it is killed with all its processes."""
    streams = {"stdout": stdout, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **streams) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def one_line(error: type[Exception], message: str | None = None) -> Iterator[pytest.ExceptionInfo]:
    """Expect an error, a pattern found in its one line."""
    with pytest.raises(error, match=message) as raised:
        yield raised
    assert "\n" not in str(raised.value)


def raises(error: type[Exception], message: str, call, /, *given, **named) -> Exception:
    """Return the error that a call must raise, a pattern found in its one line."""
    with one_line(error, message) as raised:
        call(*given, **named)
    return raised.value


def often(names, few):
    """Return parameters, of which not every run of the tests tries more than a few."""
    return [pytest.param(name, marks=() if name in few else pytest.mark.thorough, id=str(name)) for name in names]


def refused(source, message: str) -> None:
    """Expect the images of a source to be refused."""
    raises(DataError, message, source.load)


def follow(commands: str, folder: Path, tracking: str = "tracking=none") -> list[str]:
    """Return what the commands of a document print, a line each, typed in a folder, recorded as `tracking` says."""
    environment, outputs = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}, []
    for command in commands.splitlines():
        words = [sys.executable if word == "python" else word for word in command.split()]
        if words[1:3] == ["-m", "cnnexp"] and not RECORD_NOTHING & set(words):
            words.append(tracking)
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        outputs.append(done.stdout)
    return outputs


def wait_for(condition, process=None, limit_s=150):
    """Look until a condition holds, at most so long, and as long as a process runs: a busy machine is slow."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process is None or process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def statuses(store: str) -> list[str]:
    """Return what an MLflow store in a file says of its runs."""
    with contextlib.closing(sqlite3.connect(store.removeprefix("sqlite:///"))) as connection:
        return [status for (status,) in connection.execute("select status from runs")]
