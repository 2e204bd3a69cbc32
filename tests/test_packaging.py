"""The project as it is installed: what is in the wheel, and that it works from any folder."""

import contextlib
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest
from commands import ROOT, python
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import cnnexp

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Return a folder into which a wheel of this checkout was installed, dependencies left out."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("cnnexp", "conf", "hydra_plugins"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    options = "--quiet", "--no-input", "--no-deps", "--no-build-isolation", "--no-index", "--target", site
    python("-m", "pip", "install", *options, source)
    return site


def installed(*sites: Path, command: Sequence[str], cwd: Path) -> str:
    # -P and another folder: nothing of the checkout can be found by chance
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sites))}
    done = subprocess.run([sys.executable, "-P", *command], capture_output=True, text=True, cwd=cwd, env=environ)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_wheel_holds_every_module_and_every_config_file(site):
    for folder, target in ((ROOT / "cnnexp", site / "cnnexp"), (ROOT / "conf", site / "cnnexp" / "conf")):
        for path in folder.rglob("*"):
            if path.suffix in (".py", ".yaml", ".html", ".gz"):
                assert (target / path.relative_to(folder)).is_file(), path


def test_configs_of_the_user_work_against_the_installed_package(site, tmp_path):
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "wide.yaml").write_text("# @package _global_\nmodel: {filters: 999}\n")
    code = "from cnnexp import __main__, errors; print(errors.installing('ui')); __main__.main()"
    words = ("--config-dir", "mine", "experiment=wide", "model=knm", "--cfg", "job")
    first, *rest = installed(site, command=["-c", code, *words], cwd=tmp_path).splitlines()
    assert {"  name: knm", "  filters: 999"} <= set(rest)
    # an extra is installed from where the package came
    assert (Path(re.fullmatch(r"\S*pip install '(/.*)\[ui\]'", first)[1]) / "pyproject.toml").is_file()


LACKING = """
import sys
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Lacking())
"""


@pytest.mark.thorough
def test_the_core_alone_trains_and_records_in_the_working_folder(site, tmp_path):
    """With nothing importable that `pip install .` does not bring, MLflow's own part of its store included."""
    core = brought(PROJECT["project"]["dependencies"]) | {"cnnexp"}
    owners = metadata.packages_distributions()
    blocked = {name for name, by in owners.items() if not {canonicalize_name(one) for one in by} & core} - {"pip"}
    assert {"pandas", "pyarrow", "sklearn", "scipy", "flask"} <= blocked
    assert not {"cnnexp", "mlflow", "numba", "sqlalchemy"} & blocked
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking" / "sitecustomize.py").write_text(LACKING.format(blocked=blocked))
    words = ("backend=numpy", "model.filters=2", "dataset.train_size=50", "trainer.epochs=1")
    installed(tmp_path / "lacking", site, command=[str(site / "bin" / "cnnexp"), *words], cwd=tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "outputs" / "mlflow.db")) as store:
        recorded = store.execute("SELECT status, key, value FROM runs JOIN metrics USING (run_uuid)").fetchall()
        assert store.execute("SELECT status FROM logged_models").fetchall() == [(2,)]  # ready
    assert ("FINISHED", "train/images", 50.0) in recorded
    (journal,) = (tmp_path / "outputs" / "runs").glob("*/*/journal.jsonl")
    assert list((journal.parent / "figures").glob("*.png"))


def brought(requirements: Sequence[str]) -> set[str]:
    """Return the names of all distributions that requirements, and theirs, ask for."""
    found, rest = set(), [(Requirement(text), {""}) for text in requirements]
    while rest:
        wanted, extras = rest.pop()
        name = canonicalize_name(wanted.name)
        if name in found or (wanted.marker and not any(wanted.marker.evaluate({"extra": one}) for one in extras)):
            continue
        found.add(name)
        rest += [(Requirement(text), wanted.extras or {""}) for text in metadata.requires(name) or ()]
    return found


def test_dependencies_are_bounded_constraints_pinned_and_the_version_is_one():
    extras = PROJECT["project"]["optional-dependencies"]
    assert {"ui", "gpu", "torch", "keras", "sweep", "mpi", "onnx", "dev"} <= extras.keys()
    for requirement in sum(extras.values(), PROJECT["project"]["dependencies"]):
        assert {">", "<"} <= {one.operator[0] for one in Requirement(requirement).specifier}, requirement
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert re.fullmatch(r"(#.*\n|[\w.-]+==[\w.]+\n)+", text)
    assert {"numba", "mlflow", "hydra-core"} <= set(re.findall(r"^[\w.-]+", text, re.MULTILINE))
    version = cnnexp.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_target_that_pages_and_workflows_name_is_one():
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob(".github/**/*.*"), ROOT / ".ci" / "run"]
    named = set()
    for page in filter(Path.is_file, pages):
        text = page.read_text(encoding="utf-8")
        code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL)) if page.suffix == ".md" else text
        found = set(re.findall(r"(?:^|[`: ])make ([a-z]+(?:-[a-z]+)*)\b(?=[`\s]|$)", code, re.MULTILINE))
        assert found <= targets, page.name
        named |= found
    assert named >= {"train", "test", "coverage", "soak"}
