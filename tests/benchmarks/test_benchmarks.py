import contextlib
import functools
import json
import math
import platform
import re
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from commands import ROOT, often, python
from tables import each

from benchmarks import __main__ as program
from benchmarks import cases, contestants, kernels, oracle, ours, report, run_overhead, runner, worker
from cnnexp import SGD, Conv2d, Flatten, Linear, MaxPool2d, Network, ReLU, Residual

TINY = cases.select(["tiny"])[0]
expected = functools.cache(oracle.expected)
SMALL = ["tiny", "strided-b1", "lenet5_1998-b1", "gelu_mlp-b16", "resnet20-b1", "mobilenet-b1"]


def match(samples, batch_size=100, side="peer", per_step=100):
    """Return a match's record: contestant -> seconds of each one-step sample, beside a limit of 10^9 a second."""
    rows = [
        {"contestant": name, "side": side_of, "error": None, "per_step": steps_of, "steps": 1, "samples": seconds}
        | {"setup": {"compile_s": 0.5, "check": {"gradient": 1e-7}, "facts": {}}, "peak_bytes": 10**8}
        for name, side_of, steps_of, seconds in [
            *((name, "peer" if name in ("torch", "jax") else "ours", per_step, s) for name, s in samples.items()),
            ("sgemm", "limit", 10**9, [1.0, 1.0, 1.0]),
        ]
    ]
    work = {"through_argmax": 10**6, "dense": 2 * 10**6}
    return {
        "title": "t", "case": "c", "group": "main", "grows": None, "threads": 1, "batch_size": batch_size,
        "multiply_adds_per_image": work, "load_averages": [0.0], "rows": rows,
    }  # fmt: skip


def test_multiply_adds_of_an_inner_convolution_include_its_input_gradient():
    layers = (Conv2d(2, 3), ReLU(), Conv2d(4, 3), ReLU(), MaxPool2d(2), Flatten(), Linear(5))
    first, second, linear = 8 * 8 * 2 * 9, 6 * 6 * 4 * 9 * 2, 3 * 3 * 4 * 5
    through = 2 * first + second + 2 * second // 4 + 3 * linear
    assert cases.multiply_adds(Network((10, 10, 1), layers)) == (through, 2 * first + 3 * second + 3 * linear)
    block = Residual((Conv2d(2, 3, padding="same"),)), Conv2d(1, 10)  # what it holds counts once
    assert cases.multiply_adds(Network((10, 10, 2), block)) == (2 * 3600 + 3 * 200,) * 2


def test_what_is_legal_is_named_and_the_recorded_command_holds_no_folder_of_this_machine():
    with pytest.raises(ValueError, match="--cases huge: unknown; legal: main, batch"):
        cases.select(["huge"])
    with pytest.raises(ValueError, match="--contestants caffe: unknown; legal: ours, peer"):
        contestants.select(["caffe"])
    assert len(cases.select(["main"])) == 4
    assert [case.name for case in cases.select(["vgg-b16", "lenet5-b1", "vgg-b16"])] == ["vgg-b16", "lenet5-b1"]
    cores = len(program.machine.usable_cores())
    assert program._threads(["all", "1"]) == sorted({1, cores})
    with pytest.raises(ValueError, match=f"--threads {cores + 1}: legal are 1 .. {cores} and all"):
        program._threads([str(cores + 1)])
    command = program._command(["--cases", "main", "--peer-python", "/home/me/bin/python", "--out=/home/me/here"])
    assert command == "python -m benchmarks --cases main --peer-python PATH --out=PATH"


@contextlib.contextmanager
def worker_of(folder, environment=None):
    """Give ask(contestant, case, oracle), what a worker's process answers: of one contestant after another."""
    one = runner.Worker(contestants.ENTRIES["numpy"], sys.executable, folder / "stderr.txt", environment)
    cores = program.machine.usable_cores()[:1]

    def ask(contestant, case="tiny", oracle="", limit_s=300):
        return one.ask("setup", limit_s, contestant=contestant, case=case, threads=1, cores=cores, oracle=str(oracle))

    try:
        yield ask
    finally:
        one.end()


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    with worker_of(tmp_path_factory.mktemp("worker")) as ask:
        yield ask


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="holds an x86 CPU to less")
def test_held_contestants_have_8_lanes(tmp_path):
    with worker_of(tmp_path, program.machine.HOLDS["avx2"]) as ask:
        assert ask("fma-loop")["facts"]["lanes"] == 8


def test_the_files_that_are_kept_are_as_the_program_writes_them():
    kept = sorted((ROOT / "benchmarks" / "results").rglob("cpu.json"))
    assert kept
    for file in kept:
        assert program.dumps(json.loads(file.read_text())) == file.read_text(), file


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_our_order_visits_what_was_put_away_as_it_stood(count):
    order = np.random.default_rng(0).permutation(count)
    images, labels = np.arange(2.0 * count).reshape(count, 2), np.arange(count)
    ours.put_away(order, images, labels)
    assert (images[order] == np.arange(2.0 * count).reshape(count, 2)).all()
    assert (labels[order] == np.arange(count)).all()


def test_lines_compare_with_the_best_peer_and_the_limit_and_failures_say_so():
    record = match({"cpu": [0.2, 0.1, 0.4], "torch": [2, 1, 4], "jax": [4, 4, 4]})
    found = {line.contestant: line for line in report.lines(record)}
    cpu = found["cpu"]
    assert (cpu.rate, cpu.worst, cpu.against_peer, cpu.of_limit) == (500, 250, 10, 0.5)
    assert found["jax"].against_peer == 0.5
    assert found["sgemm"].of_limit == 1

    record = match({"cpu": [1.0], "torch": [1.0]})
    record["rows"][1] |= {"error": "no compiler", "samples": []}
    last = [line for line in report.lines(record) if line.side != "limit"][-1]
    assert (last.contestant, last.error) == ("torch", "no compiler")
    assert "failed: no compiler" in "".join(report._cells(last))
    line = report.lines(match({"python": [1.0]}, batch_size=1000, per_step=1))[0]
    assert report._cells(line)[0] == "python (1 a step)"


def written(matches, folder, **more):
    """Return what files a result is written to, and the text of the first."""
    result = {
        "command": "c", "started": "s", "seconds": 1.0, "quick": False, "rounds": 1, "seconds_per_sample": 1.0,
        "machine": {"processor": "p", "cores": [0], "system": "s", "python": "3"}, "not_installed": ["jax"],
        "matches": matches, **more,
    }  # fmt: skip
    paths = report.write(result, folder)
    return [path.name for path in paths], paths[0].read_text()


def test_a_sweep_gets_figures_and_networks_a_table(tmp_path):
    matches = [match({"cpu-simd": [0.1 * n], "torch": [0.3 * n], "python": [9.0]}) for n in (1, 2, 4)]
    for grows, record in zip((14, 28, 56), matches, strict=True):
        record |= {"group": "size", "title": f"one_conv, {grows} x {grows}", "grows": grows}
    names, text = written(matches, tmp_path)
    assert names == ["cpu.md", "growth-1-threads.png"]
    assert "| torch | 3,000 | 6,000 | 12,000 |" in text
    assert "Not installed: jax" in text

    record = match({"cpu-simd": [0.1, 0.1], "torch": [0.2, 0.2]})
    record |= {"group": "networks", "title": "LeNet-5, batch 16", "case": "lenet5-b16", "batch_size": 16}
    names, text = written([record], tmp_path, held="avx2")
    assert names == ["cpu.md", "networks-1-threads.png"]
    assert "| LeNet-5, batch 16 | 1 | 1,000 | 500 (torch) | 2.00 | 100% | 1.00 |" in text
    assert "everyone restricted to avx2" in text


@pytest.mark.parametrize("target", run_overhead.CLOCKS)
def test_every_clock_has_its_function(target):
    assert callable(run_overhead.resolve(target)[2])


def test_clocks_count_a_call_within_a_call_once():
    clocks = run_overhead.Clocks(iter([0, 1, 3, 7, 8, 20]).__next__)
    inner = clocks.wrap(lambda: None, "inner")  # from 3 to 7
    clocks.wrap(inner, "outer")()  # from 1 to 8
    clocks.stop()
    assert clocks.seconds == {"configuration and the rest": 1 + 12, "outer": 2 + 1, "inner": 4}


@pytest.mark.parametrize("name", often(SMALL, ["tiny"]))
@pytest.mark.parametrize("entry", [e for e in contestants.ENTRIES.values() if e.side == "peer"], ids=lambda e: e.name)
def test_peers_do_the_work_of_the_oracle(entry, name, ask, tmp_path):
    if find_spec(entry.module) is None:
        pytest.skip(f"{entry.module} is not installed")
    if "compiled" in entry.name:
        pytest.skip("compiling takes half a minute; `python -m benchmarks` checks it each time")
    case = cases.select([f"{name}-predict" if entry.infers else name])[0]
    true = expected(case)
    np.savez(tmp_path / "oracle.npz", **true)
    off = report._error(ask(entry.name, case.name, tmp_path / "oracle.npz")["check"])
    assert off < 1e-6 + true.get(f"blur_gradient_{case.batch_size}", 0)


def test_probabilities_that_are_wrong_are_refused():
    alike, (case,) = SimpleNamespace(probabilities=lambda: np.full((8, 10), 0.1)), cases.select(["tiny-predict"])
    with pytest.raises(ValueError, match=r"probabilities are off by .* from the float64 oracle, 1e-05 is allowed"):
        worker.check_probabilities(alike, expected(case))


class Made:
    """A contestant whose gradient, and whose timed step, are as many times what is right."""

    batch_size, steps = 8, 0

    def __init__(self, gradient, step):
        self._gradient, self._step = gradient, step

    def reset(self):
        self.steps = 0

    def train(self, steps):
        self.steps += steps

    def gradient(self):
        return float(expected(TINY)["loss_8"]), expected(TINY)["gradient_8"] * self._gradient

    def parameters(self):
        return expected(TINY)["update_8"] * self._step * self.steps


def test_a_contestant_that_does_not_do_the_work_is_refused_unless_rounding_decides():
    with pytest.raises(ValueError, match="update is off by 1 from the float64 oracle"):
        worker.check(Made(gradient=1, step=0), "SGD", expected(TINY))

    true, made = expected(TINY), Made(gradient=1 + 5e-4, step=1)
    assert true["blur_gradient_8"] < 1e-5, "nothing hangs on rounding there"
    with pytest.raises(ValueError, match=r"gradient is off by 0\.0005 from the float64 oracle, 0\.0001\d* is allowed"):
        worker.check(made, "SGD", true)
    assert worker.check(made, "SGD", {**true, "blur_gradient_8": 1e-3})["gradient"] == pytest.approx(5e-4)


def test_the_oracle_sees_where_rounding_decides(monkeypatch):
    """The first image's two pixels cancel: what ReLU gets is 0."""
    network = Network((1, 1, 2), (Flatten(), Linear(1), ReLU(), Linear(2)))
    parameters = np.array([1, -1, 0, 0.5, -0.5, 0, 0], np.float32)
    for pixel, least, most in ((0.0, 0.1, 2.0), (0.5, 0.0, 1e-5)):
        drawn = cases.Data(np.array([[[1, 1 - pixel]]], np.float32), np.zeros((1, 1), np.int32), parameters)
        monkeypatch.setattr(oracle, "data", lambda case, mnist, drawn=drawn: drawn)
        case = cases.Case("even", "even", "even", network, 1, SGD(lr=0.01))
        assert least <= oracle.expected(case)["blur_gradient_1"] <= most


@each(("numpy", 0.05, "no answer to setup within 0 s"), ("nobody", 300, "KeyError: 'nobody'"))
def test_a_worker_that_dies_or_hangs_is_reported(tmp_path, contestant, limit_s, says):
    with worker_of(tmp_path) as ask, pytest.raises(runner.WorkerFailed, match=says):
        ask(contestant, limit_s=limit_s)


def test_kernels_stand_beside_what_the_planner_expects(capsys):
    kernels.main(["--cases", "tiny", "--algorithms"])
    text = capsys.readouterr().out
    for row in "conv1.forward  +channels ", "conv1.backward_weights  +lanes ", "conv1 by lanes: the network takes":
        assert re.search(rf"^{row}", text, re.MULTILINE), text


def test_the_program_from_one_end_to_the_other(tmp_path):
    what = "--cases", "tiny", "--threads", "1", "--quick", "--contestants", "numpy"
    python("-m", "benchmarks", *what, "--out", tmp_path)
    rows = {row["contestant"]: row for row in json.loads((tmp_path / "cpu.json").read_text())["matches"][0]["rows"]}
    assert set(rows) == {"fma-loop", "sgemm", "numpy"}
    for row in rows.values():
        assert (row["error"], len(row["samples"])) == (None, 2)
        assert all(0 < s < math.inf for s in row["samples"])
        assert row["peak_bytes"] > 10**7
    assert rows["numpy"]["setup"]["check"]["gradient"] < 1e-6
    text = (tmp_path / "cpu.md").read_text()
    assert "Do not quote its numbers" in text
    assert "| numpy |" in text
    assert (tmp_path / "cpu-1-threads.png").stat().st_size > 10_000
    assert not list(tmp_path.glob("*.svg"))


def test_real_images_are_for_cases_that_take_them(capsys, tmp_path):
    with pytest.raises(SystemExit):
        program.main(["--cases", "resnet20-b1", "--mnist", str(tmp_path)])
    assert "--mnist: resnet20-b1 takes no images of 28 x 28 pixels" in capsys.readouterr().err
