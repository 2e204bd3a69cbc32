"""Names that config calls classes by, and plugins: a user's own pieces, in one file outside the package."""

import importlib.util
import re
import sys
from dataclasses import dataclass

import numpy as np
import pytest
from checkpoints import saved
from commands import ROOT, cnnexp, raises
from tables import each

import softgpu
from cnnexp import __main__ as cli
from cnnexp.backends import BACKENDS
from cnnexp.errors import ConfigError, explained
from cnnexp.network import LAYERS, Flatten, Linear
from cnnexp.network.models import Model
from cnnexp.optimizers import OPTIMIZERS, SGD
from cnnexp.system import registry
from cnnexp.system.registry import Registry, register
from cnnexp.testing import check_layer
from cnnexp.tracking.events import read_journal
from cnnexp.tracking.model import Classifier

OUTSIDE = ROOT / "tests" / "outside.py"
pytestmark = pytest.mark.usefixtures("no_plugins")
TINY = ("tracking=none", "trainer.baseline=null", "trainer.epochs=2", "trainer.batch_size=8", "trainer.progress=false")


@dataclass(frozen=True)
class Mine(SGD):
    pass


def test_a_registered_class_is_found_beside_ours_and_two_may_not_share_a_name():
    assert register("optimizer", "mine")(Mine) is Mine
    assert OPTIMIZERS["mine"] is OPTIMIZERS.find("mine", "optimizer.name") is Mine
    assert list(OPTIMIZERS)[-1] == "mine"
    assert len(OPTIMIZERS) == len(list(OPTIMIZERS))
    register("optimizer", "mine")(Mine)  # the same file, loaded again
    for taken in (lambda: register("optimizer", "mine")(SGD), lambda: Registry("optimizer", {"mine": SGD})):
        raises(ConfigError, r"'mine'\): the name is taken", taken)


@each(
    ("optimiser", "x", Mine, "register\\('optimiser'\\): unknown; legal: model, .*; did you mean 'optimizer'"),
    ("optimizer", "sgd", Mine, "'sgd'\\): the name is taken"),
    ("optimizer", "x", int, "int must be a dataclass"),
    ("layer", "x", Mine, "must be called as its class, 'Mine'"),
)
def test_what_cannot_be_registered(group, name, cls, message):
    raises(ConfigError, message, lambda: register(group, name)(cls))


def test_an_unknown_name_says_what_is_legal():
    said = r"backend.name='cpu-smd': unknown; legal: python, .*; did you mean 'cpu-simd'"
    raises(ConfigError, said, BACKENDS.find, "cpu-smd", "backend.name")
    raises(ConfigError, r"backend\.name=null: unknown", BACKENDS.find, None, "backend.name")


def test_the_documented_plugin_does_what_it_says(tmp_path):
    texts = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8"), re.DOTALL)
    file, layer, structural = (tmp_path / text.partition("\n")[0].removeprefix("# ") for text in texts)
    for plugin, text in zip((file, layer, structural), texts, strict=True):
        plugin.write_text(text, encoding="utf-8")
    registry.take_plugins([f"plugins={layer}"])
    assert registry.files("layer") == {"Swish": str(layer)}
    check_layer(LAYERS["Swish"](1.5))
    assert registry.take_plugins([f"plugins={file}", "optimizer=momentum_sign"]) == ["optimizer=momentum_sign"]
    registry.take_plugins([f"plugins={structural}"])
    folded = LAYERS["SpaceToDepth"](2)
    x = np.arange(16, dtype=np.float32).reshape(1, 4, 4, 1)
    assert folded.forward(x)[0, 0, 0].tolist() == [0, 1, 4, 5]
    assert folded.backward(x, None, folded.forward(x)).tolist() == x.tolist()
    w, momentum = np.zeros(3, np.float32), np.zeros(3, np.float32)
    OPTIMIZERS["momentum_sign"]().apply(w, np.array([2, -1, 0], np.float32), [momentum], 0.5, 1)
    assert (w.tolist(), momentum.tolist()) == ([-0.5, 0.5, 0], pytest.approx([0.2, -0.1, 0]))


def test_own_fields_of_a_plugin_need_no_range_of_ours():
    @dataclass(frozen=True)
    class Shifted(Model):
        shift: int = -2

    @dataclass(frozen=True)
    class Slow(SGD):
        beta: float = -3.0
        kind: str = "slow"

    assert (Shifted().shift, Shifted(shift=5).shift, Slow().beta) == (-2, 5, -3.0)
    raises(ConfigError, r"model\.shift=-3: must be a whole number >= -2", Shifted, shift=-3)
    raises(ConfigError, r"optimizer\.lr=-1: must be > 0", Slow, lr=-1)


def test_what_a_plugins_code_raises_names_its_file(tmp_path):
    file = tmp_path / "clumsy.py"
    lines = ("from cnnexp.optimizers import SGD", "from dataclasses import dataclass", "from cnnexp import register")
    own = ('@register("optimizer", "clumsy")', "@dataclass(frozen=True)", "class Clumsy(SGD):")
    file.write_text("\n".join([*lines, *own, "    def __post_init__(self):", "        int('two\\nlines')"]))
    registry.load(str(file))
    with pytest.raises(ValueError, match="invalid literal") as raised:
        OPTIMIZERS["clumsy"]()
    said = r"plugin clumsy\.py: ValueError: invalid .* \(Clumsy\.__post_init__, line 8\); its traceback is in \S+"
    assert re.fullmatch(said, str(explained(raised.value, tmp_path)))


@pytest.mark.thorough
def test_one_of_each_kind_from_one_file_outside_the_package(tmp_path, monkeypatch):
    """On the command line of a sweep, on every kind of CPU backend and on the software GPU: the same numbers."""
    own = ("model=wide", "optimizer=sign", "dataset=stripes", "model.hidden=20", *TINY)
    backends = "backend=mine,python,numpy,cpu,cpu-parallel,cpu-simd"
    done = cnnexp("-m", f"plugins=[{OUTSIDE}]", *own, backends, f"hydra.sweep.dir={tmp_path}/sweep", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    journals = [read_journal(tmp_path / "sweep" / job) for job in "012345"]
    if importlib.util.find_spec("numba_cuda") and not softgpu.unavailable():
        for variable, value in softgpu.SoftGpu().environment().items():
            monkeypatch.setenv(variable, value)
        settings = (*own, "backend=gpu-naive", f"hydra.run.dir={tmp_path}/gpu")
        done = cnnexp(f"plugins=[{OUTSIDE}]", *settings, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        journals.append(read_journal(tmp_path / "gpu"))
    losses = [[epoch["train/loss"] for epoch in journal["epochs"]] for journal in journals]
    assert losses[0][1] < losses[0][0]
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-4)] * len(losses[1:])
    config = journals[0]["config"]
    assert config["model"] == {"name": "wide", "hidden": 20}
    assert config["optimizer"] == {"name": "sign", "lr": 0.001, "weight_decay": 0.0, "decay_biases": True}
    assert journals[0]["begin"]["tags"]["plugins"] == str(OUTSIDE)


def test_workers_and_a_stored_model_know_the_plugin_too(monkeypatch, capsys, tmp_path):
    layers = "[{type: Flatten}, {type: Linear, features: 8}, {type: Swish, beta: 1.5}, {type: Linear, features: 2}]"
    own = ("model=custom", f"model.layers={layers}", "optimizer=sign", "dataset=stripes", "backend=mine")
    done = cnnexp(f"plugins={OUTSIDE}", *own, *TINY, "workers=local", f"hydra.run.dir={tmp_path}/run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_journal(tmp_path / "run")["status"] == "FINISHED"
    monkeypatch.setattr(sys, "argv", ["cnnexp", "predict", f"{tmp_path}/run", "dataset=digits"])
    with pytest.raises(SystemExit):
        cli.main()
    said = f"layer Swish: of a plugin that is not loaded; add plugins={OUTSIDE}, or set CNNEXP_PLUGINS={OUTSIDE}"
    assert capsys.readouterr().err == f"cnnexp: error: {said}\n"
    sys.argv[1:] = ["predict", f"{tmp_path}/run", "dataset=stripes", f"plugins={OUTSIDE}"]
    cli.main()
    assert "test accuracy " in capsys.readouterr().out


def test_the_advice_names_the_layer_that_the_model_has(tmp_path):
    registry.load(str(OUTSIDE))
    layers, plugins = (Flatten(), LAYERS["Swish"](1.5), Linear(3)), {"Other": "other.py", "Swish": "swish.py"}
    path, _ = saved(tmp_path, layers, plugins=plugins)
    registry._added["layer"].clear()
    raises(ConfigError, "^layer Swish: .*; add plugins=swish.py,", Classifier, path, BACKENDS["numpy"]())


def test_an_installed_package_offers_its_plugin_by_an_entry_point(run, tmp_path, monkeypatch):
    about = tmp_path / "site" / "outside-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[cnnexp_plugins]\noutside = outside\n")
    (tmp_path / "site" / "outside.py").write_text(OUTSIDE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "site")
    code, out, err = run("--cfg", "job", "optimizer=sign")
    assert (code, err) == (0, "")
    assert "name: sign\n" in out
    assert re.search(r"optimizer=sine: unknown; legal: .*did you mean 'sign'", run("--cfg", "job", "optimizer=sine")[2])
