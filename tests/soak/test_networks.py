"""Random networks of the soak: as many as asked for, the same by their seed, and a wrong backend is told."""

import json
import sys

import numpy as np

from cnnexp.backends import BACKENDS, backend_class
from soak import commands, networks


class Wrong:
    """NumPy, whose gradients are one percent too large."""

    name = "wrong"

    def compile(self, *compiling):
        program = backend_class("numpy")().compile(*compiling)
        right = program.gradients

        def gradients(*step):
            totals, found = right(*step)
            return totals, found * np.float32(1.01)

        program.gradients = gradients
        return program


def tried(monkeypatch, capsys, here, words):
    monkeypatch.setattr(networks, "backends", lambda: here)
    monkeypatch.setattr(sys, "argv", ["networks", *words])
    networks.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_backend_with_a_wrong_gradient_is_told(monkeypatch, capsys):
    numpy = backend_class("numpy")()
    assert tried(monkeypatch, capsys, [numpy], ["1", "4"]) == [None] * 4
    told = [line for line in tried(monkeypatch, capsys, [numpy, Wrong()], ["1", "4"]) if line is not None]
    assert told
    assert all("images: wrong: AssertionError" in line for line in told)


def test_all_that_compute_here_take_part():
    assert {"python", "numpy", "cpu", "cpu-parallel", "cpu-simd"} <= {backend.name for backend in networks.backends()}
    assert not any(BACKENDS[backend.name].on_gpu for backend in networks.backends() if backend.name in BACKENDS)


def test_processes_follow_each_other_and_the_end_of_one_is_told(monkeypatch, tmp_path):
    (tmp_path / "part.py").write_text(
        "import soak, sys; print('null'); sys.exit(sys.argv[2:] == ['7000001', '1'] and 'gone')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    trials = commands.chunks("part", ["word"], 7, 1)
    assert [next(trials) for _ in range(3)] == [None, None, "seed 7000001: its process ended with exit code 1: gone\n"]
