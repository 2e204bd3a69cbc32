"""A run's folder belongs to one run at a time, and holds one run: a lock tells who is in it, its files whose it is."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path
from typing import BinaryIO

from cnnexp.errors import ConfigError

try:
    import fcntl
except ImportError:  # not a POSIX system: nothing is locked there
    fcntl = None  # type: ignore[assignment]

LOCK = "run.lock"
INSTANT_S = 0.5  # others look into a lock for less
DELIVERY_S = 60.0  # as long may a recorder need to send what is left of a journal
DELIVERER = "a recorder"
NOT_SUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # by some network file systems


class Claim:
    """The lock of a run's folder, until `release` or the end of the process, however that ends.

    Args:
        folder: exists.
        holder: what this process is; a run waits until a `DELIVERER` has done its work.

    Raises:
        ConfigError: another run is in the folder now.
    """

    def __init__(self, folder: Path, holder: str = "process") -> None:
        started = time.monotonic()
        while (file := _locked(folder / LOCK)) is None:
            waited, delivers = time.monotonic() - started, _holder(folder).startswith(DELIVERER)
            if waited < (DELIVERY_S if delivers and holder != DELIVERER else INSTANT_S):
                time.sleep(INSTANT_S / 10)
                continue
            raise ConfigError(f"hydra.run.dir={folder}: {_holder(folder)} runs in it now; choose another folder")
        self._file = file
        os.ftruncate(self._file.fileno(), 0)  # goes on where it is interrupted, as a file's own truncate does not
        self._file.write(f"{holder} {os.getpid()} on {socket.gethostname()}".encode())
        self._file.flush()

    def release(self) -> None:
        """Let others in. Idempotent."""
        self._file.close()


def is_claimed(folder: Path) -> bool:
    """Return whether a run is in the folder now."""
    if not (Path(folder) / LOCK).exists():
        return False
    file = _locked(Path(folder) / LOCK)
    if file is not None:
        file.close()
    return file is None


def _locked(path: Path) -> BinaryIO | None:
    """Return the file, locked, or None where another has the lock; the system frees it when its holder is gone."""
    file = path.open("ab")
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            file.close()
            raise
    return file


def _holder(folder: Path) -> str:
    return (folder / LOCK).read_text(encoding="utf-8", errors="replace")[:200] or "another process"
