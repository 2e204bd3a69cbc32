"""`keras`: the same network in Keras on TensorFlow, on the CPU: a peer to compare with (`pip install '.[keras]'`).

Layers and gradients are TensorFlow's own, compiled into one `tf.function` per training step, which is faster than
`fit`. The update is our rule on its tensors, since Keras's Adam adds its epsilon elsewhere.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, assert_never

import numpy as np

from cnnexp import network as net
from cnnexp.backends.layerwise import as_float32
from cnnexp.backends.peers.program import PeerProgram
from cnnexp.backends.processor import ThreadedBackend
from cnnexp.errors import BackendUnavailable, ConfigError, installing
from cnnexp.network import Network, Parameter, Stage, noise
from cnnexp.network.losses import LOG_FLOOR, VARIANCE_FLOOR, Loss
from cnnexp.optimizers import Optimizer

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # its greeting of the CPU
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
try:
    import keras
    import tensorflow as tf
except ImportError as error:
    lacking = f"Keras on TensorFlow cannot be imported ({error}); {installing('keras')}"
    raise BackendUnavailable(f"backend=keras: {lacking}") from error

MATHS = net.Maths(tf.exp, tf.tanh, tf.math.erf, lambda a, b: tf.where(a < b, b, a), tf.where)
OWN = (net.ReLU, net.Sigmoid, net.Tanh, net.GELU)
Layer = Callable[[tf.Tensor, bool], tf.Tensor]
"""What a stage does to x, and whether it trains."""


class KerasProgram(PeerProgram):
    """A `Program` (see `protocol`) on Keras layers, and on TensorFlow's operations where Keras has none."""

    def make(self) -> None:
        network, optimizer, variables = self.network, self.optimizer, self.tensors["parameters"]
        self._layers = [self._layer(stage) for stage in network.stages]
        self.tensors |= {name: [tf.Variable(tf.zeros_like(v)) for v in variables] for name in optimizer.slots}
        self._rules = [optimizer.of(tuple(v.shape)).rule(tf.sqrt, tf.maximum) for v in variables]
        images = tf.TensorSpec([None, *network.input_shape])
        batch = (images, tf.TensorSpec([None], tf.int32), tf.TensorSpec([None], tf.int64))
        scalars, compiled = [tf.TensorSpec([])] * 3, partial(tf.function, autograph=False)  # which knows no `match`
        self._train_step = compiled(self._take_step, input_signature=[*batch, *scalars])
        self._gradients = compiled(self._differentiate, input_signature=batch)
        parts = [tf.TensorSpec(variable.shape) for variable in variables]
        self._apply = compiled(self._update, input_signature=[parts, *scalars])
        self._predict = compiled(lambda x: _run(self._layers, x, False), input_signature=[images])

    def load(self, images: np.ndarray, labels: np.ndarray) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.constant(as_float32(images)), tf.constant(labels.astype(np.int32))

    def step(self, handle: Any, indices: np.ndarray, rate: float) -> tuple[tf.Tensor, tf.Tensor]:
        return self._train_step(*handle, indices, *self._numbers(rate))

    def differentiate(self, handle: Any, indices: np.ndarray) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        return self._gradients(*handle, indices)

    def update(self, parts: list[np.ndarray], rate: float) -> None:
        self._apply([tf.constant(part) for part in parts], *self._numbers(rate))

    def scores(self, images: tf.Tensor) -> np.ndarray:
        return self._predict(images).numpy()

    def assign(self, tensor: tf.Variable, array: np.ndarray) -> None:
        tensor.assign(array)

    def _numbers(self, rate: float) -> tuple[np.float32, ...]:
        return np.float32(rate), *self.optimizer.constants(self.now)

    def _differentiate(
        self, images: tf.Tensor, labels: tf.Tensor, indices: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Return the summed loss, the hits and the mean gradients of one batch."""
        x, t = tf.gather(images, indices), tf.gather(labels, indices)
        self.images = indices
        with tf.GradientTape() as tape:
            scores = _run(self._layers, x, True)
            losses = _losses(self.loss, scores, t)
            if self.loss.class_weights:
                losses *= tf.gather(tf.constant(self.loss.class_weights), t)
            mean = tf.reduce_mean(losses)
        if self.loss.name == "binary_cross_entropy":
            hits = tf.equal(scores[:, 0] >= 0.5, tf.equal(t, 1))
        else:
            hits = tf.equal(tf.argmax(scores, 1, tf.int32), t)
        gradients = tape.gradient(mean, self.tensors["parameters"])
        return tf.reduce_sum(losses), tf.reduce_sum(tf.cast(hits, tf.int32)), gradients

    def _update(self, gradients: list[tf.Tensor], rate: tf.Tensor, c0: tf.Tensor, c1: tf.Tensor) -> None:
        zero = tf.constant(0.0)
        for g, rule, *kept in zip(gradients, self._rules, *self.tensors.values(), strict=True):
            w, s, t = ([tf.convert_to_tensor(one) for one in kept] + [zero, zero])[:3]
            for old, value in zip(kept, rule(w, g, s, t, rate, c0, c1), strict=False):
                old.assign(value)

    def _take_step(
        self, images: tf.Tensor, labels: tf.Tensor, indices: tf.Tensor, *scalars: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        loss, hits, gradients = self._differentiate(images, labels, indices)
        self._update(gradients, *scalars)
        return loss, hits

    def _variable(self, parameter: Parameter | None) -> tf.Variable | None:
        """Return the variable of a parameter, which is the next in the flat buffer."""
        if parameter is not None:
            self.tensors["parameters"].append(tf.Variable(tf.zeros(parameter.shape)))
        return self.tensors["parameters"][-1] if parameter else None

    def _built(self, layer: keras.layers.Layer, stage: Stage) -> keras.layers.Layer:
        """Return a layer of Keras's, its weights being the next in the flat buffer."""
        *sides, channels = stage.input_shape
        layer.build((None, *(None for _ in sides), channels))  # sides without what is put around them
        self.tensors["parameters"] += [weight.value for weight in layer.trainable_weights]
        return layer

    def _layer(self, stage: Stage) -> Layer:
        """Return what a stage does, adding its parameters and running averages to those there are."""
        match stage:
            case net.ConvStage() if not stage.dense:
                return self._grouped(stage)
            case net.ConvStage(layer=layer, window=window):
                conv = keras.layers.Conv2D(layer.filters, layer.kernel, layer.stride, use_bias=layer.bias)
                conv = self._built(conv, stage)
                return lambda x, trains: conv(_pad(x, window))
            case net.PoolStage(layer=net.MaxPool2d(), window=window):
                max_pool = keras.layers.MaxPooling2D(window.size, window.stride)
                return lambda x, trains: max_pool(_pad(x, window, -np.inf))
            case net.PoolStage(layer=net.GlobalAvgPool()):
                return _itself(keras.layers.GlobalAveragePooling2D())
            case net.PoolStage(window=window):
                pool = keras.layers.AveragePooling2D(window.size, window.stride)
                share = pool(_pad(tf.ones((1, *stage.input_shape[:2], 1)), window))  # of a window inside the image
                return lambda x, trains: pool(_pad(x, window)) / share
            case net.LinearStage(layer=layer):
                return _itself(self._built(keras.layers.Dense(layer.features, use_bias=layer.bias), stage))
            case net.FlattenStage():
                return _itself(keras.layers.Flatten())
            case net.ResidualStage():
                return self._residual(stage)
            case net.DropoutStage():
                return self._dropout(stage)
            case net.NormStage():
                return self._norm(stage)
            case net.ElementwiseStage(layer=net.LeakyReLU(slope)):
                return _itself(keras.layers.LeakyReLU(slope))
            case net.ElementwiseStage(layer=layer):
                own = type(layer) in OWN
                return _itself(keras.layers.Activation(type(layer).__name__.lower()) if own else _rule(layer))
            case net.StructuralStage():
                raise ConfigError(f"backend=keras: cannot differentiate layer {stage.name}, which is NumPy's")
            case _:
                assert_never(stage)

    def _grouped(self, stage: net.ConvStage) -> Layer:
        """A convolution of groups or with dilation: TensorFlow has no gradient of Keras's own on a CPU."""
        groups, dilation, stride = stage.layer.groups, stage.layer.dilation, stage.layer.stride
        step, skip = (1, stride) if dilation > 1 else (stride, 1)  # TensorFlow's are one or other
        kernel, shift = self._variable(stage.weight), self._variable(stage.bias)

        def convolve(x: tf.Tensor, trains: bool) -> tf.Tensor:
            x, weight = _pad(x, stage.window), tf.convert_to_tensor(kernel)
            if weight.shape[2] == 1:
                of_channels = tf.reshape(weight, (*weight.shape[:2], x.shape[3], -1))
                y = tf.nn.depthwise_conv2d(x, of_channels, [1, step, step, 1], "VALID", dilations=[dilation] * 2)
            else:
                parts = zip(tf.split(x, groups, 3), tf.split(weight, groups, 3), strict=True)
                y = tf.concat([tf.nn.convolution(a, w, step, "VALID", dilations=dilation) for a, w in parts], 3)
            return y[:, ::skip, ::skip] + (0.0 if shift is None else shift)

        return convolve

    def _norm(self, stage: net.NormStage) -> Layer:
        """Batch normalization, the unbiased variance in its running average, as PyTorch; Keras's takes the other."""
        scale, shift = self._variable(stage.weight), self._variable(stage.bias)
        averages = [tf.Variable(tf.zeros(average.shape)) for average in stage.running]
        self.averages += averages

        def normalize(x: tf.Tensor, trains: bool) -> tf.Tensor:
            mean, variance = tf.nn.moments(x, [0, 1, 2]) if trains else averages
            if trains:
                count = tf.cast(tf.size(x) // tf.size(mean), tf.float32)
                unbiased = variance * count / tf.maximum(count - 1, 1)
                for average, value in zip(averages, (mean, unbiased), strict=True):
                    average.assign_add(stage.layer.momentum * (value - average))
            # not tf.nn.batch_normalization, which takes mean * scale from x * scale: what little is left is rounding
            return (x - mean) * (tf.math.rsqrt(variance + stage.layer.epsilon) * scale) + shift

        return normalize

    def _dropout(self, stage: net.DropoutStage) -> Layer:
        """`noise.keeps`, asked when a step runs: which numbers are dropped is not TensorFlow's to say."""
        rate, size = stage.layer.rate, math.prod(stage.output_shape)

        def keeps(images: np.ndarray) -> np.ndarray:
            key = noise.layer_key(self.seed, self.now, stage.name)
            return noise.keeps(key, rate, images, size) * np.float32(1 / (1 - rate))

        def drop(x: tf.Tensor, trains: bool) -> tf.Tensor:
            return x * tf.reshape(tf.numpy_function(keeps, [self.images], tf.float32), tf.shape(x)) if trains else x

        return drop

    def _residual(self, stage: net.ResidualStage) -> Layer:
        """x + f(x); of x every n-th pixel, and channels of zeros, where the shortcut is padded."""
        inner, window = [self._layer(one) for one in stage.stages], stage.window
        more = stage.output_shape[-1] - stage.input_shape[-1]

        def add(x: tf.Tensor, trains: bool) -> tf.Tensor:
            y = _run(inner, x, trains)
            if window:
                x = tf.pad(x[:, :: window.stride, :: window.stride], [[0, 0], [0, 0], [0, 0], [0, more]])
            return x + y

        return add


def _run(layers: Sequence[Layer], x: tf.Tensor, trains: bool) -> tf.Tensor:
    for layer in layers:
        x = layer(x, trains)
    return x


def _itself(layer: Callable[[tf.Tensor], tf.Tensor]) -> Layer:
    """Return a layer that does the same in training."""
    return lambda x, trains: layer(x)


def _pad(x: tf.Tensor, window: net.Window, value: float = 0.0) -> tf.Tensor:
    """Put `value` around images (N,H,W,C), as far as windows reach."""
    top, left, bottom, right = window.pads
    sides = [[0, 0], [top, bottom], [left, right], [0, 0]]
    return tf.pad(x, sides, constant_values=value) if window.padded else x


def _rule(layer: net.Elementwise) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return a user's elementwise layer, by its own derivative."""
    rule, derivative = layer.rule(MATHS), layer.derivative(MATHS)

    @tf.custom_gradient
    def run(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        y = rule(x)
        return y, lambda dy: dy * derivative(x, y)

    return run


def _losses(loss: Loss, scores: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Return the loss of every image (N,): `cnnexp.network.losses`."""
    match loss.name:
        case "softmax_cross_entropy" if loss.label_smoothing:
            targets = tf.one_hot(labels, scores.shape[1]) * (1 - loss.label_smoothing)
            return tf.nn.softmax_cross_entropy_with_logits(targets + loss.label_smoothing / scores.shape[1], scores)
        case "softmax_cross_entropy":
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
        case "binary_cross_entropy":
            return _binary_cross_entropy(scores[:, 0], tf.cast(labels, tf.float32))
        case "mean_squared_error":
            return tf.reduce_mean(tf.square(scores - tf.one_hot(labels, scores.shape[1])), axis=1)
        case _:
            assert_never(loss.name)


@tf.custom_gradient
def _binary_cross_entropy(p: tf.Tensor, t: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """Return the losses with the clamps of `losses.compute`, which Keras sets elsewhere."""
    losses = -(t * tf.maximum(tf.math.log(p), LOG_FLOOR) + (1 - t) * tf.maximum(tf.math.log1p(-p), LOG_FLOOR))

    def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, None]:
        return upstream * (p - t) / tf.maximum(p * (1 - p), VARIANCE_FLOOR), None

    return losses, gradient


class Keras(ThreadedBackend):
    """Keras on TensorFlow, on the CPU; TensorFlow takes `threads` once, from the first program of a process."""

    name = "keras"

    def compile(self, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int) -> KerasProgram:
        set_threads(self.thread_count)
        with tf.device("/CPU:0"):
            return KerasProgram(network, loss, optimizer, batch_size)


def set_threads(count: int) -> None:
    """Let TensorFlow use `count` threads for an operation, one at a time; BackendUnavailable if it runs with others."""
    threading = tf.config.threading
    if threading.get_intra_op_parallelism_threads() != count:
        try:
            threading.set_intra_op_parallelism_threads(count)
            threading.set_inter_op_parallelism_threads(1)
        except RuntimeError as error:
            running = f"TensorFlow runs already with {threading.get_intra_op_parallelism_threads()} threads"
            instead = "in this process; run one number per process"
            raise BackendUnavailable(f"backend.threads={count}: {running} {instead}") from error
