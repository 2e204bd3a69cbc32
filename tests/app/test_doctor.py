"""`cnnexp doctor`: what it tells of this machine, and of one that lacks something."""

import re

import pytest

from cnnexp import environment
from cnnexp.app import doctor
from cnnexp.backends.processor import usable_cores
from cnnexp.errors import BackendUnavailable, ConfigError


@pytest.fixture
def told(monkeypatch, capsys):
    """Return told() -> what the command prints, without line breaks."""
    monkeypatch.setenv("COLUMNS", "400")

    def told() -> str:
        doctor.command([])
        return capsys.readouterr().out

    return told


def answers(text: str) -> dict[str, str]:
    """Return the table's third column by its second."""
    rows = [[cell.strip() for cell in line.split("│")[2:4]] for line in text.splitlines() if "│" in line]
    return dict(rows)


def test_it_tells_of_the_machine_and_of_every_backend(told, monkeypatch):
    monkeypatch.setattr(doctor, "BACKENDS", dict.fromkeys(("numpy", "cpu", "cpu-parallel"), ""))
    found = answers(told())
    cores = usable_cores()
    assert found["cores"].startswith(f"{cores} usable")
    assert re.fullmatch(r"(128|256|512) bits, (4|8|16) float32 at once", found["vectors"])
    one, all_cores = (f"{n} thread{'s' if n > 1 else ''} of" for n in (1, cores))
    assert found[next(key for key in found if "numpy, cpu" in key)].startswith(f"yes, on {one}")
    assert found[next(key for key in found if "cpu-parallel" in key)].startswith(f"yes, on {all_cores}")
    assert found["numba"] == environment.versions()["version.numba"]
    assert found["store"].startswith(f"sqlite:///{environment.outputs_dir()}/mlflow.db")
    assert {"MPI", "mnist", "fashion_mnist"} <= found.keys()


def test_what_is_missing_is_one_line_for_all_that_lack_it(told, monkeypatch):
    def lacking(name):
        raise BackendUnavailable("no GPU to compute on")

    monkeypatch.setattr(doctor, "backend_class", lacking)
    monkeypatch.setattr(doctor, "SLOW", {})
    monkeypatch.setattr(doctor, "BACKENDS", {"gpu-naive": "", "gpu": ""})
    assert answers(told())["gpu-naive, gpu"] == "no: no GPU to compute on"


def test_a_broken_installation_is_told_not_raised(told, monkeypatch):
    def broken(name):
        raise OSError("libcuda.so: cannot open\nmore of it")

    monkeypatch.setattr(doctor, "backend_class", broken)
    monkeypatch.setattr(doctor, "BACKENDS", {"gpu": ""})
    assert answers(told())["gpu"] == "no: OSError: libcuda.so: cannot open"


def test_it_takes_no_arguments():
    with pytest.raises(ConfigError, match="doctor --fix: takes no arguments"):
        doctor.command(["--fix"])
