"""A value that records the arithmetic done to it: a rule on scalars, run once on such values, is written down by it."""

from typing import Any, NoReturn, Self

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from cnnexp.errors import NetworkError
from cnnexp.network.elementwise import Maths

OPERATIONS = {
    **{"add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "negative": "neg"},
    **{"less": "<", "less_equal": "<=", "greater": ">", "greater_equal": ">="},
}
"""By the names of NumPy's functions, which the operators come to."""
GIVEN = Maths._fields


class Recorded(NDArrayOperatorsMixin):
    """Base: it turns `+ - * /` and comparisons into operations by name; anything else in a rule raises NetworkError."""

    def apply(self, operation: str, *values: Self | np.float32) -> Self:
        """Return an operation's outcome: `add sub mul div`, `neg` (of one value), `< <= > >=`."""
        raise NotImplementedError

    def __array_ufunc__(self, function: np.ufunc, method: str, *values: Any, **options: Any) -> Any:
        name = function.__name__
        if name in OPERATIONS:
            return self.apply(OPERATIONS[name], *values)
        instead = f"use maths.{name}" if name in GIVEN else "use + - * /, comparisons and what rule() is given"
        raise NetworkError(f"numpy.{name} in a rule: {instead}")

    def __bool__(self) -> NoReturn:
        raise NetworkError("if, and, or, not in a rule, of a number that varies: use maths.where")

    def __float__(self) -> NoReturn:
        raise NetworkError(f"a rule makes a plain number of one that varies: use maths.{', maths.'.join(GIVEN)}")
