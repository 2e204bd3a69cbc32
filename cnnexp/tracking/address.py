"""Where a store is: its address made whole, an sqlite file's path, and whether anything answers there."""

import contextlib
import re
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from cnnexp.errors import ConfigError, did_you_mean, may_hold_secret, without_secrets
from cnnexp.measuring import environment

SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks")
CONNECT_S = 3.0  # a server that does not answer by then is called unreachable
OPEN_S = 120.0  # as long may other processes take to set up a new store before us


def store_uri(uri: str | None) -> str:
    """Return `uri` made absolute, or the sqlite file under `outputs/`; raise ConfigError if MLflow cannot open it."""
    if uri is None:
        return sqlite_uri(environment.outputs_dir() / "mlflow.db")
    text = without_secrets(uri) if "://" in uri or not may_hold_secret(uri) else "***"
    if re.search(r"\s", uri) and not uri.startswith("sqlite:///"):
        raise ConfigError("tracking.uri: an address holds no space; write %20 in its place")
    try:
        parts = urlsplit(uri)
        scheme, _ = parts.scheme.partition("+")[0], parts.port
    except ValueError as error:
        why = "" if may_hold_secret(uri) else f": {error}"  # which repeats a part of it
        raise ConfigError(f"tracking.uri={text!r}: no address of a store{why}") from error
    if scheme not in SCHEMES:
        legal = f"{', '.join(SCHEMES)}, e.g. sqlite:///path/to/mlflow.db or http://host:5000"
        meant = did_you_mean(scheme, SCHEMES) if "://" in uri else ""
        raise ConfigError(f"tracking.uri={text!r}: must start with one of {legal}{meant}")
    if scheme == "sqlite":
        if database_of(uri).name in ("", ":memory:"):
            raise ConfigError(f"tracking.uri={uri!r}: names no file; write sqlite:///path/to/mlflow.db")
        return sqlite_uri(database_of(uri).absolute())
    return uri


def artifact_location(uri: str) -> str | None:
    """Return where the artifacts of a store go: beside an sqlite file; None lets a server decide."""
    return (database_of(uri).parent / "mlartifacts").as_uri() if uri.startswith("sqlite") else None


def database_of(uri: str) -> Path:
    return Path(unquote(uri.partition(":///")[2]))


def sqlite_uri(database: Path) -> str:
    """Return the URI of an sqlite file; only what would be read as something else is quoted."""
    return f"sqlite:///{database}".replace("%", "%25").replace("?", "%3F")


def need_store(uri: str, wait_s: float = OPEN_S) -> None:
    """Raise OSError or sqlite3.Error where no server answers, or a file is no database; MLflow tries for minutes."""
    parts = urlsplit(uri)
    if uri.startswith("sqlite"):
        path = database_of(uri)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with contextlib.closing(sqlite3.connect(path, timeout=wait_s)) as database:
                database.execute("PRAGMA schema_version")
    elif parts.hostname:
        from urllib import request  # slow to import

        if parts.scheme not in request.getproxies() or request.proxy_bypass(parts.netloc):
            port = parts.port or {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306}.get(parts.scheme)
            if port:
                socket.create_connection((parts.hostname, port), CONNECT_S).close()


@contextlib.contextmanager
def alone(uri: str) -> Iterator[None]:
    """Let one process at a time set up an sqlite store: MLflow takes no lock, and two at once break a new one.

    The lock is an sqlite transaction on a file beside the store: on every system, and given up by a dying process.
    """
    if not uri.startswith("sqlite"):
        yield
        return
    path = database_of(uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(f"{path}.lock", timeout=OPEN_S, isolation_level=None)) as lock:
        lock.execute("BEGIN EXCLUSIVE")
        yield
