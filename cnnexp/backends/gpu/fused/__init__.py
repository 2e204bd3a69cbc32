"""`gpu-fused`: a whole training step in a handful of kernels, many steps in one CUDA graph."""

import copy
from dataclasses import dataclass, field
from typing import ClassVar

from cnnexp.backends.gpu import device
from cnnexp.backends.gpu.backend import GpuBackend
from cnnexp.backends.gpu.fused.program import FusedProgram
from cnnexp.backends.protocol import Backend, Program
from cnnexp.network import Network
from cnnexp.network.losses import Loss
from cnnexp.optimizers import Optimizer


@dataclass(frozen=True)
class GpuFused(GpuBackend):
    """Layers fused, data on the device, steps in CUDA graphs."""

    name: ClassVar[str] = "gpu-fused"
    graphs: bool = True  # launch many steps as one CUDA graph; without, the same kernels one by one
    clocks: bool = field(default=False, init=False)  # whether programs clock their parts; set by `clocked` alone

    @property
    def clocked(self) -> Backend:
        backend = copy.copy(self)
        object.__setattr__(backend, "clocks", True)
        return backend

    def compile(self, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int) -> Program:
        with device.on(self.gpu):
            return FusedProgram(self.gpu, network, loss, optimizer, batch_size, self.graphs, self.clocks)
