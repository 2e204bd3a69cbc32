import os
import subprocess
import sys

import pytest

from cnnexp.tracking import liveness

NOW_MS, OURS = 1_000_000_000, liveness.describe(os.getpid())


def test_this_process_is_alive_an_ended_one_is_gone_and_without_a_heartbeat_the_start_counts():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    tags = liveness.describe(gone.pid)
    gone.wait()
    assert not liveness.is_gone(OURS, 0, NOW_MS)
    assert liveness.is_gone(tags, NOW_MS, NOW_MS)
    assert not liveness.is_gone({liveness.HOST: "elsewhere"}, NOW_MS - 60_000, NOW_MS)
    assert liveness.is_gone({liveness.HEARTBEAT: "never"}, 0, NOW_MS)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="the system does not tell when a process started")
def test_a_process_id_that_is_used_again_is_of_another():
    assert liveness.is_gone({**OURS, liveness.STARTED: "1"}, NOW_MS, NOW_MS)


@pytest.mark.parametrize("differs", [liveness.HOST, *liveness.WHERE])
@pytest.mark.parametrize(("age_s", "gone"), [(60, False), (liveness.DEAD_S + 1, True)])
def test_elsewhere_the_heartbeat_tells(differs, age_s, gone):
    """Another machine, the same after a start, and a container of the same host name: its ids are not ours."""
    beat = str(int(NOW_MS - age_s * 1000))
    tags = {**OURS, liveness.PID: "999999999", differs: "elsewhere", liveness.HEARTBEAT: beat}
    assert liveness.is_gone(tags, 0, NOW_MS) is gone
