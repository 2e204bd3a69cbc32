"""One vocabulary: operations and kernels have the names of `Ops`, with its arguments in its order."""

import ast
import functools
import importlib
import inspect
import re
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from tables import each

import cnnexp.backends
from cnnexp.backends.cpu.sequential import CpuOps
from cnnexp.backends.plain.numpy import NumpyOps
from cnnexp.backends.plain.python import PythonOps
from cnnexp.backends.protocol import Ops
from cnnexp.errors import BackendUnavailable


@functools.cache
def methods(cls: type) -> dict[str, list[str]]:
    """Return the arguments of every public method."""
    functions = inspect.getmembers(cls, inspect.isfunction)
    return {name: list(inspect.signature(f).parameters) for name, f in functions if not name.startswith("_")}


@each(
    *(("plain.python", "PythonOps"), ("plain.numpy", "NumpyOps"), ("plain.unrolled", "UnrolledOps")),
    *(("cpu.sequential", "CpuOps"), ("cpu.published", "PublishedOps"), ("gpu.naive", "NaiveOps")),
    *(("gpu.shared", "SharedOps"), ("gpu.tuned", "TunedOps")),
)
def test_operations_have_the_names_and_arguments_of_the_contract(module, name):
    try:
        cls = getattr(importlib.import_module(f"cnnexp.backends.{module}"), name)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    assert methods(cls) == methods(Ops)


def test_inputs_come_first_and_outputs_last():
    outputs = {"y", "dx", "dw", "db", "x", "t", "saved", "total", "target", "d_scores", "losses", "hits"}
    for name, arguments in methods(Ops).items():
        if name in ("empty", "saved", "to_device", "to_host", "updater"):
            continue  # these return what they make
        assert arguments[-1] in outputs, name
        if name.endswith("_backward"):
            assert arguments[-1] in ("dx", "db"), name
            assert [a for a in arguments if a in ("dx", "dw", "db")] == arguments[-arguments[::-1].index("dx") - 1 :]


# a kernel may do a part of an operation, for a part of the data
PART = re.compile(r"_?(?P<operation>\w+?)(_(?P<of>input|weights|bias))?(_(image|row|features|tile))?")
OTHER_WORDS = re.compile(r"_?(conv|linear|pool|max_pool|avg_pool)\w*_(forward|gradients?)\b|_?conv_backward\w*")
ALIASES = {"argmax": "saved"}  # what a max-pool keeps


def kernels():
    """Yield (place, name, arguments) of every function of the compiled backends."""
    root = Path(cnnexp.backends.__file__).parent
    for path in sorted(path for room in ("cpu", "gpu", "simd") for path in (root / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                yield str(path.relative_to(root)), node.name, [argument.arg for argument in node.args.args]


def out_of_order(name: str, arguments: list[str]) -> bool:
    """Tell whether a function named as an operation, or a part of one, has its arguments in another order."""
    order = methods(Ops).get(PART.fullmatch(name)["operation"], [])
    found = [order.index(ALIASES.get(a, a)) for a in arguments if ALIASES.get(a, a) in order]
    return found != sorted(found)


def test_kernels_have_the_names_and_the_order_of_the_operations():
    found = list(kernels())
    assert {"conv2d", "conv2d_backward_input", "conv2d_backward_weights", "max_pool_backward"} <= {k[1] for k in found}
    assert [kernel for kernel in found if OTHER_WORDS.fullmatch(kernel[1]) or out_of_order(*kernel[1:])] == []


@each(("conv2d", "x y w"), ("linear_backward_input", "dx w dy"), ("max_pool_backward_image", "dy argmax dx"))
def test_another_order_is_found(name, arguments):
    assert out_of_order(name, arguments.split())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory may be in use before it is touched, or shared")
@pytest.mark.parametrize("ops", [CpuOps(), NumpyOps(), PythonOps()], ids=lambda ops: type(ops).__name__)
def test_no_batch_pays_for_the_first_use_of_its_buffers(ops):
    resident = psutil.Process().memory_info
    before = resident().rss
    buffer = ops.empty((5000, 1000, 10), np.float32)
    assert resident().rss - before > 0.9 * buffer.nbytes
