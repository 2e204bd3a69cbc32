"""A collective between threads of the test's own process: fast, and every rank can be looked into."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np


class ThreadCollective:
    def __init__(self, group, rank):
        self.group, self.rank, self.size = group, rank, group.size
        self.host_size, self.host_rank = group.size, rank

    def all_reduce(self, buffer):
        parts = self.group.exchange(self.rank, buffer)
        total = parts[0].copy()
        for part in parts[1:]:
            total += part
        buffer[:] = total

    def all_gather(self, part, sizes):
        parts = self.group.exchange(self.rank, part)
        assert [len(p) for p in parts] == list(sizes)
        return np.concatenate(parts)

    def broadcast(self, array):
        first = self.group.exchange(self.rank, array)[0]
        if self.rank:
            array[...] = first

    def barrier(self):
        self.group.exchange(self.rank, np.zeros(0, np.float32))


class Group:
    def __init__(self, size):
        self.size, self.slots, self.meeting = size, [None] * size, threading.Barrier(size, timeout=300)

    def exchange(self, rank, array):
        self.slots[rank] = array.copy()
        self.meeting.wait()
        parts = list(self.slots)
        self.meeting.wait()
        return parts

    def run(self, work):
        """Return what `work(collective)` returns on each rank."""

        def guarded(rank):
            try:
                return work(ThreadCollective(self, rank))
            except BaseException:
                self.meeting.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(guarded, rank) for rank in range(self.size)]
        errors = [e for future in futures if (e := future.exception())]
        real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
        if errors:
            raise (real or errors)[0]
        return [future.result() for future in futures]
