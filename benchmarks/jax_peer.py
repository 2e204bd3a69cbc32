"""JAX as a contestant: a jitted step with optax."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from benchmarks.cases import Case, Data
from benchmarks.networks import pixels
from cnnexp.network import (
    GELU,
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAvgPool,
    Linear,
    MaxPool2d,
    ReLU,
    Residual,
    Stage,
    Tanh,
)
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
        self._gradient = jax.jit(jax.value_and_grad(self._loss, has_aux=True), static_argnums=4)
        self._step = jax.jit(self._take_step, donate_argnums=(0, 1, 2), static_argnums=5)
        self._draws = True
        self.reset()
        started = time.perf_counter()
        self.train(1)
        self.compile_s = time.perf_counter() - started
        self.facts = {"jax": jax.__version__, "optax": version("optax"), "threads": threads}

    def reset(self) -> None:
        self._parameters = [jnp.array(first) for first in self._first]
        self._state = self._optimizer.init(self._parameters)
        running = [jnp.array(p.view(self._network.initial_rest(0)["running"])) for p in self._network.running]
        self._more = (jax.random.key(0), running)
        jax.block_until_ready((self._parameters, self._state, self._more))

    def train(self, steps: int) -> None:
        for step in range(steps):
            batch = step % len(self._images)
            self._parameters, self._state, self._more = self._step(
                self._parameters, self._state, self._more, self._images[batch], self._labels[batch], self._draws
            )
        jax.block_until_ready((self._parameters, self._state))

    def gradient(self) -> tuple[float, np.ndarray]:
        arguments = self._parameters, self._more, self._images[0], self._labels[0], self._draws
        (loss, _), gradients = self._gradient(*arguments)
        return float(loss), np.concatenate([np.asarray(gradient).ravel() for gradient in gradients])

    def parameters(self) -> np.ndarray:
        return np.concatenate([np.asarray(p).ravel() for p in self._parameters])

    def draw(self, on: bool) -> bool:
        self._draws = on
        return False

    def _loss(self, parameters, more, images, labels, draws):
        """Return the mean loss, and what the next step has beside parameters: a key, and the running averages."""
        key, here = jax.random.split(more[0])
        forward = _Forward(parameters, more[1], here if draws else None)
        scores = forward.through(self._network.stages, images)
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean(), (key, forward.moved)

    def _take_step(self, parameters, state, more, images, labels, draws):
        gradients, more = jax.grad(self._loss, has_aux=True)(parameters, more, images, labels, draws)
        updates, state = self._optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, more


def _optimizer(case: Case) -> optax.GradientTransformation:
    optimizer = case.optimizer
    if type(optimizer) is SGD:
        return optax.sgd(optimizer.lr)
    return optax.adam(optimizer.lr, optimizer.beta1, optimizer.beta2, optimizer.eps)


class _Forward:
    """One pass of training.

    Args:
        parameters, running: arrays in their order in the network.
        key: what Dropout draws from; None draws nothing.

    Attributes:
        moved: the running averages after it.
    """

    def __init__(self, parameters, running, key) -> None:
        self._parameters, self._running, self._key = iter(parameters), iter(running), key
        self.moved: list = []

    def through(self, stages: Iterable[Stage], x):
        for stage in stages:
            match stage.layer:
                case Conv2d(_, _, stride, padding, bias, groups):
                    how, padding = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}, pixels(padding)
                    room = [(padding, padding)] * 2 if isinstance(padding, int) else padding.upper()
                    weight = next(self._parameters)
                    x = lax.conv_general_dilated(x, weight, (stride, stride), room, feature_group_count=groups, **how)
                    x = x + next(self._parameters) if bias else x
                case BatchNorm2d(momentum, epsilon):
                    x = self._normalize(x, momentum, epsilon)
                case ReLU():
                    x = jax.nn.relu(x)
                case Tanh():
                    x = jnp.tanh(x)
                case GELU():
                    x = jax.nn.gelu(x, approximate=False)
                case Dropout(rate):
                    if self._key is not None:
                        self._key, here = jax.random.split(self._key)
                        x = jnp.where(jax.random.bernoulli(here, 1 - rate, x.shape), x / (1 - rate), 0)
                case MaxPool2d(pool, None, "valid"):
                    x = _max_pool(x, pool)
                case AvgPool2d(pool, None, "valid"):
                    window = (1, pool, pool, 1)
                    x = lax.reduce_window(x, 0.0, lax.add, window, window, "VALID") / pool**2
                case GlobalAvgPool():
                    x = x.mean(axis=(1, 2))
                case Flatten():
                    x = x.reshape(x.shape[0], -1)
                case Linear(_, bias):
                    x = x @ next(self._parameters)
                    x = x + next(self._parameters) if bias else x
                case Residual():
                    past = x
                    if stage.window:
                        step, more = stage.window.stride, stage.output_shape[2] - stage.input_shape[2]
                        past = jnp.pad(x[:, ::step, ::step], [(0, 0)] * 3 + [(0, more)])
                    x = past + self.through(stage.stages, x)
                case layer:
                    raise ValueError(f"no benchmark case uses {layer}")
        return x

    def _normalize(self, x, momentum: float, epsilon: float):
        mean, variance = x.mean(axis=(0, 1, 2)), x.var(axis=(0, 1, 2))
        for value in (mean, variance):
            old = next(self._running)
            self.moved.append(old + momentum * (lax.stop_gradient(value) - old))
        weight, bias = next(self._parameters), next(self._parameters)
        return (x - mean) * (lax.rsqrt(variance + epsilon) * weight) + bias


def _max_pool(x, pool: int):
    """Pool in the faster way: the gradient of `reduce_window` is slow, but 16 slices are slower still."""
    if pool > 2:
        window = (1, pool, pool, 1)
        return lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")
    height, width = (side // pool * pool for side in x.shape[1:3])
    corners = [x[:, i:height:pool, j:width:pool] for i in range(pool) for j in range(pool)]
    return functools.reduce(jnp.maximum, corners)
