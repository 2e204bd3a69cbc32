"""Workers as processes of this machine, on shared memory: the same results as `mpi`, with nothing to install.

The processes are spawned, never forked: a forked child of a process with Numba's threads may not use them.
"""

import contextlib
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from typing import cast

import numpy as np
import psutil

from cnnexp.errors import CnnexpError, WorkerDied, reason_of
from cnnexp.system.child import ending
from cnnexp.system.heartbeat import Heartbeat, beat
from cnnexp.workers.collective import share
from cnnexp.workers.guard import SILENT
from cnnexp.workers.program import ParallelProgram, make_replica, serve
from cnnexp.workers.replica import Spec

SLOT_BYTES = 1 << 20  # larger arrays go in pieces; the gradient of 262,144 parameters fits
CHECK_S = 0.5  # how often a worker gives a sign of life, and one that waits looks whether the others are alive
START_S = 300.0  # as long may a new process take to its first sign of life
SPINS = 40  # tries before a worker sleeps: some tens of microseconds, about what waking up costs
STOP_S = 5.0  # as long may a worker take to end by itself

_CONTEXT = multiprocessing.get_context("spawn")


class PipeSemaphore:
    """A counting semaphore of bytes in a pipe, for processes that are spawned.

    It has no name in the system, as those of `multiprocessing` have: a process that is killed leaves nothing behind.
    """

    def __init__(self, count: int = 0) -> None:
        self.__setstate__(_CONTEXT.Pipe(duplex=False))
        for _ in range(count):
            self.release()

    def release(self) -> None:
        """Add one."""
        os.write(self._writer, b".")

    def acquire(self, timeout_s: float) -> bool:
        """Take one, waiting at most `timeout_s`; return whether there was one."""
        try:
            return bool(self._poll.poll(1000 * timeout_s) and os.read(self._reader, 1))
        except BlockingIOError:  # another process was faster
            return False

    def __getstate__(self) -> tuple[Connection, Connection]:
        return self._ends

    def __setstate__(self, ends: tuple[Connection, Connection]) -> None:
        self._ends = ends  # they close the pipe when they are gone
        self._reader, self._writer = (end.fileno() for end in ends)
        os.set_blocking(self._reader, False)
        self._poll = select.poll()
        self._poll.register(self._reader, select.POLLIN)


class SharedBuffer:
    """Memory that all workers see: one slot each and one for results, twice, and semaphores to meet at.

    Every exchange uses the other half of what the one before used. A worker can be one exchange ahead of another, never
    two, since it cannot leave an exchange before all have come to it: so what a slow worker still reads is not touched.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = _CONTEXT.RawArray("B", 2 * (size + 1) * SLOT_BYTES)
        self.semaphores = [[PipeSemaphore() for _ in range(size)] for _ in range(2)]
        self.signs = _CONTEXT.RawArray("Q", size)  # how many signs of life each worker has given
        self.last_word = PipeSemaphore(1)  # whoever takes it says why rank 0 is gone; the others end in silence


class LocalCollective:
    """One process's end of a shared buffer: a `Collective`. `check` raises, while it waits, where another has died."""

    def __init__(self, shared: SharedBuffer, rank: int, check: Callable[[], None]) -> None:
        self.rank, self.size, self.host_size, self.host_rank = rank, shared.size, shared.size, rank
        self._semaphores, self._check = shared.semaphores, check
        self._bytes = np.frombuffer(shared.memory, np.uint8).reshape(2, shared.size + 1, SLOT_BYTES)
        self._floats = self._bytes.view(np.float32)
        self._half, self._meetings = 0, 0

    def all_reduce(self, buffer: np.ndarray) -> None:
        step = SLOT_BYTES // buffer.itemsize
        for start in range(0, len(buffer), step):
            part = buffer[start : start + step]
            slots, result = self._next(self._bytes.view(buffer.dtype), len(part))
            slots[self.rank] = part
            self.barrier()
            mine = share(len(part), self.size, self.rank)
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
            if not any(semaphores[self.rank].acquire(0.0) for _ in range(SPINS)):
                while not semaphores[self.rank].acquire(CHECK_S):
                    self._check()

    def _next(self, halves: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the workers' slots and the result's, of the half whose turn it is."""
        half = halves[self._half]
        self._half = 1 - self._half
        return half[:-1, :count], half[-1, :count]


def _watch(shared: SharedBuffer, rank: int, timeout_s: float, ended: threading.Event) -> Callable[[int], bool]:
    """Give signs of life for a worker until `ended`; return what says whether another has been silent for too long.

    That is to be asked every `CHECK_S` seconds: a process that is stopped does not die, so none sees it otherwise.
    """
    others = [Heartbeat(timeout_s, CHECK_S, max(timeout_s, START_S)) for _ in range(shared.size)]

    def give_sign() -> None:
        shared.signs[rank] += 1

    beat(give_sign, CHECK_S, ended)
    return lambda other: others[other].look(shared.signs[other])


# another worker as rank 0 sees it; the pipe brings one line, if it failed with an error of its own
_Child = tuple[SpawnProcess, Connection]


def compile_local(spec: Spec, count: int, timeout_s: float) -> ParallelProgram:
    """Start `count` - 1 processes and return the program of all of them.

    WorkerDied is raised where one could not be started, ended before it was ready, or was silent for `timeout_s`.
    """
    started = time.perf_counter()
    children, ended = list[_Child](), threading.Event()

    def check() -> None:
        for rank, (process, failure) in enumerate(children, 1):
            if why := _failure(process, failure) or (SILENT.format(timeout_s) if stopped(rank) else None):
                raise WorkerDied(f"worker {rank} of {count} (pid {process.pid}) {why}")

    def release(orderly: bool) -> None:  # waits for workers that are about to end, and kills the rest
        ended.set()
        deadline = time.monotonic() + (STOP_S if orderly else 0.0)
        for process, failure in children:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
            failure.close()

    try:
        try:
            shared = SharedBuffer(count)
            stopped = _watch(shared, 0, timeout_s, ended)
            for rank in range(1, count):
                children.append(_start(shared, rank, spec, timeout_s))
        except OSError as error:  # the system refuses a process, a pipe or memory that processes share
            why = f"not all of them can be started: {reason_of(error)}; lower workers.count"
            raise WorkerDied(f"workers.count={count}: {why}") from error
        collective = LocalCollective(shared, 0, check)
        replica = make_replica(spec, collective)
        collective.barrier()  # now the others find the kernels in the cache
        collective.barrier()
    except BaseException:
        release(orderly=False)
        raise
    return ParallelProgram(spec, collective, replica, time.perf_counter() - started, release)


def _start(shared: SharedBuffer, rank: int, spec: Spec, timeout_s: float) -> _Child:
    failure, writer = _CONTEXT.Pipe(duplex=False)
    given = shared, rank, spec, timeout_s, writer
    process = _CONTEXT.Process(target=_work, args=given, name=f"cnnexp-worker-{rank}", daemon=True)
    before = set(psutil.Process().children())
    try:
        process.start()
    except OSError:
        # one that was started, and never learns what to do, would end in a traceback of multiprocessing's
        for child in set(psutil.Process().children()) - before:
            child.kill()
            child.wait()
        raise
    writer.close()
    return process, failure


def _work(shared: SharedBuffer, rank: int, spec: Spec, timeout_s: float, failure: Connection) -> None:
    """Be one of the other workers, from start to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; rank 0 decides what it means
    parent = cast(BaseProcess, multiprocessing.parent_process())  # rank 0

    def end_with_parent() -> None:  # killed, it cannot say so itself
        parent.join()
        _end(shared, parent, "died")

    def check() -> None:
        if stopped(0):
            _end(shared, parent, SILENT.format(timeout_s))

    threading.Thread(target=end_with_parent, daemon=True).start()
    stopped = _watch(shared, rank, timeout_s, threading.Event())
    try:
        collective = LocalCollective(shared, rank, check)
        collective.barrier()
        replica = make_replica(spec, collective)
        collective.barrier()
        serve(replica, collective)
    except Exception as error:
        kind = "" if isinstance(error, CnnexpError) else f"{type(error).__name__}: "
        failure.send(f"{kind}{error}")
        sys.exit(1)


def _end(shared: SharedBuffer, parent: BaseProcess, reason: str) -> None:
    """End this process, and rank 0 where it still is there; the first to come here says why."""
    pid = cast(int, parent.pid)
    if shared.last_word.acquire(0.0):
        os.write(2, f"cnnexp: error: worker 0 of {shared.size} (pid {pid}) {reason}; the run has ended\n".encode())
    if os.getppid() == pid:
        os.kill(pid, signal.SIGKILL)
    os._exit(WorkerDied.exit_code)


def _failure(process: SpawnProcess, failure: Connection) -> str | None:
    """Return why a worker has ended, None where it has not."""
    if (code := process.exitcode) is None:
        return None
    with contextlib.suppress(EOFError):
        if failure.poll():
            return f"failed: {failure.recv()}"
    return ending(code, "killed")
