"""What is in examples/: the commands of its page run in order, and the notebook's cells, whose output it keeps."""

import functools
import importlib
import json
import os
import re

import pytest
from commands import ROOT, follow, python

from cnnexp import Digits

NOTEBOOK = json.loads((ROOT / "examples" / "compare.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
PAGE = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")


@pytest.mark.thorough
def test_the_commands_run(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    checked, swept, _, trained, predicted = follow("".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)), tmp_path)
    assert re.search(r"filterwise is right on (\d+) of \1 networks\n$", checked)
    assert {line.split()[1] for line in swept.splitlines() if "/6 " in line} == {"numpy", "filterwise", "cpu-simd"}
    assert float(re.search(r"accuracy +([\d.]+)%", trained)[1]) > 80
    assert predicted.startswith("shapes/circle/000.png")


def test_the_page_names_every_file_and_what_the_notebook_gave_is_kept():
    named = set(re.findall(r"\]\(([\w/.]+)\)", PAGE)) - {"../docs/tutorial.md"}
    files = {path.relative_to(ROOT / "examples").as_posix() for path in (ROOT / "examples").rglob("*.*")}
    assert named == {file for file in files if "__pycache__" not in file} - {"README.md"}

    kept = [output for cell in CODE for output in cell["outputs"]]
    assert all(cell["outputs"] for cell in CODE[1:])
    assert "error" not in {output["output_type"] for output in kept}
    assert sum("image/png" in output.get("data", {}) for output in kept) == 4


@pytest.mark.thorough
def test_the_notebook_runs(tmp_path):
    script = "\n".join("".join(cell["source"]) for cell in CODE)
    few = script.replace("Digits()", "Digits(train_size=200, test_size=100)")
    assert few != script
    drawn = f"{few}\nassert result.plot()._repr_png_().startswith(b'\\x89PNG')"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    assert re.search(r"cpu-simd +\d+\.\d\d x cpu", python("-c", drawn, cwd=tmp_path, env=environment))
    assert list(tmp_path.glob("digits/checkpoints/*.ckpt"))


def test_a_network_of_pytorchs_is_trained_here_and_evaluated_there(monkeypatch, capsys):
    torch = pytest.importorskip("torch", reason="no torch is installed")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example, threads = importlib.import_module("pytorch_module"), torch.get_num_threads()
    monkeypatch.setattr(example, "EPOCHS", 2)
    monkeypatch.setattr(example, "Digits", functools.partial(Digits, train_size=600, test_size=100))
    example.main()
    torch.set_num_threads(threads)
    here, there = capsys.readouterr().out.splitlines()
    in_pytorch, in_cnnexp, _ = map(float, re.findall(r"[\d.]+", here))
    assert in_pytorch == in_cnnexp > 50
    assert re.fullmatch(r"trained there: [\d.]+% in PyTorch, [\d.]+ s", there)
