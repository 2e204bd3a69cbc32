"""The pages: the tutorial followed to the letter, what the README says, and links that lead somewhere."""

import importlib
import itertools
import re
import shlex

import pytest
import yaml
from commands import ROOT, follow, python

from benchmarks.cases import select
from cnnexp import __main__ as cli
from cnnexp.app.config import load
from cnnexp.errors import BackendUnavailable

README = (ROOT / "README.md").read_text(encoding="utf-8")
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(?:sh|\{code-block\} \w+\n:caption: (\S+)\n)\n(.*?)```", TUTORIAL, re.DOTALL)
"""File name, or empty for commands, and text."""
LINKS = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]+)(?:#([^)\s]*))?\)|\]\(#([^)\s]+)\)")
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "docs/papers/index.md", ROOT / "examples/README.md"]


def commands():
    """Return the words after `cnnexp` of every command on the other pages, but for those with files of one's own."""
    found = {}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in re.findall(r"```\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                typed = re.match(r"(?:\w+=\S+ |mpiexec -n \d )*(?:python -m )?cnnexp\b(?! *\.\.\.)(.*)", line)
                if typed and not re.search(r"plugins=|--config-dir|\(OneConv", line):
                    words = shlex.split(typed[1], comments=True)
                    found[" ".join(words) or "cnnexp"] = words
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("words", commands().values(), ids=commands())
def test_every_command_of_the_other_pages_is_one(run, words):
    """A run's config is composed and made into objects, of a sweep with the first of each key's values."""
    if words and words[0] in cli.COMMANDS:
        usage, _ = cli.COMMANDS[words[0]]
        assert len(words) == 1 or usage
        assert all(f"{word.partition('=')[0]}=" in usage for word in words[1:] if "=" in word)
        return
    typed = [word for word in words if word != "-m" and not re.search(r"=(tag|choice|interval)\(", word)]
    code, out, err = run("--cfg", "job", "--resolve", *(re.sub(r"=([^\[,]+),.*", r"=\1", word) for word in typed))
    assert code == 0, err
    try:
        load(yaml.safe_load(out))
    except BackendUnavailable:
        assert "gpu" in " ".join(words)


def benchmark_commands():
    """Return the words of every command of a benchmark on a page, by module."""
    found = {}
    for page in PAGES:
        for module, given in re.findall(r"python -m (benchmarks[\w.]*)((?:\\\n|[^`\n#])*)", page.read_text("utf-8")):
            found.setdefault(module.rstrip("."), []).append(shlex.split(given))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(("module", "typed"), benchmark_commands().items(), ids=benchmark_commands())
def test_every_flag_and_case_of_a_benchmark_is_one(module, typed):
    flags = {word for words in typed for word in words if word.startswith("--")}
    if flags:
        assert flags <= set(re.findall(r"--[\w-]+", python("-m", module, "--help")))
    for words in typed:
        chosen = words[words.index("--cases") + 1 :] if "--cases" in words else []
        select([*itertools.takewhile(lambda word: not word.startswith("--"), (w for w in chosen if w != "..."))])


@pytest.mark.thorough
def test_the_tutorial_runs(tmp_path):
    outputs = []
    for name, text in BLOCKS:
        if name:
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        else:
            store = "tracking=none" if outputs else f"tracking.uri=sqlite:///{tmp_path}/runs.db"
            outputs += follow(text, tmp_path, store)
    assert any("einsum" in output and "unrolled" in output for output in outputs)
    assert any(re.search(r"einsum is right on (\d+) of \1 networks\n$", output) for output in outputs)
    assert float(re.search(r"test accuracy ([\d.]+)", "".join(outputs))[1]) > 0.9
    assert "An image costs cpu-simd" in outputs[-1]


def test_the_drawings_of_the_kernels(tmp_path, monkeypatch):
    """The page shows every drawing, and the checkout has them: they are readable wherever the page is."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    importlib.import_module("kernel_drawings").draw_all(tmp_path)
    text = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    kept = list((ROOT / "docs" / "drawings").iterdir())
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == set(re.findall(r"\(drawings/(\w+\.png)\)", text)) == {path.name for path in kept}
    assert sum(path.stat().st_size for path in kept) < 300_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_between_pages_leads_somewhere(page):
    for path, anchor, own in LINKS.findall(page.read_text(encoding="utf-8")):
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {path}"
        if (wanted := anchor or own) and target.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8").lower(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}  # as GitHub's
            assert wanted in anchors, f"{page.name}: {path}#{wanted}"


def test_the_python_example_trains_without_hydra_or_mlflow():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    example = example.replace("threads=2", "threads=1")  # a machine may have one core
    loaded = "import sys; print(sorted({'hydra', 'mlflow'} & set(sys.modules)))"
    *epochs, frameworks = python("-c", f"{example}\n{loaded}").splitlines()
    assert frameworks == "[]"
    assert [line.split()[0] for line in epochs] == ["1", "2", "3", "4", "5"]
    assert float(epochs[-1].split()[1]) > 0.85


def test_the_readme_is_short_and_opens_with_what_it_does():
    lines = README.splitlines()
    assert len(lines) <= 100
    assert "](docs/tutorial.md)" in "\n".join(lines)
    assert "](../README.md)" in TUTORIAL
    first_screen = "\n".join(lines[:45])
    for shown in ("make train", "\nspeedup ", "cpu-2-threads.png", "| best peer |", "```python"):
        assert shown in first_screen, shown


@pytest.mark.parametrize("group", ["model", "backend", "optimizer", "dataset"])
def test_the_readme_names_what_config_may_name(group):
    (row,) = re.findall(rf"^\| `{group}` \| (.*) \|$", README, re.MULTILINE)
    named = set(re.findall(r"`([\w-]+)`", row))
    there = {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}
    assert named == {name for name in there if not name.startswith("cpu-published")}
