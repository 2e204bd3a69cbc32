"""Checkpoints: all that a run needs to go on, in files that are either whole or refused.

A file is a magic line, the SHA-256 of everything after it, and an npz archive of the arrays of `Program.state()` with
a JSON record beside them. The journal has what epochs were, this only its SHA-256: epoch 3,000 costs what 1 did.

Nothing is pickled, so a file runs no code, and one changed bit or missing byte is found before anything is read. Files
are written under another name, forced to the disk and renamed, the one before kept: a crash leaves a whole checkpoint.

The order of an epoch follows from seed and epoch alone (`loop.epoch_order`): these two are the whole random state.
"""

import dataclasses
import hashlib
import io
import json
import logging
import math
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cnnexp.backends.protocol import State
from cnnexp.errors import CheckpointError, first_line, refused
from cnnexp.network import Network
from cnnexp.network.layers import describe_layer, make_layer
from cnnexp.network.losses import Loss, Totals
from cnnexp.optimizers import Optimizer
from cnnexp.system.files import read_regular, sync_folder
from cnnexp.training.baseline import Comparison
from cnnexp.training.loop import Checkpoint as Checkpoint
from cnnexp.training.loop import EpochResult, Progress
from cnnexp.training.schedules import Schedule

log = logging.getLogger(__name__)

MAGIC = b"cnnexp checkpoint 3\n"
DIGEST_END = len(MAGIC) + hashlib.sha256().digest_size * 2 + 1
FOLDER = "checkpoints"
_WITHIN = "-images-"  # in the name of one within an epoch
MOST_BYTES = 1 << 36  # of a file; parameters and two slots of 5 billion numbers
_NAME = re.compile(r"epoch-(\d{6,9})(?:-images-(\d{9,12}))?\.ckpt")


class CheckpointWriter:
    """Writes the checkpoints of one run into a folder that is its own.

    The last ones of an epoch stay, and the best: those with the highest held-out accuracy, the earlier of equals; and
    the newest within an epoch, until that is done. What a process that was killed has left half-written goes.

    `training` is as in `Checkpoint`; the `done` epochs are behind it. So many of the `last`, >= 1, and the `best` stay.
    CheckpointError is raised where the folder cannot be written.
    """

    def __init__(
        self, folder: Path, training: Mapping[str, Any], done: Sequence[EpochResult] = (), last: int = 2, best: int = 1
    ) -> None:
        self._folder, self._training, self._last, self._most_best = folder, training, last, best
        self._digest, self.epochs = hashlib.sha256(), 0  # of the epochs that are done, and how many
        self._ranked: list[tuple[float, str]] = []  # (-accuracy, name of the file) of the epochs
        for result in done:
            self._count(result)
        with refused(CheckpointError, f"checkpoint {self._folder}: cannot be written"):
            self._folder.mkdir(parents=True, exist_ok=True)
            for left in self._folder.glob(".epoch-*.ckpt.*.tmp"):
                left.unlink()

    def save(
        self, state: State, about: Mapping[str, Any], result: EpochResult | None = None, begun: Progress | None = None
    ) -> Path:
        """Write a checkpoint after one more epoch, or without a `result` where the run is now, the next epoch `begun`.

        Returns its file: `epoch-000007.ckpt` after epoch 7, `epoch-000007-images-000000640.ckpt` 640 images later.
        CheckpointError is raised where it cannot be written; those before it are untouched.
        """
        within = f"-images-{begun.totals.count:09d}" if begun is not None else ""
        if result is not None:
            self._count(result)
        target = self._folder / f"epoch-{self.epochs:06d}{within}.ckpt"
        with refused(CheckpointError, f"checkpoint {target}: cannot be written"):
            _write_whole(target, self._encode(state, about, begun))
            self._prune()
        return target

    def _prune(self) -> None:
        found = list_checkpoints(self._folder)
        whole = [path for path in found if _WITHIN not in path.name]
        kept = {*whole[-self._last :], found[-1]}
        here = {path.name for path in found}  # a run that goes on from another folder has no earlier ones
        best = [name for _, name in sorted(self._ranked) if name in here][: self._most_best]
        for old in found:
            if old not in kept and old.name not in best:
                old.unlink()

    def _count(self, result: EpochResult) -> None:
        self._digest.update(_line(result))
        self.epochs += 1
        self._ranked.append((-result.held_out.accuracy, f"epoch-{result.epoch:06d}.ckpt"))

    def _encode(self, state: State, about: Mapping[str, Any], begun: Progress | None) -> bytes:
        meta = {
            "epoch": self.epochs,
            "training": self._training,
            "history_sha256": self._digest.hexdigest(),
            "about": about,
            "begun": None if begun is None else dataclasses.asdict(begun),
        }
        arrays: dict[str, Any] = {f"state/{name}": np.asarray(array) for name, array in state.items()}
        archive = io.BytesIO()
        np.savez(archive, **arrays, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8))
        body = archive.getvalue()
        return MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def describe(
    network: Network,
    loss: Loss,
    optimizer: Optimizer,
    batch_size: int,
    schedule: Schedule,
    seed: int,
    dataset_sha256: str,
    steps: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """Return what decides a training run's numbers, as plain values by name.

    Keys that checkpoints had not from the first are left out at their defaults: those of an earlier version go on.
    Backend and workers are not in it, nor is the number of epochs: a run may go on for longer.
    """
    optimized = dataclasses.asdict(optimizer)
    if optimized.get("decay_biases"):
        del optimized["decay_biases"]
    return {
        "network.input_shape": list(network.input_shape),
        "network.layers": [describe_layer(layer) for layer in network.layers],
        "loss": loss.name,
        **({"loss.label_smoothing": loss.label_smoothing} if loss.label_smoothing else {}),
        **({"loss.class_weights": loss.class_weights} if loss.class_weights else {}),
        "optimizer": {"type": type(optimizer).__name__, **optimized},
        "batch_size": batch_size,
        "schedule": schedule.plain(),
        "seed": seed,
        "dataset.sha256": dataset_sha256,
        **steps,
    }


def rebuild(training: Mapping[str, Any]) -> tuple[Network, Loss]:
    """Return the network and the loss of what `describe` wrote; raise KeyError, TypeError or ValueError on all else."""
    layers = tuple(make_layer(layer) for layer in training["network.layers"])
    weights = tuple(training.get("loss.class_weights", ()))
    loss = Loss(training["loss"], training.get("loss.label_smoothing", 0.0), weights)
    return Network(training["network.input_shape"], layers), loss


def load(path: Path) -> Checkpoint:
    """Read a checkpoint, without its history.

    CheckpointError is raised where it is missing, cut short, altered, of another version, or not as written here.
    """
    with refused(CheckpointError, f"checkpoint {path}: cannot be read"):
        content = read_regular(path, MOST_BYTES)
    if damage := _damage(content):
        raise CheckpointError(f"checkpoint {path}: {damage}{_another(path)}")
    try:
        return _decode(content)
    except Exception as error:
        # the digest is right, so it was written so, by something else than us: whatever reading it raises
        damage = f"not as cnnexp writes it: {first_line(error)}"
        raise CheckpointError(f"checkpoint {path}: {damage}{_another(path)}") from error


def take_history(checkpoint: Checkpoint, results: Mapping[int, Mapping[str, Any] | None], path: Path) -> Checkpoint:
    """Return a checkpoint, that `load` returned, with what its epochs were: a journal's `plain_result` by epoch.

    CheckpointError is raised where they are missing, or other ones.
    """
    digest = hashlib.sha256()
    try:
        history = tuple(as_result(results[epoch]) for epoch in range(1, checkpoint.epoch + 1))
        for result in history:
            digest.update(_line(result))
    except (KeyError, TypeError, ValueError):
        digest.update(b"damaged")
    if digest.hexdigest() != checkpoint.history_sha256:
        raise CheckpointError(f"checkpoint {path}: the journal of its run lacks its epochs, or has other ones")
    return dataclasses.replace(checkpoint, history=history)


def find(where: Path, given: str | None = None) -> Path:
    """Return the newest checkpoint of a run that is whole; a newer one that is damaged is warned of.

    It is in the run's folder, or its folder of checkpoints, or is a file. `given` is how the user gave it, for the
    message; None stands for `trainer.resume=...`. CheckpointError is raised where there is none.
    """
    given = given or f"trainer.resume={str(where)!r}"
    try:
        if where.is_file():
            return where
        if found := list_checkpoints(where) or list_checkpoints(where / FOLDER):
            return _newest_whole(found)
        reason = "holds no checkpoint (epoch-*.ckpt)" if where.is_dir() else "no such file or folder"
    except (OSError, ValueError) as error:  # a name that is too long, or holds a zero byte
        reason = getattr(error, "strerror", None) or str(error)
    fits = "give a run's folder, a checkpoint file, latest, best, or 4 digits or more of its id"
    raise CheckpointError(f"{given}: {reason}; {fits}")


def holds_checkpoints(folder: Path) -> bool:
    return bool(list_checkpoints(folder / FOLDER))


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
    if not folder.is_dir():
        return []
    matches = ((path, _NAME.fullmatch(path.name)) for path in folder.iterdir())
    numbered = [((int(match[1]), int(match[2] or 0)), path) for path, match in matches if match]
    return [path for _, path in sorted(numbered)]


def _newest_whole(found: Sequence[Path]) -> Path:
    """Return the last of some checkpoint files that is whole; of one alone, that one. Raises as `find`."""
    damages: list[tuple[Path, str]] = []
    for path in reversed(found):
        if (damage := _damage(_content(path))) is None:
            for damaged, what in damages:
                log.warning("checkpoint %s: %s; %s is used", damaged, what, path.name)
            return path
        damages.append((path, damage))
    if len(found) > 1:
        newest, what = damages[0]
        raise CheckpointError(f"{newest.parent}: all {len(found)} checkpoints are damaged; {newest.name}: {what}")
    return found[-1]  # whoever reads it says what is wrong


def _content(path: Path) -> bytes:
    try:
        return read_regular(path, MOST_BYTES)
    except OSError:
        return b""


def _write_whole(target: Path, content: bytes) -> None:
    """Put a file in place, whole or not at all, on the disk when this returns."""
    written = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with written.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(written, target)
        sync_folder(target.parent)
    finally:
        written.unlink(missing_ok=True)


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
    """Return the checkpoint in a file's bytes; raises whatever it likes where they are not as they should be."""
    body = io.BytesIO(content[DIGEST_END:])
    with zipfile.ZipFile(body) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED or member.file_size > len(content):
                raise ValueError(f"{member.filename} is compressed")
    with np.load(body, allow_pickle=False) as archive:
        meta = json.loads(archive["meta"].tobytes())
        state = {name.removeprefix("state/"): archive[name] for name in archive.files if name.startswith("state/")}
    _check_state(state)
    epoch, training, about = meta["epoch"], meta["training"], meta["about"]
    if type(epoch) is not int or epoch < 0 or not isinstance(training, dict) or not isinstance(about, dict):
        raise ValueError("its record has a field of another type")
    return Checkpoint(epoch, training, state, meta["history_sha256"], (), about, _begun(meta.get("begun"), epoch))


def _begun(plain: Any, epoch: int) -> Progress | None:
    """Return how far the epoch after `epoch` is; raises whatever it likes."""
    if plain is None:
        return None
    begun = Progress(**{**plain, "totals": Totals(**plain["totals"])})
    counts = (begun.totals.count, begun.totals.correct, begun.images)
    if begun.epoch != epoch + 1 or not all(type(count) is int for count in counts):
        raise ValueError("what it says of the epoch that has begun is of another type")
    if not 0 < begun.totals.count <= begun.images or not math.isfinite(begun.seconds + begun.totals.loss):
        raise ValueError("what it says of the epoch that has begun cannot be")
    return begun


def _check_state(state: Mapping[str, np.ndarray]) -> None:
    parameters = state["parameters"]
    for name, array in state.items():
        if name in ("step", "seed"):
            legal = array.shape == () and array.dtype == np.int64 and (name == "seed" or int(array) >= 0)
        else:
            shaped = array.shape == parameters.shape or name.endswith("running")
            legal = array.ndim == 1 and array.dtype == np.float32 and shaped
        if not legal:
            raise ValueError(f"{name} is {array.dtype} of shape {array.shape}")


def _another(path: Path) -> str:
    """Return where to go on instead: the newest other checkpoint beside `path` that is whole."""
    others = (other for other in reversed(list_checkpoints(path.parent)) if other != path)
    return next((f"; {other.name} beside it is whole" for other in others if _damage(_content(other)) is None), "")


def plain_result(result: EpochResult) -> dict[str, Any]:
    """Return an epoch's result as JSON takes it, but for its scores."""
    return {**dataclasses.asdict(dataclasses.replace(result, scores=np.empty(0))), "scores": None}


def as_result(plain: Any) -> EpochResult:
    """Return the result that `plain_result` returned; raises KeyError, TypeError or ValueError where it is none."""
    made = {"train": Totals, "test": Totals, "validation": Totals, "comparison": Comparison}
    parts = {key: cls(**plain[key]) for key, cls in made.items() if plain[key] is not None}
    return EpochResult(**{**plain, **parts, "scores": np.empty((0, 0), np.float32)})


def _line(result: EpochResult) -> bytes:
    return json.dumps(plain_result(result), sort_keys=True).encode() + b"\n"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."
