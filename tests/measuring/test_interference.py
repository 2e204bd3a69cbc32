"""Interference from a /proc of the test's own, and once from the real one."""

import os
import sys

import pytest
from fakes import FakeClock

from cnnexp.measuring.interference import (
    PROC,
    Interference,
    Watch,
    _counts,
    await_quiet,
    others_share,
)


class Proc:
    """A /proc of two threads, which a program's training moves on."""

    def __init__(self, folder, waited_ns, stolen=0):
        self.folder, self.waited_ns, self.stolen = folder, waited_ns, stolen
        self.steps = 0
        for thread in (1, 2):
            (folder / "self" / "task" / str(thread)).mkdir(parents=True)
        self.write()

    def write(self):
        for thread in (1, 2):
            times = f"{1_000_000 + 800 * self.steps} {5_000_000 + self.waited_ns * self.steps} 7\n"
            (self.folder / "self" / "task" / str(thread) / "schedstat").write_text(times)
        cores = "".join(
            f"cpu{core} {100 + 10 * self.steps} 0 0 500 0 0 0 {self.stolen * self.steps} 0 0\n"
            for core in os.sched_getaffinity(0)
        )
        (self.folder / "stat").write_text(f"cpu  9 9 9 9 9 9 9 9 0 0\n{cores}cpu999 5 5 5 5 5 5 5 5 0 0\nctxt 1\n")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which threads waited")
@pytest.mark.parametrize(
    ("waited_ns", "stolen", "waited", "stolen_share", "disturbed"),
    [(0, 0, 0.0, 0.0, False), (200, 0, 0.2, 0.0, True), (8, 0, 8 / 808, 0.0, False), (0, 5, 0.0, 5 / 15, True)],
)
def test_what_threads_waited_and_what_was_stolen_while_training(
    tmp_path, waited_ns, stolen, waited, stolen_share, disturbed
):
    proc = Proc(tmp_path, waited_ns, stolen)
    watch = Watch(tmp_path)
    assert watch.interference() is None
    for _ in range(3):
        with watch.around():
            proc.steps += 1
            proc.write()
        proc.steps += 100  # between the passes others may do what they like
        proc.write()
    found = watch.interference()
    assert found.waited == pytest.approx(waited)
    assert found.stolen == pytest.approx(stolen_share)
    assert found.disturbed is disturbed


def test_a_system_that_does_not_tell_is_not_guessed_at(tmp_path):
    watch = Watch(tmp_path)
    with watch.around():
        pass
    assert watch.interference() is None
    assert others_share(0.0, tmp_path) == 0.0


@pytest.mark.skipif(_counts(PROC) is None, reason="this system does not tell which threads waited")
def test_two_threads_on_one_core_are_found_to_wait():
    """A real process beside ours on the one core that both may use."""
    import subprocess

    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        spin = "print('spins', flush=True)\nwhile True: pass"
        with subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE, text=True) as rival:
            rival.stdout.readline()
            watch = Watch()
            with watch.around():
                spin_for(0.3)
            busy = others_share(0.2)
            rival.kill()
        found = watch.interference()
    finally:
        os.sched_setaffinity(0, cores)
    assert found.disturbed
    assert found.cores == 1
    assert busy > 0.5


def spin_for(seconds):
    ended = os.times().user + seconds
    while os.times().user < ended:
        pass


def test_patience_ends_with_quiet_or_with_its_limit():
    clock = FakeClock()

    def waited(*shares):
        found = iter(shares)

        def look():
            clock.advance(0.5)
            return next(found)

        return await_quiet(10.0, look, clock)

    assert waited(0.9, 0.5, 0.05, 0.9) == 1.5
    assert waited(*[1.0] * 50) == 10.0
    assert waited(0.0) == 0.5


def test_disturbed_is_either():
    assert not Interference(0.04, 0.04, 9.0, 2).disturbed
    assert Interference(0.06, 0.0, 0.0, 2).disturbed
