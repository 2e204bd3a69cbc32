import errno
import fcntl
import json
import multiprocessing
import os
from unittest.mock import MagicMock

import pytest
from commands import raises
from tables import each

from cnnexp.errors import ConfigError
from cnnexp.tracking import folder, liveness
from cnnexp.tracking.folder import HELD, LOCK, RunLock, is_locked

GONE = str(1 << 30)  # no process has such an id


@pytest.fixture(autouse=True)
def without_locks(monkeypatch):
    monkeypatch.setattr(fcntl, "flock", MagicMock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    monkeypatch.setattr(folder, "INSTANT_S", 0.01)


def hold(place, **other):
    """Leave what another process holds a folder by."""
    (place / LOCK).touch()
    (place / HELD).write_text(json.dumps({"holder": "process", **liveness.describe(os.getpid()), **other}))


def test_where_there_are_no_locks_a_file_is_one(tmp_path):
    claim = RunLock(tmp_path)
    assert is_locked(tmp_path)
    raises(ConfigError, f"process {os.getpid()} on .*runs in it now; .*or delete .*{HELD} if", RunLock, tmp_path)
    claim.release()
    claim.release()
    assert not is_locked(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


@each(
    ({}, False),
    ({liveness.PID: GONE}, True),
    ({liveness.STARTED: "1"}, True),  # the id is another process's by now
    ({liveness.WHERE[0]: "another boot"}, True),
    ({liveness.WHERE[1]: "pid:[1]", liveness.PID: GONE}, False),  # of a container, whose ids are its own
    ({liveness.HOST: "another-machine", liveness.PID: GONE}, False),
)
def test_a_file_whose_process_is_gone_locks_nobody_out(tmp_path, other, stale):
    hold(tmp_path, **other)
    assert is_locked(tmp_path) is not stale
    hold(tmp_path, **other)
    if stale:
        RunLock(tmp_path).release()
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    else:
        raises(ConfigError, "runs in it now", RunLock, tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[]", b'{"machine.pid": {}}', b"[" * 3000])
def test_a_file_that_names_nobody_locks_out_and_says_which_it_is(tmp_path, content):
    (tmp_path / HELD).write_bytes(content)
    raises(ConfigError, f"another process runs in it now; .*delete .*{HELD}|process {{}} on", RunLock, tmp_path)


def compete(place, ready, taken):
    folder.INSTANT_S = 0.0
    ready.wait()
    try:
        RunLock(place)
        taken.put(os.getpid())
        ready.wait()  # nobody is gone before all have tried
    except ConfigError:
        ready.wait()


def test_of_many_that_find_a_stale_file_one_gets_the_folder(tmp_path):
    hold(tmp_path, **{liveness.PID: GONE})
    context = multiprocessing.get_context("fork")
    ready, taken = context.Barrier(8), context.SimpleQueue()
    rivals = [context.Process(target=compete, args=(tmp_path, ready, taken)) for _ in range(8)]
    for rival in rivals:
        rival.start()
    for rival in rivals:
        rival.join(60)
    assert not taken.empty()
    taken.get()
    assert taken.empty(), "one alone got it"
