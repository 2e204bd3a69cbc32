"""What a run goes on from: the run that `trainer.resume` names, or the newest one of the same config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cnnexp.errors import CheckpointError, ConfigError
from cnnexp.measuring.environment import config_hash, outputs_dir
from cnnexp.tracking.folder import is_claimed
from cnnexp.tracking.journal import JOURNAL, find_folder, hash_in, read_journal
from cnnexp.training import checkpoint

AUTO = "auto"
RUN_ID = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class Earlier:
    """A run that was stopped.

    Attributes:
        folder: of the run.
        path: its newest whole checkpoint; None where it was stopped before the first.
        run_id: of its MLflow run, where the config is the same, so that the record goes on, too; else None.
    """

    folder: Path
    path: Path | None
    run_id: str | None

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
        if found.epoch > epochs:
            raise ConfigError(f"trainer.epochs={epochs}: {self.path} has done {found.epoch} already; give as many")
        return found


def find_earlier(resume: str | None, folder: Path, config: Mapping[str, Any]) -> Earlier | None:
    """Return the run to go on from, None to start afresh.

    Args:
        resume: `trainer.resume`; `auto` looks in the run's own folder, then for the newest run of this config under
            `outputs/` that is not running now.
        folder: of the run to come.
        config: the run's, as it is recorded.

    Raises:
        CheckpointError: the run that is named has no checkpoint.
    """
    if resume is None:
        return None
    wanted = config_hash(config)
    if resume == AUTO:
        return _newest(folder, wanted)
    path = find_run(resume, f"trainer.resume={resume!r}").absolute()
    holder = path.parent.parent if path.parent.name == checkpoint.FOLDER else path.parent
    if holder.resolve() == folder.resolve() and path != checkpoint.list_checkpoints(path.parent)[-1]:
        raise ConfigError(f"trainer.resume={resume!r}: later checkpoints lie beside it; choose another hydra.run.dir")
    return Earlier(holder, path, _record_of(holder, wanted))


def find_run(named: str, given: str) -> Path:
    """Return the newest checkpoint of the run that a user means.

    Args:
        named: a run's folder, a checkpoint file, or the id of an MLflow run whose folder is under `outputs/`.
        given: how the user gave it, for the message.

    Raises:
        CheckpointError: there is none.
    """
    if RUN_ID.fullmatch(named) and not Path(named).exists():
        where = find_folder(outputs_dir(), named)
        if where is not None:
            return checkpoint.find(where, given)
    return checkpoint.find(Path(named), given)


def _newest(folder: Path, wanted: str) -> Earlier | None:
    own = Path(folder) / JOURNAL
    found = [own] if own.exists() else []
    if not found:
        same = (journal for journal in outputs_dir().rglob(JOURNAL) if hash_in(journal) == wanted)
        found = sorted(same, key=lambda journal: journal.stat().st_mtime, reverse=True)
    for journal in found:
        if journal != own and is_claimed(journal.parent):
            continue
        try:
            path = checkpoint.find(journal.parent)
        except CheckpointError:
            path = None
        return Earlier(journal.parent, path, _record_of(journal.parent, wanted))
    return None


def _record_of(folder: Path, wanted: str) -> str | None:
    """Return the MLflow run of a run's folder, None where the folder's config is another."""
    journal = read_journal(folder)
    return journal["run_id"] if journal["config_hash"] == wanted else None
