"""The README's ten lines of Python, run as they stand there."""

import re
import subprocess
import sys
from pathlib import Path

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
