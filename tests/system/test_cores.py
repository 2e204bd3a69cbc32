"""Where threads begin, on a system of the test's own."""

import os
from unittest.mock import MagicMock

import pytest

from cnnexp.system import cores

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no thread to a core")


@pytest.fixture
def system(monkeypatch):
    """A thread on core 0 of `usable`, and what threads were bound to: in turn, the id of each and the cores."""
    state = {"core": 0, "usable": {0, 1, 2}, "bound": []}
    monkeypatch.setattr(cores, "current_core", lambda: state["core"])
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda thread: set(state["usable"]))
    monkeypatch.setattr(cores.os, "sched_setaffinity", lambda thread, allowed: state["bound"].append((thread, allowed)))
    return state


def test_a_thread_begins_beside_those_below_it_and_is_free_to_go_then(system):
    pool, woken = cores.Cores(), [MagicMock(native_id=71), MagicMock(native_id=72)]
    pool.place(1, woken[0])
    system["core"] = 2  # where the first begins
    pool.take(1)
    system["core"] = 0
    pool.place(2, woken[1])
    assert system["bound"] == [(71, {1, 2}), (0, {0, 1, 2}), (72, {1})]


def test_where_there_is_no_other_core_none_is_bound(system):
    system["usable"] = {0}
    cores.Cores().place(1, MagicMock(native_id=71))
    assert system["bound"] == []


def test_a_sandbox_that_forbids_it_and_a_system_without_it_do_not_stop_training(system, monkeypatch):
    monkeypatch.setattr(cores.os, "sched_setaffinity", MagicMock(side_effect=PermissionError))
    pool = cores.Cores()
    for core in (0, None):
        monkeypatch.setattr(cores, "current_core", lambda core=core: core)
        pool.place(1, MagicMock(native_id=71))
        pool.take(1)
