# ruff: noqa: E501 - one graph a line
"""Networks to ONNX files and from them: what we wrote computes the same elsewhere, what others wrote the same here."""

import dataclasses
import io
import json
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import reference
from backends import outside_layer
from commands import one_line, raises
from conformance import make_case
from hypothesis import HealthCheck, given, settings
from networks import NETWORKS, cases
from tables import each
from torch_modules import NAMES, channels_last, torch_modules

from cnnexp import (
    GELU,
    SGD,
    BatchNorm2d,
    Conv2d,
    Flatten,
    GlobalAvgPool,
    Linear,
    Loss,
    MaxPool2d,
    Network,
    ReLU,
    Residual,
    backend,
)
from cnnexp.app import explain, export, predict
from cnnexp.errors import BackendUnavailable, CnnexpError, DataError, NetworkError
from cnnexp.network.models import MODELS, Onnx

onnx = pytest.importorskip("onnx", reason="no onnx is installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="no onnxruntime is installed")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from cnnexp.tracking import graph  # noqa: E402

RNG = np.random.default_rng(0)
GRAY = (8, 8, 1)


def probabilities(model, images, outputs):
    """Return what a model that begins with its own weights makes of images, and its layers."""
    network = model.network(images.shape[1:], outputs)
    program = backend("numpy").compile(network, model.loss, SGD(), len(images))
    program.restore(model.initial_state(network, 0))
    scores = program.predict(program.load(images, np.zeros(len(images), np.int32)))
    if model.loss == Loss.BINARY_CROSS_ENTROPY:
        return np.hstack([1 - scores, scores]), network.layers
    return softmax(scores), network.layers


def softmax(scores):
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def in_onnxruntime(path, images):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    batches = [images] if given.shape[0] != 1 else np.split(images, len(images))
    return np.concatenate([session.run(None, {given.name: batch})[0] for batch in batches])


def check_exported(path, case):
    """Compare onnxruntime on a case's graph with the oracle; return its probabilities and how many."""
    scores = reference.forward(case.layers(), case.float_images)[-1]
    wanted = np.hstack([1 - scores, scores]) if case.loss == Loss.BINARY_CROSS_ENTROPY else softmax(scores)
    names = [f"class {i}" for i in range(wanted.shape[1])]
    path.write_bytes(graph.build(case.network, case.loss, case.state, "float32", names).SerializeToString())
    np.testing.assert_allclose(in_onnxruntime(path, case.images), wanted, rtol=0, atol=1e-5)
    return wanted


@pytest.mark.parametrize("name", NETWORKS)
def test_what_export_wrote_is_the_oracles_in_onnxruntime_and_read_back(tmp_path, name):
    path, case = tmp_path / "net.onnx", make_case(Network(*NETWORKS[name]))
    wanted = check_exported(path, case)
    found, _ = probabilities(Onnx(str(path), pretrained=True), case.images, wanted.shape[1])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    kept = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert json.loads(kept["classes"])[0] == "class 0"


@pytest.mark.parametrize(
    ("shape", "layers"),
    [
        ((5, 5, 4), (GlobalAvgPool(), GELU(), Residual((Linear(4),)), Linear(3))),
        ((1, 8, 4), (Residual((Conv2d(6, 3, 2, "same"),), "padded"), Flatten(), Linear(2))),
    ],
)
def test_a_shortcut_is_read_back(tmp_path, shape, layers):
    case = make_case(Network(shape, layers))
    wanted = check_exported(tmp_path / "net.onnx", case)
    found, read = probabilities(Onnx(str(tmp_path / "net.onnx"), pretrained=True), case.images, wanted.shape[1])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    assert read == layers


@settings(max_examples=75, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_random_networks_are_exported(tmp_path_factory, case):
    check_exported(tmp_path_factory.getbasetemp() / "random.onnx", case)


@pytest.mark.usefixtures("no_plugins")
def test_a_layer_of_a_plugin_is_exported_by_its_rule(tmp_path, monkeypatch):
    check_exported(tmp_path / "net.onnx", make_case(outside_layer.network(monkeypatch)))


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("custom", "onnx")])
def test_every_model_on_pixels_is_read_back(tmp_path, name, caplog):
    model = MODELS[name]()
    case = make_case(model.network((28, 28, 1), 10), model.loss)
    binary = model.loss == Loss.BINARY_CROSS_ENTROPY
    path, outputs = tmp_path / "net.onnx", 2 if binary else 10
    path.write_bytes(graph.build(case.network, case.loss, case.state, "uint8", "x" * outputs).SerializeToString())
    images = RNG.integers(0, 256, case.images.shape).astype(np.uint8)
    read = Onnx(str(path), pretrained=True, loss_name=model.loss.name)
    with caplog.at_level("INFO"):
        found, layers = probabilities(read, images, outputs)
    np.testing.assert_allclose(found, in_onnxruntime(path, images), rtol=0, atol=1e-5)
    assert layers == case.network.layers
    assert "left out: the division by 255, which the data set does; " in caplog.text
    said = "minus the second's" if binary else "the Softmax at the end, which the loss does"
    assert said in caplog.text


def written_by_torch(path, module, shape, **options):
    import torch

    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the new exporter, which needs a package more
        torch.onnx.export(module, (torch.zeros(1, *shape),), content, dynamo=False, input_names=["x"], **options)
    path.write_bytes(content.getvalue())


@pytest.mark.parametrize("opset", [17, *(pytest.param(opset, marks=pytest.mark.thorough) for opset in (13, 20))])
@pytest.mark.parametrize("name", NAMES)
def test_what_pytorch_wrote_agrees_with_onnxruntime(tmp_path, name, opset):
    module, shape = torch_modules()[name]
    images, path = RNG.random((4, *shape), np.float32), tmp_path / "net.onnx"
    dynamic = {"x": {0: "N"}} if opset == 17 else None
    written_by_torch(path, module.eval(), shape, opset_version=opset, dynamic_axes=dynamic)
    there = in_onnxruntime(path, images)
    here, layers = probabilities(Onnx(str(path), pretrained=True), channels_last(images), there.shape[1])
    ends_in_softmax = name in ("rows_and_columns", "views")
    np.testing.assert_allclose(here, there if name == "rows_and_columns" else softmax(there), rtol=0, atol=1e-5)
    assert ends_in_softmax == any(node.op_type.endswith("Softmax") for node in onnx.load(path).graph.node)
    kinds = {"resnet": Residual, "padded_resnet": Residual, "gelu_mlp": GELU, "mean": GlobalAvgPool}
    assert name not in kinds or any(isinstance(layer, kinds[name]) for layer in layers)


def test_a_module_in_training_keeps_its_normalizations(tmp_path):
    torch = pytest.importorskip("torch", reason="no PyTorch is installed")

    module, shape = torch_modules()["vgg"]
    written_by_torch(tmp_path / "net.onnx", module, shape, training=torch.onnx.TrainingMode.TRAINING)
    layers = Onnx(str(tmp_path / "net.onnx")).network((8, 12, 3), 5).layers
    assert BatchNorm2d(0.2, 1e-3) in layers
    assert BatchNorm2d() in layers


@pytest.mark.thorough
def test_what_keras_wrote_computes_what_it_computes_there(tmp_path):
    pytest.importorskip("keras", reason="no keras is installed")
    images = RNG.random((4, 12, 12, 2), np.float32)
    np.save(tmp_path / "images.npy", images)
    environment = os.environ | {"KERAS_BACKEND": "torch"}  # its way to ONNX needs no package more
    subprocess.run([sys.executable, "-c", KERAS], cwd=tmp_path, env=environment, check=True, capture_output=True)
    here, layers = probabilities(Onnx(str(tmp_path / "net.onnx"), pretrained=True), images, 3)
    np.testing.assert_allclose(here, np.load(tmp_path / "there.npy"), rtol=0, atol=1e-5)
    assert any(isinstance(layer, Residual) for layer in layers)


KERAS = """
import keras, numpy as np
from keras import layers

keras.utils.set_random_seed(0)
images = np.load("images.npy")
def normalized(x, filters, **options):
    return layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same", use_bias=False, **options)(x))

given = keras.Input(images.shape[1:])
x = layers.ReLU()(normalized(given, 6))
x = layers.ReLU()(layers.Add()([x, normalized(x, 6)]))
x = layers.DepthwiseConv2D(3, 2, padding="same")(x)
x = layers.Activation("tanh")(layers.Dense(8)(layers.Flatten()(layers.AveragePooling2D(2)(x))))
model = keras.Model(given, layers.Dense(3, activation="softmax")(layers.Dropout(0.5)(x)))
for weight in model.weights:
    if "moving" in weight.name:
        weight.assign(np.random.default_rng(0).uniform(0.5, 1.5, weight.shape))
np.save("there.npy", model(images).detach().numpy())
model.export("net.onnx", format="onnx", verbose=False)
"""


def tensor(name, *shape, scale=1.0):
    return numpy_helper.from_array((scale * RNG.standard_normal(shape)).astype(np.float32), name)


def whole(name, *values):
    return numpy_helper.from_array(np.array(values, np.int64), name)


def model_of(nodes, tensors, dims=("N", 1, 8, 8), opset=17):
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ("N", "classes"))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)
    made = helper.make_graph(nodes, "made", [x], [y], tensors)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def saved(folder, *arguments, **options):
    path = folder / "net.onnx"
    path.write_bytes(model_of(*arguments, **options).SerializeToString())
    return path


def node(operator, inputs, output, **attributes):
    return helper.make_node(operator, inputs.split(), [output], f"the_{output}", **attributes)


HEAD = (node("Flatten", "a", "b"), node("MatMul", "b w", "c"), node("Add", "c v", "y"))
CONV = [tensor("k", 2, 1, 3, 3), tensor("w", 72, 3), tensor("v", 3)]
PAD = whole("p", 0, 0, 1, 1, 0, 0, 1, 1)
GELU_OF_G = (
    *(node("Div", "g r", "d"), node("Erf", "d", "e"), node("Add", "e o", "f"), node("Mul", "g f", "h")),
    node("Mul", "h half", "i"),
)
HALVES = [numpy_helper.from_array(np.float32(value), name) for name, value in (("r", 2**0.5), ("o", 1), ("half", 0.5))]
ENDS = whole("zero", 0), whole("one", 1), whole("area", 36), whole("minus", -1)
TO_ROWS, BACK = node("Transpose", "x", "t", perm=[0, 3, 1, 2]), node("Transpose", "q", "a", perm=[0, 2, 3, 1])
# nodes, what `CONV` lacks or has otherwise, and the first layers
GRAPHS = {
    "pad_before_conv": ([node("Pad", "x p", "q"), node("Conv", "q k", "a"), *HEAD], [PAD, tensor("w", 128, 3)], [Conv2d(2, 3, padding="same", bias=False)]),
    "pad_before_pool": (
        [node("Relu", "x", "r"), node("Pad", "r p", "q"), node("MaxPool", "q", "a", kernel_shape=[3, 3], strides=[2, 2]), *HEAD],
        [PAD, tensor("w", 16, 3)],
        [ReLU(), MaxPool2d(3, 2, "floor+1")],
    ),
    "same_upper": (
        [node("Conv", "x k", "a", auto_pad="SAME_UPPER", strides=[2, 2]), *HEAD], [tensor("w", 32, 3)], [Conv2d(2, 3, 2, "same", bias=False)],
    ),
    "bias_by_add": ([node("Conv", "x k", "q"), node("Add", "q f", "a"), *HEAD], [tensor("f", 2, 1, 1)], [Conv2d(2, 3)]),
    "mean_by_input": (
        [node("Conv", "x k", "q"), node("ReduceMean", "q s", "a", keepdims=1), *HEAD],
        [tensor("k", 5, 1, 3, 3), whole("s", 2, 3), tensor("w", 5, 3)],
        [Conv2d(5, 3, bias=False), GlobalAvgPool()],
    ),
    "channels_last": ([TO_ROWS, node("Conv", "t k", "q"), BACK, *HEAD], [], [Conv2d(2, 3, bias=False)]),
    # as Keras writes a batch normalization, on both of its ways to ONNX
    "normalized_in_writing": (
        [
            *(node("Conv", "x k", "q"), node("Sub", "q f", "r"), node("Mul", "f r", "s"), node("Div", "s f", "t")),
            *(node("Add", "g t", "u"), node("Relu", "u", "a"), *HEAD),
        ],
        [tensor("f", 2, 1, 1), tensor("g", 1, 2, 1, 1)],
        [Conv2d(2, 3), ReLU()],
    ),
    "scaled_without_bias": (
        [node("Conv", "x k", "q"), node("Mul", "q f", "r"), node("Relu", "r", "a"), *HEAD], [tensor("f", 2, 1, 1)], [Conv2d(2, 3, bias=False), ReLU()],
    ),
    "one_channel_moved": ([node("Reshape", "x s", "t"), node("Conv", "t k", "q"), BACK, *HEAD], [whole("s", -1, 1, 8, 8)], [Conv2d(2, 3, bias=False)]),
    "flattened_by_a_shape": (
        [
            *(node("Conv", "x k", "q"), node("Shape", "k", "n"), node("Slice", "n zero one", "f"), node("Mul", "f area", "s")),
            *(node("Concat", "minus s", "to", axis=0), node("Reshape", "q to", "b"), *HEAD[1:]),
        ],
        ENDS,
        [Conv2d(2, 3, bias=False)],
    ),
    "gelu_by_erf": (
        [
            *(node("Conv", "x k", "g"), node("Div", "g r", "d"), node("Erf", "d", "e"), node("Add", "e o", "f")),
            *(node("Mul", "g f", "h"), node("Mul", "h half", "a"), *HEAD),
        ],
        HALVES,
        [Conv2d(2, 3, bias=False), GELU()],
    ),
}  # fmt: skip


def with_conv(nodes, tensors):
    """Return tensors, and those of `CONV` that nodes name beside them."""
    missing = {name for each in nodes for name in each.input} - {own.name for own in tensors}
    return [*tensors, *(each for each in CONV if each.name in missing)]


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_agrees_with_onnxruntime(tmp_path, name):
    nodes, tensors, wanted = GRAPHS[name]
    last = name in ("channels_last", "one_channel_moved")
    dims = ("N", 8, 8, 1) if last else ("N", 1, 8, 8)
    path = saved(tmp_path, nodes, with_conv(nodes, tensors), dims, 18 if name == "mean_by_input" else 13)
    images = RNG.random((3, *GRAY), np.float32)
    here, layers = probabilities(Onnx(str(path), pretrained=True), images, 3)
    there = in_onnxruntime(path, images if last else images.transpose(0, 3, 1, 2))
    np.testing.assert_allclose(here, softmax(there), rtol=0, atol=1e-5)
    assert list(layers[: len(wanted)]) == wanted


UNKNOWN = {
    "operator": ([node("Selu", "x", "a"), *HEAD], [], r"node 'the_a' \(Selu\): unknown operator; what fits: one of Add"),
    "domain": ([helper.make_node("Conv", ["x", "k"], ["a"], "own", domain="mine"), *HEAD], [], "(mine.Conv): unknown"),
    "groups": ([node("Conv", "x k", "a", group=2), *HEAD], [], "a weight of (2, 1, 3, 3) on (8, 8, 1)"),
    "dilations": ([node("Conv", "x k", "a", dilations=[2, 1]), *HEAD], [], "dilations=[2, 1]; what fits: equal"),
    "dilated_pool": ([node("MaxPool", "x", "a", kernel_shape=[2, 2], dilations=[2, 2]), *HEAD], [], "dilations=[2, 2]; what fits: d"),
    "strides": ([node("Conv", "x k", "a", strides=[1, 2]), *HEAD], [], "strides=[1, 2]; what fits: equal strides"),
    "kernel": ([node("Conv", "x k", "a"), *HEAD], [tensor("k", 2, 1, 3, 1)], "a weight of (2, 1, 3, 1)"),
    "channels": ([node("Conv", "x k", "a"), *HEAD], [tensor("k", 2, 3, 3, 3)], "a weight of (2, 3, 3, 3)"),
    "too_large": ([node("Conv", "x k", "a"), *HEAD], [tensor("k", 2, 1, 9, 9)], "pads=[0, 0, 0, 0] around 8 x 8"),
    "pads": ([node("Conv", "x k", "a", pads=[2, 0, 0, 0]), *HEAD], [], "pads=[2, 0, 0, 0] around 8 x 8 pixels"),
    "averaged_padding": ([node("AveragePool", "x", "a", kernel_shape=[3, 3], pads=[1] * 4, count_include_pad=1), *HEAD], [], "count_include_pad=0"),
    "projection": ([node("Conv", "x k", "p"), node("Conv", "x k", "q"), node("Add", "p q", "a"), *HEAD], [], "'the_a' (Add): adds branches"),
    "softmax_within": (
        [node("Flatten", "x", "b"), node("MatMul", "b w", "c"), node("Softmax", "c", "s"), node("Relu", "s", "y")],
        [tensor("w", 64, 3)],
        "'the_y' (Relu): follows 'the_s'",
    ),
    "weights": ([node("Conv", "x k", "a"), *HEAD], [tensor("w", 70, 3)], "'the_c' (MatMul): a weight of (70, 3)"),
    "reshape": ([node("Reshape", "x s", "a"), *HEAD], [whole("s", 0, 2, 32)], "'the_a' (Reshape): to [0, 2, 32]"),
    "scale": ([node("Mul", "x x", "a"), *HEAD], [], "arithmetic that is no layer"),
    # as many columns as channels
    "along_a_row": (
        [node("Conv", "x k", "q"), node("Mul", "q r", "a"), *HEAD], [tensor("k", 2, 1, 7, 7), tensor("r", 2), tensor("w", 8, 3)], "or with a vector",
    ),
    "approximate": ([node("Gelu", "x", "a", approximate="tanh"), *HEAD], [], "approximate=tanh"),
    "mean_of_channels": ([node("ReduceMean", "x", "a", axes=[1]), *HEAD], [], "a mean over axes [1]"),
    "order": ([node("Conv", "x k", "a"), node("Flatten", "a", "y")], [], "stand in the order of an image"),
    "pad_before_gelu": ([node("Pad", "x p", "g"), *GELU_OF_G, node("Conv", "i k", "a"), *HEAD], [PAD, *HALVES], "follows a Pad"),
    "scale_after_pad": (
        [node("Conv", "x k", "q"), node("Pad", "q p", "r"), node("Mul", "r f", "s"), node("Conv", "s k2", "a"), *HEAD],
        [PAD, tensor("f", 2, 1, 1), tensor("k2", 2, 2, 3, 3)],
        "or with a vector",
    ),
    "priors": (
        [node("Flatten", "x", "b"), node("MatMul", "b w", "c"), node("Softmax", "c", "s"), node("Mul", "s f", "y")],
        [tensor("w", 64, 3), tensor("f", 1, 3)],
        "or with a vector",
    ),
    "rounds": ([node("Cast", "x", "q", to=6), node("Cast", "q", "a", to=1), *HEAD], [], "'the_q' (Cast): rounds; what fits: float types"),
    "pad_alone": ([node("Pad", "x p", "a"), *HEAD], [PAD], "follows a Pad"),
    "unnormalized_pad": ([node("Pad", "x p", "q"), node("MaxPool", "q", "a", kernel_shape=[2, 2]), *HEAD], [PAD], "follows a Pad of 0.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_one_line_that_names_the_node(tmp_path, name):
    nodes, tensors, message = UNKNOWN[name]
    model = model_of(nodes, with_conv(nodes, tensors), opset=20 if name == "approximate" else 17)
    if name == "domain":
        model.opset_import.append(helper.make_opsetid("mine", 1))
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    error = raises(NetworkError, "what fits: ", Onnx(str(tmp_path / "net.onnx")).network, GRAY, 3)
    assert message.replace("\\", "") in str(error)
    assert error.exit_code == 2


DAMAGES = {
    "dims": lambda graph: graph.initializer[0].dims.__setitem__(0, 1 << 40),
    "negative": lambda graph: graph.initializer[0].dims.__setitem__(0, -1),
    "short": lambda graph: setattr(graph.initializer[0], "raw_data", b"1234"),
    "circle": lambda graph: graph.node[0].input.__setitem__(0, "y"),
    "missing": lambda graph: graph.node[0].input.__setitem__(1, "nothing"),
    "attribute": lambda graph: graph.node[0].attribute.append(helper.make_attribute("strides", "a")),
    "twice": lambda graph: graph.node.append(graph.node[0]),
    "no_output": lambda graph: setattr(graph.output[0], "name", "z"),
}
CONTENTS = {
    "cut": model_of([node("Conv", "x k", "a"), *HEAD], CONV).SerializeToString()[:-50],
    **{"empty": b"", "text": b"layers: none\n", "zeros": bytes(100)},
}


@pytest.mark.parametrize("kind", [*DAMAGES, *CONTENTS])
def test_a_damaged_file_is_one_line(tmp_path, kind):
    model = model_of([node("Conv", "x k", "a"), *HEAD], CONV)
    if kind in DAMAGES:
        DAMAGES[kind](model.graph)
    (tmp_path / "net.onnx").write_bytes(CONTENTS.get(kind, model.SerializeToString()))
    error = raises(CnnexpError, r"model.path='.*net.onnx'", Onnx(str(tmp_path / "net.onnx")).network, GRAY, 3)
    assert error.exit_code in (2, 3)
    assert len(str(error)) < 900


@each(
    ({"opset": 12}, "opset 12; export it for one of 13 .. "),
    ({"opset": 999}, "opset 999; export it for one of 13 .. "),
    ({"dims": ("N", 3, 8, 8)}, "takes inputs of 3 x 8 x 8, the data set's are 1 x 8 x 8 or 8 x 8 x 1 or 8 x 8; "),
    ({"dims": ("N", 64)}, "takes inputs of 64, the data set's are 1 x 8 x 8"),
)
def test_a_model_for_something_else_is_one_line(tmp_path, options, message):
    path = saved(tmp_path, [node("Conv", "x k", "a"), *HEAD], CONV, **options)
    raises(NetworkError, message, Onnx(str(path)).network, GRAY, 3)


def test_weights_that_are_no_numbers_are_refused(tmp_path):
    kernels = np.full((2, 1, 3, 3), np.nan, np.float32)
    path = saved(tmp_path, [node("Conv", "x k", "a"), *HEAD], [numpy_helper.from_array(kernels, "k"), *CONV[1:]])
    model = Onnx(str(path), pretrained=True)
    raises(NetworkError, r"conv1.weight: .*; must be finite", model.initial_state, model.network(GRAY, 3), 0)


def with_external(folder, location):
    """Save a model whose first weight lies in another file, 8 bytes from its start; return its path."""
    model = model_of([node("Conv", "x k", "a"), *HEAD], CONV)
    kernels = model.graph.initializer[0]
    content = kernels.raw_data
    kernels.ClearField("raw_data")
    kernels.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": 8, "length": len(content)}.items():
        kernels.external_data.add(key=key, value=str(value))
    (folder / "net.onnx").write_bytes(model.SerializeToString())
    return folder / "net.onnx", bytes(8) + content


def test_weights_in_a_file_beside_the_model_are_read(tmp_path):
    path, content = with_external(tmp_path, "weights.bin")
    (tmp_path / "weights.bin").write_bytes(content)
    images = RNG.random((3, *GRAY), np.float32)
    here, _ = probabilities(Onnx(str(path), pretrained=True), images, 3)
    np.testing.assert_allclose(here, softmax(in_onnxruntime(path, images.transpose(0, 3, 1, 2))), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["absolute", "above", "below", "link", "short", "gone", "pipe"])
def test_external_data_lie_beside_the_model_or_are_refused(tmp_path, kind):
    """Else a model from elsewhere could read any file of this machine into weights that its owner then publishes."""
    folder = tmp_path / "model"
    (folder / "within").mkdir(parents=True)
    places = {"absolute": str(tmp_path / "secret"), "above": "../secret", "below": "within/secret"}
    location = places.get(kind, "secret")
    path, content = with_external(folder, location)
    for place in (tmp_path / "secret", folder / "within" / "secret"):
        place.write_bytes(content)
    if kind == "link":
        (folder / "secret").symlink_to(tmp_path / "secret")
    elif kind == "short":
        (folder / "secret").write_bytes(content[:-1])
    elif kind == "pipe":
        os.mkfifo(folder / "secret")
    with one_line(DataError) as refused:
        Onnx(str(path), pretrained=True).network(GRAY, 3)
    beside = "must be in a file beside the model"
    assert (beside in str(refused.value)) == (kind in ("absolute", "above", "below", "link"))


def test_without_the_package_one_line_names_the_extra(tmp_path, monkeypatch):
    path = saved(tmp_path, [node("Conv", "x k", "a"), *HEAD], CONV)
    monkeypatch.setitem(sys.modules, "onnx", None)
    said = r"model.path=.*: ONNX cannot be imported .*; \S*pip install -e '\.\[onnx\]'"
    raises(BackendUnavailable, said, Onnx(str(path)).network, GRAY, 3)


def test_a_run_begins_with_the_weights_that_are_asked_for(tmp_path):
    path = saved(tmp_path, [node("Conv", "x k", "a"), *HEAD], CONV)
    drawn, given = Onnx(str(path)), Onnx(str(path), pretrained=True)
    network = drawn.network(GRAY, 3)
    np.testing.assert_array_equal(drawn.initial_state(network, 3)["parameters"], network.initial_parameters(3))
    kernels = network.parameters[0].view(given.initial_state(network, 3)["parameters"])
    np.testing.assert_array_equal(kernels, numpy_helper.to_array(CONV[0]).transpose(2, 3, 1, 0))
    plain = dataclasses.replace(drawn, label_smoothing=0.1)
    assert plain.loss == Loss("softmax_cross_entropy", 0.1)


DIGITS = [tensor("k", 2, 1, 3, 3), tensor("w", 1352, 10, scale=0.01), tensor("v", 10)]


def test_a_run_goes_on_predicts_and_is_explained_without_the_file(tmp_path, run, mistake, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path, [node("Conv", "x k", "a"), *HEAD], DIGITS, ("N", 1, 28, 28))
    data = ("dataset.train_size=64", "dataset.test_size=32", "tracking=none", "backend=numpy", "trainer.baseline=null")
    words = ("model=onnx", f"model.path={path}", "model.pretrained=true", *data)
    assert run(*words, "trainer.epochs=1")[::2] == (0, "")
    path.rename(tmp_path / "moved.onnx")
    on = ("trainer.epochs=2", f"trainer.resume={tmp_path}/run", f"hydra.run.dir={tmp_path}/on")
    assert run(*words, *on)[::2] == (0, "")
    predict.command([f"{tmp_path}/on", "dataset=digits", "dataset.test_size=20"])
    export.command([f"{tmp_path}/on"])
    explain.command([f"{tmp_path}/on"])
    afresh = ("trainer.epochs=1", f"hydra.run.dir={tmp_path}/afresh")
    mistake(*words, *afresh, says=".*no such file or directory.*", code=3)
    unknown = saved(tmp_path, [node("Selu", "x", "a"), *HEAD], CONV, ("N", 1, 28, 28))
    words = ("model=onnx", f"model.path={unknown}", *data, f"hydra.run.dir={tmp_path}/unknown")
    mistake(*words, says=r".*node 'the_a' \(Selu\): unknown operator.*")
