"""Elementwise layers: each is one rule on scalars and its derivative, compiled for every target as optimizers are.

A rule is written with `+ - * /`, comparisons and the functions of `Maths` alone, so that the same source runs on Python
numbers and NumPy arrays, is compiled by Numba for CPU and GPU, and is traced into vector instructions. All numbers in
it are float32: one float64 literal would make a GPU compute in double.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cnnexp.errors import NetworkError
from cnnexp.system.ranges import FLOAT32, in_float32

f32 = np.float32
Scalar = Any
"""A number, an array of them, or a vector in the making: what a rule computes with."""
Rule = Callable[[Scalar], Scalar]
Derivative = Callable[[Scalar, Scalar], Scalar]
ZERO, HALF, ONE = f32(0), f32(0.5), f32(1)


class Maths(NamedTuple):
    """What a rule may call, in the form that a target compiles or runs."""

    exp: Callable
    tanh: Callable
    erf: Callable
    maximum: Callable  # `maximum(a, b)`, b where a < b, else a: a NaN in a stays
    where: Callable  # `where(condition, a, b)`, a where the condition holds, else b; both are computed


@dataclass(frozen=True)
class Elementwise:
    """Base of the layers y = f(x), number by number.

    A rule first binds what it needs of `maths` and its fields, as float32, to local names: compiled code sees no more.

    Attributes:
        surrogate: whether the derivative is meant to be another function than that of the rule, as the gradient that
            goes straight through a step (Bengio et al. 2013); a derivative that is not is refused.
    """

    surrogate: ClassVar[bool] = False

    def rule(self, maths: Maths) -> Rule:
        """Return f: x -> y."""
        raise NotImplementedError

    def derivative(self, maths: Maths) -> Derivative:
        """Return (x, y) -> dy/dx."""
        raise NotImplementedError


@dataclass(frozen=True)
class ReLU(Elementwise):
    """max(x, 0); a NaN stays one."""

    def rule(self, maths: Maths) -> Rule:
        maximum = maths.maximum
        return lambda x: maximum(x, ZERO)

    def derivative(self, maths: Maths) -> Derivative:
        where = maths.where
        return lambda x, y: where(y > ZERO, ONE, ZERO)


@dataclass(frozen=True)
class LeakyReLU(Elementwise):
    """x where x > 0, else slope * x (Maas et al. 2013); the slope is a finite number of float32."""

    slope: float = 0.01

    def __post_init__(self) -> None:
        if not isinstance(self.slope, int | float) or isinstance(self.slope, bool) or not in_float32(self.slope):
            raise NetworkError(f"LeakyReLU: slope={self.slope!r}; must be {FLOAT32}")

    def rule(self, maths: Maths) -> Rule:
        where, slope = maths.where, f32(self.slope)
        return lambda x: where(x > ZERO, x, slope * x)

    def derivative(self, maths: Maths) -> Derivative:
        where, slope = maths.where, f32(self.slope)
        return lambda x, y: where(x > ZERO, ONE, slope)


@dataclass(frozen=True)
class Sigmoid(Elementwise):
    """1 / (1 + exp(-x)), almost rounded right: the binary loss divides by 1 - y."""

    def rule(self, maths: Maths) -> Rule:
        exp, maximum, where = maths.exp, maths.maximum, maths.where

        def sigmoid(x: Scalar) -> Scalar:
            e = exp(-maximum(x, -x))  # of a negative number only, so it cannot overflow
            small = e / (ONE + e)
            return where(x > ZERO, ONE - small, small)

        return sigmoid

    def derivative(self, maths: Maths) -> Derivative:
        return lambda x, y: y * (ONE - y)


@dataclass(frozen=True)
class Tanh(Elementwise):
    """The hyperbolic tangent."""

    def rule(self, maths: Maths) -> Rule:
        tanh = maths.tanh
        return lambda x: tanh(x)

    def derivative(self, maths: Maths) -> Derivative:
        return lambda x, y: ONE - y * y


@dataclass(frozen=True)
class GELU(Elementwise):
    """x times the normal distribution's share below x: x * (1 + erf(x / sqrt 2)) / 2 (Hendrycks and Gimpel 2016)."""

    def rule(self, maths: Maths) -> Rule:
        erf, root = maths.erf, f32(math.sqrt(0.5))
        return lambda x: x * (HALF + HALF * erf(x * root))

    def derivative(self, maths: Maths) -> Derivative:
        exp, where, density, least = maths.exp, maths.where, f32(1 / math.sqrt(2 * math.pi)), f32(1e-30)

        def derivative(x: Scalar, y: Scalar) -> Scalar:
            # the share is y / x, and 1/2 where x is so small that nothing is left of the quotient's digits
            share = where(x * x > least, y / where(x * x > least, x, ONE), HALF)
            return share + x * density * exp(-HALF * x * x)

        return derivative


KINDS = (ReLU, LeakyReLU, Sigmoid, Tanh, GELU)


def rational_erf(maximum: Callable) -> Rule:
    """Return erf for a target that has only arithmetic: x P(x^2) / Q(x^2) on [-4, 4], beyond which it is 1 in float32.

    The coefficients are Eigen's (`generic_fast_erf_float`); within 4e-7 of the true value.
    """
    p = [f32(c) for c in (
        -2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
        -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02,
    )]  # fmt: skip
    q = [f32(c) for c in (
        -1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03,
        -1.42647390514189e-02,
    )]  # fmt: skip
    return _odd_rational(p, q, f32(4), maximum)


def rational_tanh(maximum: Callable) -> Rule:
    """Return tanh for a target that has only arithmetic, as `rational_erf`; Eigen's `generic_fast_tanh_float`."""
    p = [f32(c) for c in (
        -2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
        1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03,
    )]  # fmt: skip
    q = [f32(c) for c in (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)]
    return _odd_rational(p, q, f32(7.90531110763549805), maximum)


def _odd_rational(p: list[np.float32], q: list[np.float32], bound: np.float32, maximum: Callable) -> Callable:
    """Return x -> x P(x^2) / Q(x^2), coefficients from the highest power down, x clipped to [-bound, bound]."""

    def function(x: Scalar) -> Scalar:
        x = -maximum(-maximum(x, -bound), -bound)
        square = x * x
        above, below = p[0], q[0]
        for coefficient in p[1:]:
            above = above * square + coefficient
        for coefficient in q[1:]:
            below = below * square + coefficient
        return x * above / below

    return function
