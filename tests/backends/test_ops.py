"""One vocabulary: every set of layerwise operations has the methods of `Ops`, with its arguments in its order."""

import importlib
import inspect

import pytest

from cnnexp.backends.protocol import Ops
from cnnexp.errors import BackendUnavailable

SETS = (
    "plain.python:PythonOps",
    "plain.numpy:NumpyOps",
    "plain.numpy_parallel:SplitOps",
    "plain.unrolled:UnrolledOps",
    "cpu.sequential:CpuOps",
    "cpu.published:PublishedOps",
    "gpu.naive:NaiveOps",
    "gpu.shared:SharedInputOps",
    "gpu.shared:SharedOps",
    "gpu.tuned:TunedOps",
)


def methods(cls: type) -> dict[str, list[str]]:
    """Return the arguments of every public method."""
    functions = inspect.getmembers(cls, inspect.isfunction)
    return {name: list(inspect.signature(f).parameters) for name, f in functions if not name.startswith("_")}


@pytest.mark.parametrize("where", SETS)
def test_operations_have_the_names_and_arguments_of_the_contract(where):
    module, _, name = where.partition(":")
    try:
        cls = getattr(importlib.import_module(f"cnnexp.backends.{module}"), name)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    found, contract = methods(cls), methods(Ops)
    if name == "SplitOps":  # hands what it does not share out to the operations that it is made of
        assert found.pop("shutdown") == ["self"]
        contract = {name: arguments for name, arguments in contract.items() if name in found}
    assert found == contract


def test_inputs_come_first_and_outputs_last():
    outputs = {"y", "dx", "dw", "db", "x", "t", "saved", "total", "target", "d_scores", "losses", "hits"}
    for name, arguments in methods(Ops).items():
        if name in ("empty", "saved", "to_device", "to_host", "updater"):
            continue  # these return what they make
        assert arguments[-1] in outputs, name
        if name.endswith("_backward"):
            assert arguments[-1] in ("dx", "db"), name
            assert [a for a in arguments if a in ("dx", "dw", "db")] == arguments[-arguments[::-1].index("dx") - 1 :]
