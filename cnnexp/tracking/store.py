"""The MLflow store, and the process that brings it up to journals: the only file that talks to it.

Importing MLflow takes longer than a short training, so it happens in a process of its own, which `pipe` starts first.
It reads one call a line, `[id, name, arguments]` as JSON, and answers those with an id by `[id, value, error]`. What it
records of runs is in their journals. Where a training process is killed, its pipe ends, and no run stays RUNNING.
"""

import contextlib
import functools
import gc
import glob
import importlib
import itertools
import json
import logging
import os
import platform
import queue
import re
import secrets
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import psutil
import yaml

from cnnexp.errors import ConfigError, TrackingError, refused, without_secrets
from cnnexp.measuring import environment
from cnnexp.system.files import sync_folder
from cnnexp.tracking import liveness, view
from cnnexp.tracking.address import alone, artifact_location, database_of, need_store, sqlite_uri
from cnnexp.tracking.events import DIED, EXAMPLE, FOLDER, JOURNAL, KEY, LACKING, MODEL, Journal, note, open_journal
from cnnexp.tracking.folder import RECORDER, RunLock

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run
    from mlflow.tracking import MlflowClient

T = TypeVar("T")
LOCKED, LOCKED_S = "database is locked", 0.5  # what sqlite says, and how soon it is asked again
POLL_S = 1.0  # a journal is looked into as often where nobody asks for it, and sent no sooner than this after it was
RETRY_S = 10.0  # after a failure, no sooner than this
NEW_S = 5.0  # of an epoch that ended longer ago, nobody knows how much of the machine was in use
HOLD_S = 2.0  # as long may the start of a training hold up the loading of libraries
PARENT = "mlflow.parentRunId"  # tag: the run of the sweep that a run is a job of
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}  # the page opens on runs, not on GenAI traces
DATABASE_LINE = re.compile(r"\([\w.]*(?:Error|Exception)\) .*")  # as SQLAlchemy quotes its driver
ARTIFACTS = ("config.json", "report.md", "predictions.npz", "profile.json", "figures", "checkpoints")  # of a run
DIGEST_LENGTH = 36  # MLflow's limit


class _Followed(Journal):
    """A journal on its way into the store: the id of its run, once it is there, and when to look again."""

    run_id: str | None = None
    key: str | None = None
    look_at: float = 0.0


class Store:
    """Runs of one experiment, made where it does not exist, in one MLflow store, its address of `store_uri`.

    The owner is the process whose runs these are, our parent; None is this one. Where the store cannot be opened, read
    or written, TrackingError says why, in a few seconds.
    """

    def __init__(self, uri: str, experiment: str, owner: int | None = None) -> None:
        self._uri, self._owner = uri, os.getpid() if owner is None else owner
        self._followed: dict[str, _Followed] = {}
        self._beat_at = 0.0
        _used_since_last(self._owner)  # the next call returns what is used from now on
        with self._explained("cannot be opened"):
            _retry(self._owner, self._open, experiment)
            self._end_stale_runs()

    def _open(self, experiment: str) -> None:
        need_store(self._uri)
        from mlflow.tracking import MlflowClient

        with alone(self._uri):
            _make(self._uri)
            client = MlflowClient(tracking_uri=self._uri, registry_uri=self._uri)
            self._client = cast("MlflowClient", _RetryingClient(client, self._owner))
            self._experiment_id = self._experiment(experiment)

    def follow(self, folder: str, now: bool = True) -> str | None:
        """Bring the store up to the journal of a folder, as far as it is written; `look` does so from now on.

        Not `now`: not soon after the last time, or after a failure. Returns the run's id, None before it begins.
        """
        if self._owner not in (os.getpid(), os.getppid()):
            return self.sync(folder)  # another process may have begun to go on with the run
        followed = self._followed.setdefault(folder, _Followed(Path(folder)))
        if followed.read().facts["begin"] and (now or time.monotonic() >= followed.look_at):
            pause_s = POLL_S if followed.unsent else 0.0  # an epoch need not wait for the run to be begun
            followed.look_at = time.monotonic() + RETRY_S
            self._bring_up(followed, Path(folder))
            followed.look_at = time.monotonic() + pause_s
        return followed.run_id

    def sync(self, folder: str) -> str | None:
        """Bring the store up to the journal of a run or a sweep that has ended, however it ended; return its id.

        None where there is nothing to send: it runs, is gone on with in another folder, or recorded nothing.
        """
        where = Path(folder).resolve()
        self._followed.pop(folder, None)
        with contextlib.ExitStack() as lock:
            try:
                with refused(TrackingError, str(where)):
                    lock.callback(RunLock(where, RECORDER).release)
            except ConfigError:
                return None
            followed = _Followed(where).read()
            with self._explained("cannot be written"):
                key = followed.facts["begin"].get("key")
                found = self._of_key(key)
                there = Path(found.data.tags.get(FOLDER, where)) if found else where
                goes_on_there = there != where and _key_in(there) == key
                if key is None or (found is None and not followed.has_results) or goes_on_there:
                    return None
            self._bring_up(followed, where, has_ended=True)
            with open_journal(where / JOURNAL) as file:
                note(file, "recorded", run_id=followed.run_id)
                note(file, "stored")
            return followed.run_id

    def look(self) -> None:
        """Look into all journals that are followed, and say of every open run that it is alive, where that is due."""
        for folder in tuple(self._followed):
            with contextlib.suppress(TrackingError, OSError):
                self.follow(folder, now=False)
        if time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + liveness.BEAT_S
            for run_id in filter(None, [followed.run_id for followed in self._followed.values()]):
                with contextlib.suppress(Exception):  # the store may be gone for a while
                    for beating in {run_id, self._client.get_run(run_id).data.tags.get(PARENT, run_id)}:
                        self._client.set_tag(beating, liveness.HEARTBEAT, str(_now_ms()))

    def begin(
        self,
        name: str,
        params: Mapping[str, str],
        tags: Mapping[str, str],
        dataset: Mapping[str, Any] | None = None,
        parent: Mapping[str, Any] | str | None = None,
        key: str | None = None,
        is_live: bool = True,
    ) -> str:
        """Start a run, or go on with the one of this key, which keeps what it has; return its id.

        Args, beside those of a journal's `begin`:
            parent: what the sweep's run is begun with, made by who comes first; its id in journals before `SCHEMA` 3.
            is_live: whether our owner runs it, not only found its journal; then facts of machine and code are tags.
        """
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param

        if isinstance(parent, Mapping):
            parent = self.begin(**parent, is_live=False)
        tags = {**tags, **({KEY: key} if key else {}), **({PARENT: parent} if parent else {})}
        if is_live:
            tags = {**environment.machine_facts(), **environment.versions(), **environment.git_facts(), **tags}
            tags |= {**liveness.describe(self._owner), liveness.HEARTBEAT: str(_now_ms())}
        with self._explained("cannot be written"):
            found, run_id = _retry(self._owner, self._find_or_make, name, tags, key)
            if found is not None and is_live:
                self._client.update_run(run_id, status="RUNNING")
                for tag, value in tags.items():
                    self._client.set_tag(run_id, tag, value)
                if "error" in found.data.tags:
                    self._client.delete_tag(run_id, "error")
            there = found.data.params if found else {}  # what it has not been given before
            entries = [Param(key, value) for key, value in params.items() if key not in there]
            self._client.log_batch(run_id, params=entries)
            if dataset is not None and not (found and found.inputs and found.inputs.dataset_inputs):
                digest, source = dataset["sha256"][:DIGEST_LENGTH], json.dumps({"uri": dataset["source"]})
                entity = Dataset(dataset["name"], digest, "local", source, profile=json.dumps(dataset["profile"]))
                context = InputTag("mlflow.data.context", "training and test")
                self._client.log_inputs(run_id, [DatasetInput(entity, [context])])
        return run_id

    def _bring_up(self, journal: _Followed, folder: Path, has_ended: bool = False) -> None:
        """Send what a journal has and the store lacks; a store keeps a metric of the same step, time and value once."""
        facts, begin = journal.facts, journal.facts["begin"]
        with self._explained("cannot be written"):
            if journal.run_id is None or journal.key != begin["key"]:
                journal.run_id, journal.key = self.begin(**begin, is_live=not has_ended), begin["key"]
            run_id = journal.run_id
            metrics: list[Metric] = []
            for epoch in journal.unsent:
                entry = journal.epochs[epoch]
                is_new = epoch == journal.unsent[-1] and _now_ms() - entry["time_ms"] < NEW_S * 1000
                used = _used_since_last(self._owner) if is_new else {}
                metrics += _metrics({**entry["metrics"], **used}, epoch, entry["time_ms"])
            self._client.log_batch(run_id, metrics)
            journal.unsent.clear()
            if facts["model"] is not None:
                self._save_model(run_id, folder, facts["model"])
                facts["model"] = None
            if has_ended or facts["status"] != DIED:
                if journal.has_results:
                    self._client.log_batch(run_id, _metrics(facts["metrics"], 0, facts["time_ms"]))
                status, tags = _how_died(begin["tags"]) if facts["status"] == DIED else (facts["status"], facts["tags"])
                names = dict.fromkeys([*ARTIFACTS, *dict(facts["artifacts"])])
                artifacts = [str(folder / name) for name in names if (folder / name).exists()]
                tags = view.illustrated(tags, run_id, folder)
                self.finish(run_id, "FAILED" if status == LACKING else status, tags, artifacts)
                self._followed.pop(str(folder), None)

    def _save_model(self, run_id: str, folder: Path, model: Mapping[str, Any]) -> None:
        """Log a checkpoint as a model of MLflow's, which `mlflow.pyfunc.load_model` loads beside cnnexp.

        Nothing is pickled and no code is written: the data is a copy of the checkpoint, the loader `model`. The folder
        `MODEL` of the run's holds an image that the model takes, `EXAMPLE`; `model` is of `Run._save_model`.
        """
        from mlflow.entities import LoggedModelOutput

        done = self._client.get_run(run_id).outputs
        if done is not None and any(output.step == model["step"] for output in done.model_outputs):
            return  # by a recorder that died before it could say so
        data = Path(shutil.copy(folder / model["checkpoint"], folder / MODEL))
        logged = self._client.create_logged_model(self._experiment_id, MODEL, run_id)
        whose = {"artifact_path": logged.artifact_location, "model_id": logged.model_id, "run_id": run_id}
        described = yaml.safe_dump({**whose, **_describe_model(data.name, model)})
        (folder / MODEL / "MLmodel").write_text(described, encoding="utf-8")
        self._client.log_model_artifacts(logged.model_id, str(folder / MODEL))
        self._client.finalize_logged_model(logged.model_id, "READY")
        self._client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, model["step"])])

    def finish(self, run_id: str, status: str, tags: Mapping[str, str], artifacts: Sequence[str] = ()) -> None:
        """End a run as FINISHED, FAILED or KILLED, with more tags, and files and whole folders as artifacts."""
        with self._explained("stopped answering"):
            for key, value in tags.items():
                self._client.set_tag(run_id, key, value)
            for path in artifacts:
                self._client.log_artifact(run_id, path)  # a folder keeps its name
            self._client.set_terminated(run_id, status)
        gc.collect()  # of a run; see `main`

    def link(self) -> str:
        """Return the address that shows this experiment's runs; of an sqlite store it works while `cnnexp ui` runs."""
        return view.address(self._uri, self._experiment_id)

    def finished(self, config_hash: str) -> dict[str, float] | None:
        """Return the last metrics of a finished run of this config, None where there is none."""
        with self._explained("cannot be read"):
            runs = self._search(f"attributes.status = 'FINISHED' and tags.config_hash = '{config_hash}'", 1)
        found = runs[0].data.metrics if runs else None
        return found and {name: value for name, value in found.items() if not name.startswith("system/")}

    def close(self) -> None:
        """End what was never ended: its process is gone."""
        for folder in tuple(self._followed):
            with contextlib.suppress(TrackingError, OSError):  # it is in the journal
                self.sync(folder)

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        tags = {**EXPERIMENT_TAGS, view.TAG: view.state()}
        if (found := self._client.get_experiment_by_name(name)) is None:
            try:
                return self._client.create_experiment(name, artifact_location(self._uri), tags)
            except MlflowException:
                # on a server, another process may have been quicker
                if (found := self._client.get_experiment_by_name(name)) is None:
                    raise
        if found.lifecycle_stage == "deleted":
            command = f"MLFLOW_TRACKING_URI={without_secrets(self._uri)} mlflow experiments restore"
            advice = f"choose another name or restore it with {command} --experiment-id {found.experiment_id}"
            raise TrackingError(f"tracking.experiment={name!r}: deleted in this store; {advice}")
        for key, value in tags.items() - found.tags.items():  # made by hand, or by an older cnnexp
            self._client.set_experiment_tag(found.experiment_id, key, value)
        return found.experiment_id

    def _search(self, condition: str, limit: int) -> "Sequence[Run]":
        return self._client.search_runs([self._experiment_id], filter_string=condition, max_results=limit)

    def _of_key(self, key: str | None) -> "Run | None":
        """Return the first run that was made of a key."""
        found = self._search(f"tags.`{KEY}` = '{key}'", 100) if key and key.isalnum() else []
        return min(found, key=lambda run: (run.info.start_time, run.info.run_id), default=None)

    def _find_or_make(self, name: str, tags: dict[str, str], key: str | None) -> "tuple[Run | None, str]":
        """Return the run of a key and its id; None where there was none, and the id of the one that is made."""
        with alone(self._uri):  # jobs of a sweep may come at once to make its run
            if (found := self._of_key(key)) is None:
                made = self._client.create_run(self._experiment_id, tags=tags, run_name=name).info.run_id
                if (found := self._of_key(key)) is None or found.info.run_id == made:
                    return None, made
                self._client.delete_run(made)  # a server cannot be locked: who was first stays
            return found, found.info.run_id

    def _end_stale_runs(self) -> None:
        """End runs whose process and recorder were both killed, here or elsewhere: as their journals say, if they can.

        What cannot be ended now, the next start tries again.
        """
        for run in self._search("attributes.status = 'RUNNING'", 100):
            tags = run.data.tags
            if liveness.is_gone(tags, run.info.start_time, _now_ms()):
                with contextlib.suppress(TrackingError):
                    if (folder := tags.get(FOLDER)) and _key_in(Path(folder)) == tags.get(KEY):
                        self.sync(folder)
                    else:
                        self.finish(run.info.run_id, *_how_died(tags))

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turn whatever a store's client raises into one line that names the store."""
        try:
            yield
        except TrackingError:
            raise
        except Exception as error:
            raise TrackingError(without_secrets(f"tracking.uri={self._uri}: {what}: {_reason(error)}")) from error


class _RetryingClient:
    """A client of MLflow's whose every call waits until a locked database is free; to repeat one does no harm."""

    def __init__(self, client: "MlflowClient", owner: int) -> None:
        self._client, self._owner = client, owner

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(_retry, self._owner, getattr(self._client, name))


def _retry(owner: int, call: Callable[..., T], /, *arguments: Any, **named: Any) -> T:
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


def _describe_model(data: str, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return what stands in a model's `MLmodel` file, as MLflow 3 documents it, but for whose it is.

    MLflow's own classes for it need pandas, which nothing else here does.
    """

    def tensor(dtype: str, *sizes: int) -> str:
        return json.dumps([{"type": "tensor", "tensor-spec": {"dtype": dtype, "shape": [-1, *sizes]}}])

    takes, gives = tensor(model["pixels"], *model["shape"]), tensor("float32", model["classes"])
    loader = {"loader_module": "cnnexp.tracking.model", "data": data, "python_version": platform.python_version()}
    return {
        # who loads it may choose another backend: load_model(..., model_config={"backend": "cpu-simd"})
        "flavors": {"python_function": {**loader, "config": {"backend": "numpy"}}},
        "signature": {"inputs": takes, "outputs": gives, "params": None},
        # MLflow then hands on what it is given: else it refuses lists and texts before the model sees them
        "is_signature_from_type_hint": True,
        "saved_input_example_info": {"artifact_path": EXAMPLE, "type": "ndarray", "format": "tf-serving"},
        "mlflow_version": metadata.version("mlflow-skinny"),
        "utc_time_created": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
    }


def _key_in(folder: Path) -> str | None:
    """Return which run the journal of a folder is of, None where there is none that can be read."""
    with contextlib.suppress(OSError):
        return cast(str | None, Journal(folder).read().facts["begin"].get("key"))
    return None


def _how_died(tags: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return status and tags of a run whose processes ended without a word."""
    if (workers := tags.get("workers", "1")) == "1":
        return "KILLED", {"error": "the training process died"}
    return "FAILED", {"error": f"one of {workers} workers died"}


def _metrics(metrics: Mapping[str, float], step: int, time_ms: int) -> "list[Metric]":
    from mlflow.entities import Metric

    # of what is a column of MLflow's list six digits: it would show all that there are, and cut them
    rounded = {key: f"{value:.6g}" if key in view.METRICS else value for key, value in metrics.items()}
    return [Metric(key, float(value), time_ms, step) for key, value in rounded.items()]


def _used_since_last(process: int) -> dict[str, float]:
    """Return the share of all cores used since the last call, memory now, and that of a process, by MLflow's names.

    Its own monitor looks every 10 s, when most epochs are over.
    """
    memory = psutil.virtual_memory()
    used = {
        "system/cpu_utilization_percentage": psutil.cpu_percent(),
        "system/system_memory_usage_megabytes": memory.used / 1e6,
        "system/system_memory_usage_percentage": memory.percent,
    }
    with contextlib.suppress(psutil.Error):  # it may have ended
        used["system/process_memory_usage_megabytes"] = psutil.Process(process).memory_info().rss / 1e6
    return used


def _now_ms() -> int:
    return int(time.time() * 1000)


def _load(database: bool = False) -> None:
    """Load the libraries while the other process loads its own, before it knows which store it is to be."""
    # MLflow then does as where they are not installed, and loads in two thirds of the time; nothing here needs them
    for absent in ("pandas", "pyarrow"):
        sys.modules.setdefault(absent, cast(Any, None))
    importlib.import_module("mlflow.tracking")
    if database:
        importlib.import_module("mlflow.store.tracking.sqlalchemy_store")


class _Hold:
    """Keeps imports still until `ends`: an entry of `sys.meta_path`, which is asked first for every module."""

    ends = 0.0

    def find_spec(self, *_: Any) -> None:
        while time.monotonic() < self.ends:
            time.sleep(0.01)


def _listen(lines: Iterator[str], calls: queue.SimpleQueue[str], hold: _Hold) -> None:
    """Read calls, and hold or go on as they say, while the main thread loads or waits for a store."""
    for line in itertools.chain(lines, [""]):
        if line.endswith("\n") and json.loads(line)[1] == "hold":
            hold.ends = time.monotonic() + HOLD_S
        else:
            hold.ends = 0.0
            calls.put(line)


class _Server:
    """Calls methods of a store, which it opens for the first of them, and again where it could not be opened."""

    def __init__(self, owner: int) -> None:
        self._owner, self.store = owner, cast("Store | None", None)
        self._opening: Mapping[str, str] = {}
        self._open_at, self._failure = 0.0, ""

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        if name == "load":
            return _load(**arguments)
        if name == "open":
            self._opening = arguments
        if self.store is None:
            if not arguments.get("now", True) and time.monotonic() < self._open_at:
                raise TrackingError(self._failure)
            try:
                self.store = Store(**self._opening, owner=self._owner)
            except TrackingError as failure:
                self._open_at, self._failure = time.monotonic() + RETRY_S, str(failure)
                raise
            gc.freeze()  # the libraries are no garbage
        return None if name == "open" else getattr(self.store, name)(**arguments)


def main() -> None:
    """Run the calls of a `pipe.Recorder` until its pipe closes; what libraries print goes to standard error."""
    gc.disable()  # until a run has ended: MLflow loads in two thirds of the time
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)  # what fails is an answer, one line; libraries add pages of tracebacks
    calls: queue.SimpleQueue[str] = queue.SimpleQueue()
    hold, server, line = _Hold(), _Server(int(sys.argv[1])), "\n"
    sys.meta_path.insert(0, cast(Any, hold))
    threading.Thread(target=_listen, args=(iter(sys.stdin.readline, ""), calls, hold), daemon=True).start()
    while line.endswith("\n"):  # else it is the end, or cut short: its writer died
        try:
            line = calls.get(timeout=POLL_S)
        except queue.Empty:
            if server.store is not None:
                server.store.look()
            continue
        if line.endswith("\n"):
            call_id, name, arguments = json.loads(line)
            hold.find_spec()
            value, error = None, None
            try:
                value = server.call(name, arguments)
            except TrackingError as failure:  # the caller gets it and raises it
                error = str(failure)
            except Exception as failure:
                error = f"the record of the run cannot be completed: {type(failure).__name__}: {failure}"
            if call_id is not None:
                with contextlib.suppress(BrokenPipeError):  # the caller died; what it asked for is done all the same
                    answers.write(json.dumps([call_id, value, error]) + "\n")
                    answers.flush()
    if server.store is not None:
        server.store.close()
    os._exit(0)  # MLflow's modules take a second to tear down, and nothing is left to save


if __name__ == "__main__":
    main()
