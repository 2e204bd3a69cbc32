"""JAX as a contestant: a jitted step with optax."""

from __future__ import annotations

import functools
import time
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from benchmarks.cases import Case, Data
from cnnexp.network import AvgPool2d, Conv2d, Flatten, Linear, MaxPool2d, Network, ReLU
from cnnexp.optimizers import SGD


class Jax:
    """One jitted function per step, parameters and optimizer state donated; its threads follow the process's cores."""

    def __init__(self, case: Case, data: Data, threads: int) -> None:
        jax.config.update("jax_platforms", "cpu")
        self.batch_size, self._network = case.batch_size, case.network
        self._first = [p.view(data.parameters).copy() for p in case.network.parameters]
        self._images = [jnp.asarray(batch) for batch in data.images]
        self._labels = [jnp.asarray(batch) for batch in data.labels]
        self._optimizer = _optimizer(case)
        self._gradient = jax.jit(jax.value_and_grad(self._loss))
        self._step = jax.jit(self._take_step, donate_argnums=(0, 1))
        self.reset()
        started = time.perf_counter()
        self.train(1)
        self.compile_s = time.perf_counter() - started
        self.facts = {"jax": jax.__version__, "optax": version("optax"), "threads": threads}

    def reset(self) -> None:
        self._parameters = [jnp.array(first) for first in self._first]
        self._state = self._optimizer.init(self._parameters)
        jax.block_until_ready((self._parameters, self._state))

    def train(self, steps: int) -> None:
        for step in range(steps):
            batch = step % len(self._images)
            self._parameters, self._state = self._step(
                self._parameters, self._state, self._images[batch], self._labels[batch]
            )
        jax.block_until_ready((self._parameters, self._state))

    def gradient(self) -> tuple[float, np.ndarray]:
        loss, gradients = self._gradient(self._parameters, self._images[0], self._labels[0])
        return float(loss), np.concatenate([np.asarray(gradient).ravel() for gradient in gradients])

    def parameters(self) -> np.ndarray:
        return np.concatenate([np.asarray(p).ravel() for p in self._parameters])

    def _loss(self, parameters, images, labels):
        scores = _forward(self._network, parameters, images)
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

    def _take_step(self, parameters, state, images, labels):
        gradients = jax.grad(self._loss)(parameters, images, labels)
        updates, state = self._optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state


def _optimizer(case: Case) -> optax.GradientTransformation:
    optimizer = case.optimizer
    if type(optimizer) is SGD:
        return optax.sgd(optimizer.lr)
    return optax.adam(optimizer.lr, optimizer.beta1, optimizer.beta2, optimizer.eps)


def _forward(network: Network, parameters, x):
    remaining = iter(parameters)
    for stage in network.stages:
        match stage.layer:
            case Conv2d(_, _, stride, padding, bias):
                dimensions = ("NHWC", "HWIO", "NHWC")
                room = [(padding, padding)] * 2 if isinstance(padding, int) else padding.upper()
                weight = next(remaining)
                x = lax.conv_general_dilated(x, weight, (stride, stride), room, dimension_numbers=dimensions)
                x = x + next(remaining) if bias else x
            case ReLU():
                x = jax.nn.relu(x)
            case MaxPool2d(pool, None, "valid"):
                x = _max_pool(x, pool)
            case AvgPool2d(pool, None, "valid"):
                window = (1, pool, pool, 1)
                x = lax.reduce_window(x, 0.0, lax.add, window, window, "VALID") / pool**2
            case Flatten():
                x = x.reshape(x.shape[0], -1)
            case Linear(_, bias):
                x = x @ next(remaining)
                x = x + next(remaining) if bias else x
            case layer:
                raise ValueError(f"no benchmark case uses {layer}")
    return x


def _max_pool(x, pool: int):
    """Pool in the faster way: the gradient of `reduce_window` is slow, but 16 slices are slower still."""
    if pool > 2:
        window = (1, pool, pool, 1)
        return lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")
    height, width = (side // pool * pool for side in x.shape[1:3])
    corners = [x[:, i:height:pool, j:width:pool] for i in range(pool) for j in range(pool)]
    return functools.reduce(jnp.maximum, corners)
