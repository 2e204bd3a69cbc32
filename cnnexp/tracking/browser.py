"""`cnnexp ui`: MLflow's page of a store, opened on the experiment that was recorded last.

`python -m cnnexp.tracking.browser ADDRESS` waits for a page and opens it: the process that serves it cannot.
"""

import contextlib
import os
import socket
import sqlite3
import subprocess
import sys
import time
import webbrowser
from collections.abc import Sequence
from urllib.parse import urlsplit

from cnnexp.errors import BackendUnavailable, ConfigError, TrackingError, installing, without_secrets
from cnnexp.tracking import view
from cnnexp.tracking.address import alone, artifact_location, database_of, store_uri

PROBE_S = 0.3  # what does not answer by then does not
FAMILY = socket.AF_INET6 if ":" in view.HOST else socket.AF_INET
SERVED_S = 60.0  # a page that does not answer by then is not opened


def command(arguments: Sequence[str]) -> None:
    """Serve MLflow's web page on this machine until Ctrl-C, print its address, and open it where there is a screen.

    The arguments are `tracking.uri=...` for another store, `port=...` for another port than 5000 or the next free one;
    ConfigError is raised where one is unknown or out of range, BackendUnavailable where MLflow's pages are missing.
    """
    given = dict(argument.partition("=")[::2] for argument in arguments)
    for key, value in given.items():
        number = value.isascii() and value.isdecimal() and len(value) < 6 and 0 < int(value) < 2**16
        if key not in ("tracking.uri", "port") or (key == "port" and not number):
            raise ConfigError(f"ui {key}={value}: legal: tracking.uri=STORE, port=NUMBER from 1 to 65535")
    uri = store_uri(given.get("tracking.uri"))
    if uri.startswith("http"):
        sys.stdout.write(f"This store has a web page of its own: {without_secrets(uri)}\n")
        return
    if missing := installing_pages():
        raise BackendUnavailable(f"ui: MLflow's pages are not installed; {missing}")
    if "tracking.uri" in given and uri.startswith("sqlite") and not database_of(uri).exists():
        raise ConfigError(f"ui tracking.uri={given['tracking.uri']}: no such store")
    port = int(given["port"]) if "port" in given else free_port()
    with alone(uri):  # let a process that sets up the store finish
        address = view.address(uri, *last_experiment(uri), port)
    sys.stdout.write(f"MLflow shows the runs of {without_secrets(uri)} until Ctrl-C, at\n{address}\n")
    sys.stdout.flush()
    if view.has_screen(os.environ):
        subprocess.Popen([sys.executable, "-m", __name__, address], start_new_session=True)
    served = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri]
    if location := artifact_location(uri):
        served += ["--default-artifact-root", location]
    # to this machine alone; one worker, of MLflow's four, starts four times as fast and is enough for one person
    served += ["--host", view.HOST, "--port", str(port), "--workers", "1"]
    # this process becomes MLflow's, so whatever ends it ends the page
    os.execve(served[0], served, {"MLFLOW_DISABLE_TELEMETRY": "true", **os.environ})


def installing_pages() -> str:
    """Return the command that installs MLflow's pages, which its client does not bring; empty where they are there."""
    from importlib import metadata  # slow to import

    return "" if any(metadata.distributions(name="mlflow")) else installing("ui")


def last_experiment(uri: str) -> tuple[str | None, bool]:
    """Return the id of the experiment of the newest run, and whether it has our view.

    None where there is no run, or the store is no sqlite file: MLflow's own client would take seconds to load for it.
    """
    if not uri.startswith("sqlite") or not database_of(uri).exists():
        return None, False
    newest = """
        SELECT runs.experiment_id, tags.value FROM runs JOIN experiments USING (experiment_id)
        LEFT JOIN experiment_tags AS tags ON tags.experiment_id = runs.experiment_id AND tags.key = ?
        WHERE runs.lifecycle_stage = 'active' AND experiments.lifecycle_stage = 'active'
        ORDER BY runs.start_time DESC LIMIT 1
    """
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(database_of(uri))) as database:
        for experiment_id, shared in database.execute(newest, (view.TAG,)):
            return str(experiment_id), shared == view.state()
    return None, False


def free_port(first: int = view.PORT) -> int:
    """Return the first port from `first` on that nobody listens on."""
    for port in range(first, first + 100):
        with contextlib.suppress(OSError), socket.create_server((view.HOST, port), family=FAMILY):
            return port
    raise TrackingError(f"no free port between {first} and {first + 99} on {view.HOST}")


def open_when_served(address: str, limit_s: float = SERVED_S) -> bool:
    """Open a page in the browser once its server answers; return whether it did in time."""
    ends = time.monotonic() + limit_s
    while time.monotonic() < ends:
        if answers(address):
            return webbrowser.open(address)
        time.sleep(0.2)
    return False


def answers(address: str) -> bool:
    """Return whether anything listens at an address, within `PROBE_S`."""
    with contextlib.suppress(OSError, ValueError):
        parts = urlsplit(address)
        port = parts.port or {"https": 443}.get(parts.scheme, 80)
        socket.create_connection((parts.hostname, port), PROBE_S).close()
        return True
    return False


if __name__ == "__main__":
    open_when_served(sys.argv[1])
