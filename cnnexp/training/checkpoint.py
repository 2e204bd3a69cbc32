"""Checkpoints: all that a run needs to go on, in one file that is either whole or refused.

A file is a magic line, the SHA-256 of everything after it, and an npz archive of the arrays of `Program.state()` with a
JSON record beside them. Nothing is pickled, so a file runs no code, and one changed bit or missing byte anywhere is
found before anything is read. Files are written under another name, forced to the disk and renamed, and the one before
is kept: a crash at any moment leaves a whole checkpoint.

The order of an epoch follows from the seed and the epoch's number alone (`train.epoch_order`), so these two are the
whole random state.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cnnexp.backends.protocol import State
from cnnexp.errors import CheckpointError
from cnnexp.network import LAYERS, Network
from cnnexp.network.losses import Loss, Totals
from cnnexp.optimizers import Optimizer
from cnnexp.training.baseline import Comparison
from cnnexp.training.loop import EpochResult
from cnnexp.training.schedules import Schedule

MAGIC = b"cnnexp checkpoint 1\n"
DIGEST_END = len(MAGIC) + hashlib.sha256().digest_size * 2 + 1
KEPT = 2
FOLDER = "checkpoints"
_NAME = re.compile(r"epoch-(\d+)\.ckpt")


@dataclass(frozen=True)
class Checkpoint:
    """A run between two epochs.

    Attributes:
        epoch: the last one that is done.
        training: what must be the same for a run to go on as if never stopped: see `describe`.
        state: as `Program.state` returned it after that epoch.
        history: what every epoch was, first to last; the scores are left out.
        about: facts for the reader, e.g. config hash, backend, versions; never checked.
    """

    epoch: int
    training: Mapping[str, Any]
    state: State = field(repr=False)
    history: tuple[EpochResult, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)


def describe(
    network: Network,
    loss: Loss,
    optimizer: Optimizer,
    batch_size: int,
    schedule: Schedule,
    seed: int,
    dataset_sha256: str,
) -> dict[str, Any]:
    """Return what decides a training run's numbers, as plain values by name.

    Backend and workers are not in it, nor is the number of epochs: a run may go on for longer.
    """
    return {
        "network.input_shape": list(network.input_shape),
        "network.layers": [_plain(layer) for layer in network.layers],
        "loss": loss.value,
        "optimizer": _plain(optimizer),
        "batch_size": batch_size,
        "schedule": _plain(schedule),
        "seed": seed,
        "dataset.sha256": dataset_sha256,
    }


def rebuild(training: Mapping[str, Any]) -> tuple[Network, Loss]:
    """Return the network and the loss that `describe` described.

    Raises:
        KeyError, TypeError, ValueError: it is not as `describe` writes it.
    """
    layers = (dict(layer) for layer in training["network.layers"])
    made = tuple(LAYERS[layer.pop("type")](**layer) for layer in layers)
    return Network(training["network.input_shape"], made), Loss(training["loss"])


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint into a folder, beside the one before it; older ones are removed.

    Returns:
        The file, `epoch-000007.ckpt` for epoch 7.

    Raises:
        CheckpointError: it cannot be written; those before it are untouched.
    """
    target = Path(folder) / f"epoch-{checkpoint.epoch:06d}.ckpt"
    written = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with written.open("wb") as file:
            file.write(_encode(checkpoint))
            file.flush()
            os.fsync(file.fileno())
        os.replace(written, target)
        _sync_folder(target.parent)
        for old in list_checkpoints(folder)[:-KEPT]:
            old.unlink()
    except OSError as error:
        raise CheckpointError(f"checkpoint {target}: cannot be written: {error.strerror or error}") from error
    finally:
        written.unlink(missing_ok=True)
    return target


def load(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        CheckpointError: the file is missing, cut short, altered, or of another version.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: cannot be read: {error.strerror or error}") from error
    damage = _damage(content)
    if damage:
        raise CheckpointError(f"checkpoint {path}: {damage}{_another(path)}")
    try:
        return _decode(content)
    except (KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        # the digest is right, so it was written so: by something else than `save`
        raise CheckpointError(f"checkpoint {path}: not as cnnexp writes it: {error}{_another(path)}") from error


def find(where: Path, given: str | None = None) -> Path:
    """Return the newest checkpoint of a run.

    Args:
        where: a checkpoint file, the run's folder, or its folder of checkpoints.
        given: how the user gave it, for the message; None stands for `trainer.resume=...`.

    Raises:
        CheckpointError: there is none.
    """
    where = Path(where)
    if where.is_file():
        return where
    for folder in (where, where / FOLDER):
        found = list_checkpoints(folder)
        if found:
            return found[-1]
    reason = "holds no checkpoint (epoch-*.ckpt)" if where.is_dir() else "no such file or folder"
    raise CheckpointError(
        f"{given or f'trainer.resume={str(where)!r}'}: {reason}; give a run's folder or a checkpoint file"
    )


def check_same(checkpoint: Checkpoint, training: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError unless the checkpoint is of this very training, naming what differs."""
    then, now = checkpoint.training, json.loads(json.dumps(training))
    differences = [
        f"{key} is {_short(now.get(key))}, the checkpoint's {_short(then.get(key))}"
        for key in dict.fromkeys((*now, *then))
        if now.get(key) != then.get(key)
    ]
    if differences:
        raise CheckpointError(f"checkpoint {path}: of another training: {'; '.join(differences)}")


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoint files of a folder, oldest first."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    numbered = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]


def _encode(checkpoint: Checkpoint) -> bytes:
    meta = {
        "epoch": checkpoint.epoch,
        "training": checkpoint.training,
        "history": [_plain_result(result) for result in checkpoint.history],
        "about": checkpoint.about,
    }
    arrays = {f"state/{name}": np.asarray(array) for name, array in checkpoint.state.items()}
    archive = io.BytesIO()
    np.savez(archive, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays)
    body = archive.getvalue()
    return MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _damage(content: bytes) -> str | None:
    """Return what is wrong with a file's bytes, None if they are as they were written."""
    if not content.startswith(MAGIC):
        same_kind = content[:9] == MAGIC[:9]
        return "damaged, or of another version of cnnexp" if same_kind else "not a checkpoint of cnnexp"
    head, body = content[len(MAGIC) : DIGEST_END], content[DIGEST_END:]
    if head != hashlib.sha256(body).hexdigest().encode() + b"\n":
        return "damaged: its bytes do not match its SHA-256"
    return None


def _decode(content: bytes) -> Checkpoint:
    with np.load(io.BytesIO(content[DIGEST_END:]), allow_pickle=False) as archive:
        meta = json.loads(archive["meta"].tobytes())
        state = {name.removeprefix("state/"): archive[name] for name in archive.files if name.startswith("state/")}
    return Checkpoint(meta["epoch"], meta["training"], state, tuple(map(_result, meta["history"])), meta["about"])


def _another(path: Path) -> str:
    """Return where to go on instead: the newest other checkpoint beside `path` that is whole."""
    for other in reversed(list_checkpoints(path.parent)):
        if other != path and _damage(other.read_bytes()) is None:
            return f"; {other.name} beside it is whole"
    return ""


def _plain_result(result: EpochResult) -> dict[str, Any]:
    return dataclasses.asdict(dataclasses.replace(result, scores=None))


def _result(plain: Mapping[str, Any]) -> EpochResult:
    made = {"train": Totals, "test": Totals, "validation": Totals, "comparison": Comparison}
    parts = {key: cls(**plain[key]) for key, cls in made.items() if plain[key] is not None}
    return EpochResult(**{**plain, **parts, "scores": np.empty((0, 0), np.float32)})


def _plain(spec: Any) -> dict[str, Any]:
    return {"type": type(spec).__name__, **dataclasses.asdict(spec)}


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _sync_folder(folder: Path) -> None:
    """Force a rename to the disk; only POSIX systems can open a folder for that."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
