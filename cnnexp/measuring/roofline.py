"""The roofline: how much arithmetic and how much memory traffic a layer needs, and how much of each the machine has.

A kernel cannot be faster than the machine's arithmetic, nor than its memory lets the operands through (Williams,
Waterman and Patterson 2009). Both counts follow from the shapes alone: every array is read or written once.
"""

import math
import timeit
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import assert_never

import numpy as np
import threadpoolctl

from cnnexp import network
from cnnexp.system import cores

BYTES = 4  # of a float32, and of an argmax
FUNCTION_FLOPS = 4  # of a sigmoid: exp, add, divide, negate, an exp counting as one; others are taken for alike
LEVELS = 1, 2, 3  # of caches
MEMORY_BYTES = 1 << 27  # more than caches hold, of all threads together
TRAFFIC_BYTES = 1 << 28  # of a round and thread: milliseconds, so that waking a thread is little of it
ROUNDS = 3  # the best of them counts: a limit is what the machine can do


def work_per_image(stage: network.Stage, what: str, batch_size: int, needs_dx: bool = True) -> tuple[float, float]:
    """Return (floating-point operations, bytes) of one image's pass, `forward` or `backward`, through one layer.

    The images of a batch share one reading of the weights. `needs_dx` says whether the backward pass computes the
    gradient of the layer's input: not in a network's first.
    """
    x, y = math.prod(stage.input_shape), math.prod(stage.output_shape)
    forward = what == "forward"
    match stage:
        case network.ConvStage() | network.LinearStage():
            return fused_work([stage], what, batch_size, needs_dx, stage.multiply_adds(what, needs_dx))
        case network.PoolStage(layer=layer):
            argmax = y if isinstance(layer, network.MaxPool2d) else 0
            seen = min(stage.window.size, stage.input_shape[0]) * min(stage.window.size, stage.input_shape[1])
            return (seen * y if forward else y), BYTES * (x + y + argmax)
        case network.ElementwiseStage(layer=layer):
            per_element = 1 if isinstance(layer, network.ReLU | network.LeakyReLU) else FUNCTION_FLOPS
            return per_element * x, BYTES * (2 if forward else 3) * x
        case network.DropoutStage():
            return x, BYTES * 2 * x
        case network.NormStage():
            # the mean, the variance and the result, or two sums and dx: each reads x again, as caches do not hold it
            return (7 if forward else 9) * x, BYTES * (4 if forward else 7) * x
        case network.ResidualStage():
            return x, BYTES * 3 * x  # its sum alone: the layers in it are timed for themselves
        case network.StructuralStage():
            return x + y, BYTES * (1 if forward else 2) * (x + y)  # at least; what it does nobody else knows
        case network.FlattenStage():
            return 0, 0
        case _:
            assert_never(stage)


def fused_work(
    stages: Sequence[network.Stage], what: str, batch_size: int, needs_dx: bool, multiply_adds: int
) -> tuple[float, float]:
    """Return (floating-point operations, bytes) of one image's pass through layers that are computed at once.

    They stand one after another; of none, a change of layout, there is no point. What lies between is in no memory.
    Those with weights take so many multiply-adds; the other arguments are as for `work_per_image`.
    """
    if not stages:
        return 0.0, 0.0
    x, y = math.prod(stages[0].input_shape), math.prod(stages[-1].output_shape)
    weights = sum(p.size for stage in stages for p in stage.parameters) / batch_size
    size = x + y + (weights if what == "forward" else 2 * weights + (x if needs_dx else 0))
    others = [stage for stage in stages if not isinstance(stage, network.ConvStage | network.LinearStage)]
    return 2 * multiply_adds + sum(work_per_image(stage, what, batch_size)[0] for stage in others), BYTES * size


def machine_limits(threads: int) -> dict[str, float]:
    """Measure what the machine can do, in a second: a matrix product, and maxima of arrays that each cache just holds.

    By `threads` at once: `gflops`, `gb_per_s` of memory, and `<cache>_gb_per_s` (l1, l2, l3) of caches of known size.
    """
    rng, side = np.random.default_rng(0), 1024
    a, b = rng.random((2, side, side), np.float32)
    with threadpoolctl.threadpool_limits(threads, user_api="blas"):
        product_s = _best(lambda: np.matmul(a, b))
    l1, l2, l3 = (cores.cache_sizes(cores.CACHES).get(level, 0) for level in LEVELS)
    worked_on = {
        "gb_per_s": max(MEMORY_BYTES, 4 * l3) // threads,
        "l3_gb_per_s": l3 // threads // 4 if l3 // threads > 8 * l2 else 0,  # else hardly more than the second holds
        "l2_gb_per_s": l2 * 3 // 4,
        "l1_gb_per_s": l1 * 3 // 4,
    }
    bandwidths = {name: _gb_per_s(size, threads) for name, size in worked_on.items() if size}
    return {"gflops": 2e-9 * side**3 / product_s, **bandwidths}


def roofs(limits: Mapping[str, float]) -> dict[str, float]:
    """Return the bandwidths of `machine_limits` in GB/s by where the bytes are, the farthest from the core first."""
    named = {"memory": "gb_per_s", **{f"L{level} cache": f"l{level}_gb_per_s" for level in reversed(LEVELS)}}
    return {name: limits[key] for name, key in named.items() if key in limits}


def _gb_per_s(size: int, threads: int) -> float:
    """Return the bandwidth at which threads go over `size` bytes each: two arrays, one read, one read and written."""
    words = size // (2 * BYTES)
    repeats = max(1, TRAFFIC_BYTES // (3 * BYTES * words))
    # one array over and over, in one call: what NumPy does before and after it takes longer than a first cache's pass
    once = [np.ones((1, words), np.float32) for _ in range(threads)]
    arrays = [(np.broadcast_to(array, (repeats, words)), np.zeros(words, np.float32)) for array in once]
    with ThreadPoolExecutor(threads) as pool:
        seconds = _best(lambda: list(pool.map(lambda pair: np.maximum.reduce(pair[0], axis=0, out=pair[1]), arrays)))
    return threads * repeats * words * 3e-9 * BYTES / seconds


def _best(work: Callable[[], object]) -> float:
    """Return the fewest seconds of a few calls, after one to warm up."""
    work()
    return min(timeit.repeat(work, number=1, repeat=ROUNDS))
