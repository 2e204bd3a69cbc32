"""Modules of PyTorch's as models here, and their trained weights back in them."""

import copy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from commands import often, raises
from tables import each
from torch_modules import NAMES, channels_last, torch_modules

from cnnexp import SGD, Dropout, Flatten, Linear, ReLU, Residual, backend, from_torch, to_torch
from cnnexp.errors import BackendUnavailable, NetworkError

torch = pytest.importorskip("torch", reason="no torch is installed")
nn = torch.nn
RNG = np.random.default_rng(0)
OFTEN = "lenet5", "vgg", "padded_resnet", "mobilenet", "views"
RESIDUALS = {"resnet": 3, "plain_resnet": 1, "padded_resnet": 1}


def outputs_of(module, images):
    with torch.no_grad():
        return torch.log_softmax(module.eval()(torch.from_numpy(images)), 1).numpy()


def scores_of(program, images):
    scores = program.predict(program.load(channels_last(images), np.zeros(len(images), np.int32)))
    return scores - np.log(np.exp(scores).sum(1, keepdims=True))


@pytest.mark.parametrize("name", often([name for name in NAMES if name != "rows_and_columns"], OFTEN))
def test_a_step_is_the_modules_own_and_goes_back_into_it(name):
    module, shape = torch_modules()[name]
    for layer in module.modules():
        layer.p = 0.0 if isinstance(layer, nn.Dropout) else getattr(layer, "p", None)
    model = from_torch(module, shape)
    assert module.training
    assert sum(isinstance(layer, Residual) for layer in model.layers) == RESIDUALS.get(name, 0)
    images = RNG.standard_normal((6, *shape)).astype(np.float32)
    outputs = outputs_of(module, images).shape[1]
    labels = RNG.integers(0, outputs, 6)
    network = model.network(model.input_shape, outputs)
    program = backend("numpy").compile(network, model.loss, SGD(lr=0.1), 6)
    program.restore(model.initial_state(network, 0))
    np.testing.assert_allclose(scores_of(program, images), outputs_of(module, images), rtol=0, atol=1e-5)

    own = copy.deepcopy(module).train()
    optimizer = torch.optim.SGD(own.parameters(), 0.1)
    nn.functional.cross_entropy(own(torch.from_numpy(images)), torch.from_numpy(labels)).backward()
    optimizer.step()
    program.train(program.load(channels_last(images), labels), np.arange(6), 0.1)

    assert to_torch(SimpleNamespace(network=program.network, state=program.state()), module) is module
    wanted = own.state_dict()
    for key, array in module.state_dict().items():
        if not key.endswith("num_batches_tracked"):
            np.testing.assert_allclose(array.numpy(), wanted[key].numpy(), rtol=1e-4, atol=1e-5, err_msg=key)
    np.testing.assert_allclose(scores_of(program, images), outputs_of(module, images), rtol=0, atol=1e-5)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(32, 3)

    def forward(self, x):
        return self.linear(torch.flatten(self.conv(self.conv(x)), 1))


class Branches(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Does(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def change_a_view(x):
    nn.functional.relu_(x.view(x.shape))
    return x


@each(
    (Does(change_a_view), r"node 'relu_' \(aten.relu_.default\) changes in place what another layer reads"),
    (Does(lambda x: torch.div(x, 2, rounding_mode="floor")), r"\(aten.div.Tensor_mode\): unknown operator"),
    (Shared(), r"conv.weight is of several layers; each must have its own weights"),
    (Branches(), r"torch.export cannot trace the module on torch.Size\(\[1, 2, 4, 4\]\): "),
    (nn.Conv2d(2, 4, 2, dilation=(1, 2)), r"\(Conv\): dilations=\[1, 2\]; what fits: equal dil"),
    (nn.SELU(), r"node 'selu' \(aten.selu.default\): unknown operator; what fits: one of Add"),
    (nn.Dropout2d(), r"\(aten.feature_dropout.default\): unknown operator"),
    (nn.AdaptiveAvgPool2d(2), r"\(aten.adaptive_avg_pool2d.default\): unknown operator"),
    (nn.BatchNorm2d(2, affine=False), r"\(BatchNormalization\): a weight is missing or computed"),
    (nn.GELU("tanh"), r"\(Gelu\): approximate=tanh; what fits: approximate=none"),
    (nn.Conv2d(3, 4, 3), r"torch.export cannot trace the module on .*: "),
)
def test_what_no_layer_does_is_one_line_that_names_it(module, message):
    raises(NetworkError, f"^from_torch: .*{message}", from_torch, nn.Sequential(module), (2, 4, 4))


def test_what_is_changed_in_place_and_read_by_one_name_is_a_layer():
    module = nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(8, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))
    assert from_torch(module, (2, 2, 2)).layers == (Flatten(), ReLU(), Linear(4), ReLU(), Linear(3))


@pytest.mark.parametrize("operator", [torch.mul, torch.sub, torch.add])
def test_a_number_for_each_channel_is_refused_since_it_could_not_go_back(operator):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.gain = nn.Conv2d(2, 3, 3), nn.Parameter(torch.ones(3, 1, 1))

        def forward(self, x):
            return operator(self.conv(x), self.gain).flatten(1)

    raises(NetworkError, r"node .* arithmetic of branches or with a vector", from_torch, Scaled(), (2, 4, 4))


def test_another_data_set_and_another_module_are_refused():
    module = nn.Sequential(nn.Flatten(), nn.Dropout(0.25), nn.Linear(16, 3))
    model = from_torch(module, (1, 4, 4))
    assert Dropout(0.25) in model.layers
    raises(NetworkError, r"made for images of \(4, 4, 1\), the data set's are \(8, 8, 1\)", model.network, (8, 8, 1), 3)

    trained = SimpleNamespace(network=model.network((4, 4, 1), 3), state={})
    with pytest.raises(NetworkError, match="to_torch: the module is of other layers than what was trained"):
        to_torch(trained, nn.Sequential(nn.Flatten(), nn.Linear(16, 4)))


def test_without_pytorch_one_line_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    raises(BackendUnavailable, r"PyTorch cannot be imported .*'\.\[torch\]'", from_torch, object(), (1, 4, 4))
