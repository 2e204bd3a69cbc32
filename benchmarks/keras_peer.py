"""Keras on TensorFlow as a contestant: its layers and optimizers in a training step of its own, XLA on or off."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from importlib.metadata import version

import numpy as np

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

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import tensorflow as tf


class Keras:
    """A `keras.Model` trained by a `tf.function`, which is quicker than `train_on_batch` and `fit`.

    Args:
        jit_compile: compile the step with XLA.
    """

    def __init__(self, case: Case, data: Data, threads: int, jit_compile: bool = False) -> None:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
        self.batch_size, self._first, self._case = case.batch_size, data.parameters, case
        self._views = [p.view(self._first) for p in case.network.parameters]
        inputs = keras.Input(case.network.input_shape)
        self._model = keras.Model(inputs, _through(case.network.stages, inputs))
        self._dropouts = {layer: layer.rate for layer in self._model.layers if isinstance(layer, keras.layers.Dropout)}
        self._jit_compile = jit_compile
        self._images = [tf.constant(batch) for batch in data.images]
        self._labels = [tf.constant(batch) for batch in data.labels]
        self._optimizer = _optimizer(case)
        self._optimizer.build(self._model.trainable_variables)
        started = time.perf_counter()
        self.draw(True)
        self.compile_s = time.perf_counter() - started
        self.facts = {"tensorflow": tf.__version__, "keras": version("keras"), "threads": threads}

    def reset(self) -> None:
        for variable, first in zip(self._model.trainable_variables, self._views, strict=True):
            variable.assign(first.reshape(variable.shape))
        for variable in self._optimizer.variables:
            if "learning_rate" not in variable.path:
                variable.assign(tf.zeros_like(variable))

    def train(self, steps: int) -> None:
        loss = None
        for step in range(steps):
            batch = step % len(self._images)
            loss = self._step(self._images[batch], self._labels[batch])
        if loss is not None:
            loss.numpy()

    def gradient(self) -> tuple[float, np.ndarray]:
        loss, gradients = self._gradients(self._images[0], self._labels[0])
        return float(loss), np.concatenate([gradient.numpy().ravel() for gradient in gradients])

    def parameters(self) -> np.ndarray:
        return np.concatenate([variable.numpy().ravel() for variable in self._model.trainable_variables])

    def draw(self, on: bool) -> bool:
        if self._dropouts or not hasattr(self, "_step"):
            for layer, rate in self._dropouts.items():
                layer.rate = rate if on else 0.0
            # traced anew: a rate is a constant of the graph
            self._step = tf.function(self._take_step, jit_compile=self._jit_compile)
            self._gradients = tf.function(self._loss_and_gradients, jit_compile=self._jit_compile)
            self._step(self._images[0], self._labels[0])
        return False

    def _loss_and_gradients(self, images, labels):
        with tf.GradientTape() as tape:
            scores = self._model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
            loss = tf.reduce_mean(losses)
        return loss, tape.gradient(loss, self._model.trainable_variables)

    def _take_step(self, images, labels):
        loss, gradients = self._loss_and_gradients(images, labels)
        self._optimizer.apply(gradients, self._model.trainable_variables)
        return loss


def _optimizer(case: Case) -> keras.optimizers.Optimizer:
    optimizer = case.optimizer
    if type(optimizer) is SGD:
        return keras.optimizers.SGD(optimizer.lr)
    # Keras adds epsilon before it corrects the bias; with this one the first step, which is checked, is the same
    epsilon = optimizer.eps * math.sqrt(1 - optimizer.beta2)
    return keras.optimizers.Adam(optimizer.lr, optimizer.beta1, optimizer.beta2, epsilon)


def _through(stages: Iterable[Stage], x):
    for stage in stages:
        match stage.layer:
            case Conv2d(filters, kernel, stride, padding, bias, groups):
                padding = pixels(padding)
                if isinstance(padding, int):
                    x, padding = keras.layers.ZeroPadding2D(padding)(x), "valid"
                if groups == 1:
                    x = keras.layers.Conv2D(filters, kernel, stride, padding, use_bias=bias)(x)
                else:
                    assert groups == filters == stage.input_shape[2]
                    x = keras.layers.DepthwiseConv2D(kernel, stride, padding, use_bias=bias)(x)
            case BatchNorm2d(momentum, epsilon):
                x = keras.layers.BatchNormalization(momentum=1 - momentum, epsilon=epsilon)(x)
            case ReLU():
                x = keras.layers.ReLU()(x)
            case Tanh():
                x = keras.layers.Activation("tanh")(x)
            case GELU():
                x = keras.layers.Activation("gelu")(x)
            case Dropout(rate):
                x = keras.layers.Dropout(rate)(x)
            case MaxPool2d(pool, None, "valid"):
                x = keras.layers.MaxPooling2D(pool)(x)
            case AvgPool2d(pool, None, "valid"):
                x = keras.layers.AveragePooling2D(pool)(x)
            case GlobalAvgPool():
                x = keras.layers.GlobalAveragePooling2D()(x)
            case Flatten():
                x = keras.layers.Flatten()(x)
            case Linear(features, bias):
                x = keras.layers.Dense(features, use_bias=bias)(x)
            case Residual():
                past, step = x, stage.window.stride if stage.window else 0
                if step:
                    more = stage.output_shape[2] - stage.input_shape[2]
                    skip = keras.layers.Lambda(
                        lambda x, step, more: tf.pad(x[:, ::step, ::step], [[0, 0]] * 3 + [[0, more]]),
                        arguments={"step": step, "more": more},
                    )
                    past = skip(x)
                x = keras.layers.Add()([past, _through(stage.stages, x)])
            case layer:
                raise ValueError(f"no benchmark case uses {layer}")
    return x
