"""The first hour of somebody who has never seen cnnexp: what each command takes, on this machine.

`python -m benchmarks.first_hour FOLDER` follows the tutorial to the letter, from its clone of this checkout and its
environment on, with empty caches, and prints a table in Markdown. Where the folder is there already, nothing is
installed again.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from cnnexp.measuring import environment

ROOT = Path(__file__).resolve().parents[1]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
INSTALL = re.compile(r"## Install\n.*?```\n(.*?)```", re.DOTALL)
BLOCK = re.compile(r"```(?:sh|\{code-block\} \w+\n:caption: (\S+)\n)\n(.*?)```", re.DOTALL)


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    clone, cache = folder / "cnnexp", folder / "cache"
    environ = {**os.environ, "XDG_CACHE_HOME": str(cache), "PATH": f"{clone}/.venv/bin:{os.environ['PATH']}"}
    environ.pop("PYTHONPATH", None)
    rows = []

    def take(command: str, where: Path) -> None:
        started = time.perf_counter()
        done = subprocess.run(command, shell=True, cwd=where, env=environ, capture_output=True, text=True)
        rows.append((command, time.perf_counter() - started))
        print(f"{rows[-1][1]:6.1f} s  {command}", file=sys.stderr)
        if done.returncode:
            sys.exit(f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")

    if clone.exists():
        subprocess.run(["git", "clean", "-qfdx", "-e", ".venv"], cwd=clone, check=True)
        shutil.rmtree(cache, ignore_errors=True)
    else:
        folder.mkdir(parents=True)
        clones, *installs = INSTALL.search(TUTORIAL)[1].splitlines()
        take(clones.replace("URL", str(ROOT)), folder)
        for command in installs:
            take(command, clone)
    for name, text in BLOCK.findall(TUTORIAL):
        if name:
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            (clone / name).write_text(text, encoding="utf-8")
            continue
        for command in text.splitlines():
            take(command, clone)
    facts = environment.machine_facts()
    print(f"{facts['machine.cpu']}, {facts['machine.cores']} cores, load {facts['machine.load']} at the end.\n")
    print("| command | s |\n|---|--:|")
    for command, seconds in rows:
        print(f"| `{command.replace(str(ROOT), 'URL')}` | {seconds:.1f} |")


if __name__ == "__main__":
    main()
