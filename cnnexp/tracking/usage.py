"""What of the machine is in use, under the names that MLflow's page of system metrics knows."""

from __future__ import annotations

import contextlib

import psutil

PREFIX = "system/"


def since_last(process: int) -> dict[str, float]:
    """Return the share of all cores used since the last call, memory now, and that of a process; a millisecond.

    MLflow's own monitor looks every 10 s, when most epochs are over, and asks the store before each look.
    """
    memory = psutil.virtual_memory()
    used = {
        "cpu_utilization_percentage": psutil.cpu_percent(),
        "system_memory_usage_megabytes": memory.used / 1e6,
        "system_memory_usage_percentage": memory.percent,
    }
    with contextlib.suppress(psutil.Error):  # it may have ended
        used["process_memory_usage_megabytes"] = psutil.Process(process).memory_info().rss / 1e6
    return {f"{PREFIX}{name}": value for name, value in used.items()}
