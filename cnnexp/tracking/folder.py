"""A run's folder belongs to one process at a time, and holds one run: a lock says who is in it."""

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
SYNC_S = 60.0  # as long may a recorder need to send what is left of a journal
RECORDER = "a recorder"
NOT_SUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # by some network file systems
MOST_BYTES = 2000  # that name a holder


class RunLock:
    """The lock of a run's folder, until `release` or the end of the process, however that ends.

    It names its holder: process id, host and boot, and what it is; a run waits until a `RECORDER` has done its work.
    ConfigError is raised where another process is in the folder now.
    """

    def __init__(self, folder: Path, holder: str = "process", key: str = "hydra.run.dir") -> None:
        release = _wait_for(folder, {"holder": holder, **liveness.describe(os.getpid())}, holder != RECORDER)
        if release is None:
            more = f", or delete {folder / HELD} if that is gone" if (folder / HELD).exists() else ""
            raise ConfigError(f"{key}={folder}: {_named(_holder(folder))} runs in it now; choose another folder{more}")
        self.release: Callable[[], None] = release  # lets others in; idempotent


def is_locked(folder: Path) -> bool:
    """Return whether a run is in the folder now; a `RECORDER` that sends what is left of one is waited for."""
    if not (Path(folder) / LOCK).exists():
        return False
    if (release := _wait_for(Path(folder), liveness.describe(os.getpid()), True)) is not None:
        release()
    return release is None


def _wait_for(folder: Path, facts: Mapping[str, str], patient: bool) -> Callable[[], None] | None:
    """Lock a folder, after a `RECORDER` if it is `patient`; return what unlocks it, None where another has it."""
    started = time.monotonic()
    while (release := _lock(folder, facts)) is None:
        syncs = patient and _holder(folder).get("holder") == RECORDER
        if time.monotonic() - started >= (SYNC_S if syncs else INSTANT_S):
            return None
        time.sleep(INSTANT_S / 10)
    return release


def _lock(folder: Path, facts: Mapping[str, str]) -> Callable[[], None] | None:
    """Lock a folder and say who the holder is, where it is one; return what unlocks it, None where another has it.

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
    except OSError as error:
        file.close()
        if error.errno in NOT_SUPPORTED:
            return _lock_by_file(folder / HELD, facts)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return file.close


def _lock_by_file(held: Path, facts: Mapping[str, str]) -> Callable[[], None] | None:
    """Do as `_lock` by a file that one process alone can make; one whose process is gone is taken away."""
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
    """Return whether a holder has ended, as far as this machine can say: not of one elsewhere."""
    here, boot = liveness.describe(os.getpid()), liveness.WHERE[0]
    rebooted = facts.get(boot) != here.get(boot)
    is_ours = facts.get(liveness.HOST) == here.get(liveness.HOST)
    return is_ours and (rebooted or liveness.is_gone(facts, started_ms=0, now_ms=0))


def _holder(folder: Path) -> dict[str, str]:
    return _read(folder / HELD) or _read(folder / LOCK)


def _read(path: Path) -> dict[str, str]:
    """Return what a lock says of its holder; nothing where it says nothing of the kind."""
    with contextlib.suppress(OSError, ValueError, RecursionError), path.open("rb") as file:
        facts = json.loads(file.read(MOST_BYTES))
        return {name: str(value) for name, value in facts.items()} if isinstance(facts, dict) else {}
    return {}


def _named(holder: Mapping[str, str]) -> str:
    if liveness.PID not in holder:
        return "another process"
    boot = f", boot {holder[liveness.WHERE[0]]}" if liveness.WHERE[0] in holder else ""
    return f"{holder.get('holder', 'process')} {holder[liveness.PID]} on {holder.get(liveness.HOST, '?')}{boot}"
