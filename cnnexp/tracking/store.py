"""The MLflow store: the only file that imports mlflow, and the process that does so.

Importing MLflow takes longer than a short training, so it happens in a process of its own, which `pipe` starts before
Hydra, the data and the compiler load: `python -m cnnexp.tracking.store`. It reads one call a line, `[id, name,
arguments]` as JSON, and answers calls that have an id with `[id, value, error]`. Training never waits for a slow store,
and a training process that is killed outright leaves no run RUNNING: its end closes the pipe.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import re
import shutil
import socket
import sqlite3
import sys
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from cnnexp.errors import ConfigError, TrackingError, did_you_mean, without_password
from cnnexp.measuring import environment
from cnnexp.tracking import view

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Run

SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks")
CONNECT_S = 3.0  # a server that does not answer by then is called unreachable
OPEN_S = 120.0  # as long may other processes take to set up a new store before us
RETRY_S = 10.0  # after a failure, metrics are kept and sent again no sooner than this
PARAMS_PER_CALL = 100  # MLflow's limits on one batch
METRICS_PER_CALL = 1000
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}  # the page opens on runs, not on GenAI traces
MODEL = "model"  # name of every run's model: runs:/ID/model
EXAMPLE = "input_example.json"
DATABASE_LINE = re.compile(r"\([\w.]*(?:Error|Exception)\) .*")  # as SQLAlchemy quotes its driver
DIGEST_LENGTH = 36  # MLflow's limit


def store_uri(uri: str | None) -> str:
    """Return `uri`, made absolute, or for None the sqlite file under `outputs/`.

    Raises:
        ConfigError: the address is not one that MLflow can open.
    """
    if uri is None:
        return _sqlite_uri(environment.outputs_dir() / "mlflow.db")
    scheme = urlsplit(uri).scheme.partition("+")[0]
    if scheme not in SCHEMES:
        raise ConfigError(
            f"tracking.uri={uri!r}: must start with one of {', '.join(SCHEMES)}, e.g. sqlite:///path/to/mlflow.db or "
            f"http://host:5000{did_you_mean(scheme, SCHEMES)}"
        )
    if scheme == "sqlite":
        if not database_of(uri).name:
            raise ConfigError(f"tracking.uri={uri!r}: names no file; write sqlite:///path/to/mlflow.db")
        return _sqlite_uri(database_of(uri).absolute())
    return uri


def artifact_location(uri: str) -> str | None:
    """Return where the artifacts of a store go: beside an sqlite file; None lets a server decide."""
    return (database_of(uri).parent / "mlartifacts").as_uri() if uri.startswith("sqlite") else None


class Store:
    """Runs of one experiment in one MLflow store.

    Args:
        uri: as `store_uri` returns it.
        experiment: name; made where it does not exist.

    Raises:
        TrackingError: the store cannot be opened, with the reason, in a few seconds.
    """

    def __init__(self, uri: str, experiment: str) -> None:
        self._uri = uri
        self._pending: list[Any] = []
        self._retry_at = 0.0
        self._open_runs: dict[str, str] = {}  # id -> how many workers
        with self._explained("cannot be opened"):
            _need_answer(uri)
            _needdatabase_of(uri)
            from mlflow.tracking import MlflowClient

            with alone(uri):
                self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)
                self._experiment_id = self._experiment(experiment)
            self._close_stale_runs()

    def begin(
        self,
        name: str,
        params: Mapping[str, str],
        tags: Mapping[str, str],
        dataset: Mapping[str, Any] | None = None,
        parent: str | None = None,
    ) -> str:
        """Start a run; return its id.

        Args:
            name: shown in the list of runs.
            params: the resolved config by dotted key.
            tags: what runs are grouped by; facts of the machine and the code are added.
            dataset: name, sha256, source and profile of the data.
            parent: id of the sweep's run.
        """
        from mlflow.entities import Param

        tags = {**environment.machine_facts(), **environment.versions(), **environment.git_facts(), **tags}
        tags["machine.pid"] = str(os.getppid())
        if parent is not None:
            tags["mlflow.parentRunId"] = parent
        with self._explained("cannot be written"):
            run_id = self._client.create_run(self._experiment_id, tags=tags, run_name=name).info.run_id
            self._open_runs[run_id] = tags.get("workers", "1")
            self._pending = []  # what an earlier run could not send is in its journal
            entries = [Param(key, value) for key, value in params.items()]
            for start in range(0, len(entries), PARAMS_PER_CALL):
                self._client.log_batch(run_id, params=entries[start : start + PARAMS_PER_CALL])
            if dataset is not None:
                self._client.log_inputs(run_id, [_dataset_input(dataset)])
        return run_id

    def log(self, run_id: str, metrics: Mapping[str, float], step: int, time_ms: int) -> None:
        """Record metrics. While the store does not answer they are kept here, for the next call or `finish`."""
        from mlflow.entities import Metric

        self._pending += [Metric(key, value, time_ms, step, run_id=run_id) for key, value in metrics.items()]
        if time.monotonic() >= self._retry_at:
            try:
                self._send_pending(run_id)
            except Exception:  # whatever its client raises; `finish` tries again and reports it
                self._retry_at = time.monotonic() + RETRY_S

    def save_model(
        self, run_id: str, checkpoint: str, folder: str, example: list, pixels: str, classes: int, step: int
    ) -> None:
        """Log a checkpoint as a model of MLflow's, which `mlflow.pyfunc.load_model` loads beside cnnexp.

        Nothing is pickled and no code is written: the data is a copy of the checkpoint, the loader `model`.

        Args:
            run_id: as `begin` returned it.
            checkpoint: the file.
            folder: made if missing.
            example: (1, *input_shape), an image that the model takes.
            pixels: dtype of such images.
            classes: how many probabilities it gives for each.
            step: the epoch of the checkpoint.
        """
        import numpy as np
        from mlflow import pyfunc
        from mlflow.entities import LoggedModelOutput
        from mlflow.models import Model, ModelSignature
        from mlflow.types import Schema, TensorSpec

        Path(folder).mkdir(parents=True, exist_ok=True)
        data = shutil.copy(checkpoint, folder)
        shape = (-1, *np.shape(example)[1:])
        images, probabilities = TensorSpec(np.dtype(pixels), shape), TensorSpec(np.dtype("float32"), (-1, classes))
        with self._explained("cannot be written"):
            logged = self._client.create_logged_model(self._experiment_id, MODEL, run_id)
            signature = ModelSignature(Schema([images]), Schema([probabilities]))
            # MLflow then hands on what it is given: else it refuses lists and texts before the model sees them
            signature._is_signature_from_type_hint = True
            model = Model(
                artifact_path=logged.artifact_location,
                run_id=run_id,
                signature=signature,
                saved_input_example_info={"artifact_path": EXAMPLE, "type": "ndarray", "format": "tf-serving"},
                model_id=logged.model_id,
            )
            (Path(folder) / EXAMPLE).write_text(json.dumps(example), encoding="utf-8")
            # who loads it may choose another backend: load_model(..., model_config={"backend": "cpu-simd"})
            chosen = {"backend": "numpy"}
            pyfunc.add_to_model(model, loader_module="cnnexp.tracking.model", data=Path(data).name, model_config=chosen)
            model.save(str(Path(folder) / "MLmodel"))
            self._client.log_model_artifacts(logged.model_id, folder)
            self._client.finalize_logged_model(logged.model_id, "READY")
            self._client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step)])

    def finish(
        self, run_id: str, status: str, tags: Mapping[str, str], artifacts: Sequence[tuple[str, str | None]] = ()
    ) -> None:
        """End a run.

        Args:
            run_id: as `begin` returned it.
            status: FINISHED, FAILED or KILLED.
            tags: added at the end, e.g. `error`.
            artifacts: (file or folder, folder among the artifacts) pairs.
        """
        with self._explained("stopped answering"):
            self._send_pending(run_id)
            for key, value in tags.items():
                self._client.set_tag(run_id, key, value)
            for path, target in artifacts:
                log = self._client.log_artifacts if Path(path).is_dir() else self._client.log_artifact
                log(run_id, path, target)
            self._client.set_terminated(run_id, status)
            self._open_runs.pop(run_id, None)

    def settle(self) -> None:
        """Do nothing: the answer says that all calls before it are done."""

    def link(self) -> str:
        """Return the address that shows this experiment's runs; of an sqlite store it works while `cnnexp ui` runs."""
        return view.address(self._uri, self._experiment_id)

    def finished(self, config_hash: str) -> dict[str, float] | None:
        """Return the last metrics of a finished run of this config, None where there is none."""
        with self._explained("cannot be read"):
            runs = self._search(f"attributes.status = 'FINISHED' and tags.config_hash = '{config_hash}'", 1)
        return runs[0].data.metrics if runs else None

    def close(self) -> None:
        """End what was never ended: its process is gone."""
        for run_id, workers in list(self._open_runs.items()):
            if workers == "1":
                self.finish(run_id, "KILLED", {"error": "the training process ended without closing the run"})
            else:
                self.finish(run_id, "FAILED", {"error": f"one of {workers} workers died"})

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        tags = {**EXPERIMENT_TAGS, view.TAG: view.state()}
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return self._client.create_experiment(name, artifact_location(self._uri), tags)
            except MlflowException:
                # on a server, another process may have been quicker
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":
            raise TrackingError(
                f"tracking.experiment={name!r}: deleted in this store; choose another name or restore it with "
                f"MLFLOW_TRACKING_URI={without_password(self._uri)} mlflow experiments restore "
                f"--experiment-id {found.experiment_id}"
            )
        for key in tags:
            if found.tags.get(key) != tags[key]:  # made by hand, or by an older cnnexp
                self._client.set_experiment_tag(found.experiment_id, key, tags[key])
        return found.experiment_id

    def _search(self, condition: str, limit: int) -> Sequence[Run]:
        return self._client.search_runs([self._experiment_id], filter_string=condition, max_results=limit)

    def _close_stale_runs(self) -> None:
        """End runs of this machine whose process and recorder were both killed."""
        host = environment.machine_facts()["machine.host"]
        for run in self._search(f"attributes.status = 'RUNNING' and tags.`machine.host` = '{host}'", 100):
            if not _alive(int(run.data.tags.get("machine.pid", 0))):
                self._client.set_tag(run.info.run_id, "error", "the training process died")
                self._client.set_terminated(run.info.run_id, "KILLED")

    def _send_pending(self, run_id: str) -> None:
        while self._pending:
            self._client.log_batch(run_id, metrics=self._pending[:METRICS_PER_CALL])
            del self._pending[:METRICS_PER_CALL]

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turn whatever a store's client raises into one line that names the store."""
        try:
            yield
        except TrackingError:
            raise
        except Exception as error:
            raise TrackingError(without_password(f"tracking.uri={self._uri}: {what}: {_reason(error)}")) from error


def database_of(uri: str) -> Path:
    """Return the file of an sqlite URI."""
    return Path(unquote(uri.partition(":///")[2]))


def _reason(error: Exception) -> str:
    """Return the line of an error that says most: the database's own, where there is one, else the first."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((found[0] for line in lines if (found := DATABASE_LINE.search(line))), lines[0])


def _sqlite_uri(database: Path) -> str:
    """Return the URI of an sqlite file; only what would be read as something else is quoted."""
    return f"sqlite:///{database}".replace("%", "%25").replace("?", "%3F")


def _need_answer(uri: str) -> None:
    """Raise OSError where a server does not answer.

    MLflow's own attempts at a database server go on for minutes.
    """
    parts = urlsplit(uri)
    proxied = parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(parts.netloc)
    if parts.hostname and not proxied:
        port = parts.port or {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306}.get(parts.scheme)
        if port:
            socket.create_connection((parts.hostname, port), CONNECT_S).close()


def _needdatabase_of(uri: str) -> None:
    """Raise sqlite3.Error where an sqlite file exists and cannot be one; MLflow would try again for minutes."""
    if uri.startswith("sqlite") and database_of(uri).exists():
        with contextlib.closing(sqlite3.connect(database_of(uri), timeout=OPEN_S)) as database:
            database.execute("PRAGMA schema_version")


@contextlib.contextmanager
def alone(uri: str) -> Iterator[None]:
    """Let one process at a time set up an sqlite store: MLflow takes no lock, and two at once break a new one.

    The lock is an sqlite transaction on a file beside the store: on every system, and given up by a dying process.
    """
    if not uri.startswith("sqlite"):
        yield
        return
    database_of(uri).parent.mkdir(parents=True, exist_ok=True)
    lock = sqlite3.connect(f"{database_of(uri)}.lock", timeout=OPEN_S, isolation_level=None)
    try:
        lock.execute("BEGIN EXCLUSIVE")
        yield
    finally:
        lock.close()


def _dataset_input(dataset: Mapping[str, Any]) -> DatasetInput:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    entity = Dataset(
        name=dataset["name"],
        digest=dataset["sha256"][:DIGEST_LENGTH],
        source_type="local",
        source=json.dumps({"uri": dataset["source"]}),
        profile=json.dumps(dataset["profile"]),
    )
    return DatasetInput(entity, [InputTag("mlflow.data.context", "training and test")])


def _alive(pid: int) -> bool:
    if os.name != "posix":
        return True  # signal 0 is no harmless question there
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid > 0


def serve(calls: Iterator[str], answer: Callable[[str], None]) -> None:
    """Run the calls of a `cnnexp.tracking.pipe.Recorder` until its pipe closes."""
    store: Store | None = None
    for line in calls:
        if not line.endswith("\n"):
            break  # cut short: its writer died
        call_id, name, arguments = json.loads(line)
        value, error = None, None
        try:
            if name == "open":
                store = Store(**arguments)
                gc.freeze()  # the libraries are no garbage
            elif name == "draw":
                from cnnexp.tracking import figures

                value = getattr(figures, arguments.pop("kind"))(**arguments)
            else:
                value = getattr(store, name)(**arguments)
        except Exception as failure:  # the caller gets it and raises it
            error = str(failure)
            if not isinstance(failure, TrackingError):
                error = f"the record of the run cannot be completed: {type(failure).__name__}: {failure}"
        if call_id is not None:
            answer(json.dumps([call_id, value, error]) + "\n")
        if name == "finish":
            gc.collect()  # of a run; see `main`
    if store is not None:
        store.close()


def main() -> None:
    """Serve standard input. What libraries print goes to standard error, so answers stay clean."""
    gc.disable()  # until a run has ended: MLflow loads, and figures are drawn, in two thirds of the time
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)  # what fails is an answer, one line; libraries add pages of tracebacks

    def answer(line: str) -> None:
        answers.write(line)
        answers.flush()

    with contextlib.suppress(BrokenPipeError):  # the caller died; its run is closed by then
        serve(iter(sys.stdin.readline, ""), answer)
    os._exit(0)  # MLflow's modules take a second to tear down, and nothing is left to save


if __name__ == "__main__":
    main()
