"""Threads that do one task together, and stay whole when the caller is interrupted."""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from cnnexp.system.cores import Cores

Task = Callable[[int], None]
Member = tuple[threading.Thread, SimpleQueue]
"""A thread, and where it finds what to do; None ends it."""


class ThreadPool:
    """Threads that wait for tasks; they start with the first one.

    The members of a task wait for each other inside it, so a task must begin on all or none. Ctrl-C may strike the
    caller between any two of its instructions; therefore it only hands the task to a leader, in one, and waits. The
    leader, which no signal reaches, is rank 0 and sends for the others. An interrupted caller leaves the task to end by
    itself; what comes after it waits its turn.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._tasks: SimpleQueue | None = None
        self._is_left = False  # an interrupted call may have left a task to end by itself

    def run(self, task: Task, threads: int | None = None) -> None:
        """Call task(rank) on every thread, or on the first so many, at once, and wait for all.

        What one raises, the lowest rank first, goes on.

        A thread that the others wait for inside the task must not raise: they would wait for ever.
        """
        if self._tasks is None:
            tasks: SimpleQueue = SimpleQueue()
            threading.Thread(target=_lead, args=(tasks, self._threads), name="cpu-simd-0", daemon=True).start()
            self._tasks = tasks
        done: SimpleQueue = SimpleQueue()
        self._is_left = True
        self._tasks.put((task, threads or self._threads, done))
        failure = done.get()
        self._is_left = False
        if failure is not None:
            raise failure

    def drain(self) -> None:
        """Wait for what an interrupted `run` left."""
        if self._is_left:
            self.run(lambda rank: None)

    def close(self) -> None:
        """End the threads. Idempotent; a later `run` starts new ones."""
        if self._tasks is not None:
            self._tasks.put((None, self._threads, None))
            self._tasks = None


class Helpers:
    """Threads that run a task each when woken, and are never waited for. They start when the first one is woken.

    A task and who wakes it share data themselves.

    Args:
        tasks: of rank 1 and above.
    """

    def __init__(self, tasks: Sequence[Callable[[], object]]) -> None:
        self._tasks, self._members, self._cores = tasks, list[Member](), Cores()

    def wake(self, rank: int) -> None:
        """Have a thread do its task, once more if it is at it."""
        if not self._members:
            self._members = [_start(i, _help, self._cores, task) for i, task in enumerate(self._tasks, 1)]
        thread, inbox = self._members[rank - 1]
        self._cores.place(rank, thread)
        inbox.put(True)

    def close(self) -> None:
        """End the threads. Idempotent; a later `wake` starts new ones."""
        members, self._members = self._members, []
        for _, inbox in members:
            inbox.put(None)


def _start(rank: int, work: Callable[..., None], *more: object) -> Member:
    inbox: SimpleQueue = SimpleQueue()
    thread = threading.Thread(target=work, args=(rank, inbox, *more), name=f"cpu-simd-{rank}", daemon=True)
    thread.start()
    return thread, inbox


def _help(rank: int, inbox: SimpleQueue, cores: Cores, task: Callable[[], object]) -> None:
    while inbox.get():
        cores.take(rank)
        task()


def _lead(tasks: SimpleQueue, threads: int) -> None:
    """Take tasks and do each together with the other threads, until there is None."""
    cores, finished = Cores(), SimpleQueue[tuple[int, BaseException | None]]()
    followers = [_start(rank, _follow, cores, finished) for rank in range(1, threads)]
    while True:
        task, working, done = tasks.get()
        for rank, (thread, inbox) in enumerate(followers[: working - 1], 1):
            cores.place(rank, thread)  # each on a core of its own
            inbox.put(task)
        if task is None:
            return
        failures = {0: _attempt(task, 0), **dict(finished.get() for _ in range(1, working))}
        del task  # what it refers to may go before the next one comes
        done.put(next((failures[rank] for rank in sorted(failures) if failures[rank] is not None), None))


def _follow(rank: int, inbox: SimpleQueue, cores: Cores, finished: SimpleQueue) -> None:
    while (task := inbox.get()) is not None:
        cores.take(rank)
        failure = _attempt(task, rank)
        del task
        finished.put((rank, failure))


def _attempt(task: Task, rank: int) -> BaseException | None:
    """Do a task; return what it raises, which the thread that asked for the task shall have."""
    try:
        task(rank)
    except BaseException as failure:
        return failure
    return None
