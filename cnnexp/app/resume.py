"""What a run goes on from: the run that `trainer.resume` names, or the newest one of the same config."""

import contextlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cnnexp.errors import CheckpointError, ConfigError
from cnnexp.measuring.environment import config_hash, outputs_dir
from cnnexp.tracking.events import JOURNAL, Journal, hash_in, read_journal
from cnnexp.tracking.folder import is_locked
from cnnexp.training import checkpoint

AUTO = "auto"
ID_START = re.compile("[0-9a-f]{4,32}")
# a word for a run of those under `outputs/` -> what that has most of, by its folder
MOST: dict[str, Callable[[Path], float]] = {
    "latest": lambda folder: (folder / JOURNAL).stat().st_mtime,
    "best": lambda folder: read_journal(folder)["metrics"].get("final/test_accuracy", 0.0),
}


class ResumePoint(NamedTuple):
    """A run that was stopped."""

    folder: Path  # of the run
    path: Path | None  # its newest whole checkpoint; None where it was stopped before the first

    def load(self, training: Mapping[str, Any], epochs: int) -> checkpoint.Checkpoint | None:
        """Return its checkpoint, once it is known to be of this very training.

        Raises:
            CheckpointError: it is damaged, or of another training.
            ConfigError: it has done more epochs than are wanted.
        """
        if self.path is None:
            return None
        found = checkpoint.load(self.path)
        checkpoint.check_same(found, training, self.path)
        results = {epoch: entry["result"] for epoch, entry in Journal(self.folder).read().epochs.items()}
        found = checkpoint.take_history(found, results, self.path)
        if found.epoch > epochs:
            raise ConfigError(f"trainer.epochs={epochs}: {self.path} has done {found.epoch} already; give as many")
        if found.begun is not None and found.begun.epoch > epochs:
            raise ConfigError(f"trainer.epochs={epochs}: {self.path} has begun epoch {found.begun.epoch}; give as many")
        return found


def find_earlier(resume: str | None, folder: Path, config: Mapping[str, Any]) -> ResumePoint | None:
    """Return the run to go on from, None to start afresh, for a run to come in a folder, its config as recorded.

    `auto` looks in the run's own folder, then for the newest run of this config under `outputs/` that is not running.
    CheckpointError is raised where the run that is named has no checkpoint.
    """
    if resume is None:
        return None
    if resume == AUTO:
        return _newest(folder, config_hash(config))
    path = find_run(resume, f"trainer.resume={resume!r}").absolute()
    holder = folder_of(path)
    beside = checkpoint.list_checkpoints(path.parent)
    if holder.resolve() == folder.resolve() and beside and path != beside[-1]:
        raise ConfigError(f"trainer.resume={resume!r}: later checkpoints lie beside it; choose another hydra.run.dir")
    return ResumePoint(holder, path)


def find_run(named: str, given: str) -> Path:
    """Return the newest checkpoint of the run that a user means; `given` is how, for the message.

    A run is named by its folder or a checkpoint file; or, of the runs under `outputs/`, by an MLflow id or the first
    digits of one, `latest`, or `best`: the one that ended with the highest test accuracy. CheckpointError is raised
    where there is none, or several have such an id.
    """
    place = Path(named)
    if not place.exists() and named in MOST:
        if not (folders := _trained()):
            raise CheckpointError(f"{given}: no run under {outputs_dir()} has a checkpoint; give a run's folder")
        place = sorted(folders, key=MOST[named])[-1]
    elif not place.exists() and ID_START.fullmatch(named):
        ids = {read_journal(folder)["run_id"] or "": folder for folder in _trained()}
        found = [run_id for run_id in ids if run_id.startswith(named)]
        if len(found) > 1:
            raise CheckpointError(f"{given}: {len(found)} runs begin so: {', '.join(sorted(found))}; give more digits")
        place = ids[found[0]] if found else place
    return checkpoint.find(place, given)


def folder_of(path: Path) -> Path:
    """Return the folder of the run that a checkpoint is of."""
    return path.parent.parent if path.parent.name == checkpoint.FOLDER else path.parent


def _trained() -> list[Path]:
    """Return the folders under `outputs/` of runs that have a checkpoint."""
    folders = [journal.parent for journal in outputs_dir().rglob(JOURNAL)]
    return [folder for folder in folders if checkpoint.holds_checkpoints(folder)]


def _newest(folder: Path, wanted: str) -> ResumePoint | None:
    """Return the run of a folder, else the newest of a config that has a checkpoint, else the newest of it."""
    stopped = [folder]
    if not (folder / JOURNAL).exists():
        same = [journal.parent for journal in outputs_dir().rglob(JOURNAL) if hash_in(journal) == wanted]
        stopped = [holder for holder in sorted(same, key=MOST["latest"], reverse=True) if not is_locked(holder)]
    for holder in stopped:
        with contextlib.suppress(CheckpointError):
            return ResumePoint(holder, checkpoint.find(holder))
    return ResumePoint(stopped[0], None) if stopped else None
