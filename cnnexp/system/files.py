"""Reading files that anybody may have made: regular ones alone, and never more of them than is asked for."""

import contextlib
import errno
import io
import os
import shutil
import stat
import time
from pathlib import Path
from typing import IO, BinaryIO

FEW_BYTES = 1 << 20
LEFT_S = 86_400.0  # what is younger may still be in the making


def open_regular(path: Path, most_bytes: int | None = None) -> BinaryIO:
    """Open a file to read; what is no file or too large is refused before anything is read.

    A pipe or a device would keep the reader waiting, or go on for ever. OSError is raised where it cannot be opened, is
    not a regular file, or has more than `most_bytes`.
    """
    raw = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))
    file, found = io.BufferedReader(raw), os.fstat(raw.fileno())  # a folder has been refused
    if not stat.S_ISREG(found.st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if most_bytes is not None and found.st_size > most_bytes:
        file.close()
        raise OSError(errno.EFBIG, f"{found.st_size} bytes, more than the {most_bytes} that are read", str(path))
    return file


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Return the content of a file; raises as `open_regular`."""
    with open_regular(path, most_bytes) as file:
        return file.read()


def read_up_to(file: IO[bytes], size: int) -> bytes:
    """Return the next bytes of a file, so many at most; takes memory for what is there, not for what is asked."""
    parts, left = [], size
    while left > 0 and (part := file.read(min(left, FEW_BYTES))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def remove_leftovers(folder: Path, pattern: str) -> None:
    """Remove the files and folders below one that killed processes have left half-made, by their names."""
    for left in folder.glob(pattern):
        with contextlib.suppress(OSError):  # another process is quicker, or may write where we may not
            if time.time() - left.stat().st_mtime > LEFT_S:
                (shutil.rmtree if left.is_dir() else os.unlink)(left)


def sync_folder(folder: Path) -> None:
    """Force a rename to the disk; only POSIX systems can open a folder for that."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
