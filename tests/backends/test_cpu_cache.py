"""Compiled code on disk: `cpu` and `cpu-parallel` share one cache, and what lies in it is not trusted unseen."""

import dataclasses
import hashlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cnnexp.backends import cache
from cnnexp.backends.cpu import dispatchers, kernels
from cnnexp.network import (
    AvgPool2d,
    Conv2d,
    Flatten,
    LeakyReLU,
    Linear,
    MaxPool2d,
    Network,
    ReLU,
    Residual,
)
from cnnexp.optimizers import SGD, Adam

SCRIPT = """
import sys
import numpy as np
from cnnexp.backends import backend_class
from cnnexp.backends.cpu import dispatchers
from cnnexp.network.losses import Loss
from cnnexp.network import Linear, Network, ReLU
from cnnexp.optimizers import SGD

compiled = []
make = dispatchers.compiled_bytes
dispatchers.compiled_bytes = lambda *a: compiled.append(a) or make(*a)
network = Network((4,), (Linear(3), ReLU(), Linear(2)))
program = backend_class(sys.argv[1])().compile(network, Loss.SOFTMAX_CROSS_ENTROPY, SGD(), 4)
program.restore({"parameters": np.arange(network.parameter_count, dtype=np.float32) / 8})
handle = program.load(np.arange(16, dtype=np.float32).reshape(4, 4) / 16, np.array([0, 1, 1, 0]))
program.train(handle, np.arange(4), 0.1)
print(len(compiled), program.state()["parameters"].tobytes().hex())
"""


def start(backend, folder):
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, backend],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outputs(processes):
    found = [process.communicate(timeout=300) for process in processes]
    assert [(process.returncode, err) for process, (_, err) in zip(processes, found, strict=True)] == [
        (0, "") for _ in processes
    ]
    return [(int(out.split()[0]), out.split()[1]) for out, _ in found]


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache that `cpu` and `cpu-parallel` have filled together, and what they computed, cold and warm."""
    folder, names = tmp_path_factory.mktemp("cache"), ["cpu", "cpu-parallel"]
    cold = outputs([start(name, folder) for name in names])
    warm = outputs([start(name, folder) for name in names])
    return folder, cold, warm


def test_processes_share_an_empty_cache_and_compile_nothing_twice(filled):
    folder, cold, warm = filled
    assert sum(count for count, _ in cold) > 10  # the later may find what the earlier has made
    assert [count for count, _ in warm] == [0, 0]
    assert len({parameters for _, parameters in cold + warm}) == 1
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".bin"}
    for made in (folder / "cnnexp" / "compiled", *(folder / "cnnexp" / "compiled").iterdir()):
        assert made.stat().st_mode & 0o077 == 0


def test_damaged_files_are_compiled_again(filled):
    folder, cold, _ = filled
    rng = np.random.default_rng(0)
    files = sorted((folder / "cnnexp" / "compiled").iterdir())
    for i, path in enumerate(files):
        content = bytearray(path.read_bytes())
        content[rng.integers(len(content))] ^= 1 << rng.integers(8)
        path.write_bytes(content if i % 3 else content[: rng.integers(len(content))])
    ((count, parameters),) = outputs([start("cpu", folder)])
    assert count > 5
    assert parameters == cold[0][1]


def tripled(key):
    return kernels.Kernel(lambda x, y: None, "void(f4[::1], f4[::1])", f"nothing_{key}")


def test_without_a_home_everything_is_compiled(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert cache.cache_folder() is None
    monkeypatch.setattr(dispatchers, "_ready", {})
    tripled("homeless").compiled(False)(np.zeros(1, np.float32), np.zeros(1, np.float32))


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def planted(folder, payload):
    """Put a payload where the kernel `nothing_planted` would lie."""
    kernel = tripled("planted")
    key = cache.program_key(dispatchers.signature_of(kernel._signature), ("cpu", "nothing_planted_sequential"))
    path = folder / "cnnexp" / "compiled" / f"{key}.bin"
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_bytes(hashlib.sha256(payload).digest() + payload)
    path.chmod(0o600)
    return kernel, path


@pytest.mark.skipif(os.name != "posix", reason="owners and modes are of POSIX systems")
@pytest.mark.parametrize("way", ["folder mode", "file mode", "file owner", "folder owner", "pipe"])
def test_what_others_may_have_written_is_not_read(tmp_path, monkeypatch, way):
    kernel, path = planted(tmp_path, pickle.dumps(Evil(tmp_path / "marker")))
    if way == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif way.endswith("mode"):
        (path if way == "file mode" else path.parent).chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(path if way == "file owner" else path.parent, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(dispatchers, "_ready", {})
    kernel.compiled(False)(np.zeros(1, np.float32), np.zeros(1, np.float32))
    assert not (tmp_path / "marker").exists()


def test_a_whole_file_that_is_no_code_is_compiled_again(tmp_path, monkeypatch):
    kernel, path = planted(tmp_path, pickle.dumps("no code"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(dispatchers, "_ready", {})
    kernel.compiled(False)(np.zeros(1, np.float32), np.zeros(1, np.float32))
    assert path.stat().st_size > 200


def test_updates_of_several_optimizers_do_not_take_each_others_code(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keys = {cache.program_key(dispatchers.signature_of("void()"), (o,)) for o in (SGD(), SGD(momentum=0.5), Adam())}
    assert len(keys) == 3


@dataclasses.dataclass(frozen=True)
class BakedRate(SGD):
    def rule(self, sqrt=np.sqrt, maximum=np.maximum):
        rate = np.float32(self.lr)
        return lambda w, g, s, t, given, c0, c1: (w - rate * g, s, t)


@pytest.mark.parametrize(("optimizer", "programs"), [(SGD, 1), (BakedRate, 2)])
def test_learning_rates_share_code_unless_the_rule_holds_one(optimizer, programs):
    keys = {cache.program_key(dispatchers.signature_of("void()"), (optimizer(lr=lr),)) for lr in (0.1, 0.2)}
    assert len(keys) == programs


@pytest.mark.parametrize(
    "changed",
    [
        (Conv2d(4, 3), ReLU(), AvgPool2d(2), Flatten(), Linear(3)),
        (Conv2d(4, 3), MaxPool2d(2), ReLU(), Flatten(), Linear(3)),
        (Conv2d(4, 3), ReLU(), MaxPool2d(2, padding="auto"), Flatten(), Linear(3)),
        (Conv2d(4, 3), Residual((ReLU(),)), MaxPool2d(2), Flatten(), Linear(3)),
        (Conv2d(4, 3), LeakyReLU(0.5), MaxPool2d(2), Flatten(), Linear(3)),
    ],
)
def test_networks_of_the_same_shapes_do_not_take_each_others_code(changed):
    first, second = (
        Network((8, 8, 1), layers) for layers in ((Conv2d(4, 3), ReLU(), MaxPool2d(2), Flatten(), Linear(3)), changed)
    )
    assert repr(first) == repr(second)
    keys = {cache.program_key(dispatchers.signature_of("void()"), (network,)) for network in (first, second)}
    assert len(keys) == 2
