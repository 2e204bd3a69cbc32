"""The notebook in examples/: its cells run in order, and what they gave is kept in it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTEBOOK = json.loads((ROOT / "examples" / "compare.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_runs(tmp_path):
    script = "\n".join("".join(cell["source"]) for cell in CODE)
    few = script.replace("Digits()", "Digits(train_size=200, test_size=100)")
    assert few != script
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    command = [sys.executable, "-c", f"{few}\nassert result.plot()._repr_png_().startswith(b'\\x89PNG')"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.search(r"cpu-simd +\d+\.\d\d x cpu", done.stdout)
    assert list(tmp_path.glob("digits/checkpoints/*.ckpt"))


def test_what_the_notebook_gave_is_kept_in_it():
    kept = [output for cell in CODE for output in cell["outputs"]]
    assert all(cell["outputs"] for cell in CODE[1:])
    assert "error" not in {output["output_type"] for output in kept}
    assert sum("image/png" in output.get("data", {}) for output in kept) == 4
