"""The README: its ten lines of Python run as they stand there, its names are the config's, it fits what one reads."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_python_example_trains_without_hydra_or_mlflow():
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    example = example.replace("threads=2", "threads=1")  # a machine may have one core
    loaded = "import sys; print(sorted({'hydra', 'mlflow'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", f"{example}\n{loaded}"], capture_output=True, text=True, check=True)
    *epochs, frameworks = ran.stdout.splitlines()
    assert frameworks == "[]"
    assert [line.split()[0] for line in epochs] == ["1", "2", "3", "4", "5"]
    assert float(epochs[-1].split()[1]) > 0.85


def test_the_readme_is_short_and_opens_with_what_it_does():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 100
    assert "](docs/tutorial.md)" in "\n".join(lines)
    assert "](../README.md)" in (README.parent / "docs" / "tutorial.md").read_text(encoding="utf-8")
    first_screen = "\n".join(lines[:45])
    for shown in ("make train", "\nspeedup ", "cpu-2-threads.png", "| best peer |", "```python"):
        assert shown in first_screen, shown


@pytest.mark.parametrize("group", ["model", "backend", "optimizer", "dataset"])
def test_the_readme_names_what_config_may_name(group):
    (row,) = re.findall(rf"^\| `{group}` \| (.*) \|$", README.read_text(encoding="utf-8"), re.MULTILINE)
    named = set(re.findall(r"`([\w-]+)`", row))
    there = {path.stem for path in (README.parent / "conf" / group).glob("*.yaml")}
    assert named == {name for name in there if not name.startswith("cpu-published")}
