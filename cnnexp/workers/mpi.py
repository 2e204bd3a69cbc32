"""Workers as MPI ranks: `mpiexec -n 4 python -m cnnexp workers=mpi`. The only file that imports mpi4py.

Rank 0 is the program that the user sees. The others read no config and no data: they wait for what rank 0 sends, train
with it, and wait again, so a whole sweep may run in one `mpiexec`.
"""

import atexit
import functools
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from cnnexp.errors import BackendUnavailable, CnnexpError, ConfigError, WorkerDied, installing
from cnnexp.measuring.environment import launched_rank
from cnnexp.workers.guard import Member, start_guard
from cnnexp.workers.program import ParallelProgram, make_replica, receive, send, serve
from cnnexp.workers.replica import Replica, Spec, divide_threads

SPIN_S = 1e-3  # a broadcast that takes longer is waited for asleep: rank 0 is busy, e.g. with evaluation
SLEEP_S = 2e-4
END, TRAIN = "end", "train"


class MpiCollective:
    """One rank's end of a communicator; see `Collective`. Arrays go as they lie in memory."""

    def __init__(self, comm: Any, mpi: Any) -> None:
        self.rank, self.size = comm.rank, comm.size
        here = comm.Split_type(mpi.COMM_TYPE_SHARED)
        self.host_size, self.host_rank = here.size, here.rank
        self._comm, self._in_place = comm, mpi.IN_PLACE

    def all_reduce(self, buffer: np.ndarray) -> None:
        self._comm.Allreduce(self._in_place, buffer)

    def all_gather(self, part: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
        gathered = np.empty(sum(sizes), np.float32)
        self._comm.Allgatherv(np.ascontiguousarray(part), (gathered, sizes))
        return gathered

    def broadcast(self, array: np.ndarray) -> None:
        request, started = self._comm.Ibcast(array), time.perf_counter()
        while not request.Test():
            if time.perf_counter() - started > SPIN_S:
                time.sleep(SLEEP_S)

    def barrier(self) -> None:
        self._comm.Barrier()


class Session:
    """This process's place among all that `mpiexec` started, from its first use to its end."""

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # no mpi4py, or no library of an MPI
            raise BackendUnavailable(f"workers=mpi: needs mpi4py and an MPI; {installing('mpi')}") from error
        self.comm, self.broken = MPI.COMM_WORLD, False
        self.collective = MpiCollective(self.comm, MPI)
        size, rank = self.comm.size, self.comm.rank
        address = start_guard(size, reachable=self.collective.host_size < size) if rank == 0 else None
        self.member = Member(self.comm.bcast(address), rank, lambda: os._exit(WorkerDied.exit_code))

    def compile(self, spec: Spec) -> Replica:
        """Compile this rank's part; return once all have, raise CnnexpError where this rank or another could not."""
        try:
            backend = divide_threads(spec.backend, self.collective.host_size)
            replica = make_replica(spec._replace(backend=backend), self.collective)
        except CnnexpError as error:
            self.comm.allgather(str(error))
            raise
        if failed := [found for found in enumerate(self.comm.allgather("")) if found[1]]:
            replica.close()
            raise WorkerDied("worker {} of {size} could not compile: {}".format(*failed[0], size=self.comm.size))
        return replica

    def end(self) -> None:
        """Rank 0: let the others go, or if they stand in the middle of something, take them down."""
        self.member.leave(everyone=True)
        if self.broken:
            self.comm.Abort(1)
        send(self.collective, END)


session = functools.cache(Session)
"""Joins the group, at the first call; all ranks must."""


def lead() -> None:
    """Rank 0, at its start: have the others wait for work, and let them go when this process ends."""
    atexit.register(session().end)


def follow() -> None:
    """Every other rank: do what rank 0 asks until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they reach all ranks; rank 0 decides what they mean
    here = session()
    try:
        while True:
            command, arguments = receive(here.collective)
            if command == END:
                here.member.leave()
                return
            try:
                replica = here.compile(*arguments)
            except CnnexpError:
                continue  # rank 0 reports it
            serve(replica, here.collective)
    except BaseException as error:
        here.member.fail(f"{type(error).__name__}: {error}")
        sys.excepthook(*sys.exc_info())
        os._exit(1)  # an orderly end would wait for the other ranks


def group_size() -> int:
    """Return how many ranks there are; raise ConfigError where this process was not started by an MPI launcher."""
    if launched_rank() is None:
        raise ConfigError("workers=mpi: not started by MPI; run it as mpiexec -n 4 python -m cnnexp workers=mpi ...")
    return session().comm.size


def compile_mpi(spec: Spec, timeout_s: float) -> ParallelProgram:
    """Rank 0: have all ranks compile, and return the program of all of them; none may be silent for `timeout_s`."""
    started, here = time.perf_counter(), session()
    here.member.expect(timeout_s)
    send(here.collective, TRAIN, spec)
    replica = here.compile(spec)

    def release(orderly: bool) -> None:
        here.broken = here.broken or not orderly

    return ParallelProgram(spec, here.collective, replica, time.perf_counter() - started, release)
