"""Mutated files: what may come from elsewhere is read, or refused in one line, in bounded time and memory.

`python -m soak.files FORMAT FOLDER SEED COUNT` does it in a process whose memory is limited; a file that breaks the
promise is kept in the folder, and once mended in `corpus/FORMAT/`, which the tests read again.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import logging
import resource
import signal
import sys
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from cnnexp.errors import CnnexpError
from soak.commands import ROOT, chunks

CORPUS = Path(__file__).parent / "corpus"
FILE_S, FILE_BYTES = 5, 1 << 30  # a file may take, beyond what the libraries take that are loaded
CHUNK = 1000  # files that one process reads


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        name: of the file, where its reader looks at that.
        sound: files that are read.
        read: reads one from a path; raises CnnexpError where it is refused.
        seal: gives a mutated content what its format holds against damage, so that what lies behind is read, too.
    """

    name: str
    sound: Callable[[], list[bytes]]
    read: Callable[[Path], object]
    seal: Callable[[bytes], bytes] = lambda content: content


def fault_of(format_: Format, path: Path) -> str | None:
    """Return how reading a file breaks the promise, None where it does not."""

    def too_long(*_: object) -> None:
        raise TimeoutError(f"took more than {FILE_S} s")

    before = signal.signal(signal.SIGPROF, too_long)
    signal.setitimer(signal.ITIMER_PROF, FILE_S)  # of computing, however busy the machine is
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            format_.read(path)
    except CnnexpError as error:
        return None if "\n" not in str(error) and len(str(error)) < 2000 else f"more than a line: {error}"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:200]} in {Path(where.filename).name}:{where.lineno}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return None


def mutations(sound: list[bytes]) -> st.SearchStrategy[bytes]:
    """Return files made of sound ones by a few changes of bytes, numbers and lines."""
    numbers = st.sampled_from([b"\x00" * 4, b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x00\x00\x00\x80", b"\x01\x00\x00\x00"])
    words = st.sampled_from(
        [
            b"-1",
            b"1e999",
            b"nan",
            b"null",
            b"99999999999999999999",
            b"[]",
            b"{}",
            b'"x"',
            b"\n",
            b"\x00",
            b"(1,)",
            b"true",
        ]
    )
    pieces = st.one_of(st.binary(max_size=8), numbers, words)
    change = st.tuples(
        st.sampled_from(["set", "insert", "cut", "double", "token"]), st.floats(0, 1), st.floats(0, 0.3), pieces
    )

    def mutate(content: bytes, changes: list[tuple[str, float, float, bytes]]) -> bytes:
        for kind, where, size, piece in changes:
            at = int(where * len(content))
            end = at + 1 + int(size * size * (len(content) - at))
            if kind == "set":
                content = content[:at] + piece + content[at + len(piece) :]
            elif kind == "insert":
                content = content[:at] + piece + content[at:]
            elif kind == "cut":
                content = content[:at] + content[end:]
            elif kind == "double":
                content = content[:end] + content[at:]
            else:  # a number or a word of a text gives way to another
                start = next((i for i in range(at, len(content)) if content[i : i + 1].isalnum()), at)
                stop = next((i for i in range(start, len(content)) if not content[i : i + 1].isalnum()), start)
                content = content[:start] + piece + content[stop:]
        return content[: 1 << 20]

    return st.builds(mutate, st.sampled_from(sound), st.lists(change, min_size=1, max_size=6))


def files(format_: str) -> Callable[[Path, int], Iterator[str | None]]:
    """Return the part of the soak that reads mutated files of a format, one a trial."""

    def part(folder: Path, seed: int) -> Iterator[str | None]:
        yield from chunks(__name__, [format_, str(folder)], seed, CHUNK)

    return part


def main() -> None:
    """Read mutated files; print a line of JSON for each: null, or a fault that was not seen before."""
    format_, folder, number, count = FORMATS[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    logging.disable(logging.WARNING)
    path, seen = folder / format_.name, set()
    format_.read(_written(path, format_.sound()[0]))  # loads what it needs
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + FILE_BYTES, used + FILE_BYTES))

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(mutations(format_.sound()), st.booleans())
    def read(content: bytes, sealed: bool) -> None:
        content = format_.seal(content) if sealed else content
        fault = fault_of(format_, _written(path, content))
        if fault is None or fault in seen:
            print("null", flush=True)
            return
        seen.add(fault)
        kept = folder / f"{hashlib.sha256(content).hexdigest()[:12]}-{path.name}"
        kept.write_bytes(content)
        print(json.dumps(f"{kept.name}: {fault}"), flush=True)

    read()


def _written(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def _yaml() -> list[bytes]:
    found = sorted((ROOT / "conf").rglob("*.yaml"), key=lambda path: path.stat().st_size)
    texts = [path.read_bytes() for path in found if path.stat().st_size < 4000]
    return [text for text in texts if b"_target_" not in text]  # files from elsewhere name no code


def _read_yaml(path: Path) -> None:
    from omegaconf import OmegaConf

    from cnnexp.app import config_security
    from cnnexp.app.composing import explain

    config_security.check_file(path)
    try:
        config = OmegaConf.load(path)
        if OmegaConf.is_dict(config):
            values = OmegaConf.to_container(config, resolve=False)
            config_security.check_placed(values, path)
            config_security.check_composed(values)
    except CnnexpError:
        raise
    except Exception as error:
        line = explain(error, list)
        if line is None:
            raise
        raise line from error


def _npz() -> list[bytes]:
    rng, found = np.random.default_rng(0), []
    for images, save in (((6, 4, 4), np.savez), ((6, 4, 4, 3), np.savez_compressed), ((6, 9), np.savez)):
        file = io.BytesIO()
        arrays = {"train_images": rng.random(images, np.float32), "train_labels": np.arange(6) % 3}
        arrays |= {"test_images": rng.integers(0, 255, images).astype(np.uint8), "test_labels": np.arange(6) % 3}
        save(file, **arrays)
        found.append(file.getvalue())
    return found


def _seal_zip(content: bytes) -> bytes:
    """Mend the checksums of a zip's members, as far as they can be found."""
    with_sums = bytearray(content)
    at = content.find(b"PK\x01\x02")
    while at >= 0 and at + 46 <= len(content):
        sizes = [int.from_bytes(content[at + i : at + i + n], "little") for i, n in ((20, 4), (28, 2), (42, 4))]
        packed, name, local = sizes
        start = local + 30 + sum(int.from_bytes(content[local + i : local + i + 2], "little") for i in (26, 28))
        body = content[start : start + packed]
        with_sums[at + 16 : at + 20] = zipfile.crc32(body).to_bytes(4, "little")
        at = content.find(b"PK\x01\x02", at + 46 + name)
    return bytes(with_sums)


def _read_npz(path: Path) -> None:
    from cnnexp.datasets import Npz

    Npz(path=str(path)).load()


def _idx() -> list[bytes]:
    images = np.arange(3 * 28 * 28, dtype=np.uint8).reshape(3, 28, 28)
    plain = (0x0803).to_bytes(4, "big") + b"".join(size.to_bytes(4, "big") for size in images.shape) + images.tobytes()
    return [plain]


def _read_idx(path: Path) -> None:
    from cnnexp.datasets.idx import read_idx

    read_idx(path, 3)


def _csv() -> list[bytes]:
    rows = [
        f"{i % 7},{' '.join(['7', '255', '0', '12'] * 576)},{usage}"
        for i, usage in enumerate(("Training", "PublicTest", "PrivateTest"))
    ]
    return ["\n".join(["emotion,pixels,Usage", *rows, ""]).encode()]


def _read_csv(path: Path) -> None:
    from cnnexp.datasets import Fer2013

    Fer2013(path=str(path), verify=False).load()


def _png() -> list[bytes]:
    from PIL import Image

    found = []
    for mode, form in (
        ("L", "PNG"),
        ("RGBA", "PNG"),
        ("P", "PNG"),
        ("RGB", "JPEG"),
        ("P", "GIF"),
        ("RGB", "BMP"),
        ("RGB", "TIFF"),
    ):
        file = io.BytesIO()
        Image.effect_noise((12, 9), 64).convert(mode).save(file, form)
        found.append(file.getvalue())
    return found


def _seal_png(content: bytes) -> bytes:
    """Mend the checksums of a PNG's chunks, as far as their lengths lead."""
    if not content.startswith(b"\x89PNG"):
        return content
    sealed, at = bytearray(content), 8
    while at + 12 <= len(content):
        end = at + 8 + int.from_bytes(content[at : at + 4], "big")
        if end + 4 > len(content):
            break
        sealed[end : end + 4] = zipfile.crc32(content[at + 4 : end]).to_bytes(4, "big")
        at = end + 4
    return bytes(sealed)


def _read_png(path: Path) -> None:
    from cnnexp.datasets.images import read_picture

    read_picture(path, "RGBA")


def _checkpoint() -> list[bytes]:
    import tempfile

    from cnnexp import SGD, Constant, Flatten, Linear, Loss, Network
    from cnnexp.training.checkpoint import CheckpointWriter, describe

    network = Network((3, 3, 1), (Flatten(), Linear(2)))
    training = describe(network, Loss.SOFTMAX_CROSS_ENTROPY, SGD(), 8, Constant(), 5, "0" * 64)
    with tempfile.TemporaryDirectory() as folder:
        state = {"parameters": np.arange(network.parameter_count, dtype=np.float32)}
        about = {"classes": ["a", "b"], "pixels": "uint8", "look": None}
        return [CheckpointWriter(Path(folder), training).save(state, about).read_bytes()]


def _seal_checkpoint(content: bytes) -> bytes:
    from cnnexp.training.checkpoint import DIGEST_END, MAGIC

    body = _seal_zip(content[DIGEST_END:])
    return MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _read_checkpoint(path: Path) -> None:
    from cnnexp.training.checkpoint import load

    load(path)
    from cnnexp.backends import backend_class
    from cnnexp.tracking.model import Classifier

    Classifier(path, backend_class("numpy")())


def _journal() -> list[bytes]:
    metrics = {"train/loss": 0.5, "test/accuracy": 0.5, "time/epoch_s": 1.0}
    epochs = [{"event": "epoch", "epoch": e, "metrics": metrics, "time_ms": e} for e in (1, 2)]
    config = {
        "tracking": {"name": "mlflow", "uri": None, "experiment": "x"},
        "trainer": {"baseline": "cpu", "target": None},
    }
    call = {"params": {"a": "1"}, "tags": {"b": "2"}, "dataset": None, "parent": None, "key": "k"}
    metrics = {"time/median_epoch_s": 1.0, "final/test_accuracy": 1}
    events = [
        {"event": "job", "name": "n", "overrides": ["model.filters=1"], "config": config, "config_hash": "0"},
        {"event": "begin", "name": "n", **call},
        {"event": "recorded", "run_id": "r"},
        *epochs,
        {"event": "finish", "status": "FINISHED", "tags": {"a": "true"}, "metrics": metrics, "time_ms": 3},
    ]
    return ["".join(json.dumps(event) + "\n" for event in events).encode()]


def _read_journal(path: Path) -> None:
    from cnnexp.app import sweep, sync
    from cnnexp.tracking.events import hash_in, read_journal

    hash_in(path)
    read_journal(path.parent)
    sound = path.parent.parent / "1" / path.name
    if not sound.exists():
        _written(sound, _journal()[0])
    found = sweep.rows(path.parent.parent)
    sweep.conclude(path.parent.parent, found)
    sweep.failures(found)
    list(sync._to_send([path.parent], all_of_them=True))


FORMATS = {
    "yaml": Format("x.yaml", _yaml, _read_yaml),
    "npz": Format("x.npz", _npz, _read_npz, _seal_zip),
    "idx": Format("x-idx3-ubyte", _idx, _read_idx),
    "idx.gz": Format("x-idx3-ubyte.gz", lambda: [gzip.compress(_idx()[0], mtime=0)], _read_idx),
    "csv": Format("x.csv", _csv, _read_csv),
    "png": Format("x.png", _png, _read_png, _seal_png),
    "checkpoint": Format("epoch-000000.ckpt", _checkpoint, _read_checkpoint, _seal_checkpoint),
    "journal": Format("0/journal.jsonl", _journal, _read_journal),
}

if __name__ == "__main__":
    main()
