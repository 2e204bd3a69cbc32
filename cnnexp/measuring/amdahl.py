"""Amdahl's law: the most that computing a part of the work in parallel can gain."""


def amdahl_limit(parallel_share: float, speedup: float) -> float:
    """Return 1 / ((1 - p) + p / s), Amdahl's law as khandait (section III.C) uses it: the most that a run gains.

    Args:
        parallel_share: p, the share of the sequential program's training step that lies in the forward and backward
            passes of its layers, 0 .. 1: what any number of cores can share (`ledger.Profiled.layers_share`).
        speedup: s, how many times as fast that share can get: how many float32 operations the run's hardware does at
            once, as khandait counts the cores of a GPU; infinity for an unlimited number.
    """
    return 1 / ((1 - parallel_share) + parallel_share / speedup)
