"""Matrix products on packed weights, the one kernel behind linear layers and convolutions with channels in the lanes.

y[m, f] = sum over r of x[m, r] * w[r, f]. The outputs f lie in the lanes. A register tile holds `height` rows of y
times `width` vectors of outputs; for each r it loads `width` vectors of weights, and broadcasts one x to each row's
`width` multiply-adds (Goto and van de Geijn 2008, "Anatomy of high-performance matrix multiplication"). Weights are
kept packed in *panels* [panel][r][width vectors], in the order in which a tile reads them, so they stream from a cache
and no row lies a power of two from the next; their gradient, x.T @ dy, is the same product with r in a tile's rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from cnnexp.backends.simd.compiler.emit import INDEX, LINE_FLOATS, Emitter, Pointer, Sums, chunks
from cnnexp.backends.simd.layouts import Views

Places = Sequence[int] | Sequence[ir.Value]
"""Where rows lie, in floats or in rows from the first: numbers, or known at run time."""

LATENCY = 8
"""Multiply-adds that must be in flight: two units, four cycles."""


def tile_cycles(height: int, width: int) -> float:
    """Return the cycles of one step of a register tile: two multiply-adds or two loads each, and their latency."""
    return max(height * width, height + width, LATENCY) / 2


def most_height(width: int, registers: int) -> int:
    """Return the rows of the largest tile whose sums, one row of weights and one x fit the registers."""
    return max(1, (registers - width - 1) // width)


def covering_cycles(counts: tuple[int, int], unit: int, vectors: int, tile: tuple[int, int, int]) -> float:
    """Return the cycles of one step of the sums of (U, V) cells of `unit` rows each times all vectors, by tiles.

    Args:
        tile: rows, columns and vectors of one; see `choose_tile`.
    """
    rows, columns, width = tile
    return sum(
        times_u * times_v * times_w * (tile_cycles(u * v * unit, w) + 0.5)
        for _, u, times_u in chunks(counts[0], rows)
        for _, v, times_v in chunks(counts[1], columns)
        for _, w, times_w in chunks(vectors, width)
    )


@functools.cache
def choose_tile(counts: tuple[int, int], unit: int, vectors: int, registers: int) -> tuple[int, int, int]:
    """Return the tile (rows, columns, width in vectors) that covers (U, V) cells with the fewest cycles.

    Args:
        counts: U, V. unit: rows of the product that each cell takes. vectors: of outputs.
    """
    shapes = [(1, 1, 1)]
    for width in range(1, min(vectors, 6) + 1):
        most = most_height(width, registers) // unit
        shapes += [(u, v, width) for u in range(1, counts[0] + 1) for v in range(1, counts[1] + 1) if u * v <= most]
    return min(shapes, key=lambda tile: covering_cycles(counts, unit, vectors, tile))


@dataclass(frozen=True)
class Panels:
    """Where the weights (R, F) lie, packed.

    Attributes:
        rows: R or more. outputs: F. width: vectors of a panel; the last one may have fewer. lanes: floats per vector.
    """

    rows: int
    outputs: int
    width: int
    lanes: int

    @property
    def vectors(self) -> int:
        return -(-self.outputs // self.lanes)

    @property
    def size(self) -> int:
        """Floats in all."""
        return self.rows * self.vectors * self.lanes

    @property
    def kinds(self) -> list[tuple[int, int, int]]:
        """Panels of the same code: (first vector, vectors, number); one whose last vector is not full stands alone."""
        kinds = chunks(self.vectors, self.width)
        first, size, times = kinds[-1]
        if self.outputs % self.lanes and times > 1:
            kinds[-1:] = [(first, size, times - 1), (first + size * (times - 1), size, 1)]
        return kinds

    def views(self, flat: np.ndarray, packed: np.ndarray) -> Views:
        """Return where weights lie, see `Parameters.place`."""
        found, rows = [], flat.reshape(-1, self.outputs)
        for first, width, times in self.kinds:
            start, stop = first * self.lanes, (first + width * times) * self.lanes
            # an output's lanes may go past the last one in a panel that stands alone
            ours = rows[:, start:stop].reshape(len(rows), times, -1).swapaxes(0, 1)
            theirs = packed[start * self.rows : stop * self.rows].reshape(times, self.rows, -1)
            found.append((ours, theirs[:, : len(rows), : ours.shape[2]]))
        return found

    def valid(self, first: int, width: int, times: int) -> list[int]:
        """Return how many lanes of each vector of a panel, the last of its kind, hold outputs."""
        return [min(self.lanes, self.outputs - (first + (times - 1) * width + v) * self.lanes) for v in range(width)]

    def each(self, k: Emitter, parts: int = 1) -> Iterator[Panel]:
        """Run what follows for every panel; parts as for `Emitter.turns`."""
        for (first, width, times), (_, _, *turns) in zip(self.kinds, k.turns(self.kinds, parts), strict=True):
            with k.loop(*turns) as t:
                yield Panel(self, k.scaled(t, width, first), width, self.valid(first, width, times))


@dataclass(frozen=True)
class Panel:
    """Some panel at run time.

    Attributes:
        panels: of which it is one. vector: the number of its first vector. width: vectors.
        valid: lanes of each vector that hold outputs.
    """

    panels: Panels
    vector: ir.Value
    width: int
    valid: list[int]

    @property
    def unit(self) -> int:
        """Floats of a row of its weights."""
        return self.width * self.panels.lanes

    def chunks(self, k: Emitter, rows: int, listed: Listed | None) -> Iterator[tuple[ir.Value, Places]]:
        """Run what follows for as many of so many rows as the registers hold the sums of: see `rows_of`."""
        for first, height, times in chunks(rows, most_height(self.width, k.target.registers)):
            with k.loop(listed.chunks(k, first, height, times) if listed else times) as t:
                yield rows_of(k, k.scaled(t, height, first), height, listed)

    def at(self, weights: Pointer) -> Pointer:
        """Return the address of its weights."""
        return weights.at(self.vector, self.panels.rows * self.panels.lanes)

    def outputs(self, pointer: Pointer) -> Pointer:
        """Return the address of its first output, from that of the first of all."""
        return pointer.at(self.vector, self.panels.lanes)


@dataclass(frozen=True)
class Listed:
    """The numbers of rows, int32.

    Attributes:
        place: where they lie. count: how many of the first ones have products.
    """

    place: Pointer
    count: ir.Value

    def chunks(self, k: Emitter, first: int, height: int, times: int) -> ir.Value:
        """Return how many of some chunks have products: those that begin before `count`."""
        begun = k.builder.sdiv(k.builder.add(self.count, INDEX(height - 1 - first)), INDEX(height))
        return k.largest(k.least(begun, INDEX(times)), INDEX(0))


def rows_of(k: Emitter, first: ir.Value, height: int, listed: Listed | None) -> tuple[ir.Value, Places]:
    """Return a row, and how far behind it are those that lie from the first one on, or that are listed from there."""
    if listed is None:
        return first, range(height)
    return INDEX(0), [k.load_index(listed.place.at(first) + i) for i in range(height)]


@dataclass(frozen=True)
class Steps:
    """The steps of a sum: `rows` runs of `run`, each a number or known at run time.

    Attributes:
        x: floats of x from run to run, and from step to step. w: likewise of w.
        vector_stride: floats from vector to vector of w; None for a vector's.
        ahead: steps after which the w that is brought to L1 meanwhile is read; none is if 0.
        listed: of the steps of a run, int32, where not all are taken.
    """

    rows: int | ir.Value
    run: int | ir.Value
    x: tuple[int, int]
    w: tuple[int, int]
    vector_stride: int | None = None
    ahead: int = 0
    listed: Pointer | None = None


def add_products(
    k: Emitter, totals: Sums, x: Pointer, places: Places, w: Pointer, steps: Steps, valid: Sequence[int] = ()
) -> None:
    """totals[m][v] += the sum over the steps of x at places[m] times vector v of w, or its `valid[v]` first lanes."""
    vector_stride, valid = steps.vector_stride or k.lanes, valid or [k.lanes] * len(totals[0])
    x, w, listed = k.opaque(x), k.opaque(w), steps.listed

    def step(turn: ir.Value) -> ir.Value:
        return k.load_index(listed.at(turn)) if listed else turn

    with k.loop(steps.rows) as i:
        source, weights = x.at(i, steps.x[0]), w.at(i, steps.w[0])
        with k.loop(steps.run) as turn:
            r = step(turn)
            here, there = source.at(r, steps.x[1]), weights.at(r, steps.w[1])
            if listed:  # else LLVM makes one register of both, and spills sums
                here = k.opaque(here)
            row = [k.load_part(there + v * vector_stride, lanes) for v, lanes in enumerate(valid)]
            if steps.ahead:
                later = weights.at(step(k.builder.add(turn, INDEX(steps.ahead))), steps.w[1])
                for line in range(0, len(row) * k.lanes, LINE_FLOATS):
                    k.prefetch(later + line)
            for place, sums in zip(places, totals, strict=True):
                value = k.splat(here.at(place))
                for total, weight in zip(sums, row, strict=True):
                    k.accumulate(total, value, weight)
