"""How many threads do the shares of a step: one thread each, or, where others keep the cores busy, one thread all.

A thread that has lost its core is waited for at every step until it has it again, which takes milliseconds: on a busy
machine a step of 30 us may take five times as long on two threads as on one. What a step computes is the same to the
bit.
"""

from __future__ import annotations

CALL_S = 0.2
"""Seconds that one call of the compiled function takes, about: as long may work go on after a Ctrl-C."""

TRIAL_S = 0.005
"""Seconds that the other number of threads is tried for; what takes longer for a step loses little by a lost core."""

FIRST_PAUSE_S, PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5, 8.0
"""Seconds of training before the first trial, between trials, and between those that keep coming to nothing."""

MARGIN = 1.15
"""So many times as fast must the other number of threads be."""

SLOW = 3
"""So often in a row must all threads have been slower than one: first steps are, and one disturbance may."""


class Crew:
    """Chooses by the clock between all threads and one.

    Args:
        threads: how many there may be.
        trials: whether another number than all may be tried.

    Attributes:
        size: how many threads work now, 1 or all.
    """

    def __init__(self, threads: int, trials: bool = True) -> None:
        self.size = self._threads = threads
        self._trials = trials and threads > 1
        self._step_s = {threads: CALL_S}  # as last measured, by the number of threads
        self._measured = {1: (0, 0.0), threads: (0, 0.0)}  # steps and seconds since then
        self._trained_s = 0.0  # since the last trial
        self._slow = 0  # how often in a row all were slower than one
        self._pause_s = FIRST_PAUSE_S

    def next(self) -> tuple[int, int]:
        """Return how many threads the next call has, and for how many steps."""
        other = self._threads + 1 - self.size
        expected = self._step_s.get(other, self._step_s[self.size] * self._threads)
        if self._trials and self._trained_s >= self._pause_s and expected <= TRIAL_S:
            return other, int(TRIAL_S / expected)
        steps, seconds = self._measured[self.size]
        step_s = seconds / steps if steps else self._step_s[self.size]
        return self.size, max(1, int(CALL_S / step_s))

    def took(self, threads: int, steps: int, seconds: float) -> None:
        """Learn how long a call took; short ones, which waking the threads may outlast, count together."""
        steps, seconds = self._measured[threads][0] + steps, self._measured[threads][1] + seconds
        self._measured[threads] = steps, seconds
        if seconds < TRIAL_S / 2:
            return
        self._measured[threads] = 0, 0.0
        self._step_s[threads] = seconds / steps
        if threads != self.size:
            self._trained_s, self._pause_s = 0.0, max(PAUSE_S, self._pause_s)
            if self.size == 1 and self._step_s[threads] * MARGIN < self._step_s[1]:
                self.size = threads
            return
        self._trained_s += seconds
        if self.size < self._threads or 1 not in self._step_s:
            return
        self._slow = self._slow + 1 if self._step_s[self.size] > self._step_s[1] * MARGIN else 0
        if self._slow == SLOW:
            self.size, self._trained_s, self._slow = 1, 0.0, 0
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        elif not self._slow:
            self._pause_s = PAUSE_S
