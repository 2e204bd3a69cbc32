"""Optimizers: each is one rule on scalars, applied to every element of the flat parameter buffer.

A rule takes a parameter `w`, its gradient `g`, two slots of state `s` and `t` (unused ones pass through), the learning
rate and two constants of the step, and returns the new `(w, s, t)`. It is written with `+ - * /`, `sqrt` and
`maximum` alone, so the same source runs on NumPy arrays, is compiled by Numba for one CPU element at a time, and is
compiled for the GPU. All numbers in it are float32: one float64 literal would make a GPU compute in double.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import numpy as np

from cnnexp.errors import ConfigError
from cnnexp.system.ranges import check_range
from cnnexp.system.registry import Registry

Rule = Callable
Scalar = Any
"""A number, an array of them, or a vector in the making: what a rule computes with."""
Scalars = tuple[Scalar, Scalar, Scalar]
f32 = np.float32


@dataclass(frozen=True)
class Optimizer:
    """Base of the optimizers; `conf/optimizer/<name>.yaml` explains the fields of each."""

    lr: float = 0.01
    weight_decay: float = 0.0
    decay_biases: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        for key in fields(self):
            if key.name in _RANGES:  # a plugin's own fields have none here
                check_range(f"optimizer.{key.name}", getattr(self, key.name), _RANGES[key.name])

    def of(self, shape: tuple[int, ...]) -> Self:
        """Return the optimizer of a parameter of that shape: this one, or without weight decay where that spares it."""
        return self if self.decay_biases or len(shape) > 1 else replace(self, weight_decay=0.0)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state buffers, at most two; each starts at zero."""
        return ()

    def constants(self, step: Scalar) -> tuple[Scalar, Scalar]:
        """Return what depends on the step (1 for the first) alone, computed in float64; of many steps, arrays."""
        return f32(0), f32(0)

    def rule(self, sqrt: Callable = np.sqrt, maximum: Callable = np.maximum) -> Rule:
        """Return `rule(w, g, s, t, rate, c0, c1) -> (w, s, t)` on the given sqrt and maximum."""
        raise NotImplementedError

    def apply(self, w: np.ndarray, g: np.ndarray, slots: Sequence[np.ndarray], rate: float, step: int) -> None:
        """Update NumPy arrays `w` and `slots` in place: the rule, elementwise."""
        s, t = (*slots, f32(0), f32(0))[:2]
        new = self.rule()(w, g, s, t, f32(rate), *self.constants(step))
        for old, value in zip((w, *slots), new, strict=False):
            old[...] = value


_RANGES = {"lr": "> 0", "eps": "> 0", "weight_decay": ">= 0", "lr_decay": ">= 0"}
_RANGES |= dict.fromkeys(("momentum", "beta1", "beta2", "alpha", "rho"), ">= 0 and < 1")


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum (Polyak 1964) or Nesterov's, in PyTorch's form.

    v = momentum * v + g; w -= rate * v, or with Nesterov w -= rate * (g + momentum * v).
    """

    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise ConfigError("optimizer.nesterov=true: needs optimizer.momentum > 0")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("velocity",) if self.momentum else ()

    def rule(self, sqrt: Callable = np.sqrt, maximum: Callable = np.maximum) -> Rule:
        momentum, decay = f32(self.momentum), f32(self.weight_decay)
        has_momentum, nesterov = self.momentum != 0, self.nesterov

        def sgd(w: Scalar, g: Scalar, s: Scalar, t: Scalar, rate: Scalar, c0: Scalar, c1: Scalar) -> Scalars:
            g = g + decay * w
            if has_momentum:
                s = momentum * s + g
                g = g + momentum * s if nesterov else s
            return w - rate * g, s, t

        return sgd


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """Divide by a running root mean square (Hinton, lecture 6e): v = alpha v + (1 - alpha) g^2."""

    lr: float = 1e-3
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0

    @property
    def slots(self) -> tuple[str, ...]:
        return ("square", "velocity") if self.momentum else ("square",)

    def rule(self, sqrt: Callable = np.sqrt, maximum: Callable = np.maximum) -> Rule:
        alpha, rest, eps = f32(self.alpha), f32(1 - self.alpha), f32(self.eps)
        momentum, decay, has_momentum = f32(self.momentum), f32(self.weight_decay), self.momentum != 0

        def rmsprop(w: Scalar, g: Scalar, s: Scalar, t: Scalar, rate: Scalar, c0: Scalar, c1: Scalar) -> Scalars:
            g = g + decay * w
            s = alpha * s + rest * g * g
            step = g / (sqrt(s) + eps)
            if has_momentum:
                step = t = momentum * t + step
            return w - rate * step, s, t

        return rmsprop


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Divide by the root of the sum of squares (Duchi et al. 2011); the rate falls by 1 / (1 + (step - 1) lr_decay)."""

    lr_decay: float = 0.0
    eps: float = 1e-10
    slots: ClassVar[tuple[str, ...]] = ("square_sum",)

    def constants(self, step: Scalar) -> tuple[Scalar, Scalar]:
        return f32(1 / (1 + (step - 1) * self.lr_decay)), f32(0)

    def rule(self, sqrt: Callable = np.sqrt, maximum: Callable = np.maximum) -> Rule:
        eps, decay = f32(self.eps), f32(self.weight_decay)

        def adagrad(w: Scalar, g: Scalar, s: Scalar, t: Scalar, rate: Scalar, c0: Scalar, c1: Scalar) -> Scalars:
            g = g + decay * w
            s = s + g * g
            return w - rate * c0 * g / (sqrt(s) + eps), s, t

        return adagrad


@dataclass(frozen=True)
class Adadelta(Optimizer):
    """Scale by the ratio of running root mean squares of updates and gradients (Zeiler 2012, algorithm 1)."""

    lr: float = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    slots: ClassVar[tuple[str, ...]] = ("square", "update")

    def rule(self, sqrt: Callable = np.sqrt, maximum: Callable = np.maximum) -> Rule:
        rho, rest, eps, decay = f32(self.rho), f32(1 - self.rho), f32(self.eps), f32(self.weight_decay)

        def adadelta(w: Scalar, g: Scalar, s: Scalar, t: Scalar, rate: Scalar, c0: Scalar, c1: Scalar) -> Scalars:
            g = g + decay * w
            s = rho * s + rest * g * g
            step = sqrt(t + eps) / sqrt(s + eps) * g
            t = rho * t + rest * step * step
            return w - rate * step, s, t

        return adadelta


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adaptive moments with bias correction (Kingma and Ba 2015, algorithm 1)."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decoupled: ClassVar[bool] = False
    slots: ClassVar[tuple[str, ...]] = ("mean", "square")

    def constants(self, step: Scalar) -> tuple[Scalar, Scalar]:
        return f32(1 / (1 - self.beta1**step)), f32(1 / np.sqrt(1 - self.beta2**step))

    def rule(self, sqrt: Callable = np.sqrt, maximum: Callable = np.maximum) -> Rule:
        beta1, rest1, beta2, rest2 = f32(self.beta1), f32(1 - self.beta1), f32(self.beta2), f32(1 - self.beta2)
        eps, decay, decoupled = f32(self.eps), f32(self.weight_decay), self.decoupled

        def adam(w: Scalar, g: Scalar, s: Scalar, t: Scalar, rate: Scalar, c0: Scalar, c1: Scalar) -> Scalars:
            if decoupled:
                w = w - rate * decay * w
            else:
                g = g + decay * w
            s = beta1 * s + rest1 * g
            t = beta2 * t + rest2 * g * g
            return w - rate * (s * c0) / (sqrt(t) * c1 + eps), s, t

        return adam


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2)."""

    weight_decay: float = 0.01
    decoupled: ClassVar[bool] = True


@dataclass(frozen=True)
class AdaMax(Adam):
    """Adam on the infinity norm (Kingma and Ba 2015, algorithm 2)."""

    lr: float = 2e-3
    slots: ClassVar[tuple[str, ...]] = ("mean", "norm")

    def rule(self, sqrt: Callable = np.sqrt, maximum: Callable = np.maximum) -> Rule:
        beta1, rest1, beta2 = f32(self.beta1), f32(1 - self.beta1), f32(self.beta2)
        eps, decay = f32(self.eps), f32(self.weight_decay)

        def adamax(w: Scalar, g: Scalar, s: Scalar, t: Scalar, rate: Scalar, c0: Scalar, c1: Scalar) -> Scalars:
            g = g + decay * w
            s = beta1 * s + rest1 * g
            t = maximum(beta2 * t, maximum(g, -g) + eps)
            return w - rate * c0 * s / t, s, t

        return adamax


_KINDS: tuple[type[Optimizer], ...] = (SGD, RMSprop, Adagrad, Adadelta, Adam, AdamW, AdaMax)
OPTIMIZERS: Registry[Optimizer] = Registry("optimizer", {cls.__name__.lower(): cls for cls in _KINDS})
