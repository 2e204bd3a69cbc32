"""`cnnexp check`: what it says of backends that are right, and of those that are wrong on purpose."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from cnnexp import testing
from cnnexp.app import check
from cnnexp.backends import backend_class
from cnnexp.backends.layerwise import LayerwiseProgram
from cnnexp.backends.plain.numpy import Numpy, NumpyOps
from cnnexp.backends.processor import SequentialBackend
from cnnexp.errors import BackendUnavailable, CnnexpError, ConfigError, NetworkError
from cnnexp.network.layers import LAYERS, Residual


def examined(ops=NumpyOps, program=LayerwiseProgram, title="convolution"):
    """Return what is found of a backend made of these parts."""

    @dataclass(frozen=True)
    class Made(SequentialBackend):
        name: ClassVar[str] = "made"

        def compile(self, network, loss, optimizer, batch_size):
            return program(ops(), network, loss, optimizer, batch_size)

    return testing.examine(Made(), Numpy(), title)


def kinds(layers):
    inner = [kind for layer in layers if isinstance(layer, Residual) for kind in kinds(layer.layers)]
    return {type(layer).__name__ for layer in layers}.union(inner)


def test_a_right_backend_is_right_on_every_network(capsys):
    check.command(["numpy"])
    first, *rows, last = capsys.readouterr().out.splitlines()
    assert first.startswith("numpy beside python")
    assert [row.split("right, to ")[0].strip() for row in rows] == list(check.NETWORKS)
    assert last == f"numpy is right on {len(rows)} of {len(rows)} networks"


def test_the_networks_hold_every_kind_of_layer():
    held = set().union(*(kinds(layers) for _, layers in check.NETWORKS.values()))
    assert held == set(LAYERS)


class DoubledWeights(NumpyOps):
    def conv2d_backward(self, x, w, dy, window, dx, dw, db):
        super().conv2d_backward(x, w, dy, window, dx, dw, db)
        dw *= 1.001


class StaleBias(NumpyOps):
    def linear_backward(self, x, w, dy, dx, dw, db):
        before = None if db is None else db.copy()
        super().linear_backward(x, w, dy, dx, dw, db)
        if db is not None:
            db += before  # as if the buffer were not overwritten


class NoNumber(NumpyOps):
    def linear(self, x, w, b, y):
        super().linear(x, w, b, y)
        y[0] = np.nan


class Raising(NumpyOps):
    def conv2d(self, x, w, b, window, y):
        raise ValueError("tile of 7")


class Forgetful(LayerwiseProgram):
    def state(self):
        return {**super().state(), "velocity": super().state()["velocity"] * 0}


class Drifting(LayerwiseProgram):
    def restore(self, state):
        drift = np.float32(getattr(self, "_drift", 0.0))
        self._drift = drift + np.float32(1e-7)
        super().restore({**state, "parameters": state["parameters"] + drift})


class Refusing(LayerwiseProgram):
    def __init__(self, *arguments):
        raise NetworkError("no layers here")


@pytest.mark.parametrize(
    ("parts", "verdict", "text"),
    [
        ({"ops": DoubledWeights}, "WRONG", "the gradient of conv1.weight, a batch of 4 is off by 0.001 of its largest"),
        ({"ops": StaleBias}, "WRONG", "the gradient of linear1.bias"),
        ({"ops": NoNumber}, "WRONG", "the scores of predict is off by nan"),
        ({"ops": Raising}, "WRONG", "ValueError: tile of 7 (test_check.py, line "),
        ({"program": Forgetful}, "WRONG", "velocity after training"),
        ({"program": Drifting}, "WRONG", "the same steps end elsewhere"),
        ({"program": Refusing}, "refused", "refused: no layers here"),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_named(parts, verdict, text):
    found, said = examined(**parts)
    assert found == verdict
    assert text in said


def test_a_wrong_backend_ends_with_an_error(monkeypatch, capsys):
    monkeypatch.setattr(check, "NETWORKS", {key: check.NETWORKS[key] for key in ("linear", "convolution")})
    monkeypatch.setattr(
        backend_class("numpy"), "compile", lambda self, *made: LayerwiseProgram(DoubledWeights(), *made)
    )
    with pytest.raises(CnnexpError, match="check numpy: wrong on 1 of 2 networks"):
        check.command(["numpy"])
    assert "linear              right" in capsys.readouterr().out


def test_what_cannot_run_says_why():
    with pytest.raises(ConfigError, match=r"backend='numpi': unknown; .*did you mean 'numpy'"):
        check.command(["numpi"])
    for arguments in ([], ["numpy", "cpu"], ["backend=numpy"]):
        with pytest.raises(ConfigError, match="check: give one backend"):
            check.command(arguments)


def test_a_backend_that_lacks_its_device_is_told(monkeypatch):
    def lacking(self, *made):
        raise BackendUnavailable("no GPU to compute on")

    monkeypatch.setattr(backend_class("cpu"), "compile", lacking)
    with pytest.raises(CnnexpError, match="check cpu: takes none of the networks"):
        check.command(["cpu"])
