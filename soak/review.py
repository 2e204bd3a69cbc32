"""Commands that once ended in a traceback, a hang or memory that nobody has: one line, in seconds, or the right end."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from soak.commands import UNEXPECTED, Done
from soak.faults import forked

MOST_S, MOST_BYTES = 5.0, 1 << 30  # of computing: a busy machine may keep a command waiting
TINY = ("experiment=smoke", "backend=numpy", "tracking=none", "trainer.baseline=null", "trainer.epochs=1")
PLAIN = TINY[1:]  # on the data set that the case names
RECORDED = tuple(word for word in TINY if word != "tracking=none")


@dataclass(frozen=True)
class Case:
    """A command line, the exit code it must have, and what its line must say; `environ` is set beside it."""

    words: tuple[str, ...]
    code: int
    says: str = ""
    environ: dict[str, str] = field(default_factory=dict)


def tiny(*words: str, code: int = 2, says: str = "") -> Case:
    """Return the smallest run with some words more."""
    return Case((*TINY, *words), code, says)


CASES = (
    # numbers that no machine has room for, or that no whole number of the compiled code holds
    tiny("trainer.batch_size=9223372036854775808", says="trainer.batch_size=9223372036854775808: must be"),
    tiny("trainer.batch_size=999999999999999", code=4, says="trainer.batch_size"),
    tiny("optimizer.lr=1" + "0" * 400, says="optimizer.lr"),
    tiny("trainer.seed=9223372036854775808", says="trainer.seed"),
    tiny("trainer.epochs=1e9", says="trainer.epochs"),
    tiny("model.filters=2000000000", code=4, says="of memory"),
    tiny("model.padding=100000", code=4, says="of memory"),
    tiny("workers=local", "workers.count=500", code=4, says="lower workers.count"),
    tiny("dataset.train_size=1000000000000", code=4, says="of memory"),
    # values of another type
    tiny("model.name=[1]", says="model.name=[1]"),
    Case((*PLAIN, "model=custom", "model.layers=[{type: [1]}]"), 2, "model.layers[0].type=[1]"),
    tiny("trainer=null", says="trainer=null: must be a name"),
    tiny("model=null", says="model=null: must be a name"),
    tiny("trainer.progress=maybe", says="trainer.progress"),
    tiny("dataset=[1]", says="dataset=[1]"),
    # places
    tiny("hydra.run.dir=FILE/below", code=1, says="Not a directory"),
    tiny("hydra.run.dir=/proc/cnnexp", code=1, says="/proc/cnnexp"),
    tiny("hydra.run.dir=LOOP/run", code=1, says="oo many levels of symbolic links"),
    tiny("hydra.run.dir=" + "x" * 300, code=1, says="File name too long"),
    Case((*PLAIN, "dataset=mnist", "dataset.root='~nosuchuser/x'"), 2, "nosuchuser"),
    Case((*PLAIN, "dataset=npz", "dataset.path=FIFO"), 3, "not a regular file"),
    Case((*PLAIN, "dataset=npz", "dataset.path=/dev/zero"), 3, "not a regular file"),
    Case((*PLAIN, "dataset=npz", "dataset.path=LABELS"), 3, "train_labels"),
    Case((*PLAIN, "dataset=npz", "dataset.path=SCALARS"), 3, "labels are a single number"),
    Case((*PLAIN, "dataset=npz", "dataset.path=OBJECTS"), 3, "pickled data refused"),
    tiny("trainer.resume=nowhere", code=6, says="no such file or folder"),
    tiny("trainer.resume=FILE", code=6, says="not a checkpoint"),
    # stores
    Case((*RECORDED, "tracking.uri='sqlite:///FOLDER/[a]/m.db'"), 0),
    Case((*RECORDED, "tracking.uri='http://[::1'"), 2, "tracking.uri"),
    Case((*RECORDED, "tracking.uri='http://[x]/y'"), 2, "tracking.uri"),
    Case((*RECORDED, "tracking.uri=http://127.0.0.1:9"), 5, "refused"),
    Case((*RECORDED, "tracking.uri=http://127.0.0.1:99999"), 2, "Port out of range"),
    Case((*RECORDED, "tracking.uri='sqlite:///:memory:'"), 2, "names no file"),
    Case((*RECORDED, "tracking.uri=sqlite:///FILE"), 5, "not a database"),
    Case((*RECORDED, "tracking.experiment=''"), 2, "tracking.experiment"),
    # sweeps
    tiny("-m", "model.filters=range(5,5)", says="no value"),
    tiny("-m", "model.filters=", code=1, says="model.filters='': must be a whole number"),
    tiny("-m", "model.filters=1,1,2", says="given twice"),
    # other commands
    Case(("ui", "port=99999999"), 2, "port"),
    Case(("ui", "tracking.uri=sqlite:///:memory:"), 2, "names no file"),
    Case(("predict", "nowhere", "x.png"), 6, "no such file or folder"),
    Case(("predict", "FILE", "x.png"), 6, "not a checkpoint"),
    Case(("predict", "nowhere", "dataset=[1]"), 2, "=[1]: unknown"),
    Case(("report", "nowhere"), 2, "nowhere"),
    Case(("sync", "nowhere"), 2, "no such folder"),
    Case(("frobnicate",), 2, "no such command"),
    Case(("--experimental-rerun", "FILE"), 2, "unpickles"),
    tiny("+hydra.callbacks.x._target_=shutil.copyfile", says="refused"),
    tiny("+hydra.callbacks.x._target_=builtins.open", says="refused"),
    # config files
    Case(("--config-dir", "BOMB", *TINY[1:], "experiment=bomb"), 2, "aliases"),
    Case(("--config-dir", "BOMB", *TINY[1:], "experiment=latin"), 2, "latin.yaml: not UTF-8"),
    Case(("--config-dir", "BOMB", *TINY[1:], "experiment=deep"), 2, "deep.yaml: "),
    Case(("--config-dir", "BOMB", *TINY[1:], "experiment=list"), 2, "experiment=[1, 2]: unknown key"),
    # environments
    Case(TINY, 0, environ={"OMPI_COMM_WORLD_RANK": "0"}),
    Case(TINY, 2, "OMPI_COMM_WORLD_RANK", {"OMPI_COMM_WORLD_RANK": "x"}),
    Case((*TINY, "backend=cpu"), 4, "NUMBA_DISABLE_JIT", {"NUMBA_DISABLE_JIT": "1"}),
    Case(TINY, 0, environ={"HOME": "/nonexistent"}),
    # what is legal
    tiny("optimizer.lr=1e38", "trainer.batch_size=40", "dataset.train_size=40", code=7, says="loss became"),
    tiny("-m", "model.filters=1,2", code=0),
    tiny("model.filters=1", "-m", "trainer.seed=1,2", code=0),
)


def review(folder: Path, seed: int) -> Iterator[str | None]:
    """Run every command once, each in a child of a process that has all loaded."""
    from cnnexp.app import hydra_app  # noqa: F401 - so that children have it

    places = _places(folder / "places")
    for number, case in enumerate(CASES):
        here = folder / str(number)
        here.mkdir()
        words = [_placed(word, places) for word in case.words]
        done = forked(here, lambda words=words, case=case, here=here: run_case(words, case, here))
        used = json.loads((here / "used.json").read_text()) if (here / "used.json").exists() else [0, 0]
        fault = fault_of(case, done, *used)
        yield None if fault is None else f"{' '.join(case.words)[:150]}: {fault}"


def fault_of(case: Case, done: Done, cpu_s: float, bytes_: int) -> str | None:
    """Return what is wrong with how a case ended."""
    if fault := done.fault:
        return fault
    if done.code != case.code:
        return f"exit code {done.code}, not {case.code}: {done.err[-300:]}"
    if case.code and (case.says not in done.err or UNEXPECTED in done.err):
        return f"does not say {case.says!r}: {done.err[-400:]}"
    if case.code and cpu_s > MOST_S:
        return f"took {cpu_s:.1f} s"
    return f"took {bytes_} bytes" if bytes_ > MOST_BYTES else None


def run_case(words: list[str], case: Case, here: Path) -> None:
    """Run a command line in this process, as if typed in a folder; note the seconds and bytes that it takes."""
    from cnnexp.__main__ import main

    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    os.environ.update(case.environ)
    os.chdir(here)
    ours = [] if words[0] in ("ui", "predict", "report", "sync", "frobnicate") else [f"hydra.sweep.dir={here}/sweep"]
    if ours and not any(word.startswith("hydra.run.dir") for word in words):
        ours.append(f"hydra.run.dir={here}/run")
    sys.argv = ["cnnexp", *words, *ours]
    try:
        main()
    finally:
        used = resource.getrusage(resource.RUSAGE_SELF)
        (here / "used.json").write_text(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 - before]))


def _placed(word: str, places: dict[str, Path]) -> str:
    for name, path in places.items():
        word = word.replace(name, str(path)) if name in word and "COMM" not in word else word
    return word


def _places(folder: Path) -> dict[str, Path]:
    """Make the files that the cases name."""
    (folder / "bomb" / "experiment").mkdir(parents=True)
    (folder / "file").write_text("no checkpoint, no database\n" * 100)
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "fifo")
    images = np.zeros((4, 3, 3), np.float32)
    sets = {"labels.npz": np.array([0, 1, 2, 10**12]), "SCALARS.npz": np.array(3), "OBJECTS.npz": np.array([{}] * 4)}
    for name, labels in sets.items():
        with (folder / name).open("wb") as file:
            np.savez(file, train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    experiments = folder / "bomb" / "experiment"
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    (experiments / "bomb.yaml").write_text("\n".join(lines))
    (experiments / "latin.yaml").write_bytes("# @package _global_\nmodel: {name: é}\n".encode("latin-1"))
    (experiments / "deep.yaml").write_text("a: " + "[" * 5000 + "]" * 5000)
    (experiments / "list.yaml").write_text("- 1\n- 2\n")
    return {
        **{"FILE": folder / "file", "LOOP": folder / "loop", "FIFO": folder / "fifo", "BOMB": folder / "bomb"},
        **{"LABELS": folder / "labels.npz", "SCALARS": folder / "SCALARS.npz", "OBJECTS": folder / "OBJECTS.npz"},
        "FOLDER": folder,
    }
