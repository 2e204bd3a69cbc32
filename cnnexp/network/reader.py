"""Networks from elsewhere: a graph of ONNX's operators, with its constants, becomes our layers and their weights.

`onnx_file` and `torch_module` make the graph. A value of it is a place in our network and how its axes stand there: the
graph's images are (N, C, H, W), ours (N, H, W, C). So weights are read in our order, and a Linear after a Flatten takes
its rows where our Flatten puts them. What is not known is refused with the node's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cnnexp import network as net
from cnnexp.errors import MOST_SAID, NetworkError
from cnnexp.network import Layer, Network, Shape
from cnnexp.network.shapes import infer_stages, window_count

NATIVE: Mapping[type, str] = {net.ReLU: "Relu", net.LeakyReLU: "LeakyRelu", net.Sigmoid: "Sigmoid", net.Tanh: "Tanh"}
"""ONNX's own operator of an elementwise layer."""
CHANNELS_FIRST, CHANNELS_LAST = (0, 3, 1, 2), (0, 1, 2, 3)
FEW = 64  # numbers of a constant that is computed with: a shape, or a factor
GRID = np.linspace(-6, 6, 97)  # on which arithmetic is compared with that of a layer
NO_PADS, NO_SKIP = (0, 0, 0, 0), (1, 1, 0)
Weights = tuple[np.ndarray, ...]


class Node(NamedTuple):
    """An operation: ONNX's operator, what it takes and gives by name, and its attributes as plain values."""

    operator: str
    name: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Graph:
    """Nodes, each after those whose values it takes."""

    source: str  # where it comes from, for messages, e.g. `model.path='net.onnx'`
    nodes: Sequence[Node]
    constants: Mapping[str, np.ndarray]
    given: str  # the name of what it takes
    made: str
    dims: tuple[int | None, ...]  # of what it takes, without the number of images; None for a side that is left open
    folds: bool = True  # arithmetic into weights; not into those that are written back where they came from


class Found(NamedTuple):
    """The layers of a graph, and their weights in the order of `Network.parameters` and `Network.running`."""

    layers: tuple[Layer, ...]
    parameters: Weights
    running: Weights
    dropped: tuple[str, ...] = ()  # what no layer does, since training or the data set does it, in words

    def state(self, network: Network, seed: int, dtype: type = np.float32) -> dict[str, np.ndarray]:
        """Return what a run with these weights begins with, as `Network.initial_state`."""
        state = network.initial_state(seed)
        kinds = ("parameters", self.parameters, network.parameters), ("running", self.running, network.running)
        for name, arrays, places in kinds:
            for array, place in zip(arrays, places, strict=True):
                if array.shape != place.shape or not np.isfinite(array).all():
                    raise NetworkError(f"{place.name}: a weight of {array.shape}; must be finite, of {place.shape}")
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


@dataclass(frozen=True)
class _Value:
    """A value of the graph."""

    point: _Point
    axes: tuple[int, ...]  # where they lie in ours, (N, H, W, C)
    order: np.ndarray | None = None  # of a flat one, where each number stands in ours; None where they stand alike
    pads: tuple[int, ...] = NO_PADS  # of a Pad just before: top, left, bottom, right
    fill: float = 0.0  # what it fills them with
    skip: tuple[int, ...] = NO_SKIP  # of a shortcut just before: steps down and across, and its channels of zeros
    end: str = ""  # the softmax just before
    rule: Callable[[Any], Any] | None = None  # what arithmetic with numbers makes of the place's values


def read(graph: Graph, input_shape: Shape) -> Found:
    """Return a graph's layers on images (H, W, C) or (D,), and their weights; NetworkError where something is unfit."""
    ways: dict[Shape, tuple[int, ...]] = {input_shape: CHANNELS_LAST if len(input_shape) == 3 else (0, 1)}
    if len(input_shape) == 3:
        ways = {(*input_shape[2:], *input_shape[:2]): CHANNELS_FIRST, **ways}
    if input_shape[2:] == (1,):
        ways[input_shape[:2]] = (0, 1, 2)
    refused = None
    for dims, axes in ways.items():
        if len(dims) == len(graph.dims) and all(n in (None, want) for n, want in zip(graph.dims, dims, strict=True)):
            try:
                return _Reader(graph, _Value(_Point(input_shape), axes)).read()
            except NetworkError as error:
                refused = refused or error
    takes = " x ".join("?" if n is None else str(n) for n in graph.dims)
    legal = " or ".join(" x ".join(map(str, dims)) for dims in ways)
    fits = "choose another dataset, or export the network for its images"
    raise refused or NetworkError(f"{graph.source}: takes inputs of {takes}, the data set's are {legal}; {fits}")


class _Reader:
    """Goes through the nodes of one graph, first to last."""

    def __init__(self, graph: Graph, start: _Value) -> None:
        self.graph, self.node, self.dropped = graph, Node("none", "", (), (), {}), list[str]()
        self._values: dict[str, Any] = {"": None, **graph.constants, graph.given: start}
        self._made: dict[int, _Value] = {}  # by the id of a value: what its rule is as a layer

    def read(self) -> Found:
        for node in self.graph.nodes:
            self.node, operator = node, node.operator
            self.need(operator in HANDLERS, "unknown operator", f"one of {', '.join(sorted(HANDLERS))}")
            for name in node.inputs:
                self.need(name in self._values, f"no node before it gives {name!r}", "the first output of another node")
            inputs = [self._values[name] for name in node.inputs]
            folds = operator in FOLDS and all(isinstance(x, np.ndarray) for x in inputs)
            few = operator in VIEWS or all(x.size <= FEW for x in inputs if folds)
            self.need(few, "computes with large constants", "weights as they are")
            try:
                call = FOLDS[operator] if folds else partial(HANDLERS[operator], self)
                made = call(*inputs, **node.attributes)
            except NetworkError:
                raise
            except Exception as error:  # attributes and shapes may be anything
                said = " ".join(str(error).split())[:MOST_SAID]
                self.need(False, f"its inputs or attributes: {said}", "what ONNX defines for the operator")
            self._values[node.outputs[0]] = np.asarray(made) if folds else made
        value = self.value(self._values.get(self.graph.made), ended=True)
        self.need(value.order is None, "the scores stand in the order of an image", "a Gemm after the Flatten")
        return Found(*_collect(_path(value.point, None)[1:]), tuple(dict.fromkeys(self.dropped)))

    def need(self, right: object, why: str, fits: str) -> None:
        """Refuse the node unless it is right."""
        if not right:
            where = f"{self.graph.source}: node {self.node.name!r} ({self.node.operator})"
            raise NetworkError(f"{where}: {why}; what fits: {fits}")

    def value(self, x: Any, padded: bool = False, ended: bool = False, skipped: bool = False) -> _Value:
        """Return a value of the network, arithmetic that led to it as a layer; refuse a constant."""
        self.need(isinstance(x, _Value), "has no input from the images", "a node on the way from images to scores")
        if x.rule is not None:
            self._made[id(x)] = x = self._made.get(id(x)) or self._layer_of(replace(x, rule=None), x.rule)
        self.need(padded or x.pads == NO_PADS, "follows a Pad", "a Conv or a MaxPool after the Pad")
        self.need(skipped or x.skip == NO_SKIP, "follows a Slice", "an Add of a Residual after the Slice and its Pad")
        self.need(ended or not x.end, f"follows {x.end!r}", "a Softmax at the end alone, where the loss stands for it")
        return x

    def constant(self, array: Any) -> np.ndarray:
        self.need(isinstance(array, np.ndarray), "a weight is missing or computed", "constants as weights")
        return array

    def image(self, x: Any, padded: bool = False, skipped: bool = False) -> _Value:
        x = self.value(x, padded, skipped=skipped)
        fits = len(x.point.shape) == 3 and x.axes == CHANNELS_FIRST
        self.need(fits, f"an input of {x.point.shape}, axes {x.axes}", "an image, N x C x H x W")
        return x

    def add(self, x: _Value, layer: Layer, parameters: Weights = (), running: Weights = ()) -> _Value:
        """Return what a layer makes of a value."""
        try:
            shape = infer_stages(x.point.shape, (layer,))[0].output_shape
        except NetworkError as error:
            self.need(False, str(error).partition(": ")[2], "an input of another shape")
        return replace(x, point=_Point(shape, x.point, layer, parameters, running), pads=NO_PADS)

    def _layer_of(self, x: _Value, rule: Callable[[Any], Any]) -> _Value:
        if _alike(rule, GRID):
            return x
        if x.point.before is None and _alike(rule, GRID / 255):
            self.dropped.append("the division by 255, which the data set does")
            return x
        gelu = [v * (1 + math.erf(v * math.sqrt(0.5))) / 2 for v in GRID]
        self.need(_alike(rule, gelu), "arithmetic that is no layer", "that of a GELU, or a bias after Conv or MatMul")
        return self.add(self.value(x), net.GELU())


def _short(number: float) -> float:
    """Return 0.1 for the 0.10000000149 that float32 makes of it."""
    return float(f"{number:.6g}")


def _alike(rule: Callable[[Any], Any], wanted: Any) -> bool:
    return np.allclose(rule(GRID), wanted, rtol=0, atol=1e-6)


def _path(point: _Point | None, start: _Point | None) -> list[_Point]:
    """Return the places from one, left out, to another; from the first one if it is not before that."""
    path = []
    while point is not None and point is not start:
        path.append(point)
        point = point.before
    return path[::-1]


def _collect(path: Sequence[_Point]) -> tuple[tuple[Layer, ...], Weights, Weights]:
    layers = tuple(point.layer for point in path if point.layer is not None)
    parameters = tuple(array for point in path for array in point.parameters)
    return layers, parameters, tuple(array for point in path for array in point.running)


def _convolve(r: _Reader, x: Any, weight: Any, bias: Any = None, **at: Any) -> _Value:
    x, weight, group = r.image(x, padded=True), r.constant(weight), at.get("group", 1)
    fits = weight.ndim == 4 and weight.shape[2] == weight.shape[3] and weight.shape[1] * group == x.point.shape[2]
    r.need(fits, f"a weight of {weight.shape} on {x.point.shape}", "square kernels of as many channels, F x C x K x K")
    r.need(not x.fill, f"follows a Pad of {x.fill}", "a Pad of zeros")
    dilations = at.get("dilations", [1, 1])
    r.need(dilations[0] == dilations[1], f"dilations={dilations}", "equal dilations down and across")
    reach = dilations[0] * (weight.shape[2] - 1) + 1
    stride, pads = _slide(r, x, at, reach)
    choices = ("valid", "same", pads[0], "auto", "full", "floor", f"floor+{pads[0]}")
    padding = _padding(r, x.point.shape, reach, stride, pads, choices)
    biases = () if bias is None else (r.constant(bias),)
    layer = net.Conv2d(weight.shape[0], weight.shape[2], stride, padding, bool(biases), group, dilations[0])
    return r.add(x, layer, (weight.transpose(2, 3, 1, 0), *biases))


def _pool(layer: type[net.MaxPool2d | net.AvgPool2d]) -> Callable[..., _Value]:
    def handler(r: _Reader, x: Any, **at: Any) -> _Value:
        x, size = r.image(x, padded=True), at["kernel_shape"][0]
        r.need(at["kernel_shape"] == [size, size], f"windows of {at['kernel_shape']}", "square windows")
        positive = x.fill == 0 and isinstance(x.point.layer, net.ReLU | net.Sigmoid)
        unseen = x.pads == NO_PADS or (layer is net.MaxPool2d and (positive or x.fill == -np.inf))
        r.need(unseen, f"follows a Pad of {x.fill}", "a MaxPool after a Pad of -inf, or of 0 after a Relu")
        stride, pads = _slide(r, x, at, size)
        dilations = at.get("dilations", [1, 1])
        r.need(dilations == [1, 1], f"dilations={dilations}", "dilations=[1, 1]")
        averaged = layer is net.AvgPool2d and any(pads) and at.get("count_include_pad")
        r.need(not averaged, "averages over padding", "count_include_pad=0")
        ceil, choices = bool(at.get("ceil_mode")), ("valid", "auto", "floor", f"floor+{pads[0]}")
        padding = _padding(r, x.point.shape, size, stride, pads, choices, ceil)
        return r.add(x, layer(size, None if stride == size else stride, padding))

    return handler


def _slide(r: _Reader, x: _Value, at: Mapping[str, Any], size: int) -> tuple[int, list[int]]:
    """Return the stride of a node's windows, and how far they reach out at top, left, bottom and right."""
    strides, pads = at.get("strides", [1, 1]), at.get("pads", NO_PADS)
    r.need(strides[0] == strides[1], f"strides={strides}", "equal strides down and across")
    if at.get("auto_pad") in ("SAME_UPPER", "SAME_LOWER"):
        out = [max((-(-side // strides[0]) - 1) * strides[0] + size - side, 0) for side in x.point.shape[:2]]
        less, more = [n // 2 for n in out], [n - n // 2 for n in out]
        pads = less + more if at["auto_pad"] == "SAME_UPPER" else more + less
    return strides[0], [a + b for a, b in zip(pads, x.pads, strict=True)]


def _padding(
    r: _Reader, shape: Shape, size: int, stride: int, pads: list[int], choices: Sequence[str | int], ceil: bool = False
) -> str | int:
    """Return which of our paddings gives the same windows."""
    wanted = []
    for side, before, after in zip(shape[:2], pads[:2], pads[2:], strict=True):
        count, rest = divmod(side + before + after - size, stride)
        wanted.append((before, count + 1 + (ceil and rest > 0 and (count + 1) * stride < side + before)))
    for choice in choices:
        if [window_count(side, size, stride, choice) for side in shape[:2]] == wanted:
            return choice
    r.need(False, f"pads={pads} around {shape[0]} x {shape[1]} pixels", "pads that are equal on every side")
    raise AssertionError


def _linear(r: _Reader, x: Any, weight: Any, bias: Any = None, **at: Any) -> _Value:
    x, weight = r.value(x), r.constant(weight)
    weight = weight.T if at.get("transB") else weight
    plain = not at.get("transA") and at.get("alpha", 1) == at.get("beta", 1) == 1
    r.need(plain, f"attributes {dict(at)}", "transA=0, alpha=1, beta=1")
    fits, why = weight.ndim == 2 and x.point.shape == weight.shape[:1], f"a weight of {weight.shape} on an input of "
    r.need(fits, f"{why}{x.point.shape}", "a flat input, and one row for each of it")
    rows = weight if x.order is None else weight[np.argsort(x.order)]
    biases = () if bias is None else (np.broadcast_to(r.constant(bias).reshape(-1), weight.shape[1:]),)
    return r.add(replace(x, order=None), net.Linear(weight.shape[1], bool(biases)), (rows, *biases))


def _normalize(r: _Reader, x: Any, *arrays: Any, epsilon: float = 1e-5, momentum: float = 0.9, **_: Any) -> _Value:
    scale, shift, mean, variance = map(r.constant, arrays)
    return r.add(r.image(x), net.BatchNorm2d(_short(1 - momentum), _short(epsilon)), (scale, shift), (mean, variance))


def _mean(r: _Reader, x: Any, axes: Any = None, **_: Any) -> _Value:
    """GlobalAveragePool, or ReduceMean over the image's sides."""
    x, given = r.value(x), [-2, -1] if r.node.operator == "GlobalAveragePool" else np.ravel(axes).tolist()
    sides = len(x.axes) == 4 and len(x.point.shape) == 3 and {x.axes[axis] for axis in given} == {1, 2}
    r.need(sides, f"a mean over axes {given} of {x.point.shape}", "one over height and width of an image")
    return replace(r.add(x, net.GlobalAvgPool()), axes=(0, 1))


def _flatten(r: _Reader, x: Any, axis: int = 1) -> _Value:
    x = r.value(x)
    r.need(axis in (1, 1 - len(x.axes)), f"axis={axis}", "axis=1")
    if len(x.point.shape) == 1:
        return x
    places = np.arange(math.prod(x.point.shape)).reshape(1, *x.point.shape[: len(x.axes) - 1])
    order = places.transpose(x.axes).ravel()
    return replace(r.add(x, net.Flatten()), axes=(0, 1), order=None if (order[1:] > order[:-1]).all() else order)


def _reshape(r: _Reader, x: Any, wanted: Any, **_: Any) -> _Value:
    x, wanted = r.value(x), r.constant(wanted).tolist()
    if (axes := _moved(x, wanted)) is not None:
        return replace(x, axes=axes)
    flat = len(wanted) == 2 or (len(x.point.shape) == 1 and wanted[2:] == [1, 1])
    flat = flat and wanted[0] in (-1, 0, 1) and wanted[1] in (-1, math.prod(x.point.shape))
    r.need(flat, f"to {wanted}, of an input of {x.point.shape}", "one that flattens, as [0, -1]")
    return _flatten(r, x)


def _moved(x: _Value, wanted: Sequence[int]) -> tuple[int, ...] | None:
    """Return the axes of an image that is reshaped, where only sides of one pixel or channel change their place."""
    sizes = (0, *x.point.shape)
    long, short = ([axis for axis in x.axes if (sizes[axis] == 1) is one] for one in (False, True))
    kept = [sizes[axis] for axis in long[1:]] == [n for n in wanted[1:] if n != 1]
    if not kept or len(wanted) != len(x.axes):
        return None
    return tuple((short if n == 1 else long).pop(0) for n in (0, *wanted[1:]))


def _transpose(r: _Reader, x: Any, perm: Sequence[int]) -> _Value:
    x = r.value(x)
    r.need(perm[0] == 0 and (len(x.axes) > 2 or list(perm) == [0, 1]), f"perm={perm}", "the number of images first")
    return replace(x, axes=tuple(x.axes[axis] for axis in perm))


def _pad(r: _Reader, x: Any, pads: Any, fill: Any = None, axes: Any = None, mode: str = "constant") -> _Value:
    x, pads = r.image(x, skipped=True), r.constant(pads).astype(int).tolist()
    constant = mode == "constant" and axes is None
    if constant and pads[:5] + pads[6:] == [0] * 7 and (fill is None or not fill.item()):
        return replace(x, skip=(*x.skip[:2], x.skip[2] + pads[5]))
    r.need(x.skip == NO_SKIP, "follows a Slice", "zeros after the channels")
    fits = constant and len(pads) == 8 and not any(pads[:2] + pads[4:6]) and min(pads) >= 0
    r.need(fits, f"mode={mode}, pads={pads}", "a constant around the image's sides, without axes")
    return replace(x, pads=(*pads[2:4], *pads[6:]), fill=0.0 if fill is None else float(r.constant(fill).item()))


def _slice(r: _Reader, x: Any, *numbers: Any) -> _Value:
    """Read every n-th row or column of an image, on the way to the end of a Residual; or all that there is."""
    x, skip, sizes = r.image(x, skipped=True), [1, 1, 1, 1], (1, *x.point.shape[2:], *x.point.shape[:2])
    starts, ends, axes, steps = (r.constant(array).tolist() for array in (*numbers, np.ones_like(numbers[0]))[:4])
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        skip[axis] = step
        whole = not start and step > 0 and end >= sizes[axis] and (axis > 1 or step == 1)
        r.need(whole, f"from {start} to {end} by {step}, axis {axis}", "every n-th row and column from the first")
    return replace(x, skip=(x.skip[0] * skip[2], x.skip[1] * skip[3], x.skip[2]))


def _cut(a: np.ndarray, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> np.ndarray:
    """Slice a constant; an end before the first number is none."""
    cuts = [slice(None)] * a.ndim
    axes, steps = (range(len(starts)) if axes is None else axes), (np.ones_like(starts) if steps is None else steps)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        cuts[axis] = slice(start, end if end >= -a.shape[axis] else None, step)
    return a[tuple(cuts)]


def _drop_out(r: _Reader, x: Any, ratio: Any = None, *_: Any, **__: Any) -> _Value:
    return r.add(r.value(x), net.Dropout(0.5 if ratio is None else _short(r.constant(ratio).item())))


def _softmax(r: _Reader, x: Any, axis: int = -1) -> _Value:
    x = r.value(x)
    r.need(axis in (-1, 1) and len(x.point.shape) == 1, f"over axis {axis} of {x.point.shape}", "that of the classes")
    r.dropped.append(f"the {r.node.operator} at the end, which the loss does")
    return replace(x, end=r.node.name)


def _compute(r: _Reader, *given: Any) -> _Value:
    """Read arithmetic: of a value and numbers, a bias, or the end of a Residual."""
    values = [x for x in given if isinstance(x, _Value)]
    if r.node.operator == "Add" and len(values) == 2 and (values[0].rule is None or values[1].rule is None):
        return _join(r, *(r.value(x, skipped=True) for x in values))
    if len(values) == 1 < len(given) and (values[0] is given[0] or r.node.operator in ("Add", "Mul")):
        numbers = next(x for x in given if x is not values[0])
        if (scaled := _scaled(r, values[0], numbers)) is not None:
            return scaled
    fits = all(x.size == 1 for x in given if isinstance(x, np.ndarray)) and len({id(x.point) for x in values}) == 1
    r.need(fits, "arithmetic of branches or with a vector", "Add of a branch and its own input, or of a bias")
    rules = [(x.rule or (lambda v: v)) if isinstance(x, _Value) else lambda _, x=x: float(x.item()) for x in given]
    operation = FOLDS[r.node.operator]
    return replace(values[0], rule=lambda v: operation(*(rule(v) for rule in rules)))


def _scaled(r: _Reader, x: _Value, array: Any) -> _Value | None:
    """Return what arithmetic with a number for each channel makes of a Conv's or Gemm's weights and bias, or None.

    So a bias stands in a file, and a batch normalization that its exporter has written out.
    """
    point, operator = x.point, r.node.operator
    bare = not (x.rule or x.end) and x.pads == NO_PADS
    if not bare or not isinstance(point.layer, net.Conv2d | net.Linear) or not isinstance(array, np.ndarray):
        return None
    along = [1] * len(x.axes)
    along[x.axes.index(len(x.axes) - 1)] = point.shape[-1]
    factor = operator in ("Mul", "Div")
    if not r.graph.folds and (operator != "Add" or point.layer.bias):
        return None
    if (factor and array.size == 1) or [1] * (len(along) - array.ndim) + [*array.shape] != along:
        return None
    weight, bias = (*point.parameters, np.zeros(point.shape[-1], np.float32))[:2]
    operation, array = FOLDS[operator], array.reshape(-1)
    weight = operation(weight, array) if factor else weight
    has_bias = point.layer.bias or not factor
    parameters = (weight, operation(bias, array)) if has_bias else (weight,)
    return replace(x, point=replace(point, layer=replace(point.layer, bias=has_bias), parameters=parameters))


def _join(r: _Reader, a: _Value, b: _Value) -> _Value:
    """x + f(x), or f(x) and what a shortcut skips of x."""
    for first, second in ((a, b), (b, a)):
        short, long, skip = first.point, second.point, first.skip
        inside = _path(long, short) or [_Point(short.shape, short, net.LeakyReLU(1.0))]  # x + x
        if inside[0].before is short and second.skip == NO_SKIP:
            alike = a.axes == b.axes and a.order is None and b.order is None
            r.need(alike, "adds branches of other orders", "two of N x C x H x W, or flat ones after a Gemm")
            layers, parameters, running = _collect(inside)
            stride = max(-(-size // count) for size, count in zip(short.shape[:2], long.shape[:2], strict=True))
            same = skip == NO_SKIP or skip == (stride, stride, long.shape[-1] - short.shape[-1])
            r.need(same, f"a shortcut of steps and zeros {skip}", f"as many pixels and channels as {long.shape}")
            residual = net.Residual(layers, "identity" if skip == NO_SKIP else "padded")
            return r.add(replace(a, point=short, skip=NO_SKIP), residual, parameters, running)
    r.need(False, "adds branches that both have layers", "a shortcut that is the other branch's input itself")
    raise AssertionError


def _concatenate(r: _Reader, other: Any, y: Any, axis: int) -> _Value:
    y = r.value(y)
    both = y.point.shape == (1,) and isinstance(other, _Value) and other.point is y.point and other.rule
    r.need(both and _alike(other.rule, 1 - GRID), "joins branches side by side", "Concat of 1 - y and y at the end")
    r.dropped.append("the probability of the first class, which is 1 minus the second's")
    return replace(y, end=r.node.name)


def _of_flat(r: _Reader, x: Any, *_: Any) -> _Value:
    x = r.value(x)
    r.need(len(x.point.shape) == 1, "other axes of an image", "Flatten")
    return x


def _gelu(r: _Reader, x: Any, approximate: str = "none") -> _Value:
    r.need(approximate == "none", f"approximate={approximate}", "approximate=none")
    return r.add(r.value(x), net.GELU())


FLOATS, WHOLE = (1, 10, 11, 16), (2, 3, 4, 5, 6, 7, 12, 13)
"""ONNX's numbers of types that a Cast is to."""
VIEWS = ("Cast", "Identity", "Reshape", "Shape", "Squeeze", "Transpose", "Unsqueeze")
"""Which make no more numbers than there are."""
FOLDS: Mapping[str, Callable[..., Any]] = {
    **{"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide},
    **{"Erf": np.vectorize(math.erf, [float]), "Gather": np.take, "Concat": lambda *a, axis: np.concatenate(a, axis)},
    **{"Identity": lambda a: a, "Cast": lambda a, to, **_: a.astype(np.int64) if to in WHOLE else a},
    "Reshape": lambda a, shape, **_: a.reshape(shape),
    **{"ConstantOfShape": lambda shape, value=0: np.broadcast_to(np.ravel(value)[0], tuple(shape)), "Slice": _cut},
    "Shape": lambda a, **_: np.array(a.shape),
    "Squeeze": lambda a, axes: np.squeeze(a, tuple(axes.ravel())),
    "Transpose": lambda a, perm=None: a.transpose(perm),
    "Unsqueeze": lambda a, axes: np.expand_dims(a, tuple(axes.ravel())),
}
"""What is computed of constants alone, such as the shape that a Reshape takes."""
HANDLERS: Mapping[str, Callable[..., Any]] = {
    **{name: lambda r, x, layer=layer: r.add(r.value(x), layer()) for layer, name in NATIVE.items()},
    "LeakyRelu": lambda r, x, alpha=0.01: r.add(r.value(x), net.LeakyReLU(_short(alpha))),
    **{"Gelu": _gelu, "Conv": _convolve, "MaxPool": _pool(net.MaxPool2d), "AveragePool": _pool(net.AvgPool2d)},
    **{"GlobalAveragePool": _mean, "ReduceMean": _mean, "BatchNormalization": _normalize, "Dropout": _drop_out},
    **{"Gemm": _linear, "MatMul": _linear, "Flatten": _flatten, "Reshape": _reshape, "Transpose": _transpose},
    **{"Pad": _pad, "Slice": _slice, "Softmax": _softmax, "LogSoftmax": _softmax, "Concat": _concatenate},
    "Shape": lambda r, x, **_: np.array([1, *r.value(x).point.shape])[list(x.axes)],
    "ConstantOfShape": lambda r, x, **_: r.constant(x),
    **{"Squeeze": _of_flat, "Unsqueeze": _of_flat, "Gather": _of_flat},
    **{"Identity": lambda r, x: x, "Cast": lambda r, x, to=1, **_: r.need(to in FLOATS, "rounds", "float types") or x},
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Erf"), _compute),
}
"""By ONNX's operator: what reads a node on the way from images to scores."""
