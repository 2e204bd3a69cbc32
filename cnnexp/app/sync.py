"""`cnnexp sync`: send to the stores what journals hold and stores lack, since they did not answer or a process died."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cnnexp.app import config_security
from cnnexp.errors import ConfigError, TrackingError
from cnnexp.measuring.environment import outputs_dir
from cnnexp.tracking.address import store_uri
from cnnexp.tracking.events import JOURNAL, RUN, read_journal
from cnnexp.tracking.pipe import Recorder

URI = "tracking.uri"


def command(arguments: Sequence[str]) -> None:
    """Bring stores up to the journals of runs that have ended, and say what was sent.

    The arguments are folders to look in, `outputs/` where none is given; `tracking.uri=...` sends all that lies there
    to that store, instead of what each run's own store lacks. ConfigError: a folder is not there, or the address of a
    store is not known here; TrackingError: a store cannot be opened or written.
    """
    words = config_security.hide_secrets(arguments)
    given = [word.partition("=")[2] for word in words if word.startswith(f"{URI}=")]
    folders = [Path(word) for word in words if not word.startswith(f"{URI}=")] or [outputs_dir()]
    for folder in folders:
        if not folder.is_dir() and folder != outputs_dir():
            raise ConfigError(f"sync {folder}: no such folder; give the folders of runs, or {URI}=STORE")
    sent, problems = 0, []
    with contextlib.ExitStack() as stack:
        recorders: dict[tuple[str, str], Recorder] = {}
        for folder, journal in _to_send(folders, all_of_them=bool(given)):
            tracking = journal["config"].get("tracking", {})
            uri = given[-1] if given else tracking.get("uri")
            # the journal holds the name of a variable in the place of what is secret
            named = re.fullmatch(r"\$\{oc\.env:(\w+)\}", uri or "")
            if named and named[1] not in os.environ:
                raise ConfigError(f"{folder}: Environment variable '{named[1]}' not found; set it, or give {URI}=STORE")
            place = store_uri(os.environ[named[1]] if named else uri), tracking.get("experiment", "cnnexp")
            if place not in recorders:
                recorders[place] = Recorder(*place)
                stack.callback(recorders[place].close)
            try:
                run_id = recorders[place].call("sync", folder=str(folder))
            except TrackingError as error:
                problems.append(str(error))
                continue
            if run_id is not None:
                sent += 1
                what = f"{len(journal['epochs'])} epochs, " if journal["kind"] == RUN else ""
                sys.stdout.write(f"sent {journal['name']} ({what}{journal['status']}) of {folder}: run {run_id}\n")
    if problems:
        raise TrackingError("; ".join(dict.fromkeys(problems)))
    sys.stdout.write(f"{sent} runs sent\n" if sent else "nothing to send: the stores have all that the journals hold\n")


def _to_send(folders: Sequence[Path], all_of_them: bool) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yield what a store lacks something of, with its journal; a sweep after its jobs, by which it ends."""
    found = {path.resolve() for folder in folders for path in folder.rglob(JOURNAL)}
    for path in sorted(found, key=lambda path: (-len(path.parts), path)):
        journal = read_journal(path.parent)
        recorded = journal["config"].get("tracking", {}).get("name") != "none"
        if journal["begin"] and (all_of_them or (recorded and not journal["stored"])):
            yield path.parent, journal
