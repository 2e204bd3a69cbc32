"""Tests that are tables."""

import inspect

import pytest


def each(*rows, ids=None):
    """Run a test on each row, a tuple: it gives the last parameters of the test, those before are fixtures."""

    def parametrized(test):
        width = len(getattr(rows[0], "values", rows[0]))  # `pytest.param` keeps a row in its `values`
        return pytest.mark.parametrize([*inspect.signature(test).parameters][-width:], rows, ids=ids)(test)

    return parametrized
