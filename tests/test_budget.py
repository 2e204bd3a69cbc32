"""The budget of complexity, tests/budget.toml: how long rooms, functions and kernels may be. It may only fall."""

import ast
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from commands import ROOT

BUDGET = tomllib.loads((ROOT / "tests" / "budget.toml").read_text(encoding="utf-8"))
ROOMS = BUDGET["rooms"]
COMPILERS = {"task", "kernel", "njit", "jit", "intrinsic"}  # what decorates a kernel


class Function(NamedTuple):
    """A function's own lines, those of functions within it left out, and its parameters, `self` left out."""

    name: str
    kind: str  # "function" or "kernel"
    lines: int
    parameters: int


def room_of(path: Path) -> str:
    """Return the innermost folder with a budget that holds a module: `backends/gpu/fused`; "" is the root."""
    folder = path.parent.relative_to(ROOT / "cnnexp")
    names = [one.as_posix() for one in (folder, *folder.parents)]
    return next((name for name in names if name in ROOMS), names[0]).replace(".", "root")


def functions(source: str, name: str = "") -> Iterator[Function]:
    """Yield every function of a source.

    A kernel is what a compiler gets: a function made within another in the backends, one decorated for Numba, or one
    that emits instructions (its parameter is an `Emitter`).
    """

    def visit(node: ast.AST, path: str, within: bool) -> Iterator[Function]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = f"{path}.{child.name}" if isinstance(child, ast.ClassDef) else path
                yield from visit(child, inner, within and not isinstance(child, ast.ClassDef))
                continue
            a = child.args
            arguments = [one for one in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if one]
            count = sum(argument.arg not in ("self", "cls") for argument in arguments)
            made = [one for one in ast.walk(child) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
            own, *inner = ({*range(one.lineno, one.end_lineno + 1)} for one in made)
            emits = any("Emitter" in ast.unparse(one.annotation) for one in arguments if one.annotation)
            kernel = "backends/" in name and (within or emits or _decorated(child))
            where = f"{path}.{child.name}".lstrip(".")
            yield Function(f"{name}:{where}", "kernel" if kernel else "function", len(own.difference(*inner)), count)
            yield from visit(child, where, True)

    yield from visit(ast.parse(source), "", False)


def _decorated(node: ast.FunctionDef) -> bool:
    inner = [one for decorator in node.decorator_list for one in ast.walk(decorator)]
    return bool(COMPILERS & {getattr(one, "id", None) or getattr(one, "attr", None) for one in inner})


def over(what: str, found: int, budget: int, unit: str = "lines") -> str:
    return f"{what} has {found:,} {unit}, the budget is {budget:,}: simplify, or raise it in the commit that says why"


def length(paths: list[Path]) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in paths)


MODULES = sorted((ROOT / "cnnexp").rglob("*.py"))
BY_ROOM = {room: [path for path in MODULES if room_of(path) == room] for room in sorted({*map(room_of, MODULES)})}


@pytest.mark.parametrize("room", sorted({*BY_ROOM, *ROOMS}))
def test_a_room_stays_within_its_lines(room):
    assert room in ROOMS, f"room {room} has no budget: add its line to tests/budget.toml"
    assert room in BY_ROOM, f"room {room} is gone: take its line out of tests/budget.toml"
    found, budget = length(BY_ROOM[room]), ROOMS[room]["lines"]
    assert found <= budget, over(f"room {room}", found, budget)


@pytest.mark.parametrize("whole", ["cnnexp", "tests", "benchmarks/results"])
def test_a_whole_stays_within_its_lines(whole):
    suffixes = (".py",) if whole != "benchmarks/results" else (".json", ".md")
    kept = subprocess.run(["git", "ls-files", whole], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    paths = [ROOT / name for name in kept.splitlines()] or [*(ROOT / whole).rglob("*")]  # a checkout without git
    found = length([path for path in paths if path.suffix in suffixes and path.is_file()])
    assert found <= BUDGET["wholes"][whole], over(whole, found, BUDGET["wholes"][whole])


@pytest.mark.parametrize("kind", ["function", "kernel"])
@pytest.mark.parametrize("room", BY_ROOM)
def test_functions_are_short_and_take_few_parameters(room, kind):
    """A room above the limits has its own, which are what is there: so they can only fall."""
    sources = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in BY_ROOM[room]}
    there = [one for name, source in sources.items() for one in functions(source, name) if one.kind == kind]
    limits, own = BUDGET["limits"][kind], ROOMS.get(room, {}).get(kind, {})
    for unit in ("lines", "parameters"):
        found, name = max(((getattr(one, unit), one.name) for one in there), default=(0, ""))
        allowed = own.get(unit, limits[unit])
        assert found <= allowed, over(name, found, allowed, unit)
        assert unit not in own or found == allowed > limits[unit], (
            f"room {room}: its budget of {allowed} {unit} for a {kind} is not what is there, {found}: "
            f"lower it, or take it out where {limits[unit]} are enough"
        )


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in MODULES if "backends" in path.parts}), ids=lambda p: p.name
)
def test_a_folder_of_the_backends_can_be_taken_in_at_a_glance(folder):
    entries = sorted(path.name for path in folder.iterdir() if not path.name.startswith("__"))
    name = folder.relative_to(ROOT / "cnnexp").as_posix()
    budget = ROOMS.get(name, {}).get("entries", BUDGET["limits"]["entries"])
    assert len(entries) <= budget, over(name, len(entries), budget, "entries")


def test_what_counts_as_a_kernel_and_its_lines():
    source = """
def make(cache):
    def kernel(a, b):
        def step(c):
            return c
        return step(a)
    return kernel

@numba.njit(**OPTIONS)
def compiled(a, *, b): ...

def emit(e: Emitter, x): ...

class Plain:
    def method(self, a, *rest, **named): ...
"""
    found = {one.name.partition(":")[2]: one for one in functions(source, "cnnexp/backends/x.py")}
    assert {name: (one.kind, one.lines, one.parameters) for name, one in found.items()} == {
        "make": ("function", 2, 1),
        "make.kernel": ("kernel", 2, 2),
        "make.kernel.step": ("kernel", 2, 1),
        "compiled": ("kernel", 1, 2),
        "emit": ("kernel", 1, 2),
        "Plain.method": ("function", 1, 3),
    }
    assert {one.kind for one in functions(source, "cnnexp/app/x.py")} == {"function"}
