"""A value that records the arithmetic done to it: a rule on scalars, run once on such values, is written down by it."""

from __future__ import annotations

from typing import Self

import numpy as np


class Recorded:
    """Base: it turns `+ - * /` and comparisons into operations by name, on itself and on numbers."""

    __array_ufunc__ = None  # so that numpy.float32 * Recorded comes to Recorded

    def apply(self, operation: str, *values: Self | np.float32) -> Self:
        """Return an operation's outcome: `add sub mul div`, `neg` (of one value), `< <= > >=`."""
        raise NotImplementedError

    def __add__(self, other: Self | np.float32) -> Self:
        return self.apply("add", self, other)

    def __sub__(self, other: Self | np.float32) -> Self:
        return self.apply("sub", self, other)

    def __mul__(self, other: Self | np.float32) -> Self:
        return self.apply("mul", self, other)

    def __truediv__(self, other: Self | np.float32) -> Self:
        return self.apply("div", self, other)

    def __radd__(self, other: np.float32) -> Self:
        return self.apply("add", other, self)

    def __rsub__(self, other: np.float32) -> Self:
        return self.apply("sub", other, self)

    def __rmul__(self, other: np.float32) -> Self:
        return self.apply("mul", other, self)

    def __rtruediv__(self, other: np.float32) -> Self:
        return self.apply("div", other, self)

    def __neg__(self) -> Self:
        return self.apply("neg", self)

    def __lt__(self, other: Self | np.float32) -> Self:
        return self.apply("<", self, other)

    def __le__(self, other: Self | np.float32) -> Self:
        return self.apply("<=", self, other)

    def __gt__(self, other: Self | np.float32) -> Self:
        return self.apply(">", self, other)

    def __ge__(self, other: Self | np.float32) -> Self:
        return self.apply(">=", self, other)
