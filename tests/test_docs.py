"""The tutorial, followed to the letter: its files written, its commands run, in order."""

import importlib
import re

import pytest
from commands import ROOT, follow

TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(?:sh|\{code-block\} \w+\n:caption: (\S+)\n)\n(.*?)```", TUTORIAL, re.DOTALL)
"""File name, or empty for commands, and text."""


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
    assert any(output.endswith("einsum is right on 12 of 12 networks\n") for output in outputs)
    accuracy = re.search(r"test accuracy ([\d.]+)", next(output for output in outputs if "test accuracy" in output))
    assert "An image costs cpu-simd" in outputs[-1]
    assert accuracy is not None
    assert float(accuracy[1]) > 0.9


def test_the_drawings_of_the_kernels(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    kernel_drawings = importlib.import_module("kernel_drawings")
    kernel_drawings.draw_all(tmp_path / "drawings")
    text = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    named = set(re.findall(r"_drawings/(\w+\.png)", text))
    assert named == {path.name for path in (tmp_path / "drawings").iterdir()}
