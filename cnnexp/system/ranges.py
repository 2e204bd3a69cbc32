"""Ranges of numbers, in the words of the files of conf/: `>= 1`, `> 0 and <= 1`, `1 .. 1000000, or null`."""

import math
import operator
import re
from dataclasses import field, fields
from typing import Any

from cnnexp.errors import ConfigError

LARGEST = (2 - 2**-23) * 2.0**127  # of float32
SMALLEST = 2.0**-149
FLOAT32 = f"a finite number of float32: 0, or {SMALLEST:.1e} .. {LARGEST:.1e} in size"
OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


def in_float32(value: float) -> bool:
    """Return whether a number is finite in float32, in which everything is computed, and not 0 there alone."""
    return math.isfinite(value) and (value == 0 or SMALLEST <= abs(value) <= LARGEST)


def is_within(value: float, legal: str) -> bool:
    """Return whether a number satisfies all comparisons of `legal`, and its `FIRST .. LAST`."""
    terms = re.findall(r"(>=|<=|>|<) ?(-?[\d.]+)", legal)
    for first, last in re.findall(r"(-?\d+) \.\. ([\d*]+(?: - 1)?)", legal):
        terms += [(">=", first), ("<=", str(2**63 - 1) if last == "2**63 - 1" else last)]
    return all(OPERATORS[sign](value, int(bound) if bound.isdigit() else float(bound)) for sign, bound in terms)


def check_range(key: str, value: float | None, legal: str) -> None:
    """Raise ConfigError unless a number is as `legal` says, which the message repeats; None where it names null."""
    if value is None and "null" in legal:
        return
    whole = "whole" in legal
    number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not number or not is_within(value, legal):  # type: ignore[arg-type]
        raise ConfigError(f"{key}={'null' if value is None and not whole else repr(value)}: must be {legal}")
    if isinstance(value, float) and not in_float32(value):
        raise ConfigError(f"{key}={value!r}: must be {FLOAT32}")


def ranged(default: Any, legal: str, key: str = "") -> Any:
    """Return a dataclass's field whose number must be as `legal` says; `key` is config's name for it, if another."""
    return field(default=default, metadata={"legal": legal, "key": key})


def check_fields(made: Any, group: str) -> None:
    """Raise ConfigError unless all numbers of an object are in their ranges; one whose default is None may be None."""
    for one in fields(made):
        value = getattr(made, one.name)
        if "legal" in one.metadata and not (value is None and one.default is None):
            check_range(f"{group}.{one.metadata['key'] or one.name}", value, one.metadata["legal"])
