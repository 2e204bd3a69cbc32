"""Errors that a user can act on: one line, an exit code, no traceback.

Every error names what was given, what is legal and what to do. `cnnexp.__main__` prints it as
`cnnexp: error: ...` and leaves with `exit_code`.
"""

import contextlib
import difflib
import errno
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote, urlsplit

NEAR = 0.75  # of difflib's similarity, 0 .. 1: "resnot" is near "resnet", "lenet" is not
MOST_SAID = 300  # characters of what an unexpected error says
PLUGINS = set[str]()  # files of the plugins that are loaded
# what the system says of a disk or a path on it, and no mistake of ours
DISK_ERRORS = (
    *(errno.EACCES, errno.EDQUOT, errno.EIO, errno.ENOSPC, errno.EPERM, errno.EROFS),
    *(errno.EEXIST, errno.EFBIG, errno.ELOOP, errno.EMFILE, errno.ENAMETOOLONG, errno.ENFILE, errno.ENOENT),
    *(errno.EISDIR, errno.EMLINK, errno.ENOTDIR, errno.ESTALE),
)


class CnnexpError(Exception):
    """Base of all errors meant for the user."""

    exit_code = 1

    def __init_subclass__(cls, exit_code: int | None = None) -> None:
        cls.exit_code = exit_code or cls.exit_code


class ConfigError(CnnexpError, exit_code=2):
    """A config key is unknown, of the wrong type, or holds an illegal value."""


class NetworkError(ConfigError):
    """The layers do not fit each other, their input, or the loss."""


class DataError(CnnexpError, exit_code=3):
    """A data set is missing, truncated, altered or malformed."""


class BackendUnavailable(CnnexpError, exit_code=4):
    """The machine lacks what the chosen backend needs."""


class GpuError(CnnexpError):
    """A GPU or its driver is too old, full, or gave up."""


class OutOfMemory(CnnexpError, exit_code=4):
    """What is asked for takes more memory than this process can have."""


class TrackingError(CnnexpError, exit_code=5):
    """The tracking store cannot be opened or written."""


class CheckpointError(CnnexpError, exit_code=6):
    """A checkpoint is missing, damaged, or of another network."""


class Diverged(CnnexpError, exit_code=7):
    """The loss is no longer a finite number."""

    @staticmethod
    def in_one_line() -> None:
        """Keep NumPy from warning of it beforehand, in every thread of this process."""
        warnings.filterwarnings("ignore", "(overflow|invalid value) encountered", RuntimeWarning)


class CompilerDied(CnnexpError):
    """A backend's compiler ended the process that it ran in: a fault of the compiler, on this CPU."""


class WorkerDied(CnnexpError, exit_code=8):
    """One of several workers is gone, so the others cannot go on."""


def explained(error: BaseException, *folders: Path) -> CnnexpError:
    """Return any error as one line: as it is, as what a disk lacks, or, as the last resort, as unexpected.

    The traceback of an unexpected one goes into a file, in the first of some folders that takes it.
    """
    if isinstance(error, CnnexpError):
        return error
    lacking = error.__cause__ if isinstance(error.__cause__, OSError) else error
    if isinstance(lacking, OSError) and lacking.errno in DISK_ERRORS:
        where = f"{lacking.filename}: " if lacking.filename else ""
        why = os.strerror(lacking.errno)
        return CnnexpError(f"{where}{why}; runs write to hydra.run.dir=FOLDER and tracking.uri=STORE")
    text = "".join(traceback.format_exception(error))
    line = f"unexpected {said(error)}"
    for frame, number in traceback.walk_tb(error.__traceback__):  # the last that is a plugin's names it
        code = frame.f_code
        if code.co_filename in PLUGINS:
            line = f"plugin {Path(code.co_filename).name}: {said(error)} ({code.co_qualname}, line {number})"
    if isinstance(error, MemoryError):
        line = "out of memory; lower trainer.batch_size, the size of the model or the data set"
    for folder in (*folders, Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            descriptor, name = tempfile.mkstemp(".txt", "traceback-", folder)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(without_secrets(text))
            return CnnexpError(f"{line}; its traceback is in {name}")
    return CnnexpError(f"{line}; its traceback could not be written anywhere")


def reason_of(error: OSError) -> str:
    """Return what the operating system says is wrong, in a few words."""
    return (error.strerror or str(error) or type(error).__name__).lower()


def said(error: BaseException) -> str:
    """Return the type of an error and, on one line, what it says."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:MOST_SAID]}".removesuffix(": ")


def first_line(error: BaseException) -> str:
    """Return the first line of what an unexpected error says, its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:MOST_SAID]


@contextlib.contextmanager
def refused(kind: type[CnnexpError], what: str, anything: str | None = None) -> Iterator[None]:
    """Raise what the operating system refuses within the block as an error of ours: what was wanted, and why not.

    With `anything`, words that end `what`, so too whatever else is raised within, as libraries do on a damaged file.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {reason_of(error)}") from error
    except Exception as error:
        if anything is None or isinstance(error, CnnexpError):
            raise
        raise kind(f"{what}{anything}: {first_line(error)}") from error


def did_you_mean(given: str, legal: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest legal name, or an empty string where none is near.

    Of dotted keys, the last parts must be near, too. A word that a name goes on from, as `batch_size` from `batch`, is.
    """

    def near(word: str, names: Iterable[str]) -> list[str]:
        longer = [name for name in names if name.startswith(f"{word.lower()}_")]
        return [*longer, *difflib.get_close_matches(word.lower(), names, n=3, cutoff=NEAR)]

    names = {name.lower(): name for name in legal}
    leaf = given.rpartition(".")[2]
    close = [names[name] for name in near(given, names) if near(leaf, [name.rpartition(".")[2]])]
    return f"; did you mean {close[0]!r}?" if close else ""


def installing(extra: str) -> str:
    """Return the command that installs what a part of cnnexp needs besides, from where cnnexp itself came."""
    from importlib import metadata  # slow to import, and rarely needed

    source, editable = "cnnexp", ""
    if ((checkout := Path(__file__).resolve().parents[1]) / "pyproject.toml").is_file():
        source, editable = "." if checkout == Path.cwd() else str(checkout), "-e "  # else what runs next is a copy
    else:
        with contextlib.suppress(metadata.PackageNotFoundError, TypeError, ValueError):
            came = urlsplit(json.loads(metadata.distribution("cnnexp").read_text("direct_url.json") or "{}").get("url"))
            source = unquote(came.path) if came.scheme == "file" else source  # `pip install FOLDER` notes it (PEP 610)
    return f"{as_typed('pip')} install {editable}'{source}[{extra}]'"


def as_typed(command: str) -> str:
    """Return a command as it works where it is typed: by its path where this environment is not active."""
    program, scripts = command.split()[0], os.path.dirname(sys.executable)
    found = shutil.which(program)
    if found and os.path.realpath(os.path.dirname(found)) == os.path.realpath(scripts):
        return command
    return os.path.join(min(os.path.relpath(scripts), scripts, key=len), command)


def leave(message: str, exit_code: int) -> NoReturn:
    """End the program with an error of one line."""
    sys.stderr.write(f"cnnexp: error: {without_secrets(message)}\n")
    sys.exit(exit_code)


def may_hold_secret(uri: str) -> bool:
    """Return whether the URI of a store holds what could be a secret: a user, a password, a query; a file has none."""
    named = uri.startswith("sqlite:///") or re.fullmatch(r"\$\{oc\.env:\w+\}", uri)  # or stands in the environment
    return not named and bool(re.search(r"[@?#]", uri))


def without_secrets(text: str) -> str:
    """Return the URI of a store, or a text with such in it, as it may be shown: without user, password and query."""
    host = r"((?<!\bsqlite)://|://(?!/))"  # a file has none
    text = re.sub(rf"{host}\S*@", "://***@", text)
    query = r"[^\s'\"]*[^\s'\":]"  # a colon at its end is the sentence's
    text = re.sub(rf"{host}([^\s?]*\?){query}", r"\1\2***", text)
    return re.sub(rf"(\?)[\w.%-]+={query}", r"\1***", text)  # of a request, without its host
