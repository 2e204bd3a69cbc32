"""ONNX files: their graph as `reader` takes it, through the package `onnx`. A file may come from anywhere."""

from pathlib import Path
from typing import Any

import numpy as np

from cnnexp.errors import BackendUnavailable, DataError, NetworkError, installing, refused
from cnnexp.network.reader import HANDLERS, Graph, Node
from cnnexp.system.files import open_regular, read_regular, read_up_to

MOST_BYTES = 1 << 31  # of a file: what protobuf reads
FIRST_OPSET = 13  # of 2020; before it, axes and ratios stand elsewhere
STANDARD = ("", "ai.onnx")


def load(path: str) -> Graph:
    """Return the graph of a file.

    BackendUnavailable: the package `onnx` is not installed; DataError: the file is missing, damaged, or keeps weights
    in a file that does not lie beside it; NetworkError: it is written for other operators than those that are known.
    """
    source = f"model.path={path!r}"
    try:
        import onnx
    except ImportError as error:
        raise BackendUnavailable(f"{source}: ONNX cannot be imported ({error}); {installing('onnx')}") from error
    with refused(DataError, source, ": no whole ONNX file"):
        model = onnx.load_model_from_string(read_regular(Path(path), MOST_BYTES))
        for opset in model.opset_import:
            newest = onnx.defs.onnx_opset_version()
            if opset.domain in STANDARD and not FIRST_OPSET <= opset.version <= newest:
                raise NetworkError(f"{source}: opset {opset.version}; export it for one of {FIRST_OPSET} .. {newest}")
        graph = _graph(model.graph, source, Path(path).parent)
        if all(node.operator in HANDLERS for node in graph.nodes):  # else `read` names the one that is not
            onnx.checker.check_model(model)
        return graph


def _graph(graph: Any, source: str, folder: Path) -> Graph:
    constants = {tensor.name: _array(tensor, source, folder) for tensor in graph.initializer}
    nodes = []
    for node in graph.node:
        attributes = {a.name: _plain(a, source, folder) for a in node.attribute}
        if node.op_type == "Constant" and node.domain in STANDARD:
            constants[node.output[0]] = np.asarray(next(iter(attributes.values())))
            continue
        operator = node.op_type if node.domain in STANDARD else f"{node.domain}.{node.op_type}"
        nodes.append(Node(operator, node.name or node.output[0], node.input, node.output, attributes))
    given = [value for value in graph.input if value.name not in constants]
    if len(given) != 1 or len(graph.output) != 1:
        raise NetworkError(f"{source}: {len(given)} inputs, {len(graph.output)} outputs; must be one of each")
    dims = [dim.dim_value or None for dim in given[0].type.tensor_type.shape.dim]
    return Graph(source, nodes, constants, given[0].name, graph.output[0].name, tuple(dims[1:]))


def _plain(attribute: Any, source: str, folder: Path) -> Any:
    from onnx import AttributeProto, helper

    if attribute.type == AttributeProto.TENSOR:
        return _array(attribute.t, source, folder)
    value = helper.get_attribute_value(attribute)
    return value.decode() if isinstance(value, bytes) else value


def _array(tensor: Any, source: str, folder: Path) -> np.ndarray:
    """Return a tensor, floats as float32; what lies outside the file must lie beside it."""
    from onnx import TensorProto, numpy_helper

    if tensor.data_location == TensorProto.EXTERNAL:
        where = {entry.key: entry.value for entry in tensor.external_data}
        name = where.get("location", "")
        if (folder / name).resolve().parent != folder.resolve() or Path(name).name != name:
            raise DataError(f"{source}: weights in {name!r}; must be in a file beside the model")
        with open_regular(folder / name) as file:
            file.seek(int(where.get("offset", 0)))
            tensor.raw_data = read_up_to(file, int(where.get("length", MOST_BYTES)))
        tensor.data_location = TensorProto.DEFAULT
    if min(tensor.dims, default=0) < 0:  # NumPy would work out how long it is
        raise DataError(f"{source}: {tensor.name} has the shape {[*tensor.dims]}; no length may be below 0")
    array = numpy_helper.to_array(tensor)
    floats = (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE)
    return array.astype(np.float32) if tensor.data_type in floats else array
