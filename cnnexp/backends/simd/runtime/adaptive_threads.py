"""How many threads do the shares of a step: one thread each, or, where others keep the cores busy, one thread all.

A thread that has lost its core is waited for at every step until it has it again, which takes milliseconds: on a busy
machine a step of 30 us may take five times as long on two threads as on one. Its bits are the same with any number.
"""

CALL_S = 0.2
"""Seconds that one call of the compiled function takes, about: as long may work go on after a Ctrl-C."""

TRIAL_S = 0.005
"""Seconds that the other number of threads is tried for; what takes longer for a step loses little by a lost core."""

UNKNOWN_S = 0.02
"""Seconds of a step up to which one thread is tried for the first time: a step of many meetings may seem that long."""

PAUSE_S = 0.5
"""Seconds of training on all threads between trials of one."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 8.0
"""Seconds of training before the first trial of one thread and, while one works, before that of all, which each vain
trial doubles, up to the longest."""

MARGIN = 1.15
"""So many times as fast must the other number of threads be."""

SLOW, SLOW_S = 3, 0.1
"""So often in a row, and for so many seconds, must all threads have been slower than one: a disturbance passes."""


class AdaptiveThreads:
    """Chooses by the clock between all threads and one.

    Args:
        threads: how many there may be. trials: whether another number than all may be tried.

    Attributes:
        size: how many threads work now, 1 or all.
    """

    def __init__(self, threads: int, trials: bool = True) -> None:
        self.size = self._threads = threads
        self._trials = trials and threads > 1
        self._step_s = {threads: CALL_S}  # as last measured, by the number of threads
        self._measured = {1: (0, 0.0), threads: (0, 0.0)}  # steps and seconds since then
        self._trained_s = 0.0  # since the last trial or change
        self._slow, self._slow_s = 0, 0.0  # how often in a row all were slower than one, and for how long
        self._pause_s = {1: FIRST_PAUSE_S, threads: FIRST_PAUSE_S}  # before the other number is tried

    def next(self) -> tuple[int, int]:
        """Return how many threads the next call has, and for how many steps."""
        call_s, other = CALL_S, self._threads + 1 - self.size
        expected = self._step_s.get(other, self._step_s[self.size])
        if self._trials and expected <= (TRIAL_S if other in self._step_s else UNKNOWN_S):
            left_s = self._pause_s[self.size] - self._trained_s
            if left_s <= 0:
                return other, max(1, int(TRIAL_S / expected))
            call_s = min(CALL_S, max(TRIAL_S, left_s))
        steps, seconds = self._measured[self.size]
        step_s = seconds / steps if steps else self._step_s[self.size]
        return self.size, max(1, int(call_s / step_s))

    def took(self, threads: int, steps: int, seconds: float) -> None:
        """Learn how long a call took; short ones, which waking the threads may outlast, count together."""
        steps, seconds = self._measured[threads][0] + steps, self._measured[threads][1] + seconds
        self._measured[threads] = steps, seconds
        if seconds < TRIAL_S / 2:
            return
        self._measured[threads] = 0, 0.0
        self._step_s[threads] = seconds / steps
        if threads == self.size:
            self._trained_s += seconds
            if threads > 1 and 1 in self._step_s:
                self._judge(seconds)
        elif threads == 1:
            self._trained_s, self._pause_s[self._threads] = 0.0, PAUSE_S
        elif self._step_s[threads] * MARGIN < self._step_s[1]:
            self._work(threads)
        else:
            self._trained_s, self._pause_s[1] = 0.0, min(2 * self._pause_s[1], LONGEST_PAUSE_S)

    def _judge(self, seconds: float) -> None:
        """Have one thread go on where all were slower too long; a disturbance that has passed is forgotten."""
        if self._step_s[self.size] > self._step_s[1] * MARGIN:
            self._slow, self._slow_s = self._slow + 1, self._slow_s + seconds
            if self._slow >= SLOW and self._slow_s >= SLOW_S:
                self._pause_s[1] = min(2 * self._pause_s[1], LONGEST_PAUSE_S)
                self._work(1)
            return
        self._slow, self._slow_s = 0, 0.0
        if self._trained_s >= self._pause_s[1]:
            self._pause_s[1] = FIRST_PAUSE_S

    def _work(self, threads: int) -> None:
        self.size, self._trained_s, self._slow, self._slow_s = threads, 0.0, 0, 0.0
