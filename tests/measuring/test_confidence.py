import numpy as np
import pytest
from scipy import stats
from tables import each

from cnnexp.measuring.confidence import EXACT, holm, median_interval, p_value


@each((1, 0, 0, 0.0), (2, 0, 1, 0.5), (5, 0, 4, 0.9375), (6, 0, 5, 0.96875), (10, 1, 8, 0.978515625))
def test_interval_of_a_median_is_that_of_the_tables(count, low, high, confidence):
    found = median_interval(list(reversed(range(count))))
    assert (found.low, found.high, found.confidence) == (low, high, pytest.approx(confidence))
    assert (found.median, found.least, found.most, found.count) == ((count - 1) / 2, 0, count - 1, count)


@pytest.mark.parametrize("sizes", [(1, 1), (3, 4), (10, 10), (7, 20)])
def test_p_value_is_the_exact_mann_whitney_test(sizes):
    rng = np.random.default_rng(1)
    for shift in (0.0, 1.0, 5.0):
        a, b = rng.normal(size=sizes[0]), rng.normal(shift, size=sizes[1])
        expected = stats.mannwhitneyu(a, b, method="exact").pvalue
        assert p_value(a.tolist(), b.tolist()) == pytest.approx(expected)


def test_many_pairs_are_approximated_equal_ones_do_not_differ_and_holm_raises_p():
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=60), rng.normal(0.4, size=40)
    assert len(a) * len(b) > EXACT
    assert p_value(a.tolist(), b.tolist()) == pytest.approx(stats.mannwhitneyu(a, b).pvalue, rel=1e-6)
    assert p_value([1.0] * 5, [1.0] * 5) == 1.0

    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(("count", "half"), [(1000, 31), (3000, 54), (20_000, 139)])
def test_a_median_of_thousands_is_as_sure_as_the_normal_approximation_says(count, half):
    """1.96 standard deviations of the binomial, sqrt(count) / 2; a float holds none of its coefficients."""
    found = median_interval(range(count))
    assert 0.95 <= found.confidence < 0.96
    assert abs((found.high - found.low) / 2 - half) <= 2
