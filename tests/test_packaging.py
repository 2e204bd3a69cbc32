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
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import cnnexp

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Return a folder into which a wheel of this checkout was installed, dependencies left out."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("cnnexp", "conf", "hydra_plugins"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True, env={**os.environ, "PIP_NO_INPUT": "1"})
    return site


def installed(*sites: Path, command: Sequence[str], cwd: Path) -> subprocess.CompletedProcess:
    # -P and another folder: nothing of the checkout can be found by chance
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sites))}
    return subprocess.run(
        [sys.executable, "-P", *command], capture_output=True, text=True, cwd=cwd, env=environ, check=False
    )


def test_the_wheel_holds_every_module_and_every_config_file(site):
    for folder, target in ((ROOT / "cnnexp", site / "cnnexp"), (ROOT / "conf", site / "cnnexp" / "conf")):
        for path in folder.rglob("*"):
            if path.suffix in (".py", ".yaml", ".html", ".gz"):
                assert (target / path.relative_to(folder)).is_file(), path


def test_an_installed_package_composes_its_config_from_any_folder(site, tmp_path):
    done = installed(site, command=["-m", "cnnexp", "--cfg", "job", "model=knm"], cwd=tmp_path)
    assert done.stderr == ""
    assert "name: knm" in done.stdout


def test_an_installed_package_trains_and_writes_to_the_working_folder(site, tmp_path):
    arguments = ("experiment=smoke", "backend=numpy", "tracking=none", "trainer.baseline=null")
    done = installed(site, command=["-m", "cnnexp", *arguments], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "outputs" / "runs").glob("*/*/journal.jsonl"))


def test_an_extra_is_installed_from_where_the_package_came(site, tmp_path):
    done = installed(
        site, command=["-c", "from cnnexp.errors import installing; print(installing('ui'))"], cwd=tmp_path
    )
    (folder,) = re.fullmatch(r"pip install '(/.*)\[ui\]'\n", done.stdout).groups()
    assert (Path(folder) / "pyproject.toml").is_file()


LACKING = """
import sys
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Lacking())
"""


def test_the_core_alone_trains_and_records(site, tmp_path):
    """With nothing importable that `pip install .` does not bring, MLflow's own part of its store included."""
    core = brought(PROJECT["project"]["dependencies"]) | {"cnnexp"}
    owners = metadata.packages_distributions()
    blocked = {name for name, by in owners.items() if not {canonicalize_name(one) for one in by} & core} - {"pip"}
    assert {"pandas", "pyarrow", "sklearn", "scipy", "flask"} <= blocked
    assert not {"cnnexp", "mlflow", "numba", "sqlalchemy"} & blocked
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking" / "sitecustomize.py").write_text(LACKING.format(blocked=blocked))
    arguments = ("backend=numpy", "model.filters=2", "dataset.train_size=50", "trainer.epochs=1", "hydra.run.dir=run")
    done = installed(tmp_path / "lacking", site, command=["-m", "cnnexp", *arguments], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    with contextlib.closing(sqlite3.connect(tmp_path / "outputs" / "mlflow.db")) as store:
        recorded = store.execute("SELECT status, key, value FROM runs JOIN metrics USING (run_uuid)").fetchall()
        assert store.execute("SELECT status FROM logged_models").fetchall() == [(2,)]  # ready
    assert ("FINISHED", "train/images", 50.0) in recorded
    assert list((tmp_path / "run" / "figures").glob("*.png"))


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


def test_the_console_script_is_the_same_command(site, tmp_path):
    done = installed(site, command=[str(site / "bin" / "cnnexp"), "dataset=mnst"], cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("cnnexp: error: dataset=mnst: unknown; legal: cifar10, digits")


def test_configs_of_the_user_work_against_the_installed_package(site, tmp_path):
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "wide.yaml").write_text("# @package _global_\nmodel: {filters: 999}\n")
    done = installed(
        site, command=["-m", "cnnexp", "--config-dir", "mine", "experiment=wide", "--cfg", "job"], cwd=tmp_path
    )
    assert "filters: 999" in done.stdout


def test_every_dependency_is_bounded_below_and_above():
    project = PROJECT["project"]
    for requirements in (project["dependencies"], *project["optional-dependencies"].values()):
        for requirement in requirements:
            assert ">=" in requirement, requirement
            assert "<" in requirement, requirement


def test_the_extras():
    assert {"ui", "gpu", "torch", "keras", "sweep", "mpi", "onnx", "dev"} <= set(
        PROJECT["project"]["optional-dependencies"]
    )


def test_the_constraints_are_names_and_versions_only():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    for line in lines:
        assert (
            line.startswith("#") or line.replace("==", "").replace(".", "").replace("-", "").replace("_", "").isalnum()
        )
    assert {"numba", "mlflow", "hydra-core"} <= {line.partition("==")[0] for line in lines}


def test_the_version_is_the_same_wherever_it_stands():
    version = cnnexp.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_target_that_pages_and_workflows_name_is_one():
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob(".github/**/*.*"), ROOT / ".ci" / "run"]
    named = {
        (page.name, target)
        for page in pages
        if page.is_file()
        for target in re.findall(r"(?:^|[`: ])make ([a-z]+(?:-[a-z]+)*)\b(?=[`\s]|$)", _code(page), re.MULTILINE)
    }
    assert {target for _, target in named} >= {"train", "test", "coverage", "soak"}
    assert not {(page, target) for page, target in named if target not in targets}


def _code(page: Path) -> str:
    """Return what stands in code in a page; of other files all."""
    text = page.read_text(encoding="utf-8")
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL)) if page.suffix == ".md" else text
