"""Learning-rate schedules: the rate of an epoch, from the optimizer's `lr` and the epoch alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from cnnexp.system.ranges import check_range


class Schedule(Protocol):
    """Maps an epoch to a learning rate."""

    def __call__(self, lr: float, epoch: int, epochs: int) -> float:
        """Return the rate of `epoch` (1 .. epochs), given the rate `lr` to start from."""


@dataclass(frozen=True)
class Constant:
    """The same rate throughout."""

    def __call__(self, lr: float, epoch: int, epochs: int) -> float:
        return lr


@dataclass(frozen=True)
class Step:
    """Multiply the rate by `factor` after every `every` epochs."""

    every: int = 10
    factor: float = 0.1

    def __post_init__(self) -> None:
        check_range("trainer.step_every", self.every, ">= 1")
        check_range("trainer.step_factor", self.factor, "> 0, <= 1")

    def __call__(self, lr: float, epoch: int, epochs: int) -> float:
        return lr * self.factor ** ((epoch - 1) // self.every)


@dataclass(frozen=True)
class Cosine:
    """Fall from `lr` in the first epoch along half a cosine, towards 0 after the last (Loshchilov and Hutter 2017)."""

    def __call__(self, lr: float, epoch: int, epochs: int) -> float:
        return lr * 0.5 * (1 + math.cos(math.pi * (epoch - 1) / epochs))
