"""`filters`: the first convolution of a network with many filters, filters in the vector lanes, one image at a time.

Fused with ReLU and max-pool, on matrices. An image lies in its row as [row][column][channel] with its padding around
it; what one pooled cell sees is a square *patch* of it. Forward: the patch's values are broadcast once into registers
and used by every vector of filters, whose K * K * C weights are loaded once and serve all pixels of the window: 36
multiply-adds per 9 loads for 3x3 kernels and 2x2 windows. Where the registers do not hold it, two vectors share what is
read again.

Every filter has its own argmax, so for the gradient each lane needs another pixel of the patch at each tap; K * K * C
accumulators stay in registers along a row of cells, in several parts where there are more than registers. There are
three gather methods:

    permute    the pixels of a window lie within one vector of a patch. The forward pass leaves the patches in memory
               and stores, instead of the argmax, the place of the window's pixel in the patch; a tap further is the
               same permutation of what lies a tap further in memory.
    pick       on AVX2, windows of four pixels: see `argmax_codes`. What they see through each tap is left in memory.
    window     otherwise the gradient is split into one vector per pixel of the window, zero where the maximum was not,
               and each is multiplied by broadcast pixels.

There is no gradient of the input: a first layer needs none.

Filters that fill their last vector only in part are followed by filters of zeros: their weights are 0 where they lie,
and so is all that comes of them.

Gain: `one_conv` of 64 filters takes 88,883 cycles an image for all kernels, 156,150 by `channels`, 178,278 by `lanes`
(`python -m benchmarks.kernels --algorithms`, Zen 3, AVX2).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from llvmlite import ir

from cnnexp.backends.parts import BACKWARD, FOLLOWED
from cnnexp.backends.simd.algorithms import cost
from cnnexp.backends.simd.algorithms.cost import Work, passes
from cnnexp.backends.simd.algorithms.elementwise import rectify_gradient
from cnnexp.backends.simd.algorithms.node import Node, Section
from cnnexp.backends.simd.compiler import argmax_codes
from cnnexp.backends.simd.compiler.emit import FLOAT, INDEX, INT, Emitter, Kernels, Pointer, Target, Variable, chunks
from cnnexp.backends.simd.layouts import NC, Halo, Layout, padded_rows, round_up
from cnnexp.network import ConvStage, PoolStage

GatherMethod = Literal["permute", "pick", "window"]


class Filters(Node[NC, NC]):
    """Conv2d [+ ReLU] + MaxPool2d that opens a network and leads into a linear layer, filters in lanes."""

    input_layout = output_layout = NC
    whole_vectors = False
    trains = True
    stage: ConvStage
    algorithm = "filters"

    def __init__(self, stage: ConvStage, rectify: bool, pool: PoolStage) -> None:
        super().__init__(stage.name, pool.output_shape)
        self.stage, self.rectify, self.pool = stage, rectify, pool
        (height, width, channels), (top, left, bottom, right) = stage.input_shape, stage.window.pads
        self.row = (left + width + right) * channels
        self.input_room = (top + height + bottom) * self.row, top * self.row + left * channels, self.row
        self.whole = False
        """Whether a cell of the output takes whole vectors; the plan's own tensors have none between cells."""

    @classmethod
    def of(cls, sections: Sequence[Section], first: bool) -> Filters | None:
        section = sections[0]
        if not (first and isinstance(section.stage, ConvStage) and section.pool and section.flattened):
            return None
        if not section.stage.dense:
            return None
        return cls(section.stage, section.rectify, section.pool)

    def fits(self, target: Target) -> bool:
        """Whether windows are small enough for each of their pixels to be in the code."""
        layer, channels, size = self.stage.layer, self.stage.input_shape[2], self.pool.window.size
        side = patch_side(layer.kernel, layer.stride, size)
        return size <= 2 and side * side * channels <= 64

    def pitch(self, lanes: int) -> int:
        """Return the floats of a cell of the output."""
        filters = self.stage.layer.filters
        return round_up(filters, lanes) if self.whole else filters

    def may_follow(self, before: Halo | None, needs_dx: bool) -> bool:
        return before is None

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        layer, channels, size = self.stage.layer, self.stage.input_shape[2], self.pool.window.size
        cells, vectors, terms = math.prod(self.shape[:2]), -(-layer.filters // target.lanes), layer.kernel**2 * channels
        values = patch_side(layer.kernel, layer.stride, size) ** 2 * channels
        gather = choose_gather(layer.kernel, layer.stride, channels, size, target)
        wide = most_vectors(values, size, gather, target)
        # a patch that the registers do not hold is read again
        loads = terms + (terms * size**2 / wide if wide > 1 else 0)
        sums = max(terms * size**2 / cost.MACS, loads / cost.LOADS, 4) + 1.5 * size**2 + 3
        gradient = terms * size**2 / cost.MACS if gather == "window" else terms
        parts = len(gradient_parts(terms, target.registers))
        macs = cells * layer.filters * terms
        return {
            "forward": Work(
                macs * size**2, cells * (values + vectors * sums), f"{size**2} pixels x {wide} vectors of filters"
            ),
            "rectify_gradient": passes(cells * layer.filters, 2, target),
            "backward_weights": Work(
                macs, cells * vectors * (gradient + 4 * parts), f"{-(-terms // parts)} taps x 1 vector of filters"
            ),
        }

    def prepare(self, plan: Layout) -> None:
        layer, channels, size = self.stage.layer, self.stage.input_shape[2], self.pool.window.size
        images, (rows, columns, _), lanes = plan.arena.images, self.shape, plan.target.lanes
        terms, vectors = layer.kernel**2 * channels, -(-layer.filters // lanes)
        views = functools.partial(padded_rows, rows=terms, row=vectors * lanes)
        plan.parameters.place(self.stage.weight, terms * vectors * lanes, views)
        plan.parameters.place_plain(self.stage.bias)
        cells = rows * columns
        geometry = layer.kernel, layer.stride, channels, size, plan.target
        gather, room = choose_gather(*geometry), patch_room(*geometry)
        self.bank = FilterBank(
            self.x, self.row, layer.kernel, layer.stride, channels, layer.filters, vectors,
            size, self.pool.window.stride, (rows, columns), self.y, self.pitch(lanes), gather,
            plan.arena.allocate(images * cells * places_room(vectors, gather, lanes)),
            # loads reach past the last one
            plan.arena.allocate((images * cells + 1) * room),
            self.rectify,
        )  # fmt: skip

    @property
    def follows(self) -> bool:
        """Whether the backward pass follows each window's maximum and leaves out the rest."""
        return self.bank.gather != "window"

    def in_lanes(self, what: str, kernel: str) -> str:
        return "filters"

    def computed(self, what: str) -> Fraction:
        window = 1 if self.follows and what == BACKWARD else self.pool.window.size**2
        return Fraction(math.prod(self.shape[:2]) * window, math.prod(self.stage.output_shape[:2]))

    def fewer(self, what: str) -> str:
        return FOLLOWED if self.follows and what == BACKWARD else ""

    def forward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            with k.loop(self.shape[0]) as u:
                self.conv2d_row(k, plan, u)

        return [("forward", run)]

    def conv2d_row(self, k: Emitter, plan: Layout, u: ir.Value) -> None:
        conv2d_row(k, self.bank, *plan.parameters.weights(k, self.stage), u)

    def backward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            with k.loop(self.shape[0]) as u:
                self.conv2d_backward_weights_row(k, plan, u)

        kernels: Kernels = []
        if self.rectifies_dy:
            kernels.append(("rectify_gradient", lambda k: rectify_gradient(k, self.y, self.dy)))
        return [*kernels, ("backward_weights", run)]

    def conv2d_backward_weights_row(self, k: Emitter, plan: Layout, u: ir.Value) -> None:
        conv2d_backward_weights_row(k, self.bank, self.dy, *plan.parameters.gradients(k, self.stage), u)


@dataclass(frozen=True)
class FilterBank:
    """The geometry of the layer.

    Attributes:
        x: stored images. row: floats from row to row of one.
        kernel, stride, channels, filters: K, step, C, F.
        vectors: of filters.
        window, step: S and step of the max-pool, at least S.
        shape: (U, V) of the pooled output.
        y: pooled output, [u][v][filter]. pitch: its floats from v to v, F or whole vectors.
        gather: how the gradient finds the maximum's pixels.
        places: where [image][u][v][filter] lie in the arena, bytes, the place of each maximum in its patch; or the
            codes of `argmax_codes`.
        patches: where patches [image][u][v][pixel] lie, rounded up to vectors; or what four pixels see, [tap][pixel].
        rectify: whether ReLU is applied.
    """

    x: NC
    row: int
    kernel: int
    stride: int
    channels: int
    filters: int
    vectors: int
    window: int
    step: int
    shape: tuple[int, int]
    y: NC
    pitch: int
    gather: GatherMethod
    places: int
    patches: int
    rectify: bool

    @property
    def side(self) -> int:
        """Rows and columns of a patch."""
        return patch_side(self.kernel, self.stride, self.window)

    @property
    def taps(self) -> list[int]:
        """The place of every weight of a filter in a patch whose window starts at its corner."""
        return [
            (i * self.side + j) * self.channels + c
            for i in range(self.kernel)
            for j in range(self.kernel)
            for c in range(self.channels)
        ]

    @property
    def corners(self) -> list[int]:
        """The place in the patch of every pixel of the window."""
        unit = self.stride * self.channels
        return [(i * self.side + j) * unit for i in range(self.window) for j in range(self.window)]

    def corner(self, k: Emitter, n: ir.Value, u: ir.Value, v: ir.Value) -> Pointer:
        """Return the address of the first pixel that a cell sees."""
        step = self.step * self.stride
        return self.x.stored(k, n).at(u, step * self.row).at(v, step * self.channels)

    def patch(self, k: Emitter, n: ir.Value, u: ir.Value, v: ir.Value) -> Pointer:
        """Return the address of a cell's patch, where patches are kept."""
        rows, columns = self.shape
        room = patch_room(self.kernel, self.stride, self.channels, self.window, k.target)
        place = (k.arena + self.patches).at(n, rows * columns * room)
        return place.at(u, columns * room).at(v, room)

    def cell(self, k: Emitter, n: ir.Value, u: ir.Value, v: ir.Value) -> tuple[Pointer, Pointer]:
        """Return the addresses of a cell's values and of its places."""
        rows, columns = self.shape
        room = places_room(self.vectors, self.gather, k.lanes)
        places = (k.arena + self.places).at(n, rows * columns * room).at(u, columns * room).at(v, room)
        return self.y.stored(k, n).at(u, columns * self.pitch).at(v, self.pitch), places

    def last(self, lanes: int) -> int:
        """Return how many lanes of the last vector count: not all where the next cell follows at once."""
        return self.filters - (self.vectors - 1) * lanes if self.pitch == self.filters else lanes


def patch_side(kernel: int, stride: int, window: int) -> int:
    return (window - 1) * stride + kernel


def choose_gather(kernel: int, stride: int, channels: int, window: int, target: Target) -> GatherMethod:
    if argmax_codes.available(target):
        return "pick" if window**2 == argmax_codes.PIXELS else "window"
    last = (window - 1) * (patch_side(kernel, stride, window) + 1) * stride * channels
    return "permute" if target.permutes and last < target.lanes else "window"


def patch_room(kernel: int, stride: int, channels: int, window: int, target: Target) -> int:
    """Return the floats that a cell leaves for its gradient besides places, whole vectors."""
    match choose_gather(kernel, stride, channels, window, target):
        case "permute":
            return round_up(patch_side(kernel, stride, window) ** 2 * channels, target.lanes)
        case "pick":
            return round_up(argmax_codes.PIXELS * kernel**2 * channels, target.lanes)
        case "window":
            return 0


def places_room(vectors: int, gather: GatherMethod, lanes: int) -> int:
    """Return the floats that the places of a cell take."""
    return argmax_codes.words(vectors) if gather == "pick" else vectors * lanes // 4


def gradient_parts(taps: int, registers: int) -> list[tuple[int, int]]:
    """Return the first tap and the one past the last of the parts whose gradients fit the registers.

    A bias's gradient, that of y, the places, a pixel and its permutation are in registers, too.
    """
    count = -(-taps // (registers - 5))
    return [(taps * part // count, taps * (part + 1) // count) for part in range(count)]


def conv2d_row(k: Emitter, bank: FilterBank, weights: Pointer, bias: Pointer | None, u: ir.Value) -> None:
    """Fill row u of bank.y, the places and the patches. weights [tap][filter], bias [filter], in whole vectors."""
    _, columns = bank.shape
    with k.loop(k.count) as n, k.loop(columns) as v:
        # the patch of a cell: what the gradient needs of it, and every pixel in a register
        corner = bank.corner(k, n, u, v)
        _store_patch(k, bank, corner, bank.patch(k, n, u, v))
        width = bank.side * bank.channels
        pixels = [k.splat(corner + (p // width * bank.row + p % width)) for p in range(bank.side * width)]
        cell, places = bank.cell(k, n, u, v)
        most = most_vectors(bank.side**2 * bank.channels, bank.window, bank.gather, k.target)
        for first, vectors, times, valid in _blocks(bank.vectors, most, k.lanes, bank.last(k.lanes)):
            with k.loop(times) as t:
                f = k.builder.add(k.builder.mul(t, INDEX(vectors)), INDEX(first))
                column, b = weights.at(f, k.lanes), bias.at(f, k.lanes) if bias else None
                # the sums of each pixel of the window
                totals = _window_sums(k, bank, pixels, column, b, vectors)
                # the maximum, and which pixel it was
                if bank.gather == "pick":
                    found = [argmax_codes.maximum(k, values) for values in totals]
                    codes = [code for _, code in found]
                    argmax_codes.store_codes(k, codes[0], codes[-1], places.at(k.builder.udiv(f, INDEX(2))))
                else:
                    corners = [k.integers(at) for at in bank.corners]
                    found = [k.first_maximum(list(zip(values, corners, strict=True))) for values in totals]
                    for i, (_, place) in enumerate(found):
                        k.store_bytes(place, places.at(f, k.lanes // 4) + i * (k.lanes // 4))
                # ReLU, and no lane past the last filter
                for i, (value, _) in enumerate(found):
                    count = valid if i + 1 == vectors else k.lanes
                    k.store_part(k.rectify(value) if bank.rectify else value, cell.at(f, k.lanes) + i * k.lanes, count)


def _blocks(vectors: int, most: int, lanes: int, last: int) -> list[tuple[int, int, int, int]]:
    """Return (first, size, times, lanes that count of the last vector) for blocks of at most so many vectors."""
    blocks = [(*block, lanes) for block in chunks(vectors, most)]
    if last == lanes:
        return blocks
    first, size, times, _ = blocks.pop()
    before = [(first, size, times - 1, lanes)] if times > 1 else []
    return [*blocks, *before, (first + (times - 1) * size, size, 1, last)]


def most_vectors(patch: int, window: int, gather: GatherMethod, target: Target) -> int:
    """Return the vectors of filters at once: one where the registers hold a patch, else two, to read it half as often.

    Args:
        patch: values of one. window: S. gather: `argmax_codes` has two vectors' codes in a word.
    """
    return 1 if gather != "pick" and patch + window**2 + 1 <= target.registers else 2


def _window_sums(
    k: Emitter, bank: FilterBank, pixels: list[ir.Value], weights: Pointer, bias: Pointer | None, vectors: int
) -> list[list[ir.Value]]:
    """Return bias and products of some vectors of filters with a patch, [vector][pixel of the window]."""
    totals = [[k.load(bias + i * k.lanes) if bias else k.zero()] * len(bank.corners) for i in range(vectors)]
    for t, tap in enumerate(bank.taps):
        column = [k.load(weights + (t * bank.vectors + i) * k.lanes) for i in range(vectors)]
        for i, weight in enumerate(column):
            totals[i] = [
                k.fma(weight, pixels[tap + at], total) for at, total in zip(bank.corners, totals[i], strict=True)
            ]
    return totals


def _store_patch(k: Emitter, bank: FilterBank, corner: Pointer, target: Pointer) -> None:
    """Leave what the gradient needs of a patch."""
    match bank.gather:
        case "permute":
            for i, part in enumerate(_gather_patch(k, bank, corner)):
                k.store(part, target + i * k.lanes)
        case "pick":
            for i, tap in enumerate(bank.taps):
                k.store(_seen(k, bank, corner, tap), target + i * argmax_codes.PIXELS)
        case "window":
            pass


def _seen(k: Emitter, bank: FilterBank, corner: Pointer, tap: int) -> ir.Value:
    """Return what the four pixels of a window see through a tap."""
    width = bank.side * bank.channels
    places = [corner + (p // width * bank.row + p % width) for p in (tap + at for at in bank.corners)]
    if bank.corners[1] == 1:  # neighbours in memory
        above, below = (k.load(place, 2) for place in places[::2])
        lanes = [INT(i) for i in range(argmax_codes.PIXELS)]
        return k.builder.shuffle_vector(above, below, ir.Constant(ir.VectorType(INT, argmax_codes.PIXELS), lanes))
    four = ir.Constant(ir.VectorType(FLOAT, argmax_codes.PIXELS), ir.Undefined)
    for i, place in enumerate(places):
        four = k.builder.insert_element(four, k.load_float(place), INT(i))
    return four


def _gather_patch(k: Emitter, bank: FilterBank, corner: Pointer) -> list[ir.Value]:
    """Return the patch in vectors, its rows one after another; what rounds up the last one is some other pixels."""
    width, parts = bank.side * bank.channels, []
    for start in range(0, bank.side * width, k.lanes):
        first, last = start // width, min((start + k.lanes - 1) // width, bank.side - 1)
        part = k.load(corner + (first * bank.row + start - first * width))
        for i in range(first + 1, last + 1):
            begin = i * width - start
            lanes = [INT(k.lanes + lane - begin if begin <= lane < begin + width else lane) for lane in range(k.lanes)]
            part = k.builder.shuffle_vector(part, k.load(corner + i * bank.row), ir.Constant(k.indices, lanes))
        parts.append(part)
    return parts


def conv2d_backward_weights_row(
    k: Emitter, bank: FilterBank, dy: NC, dw: Pointer, db: Pointer | None, u: ir.Value
) -> None:
    """dw += pixel under each tap of each maximum of row u * dy; db += dy. dy is 0 where ReLU gave 0.

    Args:
        dy: gradient of y, or of its row u alone.
    """
    for first, _, count, valid in _blocks(bank.vectors, 1, k.lanes, bank.last(k.lanes)):
        for part in gradient_parts(len(bank.taps), k.target.registers):
            with k.loop(k.count) as n, k.loop(first + count, start=first) as f:
                _backward_part(k, bank, (dy, valid), (dw, None if part[0] else db), (n, u, f), part)


def _backward_part(
    k: Emitter,
    bank: FilterBank,
    gradient: tuple[NC, int],
    targets: tuple[Pointer, Pointer | None],
    place: tuple[ir.Value, ir.Value, ir.Value],
    part: tuple[int, int],
) -> None:
    """Add to the gradients of some taps of a vector of filters what a row of cells of an image adds.

    Args:
        gradient: dy, and how many of its lanes count. targets: dw, and db where it is to be added to.
        place: image, row u, vector. part: the first tap and the one past the last.
    """
    (dy, valid), (dw, db), (n, u, f), (first, end) = gradient, targets, place, part
    _, columns = bank.shape
    gradient_row = columns * bank.pitch if dy.size == bank.y.size else 0
    places = [dw.at(f, k.lanes) + t * bank.vectors * k.lanes for t in range(first, end)]
    if db is not None:
        places.append(db.at(f, k.lanes))
    shifts = argmax_codes.shifts(k, f) if bank.gather == "pick" else None
    # along the row of cells the sums stay in registers
    with k.sums([places]) as [totals], k.loop(columns) as v:
        value = k.load_part(dy.stored(k, n).at(u, gradient_row).at(v, bank.pitch).at(f, k.lanes), valid)
        (_, found), patch = bank.cell(k, n, u, v), bank.patch(k, n, u, v)
        taps = list(zip(range(first, end), totals, strict=False))
        # the pixel that each lane's maximum saw through a tap, by the gather method
        if shifts is not None:
            codes = argmax_codes.load_codes(k, found.at(k.builder.udiv(f, INDEX(2))), shifts)
            for t, total in taps:
                k.accumulate(total, argmax_codes.pick(k, patch + t * argmax_codes.PIXELS, codes), value)
        else:
            where = k.load_bytes(found.at(f, k.lanes // 4))
            if bank.gather == "permute":
                for t, total in taps:
                    pixel = k.permute(k.load_first(patch + bank.taps[t], bank.corners[-1] + 1), where)
                    k.accumulate(total, pixel, value)
            else:
                _accumulate_window(k, bank, bank.corner(k, n, u, v), value, where, taps)
        if db is not None:
            totals[-1].set(k.add(totals[-1].get(), value))


def _accumulate_window(
    k: Emitter, bank: FilterBank, corner: Pointer, gradient: ir.Value, place: ir.Value, taps: list[tuple[int, Variable]]
) -> None:
    """Add every pixel of the window's part to the taps' totals: the gradient where the maximum was, else 0."""
    width = bank.side * bank.channels
    for at in bank.corners:
        part = k.select(k.equal(place, at), gradient, k.zero())
        for t, total in taps:
            p = at + bank.taps[t]
            k.accumulate(total, k.splat(corner + (p // width * bank.row + p % width)), part)
