"""What a kernel costs: cycles of one core for one image, from shapes and from what the CPU has.

A core does two multiply-adds, two loads and one store of a vector a cycle, and brings so many bytes a cycle from its
L2, fewer from beyond. A kernel takes the cycles of what it needs most of. The planner compares by these numbers, and
`explain` shows them; `python -m benchmarks.kernels` sets them beside the clock. They are estimates: nothing that a
program computes depends on them but through the algorithm that was picked, and that follows from shapes alone.
"""

import math
from dataclasses import dataclass

from cnnexp.backends.simd.algorithms.linear.product import choose_tile, covering_cycles, most_height, tile_cycles
from cnnexp.backends.simd.compiler.emit import Target, chunks

MACS, LOADS = 2, 2
"""Multiply-adds and loads of a vector in a cycle."""

L2_BYTES_PER_CYCLE, L3_BYTES_PER_CYCLE, MEMORY_BYTES_PER_CYCLE = 32, 16, 4
"""Bytes in a cycle from L2, from L3, and from memory: a Zen 3 core reads 88, 62 and 10 GB/s, beside another as many."""

L3_BYTES = 8 << 20
"""What L3 holds of a core's: past it two cores of a Zen 3 that has 32 MB for eight read at memory's speed."""

HEAVY = 8
"""How much larger than its activations parameters must be for threads to share a tile of a batch, or their update."""

STALL_FRACTION = 0.35
"""Part of the time to bring something that a kernel waits for, where it computes meanwhile."""

ROW_STALL_FRACTION = 0.1
"""Likewise of rows, which the CPU foresees: by events of 32 to 256 filters, on AVX-512 and restricted to AVX2."""

LINE_BYTES = 64

CALL_CYCLES = 30
"""Cycles to begin and end a tile: addresses, the first sums' latency, loops whose number of turns is a surprise."""

RELU_DENSITY = 0.6
"""Part of a pooled ReLU's outputs that are not 0: a middle between untrained and trained networks."""


@dataclass(frozen=True)
class Work:
    """What a kernel does for one image.

    Attributes:
        macs: multiply-adds that count. cycles: of one core. tile: what its registers hold.
    """

    macs: float = 0.0
    cycles: float = 0.0
    tile: str = ""


def bring(floats: float, working_set: float, target: Target) -> float:
    """Return the cycles to bring floats to the registers, out of so many bytes that are gone over again and again."""
    if working_set <= target.l1_bytes:
        return floats / target.lanes / LOADS
    if working_set <= target.l2_bytes:
        return 4 * floats / L2_BYTES_PER_CYCLE
    return 4 * floats / (L3_BYTES_PER_CYCLE if working_set <= L3_BYTES else MEMORY_BYTES_PER_CYCLE)


def passes(floats: float, instructions: float, target: Target, images: int = 1, streams: float = 2) -> Work:
    """Return the work of a kernel that goes over values once.

    Args:
        floats: of an image. instructions: for each vector.
        images: whose values lie between each other, or as close for caches. streams: arrays as large, read or written.
    """
    moved = bring(streams * floats, 4 * streams * floats * images, target)
    return Work(0.0, max(floats / target.lanes * instructions, moved))


def transposition(floats: float, target: Target) -> Work:
    """Return the work of turning blocks of lanes x lanes."""
    return passes(floats, math.log2(target.lanes) + 2, target, target.lanes)


def product_sums(
    counts: tuple[int, int], unit: int, outputs: int, terms: int, target: Target, finish: float = 2.5
) -> Work:
    """Return the work of a packed product: sums of `terms` products for U x V cells of `unit` rows, outputs in lanes.

    Args:
        finish: instructions that end a vector of a cell.
    """
    vectors = -(-outputs // target.lanes)
    tile = choose_tile(counts, unit, vectors, target.registers)
    cells, height = math.prod(counts), tile[0] * tile[1] * unit
    streamed = bring(tile[2] * target.lanes, 4 * terms * tile[2] * target.lanes, target)
    tiles = cells * unit / height * vectors / tile[2]
    stalled = covering_cycles(counts, unit, vectors, tile) + max(0.0, streamed - tile_cycles(height, tile[2])) * tiles
    cycles = terms * stalled + finish * cells * vectors + CALL_CYCLES * tiles
    return Work(float(cells * unit * outputs * terms), cycles, f"{height} rows x {tile[2]} vectors of outputs")


def product_gradient(
    rows: int, blocks: int, outputs: int, width: int, steps: tuple[int, int], working_set: float, target: Target
) -> Work:
    """Return the work of the weights' gradient of a packed product: rows of weights in the tile.

    Args:
        rows, blocks: of the weights; a tile does not go past a block. width: vectors of a panel.
        steps: terms of a sum, so many runs of so many.
    """
    vectors, height = -(-outputs // target.lanes), most_height(width, target.registers)
    cycles, (runs, run) = 0.0, steps
    for _, wide, times_w in chunks(vectors, width):
        for _, high, times_r in chunks(rows, most_height(wide, target.registers)):
            brought = bring(wide * target.lanes, working_set, target) + bring(high, working_set, target)
            cycles += times_w * times_r * (run * (max(tile_cycles(high, wide), brought) + 0.5) + CALL_CYCLES / 2)
    macs = float(rows * blocks * outputs * runs * run)
    return Work(macs, blocks * runs * cycles, f"{min(height, rows)} rows x {width} vectors of weights")


def lane_sums(pixels: int, filters: int, counts: int, outputs: int, terms: int, target: Target, finish: float) -> Work:
    """Return the work of sums with the batch in the lanes: a tile of pixels x filters, `terms` products each.

    Args:
        counts: cells of `pixels` pixels. finish: instructions that end a cell of a filter.
    """
    seen, weights = 4 * terms * target.lanes * (1 + (pixels - 1) / 3), 4 * terms * outputs
    late = bring(pixels * target.lanes, 2 * seen, target) if 2 * seen > target.l1_bytes else 0.0
    if seen + weights > target.l1_bytes:  # the weights of a tap lie on a line of their own, which nothing foresees
        late += 2 * bring(LINE_BYTES // 4, max(weights, target.l1_bytes + 1), target)
    cycles = 0.0
    for _, wide, times in chunks(outputs, filters):
        step = max(pixels * wide / MACS, (pixels + wide) / LOADS, 4) + STALL_FRACTION * late
        cycles += times * (terms * step + finish * wide) * counts / target.lanes
    return Work(float(counts * pixels * outputs * terms), cycles, f"{pixels} pixels x {filters} filters")


def events(cells: int, window: int, outputs: int, runs: int, run: int, times: int, held: float, target: Target) -> Work:
    """Return the work of gradients that follow the argmax: two multiply-adds, two loads and a store a vector.

    Args:
        cells, outputs: pooled ones, of each filter. window: pixels of one. runs, run: the patch's, of so many floats.
        times: how often an event is taken up, for a part of its patch each time. held: bytes of x and dx between that.
    """
    vectors = runs * -(-run // target.lanes)
    listed = listing(cells, window, outputs, target)
    late = 2 * bring(target.lanes, held, target) if held > target.l1_bytes else 0.0
    following = RELU_DENSITY * cells * outputs * ((1.2 + ROW_STALL_FRACTION * late) * vectors + 4.5 * times)
    return Work(2.0 * cells * outputs * runs * run, listed + following, f"{-(-vectors // times)} vectors of a filter")


def listing(cells: int, window: int, outputs: int, target: Target) -> float:
    """Return the cycles to list the events."""
    return cells * outputs / target.lanes * (2 * math.log2(target.lanes) + 3 * window + 8)
