"""Steps that are put together from the two halves of a program's: accumulated, clipped, their parameters averaged."""

import math
from typing import Any

import numpy as np

from cnnexp.backends.protocol import Program, Rate, State, rate_of_steps
from cnnexp.backends.state import AVERAGES
from cnnexp.network.losses import Totals


class Steps:
    """A `Program` (see `backends.protocol`) around another one, on any backend and for any workers.

    Clipping and accumulation take `gradients` and `apply` for a step, where the program's own `train` may be one piece
    of compiled code. The average of step n moves by 1 - min(ema, (1 + n) / (10 + n)), as TensorFlow's does, so that it
    soon forgets the initial parameters; where layers keep running averages it takes these, too. `predict` shows what
    the average predicts. BatchNorm2d sees each batch alone, and its running averages move by the last one of a step.

    Args:
        program: whose batches become steps.
        clip_norm: the largest norm of a gradient over all parameters (Pascanu et al. 2013); None leaves it as it is.
        accumulate: batches to a step; `batch_size` is so many times the program's.
        ema: decay of the average, None for none.
    """

    def __init__(
        self, program: Program, clip_norm: float | None = None, accumulate: int = 1, ema: float | None = None
    ) -> None:
        self._program, self._clip_norm, self._ema = program, clip_norm, ema
        self._in_halves = clip_norm is not None or accumulate > 1
        self.batch_size = accumulate * program.batch_size
        self._average: State = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def warm(self, handle: Any, indices: np.ndarray) -> None:
        self._program.warm(handle, indices[: self._program.batch_size])

    def train(self, handle: Any, order: np.ndarray, rate: Rate) -> Totals:
        totals = Totals(0.0, 0, 0)
        for step, step_rate in enumerate(rate_of_steps(rate, len(order), self.batch_size)):
            batch = order[step * self.batch_size : (step + 1) * self.batch_size]
            if self._in_halves:
                found, gradient = self.gradients(handle, batch)
                # no BLAS: its threads would compete with the program's, at many times the time of the sum
                norm = math.sqrt(np.square(gradient, dtype=np.float64).sum())
                if self._clip_norm is not None and norm > self._clip_norm:
                    gradient = gradient * np.float32(self._clip_norm / norm)
                self._program.apply(gradient, float(step_rate))
            else:
                found = self._program.train(handle, batch, float(step_rate))
            totals += found
            if self._ema is not None:
                state = self._program.state()
                taken = int(state["step"])
                share = np.float32(1 - min(self._ema, (1 + taken) / (10 + taken)))
                for name, average in self._average.items():
                    average += share * (state[name] - average)
        return totals

    def gradients(self, handle: Any, indices: np.ndarray) -> tuple[Totals, np.ndarray]:
        size, totals = self._program.batch_size, Totals(0.0, 0, 0)
        if len(indices) <= size:
            return self._program.gradients(handle, indices)
        mean: np.ndarray = np.zeros(self._program.network.parameter_count, np.float32)
        for start in range(0, len(indices), size):
            part = indices[start : start + size]
            found, gradient = self._program.gradients(handle, part)
            totals, mean = totals + found, mean + np.float32(len(part) / len(indices)) * gradient
        return totals, mean

    def predict(self, handle: Any) -> np.ndarray:
        if not self._average:
            return self._program.predict(handle)
        trained = self._program.state()
        self._program.restore({**trained, **self._average})
        scores = self._program.predict(handle)
        self._program.restore(trained)
        return scores

    def state(self) -> State:
        return {**self._program.state(), **{AVERAGES[name]: array.copy() for name, array in self._average.items()}}

    def restore(self, state: State) -> None:
        self._program.restore({name: array for name, array in state.items() if name not in AVERAGES.values()})
        if self._ema is not None:
            whole = self._program.state()
            self._average = {n: np.array(state.get(average, whole[n])) for n, average in AVERAGES.items() if n in whole}
