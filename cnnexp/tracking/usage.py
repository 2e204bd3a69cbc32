"""What of the machine is in use, under the names that MLflow's page of system metrics knows."""

from __future__ import annotations

import contextlib

import psutil

PREFIX = "system/"


class Usage:
    """Looks at the machine.

    MLflow's own monitor looks every 10 s, when most epochs are over, and asks the store before each look.

    Args:
        process: whose memory is told, too.
    """

    def __init__(self, process: int) -> None:
        self._process = process
        psutil.cpu_percent()  # what it returns next is since now

    def since_last(self) -> dict[str, float]:
        """Return the share of all cores used since the last look, and memory now; a millisecond."""
        memory = psutil.virtual_memory()
        used = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / 1e6,
            "system_memory_usage_percentage": memory.percent,
        }
        with contextlib.suppress(psutil.Error):  # it may have ended
            used["process_memory_usage_megabytes"] = psutil.Process(self._process).memory_info().rss / 1e6
        return {f"{PREFIX}{name}": value for name, value in used.items()}
