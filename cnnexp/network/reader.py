"""Networks from elsewhere: a graph of ONNX's operators, with its constants, becomes our layers and their weights.

`onnx_file` and `torch_module` make the graph. A value of it is a place in our network and how its axes stand there: the
graph's images are (N, C, H, W), ours (N, H, W, C). So weights are read in our order, and a Linear after a Flatten takes
its rows where our Flatten puts them. What is not known is refused with the node's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from cnnexp.errors import NetworkError
from cnnexp.network.elementwise import GELU, Elementwise, LeakyReLU, ReLU, Sigmoid, Tanh
from cnnexp.network.layers import (
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAvgPool,
    Layer,
    Linear,
    MaxPool2d,
    Residual,
    Shape,
)
from cnnexp.network.shapes import Network, infer_stages, window_count

NATIVE: Mapping[type[Elementwise], str] = {ReLU: "Relu", LeakyReLU: "LeakyRelu", Sigmoid: "Sigmoid", Tanh: "Tanh"}
"""ONNX's own operator of an elementwise layer."""
CHANNELS_FIRST, CHANNELS_LAST = (0, 3, 1, 2), (0, 1, 2, 3)
FEW = 64  # numbers of a constant that is computed with: a shape, or a factor
GRID = np.linspace(-6, 6, 97)
NONE = (0, 0, 0, 0)  # no padding
Weights = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Node:
    """An operation: ONNX's operator, what it takes and gives by name, and its attributes as plain values."""

    operator: str
    name: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Graph:
    """Nodes, each after those whose values it takes.

    Attributes:
        source: where it comes from, for messages, e.g. `model.path='net.onnx'`.
        nodes, constants: the latter by name.
        given, made: the names of what it takes and gives.
        dims: of what it takes, without the number of images; None for a side that is left open.
    """

    source: str
    nodes: Sequence[Node]
    constants: Mapping[str, np.ndarray]
    given: str
    made: str
    dims: tuple[int | None, ...]


@dataclass(frozen=True)
class Found:
    """What a graph is: layers, and their weights in the order of `Network.parameters` and `Network.running`.

    Attributes:
        dropped: what is not in the layers since training or the data set does it, in words.
    """

    layers: tuple[Layer, ...]
    parameters: Weights
    running: Weights
    dropped: tuple[str, ...] = ()

    def state(self, network: Network, seed: int, dtype: type = np.float32) -> dict[str, np.ndarray]:
        """Return the state that a run of these weights begins with, as `Network.initial_state` does of drawn ones."""
        state = network.initial_state(seed)
        wanted = {"parameters": (self.parameters, network.parameters), "running": (self.running, network.running)}
        for name, (arrays, places) in wanted.items():
            for array, place in zip(arrays, places, strict=True):
                if array.shape != place.shape:
                    raise NetworkError(f"{place.name}: a weight of shape {array.shape}; must be {place.shape}")
            if places:
                state[name] = np.concatenate([array.ravel() for array in arrays]).astype(dtype)
        return state


@dataclass(frozen=True, eq=False)
class _Point:
    """A place in the network: the layer that leads there, its weights, and the place before it."""

    shape: Shape
    before: _Point | None = None
    layer: Layer | None = None
    parameters: Weights = ()
    running: Weights = ()

    def back_to(self, start: _Point | None) -> Iterator[_Point]:
        """Yield the places from here back to one, which is left out."""
        point: _Point | None = self
        while point is not None and point is not start:
            yield point
            point = point.before


@dataclass(frozen=True)
class _Value:
    """A value of the graph.

    Attributes:
        axes: where its axes lie in ours, (N, H, W, C).
        order: of a flat one, where each of its numbers stands in ours; None where they stand alike.
        pads: of a Pad before it: top, left, bottom, right. fill: with what.
        end: the softmax that it is after.
        rule: of arithmetic with numbers, what is made of the place's values; None if nothing.
    """

    point: _Point
    axes: tuple[int, ...]
    order: np.ndarray | None = None
    pads: tuple[int, int, int, int] = NONE
    fill: float = 0.0
    end: str = ""
    rule: Callable[[Any], Any] | None = None


def read(graph: Graph, input_shape: Shape) -> Found:
    """Return the layers of a graph on images of a shape, (H, W, C) or (D,), and their weights.

    Raises:
        NetworkError: it takes other shapes, or a node is not known or does not fit.
    """
    height_last = (input_shape[-1:] + input_shape[:-1], CHANNELS_FIRST)
    ways = {1: [(input_shape, (0, 1))], 3: [height_last, (input_shape, CHANNELS_LAST)]}[len(input_shape)]
    if input_shape[2:] == (1,):
        ways.append((input_shape[:2], (0, 1, 2)))
    fitting = [axes for dims, axes in ways if _fits(graph.dims, dims)]
    if not fitting:
        takes = " x ".join("?" if n is None else str(n) for n in graph.dims)
        legal = " or ".join(" x ".join(map(str, dims)) for dims, _ in ways)
        raise NetworkError(
            f"{graph.source}: takes inputs of {takes}; the data set's fit {legal}; choose another dataset, or "
            "export the network for its images"
        )
    refused = None
    for axes in fitting:
        try:
            return _Reader(graph, _Value(_Point(input_shape), axes)).found()
        except NetworkError as error:
            refused = refused or error
    raise refused or NetworkError(graph.source)


def _fits(given: Sequence[int | None], wanted: Sequence[int]) -> bool:
    return len(given) == len(wanted) and all(n in (None, want) for n, want in zip(given, wanted, strict=True))


class _Reader:
    """Goes through the nodes of one graph, first to last."""

    def __init__(self, graph: Graph, start: _Value) -> None:
        self._graph, self._node, self.dropped = graph, Node("", "", (), ()), list[str]()
        self._values: dict[str, _Value | np.ndarray] = {**graph.constants, graph.given: start}

    def found(self) -> Found:
        for node in self._graph.nodes:
            self._node = node
            if node.operator not in HANDLERS:
                self.refuse("unknown operator", f"known are {', '.join(sorted(HANDLERS))}")
            try:
                made = HANDLERS[node.operator](self, *map(self._take, node.inputs), **node.attributes)
            except NetworkError:
                raise
            except Exception as error:  # attributes and shapes may be anything
                said = (str(error).splitlines() or [""])[0]
                self.refuse(f"does not fit its inputs or attributes: {said}", "see ONNX's definition of the operator")
            self._values[node.outputs[0]] = made
        if self._graph.made not in self._values:
            self.refuse(f"no node makes the output {self._graph.made!r}", "a graph that gives the classes' scores")
        value = self.value(self._values[self._graph.made], ended=True)
        if value.order is not None:
            self.refuse("the scores stand in the order of an image, channels first", "a Gemm after the Flatten")
        points = list(value.point.back_to(None))[-2::-1]
        return Found(
            tuple(point.layer for point in points if point.layer is not None),
            tuple(array for point in points for array in point.parameters),
            tuple(array for point in points for array in point.running),
            tuple(dict.fromkeys(self.dropped)),
        )

    def refuse(self, why: str, fit: str) -> NoReturn:
        node = self._node
        raise NetworkError(f"{self._graph.source}: node {node.name!r} ({node.operator}): {why}; what fits: {fit}")

    def _take(self, name: str) -> _Value | np.ndarray | None:
        if name and name not in self._values:
            self.refuse(f"takes {name!r}, which nothing before it gives", "the first output of an earlier node")
        return self._values[name] if name else None

    def value(self, x: Any, padded: bool = False, ended: bool = False) -> _Value:
        """Return a value of the network, arithmetic that led to it as a layer; refuse a constant."""
        if not isinstance(x, _Value):
            self.refuse("computes with constants alone, or takes too few inputs", "an input that follows the images")
        if x.rule is not None:
            x = self._by_rule(x, x.rule)
        if x.pads != NONE and not padded:
            self.refuse("a Pad stands before it", "a Pad before a Conv or a MaxPool")
        if x.end and not ended:
            self.refuse(f"follows {x.end!r}", "a Softmax at the end alone, where the loss takes its place")
        return x

    def constant(self, array: Any, what: str) -> np.ndarray:
        if not isinstance(array, np.ndarray):
            self.refuse(f"its {what} is computed or missing", f"a constant {what}")
        return array

    def image(self, x: Any, padded: bool = False) -> _Value:
        x = self.value(x, padded)
        if len(x.point.shape) != 3 or x.axes != CHANNELS_FIRST:
            self.refuse(f"takes axes {x.axes[1:]} of an input of {x.point.shape}", "an image (N, C, H, W)")
        return x

    def add(self, x: _Value, layer: Layer, parameters: Weights = (), running: Weights = ()) -> _Value:
        """Return what a layer makes of a value."""
        try:
            shape = infer_stages(x.point.shape, (layer,))[0].output_shape
        except NetworkError as error:
            self.refuse(str(error).partition(": ")[2], "an input of another shape")
        return replace(x, point=_Point(shape, x.point, layer, parameters, running), pads=NONE, rule=None)

    def _by_rule(self, x: _Value, rule: Callable[[Any], Any]) -> _Value:
        x = replace(x, rule=None)
        if np.allclose(rule(GRID), GRID, atol=1e-6):
            return x
        if x.point.before is None and np.allclose(rule(255 * GRID), GRID, atol=1e-6):
            self.dropped.append("the division by 255, which the data set does")
            return x
        gelu = np.array([v * (1 + math.erf(v * math.sqrt(0.5))) / 2 for v in GRID])
        if not np.allclose(_array_of(rule, GRID), gelu, atol=1e-6):
            self.refuse("arithmetic with numbers that is no layer", "that of a GELU, or a bias after Conv or MatMul")
        return self.add(x, GELU())


def _array_of(rule: Callable[[Any], Any], x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(rule(x), x.shape)


def _convolve(r: _Reader, x: Any, weight: Any, bias: Any = None, **at: Any) -> _Value:
    x, weight = r.image(x, padded=True), r.constant(weight, "weight")
    for key, only in (("group", 1), ("dilations", [1, 1])):
        if at.get(key, only) != only:
            r.refuse(f"{key}={at[key]}", f"{key}={only}: there are neither grouped nor dilated convolutions")
    filters, channels, kernel, width = weight.shape
    if kernel != width or channels != x.point.shape[2]:
        r.refuse(f"a weight of shape {weight.shape} on {x.point.shape[2]} channels", "square kernels, (F, C, K, K)")
    if x.fill:
        r.refuse(f"a Pad of {x.fill} before it", "a Pad of zeros")
    stride, pads = _step(r, at), _pads(r, x, at, kernel)
    padding = _padding(r, x.point.shape, kernel, stride, pads, ("valid", pads[0], "same", "auto", "full", "floor"))
    layer = Conv2d(filters, kernel, stride, padding, bias is not None)
    return r.add(x, layer, (weight.transpose(2, 3, 1, 0), *([] if bias is None else [r.constant(bias, "bias")])))


def _pool(r: _Reader, x: Any, layer: type[MaxPool2d | AvgPool2d], **at: Any) -> _Value:
    x = r.image(x, padded=True)
    size, width = at["kernel_shape"]
    if size != width or at.get("dilations", [1, 1]) != [1, 1]:
        r.refuse(f"windows of {size} x {width}, dilations {at.get('dilations', 1)}", "square windows, not dilated")
    positive = isinstance(x.point.layer, ReLU | Sigmoid)
    if x.pads != NONE and (layer is AvgPool2d or not (x.fill == -np.inf or (x.fill == 0 and positive))):
        r.refuse(f"a Pad of {x.fill} before it", "a MaxPool after a Pad of -inf, or of 0 after a Relu")
    stride, pads = _step(r, at), _pads(r, x, at, size)
    if layer is AvgPool2d and any(pads) and at.get("count_include_pad"):
        r.refuse("averages over padding", "count_include_pad=0")
    ceil = bool(at.get("ceil_mode"))
    padding = _padding(r, x.point.shape, size, stride, pads, ("valid", "auto", "floor"), ceil)
    return r.add(x, layer(size, stride, padding))


def _step(r: _Reader, at: Mapping[str, Any]) -> int:
    down, across = at.get("strides", [1, 1])
    if down != across:
        r.refuse(f"strides={[down, across]}", "equal strides down and across")
    return int(down)


def _pads(r: _Reader, x: _Value, at: Mapping[str, Any], size: int) -> tuple[int, int, int, int]:
    """Return top, left, bottom and right of a node's window, a Pad before it included."""
    pads = [int(n) for n in at.get("pads", NONE)]
    if (auto := at.get("auto_pad", "NOTSET")) in ("SAME_UPPER", "SAME_LOWER"):
        stride, sides = _step(r, at), x.point.shape[:2]
        missing = [max((-(-side // stride) - 1) * stride + size - side, 0) for side in sides]
        less, more = [n // 2 for n in missing], [n - n // 2 for n in missing]
        pads = less + more if auto == "SAME_UPPER" else more + less
    top, left, bottom, right = (a + b for a, b in zip(pads, x.pads, strict=True))
    return top, left, bottom, right


def _padding(
    r: _Reader,
    shape: Shape,
    size: int,
    stride: int,
    pads: tuple[int, int, int, int],
    choices: tuple[str | int, ...],
    ceil: bool = False,
) -> str | int:
    """Return which of our paddings gives these windows."""

    def windows(side: int, before: int, after: int) -> tuple[int, int]:
        room = side + before + after - size
        count = room // stride + 1
        return before, count + (ceil and room % stride > 0 and count * stride < side + before)

    wanted = [windows(shape[axis], pads[axis], pads[axis + 2]) for axis in (0, 1)]
    for choice in (*choices, f"floor+{pads[0]}"):
        if [window_count(side, size, stride, choice) for side in shape[:2]] == wanted:
            return choice
    r.refuse(f"pads={list(pads)} around {shape[0]} x {shape[1]} pixels", "pads that are equal on every side")


def _linear(r: _Reader, x: Any, weight: Any, bias: Any = None, **at: Any) -> _Value:
    x, weight = r.value(x), r.constant(weight, "weight")
    scale, shift = at.get("alpha", 1.0), at.get("beta", 1.0)
    weight = weight.T if at.get("transB") else weight
    if len(x.point.shape) != 1 or at.get("transA") or weight.ndim != 2 or len(weight) != x.point.shape[0]:
        r.refuse(f"a weight of {weight.shape} on an input of {x.point.shape}", "a flat input, its weight (inputs, outputs)")
    if (scale, shift) != (1, 1):
        r.refuse(f"alpha={scale}, beta={shift}", "alpha=1 and beta=1")
    if x.order is not None:
        ours = np.empty_like(weight)
        ours[x.order] = weight
        weight = ours
    layer = Linear(weight.shape[1])
    if bias is None:
        return r.add(replace(x, order=None), replace(layer, bias=False), (weight,))
    bias = np.broadcast_to(r.constant(bias, "bias").reshape(-1), (layer.features,))
    return r.add(replace(x, order=None), layer, (weight, bias))


def _normalize(r: _Reader, x: Any, *arrays: Any, epsilon: float = 1e-5, momentum: float = 0.9, **_: Any) -> _Value:
    scale, shift, mean, variance = (r.constant(array, "scale, shift or average") for array in arrays)
    layer = BatchNorm2d(round(1 - momentum, 6), round(epsilon, 12))
    return r.add(r.image(x), layer, (scale, shift), (mean, variance))


def _mean(r: _Reader, x: Any, axes: Any = None, **at: Any) -> _Value:
    """GlobalAveragePool, or ReduceMean over the image's sides."""
    x = r.value(x)
    given = at.get("axes", (-2, -1)) if axes is None else r.constant(axes, "axes").tolist()
    if len(x.axes) != 4 or len(x.point.shape) != 3 or {x.axes[axis] for axis in given} != {1, 2}:
        r.refuse(f"a mean over axes {list(given)} of {x.point.shape}", "the mean over height and width of an image")
    return replace(r.add(x, GlobalAvgPool()), axes=(0, 1))


def _flatten(r: _Reader, x: Any, axis: int = 1) -> _Value:
    x = r.value(x, ended=len(getattr(x, "point", _Point(())).shape) == 1)
    if axis not in (1, 1 - len(x.axes)):
        r.refuse(f"axis={axis}", "axis=1")
    if len(x.point.shape) == 1:
        return x
    places = np.arange(math.prod(x.point.shape)).reshape(1, *x.point.shape[: len(x.axes) - 1])
    order = places.transpose(x.axes).ravel()
    alike = bool((order[1:] > order[:-1]).all())
    return replace(r.add(x, Flatten()), axes=(0, 1), order=None if alike else order)


def _reshape(r: _Reader, x: Any, shape: Any, **_: Any) -> Any:
    if isinstance(x, np.ndarray):
        return x.reshape(r.constant(shape, "shape"))
    wanted, shape = r.value(x, ended=True).point.shape, r.constant(shape, "shape").tolist()
    flat = len(shape) == 2 or (len(wanted) == 1 and shape[2:] == [1, 1])
    if not flat or shape[1] not in (-1, math.prod(wanted)) or shape[0] not in (-1, 0, 1):
        r.refuse(f"to {shape}, of an input of {wanted}", "one that flattens, as [0, -1]")
    return _flatten(r, x)


def _transpose(r: _Reader, x: Any, perm: Sequence[int] | None = None) -> Any:
    if isinstance(x, np.ndarray):
        return x.transpose(perm)
    x = r.value(x)
    if len(x.axes) == 2 or perm is None or perm[0] != 0:
        return x if perm and list(perm) == sorted(perm) else r.refuse(f"perm={perm}", "images first, as before")
    return replace(x, axes=tuple(x.axes[axis] for axis in perm))


def _pad(r: _Reader, x: Any, pads: Any, fill: Any = None, axes: Any = None, mode: str = "constant") -> _Value:
    x, pads = r.image(x), r.constant(pads, "pads").tolist()
    if mode != "constant" or axes is not None or len(pads) != 8 or any(pads[i] for i in (0, 1, 4, 5)) or min(pads) < 0:
        r.refuse(f"mode={mode}, pads={pads}", "a constant around the image's sides, without axes")
    around = pads[2], pads[3], pads[6], pads[7]
    return replace(x, pads=around, fill=0.0 if fill is None else float(r.constant(fill, "value").item()))


def _drop_out(r: _Reader, x: Any, ratio: Any = None, *_: Any, **__: Any) -> _Value:
    return r.add(r.value(x), Dropout(0.5 if ratio is None else round(float(r.constant(ratio, "ratio").item()), 6)))


def _softmax(r: _Reader, x: Any, axis: int = -1) -> _Value:
    x = r.value(x)
    if axis not in (-1, 1) or len(x.point.shape) != 1:
        r.refuse(f"over axis {axis} of {x.point.shape}", "the last axis of a flat input")
    r.dropped.append(f"the {r._node.operator} at the end, which the loss does")
    return replace(x, end=r._node.name)


def _compute(operation: Callable[..., Any], adds: bool = False) -> Callable[..., Any]:
    """Return what reads arithmetic: on shapes, on a value and a number, a bias, or as the end of a Residual."""

    def handler(r: _Reader, *given: Any) -> Any:
        if all(isinstance(x, np.ndarray) for x in given):
            if max(x.size for x in given) > FEW:
                r.refuse("computes with large constants", "weights as they are")
            return operation(*given)
        values = [x for x in given if isinstance(x, _Value)]
        if adds and len(values) == 2:
            both = [r.value(x) for x in values]
            if values[0].rule is None or values[1].rule is None:
                return _join(r, *both)
        if adds and len(values) == 1 and (biased := _biased(r, values[0], [x for x in given if x is not values[0]][0])):
            return biased
        if any(x.size != 1 for x in given if isinstance(x, np.ndarray)) or len({id(x.point) for x in values}) > 1:
            r.refuse("arithmetic of two branches, or with a vector", "Add of a branch and its own input, or of a bias")
        rules = [_constantly(x) if isinstance(x, np.ndarray) else x.rule or _itself for x in given]
        return replace(values[0], rule=lambda v: operation(*(rule(v) for rule in rules)))

    return handler


def _itself(x: Any) -> Any:
    return x


def _constantly(array: np.ndarray) -> Callable[[Any], Any]:
    return lambda _: float(array.item())


def _biased(r: _Reader, x: _Value, array: Any) -> _Value | None:
    """Return a value with a constant as the bias of the layer before it; None where that takes none."""
    point = x.point
    if x.rule or not isinstance(point.layer, Conv2d | Linear) or point.layer.bias or array.size != point.shape[-1]:
        return None
    bias = array.reshape(-1)
    made = replace(point, layer=replace(point.layer, bias=True), parameters=(*point.parameters, bias))
    return replace(r.value(x), point=made)


def _join(r: _Reader, a: _Value, b: _Value) -> _Value:
    """x + f(x)."""
    for short, long in ((a.point, b.point), (b.point, a.point)):
        inside = list(long.back_to(short))[::-1]
        if inside and inside[0].before is short:
            if a.axes != b.axes or a.order is not None or b.order is not None:
                r.refuse("adds branches of other orders", "branches that are both (N, C, H, W), or flat after a Gemm")
            layers = tuple(point.layer for point in inside if point.layer is not None)
            parameters = tuple(array for point in inside for array in point.parameters)
            running = tuple(array for point in inside for array in point.running)
            return r.add(replace(a, point=short), Residual(layers), parameters, running)
    r.refuse("adds two branches, each with layers of its own", "a shortcut that is the other branch's input itself")


def _gather(r: _Reader, array: Any, indices: Any, axis: int = 0) -> np.ndarray:
    array, indices = r.constant(array, "input"), r.constant(indices, "index")
    if max(array.size, indices.size) > FEW:
        r.refuse("computes with large constants", "weights as they are")
    return np.take(array, indices, axis)


def _join_axis(r: _Reader, *given: Any, axis: int) -> Any:
    """Concat, of shapes, or of 1 - y and y at the end of a network of two classes."""
    if all(isinstance(x, np.ndarray) for x in given):
        if sum(x.size for x in given) > FEW:
            r.refuse("computes with large constants", "weights as they are")
        return np.concatenate(given, axis)
    other, y = given
    if not (isinstance(other, _Value) and isinstance(y, _Value) and other.point is y.point and other.rule) or not (
        y.rule is None and y.point.shape == (1,) and np.allclose(_array_of(other.rule, GRID), 1 - GRID)
    ):
        r.refuse("joins branches side by side", "Concat of 1 - y and y at the end")
    r.dropped.append("the probability of the first class, which is 1 minus the second's")
    return replace(y, end=r._node.name)


def _shape(r: _Reader, x: Any, **_: Any) -> np.ndarray:
    x = r.value(x, ended=True)
    dims = (1, *x.point.shape)
    return np.array([dims[axis] for axis in x.axes])


def _axes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Squeeze and Unsqueeze: of shapes, or of a flat value, of which they change nothing."""

    def handler(r: _Reader, x: Any, axes: Any) -> Any:
        if isinstance(x, np.ndarray):
            return function(x, tuple(r.constant(axes, "axes").ravel().tolist()))
        x = r.value(x)
        return x if len(x.point.shape) == 1 else r.refuse("changes the axes of an image", "Flatten")

    return handler


def _same(r: _Reader, x: Any, **_: Any) -> Any:
    return x


def _apply(layer: type[Elementwise]) -> Callable[..., _Value]:
    return lambda r, x: r.add(r.value(x), layer())


def _gelu(r: _Reader, x: Any, approximate: str = "none") -> _Value:
    if approximate != "none":
        r.refuse(f"approximate={approximate}", "approximate=none")
    return r.add(r.value(x), GELU())


HANDLERS: Mapping[str, Callable[..., Any]] = {
    **{operator: _apply(layer) for layer, operator in NATIVE.items()},
    "LeakyRelu": lambda r, x, alpha=0.01: r.add(r.value(x), LeakyReLU(round(alpha, 9))),
    "Gelu": _gelu,
    "Conv": _convolve,
    "MaxPool": lambda r, x, **at: _pool(r, x, MaxPool2d, **at),
    "AveragePool": lambda r, x, **at: _pool(r, x, AvgPool2d, **at),
    "GlobalAveragePool": _mean,
    "ReduceMean": _mean,
    "BatchNormalization": _normalize,
    "Gemm": _linear,
    "MatMul": _linear,
    "Flatten": _flatten,
    "Reshape": _reshape,
    "Transpose": _transpose,
    "Pad": _pad,
    "Dropout": _drop_out,
    "Softmax": _softmax,
    "LogSoftmax": _softmax,
    "Identity": _same,
    "Cast": _same,
    "Add": _compute(np.add, adds=True),
    "Sub": _compute(np.subtract),
    "Mul": _compute(np.multiply),
    "Div": _compute(np.divide),
    "Erf": _compute(np.vectorize(math.erf, [float])),
    "Shape": _shape,
    "Gather": _gather,
    "Concat": _join_axis,
    "Squeeze": _axes(np.squeeze),
    "Unsqueeze": _axes(np.expand_dims),
}
