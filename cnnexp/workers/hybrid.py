"""Convolutions by images, linear layers by outputs (Krizhevsky 2014, "One weird trick"; castanheira, section 6).

Convolutions have few weights and much to compute, so each worker takes some of the images and their small gradients are
summed. Linear layers have many weights and little to compute, so each worker keeps only some of the outputs (columns of
the weights) and sees all images: activations travel, the big weights never do.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from cnnexp.backends.layerwise import LayerwiseProgram
from cnnexp.backends.plain.numpy import NumpyOps, one_blas_thread
from cnnexp.backends.protocol import State
from cnnexp.backends.stages import Run, backward_stage, forward_stage
from cnnexp.errors import ConfigError
from cnnexp.network import DropoutStage, ElementwiseStage, FlattenStage, Linear, LinearStage, Network, Parameter, Stage
from cnnexp.network.losses import Loss, Totals, compute
from cnnexp.optimizers import Optimizer
from cnnexp.workers.collective import Collective, share, shares
from cnnexp.workers.replica import Loaded, Replica, Spec


class HybridReplica(Replica):
    """A worker with all convolutions, on the chosen backend, and some columns of every linear layer, on NumPy.

    The linear layers' activations and gradients come from and go to other workers, so they are on the host anyway.
    ConfigError is raised where the network has no such parts, a linear layer has fewer outputs than there are workers,
    or the backend is a fused one, which cannot run a part of a network.
    """

    def __init__(self, spec: Spec, collective: Collective) -> None:
        first = first_linear(spec.network, collective.size)
        features = Network(spec.network.input_shape, spec.network.layers[:first])
        rows = shares(spec.batch_size, collective.size)[0]
        # which loss is of no matter: the features are only ever given a gradient
        program = spec.backend.compile(features, Loss.SOFTMAX_CROSS_ENTROPY, spec.optimizer, rows)
        if not isinstance(program, LayerwiseProgram):
            program.close()
            why = "compiles a network as one piece; use a backend that runs layer by layer, e.g. cpu-parallel"
            raise ConfigError(f"workers.sync=hybrid: backend={spec.backend.name} {why}")
        super().__init__(spec, collective, program)
        self._features, self.network, self.loss = program, spec.network, spec.loss
        self._head = Head(spec.network, spec.optimizer, first, cast(Collective, self.collective))
        self._shared = features.parameter_count

    def gradients(self, handle: int, indices: np.ndarray) -> tuple[Totals, np.ndarray]:
        totals, features = super().gradients(handle, indices)
        return totals, np.concatenate([features, self._head.whole(self._head.gradient)])

    def apply(self, gradient: np.ndarray, rate: float) -> None:
        self._buffer[:-3] = gradient[: self._shared]
        self._head.gradient[:] = self._head.own(gradient[self._shared :])
        self._apply(rate)

    def predict(self, handle: int) -> np.ndarray:
        count = len(self._splits[handle].labels)
        scores = np.empty((count, *self.network.output_shape), np.float32)
        for start in range(0, count, self.batch_size):
            batch = np.arange(start, min(start + self.batch_size, count))
            with one_blas_thread():
                scores[batch] = self._forward(self._splits[handle], batch, trains=False)
        return scores

    def state(self) -> State:
        state, head = self.program.state(), self._head
        state |= {name: np.concatenate([state[name], head.whole(own)]) for name, own in head.arrays.items()}
        return state | ({"seed": np.array(head.seed, np.int64)} if self.network.draws else {})

    def restore(self, state: State) -> None:
        shared, head = self._shared, self._head
        self.program.restore({name: array[:shared] if name in head.arrays else array for name, array in state.items()})
        zeros = np.zeros(self.network.parameter_count, np.float32)
        for name, own in head.arrays.items():
            own[:] = head.own(state.get(name, zeros)[shared:])
        head.step, head.seed = int(state.get("step", 0)), int(state.get("seed", 0))

    def _forward(self, split: Loaded, batch: np.ndarray, trains: bool) -> np.ndarray:
        """Return the scores (N, O) of a batch, on every worker."""
        mine = batch[share(len(batch), self.collective.size, self.collective.rank)]
        width = self.program.network.output_shape[0]
        rows = self._features.forward(split.whole, mine, trains) if len(mine) else np.empty((0, width), np.float32)
        sizes = [count * width for count in shares(len(batch), self.collective.size)]
        x = self.collective.all_gather(rows.ravel(), sizes).reshape(len(batch), width)
        return self._head.forward(x, batch if trains else None)

    def _gradients(self, split: Loaded, batch: np.ndarray) -> Totals:
        """Leave the features' mean gradient of a batch in the buffer, the columns' in the head; return the totals."""
        count, mine = len(batch), share(len(batch), self.collective.size, self.collective.rank)
        with one_blas_thread():
            scores, labels = self._forward(split, batch, trains=True), split.labels[batch]
            d_scores, losses, hits = np.empty_like(scores), np.empty(count, np.float32), np.empty(count, np.uint8)
            compute(self.loss, scores, labels, np.float32(1 / count), d_scores, losses, hits)
            d_rows = self._head.backward(d_scores)[mine]
            self._buffer[:-3] = self._features.backward(d_rows) if len(d_rows) else 0
        self.collective.all_reduce(self._buffer[:-3])
        self._average_pending(len(d_rows) / count)
        self._images += len(d_rows)
        return Totals(float(losses.sum(dtype=np.float64)), int(hits.sum(dtype=np.int64)), count)

    def _apply(self, rate: float) -> None:
        super()._apply(rate)
        self._head.apply(rate)


class Head:
    """The layers from the first linear one on; of each linear layer's weights, one worker's columns.

    Its arrays, `parameters` and the optimizer's slots by name, and its gradient are flat float32: this worker's columns
    only, layer after layer. The random numbers of layers follow from `seed`.
    """

    def __init__(self, network: Network, optimizer: Optimizer, first: int, collective: Collective) -> None:
        self._stages = [stage for stage in network.stages[first:] if not isinstance(stage, FlattenStage)]  # x is flat
        self._optimizer, self._collective = optimizer, collective
        self._layouts = [[*_layout(self._stages, collective.size, rank)] for rank in range(collective.size)]
        self._sizes = [sum(own.size for _, _, own in layout) for layout in self._layouts]
        size = self._sizes[collective.rank]
        self.gradient = np.zeros(size, np.float32)
        self.arrays = {name: np.zeros(size, np.float32) for name in ("parameters", *optimizer.slots)}
        self._parameters, *self._slots = self.arrays.values()
        self.step, self.seed = 0, 0

    def own(self, whole: np.ndarray) -> np.ndarray:
        """Return this worker's columns of a flat array over all of the head's parameters."""
        flat = np.empty_like(self.gradient)
        for everyone, columns, own in self._layouts[self._collective.rank]:
            own.view(flat)[...] = everyone.view(whole)[..., columns]
        return flat

    def whole(self, own: np.ndarray) -> np.ndarray:
        """Return all columns, given each worker's."""
        flat = np.empty(sum(self._sizes), np.float32)
        for layout, part in zip(self._layouts, self._gather(own, self._sizes), strict=True):
            for everyone, columns, owned in layout:
                everyone.view(flat)[..., columns] = owned.view(part)
        return flat

    def forward(self, x: np.ndarray, images: np.ndarray | None) -> np.ndarray:
        """Return the scores (N, O) of x (N, D), the same on every worker; in training `images` are their places."""
        flat = self._parameters, self.gradient, None
        self._inputs, self._run = [x], Run(len(x), *flat, images is not None, self.seed, self.step + 1, images)
        for stage, (w, b) in zip(self._stages, self._views(self._parameters), strict=True):
            if isinstance(stage, LinearStage):
                columns = x @ w + (0 if b is None else b)  # of this worker
                sizes = [len(x) * width for width in shares(stage.output_shape[0], self._collective.size)]
                x = np.hstack([part.reshape(len(x), -1) for part in self._gather(columns.ravel(), sizes)])
            elif self._run.trains or not isinstance(stage, DropoutStage):
                y = np.empty_like(x)
                forward_stage(_OPS, stage, self._run, x, y, None)
                x = y
            self._inputs.append(x)
        return x

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """Return the gradient of the features (N, D), leaving that of this worker's columns; dy (N, O)."""
        weights, gradients = self._views(self._parameters), self._views(self.gradient)
        for i in range(len(self._stages) - 1, -1, -1):
            x, y, stage = self._inputs[i], self._inputs[i + 1], self._stages[i]
            dx = np.empty_like(x)
            if isinstance(stage, LinearStage):
                columns = share(dy.shape[1], self._collective.size, self._collective.rank)
                _OPS.linear_backward(x, weights[i][0], np.ascontiguousarray(dy[:, columns]), dx, *gradients[i])
                self._collective.all_reduce(dx.reshape(-1))
            else:
                backward_stage(_OPS, stage, self._run, x, y, dy, None, dx)
            dy = dx
        return dy

    def apply(self, rate: float) -> None:
        """Take one optimizer step with the gradient that `backward` left."""
        self.step += 1
        for _, _, own in self._layouts[self._collective.rank]:
            w, g, *slots = (own.view(flat) for flat in (self._parameters, self.gradient, *self._slots))
            self._optimizer.of(own.shape).apply(w, g, slots, rate, self.step)

    def _gather(self, own: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
        """Return every worker's flat array, so many numbers long each."""
        return np.split(self._collective.all_gather(own, sizes), np.cumsum(sizes)[:-1])

    def _views(self, flat: np.ndarray) -> list[tuple[Any, np.ndarray | None]]:
        """Return each stage's weight (D, columns) and bias (columns,) in a flat array of this worker's columns."""
        views = iter([own.view(flat) for _, _, own in self._layouts[self._collective.rank]])
        return [(next(views) if stage.weight else None, next(views) if stage.bias else None) for stage in self._stages]


def first_linear(network: Network, workers: int) -> int:
    """Return where linear layers begin; raise ConfigError without convolutions before, or outputs for all workers."""
    first = next((i for i, layer in enumerate(network.layers) if isinstance(layer, Linear)), None)
    if first is None or not any(stage.macs for stage in network.stages[:first]):
        raise ConfigError("workers.sync=hybrid: needs convolutions, then linear layers; use workers.sync=gradients")
    for stage in network.stages[first:]:
        if not isinstance(stage, LinearStage | ElementwiseStage | DropoutStage | FlattenStage):
            why = f"cannot divide {type(stage.layer).__name__} among workers after the first Linear"
            raise ConfigError(f"workers.sync=hybrid: {why}; use workers.sync=gradients")
        if isinstance(stage, LinearStage) and (outputs := stage.layer.features) < workers:
            why = f"{stage.name} has {outputs} outputs for {workers} workers; use at most {outputs} workers"
            raise ConfigError(f"workers.sync=hybrid: {why}, or workers.sync=gradients")
    return first


def _layout(stages: Sequence[Stage], size: int, rank: int) -> Iterator[tuple[Parameter, slice, Parameter]]:
    """Yield for each parameter: its place among all of the head's, a worker's columns of it, their place there."""
    everyone_at, own_at = 0, 0
    for p in (p for stage in stages for p in stage.parameters):
        columns = share(p.shape[-1], size, rank)
        own = replace(p, shape=(*p.shape[:-1], columns.stop - columns.start), offset=own_at)
        yield replace(p, offset=everyone_at), columns, own
        everyone_at, own_at = everyone_at + p.size, own_at + own.size


_OPS = NumpyOps()
