"""How sure a median is, and whether two sets of measurements differ: without assuming how they are distributed."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95  # asked for; few measurements give less
EXACT = 1000  # up to so many pairs the test is exact


@dataclass(frozen=True)
class Interval:
    """A median and where it lies: between `low` and `high`, two of the measurements, with this confidence.

    It is >= 0.95, or that of the whole range, `least` to `most`, where it is less: 0.5 for two measurements, 0 for one.
    """

    median: float
    low: float
    high: float
    confidence: float
    least: float
    most: float
    count: int

    def __repr__(self) -> str:
        return f"Interval({self.median:.4g}, from {self.low:.4g} to {self.high:.4g}, of {self.count})"


def median_interval(values: Sequence[float]) -> Interval:
    """Return the narrowest pair of order statistics, equally far from both ends, that is sure enough.

    How many lie below the true median is binomial, p = 1/2 (Conover, Practical Nonparametric Statistics, section 3.2).
    """
    ordered, count, all_ways = sorted(values), len(values), 2 ** len(values)
    # of all ways those with so many below: whole numbers, as of thousands of measurements no float holds them
    ways = itertools.accumulate(range((count - 1) // 2), lambda w, i: w * (count - i) // (i + 1), initial=1)
    confidences = [1 - 2 * outside / all_ways for outside in itertools.accumulate(ways)]  # by how many are dropped
    dropped = max(0, sum(confidence >= CONFIDENCE for confidence in confidences) - 1)  # at each end
    median, low, high = statistics.median(ordered), ordered[dropped], ordered[-1 - dropped]
    return Interval(median, low, high, confidences[dropped], ordered[0], ordered[-1], count)


def p_value(a: Sequence[float], b: Sequence[float]) -> float:
    """Return how probable so large a difference is where there is none: the two-sided Mann-Whitney test.

    Exact up to `EXACT` pairs (equal values count half), from there by the normal approximation.
    """
    pairs = len(a) * len(b)
    wins = sum((x > y) + 0.5 * (x == y) for x in a for y in b)
    extreme = max(wins, pairs - wins)
    if pairs > EXACT:
        deviation = math.sqrt(pairs * (len(a) + len(b) + 1) / 12)
        return math.erfc((extreme - 0.5 - pairs / 2) / deviation / math.sqrt(2))
    ways = _ways(len(a), len(b))
    return min(1.0, 2 * sum(ways[math.ceil(extreme) :]) / sum(ways))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values of several tests, raised so that all together err as seldom as one (Holm 1979)."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        adjusted[i] = highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
    return adjusted


def _ways(n: int, m: int) -> list[int]:
    """Return in how many orders of n and m values the first win u of the pairs, for u = 0 .. n m.

    It is the Gaussian binomial coefficient: a product of (1 - q^(m + i)) / (1 - q^i) over i = 1 .. n.
    """
    ways = [1] + [0] * (n * m)
    for i in range(1, n + 1):
        for u in range(n * m, m + i - 1, -1):
            ways[u] -= ways[u - m - i]
        for u in range(i, n * m + 1):
            ways[u] += ways[u - i]
    return ways
