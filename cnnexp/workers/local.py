"""Workers as processes of this machine, on shared memory: the same results as `mpi`, with nothing to install.

The processes are spawned, never forked: a forked child of a process with Numba's threads may not use them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import numpy as np

from cnnexp.errors import CnnexpError, WorkerDied
from cnnexp.workers.collective import share
from cnnexp.workers.program import ParallelProgram, make_replica, serve
from cnnexp.workers.replica import Spec

SLOT_BYTES = 1 << 20  # larger arrays go in pieces; the gradient of 262,144 parameters fits
CHECK_S = 0.5  # how often a waiting worker looks whether the others are alive
SPINS = 100  # tries before a worker sleeps: some tens of microseconds, about what waking up costs
STOP_S = 5.0  # as long may a worker take to end by itself

_CONTEXT = multiprocessing.get_context("spawn")


class Board:
    """Memory that all workers see: one slot each and one for results, twice, and semaphores to meet at.

    Every exchange uses the other half of what the one before used. A worker can be one exchange ahead of another, never
    two, since it cannot leave an exchange before all have come to it: so what a slow worker still reads is not touched.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = _CONTEXT.RawArray("B", 2 * (size + 1) * SLOT_BYTES)
        self.semaphores = [[_CONTEXT.Semaphore(0) for _ in range(size)] for _ in range(2)]


class LocalCollective:
    """One process's end of a board; see `Collective`.

    Args:
        board: shared by all.
        rank: of this process.
        check: raises where another worker has died; called while waiting.
    """

    def __init__(self, board: Board, rank: int, check=lambda: None) -> None:
        self.rank, self.size, self.host_size = rank, board.size, board.size
        self._semaphores, self._check = board.semaphores, check
        self._bytes = np.frombuffer(board.memory, np.uint8).reshape(2, board.size + 1, SLOT_BYTES)
        self._floats = self._bytes.view(np.float32)
        self._half, self._meetings = 0, 0

    def all_reduce(self, buffer: np.ndarray) -> None:
        step = SLOT_BYTES // buffer.itemsize
        for start in range(0, len(buffer), step):
            part = buffer[start : start + step]
            slots, result = self._next(self._floats, len(part))
            slots[self.rank] = part
            self.barrier()
            mine = share(len(part), self.size, self.rank)
            with np.errstate(over="ignore", invalid="ignore"):  # of a run that diverges: its loss will say so
                np.add(slots[0, mine], slots[1, mine], out=result[mine])
                for slot in slots[2:]:
                    result[mine] += slot[mine]
            self.barrier()
            part[:] = result

    def all_gather(self, part: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
        step = SLOT_BYTES // part.itemsize
        gathered = [np.empty(size, np.float32) for size in sizes]
        for start in range(0, max(sizes), step):
            piece = part[start : start + step]
            slots, _ = self._next(self._floats, step)
            slots[self.rank, : len(piece)] = piece
            self.barrier()
            for own, slot in zip(gathered, slots, strict=True):
                target = own[start : start + step]
                target[:] = slot[: len(target)]
        return np.concatenate(gathered)

    def broadcast(self, array: np.ndarray) -> None:
        flat = array.reshape(-1).view(np.uint8)
        for start in range(0, len(flat), SLOT_BYTES):
            part = flat[start : start + SLOT_BYTES]
            _, result = self._next(self._bytes, len(part))
            if self.rank == 0:
                result[:] = part
            self.barrier()
            if self.rank:
                part[:] = result

    def barrier(self) -> None:
        semaphores = self._semaphores[self._meetings % 2]
        self._meetings += 1
        for rank, semaphore in enumerate(semaphores):
            if rank != self.rank:
                semaphore.release()
        for _ in range(self.size - 1):
            self._wait(semaphores[self.rank])

    def _next(self, halves: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the workers' slots and the result's, of the half whose turn it is."""
        half = halves[self._half]
        self._half = 1 - self._half
        return half[:-1, :count], half[-1, :count]

    def _wait(self, semaphore: Any) -> None:
        for _ in range(SPINS):
            if semaphore.acquire(block=False):
                return
        while not semaphore.acquire(timeout=CHECK_S):
            self._check()


@dataclass
class _Child:
    """Another worker as rank 0 sees it."""

    rank: int
    process: SpawnProcess
    failure: Connection  # one line, if it failed with an error of its own


def compile_local(spec: Spec, count: int) -> ParallelProgram:
    """Start `count` - 1 processes and return the program of all of them.

    Raises:
        WorkerDied: a process ended before it was ready.
    """
    started = time.perf_counter()
    board = Board(count)
    children: list[_Child] = []
    collective = LocalCollective(board, 0, lambda: _check_children(children, count))
    try:
        for rank in range(1, count):
            children.append(_start(board, rank, spec))
        replica = make_replica(spec, collective)
        collective.barrier()  # now the others find the kernels in the cache
        collective.barrier()
    except BaseException:
        _stop(children, patience_s=0.0)
        raise
    seconds = time.perf_counter() - started
    return ParallelProgram(spec, collective, replica, seconds, lambda told: _stop(children, STOP_S if told else 0.0))


def _start(board: Board, rank: int, spec: Spec) -> _Child:
    failure, writer = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(
        target=_work, args=(board, rank, spec, writer), name=f"cnnexp-worker-{rank}", daemon=True
    )
    process.start()
    writer.close()
    return _Child(rank, process, failure)


def _work(board: Board, rank: int, spec: Spec, failure: Connection) -> None:
    """Be one of the other workers, from start to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; rank 0 decides what it means
    threading.Thread(target=_end_with_parent, args=(board.size,), daemon=True).start()
    try:
        collective = LocalCollective(board, rank)
        collective.barrier()
        replica = make_replica(spec, collective)
        collective.barrier()
        serve(replica, collective)
    except Exception as error:
        kind = "" if isinstance(error, CnnexpError) else f"{type(error).__name__}: "
        failure.send(f"{kind}{error}")
        sys.exit(1)


def _end_with_parent(size: int) -> None:
    """End this process when rank 0 is gone: killed, it cannot say so itself."""
    parent = multiprocessing.parent_process()
    parent.join()
    os.write(2, f"cnnexp: error: worker 0 of {size} (pid {parent.pid}) died; the run has ended\n".encode())
    os._exit(WorkerDied.exit_code)


def _check_children(children: list[_Child], size: int) -> None:
    for child in children:
        if child.process.exitcode is not None:
            who = f"worker {child.rank} of {size} (pid {child.process.pid})"
            reason = None
            with contextlib.suppress(EOFError):
                reason = child.failure.recv() if child.failure.poll() else None
            raise WorkerDied(f"{who} failed: {reason}" if reason else f"{who} {_ending(child.process.exitcode)}")


def _ending(exit_code: int) -> str:
    return f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"


def _stop(children: list[_Child], patience_s: float) -> None:
    """End the workers: wait for those that have been told to, kill the rest."""
    deadline = time.monotonic() + patience_s
    for child in children:
        child.process.join(max(0.0, deadline - time.monotonic()))
        child.process.kill()
        child.process.join()
        child.failure.close()
