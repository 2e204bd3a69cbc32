"""`cpu-simd`: the whole network compiled into vector kernels; the fastest backend on a CPU.

How the files stand to each other: `emit` (vector instructions) and `layout` (where values lie) at the bottom; kernels
in `transfer`, `conv_lanes`, `conv_filters`, `conv_sparse`, `linear`, `elementwise`, `update`; `nodes` groups layers and
calls their kernels, `plan` picks the nodes and connects them; `step` is the compiled training loop; `program` is what
the train loop sees, `team` its threads; `cache` keeps compiled programs on disk; `host` knows the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cnnexp.backends.cpu_simd.host import host_target
from cnnexp.backends.cpu_simd.program import SimdProgram
from cnnexp.backends.processor import cpu_name, resolve_threads
from cnnexp.losses import Loss
from cnnexp.network import Network
from cnnexp.optimizers import Optimizer


@dataclass(frozen=True)
class CpuSimd:
    """Vector kernels compiled for the whole network, on several threads.

    Attributes:
        threads: 1 to the usable cores; all of them if None.
    """

    name: ClassVar[str] = "cpu-simd"
    threads: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "threads", resolve_threads(self.threads))

    @property
    def device_name(self) -> str:
        return cpu_name()

    def compile(self, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int) -> SimdProgram:
        return SimdProgram(network, loss, optimizer, batch_size, host_target(), self.threads)
