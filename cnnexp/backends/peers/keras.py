"""`keras`: the same network in Keras on TensorFlow, on the CPU: a peer to compare with (`pip install '.[keras]'`).

Layers and gradients are TensorFlow's own, compiled into one `tf.function` per training step, which is faster than
`fit`. The update is our rule on its tensors, since Keras's Adam adds its epsilon elsewhere.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, assert_never

import numpy as np

from cnnexp import network as net
from cnnexp.backends.layerwise import as_float32
from cnnexp.backends.processor import ThreadedBackend
from cnnexp.backends.protocol import Program, Rate, State, rate_of_steps
from cnnexp.backends.state import PendingAverages, complete
from cnnexp.errors import BackendUnavailable, ConfigError, installing
from cnnexp.network import Network, Stage, noise
from cnnexp.network.losses import LOG_FLOOR, VARIANCE_FLOOR, Loss, Totals, check_loss
from cnnexp.optimizers import Optimizer

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # its greeting of the CPU
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
try:
    import keras
    import tensorflow as tf
except ImportError as error:
    raise BackendUnavailable(
        f"backend=keras: Keras on TensorFlow cannot be imported ({error}); {installing('keras')}"
    ) from error


class EdgePad(keras.layers.Layer):
    """Put `value` around images (N,H,W,C), as far as windows reach."""

    def __init__(self, window: net.Window, value: float) -> None:
        super().__init__()
        top, left, bottom, right = window.pads
        self.sides, self.value = [[0, 0], [top, bottom], [left, right], [0, 0]], value
        self.needed = window.padded

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return tf.pad(x, self.sides, constant_values=self.value) if self.needed else x


class EdgeAverage(keras.layers.Layer):
    """The mean over the pixels of each window that lie inside the image."""

    def __init__(self, stage: net.PoolStage) -> None:
        super().__init__()
        window = stage.window
        self.pad, self.pool = EdgePad(window, 0.0), keras.layers.AveragePooling2D(window.size, window.stride)
        self.share = self.pool(self.pad(tf.ones((1, *stage.input_shape[:2], 1))))

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.pool(self.pad(x)) / self.share if self.pad.needed else self.pool(x)


class Rule(keras.layers.Layer):
    """A user's elementwise layer, by its own derivative."""

    def __init__(self, layer: net.Elementwise) -> None:
        super().__init__()
        self.rule, self.derivative = layer.rule(MATHS), layer.derivative(MATHS)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def run(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            y = self.rule(x)
            return y, lambda dy: dy * self.derivative(x, y)

        return run(x)


MATHS = net.Maths(tf.exp, tf.tanh, tf.math.erf, lambda a, b: tf.where(a < b, b, a), tf.where)


class Drop(keras.layers.Layer):
    """`noise.keeps`: which numbers are dropped is not TensorFlow's to say.

    Args:
        now: int64, the seed and the step that is being taken; `images` is set to their places in the data set.
    """

    def __init__(self, stage: net.DropoutStage, now: Step) -> None:
        super().__init__()
        self.layer_name, self.rate, self.shape, self.now = stage.name, stage.layer.rate, stage.output_shape, now

    def call(self, x: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        if not training:
            return x
        kept = tf.numpy_function(self._keeps, [self.now.numbers, self.now.images], tf.float32)
        return x * tf.reshape(kept, tf.shape(x))

    def _keeps(self, numbers: np.ndarray, images: np.ndarray) -> np.ndarray:
        key = noise.layer_key(int(numbers[0]), int(numbers[1]), self.layer_name)
        return noise.keeps(key, self.rate, images, math.prod(self.shape)) * np.float32(1 / (1 - self.rate))


class Step:
    """What random numbers follow from: seed and step, and the images of the step that is being taken."""

    def __init__(self) -> None:
        self.numbers = tf.Variable([0, 0], dtype=tf.int64)
        self.images: Any = None


class Norm(keras.layers.Layer):
    """Batch normalization with the unbiased variance in its running average, as PyTorch; Keras's takes the other."""

    def __init__(self, stage: net.NormStage) -> None:
        super().__init__()
        self.layer, channels = stage.layer, stage.output_shape[2]
        self.scale, self.shift = (self.add_weight(shape=(channels,), name=name) for name in ("scale", "shift"))
        self.averages = [tf.Variable(tf.zeros(channels), trainable=False) for _ in range(2)]

    def call(self, x: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        if training:
            mean, variance = tf.nn.moments(x, [0, 1, 2])
            count = tf.cast(tf.size(x) // tf.size(mean), tf.float32)
            unbiased = variance * count / tf.maximum(count - 1, 1)
            for average, value in zip(self.averages, (mean, unbiased), strict=True):
                average.assign_add(self.layer.momentum * (value - average))
        else:
            mean, variance = self.averages
        # not tf.nn.batch_normalization, which takes mean * scale from x * scale: what little is left is rounding
        return (x - mean) * (tf.math.rsqrt(variance + self.layer.epsilon) * self.scale) + self.shift


class GroupedConv(keras.layers.Layer):
    """A convolution of groups or with dilation: TensorFlow has no gradient of Keras's own on a CPU."""

    def __init__(self, stage: net.ConvStage) -> None:
        super().__init__()
        self.layer, self.shape = stage.layer, (*stage.weight.shape[:2], stage.input_shape[2], -1)
        self.kernel = self.add_weight(shape=stage.weight.shape, name="kernel")
        self.shift = self.add_weight(shape=(stage.layer.filters,), name="shift") if stage.layer.bias else 0.0

    def call(self, x: tf.Tensor) -> tf.Tensor:
        groups, dilation, weight = self.layer.groups, self.layer.dilation, tf.convert_to_tensor(self.kernel)
        step, skip = (1, self.layer.stride) if dilation > 1 else (self.layer.stride, 1)  # TensorFlow's are one or other
        if weight.shape[2] == 1:
            of_channels = tf.reshape(weight, self.shape)
            y = tf.nn.depthwise_conv2d(x, of_channels, [1, step, step, 1], "VALID", dilations=[dilation] * 2)
        else:
            parts = zip(tf.split(x, groups, 3), tf.split(weight, groups, 3), strict=True)
            y = tf.concat([tf.nn.convolution(a, w, step, "VALID", dilations=dilation) for a, w in parts], 3)
        return y[:, ::skip, ::skip] + self.shift


class Skip(keras.layers.Layer):
    """x + f(x); of x every n-th pixel, and channels of zeros, where the shortcut is padded."""

    def __init__(self, inner: list[keras.layers.Layer], stage: net.ResidualStage) -> None:
        super().__init__()
        self.inner, self.window = keras.Sequential(inner), stage.window
        self.more = stage.output_shape[-1] - stage.input_shape[-1]

    def call(self, x: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        y = self.inner(x, training=training)
        if self.window:
            step = self.window.stride
            x = tf.pad(x[:, ::step, ::step], [[0, 0], [0, 0], [0, 0], [0, self.more]])
        return x + y


class KerasProgram(Program):
    """A `Program` (see `protocol`) on Keras layers."""

    def __init__(self, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int) -> None:
        check_loss(network, loss)
        started = time.perf_counter()
        self.network, self.loss, self.optimizer, self.batch_size = network, loss, optimizer, batch_size
        self._now = Step()
        self._averages: list[tf.Variable] = []
        layers = [layer for stage in network.stages for layer in _layers(stage, self._now, self._averages)]
        self.pending: PendingAverages = PendingAverages(network, lambda: self._flat(self._averages), self._set_running)
        self._model = keras.Sequential([keras.Input(network.input_shape), *layers])
        self._variables = [variable.value for variable in self._model.trainable_variables]
        self._slots = [[tf.Variable(tf.zeros_like(v)) for v in self._variables] for _ in optimizer.slots]
        self._rules = [optimizer.of(tuple(v.shape)).rule(tf.sqrt, tf.maximum) for v in self._variables]
        self._step = 0
        images = tf.TensorSpec([None, *network.input_shape])
        batch = (images, tf.TensorSpec([None], tf.int32), tf.TensorSpec([None], tf.int64))
        scalars, compiled = [tf.TensorSpec([])] * 3, partial(tf.function, autograph=False)  # which knows no `match`
        self._train_step = compiled(self._take_step, input_signature=[*batch, *scalars])
        self._gradients = compiled(self._differentiate, input_signature=batch)
        parts = [tf.TensorSpec(variable.shape) for variable in self._variables]
        self._apply = compiled(self._update, input_signature=[parts, *scalars])
        self._forward = compiled(lambda x: self._model(x, training=False), input_signature=[images])
        self._warm_up()
        self.compile_s = time.perf_counter() - started

    def load(self, images: np.ndarray, labels: np.ndarray) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.constant(as_float32(images)), tf.constant(labels.astype(np.int32))

    def train(self, handle: Any, order: np.ndarray, rate: Rate) -> Totals:
        losses, hits = [], []
        self.pending.drop()
        for step, step_rate in enumerate(rate_of_steps(rate, len(order), self.batch_size)):
            indices = order[step * self.batch_size : (step + 1) * self.batch_size].astype(np.int64)
            self._begin_step()
            numbers = np.float32(step_rate), *self.optimizer.constants(self._step)
            loss, correct = self._train_step(*handle, indices, *numbers)
            losses.append(loss)
            hits.append(correct)
        return Totals(sum(float(loss) for loss in losses), sum(int(correct) for correct in hits), len(order))

    def gradients(self, handle: Any, indices: np.ndarray) -> tuple[Totals, np.ndarray]:
        if self.network.draws:
            self._now.numbers[1].assign(self._step + 1)
        with self.pending.hold():
            loss, hits, gradients = self._gradients(*handle, indices.astype(np.int64))
        return Totals(float(loss), int(hits), len(indices)), self._flat(gradients)

    def apply(self, gradient: np.ndarray, rate: float) -> None:
        self.pending.commit()
        self._begin_step()
        parts = [tf.constant(part) for part in self._parts(gradient)]
        self._apply(parts, np.float32(rate), *self.optimizer.constants(self._step))

    def predict(self, handle: Any) -> np.ndarray:
        images = handle[0]
        rows = range(0, len(images), self.batch_size)
        return np.concatenate([self._forward(images[start : start + self.batch_size]).numpy() for start in rows])

    def state(self) -> State:
        state = {"parameters": self._flat(self._variables), "step": np.array(self._step, np.int64)}
        state |= {name: self._flat(slot) for name, slot in zip(self.optimizer.slots, self._slots, strict=True)}
        if self._averages:
            state["running"] = self._flat(self._averages)
        if self.network.draws:
            state["seed"] = self._now.numbers.numpy()[0]
        return state

    def restore(self, state: State) -> None:
        whole = complete(state, self.network, self.optimizer)
        for name, targets in zip(("parameters", *self.optimizer.slots), (self._variables, *self._slots), strict=True):
            for target, part in zip(targets, self._parts(whole[name]), strict=True):
                target.assign(part)
        self.pending.drop()
        if self._averages:
            self._set_running(whole["running"])
        self._step = int(whole["step"])
        self._now.numbers.assign([int(whole.get("seed", 0)), self._step + 1])

    def close(self) -> None:
        """Nothing to give back: TensorFlow's threads are the process's."""

    def _set_running(self, running: np.ndarray) -> None:
        for average, part in zip(self._averages, self.network.running, strict=True):
            average.assign(part.view(running))

    def _begin_step(self) -> None:
        self._step += 1
        if self.network.draws:
            self._now.numbers[1].assign(self._step)

    def _warm_up(self) -> None:
        """Trace and run every function once, so that none is compiled while timed."""
        zeros = self.load(np.zeros((1, *self.network.input_shape), np.float32), np.zeros(1, np.int32))
        _, gradient = self.gradients(zeros, np.zeros(1, np.int64))
        self.apply(gradient, 0.0)
        self.train(zeros, np.zeros(1, np.int64), 0.0)
        self.predict(zeros)
        self.restore({"parameters": np.zeros(self.network.parameter_count, np.float32)})

    def _differentiate(
        self, images: tf.Tensor, labels: tf.Tensor, indices: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Return the summed loss, the hits and the mean gradients of one batch."""
        x, t = tf.gather(images, indices), tf.gather(labels, indices)
        self._now.images = indices
        with tf.GradientTape() as tape:
            scores = self._model(x, training=True)
            losses = _losses(self.loss, scores, t)
            if self.loss.class_weights:
                losses *= tf.gather(tf.constant(self.loss.class_weights), t)
            mean = tf.reduce_mean(losses)
        if self.loss.name == "binary_cross_entropy":
            hits = tf.equal(scores[:, 0] >= 0.5, tf.equal(t, 1))
        else:
            hits = tf.equal(tf.argmax(scores, 1, tf.int32), t)
        gradients = tape.gradient(mean, self._variables)
        return tf.reduce_sum(losses), tf.reduce_sum(tf.cast(hits, tf.int32)), gradients

    def _update(self, gradients: list[tf.Tensor], rate: tf.Tensor, c0: tf.Tensor, c1: tf.Tensor) -> None:
        zero = tf.constant(0.0)
        for i, (w, g, rule) in enumerate(zip(self._variables, gradients, self._rules, strict=True)):
            slots = [slot[i] for slot in self._slots]
            s, t = ([tf.convert_to_tensor(slot) for slot in slots] + [zero, zero])[:2]
            new = rule(tf.convert_to_tensor(w), g, s, t, rate, c0, c1)
            for old, value in zip([w, *slots], new, strict=False):
                old.assign(value)

    def _take_step(
        self, images: tf.Tensor, labels: tf.Tensor, indices: tf.Tensor, *scalars: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        loss, hits, gradients = self._differentiate(images, labels, indices)
        self._update(gradients, *scalars)
        return loss, hits

    def _flat(self, parts: Sequence[tf.Tensor]) -> np.ndarray:
        """Return the parts, in the order and shapes of the parameters, as one flat buffer."""
        return np.concatenate([np.asarray(part, np.float32).ravel() for part in parts])

    def _parts(self, flat: np.ndarray) -> list[np.ndarray]:
        return [parameter.view(np.asarray(flat, np.float32)) for parameter in self.network.parameters]


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


def _layers(stage: Stage, now: Step, averages: list[tf.Variable]) -> list[keras.layers.Layer]:
    """Return the layers of a stage, adding its running averages to the list, in their order."""
    match stage:
        case net.ConvStage() if not stage.dense:
            return [EdgePad(stage.window, 0.0), GroupedConv(stage)]
        case net.ConvStage(layer=layer):
            conv = keras.layers.Conv2D(layer.filters, layer.kernel, layer.stride, use_bias=layer.bias)
            return [EdgePad(stage.window, 0.0), conv]
        case net.PoolStage(layer=net.MaxPool2d()):
            pool = keras.layers.MaxPooling2D(stage.window.size, stage.window.stride)
            return [EdgePad(stage.window, -np.inf), pool]
        case net.PoolStage(layer=net.GlobalAvgPool()):
            return [keras.layers.GlobalAveragePooling2D()]
        case net.PoolStage():
            return [EdgeAverage(stage)]
        case net.LinearStage(layer=layer):
            return [keras.layers.Dense(layer.features, use_bias=layer.bias)]
        case net.FlattenStage():
            return [keras.layers.Flatten()]
        case net.ResidualStage():
            return [Skip([made for inner in stage.stages for made in _layers(inner, now, averages)], stage)]
        case net.DropoutStage():
            return [Drop(stage, now)]
        case net.NormStage():
            norm = Norm(stage)
            averages += norm.averages
            return [norm]
        case net.ElementwiseStage(layer=net.ReLU() | net.Sigmoid() | net.Tanh() | net.GELU()):
            return [keras.layers.Activation(type(stage.layer).__name__.lower())]
        case net.ElementwiseStage(layer=net.LeakyReLU(slope)):
            return [keras.layers.LeakyReLU(slope)]
        case net.ElementwiseStage():
            return [Rule(stage.layer)]
        case net.StructuralStage():
            raise ConfigError(f"backend=keras: cannot differentiate layer {stage.name}, which is NumPy's")
        case _:
            assert_never(stage)


@dataclass(frozen=True)
class Keras(ThreadedBackend):
    """Keras on TensorFlow, on the CPU.

    Attributes:
        threads: 1 to the usable cores; all of them if None. TensorFlow takes it once, from the first in a process.
    """

    name: ClassVar[str] = "keras"

    def compile(self, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int) -> KerasProgram:
        set_threads(self.thread_count)
        with tf.device("/CPU:0"):
            return KerasProgram(network, loss, optimizer, batch_size)


def set_threads(count: int) -> None:
    """Let TensorFlow use `count` threads for one operation, and one operation at a time.

    Raises:
        BackendUnavailable: TensorFlow runs already, with another number.
    """
    threading = tf.config.threading
    if threading.get_intra_op_parallelism_threads() != count:
        try:
            threading.set_intra_op_parallelism_threads(count)
            threading.set_inter_op_parallelism_threads(1)
        except RuntimeError as error:
            raise BackendUnavailable(
                f"backend.threads={count}: TensorFlow runs already with {threading.get_intra_op_parallelism_threads()} "
                "threads in this process; run one number per process"
            ) from error
