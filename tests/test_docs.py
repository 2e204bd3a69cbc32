"""The tutorial, followed to the letter: its files written, its commands run, in order."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(?:sh|\{code-block\} \w+\n:caption: (\S+)\n)\n(.*?)```", TUTORIAL, re.DOTALL)
"""File name, or empty for commands, and text."""


@pytest.mark.thorough
def test_the_tutorial_runs(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    outputs = []
    for name, text in BLOCKS:
        if name:
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            continue
        for command in text.replace("python ", f"{sys.executable} ").splitlines():
            words = command.split()
            if words[1:3] == ["-m", "cnnexp"] and not {"--cfg", "predict", "explain", "check"} & set(words):
                words.append("tracking=none" if outputs else f"tracking.uri=sqlite:///{tmp_path}/runs.db")
            done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            outputs.append(done.stdout)
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
