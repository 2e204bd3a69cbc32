"""Learning-rate schedules: the rate of every step, from the optimizer's `lr` and the step's place alone."""

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from cnnexp.system.ranges import check_fields, check_range, ranged

ScheduleName = Literal["constant", "step", "milestones", "cosine", "polynomial", "one_cycle"]
START, END = 25, 1e4  # one_cycle begins with lr / START and ends with lr / START / END, as PyTorch's OneCycleLR


@dataclass(frozen=True)
class Schedule:
    """What multiplies the optimizer's `lr`: a function of `FACTORS`, after a linear warm-up.

    Attributes:
        name: `constant`; `step`: by `factor` after every `every` epochs; `milestones`: by `factor` after each epoch of
            `milestones`; `cosine`: by epoch, along half a cosine towards 0 (Loshchilov and Hutter 2017); `polynomial`:
            by step, (1 - the share of the steps done) to the `power`; `one_cycle`: by step, up to `lr` at the share
            `peak` of all steps and down again, along cosines (Smith and Topin 2018), its momentum left as it is.
        warmup: epochs, or a part of one, whose steps multiply the rate by 1/W, 2/W .. 1, W being their number.
    """

    name: ScheduleName = "cosine"
    every: int = ranged(10, ">= 1", "step_every")
    factor: float = ranged(0.1, "> 0, <= 1", "step_factor")
    milestones: tuple[int, ...] = ()
    power: float = ranged(1.0, "> 0")
    peak: float = ranged(0.3, "> 0 and < 1")
    warmup: float = ranged(0.0, ">= 0")

    def __post_init__(self) -> None:
        check_fields(self, "trainer")
        for epoch in self.milestones:
            check_range("trainer.milestones", epoch, ">= 1")

    def rates(self, lr: float, epoch: int, epochs: int, steps: int) -> np.ndarray:
        """Return the rates (steps,), float64, of the steps of `epoch` (1 .. epochs), each epoch having `steps`."""
        factor, first = FACTORS[self.name][0], (epoch - 1) * steps
        rising = max(1, round(self.warmup * steps))
        rates = [lr * factor(self, epoch - 1, epochs, step, epochs * steps) for step in range(first, first + steps)]
        return np.array(rates) * np.minimum(1.0, np.arange(first + 1, first + steps + 1) / rising)

    def plain(self) -> dict[str, Any]:
        """Return what decides the rates, as plain values by name: no key that the schedule does not look at."""
        used = {key: asdict(self)[key] for key in FACTORS[self.name][1]}
        return {"type": self.name.title().replace("_", ""), **used, **({"warmup": self.warmup} if self.warmup else {})}


def _one_cycle(schedule: Schedule, done: int, epochs: int, step: int, steps: int) -> float:
    top, last, low = schedule.peak * steps - 1, steps - 1, 1 / START
    if step <= top:
        start, end, share = low, 1.0, step / top if top else 1.0
    else:
        start, end, share = 1.0, low / END, (step - top) / (last - top)
    return end + (start - end) / 2 * (1 + math.cos(math.pi * share))


# name -> (the factor of a step, given the epochs done, of how many, the steps done, of how many; the keys it looks at)
FACTORS: dict[ScheduleName, tuple[Callable[[Schedule, int, int, int, int], float], tuple[str, ...]]] = {
    "constant": (lambda *_: 1.0, ()),
    "step": (lambda s, done, *_: s.factor ** (done // s.every), ("every", "factor")),
    "milestones": (lambda s, done, *_: s.factor ** sum(done >= at for at in s.milestones), ("milestones", "factor")),
    "cosine": (lambda s, done, epochs, *_: 0.5 * (1 + math.cos(math.pi * done / epochs)), ()),
    "polynomial": (lambda s, done, epochs, step, steps: (1 - step / steps) ** s.power, ("power",)),
    "one_cycle": (_one_cycle, ("peak",)),
}
Constant, Step, Cosine = (functools.partial(Schedule, name) for name in ("constant", "step", "cosine"))
