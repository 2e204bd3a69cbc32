"""`torch`: the same network in PyTorch, eager, on the CPU: a peer to compare with (`pip install '.[torch]'`).

Modules, autograd and optimizers are PyTorch's own. Only the borders are ours: parameters come from and go to the flat
buffer, images are (N,C,H,W) views of channels-last memory, which PyTorch's convolutions take as they are.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, assert_never

import numpy as np

from cnnexp import network as net
from cnnexp.backends.layerwise import as_float32
from cnnexp.backends.processor import ThreadedBackend, using_threads
from cnnexp.backends.protocol import Program, Rate, State, rate_of_steps
from cnnexp.backends.state import PendingAverages, complete
from cnnexp.errors import BackendUnavailable, ConfigError, installing
from cnnexp.network import Network, Stage, noise
from cnnexp.network.losses import LOG_FLOOR, VARIANCE_FLOOR, Loss, Totals, check_loss
from cnnexp.optimizers import SGD, Adadelta, Adagrad, Adam, AdaMax, AdamW, Optimizer, RMSprop

try:
    import torch
    from torch import nn
    from torch.nn import functional
except ImportError as error:
    raise BackendUnavailable(f"backend=torch: PyTorch cannot be imported ({error}); {installing('torch')}") from error

# our optimizers -> PyTorch's of the same formulas, our names of its slots -> the keys of its state, what it is given
OPTIMIZERS: dict[type[Optimizer], tuple[type[torch.optim.Optimizer], dict[str, str], tuple[str, ...]]] = {
    SGD: (torch.optim.SGD, {"velocity": "momentum_buffer"}, ("momentum", "nesterov")),
    RMSprop: (
        torch.optim.RMSprop,
        {"square": "square_avg", "velocity": "momentum_buffer"},
        ("alpha", "eps", "momentum"),
    ),
    Adagrad: (torch.optim.Adagrad, {"square_sum": "sum"}, ("lr_decay", "eps")),
    Adadelta: (torch.optim.Adadelta, {"square": "square_avg", "update": "acc_delta"}, ("rho", "eps")),
    Adam: (torch.optim.Adam, {"mean": "exp_avg", "square": "exp_avg_sq"}, ("betas", "eps")),
    AdamW: (torch.optim.AdamW, {"mean": "exp_avg", "square": "exp_avg_sq"}, ("betas", "eps")),
    AdaMax: (torch.optim.Adamax, {"mean": "exp_avg", "norm": "exp_inf"}, ("betas", "eps")),
}


class _Pad(nn.Module):
    """Put `value` around images (N,C,H,W), as far as windows reach."""

    def __init__(self, window: net.Window, value: float) -> None:
        super().__init__()
        top, left, bottom, right = window.pads
        self.sides, self.value = (left, right, top, bottom), value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.pad(x, self.sides, value=self.value) if any(self.sides) else x


class _AvgPool(nn.Module):
    """The mean over the pixels of each window that lie inside the image."""

    def __init__(self, stage: net.PoolStage) -> None:
        super().__init__()
        window = stage.window
        self.pad, self.pool = _Pad(window, 0.0), nn.AvgPool2d(window.size, window.stride)
        ones = torch.ones(1, 1, *stage.input_shape[:2])
        self.share = self.pool(self.pad(ones)) if window.padded else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        means = self.pool(self.pad(x))
        return means if self.share is None else means / self.share


class _Rule(nn.Module):
    """A user's elementwise layer, by its own derivative."""

    def __init__(self, layer: net.Elementwise) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _RuleFunction.apply(x, self.layer)


class _RuleFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: net.Elementwise) -> torch.Tensor:
        y = layer.rule(MATHS)(x)
        ctx.layer = layer
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy * ctx.layer.derivative(MATHS)(*ctx.saved_tensors), None


def _where(condition: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
    """As `Maths` has it; a and b may be numbers."""
    return torch.where(condition, *(torch.as_tensor(value, dtype=torch.float32) for value in (a, b)))


MATHS = net.Maths(torch.exp, torch.tanh, torch.erf, lambda a, b: _where(a < b, b, a), _where)


class _BatchNorm(nn.BatchNorm2d):
    """Also of one number per channel, which PyTorch refuses: its variance is 0, and no estimate of it unbiased."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or x.numel() > x.shape[1]:
            return super().forward(x)
        with torch.no_grad():
            self.running_mean += self.momentum * (x.flatten() - self.running_mean)
            self.running_var *= 1 - self.momentum
        return (x - x.detach()) * 0 * self.weight[:, None, None] + self.bias[:, None, None]


@dataclass
class _Step:
    """What random numbers follow from in the step that is being taken; `images` are places in the data set."""

    seed: int = 0
    step: int = 0
    images: Any = None


class _Dropout(nn.Module):
    """`noise.keeps` on tensors: which numbers are dropped is not PyTorch's to say."""

    def __init__(self, stage: net.DropoutStage, now: _Step) -> None:
        super().__init__()
        self.stage, self.rate, self.now = stage, stage.layer.rate, now

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        rows = noise.mix(noise.layer_key(self.now.seed, self.now.step, self.stage.name) ^ self.now.images)
        shape = self.stage.output_shape
        draws = noise.mix(rows[:, None] ^ noise.mix(torch.arange(math.prod(shape))))
        kept = _channels_first((draws >= noise.threshold(self.rate)).reshape(len(x), *shape))
        return x * kept / (1 - self.rate)


class _Residual(nn.Module):
    """x + f(x); of x every n-th pixel, and channels of zeros, where the shortcut is padded."""

    def __init__(self, inner: nn.Module, stage: net.ResidualStage) -> None:
        super().__init__()
        self.inner, self.window = inner, stage.window
        self.more = stage.output_shape[-1] - stage.input_shape[-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if self.window:
            step = self.window.stride
            x = functional.pad(x[:, :, ::step, ::step], (0, 0, 0, 0, 0, self.more))
        return x + y


class _Flatten(nn.Module):
    """(N,C,H,W) -> (N,H*W*C), in row, column, channel order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.permute(0, 2, 3, 1) if x.ndim == 4 else x).flatten(1)


class _BinaryCrossEntropy(torch.autograd.Function):
    """As PyTorch's (see `losses.compute`), but NaN passes through: the train loop reports it."""

    @staticmethod
    def forward(ctx: Any, p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(p, t)
        return -(t * p.log().clamp(min=float(LOG_FLOOR)) + (1 - t) * (-p).log1p().clamp(min=float(LOG_FLOOR)))

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        p, t = ctx.saved_tensors
        return upstream * (p - t) / (p * (1 - p)).clamp(min=float(VARIANCE_FLOOR)), None


class TorchProgram(Program):
    """A `Program` (see `protocol`) on PyTorch, whose operations use so many threads."""

    def __init__(self, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int, threads: int) -> None:
        check_loss(network, loss)
        started = time.perf_counter()
        self.network, self.loss, self.optimizer, self.batch_size = network, loss, optimizer, batch_size
        self._in_threads = partial(using_threads, threads, torch.get_num_threads, torch.set_num_threads)
        self._tensors: list[nn.Parameter] = []  # in the order of the flat buffer
        self._averages: list[torch.Tensor] = []
        self.pending: PendingAverages = PendingAverages(network, self._running, self._set_running)
        self._now = _Step()
        modules = [_module(stage, self._tensors, self._averages, self._now) for stage in network.stages]
        self._modules = nn.Sequential(*modules).to(memory_format=torch.channels_last)
        self.restore({"parameters": np.zeros(network.parameter_count, np.float32)})
        zeros = self.load(np.zeros((1, *network.input_shape), np.float32), np.zeros(1, np.int32))
        self.train(zeros, np.zeros(1, np.int64), 0.0)
        self.restore({"parameters": np.zeros(network.parameter_count, np.float32)})
        self.compile_s = time.perf_counter() - started

    def load(self, images: np.ndarray, labels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(as_float32(images)), torch.tensor(labels.astype(np.int64))

    def train(self, handle: Any, order: np.ndarray, rate: Rate) -> Totals:
        batches = torch.tensor(np.ascontiguousarray(order, np.int64)).split(self.batch_size)
        loss, hits = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
        self.pending.drop()
        with self._in_threads():
            for indices, step_rate in zip(batches, rate_of_steps(rate, len(order), self.batch_size), strict=False):
                losses, correct = self._backward(handle, indices)
                self._update(float(step_rate))
                loss += losses
                hits += correct
        return Totals(float(loss), int(hits), len(order))

    def gradients(self, handle: Any, indices: np.ndarray) -> tuple[Totals, np.ndarray]:
        with self._in_threads(), self.pending.hold():
            loss, hits = self._backward(handle, torch.tensor(np.ascontiguousarray(indices, np.int64)))
        return Totals(float(loss), int(hits), len(indices)), self._flat([tensor.grad for tensor in self._tensors])

    def apply(self, gradient: np.ndarray, rate: float) -> None:
        self.pending.commit()
        for tensor, part in zip(self._tensors, self._parts(gradient), strict=True):
            tensor.grad = part
        with self._in_threads():
            self._update(rate)

    def predict(self, handle: Any) -> np.ndarray:
        with self._in_threads(), torch.no_grad():
            self._modules.eval()
            return torch.cat([self._modules(_channels_first(x)) for x in handle[0].split(self.batch_size)]).numpy()

    def state(self) -> State:
        states, keys = [self._updater.state[tensor] for tensor in self._tensors], OPTIMIZERS[type(self.optimizer)][1]
        slots = {name: self._flat([s[keys[name]] for s in states]) for name in self.optimizer.slots}
        state = {"parameters": self._flat(self._tensors), "step": np.array(self._steps, np.int64), **slots}
        if self._averages:
            state["running"] = self._running()
        if self.network.draws:
            state["seed"] = np.array(self._now.seed, np.int64)
        return state

    def restore(self, state: State) -> None:
        whole = complete(state, self.network, self.optimizer)
        parts = {name: self._parts(whole[name]) for name in ("parameters", *self.optimizer.slots)}
        self._steps, self._now.seed = int(whole["step"]), int(whole.get("seed", 0))
        self.pending.drop()
        if self._averages:
            self._set_running(whole["running"])
        self._updater = _updater(self.optimizer, self._tensors)
        keys = OPTIMIZERS[type(self.optimizer)][1]
        for i, tensor in enumerate(self._tensors):
            with torch.no_grad():
                tensor.copy_(parts["parameters"][i])
            slots = {keys[name]: parts[name][i] for name in self.optimizer.slots}
            self._updater.state[tensor] = {"step": torch.tensor(float(self._steps)), **slots}

    def close(self) -> None:
        """Nothing to give back: PyTorch's threads are the process's."""

    def _backward(self, handle: Any, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Leave the mean gradient of one batch in the tensors; return its summed loss and its hits."""
        images, labels = handle[0][indices], handle[1][indices]
        self._modules.train()
        self._now.step, self._now.images = self._steps + 1, indices
        scores = self._modules(_channels_first(images))
        self._updater.zero_grad()
        hits = scores.detach().argmax(1) == labels
        weights, each = self.loss.class_weights, "none" if self.loss.class_weights else "mean"
        match self.loss.name:
            case "softmax_cross_entropy":
                smoothing = self.loss.label_smoothing
                mean = functional.cross_entropy(scores, labels, label_smoothing=smoothing, reduction=each)
            case "binary_cross_entropy":
                mean = _BinaryCrossEntropy.apply(scores[:, 0], labels.to(scores.dtype))
                hits = (scores.detach()[:, 0] >= 0.5) == (labels == 1)
            case "mean_squared_error":
                targets = functional.one_hot(labels, scores.shape[1]).to(scores.dtype)
                mean = functional.mse_loss(scores, targets, reduction=each)
            case _:
                assert_never(self.loss.name)
        if weights:
            mean = mean.reshape(len(labels), -1).mean(1) * torch.tensor(weights)[labels]
        mean = mean.mean()
        mean.backward()
        return mean.detach() * len(indices), hits.sum()

    def _running(self) -> np.ndarray:
        return torch.cat(self._averages).numpy()

    def _set_running(self, running: np.ndarray) -> None:
        for average, part in zip(self._averages, self.network.running, strict=True):
            average.copy_(torch.tensor(part.view(running)))

    def _update(self, rate: float) -> None:
        self._steps += 1
        for group in self._updater.param_groups:
            group["lr"] = rate
        self._updater.step()

    def _flat(self, tensors: list[torch.Tensor]) -> np.ndarray:
        """Return tensors, in their order in PyTorch's shapes, as one flat buffer of ours."""
        flat = np.empty(self.network.parameter_count, np.float32)
        for parameter, tensor in zip(self.network.parameters, tensors, strict=True):
            parameter.view(flat)[...] = tensor.detach().permute(_axes(tensor.ndim, (2, 3, 1, 0))).numpy()
        return flat

    def _parts(self, flat: np.ndarray) -> list[torch.Tensor]:
        """Return copies of the parameters of a flat buffer, in PyTorch's shapes and memory formats."""
        parts = []
        for parameter, tensor in zip(self.network.parameters, self._tensors, strict=True):
            part = torch.tensor(parameter.view(np.ascontiguousarray(flat, np.float32)))
            parts.append(torch.empty_like(tensor.detach()).copy_(part.permute(_axes(part.ndim, (3, 2, 0, 1)))))
        return parts


def _axes(dimensions: int, of_convolution: tuple[int, ...]) -> tuple[int, ...]:
    """Return the order of axes between our layout and PyTorch's: (K,K,C,F) and (F,C,K,K), (D,O) and (O,D), (F,)."""
    return {4: of_convolution, 2: (1, 0), 1: (0,)}[dimensions]


def _channels_first(images: torch.Tensor) -> torch.Tensor:
    return images.permute(0, 3, 1, 2) if images.ndim == 4 else images


def _module(stage: Stage, tensors: list[nn.Parameter], averages: list[torch.Tensor], now: _Step) -> nn.Module:
    """Return the module of a stage, adding its parameters and running averages to the lists, in their order."""
    match stage:
        case net.ConvStage(layer=layer):
            like = {"groups": layer.groups, "dilation": layer.dilation, "bias": layer.bias}
            conv = nn.Conv2d(stage.input_shape[2], layer.filters, layer.kernel, layer.stride, **like)
            tensors += conv.parameters()
            return nn.Sequential(_Pad(stage.window, 0.0), conv)
        case net.PoolStage(layer=net.MaxPool2d()):
            return nn.Sequential(_Pad(stage.window, -torch.inf), nn.MaxPool2d(stage.window.size, stage.window.stride))
        case net.PoolStage(layer=net.GlobalAvgPool()):
            return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        case net.PoolStage():
            return _AvgPool(stage)
        case net.LinearStage(layer=layer):
            linear = nn.Linear(stage.input_shape[0], layer.features, layer.bias)
            tensors += linear.parameters()
            return linear
        case net.FlattenStage():
            return _Flatten()
        case net.ResidualStage():
            inner = [_module(inner, tensors, averages, now) for inner in stage.stages]
            return _Residual(nn.Sequential(*inner), stage)
        case net.DropoutStage():
            return _Dropout(stage, now)
        case net.NormStage(layer=layer):
            norm = _BatchNorm(stage.output_shape[2], layer.epsilon, layer.momentum)
            tensors += norm.parameters()
            averages += [norm.running_mean, norm.running_var]
            return norm
        case net.ElementwiseStage(layer=net.ReLU() | net.Sigmoid() | net.Tanh() | net.GELU()):
            return getattr(nn, type(stage.layer).__name__)()
        case net.ElementwiseStage(layer=net.LeakyReLU(slope)):
            return nn.LeakyReLU(slope)
        case net.ElementwiseStage():
            return _Rule(stage.layer)
        case net.StructuralStage():
            raise ConfigError(f"backend=torch: cannot differentiate layer {stage.name}, which is NumPy's")
        case _:
            assert_never(stage)


def _updater(optimizer: Optimizer, tensors: list[Any]) -> torch.optim.Optimizer:
    """Return PyTorch's optimizer of the same formulas."""
    if type(optimizer) not in OPTIMIZERS:
        raise ConfigError(f"backend=torch: has no optimizer like {type(optimizer).__name__}")
    made, _, extra = OPTIMIZERS[type(optimizer)]
    given = {**vars(optimizer), "betas": (getattr(optimizer, "beta1", 0.0), getattr(optimizer, "beta2", 0.0))}
    if not optimizer.decay_biases:
        tensors = [{"params": [tensor], "weight_decay": optimizer.of(tensor.shape).weight_decay} for tensor in tensors]
    return made(tensors, **{name: given[name] for name in ("lr", "weight_decay", *extra)})


@dataclass(frozen=True)
class Torch(ThreadedBackend):
    """PyTorch on the CPU."""

    name: ClassVar[str] = "torch"

    def compile(self, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int) -> TorchProgram:
        return TorchProgram(network, loss, optimizer, batch_size, self.thread_count)
