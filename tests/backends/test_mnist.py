"""What the papers' networks must reach on the real MNIST: `pytest -m slow tests/backends/test_mnist.py`."""

import numpy as np
import pytest
from commands import MNIST, needs_mnist
from tables import each

from cnnexp import SGD, Adam, Loss, Mnist, OneConv, TwoConvMlp, TwoConvPool4
from cnnexp.backends import backend_class
from cnnexp.network.losses import evaluate

pytestmark = [pytest.mark.slow, needs_mnist]


@pytest.mark.parametrize("backend", ["cpu-parallel", "cpu-simd"])
@each(
    (OneConv(32), SGD(lr=0.1), 100, 60_000, 1, 0.935),
    (TwoConvMlp(linear_bias=True), Adam(lr=1e-3, beta1=0.95, beta2=0.99), 64, 60_000, 2, 0.975),
    (TwoConvPool4(), Adam(lr=1e-3), 32, 50_000, 1, 0.915),
    ids=["one_conv", "two_conv_mlp", "two_conv_pool4"],
)
def test_accuracy(backend, capsys, model, optimizer, batch_size, count, epochs, least):
    network = model.network((28, 28, 1), 10)
    program = backend_class(backend)().compile(network, Loss.SOFTMAX_CROSS_ENTROPY, optimizer, batch_size)
    program.restore({"parameters": network.initial_parameters(seed=0)})
    data = Mnist(root=str(MNIST), train_size=count).load()
    train = program.load(data.train.images, data.train.labels)
    rng = np.random.default_rng(0)
    for _ in range(epochs):
        program.train(train, rng.permutation(count), optimizer.lr)
    scores = program.predict(program.load(data.test.images, data.test.labels))
    accuracy = evaluate(Loss.SOFTMAX_CROSS_ENTROPY, scores, data.test.labels).accuracy
    with capsys.disabled():
        print(f"\n{type(model).__name__}, {backend}: test accuracy {accuracy:.4f}, at least {least}")  # noqa: T201
    assert accuracy >= least
