"""`cnnexp explain`, from a run with `trainer.profile=true` to the bars, the sentences and the figure."""

import json
import re
from unittest.mock import ANY, MagicMock

from checkpoints import saved
from commands import raises
from PIL import Image

from cnnexp.app import explain
from cnnexp.app.explain import screen, set_beside
from cnnexp.errors import ConfigError
from cnnexp.tracking.journal import PROFILE
from cnnexp.training.steps import Steps

PROFILED = ("experiment=smoke", "tracking=none", "trainer.epochs=1", "trainer.profile=true")


def told(capsys, *folders):
    explain.command([str(folder) for folder in folders])
    return capsys.readouterr().out.splitlines()


def test_a_run_and_its_baseline_and_two_runs(run, tmp_path, capsys, monkeypatch):
    one, two = tmp_path / "one", tmp_path / "two"
    code, out, _ = run(*PROFILED, "backend=cpu-simd", "trainer.baseline=numpy", f"hydra.run.dir={one}")
    assert code == 0
    assert re.search(rf"explain\s+{one}", out), "a profiled run says what shows more"
    assert "\nwhy " in out
    profile = json.loads((one / PROFILE).read_text())
    assert {layer["name"] for layer in profile["layers"]} >= {"linear1"}
    assert set(profile["ways"]) == {"conv1 relu1 maxpool1", "linear1"}

    lines = told(capsys, one)
    assert max(map(len, lines[:-1])) <= 80
    for name, side in (("cpu-simd", profile), ("numpy", profile["baseline"])):
        assert re.search(rf"{name} on \d threads? [\d.]+ (us|ms)", " ".join(lines))
        conv = [layer for layer in side["layers"] if layer["layers"][0] == "conv1" and layer["pass"] == "backward"]
        assert conv[0]["seconds"] > 0
    (row,) = [i for i, line in enumerate(lines) if line.startswith("linear1 backward")]
    assert [line[24:36].strip() for line in lines[row : row + 2]] == ["cpu-simd", "numpy"]
    figure = one / "figures" / "explain.png"
    assert lines[-1] == f"The figure: {figure}"
    with Image.open(figure) as picture:
        assert picture.size[0] > 1000

    assert (
        run(*PROFILED, "backend=numpy", "trainer.baseline=null", "trainer.accumulate=2", f"hydra.run.dir={two}")[0] == 0
    )
    assert "numpy on 1 thread" in " ".join(told(capsys, two, one))
    assert (two / "figures" / "explain-one.png").exists()

    (one / PROFILE).write_text("{}")  # as if it was profiled by an older version, or not at all
    (two / PROFILE).unlink()
    monkeypatch.setattr(explain, "Steps", steps := MagicMock(wraps=Steps))
    for folder in (one, two):  # their steps are timed now
        drawn = folder / "figures" / "explain.png"
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path != drawn}
        drawn.unlink(missing_ok=True)
        lines = told(capsys, folder)
        assert re.search(r"was not profiled; its steps are timed now, from epoch-000001\.ckpt", lines[0])
        assert any(line.startswith("linear1 backward") for line in lines)
        assert ("An image costs" in " ".join(lines)) == (folder == one), "the other had no baseline"
        assert "Most of" in " ".join(lines)
        assert drawn.exists()
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path != drawn} == before
    steps.assert_called_once_with(ANY, accumulate=2)  # the steps that the run took


def test_what_cannot_be_explained(tmp_path):
    raises(ConfigError, r"a run, to see it beside its baseline, or two: explain RUN \| RUN RUN", explain.command, [])
    saved(tmp_path / "checkpoints")
    (tmp_path / "journal.jsonl").write_text("")
    raises(ConfigError, "holds no config of backend, dataset, optimizer, trainer", explain.command, [str(tmp_path)])


def profile(count: int, backend: str, scale: float) -> dict:
    """A made-up profile of many layers, most of them at the same place of the roofline."""
    work = {"flops": 1e9, "bytes": 1e8, "multiply_adds": 5e8, "at_once": "", "fewer": ""}
    layers = [
        {"layers": [f"residual1.conv{i}", f"relu{i}"], "pass": what, "seconds": scale * (1 + i), **work}
        for i in range(count)
        for what in ("forward", "backward")
    ]
    whole = {"backend": backend, "threads": 1, "images": 1_000_000, "layers": layers, "entries": []}
    total = sum(layer["seconds"] for layer in layers)
    return whole | {"us_per_image": total, "machine": {"gflops": 10.0, "gb_per_s": 1.0}}


def test_the_longest_part_fills_its_line_and_no_line_is_longer():
    sides = set_beside([profile(9, "a-backend-of-a-long-name", 1), profile(9, "b", 300)])
    lines = screen(sides, "a title " * 20)
    assert max(map(len, lines)) == 80
    assert sum(len(line) == 80 and line.endswith("█") for line in lines) == 2, "the longest of each pass"
    plain = screen(sides, "", 72, blocks=False)
    assert max(map(len, plain)) <= 72
    assert all(ord(letter) < 128 for line in plain for letter in line)
