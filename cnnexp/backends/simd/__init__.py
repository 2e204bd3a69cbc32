"""`cpu-simd`: the whole network compiled into vector kernels; the fastest backend on a CPU.

Three rooms, each of which uses those before it. `compiler/`: vectors, LLVM and machine code; knows no layer.
`algorithms/`: how layers are computed, a file for each algorithm that `explain` prints, with its kernels and cost.
`runtime/`: the compiled training loop, its threads, and the program that the train loop sees. Between them stand
`layouts` (where values lie), `general` (what has no kernel), `planner` (the cheapest algorithms of a network) and
`lowering` (from them to kernels).
"""

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from cnnexp.backends import cache
from cnnexp.backends.processor import ThreadedBackend, need_compiler
from cnnexp.backends.protocol import Backend, Program
from cnnexp.backends.simd.compiler.clocks import available
from cnnexp.backends.simd.compiler.host import host_target
from cnnexp.backends.simd.runtime.program import ForwardProgram, SimdProgram, paying_threads
from cnnexp.errors import ConfigError
from cnnexp.network import Network
from cnnexp.network.losses import Loss
from cnnexp.optimizers import Optimizer


@dataclass(frozen=True)
class CpuSimd(ThreadedBackend):
    """Vector kernels compiled for the whole network, on several threads.

    Attributes:
        threads: as `ThreadedBackend`; the smallest networks train on fewer, see `paying_threads`, and where other work
            has the cores, one thread does what all would, to the same bits: see `adaptive_threads`.
        fallback: whether a run whose network kills the compiler goes on with `next_best`.
        explain: whether a run shows what was chosen for every kernel of a step, see `Program.explain`.
        algorithms: `LAYER:ALGORITHM` where a layer is not to be computed by the algorithm expected to cost least.
        clocks: whether programs clock their parts; set by `clocked` alone.
        predicts: whether programs only predict; set by `forward_only` alone.
    """

    name: ClassVar[str] = "cpu-simd"
    fallback: bool = False
    explain: bool = False
    algorithms: tuple[str, ...] = ()
    clocks: bool = field(default=False, init=False)
    predicts: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for given in self.algorithms:
            if not all(given.partition(":")):
                raise ConfigError(f"backend.algorithms={given!r}: must be LAYER:ALGORITHM, as conv1:channels")

    @property
    def clocked(self) -> Backend:
        """This backend, its programs clocking their parts: see `simd.clocks`."""
        return self._with("clocks")

    @property
    def forward_only(self) -> Backend:
        """This backend, its programs compiled for the forward pass alone."""
        return self._with("predicts")

    def _with(self, option: str) -> Backend:
        backend = copy.copy(self)
        object.__setattr__(backend, option, True)
        return backend

    def limits(self) -> Mapping[str, float]:
        """Measure the arithmetic alone, by multiply-adds in registers: a matrix product of NumPy's may be no limit."""
        from cnnexp.backends.simd.runtime.limit import fma_gflops  # for a profile alone

        return {"gflops": fma_gflops(self.thread_count)}

    @property
    def next_best(self) -> Backend | None:
        """The backend to go on with after `CompilerDied`, None where the run is to end."""
        if not self.fallback:
            return None
        from cnnexp.backends.cpu.parallel import CpuParallel  # hundreds of loops to decorate

        return CpuParallel(self.threads)

    def compile(self, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int) -> Program:
        need_compiler()
        forced = tuple(given.partition(":")[::2] for given in self.algorithms)
        clocks = self.clocks and available(cache.host()[0])
        target = dataclasses.replace(host_target(), forced=forced, clocks=clocks)
        if self.predicts:
            return ForwardProgram(network, loss, optimizer, batch_size, target, self.thread_count)
        threads = paying_threads(network, batch_size, target, self.thread_count)
        return SimdProgram(network, loss, optimizer, batch_size, target, threads)
