"""The MLflow store: the only file that imports mlflow, and the process that does so.

Importing MLflow takes longer than a short training, so it happens in a process of its own, which `pipe` starts before
Hydra, the data and the compiler load: `python -m cnnexp.tracking.store`. It reads one call a line, `[id, name,
arguments]` as JSON, and answers calls that have an id with `[id, value, error]`. Training never waits for a slow store,
and a training process that is killed outright leaves no run RUNNING: its end closes the pipe.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import glob
import importlib
import json
import logging
import os
import platform
import re
import secrets
import shutil
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import yaml

from cnnexp.errors import ConfigError, TrackingError, without_secrets
from cnnexp.measuring import environment
from cnnexp.system.files import sync_folder
from cnnexp.tracking import liveness, usage, view
from cnnexp.tracking.address import alone, artifact_location, database_of, need_answer, need_database, sqlite_uri
from cnnexp.tracking.events import DIED, FOLDER, JOURNAL, KEY, note, open_journal, read_journal, store_status
from cnnexp.tracking.folder import DELIVERER, Claim

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Run
    from mlflow.tracking import MlflowClient

T = TypeVar("T")
LOCKED, LOCKED_S = "database is locked", 0.5  # what sqlite says, and how soon it is asked again
SEND_S = 1.0  # metrics are sent no sooner after each other: a short epoch need not wait for its own
RETRY_S = 10.0  # after a failure, no sooner than this
PARAMS_PER_CALL = 100  # MLflow's limits on one batch
METRICS_PER_CALL = 1000
PARENT = "mlflow.parentRunId"  # tag: the run of the sweep that a run is a job of
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}  # the page opens on runs, not on GenAI traces
MODEL = "model"  # name of every run's model: runs:/ID/model
EXAMPLE = "input_example.json"
DATABASE_LINE = re.compile(r"\([\w.]*(?:Error|Exception)\) .*")  # as SQLAlchemy quotes its driver
# what a run leaves in its folder -> the folder among its artifacts
ARTIFACTS = {
    **{"config.json": None, "report.md": None, "predictions.npz": None, "profile.json": None},
    **{"figures": "figures", "checkpoints": "checkpoints"},
}
DIGEST_LENGTH = 36  # MLflow's limit


class Store:
    """Runs of one experiment in one MLflow store.

    Args:
        uri: as `store_uri` returns it.
        experiment: name; made where it does not exist.
        owner: the process whose runs these are, our parent; None is this one.

    Raises:
        TrackingError: the store cannot be opened, with the reason, in a few seconds.
    """

    def __init__(self, uri: str, experiment: str, owner: int | None = None) -> None:
        self._uri, self._owner = uri, os.getpid() if owner is None else owner
        self._usage = usage.Usage(self._owner)
        self._pending: list[Any] = []
        self._send_at = 0.0
        self._open_runs: set[str] = set()
        with self._explained("cannot be opened"):
            need_answer(uri)
            _once_unlocked(self._owner, self._open, experiment)
            self._end_stale_runs()

    def _open(self, experiment: str) -> None:
        from mlflow.tracking import MlflowClient

        need_database(self._uri)
        with alone(self._uri):
            _make(self._uri)
            client = MlflowClient(tracking_uri=self._uri, registry_uri=self._uri)
            self._client = cast("MlflowClient", _Patient(client, self._owner))
            self._experiment_id = self._experiment(experiment)

    def begin(
        self,
        name: str,
        params: Mapping[str, str],
        tags: Mapping[str, str],
        dataset: Mapping[str, Any] | None = None,
        parent: str | None = None,
        key: str | None = None,
        goes_on: bool = False,
    ) -> str:
        """Start a run, or go on with one; return its id.

        Args:
            name: shown in the list of runs.
            params: the resolved config by dotted key.
            tags: what runs are grouped by; facts of the machine and the code are added.
            dataset: name, sha256, source and profile of the data.
            parent: id of the sweep's run.
            key: names the run, whoever begins it.
            goes_on: whether a run of this key may be there; it is then running again, and keeps what it has.
        """
        tags = {**environment.machine_facts(), **environment.versions(), **environment.git_facts(), **tags}
        tags |= {**liveness.describe(self._owner), liveness.HEARTBEAT: str(_now_ms())}
        if parent is not None:
            tags[PARENT] = parent
        with self._explained("cannot be written"):
            if self._owner not in (os.getpid(), os.getppid()):
                raise TrackingError("the training process died")  # another one may have begun to go on with the run
            found = self._of_key(key) if goes_on and key else None
            if found is None:
                run_id = self._create(name, tags, key)
            else:
                run_id = found.info.run_id
                self._client.update_run(run_id, status="RUNNING")
                for tag, value in tags.items():
                    self._client.set_tag(run_id, tag, value)
                if "error" in found.data.tags:
                    self._client.delete_tag(run_id, "error")
            self._open_runs.add(run_id)
            self._pending = []  # what an earlier run could not send is in its journal
            self._describe(run_id, found, params, dataset)
        return run_id

    def catch_up(self, folder: str) -> str:
        """Go on with the run of a folder, bringing the store up to its journal; return its id.

        Raises:
            TrackingError: the folder's run was never begun, or the store cannot be written.
        """
        journal = read_journal(Path(folder))
        if not journal["begin"]:
            raise TrackingError(f"{folder}: holds no run to go on with")
        run_id = self.begin(**journal["begin"], goes_on=True)
        with self._explained("cannot be written"):
            self._send_epochs(run_id, journal)
        return run_id

    def deliver(self, folder: str) -> str | None:
        """Bring the store up to the journal of a run that has ended, however it ended.

        Returns:
            The id of the run; None where there is nothing to deliver: it runs, is gone on with in another folder, or
            nothing of it was recorded.

        Raises:
            TrackingError: the store cannot be written.
        """
        where = Path(folder).resolve()
        try:
            claim = Claim(where, DELIVERER)
        except ConfigError:
            return None
        except OSError as error:
            raise TrackingError(f"{where}: {error.strerror or error}") from error
        try:
            journal = read_journal(where)
            begin, key = journal["begin"], journal["begin"].get("key")
            with self._explained("cannot be written"):
                found = self._of_key(key) if key else None
                if key is None or (found is None and not journal["epochs"]) or _elsewhere(found, where, key):
                    return None
                run_id = found.info.run_id if found else self._create(begin["name"], begin["tags"], key)
                self._describe(run_id, found, begin["params"], begin["dataset"])
                self._send_epochs(run_id, journal)
                status, tags = store_status(journal["status"]), journal["tags"]
                if journal["status"] == DIED:
                    status, tags = _how_died(begin["tags"])
                self.finish(run_id, status, tags, _left_in(where))
            with open_journal(where / JOURNAL) as file:
                note(file, "recorded", run_id=run_id)
                note(file, "stored")
            return run_id
        finally:
            claim.release()

    def beat(self) -> None:
        """Say of every open run that it is alive."""
        for run_id in tuple(self._open_runs):
            with contextlib.suppress(Exception):  # the store may be gone for a while
                run = self._client.get_run(run_id)
                for beating in {run_id, run.data.tags.get(PARENT, run_id)}:
                    self._client.set_tag(beating, liveness.HEARTBEAT, str(_now_ms()))

    def log(self, run_id: str, metrics: Mapping[str, float], step: int, time_ms: int) -> None:
        """Record metrics, and of an epoch (a step from 1 on) what of the machine was in use.

        They are kept here, for a later call or `finish`, if others were just sent or the store does not answer.
        """
        self._pend(run_id, metrics, step, time_ms)
        if step:
            self._pend(run_id, self._usage.since_last(), step, time_ms)
        if time.monotonic() >= self._send_at:
            pause_s = SEND_S
            try:
                self._send_pending(run_id)
            except Exception:  # whatever its client raises; `finish` tries again and reports it
                pause_s = RETRY_S
            self._send_at = time.monotonic() + pause_s

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
        from mlflow.entities import LoggedModelOutput

        Path(folder).mkdir(parents=True, exist_ok=True)
        data = Path(shutil.copy(checkpoint, folder))
        (Path(folder) / EXAMPLE).write_text(json.dumps(example), encoding="utf-8")
        with self._explained("cannot be written"):
            done = self._client.get_run(run_id).outputs
            if done is not None and any(output.step == step for output in done.model_outputs):
                return  # by a recorder that died before it could say so
            logged = self._client.create_logged_model(self._experiment_id, MODEL, run_id)
            described = {
                "artifact_path": logged.artifact_location,
                "model_id": logged.model_id,
                "run_id": run_id,
                **_describe_model(data.name, np.shape(example)[1:], pixels, classes),
            }
            (Path(folder) / "MLmodel").write_text(yaml.safe_dump(described), encoding="utf-8")
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
            self._open_runs.discard(run_id)

    def adopt(self, parent: str, run_ids: Sequence[str]) -> None:
        """Put runs under the run of their sweep, which was begun after them."""
        with self._explained("cannot be written"):
            for run_id in run_ids:
                self._client.set_tag(run_id, PARENT, parent)

    def settle(self) -> None:
        """Do nothing: the answer says that all calls before it are done."""

    def link(self) -> str:
        """Return the address that shows this experiment's runs; of an sqlite store it works while `cnnexp ui` runs."""
        return view.address(self._uri, self._experiment_id)

    def finished(self, config_hash: str) -> dict[str, float] | None:
        """Return the last metrics of a finished run of this config, None where there is none."""
        with self._explained("cannot be read"):
            runs = self._search(f"attributes.status = 'FINISHED' and tags.config_hash = '{config_hash}'", 1)
        found = runs[0].data.metrics if runs else None
        return found and {name: value for name, value in found.items() if not name.startswith(usage.PREFIX)}

    def close(self) -> None:
        """End what was never ended: its process is gone."""
        for run_id in tuple(self._open_runs):
            with contextlib.suppress(TrackingError):  # it is in the journal
                self._end_dead(run_id)

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
                f"MLFLOW_TRACKING_URI={without_secrets(self._uri)} mlflow experiments restore "
                f"--experiment-id {found.experiment_id}"
            )
        for key in tags:
            if found.tags.get(key) != tags[key]:  # made by hand, or by an older cnnexp
                self._client.set_experiment_tag(found.experiment_id, key, tags[key])
        return found.experiment_id

    def _search(self, condition: str, limit: int) -> Sequence[Run]:
        return self._client.search_runs([self._experiment_id], filter_string=condition, max_results=limit)

    def _of_key(self, key: str) -> Run | None:
        found = self._search(f"tags.`{KEY}` = '{key}'", 1) if key.isalnum() else []
        return found[0] if found else None

    def _create(self, name: str, tags: Mapping[str, str], key: str | None) -> str:
        tags = {**tags, **({KEY: key} if key else {})}
        return self._client.create_run(self._experiment_id, tags=tags, run_name=name).info.run_id

    def _describe(
        self, run_id: str, found: Run | None, params: Mapping[str, str], dataset: Mapping[str, Any] | None
    ) -> None:
        """Give a run those of its params, and its data set, that it has not been given before."""
        from mlflow.entities import Param

        there = found.data.params if found else {}
        entries = [Param(key, value) for key, value in params.items() if key not in there]
        for start in range(0, len(entries), PARAMS_PER_CALL):
            self._client.log_batch(run_id, params=entries[start : start + PARAMS_PER_CALL])
        if dataset is not None and not (found and found.inputs and found.inputs.dataset_inputs):
            self._client.log_inputs(run_id, [_dataset_input(dataset)])

    def _send_epochs(self, run_id: str, journal: Mapping[str, Any]) -> None:
        """Send all metrics of a journal; a store keeps those with the same name, step, time and value once."""
        times_ms = journal["times_ms"]
        self._pending = []
        for entry in journal["epochs"]:
            metrics, step = dict(entry), entry["epoch"]
            del metrics["epoch"]
            self._pend(run_id, metrics, step, times_ms[step])
        if journal["epochs"]:
            self._pend(run_id, journal["metrics"], 0, times_ms.get(0, 0))
        self._send_pending(run_id)

    def _pend(self, run_id: str, metrics: Mapping[str, float], step: int, time_ms: int) -> None:
        from mlflow.entities import Metric

        self._pending += [Metric(key, float(value), time_ms, step, run_id=run_id) for key, value in metrics.items()]

    def _end_stale_runs(self) -> None:
        """End runs whose process and recorder were both killed, on this machine or another."""
        for run in self._search("attributes.status = 'RUNNING'", 100):
            if liveness.is_gone(run.data.tags, run.info.start_time, _now_ms()):
                with contextlib.suppress(TrackingError):  # the next start tries again
                    self._end_dead(run.info.run_id)

    def _end_dead(self, run_id: str) -> None:
        """End a run whose process is gone: as its journal says, or, where that is not here, as killed."""
        with self._explained("stopped answering"):
            tags = self._client.get_run(run_id).data.tags
        folder, key = tags.get(FOLDER), tags.get(KEY)
        if folder and _key_in(Path(folder)) == key:
            self.deliver(folder)
        else:
            self.finish(run_id, *_how_died(tags))
        self._open_runs.discard(run_id)

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
            raise TrackingError(without_secrets(f"tracking.uri={self._uri}: {what}: {_reason(error)}")) from error


class _Patient:
    """A client of MLflow's whose every call, a transaction each, waits until a locked database is free."""

    def __init__(self, client: MlflowClient, owner: int) -> None:
        self._client, self._owner = client, owner

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(_once_unlocked, self._owner, getattr(self._client, name))


def _once_unlocked(owner: int, call: Callable[..., T], /, *arguments: Any, **named: Any) -> T:
    """Return what a call returns once no other process has the database locked, or `owner` is gone.

    MLflow gives up after 20 s, as long as another process may be kept from its commit by a busy disk.
    """
    while True:
        try:
            return call(*arguments, **named)
        except Exception as error:
            if LOCKED not in str(error) or owner not in (os.getpid(), os.getppid()):
                raise
            time.sleep(LOCKED_S)


def _reason(error: Exception) -> str:
    """Return the line of an error that says most: the database's own, where there is one, else the first's cause."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    said = next((found[0] for line in lines if (found := DATABASE_LINE.search(line))), lines[0])
    return said.rpartition("(Caused by ")[2].removesuffix(")") if "(Caused by " in said else said


def _make(uri: str) -> None:
    """Make a new sqlite store under another name, and rename it once it is whole.

    MLflow makes one in hundreds of steps, and never finishes one that a full disk or a kill has stopped. The other name
    is a new one at every attempt, since MLflow keeps what it has opened by its name.
    """
    if not uri.startswith("sqlite") or (database_of(uri).exists() and database_of(uri).stat().st_size):
        return
    from mlflow.tracking import MlflowClient

    whole = database_of(uri)
    for left in whole.parent.glob(f"{glob.escape(whole.name)}.{'[0-9a-f]' * 8}.new*"):
        left.unlink(missing_ok=True)
    made = whole.with_name(f"{whole.name}.{secrets.token_hex(4)}.new")
    MlflowClient(sqlite_uri(made), sqlite_uri(made)).search_experiments(max_results=1)
    os.replace(made, whole)
    sync_folder(whole.parent)


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


def _describe_model(data: str, shape: Sequence[int], pixels: str, classes: int) -> dict[str, Any]:
    """Return what stands in a model's `MLmodel` file, as MLflow 3 documents it, but for whose it is.

    MLflow's own classes for it need pandas, which nothing else here does.
    """

    def tensor(dtype: str, *sizes: int) -> str:
        return json.dumps([{"type": "tensor", "tensor-spec": {"dtype": dtype, "shape": [-1, *sizes]}}])

    loader = {"loader_module": "cnnexp.tracking.model", "data": data, "python_version": platform.python_version()}
    return {
        # who loads it may choose another backend: load_model(..., model_config={"backend": "cpu-simd"})
        "flavors": {"python_function": {**loader, "config": {"backend": "numpy"}}},
        "signature": {"inputs": tensor(pixels, *shape), "outputs": tensor("float32", classes), "params": None},
        # MLflow then hands on what it is given: else it refuses lists and texts before the model sees them
        "is_signature_from_type_hint": True,
        "saved_input_example_info": {"artifact_path": EXAMPLE, "type": "ndarray", "format": "tf-serving"},
        "mlflow_version": metadata.version("mlflow-skinny"),
        "utc_time_created": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
    }


def _elsewhere(found: Run | None, folder: Path, key: str) -> bool:
    """Return whether a run is gone on with in another folder, which is there."""
    there = found.data.tags.get(FOLDER) if found else None
    return there is not None and Path(there) != folder and _key_in(Path(there)) == key


def _key_in(folder: Path) -> str | None:
    """Return which run the journal of a folder is of, None where there is none that can be read."""
    with contextlib.suppress(OSError):
        return read_journal(folder)["begin"].get("key")
    return None


def _how_died(tags: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return status and tags of a run whose processes ended without a word."""
    workers = tags.get("workers", "1")
    if workers == "1":
        return "KILLED", {"error": "the training process died"}
    return "FAILED", {"error": f"one of {workers} workers died"}


def _left_in(folder: Path) -> list[tuple[str, str | None]]:
    """Return what a run has left in its folder, as artifacts."""
    return [(str(folder / name), target) for name, target in ARTIFACTS.items() if (folder / name).exists()]


def _now_ms() -> int:
    return int(time.time() * 1000)


def _beat(store: Store) -> None:
    while True:
        time.sleep(liveness.BEAT_S)
        store.beat()


def _load(database: bool = False) -> None:
    """Load the libraries while the other process loads its own, before it can tell which store it is to be."""
    # MLflow then does as where they are not installed, and loads in two thirds of the time; nothing here needs them
    for absent in ("pandas", "pyarrow"):
        sys.modules.setdefault(absent, cast(types.ModuleType, None))
    importlib.import_module("mlflow.tracking")
    if database:
        importlib.import_module("mlflow.store.tracking.sqlalchemy_store")


def serve(calls: Iterator[str], answer: Callable[[str], None], owner: int) -> None:
    """Run the calls of a `cnnexp.tracking.pipe.Recorder`, in the process `owner`, until its pipe closes."""
    store: Store | None = None
    for line in calls:
        if not line.endswith("\n"):
            break  # cut short: its writer died
        call_id, name, arguments = json.loads(line)
        value, error = None, None
        try:
            if name == "open":
                if store is not None:
                    continue
                store = Store(**arguments, owner=owner)
                threading.Thread(target=_beat, args=(store,), daemon=True).start()
                gc.freeze()  # the libraries are no garbage
            elif name == "load":
                _load(**arguments)
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
    gc.disable()  # until a run has ended: MLflow loads in two thirds of the time
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)  # what fails is an answer, one line; libraries add pages of tracebacks

    def answer(line: str) -> None:
        answers.write(line)
        answers.flush()

    with contextlib.suppress(BrokenPipeError):  # the caller died; its run is closed by then
        serve(iter(sys.stdin.readline, ""), answer, int(sys.argv[1]))
    os._exit(0)  # MLflow's modules take a second to tear down, and nothing is left to save


if __name__ == "__main__":
    main()
