"""Whether the process that a run was recorded by still lives, by the tags of the run alone.

A process id counts on its own machine, since its start, in its own container alone; elsewhere a heartbeat decides.
"""

import contextlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path

HEARTBEAT = "record.heartbeat_ms"  # tag: when the recorder last was alive
BEAT_S = 60.0
DEAD_S = 15 * 60.0  # without a heartbeat; clocks of machines may differ by minutes
HOST, PID, STARTED = "machine.host", "machine.pid", "machine.pid_started"
WHERE = ("machine.boot", "machine.pid_namespace")  # tags, beside the host, that must be ours for its ids to be


def describe(pid: int) -> dict[str, str]:
    """Return what names a process of this machine, as tags; without those that the system does not give."""
    found = {HOST: platform.node(), PID: str(pid)}
    with contextlib.suppress(OSError):
        found[WHERE[0]] = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    with contextlib.suppress(OSError, AttributeError):
        found[WHERE[1]] = os.readlink("/proc/self/ns/pid")
    with contextlib.suppress(OSError, IndexError):
        # in ticks since the boot, as an id is used again; the second field, the program's name, may hold anything
        found[STARTED] = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    return {name: value for name, value in found.items() if value}


def is_gone(tags: Mapping[str, str], started_ms: int, now_ms: int) -> bool:
    """Return whether the process of a run that began at `started_ms` has ended, by the run's tags."""
    here = describe(int(tags[PID])) if tags.get(PID, "").isdecimal() else {}
    if here and all(tags.get(name, "") == here.get(name, "") for name in (HOST, *WHERE)):
        import psutil  # slow to import, and rarely needed

        return not psutil.pid_exists(int(tags[PID])) or tags.get(STARTED, "") != here.get(STARTED, "")
    beat = tags.get(HEARTBEAT, "")
    last_ms = max(started_ms, int(beat) if beat.isdecimal() else 0)
    return now_ms - last_ms > DEAD_S * 1000
