"""`torch`: the same network in PyTorch, eager, on the CPU: a peer to compare with (`pip install '.[torch]'`).

Operations, autograd and optimizers are PyTorch's own. Only the borders are ours: parameters come from and go to the
flat buffer, images are (N,C,H,W) views of channels-last memory, which PyTorch's convolutions take as they are.
"""

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, assert_never

import numpy as np

from cnnexp import network as net
from cnnexp.backends.layerwise import as_float32
from cnnexp.backends.peers.program import PeerProgram
from cnnexp.backends.processor import ThreadedBackend, using_threads
from cnnexp.backends.state import State
from cnnexp.errors import BackendUnavailable, ConfigError, installing
from cnnexp.network import Network, Stage, noise
from cnnexp.network.losses import LOG_FLOOR, VARIANCE_FLOOR, Loss
from cnnexp.optimizers import SGD, Adadelta, Adagrad, Adam, AdaMax, AdamW, Optimizer, RMSprop

try:
    import torch
    from torch import optim
    from torch.nn import functional
except ImportError as error:
    raise BackendUnavailable(f"backend=torch: PyTorch cannot be imported ({error}); {installing('torch')}") from error

# our optimizers -> PyTorch's of the same formulas, our names of its slots -> the keys of its state, what it is given
OPTIMIZERS: dict[type[Optimizer], tuple[type[optim.Optimizer], dict[str, str], tuple[str, ...]]] = {
    SGD: (optim.SGD, {"velocity": "momentum_buffer"}, ("momentum", "nesterov")),
    RMSprop: (optim.RMSprop, {"square": "square_avg", "velocity": "momentum_buffer"}, ("alpha", "eps", "momentum")),
    Adagrad: (optim.Adagrad, {"square_sum": "sum"}, ("lr_decay", "eps")),
    Adadelta: (optim.Adadelta, {"square": "square_avg", "update": "acc_delta"}, ("rho", "eps")),
    Adam: (optim.Adam, {"mean": "exp_avg", "square": "exp_avg_sq"}, ("betas", "eps")),
    AdamW: (optim.AdamW, {"mean": "exp_avg", "square": "exp_avg_sq"}, ("betas", "eps")),
    AdaMax: (optim.Adamax, {"mean": "exp_avg", "norm": "exp_inf"}, ("betas", "eps")),
}


class _Rule(torch.autograd.Function):
    """A user's elementwise layer, by its own derivative."""

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
OWN = {net.ReLU: torch.relu, net.Sigmoid: torch.sigmoid, net.Tanh: torch.tanh, net.GELU: functional.gelu}


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


class TorchProgram(PeerProgram):
    """A `Program` (see `protocol`) on PyTorch."""

    def make(self) -> None:
        for parameter in self.network.parameters:
            shape = [parameter.shape[axis] for axis in _axes(len(parameter.shape), (3, 2, 0, 1))]
            layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
            self.tensors["parameters"].append(torch.zeros(shape).to(memory_format=layout).requires_grad_())
        self._named = dict(zip((p.name for p in self.network.parameters), self.tensors["parameters"], strict=True))
        self.averages += [torch.zeros(average.shape) for average in self.network.running]
        self._averages = dict(zip((p.name for p in self.network.running), self.averages, strict=True))
        self._updater = _updater(self.optimizer, self.tensors["parameters"])
        for name in self.optimizer.slots:
            self.tensors[name] = [torch.zeros_like(one, requires_grad=False) for one in self.tensors["parameters"]]
        keys = [OPTIMIZERS[type(self.optimizer)][1][name] for name in self.optimizer.slots]
        for tensor, *slots in zip(*self.tensors.values(), strict=True):
            self._updater.state[tensor] = {"step": torch.tensor(0.0), **dict(zip(keys, slots, strict=True))}

    def load(self, images: np.ndarray, labels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(as_float32(images)), torch.tensor(labels.astype(np.int64))

    def step(self, handle: Any, indices: np.ndarray, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
        loss, hits, _ = self.differentiate(handle, indices)
        self._step(rate)
        return loss, hits

    def differentiate(
        self, handle: Any, indices: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
        """Leave the mean gradient of the batch in the parameters' tensors, too."""
        self.images = torch.from_numpy(indices)
        images, labels = (whole[self.images] for whole in handle)
        scores = self._forward(self.network.stages, _channels_first(images), True)
        self._updater.zero_grad()
        losses, hits = self._losses(scores, labels)
        mean = losses.mean()
        mean.backward()
        return mean.detach() * len(indices), hits.sum(), [tensor.grad for tensor in self.tensors["parameters"]]

    def _losses(self, scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses of the images, or their mean where all weigh alike; and which are right."""
        hits = scores.detach().argmax(1) == labels
        weights, each = self.loss.class_weights, "none" if self.loss.class_weights else "mean"
        match self.loss.name:
            case "softmax_cross_entropy":
                smoothing = self.loss.label_smoothing
                losses = functional.cross_entropy(scores, labels, label_smoothing=smoothing, reduction=each)
            case "binary_cross_entropy":
                losses = _BinaryCrossEntropy.apply(scores[:, 0], labels.to(scores.dtype))
                hits = (scores.detach()[:, 0] >= 0.5) == (labels == 1)
            case "mean_squared_error":
                targets = functional.one_hot(labels, scores.shape[1]).to(scores.dtype)
                losses = functional.mse_loss(scores, targets, reduction=each)
            case _:
                assert_never(self.loss.name)
        if weights:
            losses = losses.reshape(len(labels), -1).mean(1) * torch.tensor(weights)[labels]
        return losses, hits

    def update(self, parts: list[np.ndarray], rate: float) -> None:
        for tensor, part in zip(self.tensors["parameters"], parts, strict=True):
            tensor.grad = torch.empty_like(tensor, requires_grad=False)
            self.assign(tensor.grad, part)
        self._step(rate)

    def _step(self, rate: float) -> None:
        for group in self._updater.param_groups:
            group["lr"] = rate
        self._updater.step()

    def scores(self, images: torch.Tensor) -> np.ndarray:
        with torch.no_grad():
            return self._forward(self.network.stages, _channels_first(images), False).numpy()

    def restore(self, state: State) -> None:
        super().restore(state)
        for kept in self._updater.state.values():
            kept["step"].fill_(self.now - 1)

    def assign(self, tensor: torch.Tensor, array: np.ndarray) -> None:
        with torch.no_grad():
            tensor.copy_(torch.tensor(array).permute(_axes(array.ndim, (3, 2, 0, 1))))

    def array(self, tensor: torch.Tensor) -> np.ndarray:
        return tensor.detach().permute(_axes(tensor.ndim, (2, 3, 1, 0))).numpy()

    def _forward(self, stages: Sequence[Stage], x: torch.Tensor, trains: bool) -> torch.Tensor:
        """Return what the stages make of images (N,C,H,W), or points (N,D)."""
        for stage in stages:
            x = self._layer(stage, x, trains)
        return x

    def _layer(self, stage: Stage, x: torch.Tensor, trains: bool) -> torch.Tensor:
        w, b = (None if p is None else self._named[p.name] for p in (stage.weight, stage.bias))
        match stage:
            case net.ConvStage(layer=layer):
                x, (stride, dilation) = _pad(x, stage.window), (layer.stride, layer.dilation)
                return functional.conv2d(x, w, b, stride, dilation=dilation, groups=layer.groups)
            case net.PoolStage(layer=net.MaxPool2d(), window=window):
                return functional.max_pool2d(_pad(x, window, -torch.inf), window.size, window.stride)
            case net.PoolStage(layer=net.GlobalAvgPool()):
                return functional.adaptive_avg_pool2d(x, 1).flatten(1)
            case net.PoolStage(window=window):
                means = functional.avg_pool2d(_pad(x, window), window.size, window.stride)
                return means / _share(window, x.shape[2:]) if window.padded else means
            case net.LinearStage():
                return functional.linear(x, w, b)
            case net.FlattenStage():  # in row, column, channel order
                return (x.permute(0, 2, 3, 1) if x.ndim == 4 else x).flatten(1)
            case net.ResidualStage():
                return self._shortcut(stage, x) + self._forward(stage.stages, x, trains)
            case net.DropoutStage():
                return self._drop_out(stage, x) if trains else x
            case net.NormStage():
                return self._normalize(stage, x, trains)
            case net.ElementwiseStage(layer=net.LeakyReLU(slope)):
                return functional.leaky_relu(x, slope)
            case net.ElementwiseStage(layer=layer):
                return OWN[type(layer)](x) if type(layer) in OWN else _Rule.apply(x, layer)
            case net.StructuralStage():
                raise ConfigError(f"backend=torch: cannot differentiate layer {stage.name}, which is NumPy's")
            case _:
                assert_never(stage)

    def _shortcut(self, stage: net.ResidualStage, x: torch.Tensor) -> torch.Tensor:
        """Return what is added to f(x): of x every n-th pixel, and channels of zeros, where the shortcut is padded."""
        if stage.window is None:
            return x
        step, more = stage.window.stride, stage.output_shape[-1] - stage.input_shape[-1]
        return functional.pad(x[:, :, ::step, ::step], (0, 0, 0, 0, 0, more))

    def _drop_out(self, stage: net.DropoutStage, x: torch.Tensor) -> torch.Tensor:
        """As `noise.keeps` on tensors: which numbers are dropped is not PyTorch's to say."""
        rows = noise.mix(noise.layer_key(self.seed, self.now, stage.name) ^ self.images)
        draws = noise.mix(rows[:, None] ^ noise.mix(torch.arange(math.prod(stage.output_shape))))
        kept = _channels_first((draws >= noise.threshold(stage.layer.rate)).reshape(len(x), *stage.output_shape))
        return x * kept / (1 - stage.layer.rate)

    def _normalize(self, stage: net.NormStage, x: torch.Tensor, trains: bool) -> torch.Tensor:
        """Also one number per channel, which PyTorch refuses: its variance is 0, and no estimate of it unbiased."""
        w, b = self._named[stage.weight.name], self._named[stage.bias.name]
        mean, variance = (self._averages[average.name] for average in stage.running)
        momentum = stage.layer.momentum
        if not trains or x.numel() > x.shape[1]:
            return functional.batch_norm(x, mean, variance, w, b, trains, momentum, stage.layer.epsilon)
        with torch.no_grad():
            mean += momentum * (x.flatten() - mean)
            variance *= 1 - momentum
        return (x - x.detach()) * 0 * w[:, None, None] + b[:, None, None]


def _pad(x: torch.Tensor, window: net.Window, value: float = 0.0) -> torch.Tensor:
    """Put `value` around images (N,C,H,W), as far as windows reach."""
    top, left, bottom, right = window.pads
    return functional.pad(x, (left, right, top, bottom), value=value) if window.padded else x


@cache
def _share(window: net.Window, size: torch.Size) -> torch.Tensor:
    """Return which share of each window lies inside an image of so many rows and columns."""
    return functional.avg_pool2d(_pad(torch.ones(1, 1, *size), window), window.size, window.stride)


def _axes(dimensions: int, of_convolution: tuple[int, ...]) -> tuple[int, ...]:
    """Return the order of axes between our layout and PyTorch's: (K,K,C,F) and (F,C,K,K), (D,O) and (O,D), (F,)."""
    return {4: of_convolution, 2: (1, 0), 1: (0,)}[dimensions]


def _channels_first(images: torch.Tensor) -> torch.Tensor:
    return images.permute(0, 3, 1, 2) if images.ndim == 4 else images


def _updater(optimizer: Optimizer, tensors: list[Any]) -> optim.Optimizer:
    if type(optimizer) not in OPTIMIZERS:
        raise ConfigError(f"backend=torch: has no optimizer like {type(optimizer).__name__}")
    made, _, extra = OPTIMIZERS[type(optimizer)]
    given = {**vars(optimizer), "betas": (getattr(optimizer, "beta1", 0.0), getattr(optimizer, "beta2", 0.0))}
    if not optimizer.decay_biases:
        tensors = [{"params": [tensor], "weight_decay": optimizer.of(tensor.shape).weight_decay} for tensor in tensors]
    return made(tensors, **{name: given[name] for name in ("lr", "weight_decay", *extra)})


class Torch(ThreadedBackend):
    """PyTorch on the CPU."""

    name = "torch"

    def compile(self, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int) -> TorchProgram:
        threads = partial(using_threads, self.thread_count, torch.get_num_threads, torch.set_num_threads)
        return TorchProgram(network, loss, optimizer, batch_size, threads)
