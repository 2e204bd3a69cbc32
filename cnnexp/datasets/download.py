"""Download a file once into the user's cache, from the first mirror that has it whole."""

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from cnnexp.datasets.base import shown
from cnnexp.errors import DataError, refused
from cnnexp.system.files import remove_leftovers

log = logging.getLogger(__name__)

T = TypeVar("T")
TIMEOUT_S = (5, 30)  # to connect, and between two packets
CHUNK_BYTES = 1 << 16
MAKING = "partial-"


def fetch(dataset: str, name: str, mirrors: tuple[str, ...], read: Callable[[Path], T], most_bytes: int) -> T:
    """Return `read(path)` of the cached file, downloading it where it is missing or no longer whole.

    A file enters the cache only after `read` accepted it, in one rename, so neither a cut connection nor a second
    process can leave half a file there. Mirrors are base URLs ending in a slash, tried in order; one that sends more
    than `most_bytes` is left at that. `read` raises DataError with what is wrong with the file; where no mirror gave a
    whole one, another says why for each, and how to work offline.
    """
    import pooch  # only a download needs it

    folder = Path(pooch.os_cache("cnnexp")) / dataset
    cached = folder / name
    if cached.exists():
        try:
            return read(cached)
        except DataError as error:
            log.warning("%s: %s; downloading it again", shown(cached), error)
    problems = []
    with refused(DataError, f"{dataset}: cannot write to the cache {shown(folder)}"):
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder, f"{MAKING}*")
        with tempfile.TemporaryDirectory(prefix=MAKING, dir=folder) as partial:
            for mirror in mirrors:
                try:
                    content = _download(mirror + name, Path(partial) / name, read, most_bytes)
                except DataError as error:
                    problems.append(f"{urlsplit(mirror).netloc}: {error}")
                    continue
                (Path(partial) / name).replace(cached)
                return content
    offline = "to work offline, give the folder that holds the files: dataset.root=<folder>"
    raise DataError(f"{dataset}: cannot download {name} ({'; '.join(problems)}); {offline}")


def _download(url: str, path: Path, read: Callable[[Path], T], most_bytes: int) -> T:
    """Return `read(path)` of what lies at an address; a bar on standard error shows it coming in a terminal."""
    import requests
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    try:
        with (
            requests.get(url, stream=True, timeout=TIMEOUT_S) as answer,
            path.open("wb") as file,
            Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        ):
            answer.raise_for_status()
            task = progress.add_task(path.name, total=int(answer.headers.get("content-length", 0)) or None)
            for chunk in answer.iter_content(CHUNK_BYTES):
                if file.tell() + len(chunk) > most_bytes:
                    raise DataError(f"more than the {most_bytes} bytes that it can have")
                file.write(chunk)
                progress.advance(task, len(chunk))
    except requests.HTTPError as error:
        raise DataError(str(error)) from error  # such as "404 Client Error: Not Found for url: ..."
    except requests.Timeout as error:
        raise DataError("no answer in time") from error
    except requests.exceptions.ChunkedEncodingError as error:
        raise DataError("the connection broke off") from error
    except requests.RequestException as error:
        raise DataError(f"no connection ({type(error).__name__})") from error
    return read(path)
