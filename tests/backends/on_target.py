"""`cpu-simd` compiled for a CPU that this one may not be, and networks that several of its tests train."""

from dataclasses import dataclass, replace

from cnnexp.backends.simd.compiler.emit import Target
from cnnexp.backends.simd.compiler.host import host_target
from cnnexp.backends.simd.runtime.program import SimdProgram
from cnnexp.network import AvgPool2d, Conv2d, ConvStage, Flatten, Linear, MaxPool2d, ReLU, Residual, Sigmoid
from cnnexp.network.shapes import walk
from cnnexp.testing import END

HOST = host_target()
AVX2 = Target(lanes=8, registers=16, features=("avx", "avx2"))
AVX512 = Target(lanes=16, registers=32, features=("avx2", "avx512f"))
TARGETS = {
    "host": HOST,
    "sse": Target(lanes=4, registers=16),
    "neon": Target(lanes=4, registers=32),
    "avx2": Target(lanes=8, registers=16),
    "wide": Target(lanes=16, registers=32),
}
NETWORKS = {
    "first": ((8, 6, 1), (Conv2d(32, 3, padding="same"), ReLU(), MaxPool2d(2), Flatten(), Linear(5))),
    "second": ((11, 13, 2), (
        Conv2d(9, 2), ReLU(), Conv2d(17, 3), ReLU(), MaxPool2d(2), Conv2d(6, 2, 1, "full"),
        MaxPool2d(2, padding="floor"), Flatten(), Linear(19), ReLU(), Linear(4),
    )),
    "between": ((9, 9, 3), (
        Conv2d(8, 3, 2, "auto"), Sigmoid(), AvgPool2d(2, 1), ReLU(), Conv2d(5, 3), Flatten(), Linear(3, False),
    )),
    "most": ((9, 11, 2), (
        Conv2d(4, 2), ReLU(), Conv2d(17, 3, padding="same"), ReLU(), MaxPool2d(2, padding="floor"), Flatten(),
        Linear(19), ReLU(), Linear(3),
    )),
    "pair": ((9, 11, 1), (
        Conv2d(2, 2), ReLU(), Conv2d(5, 2, padding="same"), ReLU(), MaxPool2d(2, padding="floor"), *END,
    )),
    "depthwise": ((9, 8, 11), (
        Conv2d(11, 3, 2, "same", groups=11), ReLU(), Conv2d(11, 2, 1, 1, groups=11, dilation=2),
        Residual((Conv2d(13, 3, 2, "floor+1"),), "padded"), ReLU(), *END,
    )),
    "edges": ((10, 14, 2), (
        Conv2d(4, 2, 2, "same"), ReLU(), Conv2d(3, 3, 2, "full"), MaxPool2d(2, padding="floor"), *END,
    )),
    "whole image": ((8, 8, 2), (Conv2d(5, 3), Sigmoid(), MaxPool2d(2), Conv2d(17, 3), ReLU(), Sigmoid(), *END)),
    "general": ((7, 9, 2), (
        Conv2d(5, 3, 2, "auto"), Sigmoid(), AvgPool2d(3, 2, "auto"), Conv2d(3, 2, 1, "full"), MaxPool2d(2, 1),
        Flatten(), Linear(17), Sigmoid(), Linear(14),
    )),
    "sparse": ((12, 12, 1), (
        Conv2d(8, 3), ReLU(), Conv2d(6, 3), ReLU(), MaxPool2d(2, 3), Flatten(), Linear(21), ReLU(), Linear(5, False),
    )),
    "windows": ((18, 21, 1), (
        Conv2d(5, 2), ReLU(), MaxPool2d(4, padding="floor"), Conv2d(7, 2), MaxPool2d(3, padding="floor"), ReLU(), *END,
    )),
    # the sums of a weight gradient and a piece of a row do not fit L1: both go in parts
    "wide rows": ((5, 12, 1), (
        Conv2d(50, 1, padding="valid"), ReLU(), Conv2d(9, 3, padding="same"), ReLU(), Conv2d(2, 3), *END,
    )),
    "codes of more than a byte": ((17, 34, 1), (Conv2d(3, 1), ReLU(), MaxPool2d(17), *END)),
    # a first convolution: filters in the lanes, of odd numbers, kernels, steps and paddings
    **{f"filters {conv.filters} {conv.kernel} {conv.padding}": ((9, 12, {1: 5, 2: 2}.get(conv.kernel, 1)), (
        conv, ReLU(), MaxPool2d(2, padding="floor"), *END,
    )) for conv in (
        Conv2d(24, 3, 2, "floor"), Conv2d(19, 5), Conv2d(32, 3, padding=2), Conv2d(6, 3, padding="same", bias=False),
        Conv2d(32, 2), Conv2d(24, 1), Conv2d(8, 1, 2, "floor"), Conv2d(50, 3, padding=2), Conv2d(5, 2),
    )},
    # a gradient with room around and between its pixels, which a convolution before a max-pool fills
    "spread": ((9, 9, 1), (
        Conv2d(2, 2), ReLU(), Conv2d(3, 3, 2, "same"), ReLU(), Conv2d(4, 2, padding="same"), MaxPool2d(2), *END,
    )),
}  # fmt: skip
"""By what is odd in them."""


@dataclass
class OnTarget:
    """A backend for a CPU that this one may not be: LLVM splits or joins the vectors as it must."""

    target: Target = HOST
    threads: int = 2

    def compile(self, network, loss, optimizer, batch_size):
        return SimdProgram(network, loss, optimizer, batch_size, self.target, self.threads)


def forced(target, **algorithms):
    """Return the target on which layers are computed by these algorithms."""
    return replace(target, forced=tuple(algorithms.items()))


def computed(network, target, algorithm):
    """Return the target on which every convolution is computed by one algorithm."""
    names = [stage.name for stage in walk(network.stages) if isinstance(stage, ConvStage)]
    return forced(target, **dict.fromkeys(names, algorithm))
