"""A trained network as an ONNX graph, which other runtimes run: images in, the probability of every class out.

The graph takes what the model was trained on, pixels of 0 .. 255 or floats, channels last; ONNX has them first inside.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any, assert_never

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from cnnexp import network as net
from cnnexp.backends.protocol import State
from cnnexp.errors import ConfigError
from cnnexp.network.losses import Loss
from cnnexp.network.reader import NATIVE
from cnnexp.network.recorded import Recorded

INPUT, OUTPUT = "images", "probabilities"
OPSET, IR_VERSION = 17, 8  # of 2022; all that is used here is in them, and every runtime since reads them
OPERATORS = {  # ONNX's, of `Recorded`
    **{"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "neg": "Neg"},
    **{"<": "Less", "<=": "LessOrEqual", ">": "Greater", ">=": "GreaterOrEqual"},
}


def build(network: net.Network, loss: Loss, state: State, pixels: str, classes: Sequence[str]) -> onnx.ModelProto:
    """Return the graph of what `model.Classifier.predict` computes.

    Its input is `images` (N, *input_shape) of the dtype `pixels`, `uint8` standing for value / 255; its output is
    `probabilities` float32 (N, classes); the names of the classes, in this order, are in its metadata, as JSON.
    """
    writer, x = _Writer(state), INPUT
    if pixels == "uint8":
        x = writer.add("Div", writer.add("Cast", x, to=TensorProto.FLOAT), writer.constant(np.float32(255)))
    if len(network.input_shape) == 3:
        x = writer.add("Transpose", x, perm=(0, 3, 1, 2))
    scores = writer.stages(network.stages, x)
    if loss.is_binary:
        other = writer.add("Sub", writer.constant(np.float32(1)), scores)
        writer.add("Concat", other, scores, name=OUTPUT, axis=1)
    else:
        writer.add("Softmax", scores, name=OUTPUT, axis=1)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(pixels))
    takes = helper.make_tensor_value_info(INPUT, kind, ("N", *network.input_shape))
    gives = helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ("N", len(classes)))
    graph = helper.make_graph(writer.nodes, "cnnexp", [takes], [gives], writer.tensors)
    opsets = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(graph, producer_name="cnnexp", opset_imports=opsets, ir_version=IR_VERSION)
    helper.set_model_props(model, {"classes": json.dumps(list(classes))})
    onnx.checker.check_model(model)
    return model


class _Writer:
    """Puts one node after another, with the parameters of a state; a value is the name of the node that gives it."""

    def __init__(self, state: State) -> None:
        self._state, self.nodes, self.tensors = state, list[onnx.NodeProto](), list[onnx.TensorProto]()

    def add(self, operator: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        name = name or f"{operator.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], name, **attributes))
        return name

    def constant(self, value: np.ndarray | np.generic, name: str | None = None) -> str:
        name = name or f"constant_{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(np.ascontiguousarray(value).reshape(np.shape(value)), name))
        return name

    def stages(self, stages: Sequence[net.Stage], x: str) -> str:
        """Add layers one after another; return the last one's value."""
        return functools.reduce(lambda value, stage: self._stage(stage, value), stages, x)

    def _stage(self, stage: net.Stage, x: str) -> str:
        name = stage.name
        match stage:
            case net.ConvStage():
                # (K, K, C/G, F) -> (F, C/G, K, K)
                weights, layer = self._weights(stage, (3, 2, 0, 1)), stage.layer
                parts = {"group": layer.groups, "dilations": (layer.dilation, layer.dilation)}
                return self.add("Conv", x, *weights, name=name, **parts, **_window(stage))
            case net.PoolStage(layer=net.MaxPool2d()):
                return self.add("MaxPool", x, name=name, **_window(stage))
            case net.PoolStage(layer=net.GlobalAvgPool()):
                return self.add("Flatten", self.add("GlobalAveragePool", x), name=name)
            case net.PoolStage():
                return self.add("AveragePool", x, name=name, count_include_pad=0, **_window(stage))
            case net.FlattenStage():
                rows_first = self.add("Transpose", x, perm=(0, 2, 3, 1)) if len(stage.input_shape) == 3 else x
                return self.add("Flatten", rows_first, name=name)
            case net.LinearStage():
                return self.add("Gemm", x, *self._weights(stage, (0, 1)), name=name)
            case net.DropoutStage():
                return x
            case net.NormStage():
                averages = [self.constant(p.view(self._state["running"]), p.name) for p in stage.running]
                kept, epsilon = (*self._weights(stage, (0,)), *averages), stage.layer.epsilon
                return self.add("BatchNormalization", x, *kept, name=name, epsilon=epsilon)
            case net.ResidualStage():
                return self.add("Add", self._shortcut(stage, x), self.stages(stage.stages, x), name=name)
            case net.ElementwiseStage(layer=layer):
                if (operator := NATIVE.get(type(layer))) is None:
                    return self._by_rule(layer, x, name)
                slope = {"alpha": layer.slope} if isinstance(layer, net.LeakyReLU) else {}
                return self.add(operator, x, name=name, **slope)
            case net.StructuralStage():
                raise ConfigError(f"export: layer {name} is a plugin's, of NumPy; ONNX has no operator for it")
            case _:
                assert_never(stage)

    def _shortcut(self, stage: net.ResidualStage, x: str) -> str:
        """Return what a Residual adds: x, or every n-th of its pixels and channels of zeros."""
        if stage.window is None:
            return x
        step, more = stage.window.stride, stage.output_shape[2] - stage.input_shape[2]
        ranges = ((0, 0), (1 << 31, 1 << 31), (2, 3), (step, step))
        skipped = self.add("Slice", x, *(self.constant(np.array(numbers)) for numbers in ranges))
        return self.add("Pad", skipped, self.constant(np.array((0,) * 5 + (more, 0, 0))))

    def _weights(self, stage: net.Stage, order: tuple[int, ...]) -> list[str]:
        """Add a layer's parameters, the weight's axes in another order."""
        flat, given = self._state["parameters"], ((stage.weight, order), (stage.bias, (0,)))
        return [self.constant(p.view(flat).transpose(axes), p.name) for p, axes in given if p is not None]

    def _by_rule(self, layer: net.Elementwise, x: str, name: str) -> str:
        """Add what a rule on scalars does, run once on a value that records it."""
        given = _Value(self, x)
        exp, tanh, erf, where = (functools.partial(given.apply, name) for name in ("Exp", "Tanh", "Erf", "Where"))
        maths = net.Maths(exp, tanh, erf, lambda a, b: where(a < b, b, a), where)
        made = layer.rule(maths)(given)
        return self.add("Identity", made.name if isinstance(made, _Value) else self.constant(made), name=name)


class _Value(Recorded):
    """A value of the graph, which adds the arithmetic done to it."""

    def __init__(self, writer: _Writer, name: str) -> None:
        self.writer, self.name = writer, name

    def apply(self, operation: str, *values: "_Value | np.float32") -> "_Value":
        """As `Recorded.apply`; the operation may be one of ONNX's own, too."""
        names = (v.name if isinstance(v, _Value) else self.writer.constant(np.float32(v)) for v in values)
        return _Value(self.writer, self.writer.add(OPERATORS.get(operation, operation), *names))


def _window(stage: net.ConvStage | net.PoolStage) -> dict[str, Any]:
    """Return how ONNX says a convolution's or a pooling layer's window."""
    size, stride = stage.window.size, stage.window.stride
    return {"kernel_shape": (size, size), "strides": (stride, stride), "pads": stage.window.pads}
