"""The roofline: how much arithmetic and how much memory traffic a layer needs, and how much of each the machine has.

A kernel cannot be faster than the machine's arithmetic, nor than its memory lets the operands through (Williams,
Waterman and Patterson 2009). Both counts follow from the shapes alone: every array is read or written once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import assert_never

import numpy as np
import threadpoolctl

from cnnexp.network import (
    ConvStage,
    DropoutStage,
    ElementwiseStage,
    FlattenStage,
    LeakyReLU,
    LinearStage,
    MaxPool2d,
    NormStage,
    PoolStage,
    ReLU,
    ResidualStage,
    Stage,
)

BYTES = 4  # of a float32, and of an argmax
FUNCTION_FLOPS = 4  # of a sigmoid: exp, add, divide, negate, an exp counting as one; others are taken for alike
ROUNDS = 3  # the best of them counts: a limit is what the machine can do


def work_per_image(stage: Stage, what: str, batch_size: int, needs_dx: bool = True) -> tuple[float, float]:
    """Return (floating-point operations, bytes) of one image's pass through one layer.

    Args:
        stage: the layer in its place.
        what: `forward` or `backward`.
        batch_size: images that share one reading of the weights.
        needs_dx: whether the backward pass computes the gradient of the layer's input: not in a network's first.
    """
    x, y = math.prod(stage.input_shape), math.prod(stage.output_shape)
    forward = what == "forward"
    match stage:
        case ConvStage() | LinearStage():
            weights = sum(p.size for p in stage.parameters) / batch_size
            size = x + y + (weights if forward else 2 * weights + (x if needs_dx else 0))
            return 2 * stage.multiply_adds(what, needs_dx), BYTES * size
        case PoolStage(layer=layer):
            argmax = y if isinstance(layer, MaxPool2d) else 0
            seen = min(stage.window.size, stage.input_shape[0]) * min(stage.window.size, stage.input_shape[1])
            return (seen * y if forward else y), BYTES * (x + y + argmax)
        case ElementwiseStage(layer=layer):
            per_element = 1 if isinstance(layer, ReLU | LeakyReLU) else FUNCTION_FLOPS
            return per_element * x, BYTES * (2 if forward else 3) * x
        case DropoutStage():
            return x, BYTES * 2 * x
        case NormStage():
            # the mean, the variance and the result, or two sums and dx: each reads x again, as caches do not hold it
            return (7 if forward else 9) * x, BYTES * (4 if forward else 7) * x
        case ResidualStage():
            return x, BYTES * 3 * x  # its sum alone: the layers in it are timed for themselves
        case FlattenStage():
            return 0, 0
        case _:
            assert_never(stage)


def fused_work(
    stages: Sequence[Stage], what: str, batch_size: int, needs_dx: bool, multiply_adds: int
) -> tuple[float, float]:
    """Return (floating-point operations, bytes) of one image's pass through layers that are computed at once.

    What lies between the layers is in no memory.

    Args:
        stages: the layers, one after another; of none, a change of layout, nothing is told.
        what, batch_size, needs_dx: as for `work_per_image`.
        multiply_adds: that the layers with weights take.
    """
    if not stages:
        return 0.0, 0.0
    x, y = math.prod(stages[0].input_shape), math.prod(stages[-1].output_shape)
    weights = sum(p.size for stage in stages for p in stage.parameters) / batch_size
    size = x + y + (weights if what == "forward" else 2 * weights + (x if needs_dx else 0))
    others = [stage for stage in stages if not isinstance(stage, ConvStage | LinearStage)]
    return 2 * multiply_adds + sum(work_per_image(stage, what, batch_size)[0] for stage in others), BYTES * size


def machine_limits(threads: int) -> dict[str, float]:
    """Measure what the machine can do: `gflops` by a matrix product, `gb_per_s` by copying an array; half a second.

    Args:
        threads: of the product; the copy has one, which most memory systems are not far from full with.
    """
    rng = np.random.default_rng(0)
    side, words = 1024, 1 << 24  # the copied array, 64 MiB, is larger than caches
    a, b = rng.random((2, side, side), np.float32)
    source, target = np.ones(words, np.float32), np.zeros(words, np.float32)
    with threadpoolctl.threadpool_limits(threads, user_api="blas"):
        product_s = _best(lambda: np.matmul(a, b))
    copy_s = _best(lambda: np.copyto(target, source))
    return {"gflops": 2e-9 * side**3 / product_s, "gb_per_s": 2e-9 * source.nbytes / copy_s}


def _best(work: Callable[[], object]) -> float:
    """Return the fewest seconds of a few calls, after one to warm up."""
    work()
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
