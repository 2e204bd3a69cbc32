"""Several workers train one network: processes of this machine, or MPI ranks on many.

A `workers` object stands between config and backend: its `compile` makes one `Program` of all, so the loop sees one.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from cnnexp.backends.protocol import Backend, Program
from cnnexp.errors import ConfigError
from cnnexp.measuring.environment import launched_rank
from cnnexp.system.ranges import check_fields, ranged
from cnnexp.system.registry import Registry
from cnnexp.workers.replica import Spec, divide_threads


@dataclass(frozen=True)
class Alone:
    """One worker: the backend's own program."""

    name: ClassVar[str] = "none"
    count: ClassVar[int] = 1

    def share_cores(self, backend: Backend) -> Backend:
        """Return the backend as each worker of this machine has it: its threads are divided among them."""
        return backend

    def compile(self, backend: Backend, *compiling: Any) -> Program:
        """As `Backend.compile`, whose arguments follow."""
        _refuse_idle_ranks(self.name)
        return backend.compile(*compiling)


@dataclass(frozen=True)
class _Parallel:
    """What `Local` and `Mpi` have in common; `conf/workers/<name>.yaml` explains the fields of each."""

    sync: Literal["gradients", "parameters", "hybrid"] = "gradients"
    period: int | None = ranged(None, ">= 1, or null for once an epoch")
    heartbeat_timeout_s: float = ranged(300.0, ">= 1 seconds")

    def __post_init__(self) -> None:
        check_fields(self, "workers")
        if self.period is not None and self.sync != "parameters":
            raise ConfigError(f"workers.period={self.period}: only with workers.sync=parameters, not {self.sync}")

    def _spec(self, workers: int, *compiling: Any) -> Spec:
        spec = Spec(*(*compiling, self.sync, self.period))
        if spec.batch_size < workers:
            raise ConfigError(f"trainer.batch_size={spec.batch_size}: must be >= {workers}, one image per worker")
        return spec


@dataclass(frozen=True)
class Local(_Parallel):
    """Processes of this machine, `count` of them, >= 1; one is the backend's own program."""

    name: ClassVar[str] = "local"
    count: int = ranged(2, ">= 1")

    def share_cores(self, backend: Backend) -> Backend:
        return divide_threads(backend, self.count)

    def compile(self, backend: Backend, *compiling: Any) -> Program:
        from cnnexp.workers.local import compile_local

        _refuse_idle_ranks(self.name)
        if self.count == 1:
            return backend.compile(*compiling)
        spec = self._spec(self.count, self.share_cores(backend), *compiling)
        return compile_local(spec, self.count, self.heartbeat_timeout_s)


@dataclass(frozen=True)
class Mpi(_Parallel):
    """MPI ranks, as many as `mpiexec -n` started, on this machine or many."""

    name: ClassVar[str] = "mpi"

    @property
    def count(self) -> int:
        from cnnexp.workers.mpi import group_size

        return group_size()

    def share_cores(self, backend: Backend) -> Backend:
        """As `Alone.share_cores`, for rank 0's machine; each rank does it for its own when it compiles."""
        from cnnexp.workers.mpi import session

        return divide_threads(backend, session().collective.host_size) if self.count > 1 else backend

    def compile(self, backend: Backend, *compiling: Any) -> Program:
        """As `Backend.compile`, on rank 0; the others serve (see `cnnexp.workers.mpi`)."""
        from cnnexp.workers.mpi import compile_mpi

        return compile_mpi(self._spec(self.count, backend, *compiling), self.heartbeat_timeout_s)


Workers = Alone | Local | Mpi
WORKERS: Registry[Any] = Registry("workers", {"none": Alone, "local": Local, "mpi": Mpi})


def _refuse_idle_ranks(name: str) -> None:
    from cnnexp.workers.mpi import group_size

    if launched_rank() is not None and group_size() > 1:
        raise ConfigError(f"workers={name}: but {group_size()} MPI processes were started; add workers=mpi")
