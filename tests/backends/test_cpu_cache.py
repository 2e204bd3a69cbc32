"""Compiled code on disk: `cpu` and `cpu-parallel` share one cache, and what lies in it is not trusted unseen."""

import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
from fakes import Evil

from cnnexp import SGD, Adam, AvgPool2d, Conv2d, Flatten, LeakyReLU, Linear, MaxPool2d, Network, ReLU, Residual
from cnnexp.backends import cache, simd
from cnnexp.backends.cpu import dispatchers, kernels

SCRIPT = """
import sys
import numpy as np
from cnnexp import SGD, Linear, Loss, Network
from cnnexp.backends import backend_class
from cnnexp.backends.cpu import dispatchers

compiled = []
make = dispatchers.compiled_bytes
dispatchers.compiled_bytes = lambda *a: compiled.append(a) or make(*a)
network = Network((4,), (Linear(3),))
for name in sys.argv[1:]:
    program = backend_class(name)().compile(network, Loss.SOFTMAX_CROSS_ENTROPY, SGD(), 4)
    program.restore({"parameters": np.arange(network.parameter_count, dtype=np.float32) / 8})
    handle = program.load(np.arange(16, dtype=np.float32).reshape(4, 4) / 16, np.array([0, 1, 1, 0]))
    program.train(handle, np.arange(4), 0.1)
    print(program.state()["parameters"].tobytes().hex())
print(len(compiled))
"""


def computed(folder, *processes):
    """Return what processes that start at once print, one for each list of backends: how many kernels they compile,
    and the parameters that each backend ends with."""
    environ = {**os.environ, "XDG_CACHE_HOME": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([sys.executable, "-c", SCRIPT, *names], env=environ, **pipes) for names in processes]
    found = [process.communicate(timeout=300) for process in running]
    assert [(one.returncode, err) for one, (_, err) in zip(running, found, strict=True)] == [(0, "")] * len(found)
    return sum(int(out.split()[-1]) for out, _ in found), [line for out, _ in found for line in out.split()[:-1]]


def test_processes_share_an_empty_cache_and_damaged_files_alone_are_compiled_again(tmp_path):
    cold, parameters = computed(tmp_path, ["cpu"], ["cpu-parallel"])
    made = tmp_path / "cnnexp" / "compiled"
    files = sorted(made.iterdir())
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".bin"}
    assert 7 < len(files) <= cold  # the later may find what the earlier has made
    assert not [path for path in (made, *files) if path.stat().st_mode & 0o077]

    rng, damaged = np.random.default_rng(0), files[::2]
    for i, path in enumerate(damaged):
        content = bytearray(path.read_bytes())
        content[rng.integers(len(content))] ^= 1 << rng.integers(8)
        path.write_bytes(content if i % 3 else content[: rng.integers(len(content))])
    again, others = computed(tmp_path, ["cpu", "cpu-parallel"])
    assert again == len(damaged)
    assert len({*parameters, *others}) == 1
    assert sorted(made.iterdir()) == files
    assert None not in map(cache.read_private, files)


@pytest.mark.thorough
def test_processes_of_cpu_simd_that_start_at_once_share_the_cache(tmp_path):
    for _ in range(2):
        _, parameters = computed(tmp_path, ["cpu-simd"], ["cpu-simd"])
        assert len(set(parameters)) == 1
        files = [p for p in tmp_path.rglob("*") if p.is_file() and p.parent.name != "cpus"]
        assert len(files) == 2, "what trains, and what predicts"


def nothing(name):
    return kernels.Kernel(lambda x, y: None, "void(f4[::1], f4[::1])", f"nothing_{name}")


def run(kernel, monkeypatch):
    """Run a kernel that this process knows nothing of yet."""
    monkeypatch.setattr(dispatchers, "_ready", {})
    kernel.compiled(False)(np.zeros(1, np.float32), np.zeros(1, np.float32))


def test_without_a_home_everything_is_compiled(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", MagicMock(side_effect=RuntimeError("no home")))
    assert cache.cache_folder() is None
    run(nothing("homeless"), monkeypatch)


def planted(folder, payload):
    """Put a payload where the kernel `nothing_planted` would lie."""
    kernel = nothing("planted")
    name = key("cpu", "nothing_planted_sequential", signature=kernel._signature)
    path = folder / "cnnexp" / "compiled" / f"{name}.bin"
    cache.write_private(path, payload, cache.KEEP)
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
    run(kernel, monkeypatch)
    assert not (tmp_path / "marker").exists()


def test_a_whole_file_that_is_no_code_is_compiled_again(tmp_path, monkeypatch):
    kernel, path = planted(tmp_path, pickle.dumps("no code"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run(kernel, monkeypatch)
    assert path.stat().st_size > 200


def key(*described, signature="void()"):
    return cache.program_key(signature, described)


IMPORTED = """
import sys
import cnnexp.backends.cpu, cnnexp.backends.simd.runtime.step
for name, module in sys.modules.items():
    if name.startswith(("cnnexp.backends.", "cnnexp.network", "cnnexp.optimizers")):
        print(module.__file__)
"""


def test_every_file_that_a_kernel_is_made_by_tells_its_code_apart():
    found = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True).stdout
    imported = {Path(line) for line in found.splitlines() if "/backends/plain/" not in line}
    assert len(imported) > 40
    assert imported | set(Path(simd.__file__).parent.rglob("*.py")) < set(cache.source_files())


def test_the_cache_tells_programs_cpus_and_sources_apart(tmp_path, monkeypatch):
    known = key("a")
    found = {key("b"), key("a", signature="i8(i8)"), *(key(o) for o in (SGD(), SGD(momentum=0.5), Adam()))}
    changed = tmp_path / "step.py"
    changed.write_text("# changed")
    for name, value in (("host", ("x86_64", "another", "+sse2")), ("source_files", [changed])):
        with monkeypatch.context() as patch:
            patch.setattr(cache, name, lambda value=value: value)
            found.add(key("a"))
    assert len(found - {known}) == 7
    assert key("a") == known


PLUGINS = """
SLOPE = {}; rule = lambda x: SLOPE * x
SLOPES = (1, {}); rule = lambda x: (lambda: SLOPES[1])() * x
half = lambda x: {} * x; rule = lambda x: half(x)
def rule(x, slope={}): return slope * x
def rule(x, *, slope={}): return slope * x
def rule(x): return rule(x) * {}
import types; a = types.ModuleType("a"); a.slope, a.a = {}, a; rule = lambda x: a.a.slope * x
s = type("Layer", (), {{"slope": lambda s: {}, "__repr__": lambda s: ""}})(); rule = (lambda s: lambda x: s.slope())(s)
"""


@pytest.mark.parametrize("source", PLUGINS.split("\n")[1:-1])
def test_code_is_told_apart_by_all_that_a_rule_of_a_plugin_reads(source):
    def told(number):
        space = {}  # nor has what is executed a module
        exec(source.format(number), space)
        return repr(cache.code_of(space["rule"]))

    assert told(0.1) == told(0.1) != told(0.2)
    assert " at 0x" not in told(0.1)


def test_the_cache_forgets_what_was_not_used_for_longest(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "KEEP", 3)
    for age, name in enumerate("dcba"):
        cache.write_private(tmp_path / f"{name}.bin", b"code", cache.KEEP)
        os.utime(tmp_path / f"{name}.bin", (1000 + age, 1000 + age))
    (tmp_path / f"half-written{cache.MAKING}").write_bytes(b"co")
    os.utime(tmp_path / f"half-written{cache.MAKING}", (1000, 1000))
    cache.write_private(tmp_path / "e.bin", b"code", cache.KEEP)
    assert {p.stem for p in tmp_path.iterdir()} == {"a", "b", "e"}


@dataclasses.dataclass(frozen=True)
class BakedRate(SGD):
    def rule(self, sqrt=np.sqrt, maximum=np.maximum):
        rate = np.float32(self.lr)
        return lambda w, g, s, t, given, c0, c1: (w - rate * g, s, t)


@pytest.mark.parametrize(("optimizer", "programs"), [(SGD, 1), (BakedRate, 2)])
def test_learning_rates_share_code_unless_the_rule_holds_one(optimizer, programs):
    assert len({key(optimizer(lr=lr)) for lr in (0.1, 0.2)}) == programs


def test_networks_of_the_same_shapes_do_not_take_each_others_code():
    relu, pool = ReLU(), MaxPool2d(2)
    between = (relu, pool), (pool, relu), (relu, AvgPool2d(2)), (relu, MaxPool2d(2, padding="auto"))
    between += (Residual((relu,)), pool), (LeakyReLU(0.5), pool), (LeakyReLU(0.4), pool)
    networks = [Network((8, 8, 1), (Conv2d(4, 3), *layers, Flatten(), Linear(3))) for layers in between]
    assert len(set(map(repr, networks))) == 1
    assert len(set(map(key, networks))) == len(networks)
