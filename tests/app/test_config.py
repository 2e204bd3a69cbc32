import dataclasses
import inspect
import math
import re
from typing import Any, Literal, get_type_hints

import pytest
from commands import ROOT, raises
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tables import each

from cnnexp import Baseline, Constant, Cosine, Step, TrainingPlan
from cnnexp.app.config import Sweep, Tracking, Trainer, build, convert, defaults, load, plain, record
from cnnexp.backends import BACKENDS
from cnnexp.datasets import DATASETS
from cnnexp.errors import BackendUnavailable, ConfigError, NetworkError
from cnnexp.network import BatchNorm2d, Conv2d, Dropout, Flatten, LeakyReLU, Linear, Network, Residual, Tanh
from cnnexp.network.models import MODELS, Custom, Ffn
from cnnexp.optimizers import OPTIMIZERS
from cnnexp.training.augment import AUGMENTATIONS
from cnnexp.workers import WORKERS

CONF = ROOT / "conf"
VALUES = {
    "model": {"name": "one_conv", "filters": 8},
    "backend": {"name": "numpy"},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "dataset": {"name": "digits"},
    "trainer": {"epochs": 2, "baseline": None},
    "workers": {"name": "none"},
    "tracking": {"name": "none"},
    "sweep": {},
}


def changed(section: str, **values: Any) -> dict[str, Any]:
    return {**VALUES, section: {**VALUES[section], **values}}


def custom(**layer: Any) -> dict[str, Any]:
    return {**VALUES, "model": {"name": "custom", "layers": [layer]}}


@each(
    (changed("model", filers=3), "model.filers=3: unknown key; legal: filters, kernel, pool, padding; did you"),
    (changed("model", name="onconv"), "model.name='onconv': unknown; legal: one_conv, .*; did you mean 'one_conv'"),
    (changed("backend", threads=2), "backend.threads=2: unknown key; legal: none"),
    (changed("model", filters="abc"), "model.filters='abc': must be a whole number"),
    (changed("model", filters=True), "model.filters=true: must be a whole number"),
    (changed("model", filters=2**63), r"model.filters=9223372036854775808: must be a whole number .* 2\*\*63 "),
    ({**VALUES, "augment": {"crop": {}}}, "augment.crop={}: unknown key; legal: shift, crop_flip, affine, elastic"),
    ({**VALUES, "augment": {"affine": {"rotations": 3}}}, "augment.affine.rotations=3: unknown key; .*'rotation'"),
    ({**VALUES, "augment": {"cutout": 4}}, "augment.cutout=4: must be a mapping of keys to values"),
    ({**VALUES, "augment": {"shift": {"pixels": 1.5}}}, "augment.shift.pixels=1.5: must be a whole number"),
    (changed("model", filters=10**400), r"model.filters=10{199}\.\.\.: must be a whole number of at most"),
    (changed("model", filters=10**5000), "model.filters=a number of thousands of digits: must be a whole number"),
    (changed("optimizer", lr=10**400), r"optimizer.lr=10{199}\.\.\.: must be a finite number"),
    ({**VALUES, "model": {"name": "ffn", "hidden": [3, "4"]}}, r"model.hidden\[1\]='4': must be a whole number"),
    ({**VALUES, "model": {"name": "ffn", "hidden": 5}}, "model.hidden=5: must be a list, each a whole number"),
    ({**VALUES, "model": {"name": "ffn", "hidden": [3, 0]}}, "model.hidden=0: must be"),
    (changed("model", padding="sane"), "model.padding='sane': must be one of valid, same, .* did you mean 'same'"),
    (changed("optimizer", lr=math.nan), "optimizer.lr=nan: must be a finite number"),
    (changed("optimizer", nesterov=1), "optimizer.nesterov=1: must be true or false"),
    (changed("optimizer", nesterov=True), "optimizer.nesterov=true: needs optimizer.momentum > 0"),
    (changed("trainer", milestones=[0]), "trainer.milestones=0: must be >= 1"),
    (changed("trainer", class_weights=[1.0, 0.0]), "trainer.class_weights=0.0: must be > 0"),
    (changed("trainer", class_weights="balance"), "trainer.class_weights='balance': .* did you mean 'balanced'"),
    (changed("tracking", experiment=""), "tracking.experiment='': must be 1 .. 256 characters"),
    (changed("tracking", run_name=7), "tracking.run_name=7: must be a text or null"),
    (changed("model", _target_="os.system"), "model._target_='os.system': unknown key"),
    ({**VALUES, "plugins": ["own.py"]}, "plugins: refused in a config file"),
    ({**VALUES, "extra": 1}, "extra=1: unknown key; legal: model, backend"),
    ({**VALUES, "model": "one_conv"}, "model='one_conv': must be a mapping"),
    ({key: VALUES[key] for key in VALUES if key != "model"}, "model is missing"),
    (custom(type="Residual", layers=[{"type": "Tanh", "slope": 1}]), r"\[0\].layers\[0\].slope=1: unknown key; legal"),
    (custom(type="conv3d"), r"model.layers\[0\].type='conv3d': unknown; legal: Conv2d, ReLU"),
    (custom(type="RelU"), r"did you mean 'ReLU'"),
    (custom(filters=3), r"model.layers\[0\]=.*: must be a mapping with a type, one of Conv2d"),
    (custom(type="Conv2d"), r"model.layers\[0\].filters is missing"),
    (custom(type="Linear", features=3, bias=0), r"model.layers\[0\].bias=0: must be true or false"),
    (custom(type="Flatten", stride=1), r"model.layers\[0\].stride=1: unknown key; legal: none"),
)
def test_mistakes_are_one_line_that_says_what_is_legal(values, message):
    raises(ConfigError, message, load, values)


def test_layers_and_lists_from_plain_values():
    inner = [{"type": "LeakyReLU", "slope": 0.2}, {"type": "Residual", "layers": [{"type": "Tanh"}]}]
    layers = [{"type": "Conv2d", "filters": 8, "kernel": 5}, {"type": "Residual", "layers": inner}, {"type": "Flatten"}]
    made = build(Custom, {"layers": layers}, "model").layers
    assert made == (Conv2d(8, 5), Residual((LeakyReLU(0.2), Residual((Tanh(),)))), Flatten())
    assert build(Ffn, {"hidden": [3, 4]}, "model").hidden == (3, 4)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers(), max_size=2)


@given(value=SCALARS, hint=st.sampled_from([int, float, bool, str, int | None, Literal["a", "b"], str | int]))
def test_convert_returns_the_value_unchanged_or_raises(value, hint):
    try:
        converted = convert(value, hint, "key")
    except ConfigError:
        return
    assert converted == (float(value) if hint is float else value)
    assert hint is float or type(converted) is type(value)


def test_plain_resolves_and_record_keeps_the_environment_unread(monkeypatch):
    monkeypatch.setenv("CNNEXP_TEST_SECRET", "hush")
    uri = "http://${oc.env:CNNEXP_TEST_SECRET}@host"
    config = OmegaConf.create({"tracking": {"uri": uri}, "copy": "${list}", "list": [1, "${n}"], "n": 2})
    assert plain(config)["tracking"]["uri"] == "http://hush@host"
    assert record(config) == {"tracking": {"uri": uri}, "copy": [1, 2], "list": [1, 2], "n": 2}
    nowhere = {"model": {"filters": "???"}, "tracking": {"uri": "${oc.env:CNNEXP_TEST_MISSING}", "run_name": "${x.y}"}}
    assert record(OmegaConf.create(nowhere)) == nowhere


REGISTRIES = {
    **{"model": MODELS, "optimizer": OPTIMIZERS, "dataset": DATASETS, "workers": WORKERS, "backend": BACKENDS},
    "augment": AUGMENTATIONS,  # several at once, each below its own name
}
FILES = sorted(path for group in REGISTRIES for path in (CONF / group).glob("*.yaml"))
FILES.remove(CONF / "augment" / "none.yaml")


@pytest.mark.parametrize("group", REGISTRIES)
def test_every_name_has_a_file_of_that_name(group):
    files = [path for path in FILES if path.parent.name == group]
    assert {path.stem for path in files} == set(REGISTRIES[group])
    for path in files:
        if group == "augment":
            assert path.read_text().startswith(f"# @package augment.{path.stem}\n# ")
        else:
            assert OmegaConf.load(path)["name"] == path.stem


def class_of(path):
    """Return the class that a config file is of; skip the test where this machine lacks what it needs."""
    try:
        return REGISTRIES[path.parent.name][path.stem]
    except BackendUnavailable as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_file_holds_all_keys_of_its_class_and_its_defaults(path):
    cls, values = class_of(path), OmegaConf.to_container(OmegaConf.load(path))
    values.pop("name", None)
    hints, python = get_type_hints(cls), defaults(cls)
    assert set(values) == set(python)
    typed = {key: convert(value, hints[key], key) for key, value in values.items()}
    given = {key: value for key, value in python.items() if value != "???"}
    assert {key: typed[key] for key in given} == given


@each(("trainer/default", Trainer), ("tracking/mlflow", Tracking), ("config", Sweep))
def test_yaml_and_python_have_the_same_defaults(section, cls):
    values = OmegaConf.to_container(OmegaConf.load(CONF / f"{section}.yaml"))
    values = values["sweep"] if section == "config" else values
    assert set(values) == {field.name for field in dataclasses.fields(cls)}
    assert build(cls, values, "section") == cls()


def test_what_the_trainer_passes_on_has_the_same_defaults_in_python():
    trainer = Trainer()
    passed = TrainingPlan(trainer.epochs, trainer.seed, trainer.rates(), trainer.pass_s, trainer.checkpoint_batches)
    assert passed == TrainingPlan(trainer.epochs)
    passed = {"batches": trainer.baseline_batches, "budget_s": trainer.baseline_s}
    assert passed == {name: inspect.signature(Baseline).parameters[name].default for name in passed}
    assert Trainer(schedule="step").rates() == Step()
    assert Trainer(schedule="step", step_every=3, step_factor=0.5).rates() == Step(3, 0.5)
    assert Trainer(schedule="constant").rates() == Constant()
    assert Trainer(schedule="cosine").rates() == Cosine()


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: path.relative_to(CONF).as_posix())
def test_every_key_is_explained_by_a_comment(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.parent.name in ("experiment", "debug"):  # they change keys that are explained in their groups
        assert lines[0] == "# @package _global_"
        assert lines[1].startswith("# ")
        return
    if path.name == "config.yaml":
        lines = lines[: lines.index("hydra:")]
    for before, line in zip(["", *lines], lines, strict=False):
        if re.match(r" *[a-z_0-9]+: +\S", line) and not line.lstrip().startswith("- "):
            assert before.lstrip().startswith("#") or " # " in line, f"{path.name}: {line}"


TRAINER = CONF / "trainer" / "default.yaml"
RANGE = r"(>=|<=|>|<) (\d[\d.]*)|(\d+) (<=) \w+ < |([\d,]+) \.\. (2\*\*63 - 1|[\d,]+)"


def outside(stated: str, whole: bool) -> list[float]:
    """Return numbers just outside what a comment states, and for others than whole ones what float32 cannot hold."""
    step, wrong = (1 if whole else 2.0**-20), []
    for sign, bound, least, _, first, last in re.findall(RANGE, stated):
        number = float(bound or least or first.replace(",", ""))
        wrong += {">": [number], ">=": [number - step], "<": [number], "<=": [number + step]}.get(sign, [number - step])
        if last:
            wrong.append(2**63 if "**" in last else int(last.replace(",", "")) + 1)
    return [int(number) for number in wrong] if whole else [*wrong, math.inf, -math.inf, math.nan, 1e39, 1e-300]


@pytest.mark.parametrize("path", [*FILES, TRAINER], ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_number_is_refused_outside_its_stated_range(path):
    cls = Trainer if path == TRAINER else class_of(path)
    files = ("npz", "images", "fer2013", "onnx")
    given = {key: "x" for key in ("path", "root") if key in defaults(cls) and path.stem in files}
    given |= {"layers": [{"type": "Flatten"}]} if path.stem == "custom" else {}
    values = {key: value for key, value in (defaults(cls) | given).items() if value != "???"}
    comment, tried = "", 0
    for line in path.read_text(encoding="utf-8").splitlines():
        comment = comment + line if line.startswith("# ") else comment
        key = line.partition(":")[0]
        if key not in values or line.startswith("#"):
            continue
        hint, stated, comment = str(get_type_hints(cls)[key]), comment + line.partition(" #")[2], ""
        whole = "int" in hint
        if not whole and "float" not in hint:
            continue
        for number in outside(stated, whole):
            if path.parent.name == "backend" or (key.endswith("_size") and number > 1):
                continue  # as many as this machine has cores, or the data images: checked with them, not by the class
            raises(ConfigError, f"{key}=", build, cls, values | {key: number}, path.parent.name)
            tried += 1
        if not whole:
            for number in (1e39, 1e-300, math.inf):  # of Python
                raises(ConfigError, key, cls, **{k: v for k, v in values.items() if k != key}, **{key: number})
    assert tried or path.parent.name == "backend" or not re.search(RANGE, path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("number", [math.inf, math.nan, 1e39, 1e-300])
def test_numbers_of_layers_are_float32s(number):
    for layer in (BatchNorm2d(epsilon=number), BatchNorm2d(momentum=number), Dropout(number)):
        raises(NetworkError, "must be", Network, (4, 4, 1), (layer, Flatten(), Linear(2)))
    with pytest.raises(ConfigError, match=r"epsilon=.*: must be a finite number of float32"):
        build(Custom, {"layers": [{"type": "BatchNorm2d", "epsilon": number}]}, "model")
