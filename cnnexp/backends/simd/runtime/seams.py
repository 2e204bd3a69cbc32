"""A batch of a network whose step has seams: all its tiles through a segment, then all threads meet, and so on.

Every tile of images has an arena of its own, where its activations stay from the forward pass to the backward pass.
What crosses a seam are sums: a thread leaves those of each of its tiles, and once all are there every thread adds up
all of them in the same order. So the result does not depend on which thread did which tile. Between two seams where
nobody meets, a share's first tile stands for all of them: see `together`.
"""

from collections.abc import Callable, Sequence

import numpy as np
from llvmlite import ir
from numba import njit

from cnnexp.backends.simd.algorithms.batch_norm import AHEAD, BEFORE, FIRST, SHARE, SHARES, TILES
from cnnexp.backends.simd.compiler.compose import compose
from cnnexp.backends.simd.compiler.emit import Kernels
from cnnexp.backends.simd.compiler.entry import GRADIENTS, Call
from cnnexp.backends.simd.lowering import Plan
from cnnexp.backends.simd.runtime.barrier import wait


def cut(kernels: Kernels, after: Sequence[str]) -> tuple[list[Kernels], list[Kernels]]:
    """Return what lies between the kernels of those names, one list more than there are names, and those kernels."""
    ends = [i for i, (name, _) in enumerate(kernels) if name in after]
    starts = [0, *(end + 1 for end in ends)]
    segments = [kernels[start:end] for start, end in zip(starts, [*ends, len(kernels)], strict=True)]
    return segments, [[kernels[end]] for end in ends]


def clocking(plan: Plan, part: str) -> Callable[[np.ndarray], None]:
    """Return what charges the time since the last reading to a part of the step, or at its `start` to nobody.

    It takes an arena, and does nothing where the plan has no clocks.
    """
    if not plan.clocks.on:
        return _nothing
    emit = plan.clocks.start if part == "start" else lambda k: plan.clocks.charge(k, plan.step_parts[part])
    run = compose(part, plan.target, [(part, emit)])
    return njit(lambda arena: run(arena, arena, arena, 0))


_nothing = njit(lambda arena: None)


def make_batch(
    plan: Plan, begin: Callable, draw: Callable, finish: Callable, compiled: Callable, library: ir.Module
) -> Callable:
    """Return what takes a thread's shares of a batch through a network with seams, in training.

    Args:
        begin, draw, finish: bring in a tile's images, begin to draw, take the loss. library: see `compose`.
    """
    names = [seam.kernel for seam in plan.seams]
    (ahead, left), (back, left_back) = cut(plan.forward, names), cut(plan.backward, names)
    meets: list[Kernels] = [[("meet", seam.meet)] if seam.meet else [] for seam in plan.seams]
    all_meet, at_once = np.array([*map(len, meets), 0]), not meets[len(ahead) - 2]
    choices = [*ahead, *back, *left, *left_back, *meets, plan.gradients]
    run = compose("seamed", plan.target, [], library, choices)
    cuts, seams, images = len(ahead) - 1, len(names), plan.arena.images
    parts, meeting, gradients = 2 * cuts + 2, 2 * cuts + 2 + seams, 2 * cuts + 2 + 2 * seams
    start_clocks, charge_wait = clocking(plan, "start"), clocking(plan, "wait")

    def pass_tile(call: Call, share: int, step: int, phase: int, number: int, tile: np.ndarray, batch: int) -> None:
        """Take a tile through a segment, up to the next seam; the last one forward is also the first one back."""
        arena, gradient, known = call.arenas[number], call.gradients[share], call.counts[call.rank]
        start_clocks(arena)
        if phase == 0:
            begin(call, arena, step, tile)
        if phase == cuts:
            draw(call.numbers[step], tile, arena, len(tile), 1)
        if phase <= cuts:
            run(call.parameters, gradient, arena, known, len(tile), phase)
        if phase == cuts:
            finish(call, arena, share, tile, batch)
        if phase >= cuts:
            run(call.parameters, gradient, arena, known, len(tile), phase + 1)
        if phase < seams:
            run(call.parameters, gradient, arena, known, len(tile), parts + phase)
        elif call.mode == GRADIENTS:
            run(call.parameters, gradient, arena, known, len(tile), gradients)

    # inlined all: what a compiled function calls is optimized once more with it, and once more with its callers
    pass_tile = compiled(pass_tile, inline="always")

    def run_batch(call: Call, step: int, first: int, here: int, mine: int, next_: int) -> None:
        """Run the shares from `mine` to `next_` of the batch order[first : first + here]."""
        shares, known = call.gradients.shape[0], call.counts[call.rank]
        # how many images each tile has; tile by tile, the shares' arenas lie side by side
        known[SHARES], known[TILES] = shares, call.arenas.shape[0]
        for number in range(known[TILES]):
            share, tile = number % shares, number // shares
            size = here * (share + 1) // shares - here * share // shares
            known[FIRST + number] = max(0, min(images, size - tile * images))
        for phase in range(seams + 1):
            for turn in range(known[TILES]):
                # to and fro: what the last tiles left in the caches comes first
                number = turn if phase % 2 == 0 else known[TILES] - 1 - turn
                share, count, before = number % shares, known[FIRST + number], number // shares * images
                if at_once and phase == cuts:
                    count = 0 if before else here * (share + 1) // shares - here * share // shares
                if mine <= share < next_ and count:
                    there = number + shares if phase % 2 == 0 else number - shares
                    known[AHEAD] = (there - number) * call.arenas.shape[1] if 0 <= there < known[TILES] else 0
                    known[BEFORE], at = before, first + here * share // shares + before
                    pass_tile(call, share, step, phase, number, call.order[at : at + count], here)
            if all_meet[phase]:
                start_clocks(call.arenas[mine])
                wait(call.flags, call.rank, call.threads)
                charge_wait(call.arenas[mine])
                for share in range(mine, next_):
                    # the very first even if it has no images: by it the running averages move
                    if known[FIRST + share] or share == 0:
                        known[SHARE] = share
                        run(call.parameters, call.running, call.arenas[0], known, 0, meeting + phase)
        # what the last segment took is charged by now, tile by tile
        for share in range(mine, next_):
            start_clocks(call.arenas[share])

    return compiled(run_batch, inline="always")
