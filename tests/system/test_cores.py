"""Where threads begin, on a system of the test's own."""

import os
from unittest.mock import MagicMock

import pytest

from cnnexp.system import cores

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no thread to a core")


@pytest.fixture
def system(monkeypatch):
    """A thread on core 0 of `usable`; the first core that it is bound to is the one it moves to."""
    state = {"core": 0, "usable": {0, 1, 2}, "bound": []}

    def bind(thread, allowed):
        state["bound"].append(set(allowed))
        if state["core"] not in allowed:
            state["core"] = min(allowed)

    monkeypatch.setattr(cores, "current_core", lambda: state["core"])
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda thread: set(state["usable"]))
    monkeypatch.setattr(cores.os, "sched_setaffinity", bind)
    return state


def test_a_thread_on_a_core_of_its_pool_moves_and_stays_free_to_go(system):
    pool = cores.Cores()
    pool.take(0)
    pool.take(1)
    assert (system["core"], system["bound"]) == (1, [{1, 2}, {0, 1, 2}])
    system["core"] = 1
    pool.take(2)
    assert system["core"] == 2


@pytest.mark.parametrize(("core", "usable"), [(2, {0, 1, 2}), (0, {0})])
def test_one_that_has_a_core_of_its_own_stays_and_where_there_is_no_other_none_moves(system, core, usable):
    pool = cores.Cores()
    system["usable"] = usable
    pool.take(0)
    system["core"] = core
    pool.take(1)
    assert (system["core"], system["bound"]) == (core, [])


def test_a_sandbox_that_forbids_it_and_a_system_without_it_do_not_stop_training(system, monkeypatch):
    monkeypatch.setattr(cores.os, "sched_setaffinity", MagicMock(side_effect=PermissionError))
    pool = cores.Cores()
    pool.take(0)
    pool.take(1)
    monkeypatch.setattr(cores, "current_core", lambda: None)
    pool.take(1)
