"""The floor plan: who may import what, read from the source of every module."""

import ast
import graphlib
import itertools
import re

from commands import ROOT, python
from tables import each

PACKAGE = ROOT / "cnnexp"

# bottom to top; a room (a folder or a lone module of cnnexp/) uses what lies below it, and nothing beside it
FLOORS = (
    ("errors",),
    ("system",),
    ("network", "optimizers", "datasets"),
    ("backends",),
    ("training", "testing"),
    ("measuring",),
    ("workers", "tracking"),
    ("papers",),
    ("app",),
    ("__main__",),
)
LEVELS = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
# the rooms of backends/simd, bottom to top
SIMD_FLOORS = ("compiler", "layouts", "algorithms", "general", "planner", "lowering", "runtime")
BACKENDS_KNOW = {"backends", "errors", "network", "optimizers", "system"}  # no config, no loop, no data set
# library -> the only modules that import it
ONLY_IN = {
    "hydra": {"cnnexp.app.hydra_app"},
    "mlflow": {"cnnexp.tracking.model", "cnnexp.tracking.store"},
    "onnx": {"cnnexp.app.export", "cnnexp.network.onnx_file", "cnnexp.tracking.graph"},
    "onnxruntime": {"cnnexp.app.export"},
    "matplotlib": {"cnnexp.papers.figures", "cnnexp.tracking.figures"},
}

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def imports(name: str, tree: ast.AST) -> set[str]:
    """Return the modules that a source names, read as a tree: imports anywhere in it, for types alone too, and strings.

    A string counts where it is the name of one of our modules (`import_module`, `-m`, a loader), with `:Class` or
    without, from the root or, as in a registry, from the module's own folder.
    """
    found, folder = set(), name if MODULES.get(name, PACKAGE).name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {member if member in MODULES else node.module for member in members}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= named_in(node.value, folder)
    return found - {name}


def named_in(text: str, folder: str) -> set[str]:
    module = text.partition(":")[0]
    # a class by its dotted name is Hydra's way to name code, and hydra_app's own is one that `config_security` allows
    if re.fullmatch(r"cnnexp(\.[a-z_]+)+(:\w+)?", text):
        return {module}
    return {f"{folder}.{module}"} & MODULES.keys() if re.fullmatch(r"\w+(\.\w+)*:\w+", text) else set()


GRAPH = {name: imports(name, tree) for name, tree in TREES.items()}


def room(module: str) -> str:
    return module.split(".")[1]


def faults(name: str, imported: set[str]) -> list[str]:
    """Return what a module, anywhere but in the root, may not import of the package."""
    faults = []
    for found in sorted(found for found in imported if f"{found}.".startswith("cnnexp.")):
        if found not in MODULES:
            faults.append(f"{name} names {found}, which is none of our modules")
        elif found == "cnnexp":
            faults.append(f"{name} imports the root")
        elif room(found) != room(name) and LEVELS[room(found)] >= LEVELS[room(name)]:
            faults.append(f"{name} ({room(name)}) imports {found}, which is not below it")
    return faults


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other, in a ring; none where there is none."""
    try:
        graphlib.TopologicalSorter({name: found & graph.keys() for name, found in graph.items()}).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_every_room_is_on_a_floor_and_imports_point_down():
    assert {room(name) for name in MODULES if name != "cnnexp"} == LEVELS.keys()
    assert [fault for name in MODULES if name != "cnnexp" for fault in faults(name, GRAPH[name])] == []


def test_there_is_no_circle():
    assert circle(GRAPH) == []
    registry = {"cnnexp.backends": imports("cnnexp.backends", ast.parse("BACKENDS = {'cpu': 'cpu.sequential:Cpu'}"))}
    back = {"cnnexp.backends.cpu.sequential": imports("x", ast.parse("import cnnexp.backends"))}
    assert set(circle(registry | back)) == {*registry, *back}, "one is found"


@each(
    ("cnnexp.errors", "import cnnexp.network.shapes"),
    ("cnnexp.network.shapes", "def f():\n    from cnnexp.backends import protocol"),
    ("cnnexp.training.loop", "if TYPE_CHECKING:\n    from cnnexp.app.config import Settings"),
    ("cnnexp.backends", "import_module('cnnexp.training.loop')"),
    ("cnnexp.tracking.pipe", "run(['-m', 'cnnexp.papers.page'])"),
    ("cnnexp.measuring.ledger", "PLACE = 'cnnexp.app.report:command'"),
    ("cnnexp.tracking.store", "loader_module='cnnexp.tracking.gone'"),
    ("cnnexp.workers", "from cnnexp.tracking import journal"),
    ("cnnexp.datasets", "from cnnexp import Network"),
)
def test_an_import_that_points_up_is_found(name, source):
    assert len(faults(name, imports(name, ast.parse(source)))) == 1


def test_backends_know_no_config_and_no_loop():
    for name in (name for name in MODULES if name.startswith("cnnexp.backends")):
        assert {room(found) for found in GRAPH[name] if found.startswith("cnnexp.")} <= BACKENDS_KNOW, name


def test_rooms_of_simd_use_what_lies_below():
    simd = "cnnexp.backends.simd"
    floors = {name: SIMD_FLOORS.index(name.split(".")[3]) for name in MODULES if name.startswith(f"{simd}.")}
    for name, floor in floors.items():
        assert not [found for found in GRAPH[name] if found == simd or floors.get(found, 0) > floor], name


def test_the_package_can_be_taken_in_at_a_glance():
    entries = [path.name for path in PACKAGE.iterdir() if not path.name.startswith("__")]  # what Python asks for
    assert len(entries) <= 13, sorted(entries)


def test_heavy_libraries_stay_where_they_belong_and_nothing_prints_or_evaluates_text():
    for name in MODULES:
        roots = {found.partition(".")[0] for found in GRAPH[name]}
        for library, homes in ONLY_IN.items():
            assert library not in roots or name in homes, f"{name} imports {library}"
        assert "numba" not in roots or name.startswith("cnnexp.backends."), f"{name} imports numba"
        calls = [node.func for node in ast.walk(TREES[name]) if isinstance(node, ast.Call)]
        assert not {"print", "eval", "exec"} & {called.id for called in calls if isinstance(called, ast.Name)}, name


def test_no_two_names_beside_each_other_differ_by_a_suffix():
    """So that no two must be opened to know which is which: `record` beside `recorder`, `run` beside `runs`."""
    for folder in (PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir() and path.name != "__pycache__")):
        names = sorted({path.stem for path in folder.iterdir() if not path.name.startswith("__")})
        alike = [pair for pair in itertools.combinations(names, 2) if re.match(rf"{pair[0]}[a-z]{{1,3}}$", pair[1])]
        assert not alike, f"{folder.name}: {alike}"


LATE = {  # what is done, and what it has not imported
    "import cnnexp, cnnexp.__main__": {"hydra", "mlflow", "numba", "torch", "tensorflow", "matplotlib", "numpy"},
    "cnnexp.Digits().load()": {"PIL", "pooch", "requests", "rich", "sklearn"},
    "cnnexp.fit": {"hydra", "mlflow", "matplotlib"},
    "assert None not in [getattr(cnnexp, name) for name in cnnexp.__all__]": {"hydra", "mlflow"},
}


def test_no_heavy_library_is_imported_before_it_is_needed():
    code = "import sys\n" + "\n".join(f"{step}\nprint(*{heavy} & set(sys.modules))" for step, heavy in LATE.items())
    assert python("-c", code).split() == []
