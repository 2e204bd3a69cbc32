"""The view of an experiment that MLflow's page opens on: a table of runs by speedup; its charts are a click away.

MLflow keeps a view that somebody shares as a tag of the experiment, named by a key that a link then names. The format
is written nowhere: this is what the page of MLflow 3.17 writes and reads, and `tests/tracking/test_browser.py` opens it
in a browser. Where the experiment has no such view, a link that named it would end on an empty page for GenAI.
"""

import contextlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cnnexp.errors import without_secrets

LOOPBACK = "127.0.0.1"


def has_screen(environ: Mapping[str, str]) -> bool:
    """Return whether a browser would have a window; one that draws in the terminal would take ours."""
    return sys.platform in ("darwin", "win32") or any(environ.get(k) for k in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"))


def host(environ: Mapping[str, str]) -> str:
    """Return this machine's address for itself: MLflow's page has no passwords, and is not for the network.

    A page from ::1 opens without the pane of MLflow's assistant. Where there is no screen a tunnel ends at 127.0.0.1.
    """
    if has_screen(environ):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
            return "::1"
    return LOOPBACK


HOST = host(os.environ)
PORT = 5000
KEY = "cnnexp"
TAG = f"mlflow.sharedViewState.{KEY}"
# the metrics that are columns -> their width in pixels, in their order
METRICS = {
    "speedup/median": 115,
    "final/test_accuracy": 140,
    "throughput/median_images_per_s": 215,
    "time/median_epoch_s": 150,
}
COLUMNS = {f"metrics.`{metric}`": width for metric, width in METRICS.items()}
# columns that MLflow always shows; a name is whole in a window of 1600 pixels, and has backend and model in it
FIXED = {"attributes.`Run Name`": 485, "runDateAndNestInfo": 145}
BARS = ("speedup/median", "final/test_accuracy", "time/median_epoch_s", "throughput/median_images_per_s")
LINES = ("test/accuracy", "train/loss")
SECTION = "How much faster"
ALL_RUNS = {"startTime": "ALL", "lifecycleFilter": "Active", "modelVersionFilter": "All Runs", "datasetsFilter": []}
SHOWN = {"display": True, "isReordered": True, "columns": 2, "cardHeight": 640}
NOTE, CURVES = "mlflow.note.content", "figures/curves.png"
MODE = "workflowType=machine_learning"  # without it the page may open for GenAI, on traces


def state() -> str:
    """Return the value of the tag `TAG`, as JSON; MLflow deflates its own, and takes both."""
    return json.dumps(
        {
            # a sweep's own run is no row: its jobs are, each in its place of the ranking
            "searchFilter": "tags.kind = 'run'",
            "orderByKey": "metrics.`speedup/median`",
            "orderByAsc": False,
            **ALL_RUNS,
            "selectedColumns": list(COLUMNS),
            "columnOrder": [*FIXED, *COLUMNS],
            "columnWidths": {**FIXED, **COLUMNS},
            "runsHiddenMode": "FIRST_20_RUNS",
            "compareRunCharts": [*(_chart("BAR", key) for key in BARS), *(_chart("LINE", key) for key in LINES)],
            # two charts beside each other, high enough for the name and the value of each of twenty runs
            "compareRunSections": [{**SHOWN, "uuid": SECTION, "name": SECTION}],
            "isAccordionReordered": True,  # keeps our section first
        }
    )


def address(uri: str, experiment_id: str | None, shared: bool = True, port: int = PORT) -> str:
    """Return the address that opens an experiment, the list of experiments where there is none yet.

    A server has a page of its own, other stores one that `cnnexp ui` serves at a port. Where the experiment has not our
    view, `shared`, the plain list of runs opens.
    """
    ours = f"http://{f'[{HOST}]' if ':' in HOST else HOST}:{port}"
    page = without_secrets(uri).rstrip("/") if uri.startswith("http") else ours
    if experiment_id is None:
        return f"{page}/#/experiments?{MODE}"
    opened = f"viewStateShareKey={KEY}&{MODE}&compareRunsMode=TABLE" if shared else MODE
    return f"{page}/#/experiments/{experiment_id}/runs?{opened}"


def illustrated(tags: Mapping[str, str], run_id: str, folder: Path) -> Mapping[str, str]:
    """Return a run's last tags, its note headed by its learning curves, where its folder holds them.

    MLflow's page of a run opens on the first lines of its note, and takes a picture from its own server.
    """
    if NOTE not in tags or not (folder / CURVES).exists():
        return tags
    return {**tags, NOTE: f"![learning curves](get-artifact?path={CURVES}&run_uuid={run_id})\n\n{tags[NOTE]}"}


def _chart(kind: str, metric: str) -> dict[str, Any]:
    chart = {"type": kind, "uuid": metric, "metricSectionId": SECTION, "metricKey": metric, "runsCountToCompare": 20}
    if kind == "LINE":
        chart |= {"xAxisKey": "step", "useGlobalXaxisKey": True, "range": {}}
    return chart
