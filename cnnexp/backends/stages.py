"""The stages of a network with the arrays of a batch: one way through them forward, one back."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, assert_never

import numpy as np

from cnnexp import network as net
from cnnexp.backends.protocol import Array, Ops, Watch
from cnnexp.errors import NetworkError
from cnnexp.network import Stage
from cnnexp.network.noise import layer_key

_UNWATCHED: AbstractContextManager = contextlib.nullcontext()


def unwatched(layer: str, what: str) -> AbstractContextManager:
    return _UNWATCHED


@dataclass(frozen=True)
class Run(Generic[Array]):
    """What every layer is given while one batch goes through them."""

    count: int  # images in the batch
    parameters: Array  # flat float32
    gradient: Array  # flat float32
    running: Array | None = None  # flat float32, the running averages
    trains: bool = False  # whether it is a step of training, not `predict`
    seed: int = 0  # what random numbers follow from, with the step
    step: int = 0  # from 1
    images: Any = None  # int64 (N,), places in the data set, where the ops want them; None in `predict`
    watch: Watch = unwatched

    def key(self, stage: Stage) -> int:
        """Return the key of a layer's random numbers in this step."""
        return layer_key(self.seed, self.step, stage.name)


class Chain(Generic[Array]):
    """Stages one after another, each with buffers for its output and its gradient, allocated once.

    Batches shorter than `batch_size` use the first images of each buffer. The first stage's input (N, *input_shape)
    lies in the buffer x, its gradient in dx, None where there is none.
    """

    def __init__(self, ops: Ops[Array], stages: Sequence[Stage], batch_size: int, x: Array, dx: Array | None) -> None:
        self.steps: list[_Step[Array]] = []
        for stage in stages:
            step = _STEPS.get(type(stage), _Step)(ops, stage, batch_size, x, dx)
            self.steps.append(step)
            x, dx = step.y, step.dy
        self._stages, self._batch_size = tuple(stages), batch_size
        trained = (i for i, stage in enumerate(stages) if stage.parameters)
        self._first_trained = next(trained, len(stages))

    def forward(self, run: Run[Array], x: Array) -> Array:
        """Return the output of the last stage for x (N, *input_shape)."""
        return [y for _, y in self.outputs(run, x)][-1]

    def outputs(self, run: Run[Array], x: Array) -> Iterator[tuple[Stage, Array]]:
        """Yield each stage with its output for x, which lies in its buffer until the next batch."""
        for stage, step in zip(self._stages, self.steps, strict=True):
            x = step.forward(run, x, self._first(step.y, run.count))
            yield stage, x

    def gradient(self, count: int) -> Array:
        """Return where the gradient of the output of `count` images belongs, before `backward`."""
        return self._first(self.steps[-1].dy, count)

    def backward(self, run: Run[Array], x: Array, dx: Array | None) -> None:
        """Fill the flat gradient, and dx unless it is None; then no stage before the first that trains is run."""
        first = self._first_trained if dx is None else 0
        for i in range(len(self.steps) - 1, first - 1, -1):
            step = self.steps[i]
            source = self._first(self.steps[i - 1].y, run.count) if i else x
            target = self._first(self.steps[i - 1].dy, run.count) if i > first else dx
            step.backward(run, source, self._first(step.y, run.count), self._first(step.dy, run.count), target)

    def _first(self, array: Array, count: int) -> Array:
        return array if count == self._batch_size else array[:count]


class _Step(Generic[Array]):
    """A layer that the ops compute, with its buffers: y (N, *output_shape), and dy, its gradient."""

    def __init__(self, ops: Ops[Array], stage: Stage, batch_size: int, x: Array, dx: Array | None) -> None:
        shape = (batch_size, *stage.output_shape)
        self._ops, self._stage = ops, stage
        self.y, self.dy = ops.empty(shape, np.float32), ops.empty(shape, np.float32)
        self._saved = ops.saved(stage, batch_size)

    def forward(self, run: Run[Array], x: Array, y: Array) -> Array:
        """Return the output, which is in y or a view of x."""
        with run.watch(self._stage.name, "forward"):
            forward_stage(self._ops, self._stage, run, x, y, self._saved)
        return y

    def backward(self, run: Run[Array], x: Array, y: Array, dy: Array, dx: Array | None) -> None:
        """Fill dx unless it is None, and the stage's part of the flat gradient."""
        with run.watch(self._stage.name, "backward"):
            backward_stage(self._ops, self._stage, run, x, y, dy, self._saved, dx)


class _View(_Step[Array]):
    """A Flatten: its output is its input seen in another shape."""

    def __init__(self, ops: Ops[Array], stage: Stage, batch_size: int, x: Array, dx: Array | None) -> None:
        shape = (batch_size, *stage.output_shape)
        self.y = x.reshape(shape)
        self.dy = ops.empty(shape, np.float32) if dx is None else dx.reshape(shape)

    def forward(self, run: Run[Array], x: Array, y: Array) -> Array:
        return x.reshape(y.shape)  # not y: where it opens the network, x need not be the gathered batch

    def backward(self, run: Run[Array], x: Array, y: Array, dy: Array, dx: Array | None) -> None:
        """Do nothing: dx is a view of dy's buffer."""


class _Dropout(_Step[Array]):
    """A Dropout, which outside training is not there."""

    def forward(self, run: Run[Array], x: Array, y: Array) -> Array:
        return super().forward(run, x, y) if run.trains else x


class _Branch(_Step[Array]):
    """A Residual: its layers' last gradient is its own, to which the way past them adds.

    A shortcut that skips pixels and adds channels of zeros is the convolution with an identity matrix that does so.
    """

    def __init__(self, ops: Ops[Array], stage: Stage, batch_size: int, x: Array, dx: Array | None) -> None:
        assert isinstance(stage, net.ResidualStage)
        self._ops, self._stage, self._window = ops, stage, stage.window
        self._inner = Chain(ops, stage.stages, batch_size, x, dx)
        self.y = ops.empty((batch_size, *stage.output_shape), np.float32)
        # views alone would make dy the very memory of dx, which whoever holds this layer still reads after `backward`
        self._doubles = all(isinstance(step, _View) for step in self._inner.steps)
        self.dy = ops.empty(self.y.shape, np.float32) if self._doubles else self._inner.steps[-1].dy
        if self._window:
            eye = np.eye(x.shape[-1], self.y.shape[-1], dtype=np.float32)[None, None]
            self._eye, self._d_eye = ops.to_device(eye), ops.empty(eye.shape, np.float32)
            self._skipped, self._d_skipped = (ops.empty(like.shape, np.float32) for like in (self.y, x))

    def forward(self, run: Run[Array], x: Array, y: Array) -> Array:
        inner = self._inner.forward(run, x)
        with run.watch(self._stage.name, "forward"):
            if self._window:
                x, whole = self._skipped[: run.count], x
                self._ops.conv2d(whole, self._eye, None, self._window, x)
            self._ops.add(x, inner, y)
        return y

    def backward(self, run: Run[Array], x: Array, y: Array, dy: Array, dx: Array | None) -> None:
        self._inner.backward(run, x, dx)
        if dx is not None:
            with run.watch(self._stage.name, "backward"):
                past = dy
                if self._window:
                    past = self._d_skipped[: run.count]
                    self._ops.conv2d_backward(x, self._eye, dy, self._window, past, self._d_eye, None)
                self._ops.add(dy if self._doubles else dx, past, dx)


_STEPS: dict[type, type[_Step]] = {net.FlattenStage: _View, net.DropoutStage: _Dropout, net.ResidualStage: _Branch}


def forward_stage(ops: Ops[Array], stage: Stage, run: Run[Array], x: Array, y: Array, saved: Any) -> None:
    """Run one layer on x (N, *input_shape), filling y and what `saved` has room for."""
    match stage:
        case net.ConvStage():
            ops.conv2d(x, *_views(stage, run.parameters), stage.window, y)
        case net.ElementwiseStage():
            ops.elementwise(stage.layer, x, y)
        case net.PoolStage(layer=net.MaxPool2d()):
            ops.max_pool(x, stage.window, y, saved)
        case net.PoolStage():
            ops.avg_pool(x, stage.window, _pixels(y))
        case net.LinearStage():
            ops.linear(x, *_views(stage, run.parameters), y)
        case net.DropoutStage():
            ops.dropout(x, run.images, run.key(stage), stage.layer.rate, y)
        case net.NormStage():
            weight, bias = stage.weight.view(run.parameters), stage.bias.view(run.parameters)
            mean, variance = (average.view(run.running) for average in stage.running)
            if run.trains:
                ops.batch_norm(stage.layer, x, weight, bias, mean, variance, y, saved)
            else:
                ops.batch_norm_predict(stage.layer, x, weight, bias, mean, variance, y)
        case net.StructuralStage():
            ops.copy(_fitting(stage, "forward", stage.layer.forward(ops.to_host(x)), y.shape), y)
        case net.FlattenStage() | net.ResidualStage():
            raise TypeError(f"{stage.name}: is made of views and other layers; `Chain` runs it")
        case _:
            assert_never(stage)


def backward_stage(
    ops: Ops[Array], stage: Stage, run: Run[Array], x: Array, y: Array, dy: Array, saved: Any, dx: Array | None
) -> None:
    """Run one layer backwards, filling dx and its part of the flat gradient; arrays as in `forward_stage`."""
    match stage:
        case net.ConvStage():
            w = stage.weight.view(run.parameters)
            ops.conv2d_backward(x, w, dy, stage.window, dx, *_views(stage, run.gradient))
            return
        case net.LinearStage():
            ops.linear_backward(x, stage.weight.view(run.parameters), dy, dx, *_views(stage, run.gradient))
            return
        case net.NormStage():
            dw, db = stage.weight.view(run.gradient), stage.bias.view(run.gradient)
            ops.batch_norm_backward(x, stage.weight.view(run.parameters), dy, saved, dx, dw, db)
            return
    assert dx is not None  # as for every layer but the first that trains; those before it are not run
    match stage:
        case net.ElementwiseStage():
            ops.elementwise_backward(stage.layer, x, y, dy, dx)
        case net.PoolStage(layer=net.MaxPool2d()):
            ops.max_pool_backward(saved, dy, stage.window, dx)
        case net.PoolStage():
            ops.avg_pool_backward(_pixels(dy), stage.window, dx)
        case net.DropoutStage():
            ops.dropout(dy, run.images, run.key(stage), stage.layer.rate, dx)
        case net.StructuralStage():
            found = stage.layer.backward(*(ops.to_host(array) for array in (x, y, dy)))
            ops.copy(_fitting(stage, "backward", found, dx.shape), dx)
        case net.FlattenStage() | net.ResidualStage():
            raise TypeError(f"{stage.name}: is made of views and other layers; `Chain` runs it")
        case _:
            assert_never(stage)


def _fitting(stage: net.StructuralStage, what: str, found: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return what a plugin's layer gives, as ops take it."""
    if np.shape(found) != shape:
        raise NetworkError(f"layer {stage.name}: {what} gives an array of shape {np.shape(found)}; must be {shape}")
    return np.ascontiguousarray(found, np.float32)


def _pixels(y: Array) -> Array:
    """Return the output of a pooling layer (N,U,V,C); of a GlobalAvgPool, (N,C), as one pixel."""
    return y if len(y.shape) == 4 else y.reshape((y.shape[0], 1, 1, y.shape[1]))


def _views(stage: net.ConvStage | net.LinearStage, flat: Array) -> tuple[Array, Array | None]:
    """Return the weight's and the bias's part of a flat buffer, None for a bias that the layer lacks."""
    return stage.weight.view(flat), None if stage.bias is None else stage.bias.view(flat)
