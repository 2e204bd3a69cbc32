"""50 steps of every backend and of PyTorch: same initial parameters, same batches, parameters alike to 1e-4.

PyTorch trains as `backend=torch` has it, whose modules, gradients and optimizers are PyTorch's own.
"""

import itertools

import numpy as np
import pytest
from conformance import make_case, started
from tables import each

from cnnexp import SGD, Adam, OneConv, ResNet, TwoConvMlp
from cnnexp.backends import BACKENDS, backend_class
from cnnexp.errors import BackendUnavailable

torch = pytest.importorskip("torch")

STEPS, BATCH = 50, 8
# Where two pixels of a pooling window, or a ReLU's input and 0, differ by less than float32 can tell, rounding picks
# the gradient's way, and 50 steps amplify it: PyTorch in float32 then differs from itself in float64 by 1e-3 and more.
# That happens in some orders of the images; a defect shows in all of them. So one order of these must agree.
ORDERS = 3
NETWORKS = {
    "resnet": ResNet(blocks=1, width=4).network((8, 8, 3), 4),
    "resnet_small": ResNet(blocks=1, width=2).network((8, 8, 1), 3),
    "one_conv": OneConv(filters=8).network((28, 28, 1), 10),
    "two_conv_mlp": TwoConvMlp().network((28, 28, 1), 10),
    "one_conv_small": OneConv(filters=2).network((8, 8, 1), 4),
    "two_conv_mlp_small": TwoConvMlp(filters=2, kernel=3, hidden=6).network((10, 10, 1), 4),
}
OPTIMIZERS = {"sgd": SGD(lr=0.05), "adam": Adam(lr=1e-3, beta1=0.95, beta2=0.99)}


def cases():
    for backend, (name, network), optimizer in itertools.product(BACKENDS, NETWORKS.items(), OPTIMIZERS):
        by_sgd, is_resnet = optimizer == "sgd", name.startswith("resnet")
        if backend == "torch" or name.endswith("_small") != (backend == "python") or (is_resnet and not by_sgd):
            continue
        # of ResNets those that are cheap, and the one whose step has seams
        often = backend in ("numpy", "cpu-simd") if is_resnet else name.startswith("one_conv") == by_sgd
        given, mark = OPTIMIZERS[optimizer], pytest.mark.thorough if often else pytest.mark.slow
        yield pytest.param(backend, network, given, id=f"{backend}-{name}-{optimizer}", marks=mark)


@each(*cases())
def test_50_steps_agree_with_pytorch(backend, network, rule):
    case, differences = make_case(network, images=4 * BATCH), []
    case.parameters = network.initial_parameters(seed=0)
    case.images = np.abs(case.images) / 3
    for seed in range(ORDERS):
        order = np.random.default_rng(seed).integers(0, len(case.images), STEPS * BATCH)
        ours, theirs = (_trained(name, case, rule, order) for name in (backend, "torch"))
        assert np.abs(theirs - case.parameters).max() > 1e-2, "the parameters hardly moved: nothing was compared"
        pairs = [(p.view(ours), p.view(theirs)) for p in network.parameters]
        differences.append(max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs))
        if differences[-1] <= 1e-4:
            return
    pytest.fail(f"relative differences {differences}, in {ORDERS} orders of the images")


def _trained(backend, case, rule, order) -> np.ndarray:
    try:
        program, handle = started(backend_class(backend)(), case, rule, BATCH)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    program.train(handle, order, rule.lr)
    state = program.state()
    program.close()
    return state["parameters"]
