"""A module of PyTorch's as a model, weights included, and its trained weights back into the module."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from cnnexp.errors import BackendUnavailable, NetworkError, installing, refused
from cnnexp.network.layers import Shape
from cnnexp.network.models import Custom
from cnnexp.network.reader import Found, Graph, Node, read
from cnnexp.network.shapes import Network

Module = TypeVar("Module")


class Trained(Protocol):
    """What `to_torch` takes: a `Fit`, or any that has a network and the state of its program."""

    @property
    def network(self) -> Network: ...
    @property
    def state(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class FromTorch(Custom):
    """A module's layers; training begins with the weights that it has."""

    input_shape: Shape = ()
    found: Found = field(default=Found((), (), ()), repr=False, compare=False)

    def network(self, input_shape: Shape, classes: int) -> Network:
        if input_shape != self.input_shape:
            raise NetworkError(f"from_torch: made for images of {self.input_shape}, the data set's are {input_shape}")
        return super().network(input_shape, classes)

    def initial_state(self, network: Network, seed: int) -> dict[str, np.ndarray]:
        return self.found.state(network, seed)


def from_torch(module: Any, input_shape: Sequence[int]) -> FromTorch:
    """Return a module as a model for `fit`, which begins with the module's weights.

    Args:
        module: an `nn.Sequential`, or any that `torch.export` can trace to the layers that there are.
        input_shape: of one input as the module takes it, (C, H, W) or (D,).

    Raises:
        BackendUnavailable: PyTorch is not installed.
        NetworkError: it cannot be traced, or has an operation that no layer does, which is named.
    """
    shape = (*input_shape[1:], *input_shape[:1])
    graph, keys = _trace(module, input_shape)
    state = module.state_dict()
    weights = {name: state[key].detach().cpu().numpy().copy() for name, key in keys.items()}
    found = read(replace(graph, constants={**graph.constants, **weights}), shape)
    return FromTorch(found.layers, input_shape=shape, found=found)


def to_torch(trained: Trained, module: Module) -> Module:
    """Write trained weights and running averages into the module that `from_torch` took; return it.

    Raises:
        NetworkError: the module is of other layers.
    """
    shape = trained.network.input_shape
    graph, keys = _trace(module, (*shape[-1:], *shape[:-1]))
    state: dict[str, Any] = module.state_dict()  # type: ignore[attr-defined]
    # read once more, with each weight's place among all of them for the weight: so it is known which came from where
    flat = np.concatenate([state[key].detach().cpu().numpy().ravel() for key in keys.values()])
    parts = np.split(np.arange(len(flat)), np.cumsum([state[key].numel() for key in keys.values()])[:-1])
    places = {name: part.reshape(state[key].shape) for (name, key), part in zip(keys.items(), parts, strict=True)}
    found = read(replace(graph, constants={**graph.constants, **places}), shape)
    if found.layers != trained.network.layers:
        raise NetworkError("to_torch: the module is of other layers than what was trained; give that of from_torch")
    for name, order in found.state(trained.network, 0, np.int64).items():
        if name in ("parameters", "running"):
            flat[order] = trained.state[name]
    for name, key in keys.items():
        state[key].copy_(state[key].new_tensor(flat[places[name]]))
    return module


def _trace(module: Any, input_shape: Sequence[int]) -> tuple[Graph, dict[str, str]]:
    """Return a module's graph without its weights, and the keys in its `state_dict` of the weights' names."""
    try:
        import torch
    except ImportError as error:
        raise BackendUnavailable(f"from_torch: PyTorch cannot be imported ({error}); {installing('torch')}") from error
    given = torch.zeros(1, *input_shape)
    with refused(NetworkError, f"from_torch: torch.export cannot trace the module on {given.shape}", ""):
        program = torch.export.export(copy.deepcopy(module).cpu().float().eval(), (given,), strict=False)
    signature = program.graph_signature
    keys = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    nodes, constants = [], dict[str, np.ndarray]()

    def name_of(value: Any) -> str:
        if value is None or isinstance(value, torch.fx.Node):
            return value.name if value else ""
        constants[f"{value}"] = np.asarray(value)
        return f"{value}"

    for node in program.graph.nodes:
        if _changes_another(node):
            why = "changes in place what another layer reads by another name; use x = f(x)"
            raise NetworkError(f"from_torch: node {node.name!r} ({node.target}) {why}")
        if node.name in keys and len(node.users) > 1:
            raise NetworkError(f"from_torch: {keys[node.name]} is of several layers; each must have its own weights")
        if node.op == "call_function":
            operator, inputs, attributes = _translate(node)
            nodes.append(Node(operator, node.name, [name_of(value) for value in inputs], [node.name], attributes))
    used = {name: key for name, key in keys.items() if any(name in node.inputs for node in nodes)}
    given_name, made = signature.user_inputs[0], signature.user_outputs[0]
    return Graph("from_torch", nodes, constants, given_name, made, tuple(input_shape), folds=False), used


def _changes_another(node: Any) -> bool:
    """Return whether a node works in place on a view, as `relu_(x.view(...))` does, of what others still read."""
    if node.op != "call_function" or not node.target.__name__.partition(".")[0].endswith("_"):
        return False
    place = node.args[0]
    while schema := getattr(place.target, "_schema", None):
        if not (found := schema.returns[0].alias_info) or found.is_write:
            break
        place = place.args[0]
        if len(place.users) > 1:
            return True
    return False


def _translate(node: Any) -> tuple[str, Sequence[Any], dict[str, Any]]:
    """Return ONNX's operator of a node of PyTorch's, its inputs and attributes."""
    if (schema := getattr(node.target, "_schema", None)) is None:
        return str(node.target), (), {}
    given = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    given.update(zip((a.name for a in schema.arguments), node.args, strict=False), **node.kwargs)
    kind = schema.name.removeprefix("aten::").rstrip("_")
    if kind in ALIKE and given.get("alpha", 1) == 1 and not given.get("rounding_mode"):
        return ALIKE[kind], [given[name] for name in ("self", "other") if name in given], {}
    translated = OPERATORS[kind](given) if kind in OPERATORS else None
    return translated or (str(node.target), (), {})


def _window(a: Mapping[str, Any]) -> dict[str, Any]:
    """Return a window as ONNX says it; PyTorch gives one number where both sides are alike."""
    names = {"kernel_size": "kernel_shape", "dilation": "dilations", "stride": "strides"}
    window: dict[str, Any] = {name: [a[key][0], a[key][-1]] for key, name in names.items() if a.get(key)}
    window.setdefault("strides", window.get("kernel_shape"))
    if not isinstance(a["padding"], str):
        window["pads"] = [a["padding"][0], a["padding"][-1]] * 2
    elif a["padding"] == "same":
        window["auto_pad"] = "SAME_UPPER"
    return {**window, **{key: a.get(key) for key in ("ceil_mode", "count_include_pad")}}


def _pads(sides: Sequence[int]) -> list[int]:
    """Return the pads of four axes as ONNX says them; PyTorch gives pairs, the last axis's first."""
    pairs = [*sides, *[0] * (8 - len(sides))]
    return [*pairs[6::-2], *pairs[7::-2]]


ALIKE = {
    **{"relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh", "erf": "Erf", "matmul": "MatMul"},
    **{"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div"},
    **{"alias": "Identity", "contiguous": "Identity", "clone": "Identity", "detach": "Identity"},
}
Translated = tuple[str, Sequence[Any], dict[str, Any]] | None
OPERATORS: Mapping[str, Callable[[Mapping[str, Any]], Translated]] = {
    "conv2d": lambda a: ("Conv", (a["input"], a["weight"], a["bias"]), {**_window(a), "group": a["groups"]}),
    "linear": lambda a: ("Gemm", (a["input"], a["weight"], a["bias"]), {"transB": 1}),
    "batch_norm": lambda a: (
        "BatchNormalization",
        [a[key] for key in ("input", "weight", "bias", "running_mean", "running_var")],
        {"momentum": 1 - a["momentum"], "epsilon": a["eps"]},
    ),
    "max_pool2d": lambda a: ("MaxPool", (a["self"],), _window(a)),
    "avg_pool2d": lambda a: None if a["divisor_override"] else ("AveragePool", (a["self"],), _window(a)),
    "adaptive_avg_pool2d": lambda a: ("GlobalAveragePool", (a["self"],), {}) if {*a["output_size"]} == {1} else None,
    "mean": lambda a: ("ReduceMean", (a["self"],), {"axes": a.get("dim") or []}),
    "leaky_relu": lambda a: ("LeakyRelu", (a["self"],), {"alpha": a["negative_slope"]}),
    "gelu": lambda a: ("Gelu", (a["self"],), {"approximate": a["approximate"]}),
    "slice": lambda a: ("Slice", (a["self"], *([a[key]] for key in ("start", "end", "dim", "step"))), {}),
    "pad": lambda a: ("Pad", (a["self"], _pads(a["pad"]), a["value"] or 0.0), {"mode": a["mode"]}),
    "dropout": lambda a: ("Dropout", (a["input"], a["p"]), {}),
    "flatten": lambda a: ("Flatten", (a["self"],), {"axis": a["start_dim"]}) if a["end_dim"] in (-1, 3) else None,
    "view": lambda a: ("Reshape", (a["self"], a["size"]), {}),
    "reshape": lambda a: ("Reshape", (a["self"], a["shape"]), {}),
    "permute": lambda a: ("Transpose", (a["self"],), {"perm": a["dims"]}),
    "softmax": lambda a: ("Softmax", (a["self"],), {"axis": a["dim"]}),
    "log_softmax": lambda a: ("LogSoftmax", (a["self"],), {"axis": a["dim"]}),
}
