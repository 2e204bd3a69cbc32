"""Interference from a /proc of the test's own, and once from the real one."""

import os
import signal
import subprocess
import sys

import pytest
from fakes import FakeClock
from tables import each

from cnnexp.measuring import interference
from cnnexp.measuring.interference import PROC, Interference, Watch, _look, await_quiet, others_share
from cnnexp.system.cores import usable_cores

SPIN = "import os; print(os.getpid(), flush=True)\nwhile True: pass"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what others use")
@each((0.0, 0.0, False), (0.03, 0.0, False), (0.2, 0.0, True), (0.0, 0.1, True))
def test_disturbed_is_what_others_used_never_how_our_threads_waited(tmp_path, monkeypatch, others, stolen, disturbed):
    cores = usable_cores()
    now = {"clock": 0.0, "own": 0.0, "idle": 0.0, "stolen": 0.0}
    monkeypatch.setattr(interference.time, "monotonic", lambda: now["clock"])
    monkeypatch.setattr(interference, "_own_s", lambda: now["own"])

    def pass_time(seconds, own, others, stolen=0.0):  # in seconds of all our cores together
        idle = seconds * cores - own - others - stolen
        for key, passed in (("clock", seconds), ("own", own), ("idle", idle), ("stolen", stolen)):
            now[key] += passed
        idle, stolen = (round(100 * now[key] / cores) for key in ("idle", "stolen"))
        ours = [f"cpu{c} {10_000 - idle - stolen} 0 0 {idle} 0 0 0 {stolen} 0 0\n" for c in os.sched_getaffinity(0)]
        other = "cpu999 5 5 5 5 5 5 5 5 0 0\n"  # always busy, but not ours
        (tmp_path / "stat").write_text(f"cpu  9 9 9 9 9 9 9 9 0 0\n{''.join(ours)}{other}ctxt 1\n")

    pass_time(1.0, 0.5, 0.0)
    watch = Watch(cores, tmp_path)
    assert watch.interference() is None
    watch.start()
    pass_time(0.1, 0.0, 0.1 * cores)
    watch.finished(None)
    assert not watch.interference().known, "too short to say"
    assert not watch.interference().disturbed
    watch = Watch(cores, tmp_path)
    watch.start()
    for _ in range(3):
        pass_time(1.0, 0.5 * cores, others * cores, stolen * cores)
        watch.finished(None)
        found = watch.interference()
        pass_time(9.0, 0.0, 9.0 * cores)  # while a patient run waits others may do what they like
        watch.start()
    assert (found.others, found.stolen) == pytest.approx((others + stolen, stolen), abs=0.02)
    assert found.seconds == pytest.approx(3)
    assert found.disturbed is disturbed


@each((2, 1, 1.0, True), (64, 2, 1.0, False), (64, 64, 1.0, True), (64, 62, 1.0, False), (64, 8, 60.0, True))
def test_cores_that_the_run_leaves_free_are_the_others(cores, threads, busy_cores, disturbed):
    assert Interference(busy_cores / cores, 0.0, 1.0, cores, threads, 9.0).disturbed is disturbed


def test_a_system_that_does_not_count_is_not_guessed_at(tmp_path):
    watch = Watch(2, tmp_path)
    watch.start()
    watch.finished(None)
    assert watch.interference() is None
    assert others_share(0.0, tmp_path) == 0.0


@pytest.mark.skipif(_look(PROC) is None, reason="this system does not count what others use")
def test_a_process_on_our_core_is_other_work_and_a_child_of_ours_is_not():
    """Real processes beside ours on the one core that all may use."""
    shares, cores = {}, os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    orphaning = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SPIN!r}])"
    try:
        for who, code in (("child", SPIN), ("other", orphaning)):
            with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
                rival = int(process.stdout.readline())
                if who == "other":
                    process.wait()  # its own child has no parent then
                watch = Watch(1)
                watch.start()
                ended = os.times().user + 0.3
                while os.times().user < ended:
                    pass
                watch.finished(None)
                shares[who] = watch.interference()
                os.kill(rival, signal.SIGKILL)
    finally:
        os.sched_setaffinity(0, cores)
    assert shares["other"].disturbed
    assert shares["other"].others > 0.3
    assert shares["child"].others < shares["other"].others


def test_patience_ends_with_quiet_or_with_its_limit(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(interference.time, "monotonic", clock)

    def waited(*shares):
        found = iter(shares)

        def look():
            clock.advance(0.5)
            return next(found)

        monkeypatch.setattr(interference, "others_share", look)
        return await_quiet(10.0)

    assert (waited(0.9, 0.5, 0.05, 0.9), waited(*[1.0] * 50)) == (1.5, 10.0)
    assert waited(0.0) == 0.5
