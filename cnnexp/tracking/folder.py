"""A run's folder belongs to one run at a time, and holds one run: a lock tells who is in it, its files whose it is."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from cnnexp.errors import ConfigError
from cnnexp.tracking import liveness

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

LOCK = "run.lock"
HELD = "run.held"  # there for as long as a run is, where the file system has no locks
INSTANT_S = 0.5  # others look into a lock for less
DELIVERY_S = 60.0  # as long may a recorder need to send what is left of a journal
DELIVERER = "a recorder"
NOT_SUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # by some network file systems
MOST_BYTES = 2000  # that tell of a holder


class Claim:
    """The lock of a run's folder, until `release` or the end of the process, however that ends.

    It names its holder: process id, host and boot.

    Args:
        folder: exists.
        holder: what this process is; a run waits until a `DELIVERER` has done its work.

    Raises:
        ConfigError: another run is in the folder now.
    """

    def __init__(self, folder: Path, holder: str = "process") -> None:
        started = time.monotonic()
        facts = {"holder": holder, **liveness.describe(os.getpid())}
        while (release := _claim(folder, facts)) is None:
            other = _holder(folder)
            waited, delivers = time.monotonic() - started, other.get("holder") == DELIVERER
            if waited < (DELIVERY_S if delivers and holder != DELIVERER else INSTANT_S):
                time.sleep(INSTANT_S / 10)
                continue
            delete = f", or delete {folder / HELD} if that is gone" if (folder / HELD).exists() else ""
            raise ConfigError(f"hydra.run.dir={folder}: {_named(other)} runs in it now; choose another folder{delete}")
        self.release: Callable[[], None] = release
        """Let others in. Idempotent."""


def is_claimed(folder: Path) -> bool:
    """Return whether a run is in the folder now; a `DELIVERER` that sends what is left of one is waited for."""
    if not (Path(folder) / LOCK).exists():
        return False
    started = time.monotonic()
    while (release := _claim(Path(folder), liveness.describe(os.getpid()))) is None:
        if _holder(folder).get("holder") != DELIVERER or time.monotonic() - started > DELIVERY_S:
            return True
        time.sleep(INSTANT_S / 10)
    release()
    return False


def _claim(folder: Path, facts: Mapping[str, str]) -> Callable[[], None] | None:
    """Lock a folder and tell of its holder, where it is one; return what unlocks it, None where another has it.

    The system frees the lock of a process that is gone.
    """
    file = (folder / LOCK).open("ab")
    try:
        if fcntl is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if "holder" in facts:
            os.ftruncate(file.fileno(), 0)  # goes on where it is interrupted, as a file's own truncate does not
            file.write(json.dumps(facts).encode())
            file.flush()
    except BlockingIOError:
        file.close()
        return None
    except OSError as error:
        file.close()
        if error.errno not in NOT_SUPPORTED:
            raise
        return _claim_by_file(folder / HELD, facts)
    return file.close


def _claim_by_file(held: Path, facts: Mapping[str, str]) -> Callable[[], None] | None:
    """Do as `_claim` by a file that one process alone can make; one whose process is gone is taken away."""
    if _is_gone(found := _read(held)):
        taking = held.with_suffix(".taking")  # of many that find this, one looks again and takes it away
        with contextlib.suppress(FileExistsError):
            taking.open("x").close()
            if _read(held) == found:
                held.unlink()
            taking.unlink()
    try:
        with held.open("x", encoding="utf-8") as file:
            file.write(json.dumps(dict(facts)))
    except FileExistsError:
        return None
    except OSError:
        held.unlink(missing_ok=True)  # half of it would name nobody
        raise
    return lambda: held.unlink(missing_ok=True)


def _is_gone(facts: Mapping[str, str]) -> bool:
    """Return whether a holder has ended, as far as this machine can tell: not of one elsewhere."""
    here, boot = liveness.describe(os.getpid()), liveness.WHERE[0]
    if facts.get(liveness.HOST) != here.get(liveness.HOST):
        return False
    rebooted = facts.get(boot) != here.get(boot)
    return rebooted or liveness.is_gone(facts, started_ms=0, now_ms=0)


def _holder(folder: Path) -> dict[str, str]:
    return _read(folder / HELD) or _read(folder / LOCK)


def _read(path: Path) -> dict[str, str]:
    """Return what a lock tells of its holder; nothing where it tells nothing of the kind."""
    with contextlib.suppress(OSError, ValueError, RecursionError), path.open("rb") as file:
        facts = json.loads(file.read(MOST_BYTES))
        return {name: str(value) for name, value in facts.items()} if isinstance(facts, dict) else {}
    return {}


def _named(holder: Mapping[str, str]) -> str:
    if liveness.PID not in holder:
        return "another process"
    boot = f", boot {holder[liveness.WHERE[0]]}" if liveness.WHERE[0] in holder else ""
    return f"{holder.get('holder', 'process')} {holder[liveness.PID]} on {holder.get(liveness.HOST, '?')}{boot}"
