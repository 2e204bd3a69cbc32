"""`cnnexp doctor`: what it tells of this machine, and of one that lacks something."""

import os
import re
from unittest.mock import MagicMock

import pytest
from commands import ROOT, raises
from tables import each

from cnnexp.app import doctor
from cnnexp.errors import BackendUnavailable, ConfigError
from cnnexp.measuring import environment
from cnnexp.system.cores import usable_cores


def told(capsys, monkeypatch, *backends: str) -> dict[str, str]:
    """Return the third column of what the command prints by its second, without line breaks."""
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(doctor, "BACKENDS", dict.fromkeys(backends, ""))
    doctor.command([])
    rows = [re.split(r" {2,}", line.strip())[-2:] for line in capsys.readouterr().out.splitlines()]
    return {row[0]: row[1] for row in rows if len(row) == 2}


def test_it_tells_of_the_machine_and_of_every_backend(capsys, monkeypatch):
    found = told(capsys, monkeypatch, "python", "numpy", "numpy-parallel")
    cores = usable_cores()
    assert found["cores"].startswith(f"{cores} usable")
    assert re.fullmatch(r"(128|256|512) bits, (4|8|16) float32 at once", found["vectors"])
    one, all_cores = (f"{n} thread{'s' if n > 1 else ''} of" for n in (1, cores))
    assert found[next(key for key in found if "python, numpy" in key)].startswith(f"yes, on {one}")
    assert found[next(key for key in found if "numpy-parallel" in key)].startswith(f"yes, on {all_cores}")
    assert found["numba"] == environment.versions()["version.numba"]
    assert found["store"].startswith(f"sqlite:///{environment.outputs_dir()}/mlflow.db")
    assert {"MPI", "mnist", "fashion_mnist"} <= found.keys()


def test_on_80_columns_nothing_is_clipped(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_ask", lambda question: "yes, on 2 threads of a processor of some name")
    monkeypatch.setenv("COLUMNS", "80")
    doctor.command([])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "\u2026" not in text
    assert str(environment.outputs_dir() / "mlflow.db") in "".join(text.split())


ABORTING = """
import os, sys
if "cnnexp.app.doctor:answer" in sys.orig_argv:
    from cnnexp.app import doctor
    doctor.examine = lambda *given: os.abort()
"""


@pytest.mark.skipif(os.name == "nt", reason="an abort is a signal on POSIX alone")
def test_what_dies_is_one_line_for_all_that_die_so(capsys, monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(ABORTING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert told(capsys, monkeypatch, "python", "numpy")["python, numpy"] == "no: its process was ended by SIGABRT"


@each(
    (BackendUnavailable("no GPU to compute on"), b"no: no GPU to compute on"),
    (OSError("libcuda.so: cannot open\nmore of it"), b"no: OSError: libcuda.so: cannot open"),
)
def test_what_is_missing_or_broken_is_told_not_raised(monkeypatch, error, said):
    monkeypatch.setattr(doctor, "backend_class", MagicMock(side_effect=error))
    assert doctor.answer(b"gpu") == said


def test_a_wrong_step_is_told_and_an_argument_refused(monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda backend, other, title: ("WRONG", f"{backend.name} by {other.name}"))
    assert (doctor.answer(b"cpu"), doctor.answer(b"numpy")) == (b"no: cpu by numpy", b"no: numpy by python")
    raises(ConfigError, "doctor --fix: takes no arguments", doctor.command, ["--fix"])
