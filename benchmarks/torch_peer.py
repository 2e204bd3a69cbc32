"""PyTorch as a contestant: eager, channels_last, or compiled."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable

import numpy as np
import torch
from torch import nn

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


class Torch:
    """`nn.Sequential`, cross-entropy and a fused optimizer.

    Args:
        channels_last: keep images, weights and activations channels-last.
        compiled: pass model and loss through `torch.compile`.
    """

    def __init__(
        self, case: Case, data: Data, threads: int, channels_last: bool = False, compiled: bool = False
    ) -> None:
        torch.set_num_threads(threads)
        if torch.get_num_interop_threads() != 1:
            torch.set_num_interop_threads(1)
        warnings.filterwarnings("ignore", message="Using padding='same'")  # what the network asks for
        self.batch_size, self._network, self._first = case.batch_size, case.network, data.parameters
        self._channels_last = channels_last
        self._case = case
        self._model = nn.Sequential(*modules(case.network.stages, channels_last))
        images = torch.from_numpy(data.images).permute(0, 1, 4, 2, 3)  # NHWC to NCHW
        layout = torch.channels_last if channels_last else torch.contiguous_format
        self._images = [batch.contiguous(memory_format=layout) for batch in images]
        self._labels = list(torch.from_numpy(data.labels).long())
        if channels_last:
            self._model = self._model.to(memory_format=torch.channels_last)
        self._loss = _Loss(self._model)
        self.reset()
        started = time.perf_counter()
        if compiled:
            self._loss = torch.compile(self._loss, dynamic=False)
            self.train(1)
        self.compile_s = time.perf_counter() - started if compiled else 0.0
        self.facts = {"torch": torch.__version__, "threads": torch.get_num_threads()}

    def reset(self) -> None:
        with torch.no_grad():
            for name, p in self._named():
                p.copy_(torch.from_numpy(self._to_torch(name, self._view(name, self._first))))
        parameters = self._model.parameters()
        optimizer = self._case.optimizer
        if type(optimizer) is SGD:
            self._optimizer = torch.optim.SGD(parameters, optimizer.lr, fused=True)
        else:
            betas = (optimizer.beta1, optimizer.beta2)
            self._optimizer = torch.optim.Adam(parameters, optimizer.lr, betas, optimizer.eps, fused=True)

    def train(self, steps: int) -> None:
        for step in range(steps):
            batch = step % len(self._images)
            self._optimizer.zero_grad(set_to_none=True)
            self._loss(self._images[batch], self._labels[batch]).backward()
            self._optimizer.step()

    def gradient(self) -> tuple[float, np.ndarray]:
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss(self._images[0], self._labels[0])
        loss.backward()
        return loss.item(), self._flat(lambda p: p.grad)

    def parameters(self) -> np.ndarray:
        return self._flat(lambda p: p.detach())

    def draw(self, on: bool) -> bool:
        for module in self._model.modules():
            if isinstance(module, nn.Dropout):
                module.train(on)
        return False

    def predictor(self, running: np.ndarray) -> nn.Module:
        """Return the model in `eval` mode, its BatchNorm2ds with these running averages, flat as ours."""
        norms = (module for module in self._model.modules() if isinstance(module, nn.BatchNorm2d))
        averages = [tensor for norm in norms for tensor in (norm.running_mean, norm.running_var)]
        for average, tensor in zip(self._network.running, averages, strict=True):
            tensor.copy_(torch.from_numpy(average.view(running)))
        return self._model.eval()

    def _flat(self, tensor_of) -> np.ndarray:
        flat = np.empty_like(self._first)
        for name, p in self._named():
            self._view(name, flat)[...] = self._from_torch(name, tensor_of(p).numpy())
        return flat

    def _named(self):
        """Yield (the name in `Network.parameters`, the tensor)."""
        return zip((p.name for p in self._network.parameters), self._model.parameters(), strict=True)

    def _view(self, name: str, flat: np.ndarray) -> np.ndarray:
        return next(p for p in self._network.parameters if p.name == name).view(flat)

    def _to_torch(self, name: str, array: np.ndarray) -> np.ndarray:
        if array.ndim == 4:  # (K, K, C, F) to (F, C, K, K)
            return np.ascontiguousarray(array.transpose(3, 2, 0, 1))
        if name == self._after_flatten and not self._channels_last:
            h, w, c = self._flattened
            return np.ascontiguousarray(array.reshape(h, w, c, -1).transpose(3, 2, 0, 1).reshape(array.shape[::-1]))
        return np.ascontiguousarray(array.T)

    def _from_torch(self, name: str, array: np.ndarray) -> np.ndarray:
        if array.ndim == 4:
            return array.transpose(2, 3, 1, 0)
        if name == self._after_flatten and not self._channels_last:
            h, w, c = self._flattened
            return array.reshape(-1, c, h, w).transpose(2, 3, 1, 0).reshape(array.shape[::-1])
        return array.T

    @property
    def _after_flatten(self) -> str | None:
        """Return the name of the weight whose rows follow the flattened image's order, None where there is no such."""
        stages = iter(self._network.stages)
        any(isinstance(stage.layer, Flatten) for stage in stages)
        return next((stage.weight.name for stage in stages if isinstance(stage.layer, Linear)), None)

    @property
    def _flattened(self) -> tuple[int, int, int]:
        return next(stage.input_shape for stage in self._network.stages if isinstance(stage.layer, Flatten))


class _Loss(nn.Module):
    """The mean cross-entropy of a model's scores."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self._model(images), labels)


class _FlattenChannelsLast(nn.Module):
    """Flatten a channels-last tensor in the order of its memory, so nothing is copied."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 3, 1).flatten(1)


class _Residual(nn.Module):
    def __init__(self, stage: Stage, *inner: nn.Module) -> None:
        super().__init__()
        self._inner, self._step = nn.Sequential(*inner), stage.window.stride if stage.window else 0
        self._more = stage.output_shape[2] - stage.input_shape[2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        past = x
        if self._step:
            past = nn.functional.pad(x[:, :, :: self._step, :: self._step], (0, 0, 0, 0, 0, self._more))
        return past + self._inner(x)


def modules(stages: Iterable[Stage], channels_last: bool) -> list[nn.Module]:
    """Return stages as PyTorch's modules; `channels_last` says in which order of memory a Flatten goes on."""
    layers: list[nn.Module] = []
    for stage in stages:
        match stage.layer:
            case Conv2d(filters, kernel, stride, padding, bias, groups):
                padding = pixels(padding)
                if padding == "same" and stride > 1:  # one side has a row more than the other
                    top, left, bottom, right = stage.window.pads
                    layers.append(nn.ZeroPad2d((left, right, top, bottom)))
                    padding = 0
                layers.append(nn.Conv2d(stage.input_shape[2], filters, kernel, stride, padding, 1, groups, bias))
            case BatchNorm2d(momentum, epsilon):
                layers.append(nn.BatchNorm2d(stage.input_shape[2], epsilon, momentum))
            case ReLU():
                layers.append(nn.ReLU(inplace=True))
            case Tanh():
                layers.append(nn.Tanh())
            case GELU():
                layers.append(nn.GELU())
            case Dropout(rate):
                layers.append(nn.Dropout(rate))
            case MaxPool2d(pool, None, "valid"):
                layers.append(nn.MaxPool2d(pool))
            case AvgPool2d(pool, None, "valid"):
                layers.append(nn.AvgPool2d(pool))
            case GlobalAvgPool():
                layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
            case Flatten():
                layers.append(_FlattenChannelsLast() if channels_last else nn.Flatten())
            case Linear(features, bias):
                layers.append(nn.Linear(stage.input_shape[0], features, bias))
            case Residual():
                layers.append(_Residual(stage, *modules(stage.stages, channels_last)))
            case layer:
                raise ValueError(f"no benchmark case uses {layer}")
    return layers
