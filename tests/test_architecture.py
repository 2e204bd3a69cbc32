"""The walls of the package, read from its imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "cnnexp"
MODULES = sorted(PACKAGE.rglob("*.py"))

ONLY_IN = {
    "hydra": {"app/hydra_app.py"},
    "mlflow": {"tracking/store.py"},
    "matplotlib": {"papers/figures.py", "tracking/figures.py"},
}
# module -> what it may know of the package: imports point one way
MAY_IMPORT = {
    "errors.py": set(),
    "network/layers.py": set(),
    "network/shapes.py": {"errors", "network.layers"},
    "network/losses.py": {"errors", "network.layers", "network.shapes"},
    "network/models.py": {"errors", "network.layers", "network.losses", "network.shapes"},
    "optimizers.py": {"errors"},
    "training/schedules.py": {"errors"},
    "training/loop.py": {
        *("backends.protocol", "datasets", "errors", "network.losses", "training.baseline", "training.schedules"),
    },
    "training/baseline.py": {"backends.protocol", "datasets", "errors"},
}


def imports(path: Path) -> set[str]:
    """Return the absolute names of the modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            if node.module == "cnnexp":
                found |= {f"cnnexp.{alias.name}" for alias in node.names}
    return found


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_heavy_libraries_stay_where_they_belong(path):
    roots = {module.partition(".")[0] for module in imports(path)}
    for library, homes in ONLY_IN.items():
        assert library not in roots or name(path) in homes, f"{name(path)} imports {library}"
    assert "numba" not in roots or name(path).startswith("backends/"), f"{name(path)} imports numba"


@pytest.mark.parametrize("module", MAY_IMPORT)
def test_imports_point_one_way(module):
    own = {found.removeprefix("cnnexp.") for found in imports(PACKAGE / module) if found.startswith("cnnexp.")}
    assert own <= MAY_IMPORT[module]


@pytest.mark.parametrize("path", [path for path in MODULES if name(path).startswith("backends/")], ids=name)
def test_backends_know_no_config_and_no_loop(path):
    own = {found.split(".")[1] for found in imports(path) if found.startswith("cnnexp.")}
    assert own <= {"backends", "errors", "network", "optimizers"}


@pytest.mark.parametrize("module", ["cnnexp", "cnnexp.__main__"])
def test_importing_the_package_loads_no_heavy_library(module):
    heavy = "{'hydra', 'mlflow', 'numba', 'torch', 'tensorflow', 'matplotlib', 'numpy'}"
    code = f"import sys, {module}; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert done.stdout.split() == []


def test_every_name_of_the_python_api_can_be_imported():
    import cnnexp

    for api_name in cnnexp.__all__:
        assert getattr(cnnexp, api_name) is not None


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_nothing_prints_or_evaluates_text(path):
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"print", "eval", "exec"}
