"""`cpu-simd`: the whole network compiled into vector kernels; the fastest backend on a CPU.

How the files stand to each other: `intrinsics` (what only some CPUs have), `emit` (vector instructions), `trace`
(rules in them) and `layout` (where values lie) at the bottom; kernels in `transfer`, `conv_lanes`, `conv_filters`,
`picks`, `conv_sparse` and `conv_pair` on `event_lists`, `conv_events`, `elementwise`, `update`, and on `product`,
packed matrix products, `conv_channels`, `conv_winograd` and `linear`; `nodes` and those in `convolutions`, `winograd`,
`pair` and `dense` are layers that are computed at once, `cost` says what their kernels cost, `ways` chooses among them
and `plan` connects them. `step` is the training loop as Numba compiles it, with `barrier`, where its threads wait for
each other, `clocks`, what it tells of its parts, and `compose`, its kernels. `entry` says how it is called, `native`
calls it without Numba and `apart` has it compiled, in a process of its own. `program` is what the train loop sees,
`team` its threads, `crew` how many of them work now; `host` knows the CPU and `limit` how fast it multiplies.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, cast

from cnnexp.backends import cache
from cnnexp.backends.processor import ThreadedBackend, need_compiler
from cnnexp.backends.protocol import Backend, Program
from cnnexp.backends.simd.compiler.clocks import available
from cnnexp.backends.simd.compiler.host import host_target
from cnnexp.backends.simd.planner import suits
from cnnexp.backends.simd.runtime.program import SimdProgram, paying_threads
from cnnexp.errors import ConfigError
from cnnexp.network import Network
from cnnexp.network.losses import Loss
from cnnexp.optimizers import Optimizer


@dataclass(frozen=True)
class CpuSimd(ThreadedBackend):
    """Vector kernels compiled for the whole network, on several threads.

    A network with a layer that has no vector kernel is compiled as `cpu-parallel` does.

    Attributes:
        threads: as `ThreadedBackend`; the smallest networks train on fewer, see `paying_threads`, and where other work
            has the cores, one thread does what all would, to the same bits: see `crew`.
        fallback: whether a run whose network kills the compiler goes on with `next_best`.
        explain: whether a run shows what was chosen for every kernel of a step, as `Program.explain` tells it.
        ways: `LAYER:WAY` where a layer is not to be computed in the way that is expected to cost least; see `ways`.
        clocks: whether programs clock their parts; set by `clocked` alone.
    """

    name: ClassVar[str] = "cpu-simd"
    fallback: bool = False
    explain: bool = False
    ways: tuple[str, ...] = ()
    clocks: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for given in self.ways:
            if not all(given.partition(":")):
                raise ConfigError(f"backend.ways={given!r}: must be LAYER:WAY, as conv1:channels")

    @property
    def clocked(self) -> Backend:
        """This backend, its programs clocking their parts: see `simd.clocks`."""
        backend = copy.copy(self)
        object.__setattr__(backend, "clocks", True)
        return cast(Backend, backend)

    def limits(self) -> Mapping[str, float]:
        """Measure the arithmetic alone, by multiply-adds in registers: a matrix product of NumPy's may be no limit."""
        from cnnexp.backends.simd.runtime.limit import fma_gflops  # for a profile alone

        return {"gflops": fma_gflops(self.thread_count)}

    @property
    def next_best(self) -> Backend | None:
        """The backend to go on with after `CompilerDied`, None where the run is to end."""
        return self._general if self.fallback else None

    @property
    def _general(self) -> Backend:
        from cnnexp.backends.cpu.parallel import CpuParallel  # hundreds of loops to decorate

        return cast(Backend, CpuParallel(self.threads))

    def compile(self, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int) -> Program:
        need_compiler()
        if not suits(network):
            return self._general.compile(network, loss, optimizer, batch_size)
        forced = tuple((layer, way) for layer, _, way in (given.partition(":") for given in self.ways))
        clocks = self.clocks and available(cache.host()[0])
        target = dataclasses.replace(host_target(), forced=forced, clocks=clocks)
        threads = paying_threads(network, batch_size, target, self.thread_count)
        return SimdProgram(network, loss, optimizer, batch_size, target, threads)
