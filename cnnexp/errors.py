"""Errors that a user can act on: one line, an exit code, no traceback.

Every error names what was given, what is legal and what to do. `cnnexp.__main__` prints it as
`cnnexp: error: ...` and leaves with `exit_code`.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from typing import NoReturn
from urllib.parse import urlsplit


class CnnexpError(Exception):
    """Base of all errors meant for the user."""

    exit_code = 1


class ConfigError(CnnexpError):
    """A config key is unknown, of the wrong type, or holds an illegal value."""

    exit_code = 2


class NetworkError(ConfigError):
    """The layers do not fit each other, their input, or the loss."""


class DataError(CnnexpError):
    """A data set is missing, truncated, altered or malformed."""

    exit_code = 3


class BackendUnavailable(CnnexpError):
    """The machine lacks what the chosen backend needs."""

    exit_code = 4


class TrackingError(CnnexpError):
    """The tracking store cannot be opened or written."""

    exit_code = 5


class CheckpointError(CnnexpError):
    """A checkpoint is missing, damaged, or of another network."""

    exit_code = 6


class Diverged(CnnexpError):
    """The loss is no longer a finite number."""

    exit_code = 7


class CompilerDied(CnnexpError):
    """A backend's compiler ended the process that it ran in: a fault of the compiler, on this CPU."""


class WorkerDied(CnnexpError):
    """One of several workers is gone, so the others cannot go on."""

    exit_code = 8


def did_you_mean(given: str, legal: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest legal name, or an empty string."""
    close = difflib.get_close_matches(given, list(legal), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def leave(message: str, exit_code: int) -> NoReturn:
    """End the program with an error of one line."""
    sys.stderr.write(f"cnnexp: error: {message}\n")
    sys.exit(exit_code)


def without_password(uri: str) -> str:
    """Return the URI of a store as a message may show it."""
    password = urlsplit(uri).password
    return uri.replace(f":{password}@", ":***@") if password else uri
