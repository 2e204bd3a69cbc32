"""The first convolution of a network with many filters: filters in the vector lanes, one image at a time.

Fused with ReLU and max-pool, on matrices. An image lies in its row as [row][column][channel] with its padding around
it; what one pooled cell sees is a square *patch* of it. Forward: the patch's values are broadcast once into registers
and used by every vector of filters, whose K * K * C weights are loaded once and serve all pixels of the window: 36
multiply-adds per 9 loads for 3x3 kernels and 2x2 windows. Where the registers do not hold it, two vectors share what is
read again.

Every filter has its own argmax, so for the gradient each lane needs another pixel of the patch at each tap; K * K * C
accumulators stay in registers along a row of cells. There are three manners:

    permute    the pixels of a window lie within one vector of a patch. The forward pass leaves the patches in memory
               and stores, instead of the argmax, the place of the window's pixel in the patch; a tap further is the
               same permutation of what lies a tap further in memory.
    pick       on AVX2, windows of four pixels: see `picks`. What the four see through each tap is left in memory.
    window     otherwise the gradient is split into one vector per pixel of the window, zero where the maximum was not,
               and each is multiplied by broadcast pixels.

There is no gradient of the input: a first layer needs none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llvmlite import ir

from cnnexp.backends.simd import picks
from cnnexp.backends.simd.emit import FLOAT, INDEX, INT, Emitter, Pointer, Target, Variable
from cnnexp.backends.simd.layout import Matrix, round_up
from cnnexp.backends.simd.product import chunks

Manner = Literal["permute", "pick", "window"]


@dataclass(frozen=True)
class FilterBank:
    """The geometry of the layer.

    Attributes:
        x: stored images. row: floats from row to row of one.
        kernel, stride, channels, filters: K, step, C, F; F is a multiple of the lanes.
        window, step: S and step of the max-pool, at least S.
        shape: (U, V) of the pooled output.
        y: pooled output, [u][v][filter].
        manner: how the gradient finds the maximum's pixels.
        places: where [image][u][v][filter] lie in the arena, bytes, the place of each maximum in its patch; or the
            codes of `picks`.
        patches: where patches [image][u][v][pixel] lie, rounded up to vectors; or what four pixels see, [tap][pixel].
        rectify: whether ReLU is applied.
    """

    x: Matrix
    row: int
    kernel: int
    stride: int
    channels: int
    filters: int
    window: int
    step: int
    shape: tuple[int, int]
    y: Matrix
    manner: Manner
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
        return self.x.row(k, n).at(u, step * self.row).at(v, step * self.channels)

    def patch(self, k: Emitter, n: ir.Value, u: ir.Value, v: ir.Value) -> Pointer:
        """Return the address of a cell's patch, where patches are kept."""
        rows, columns = self.shape
        room = patch_room(self.kernel, self.stride, self.channels, self.window, k.target)
        place = (k.arena + self.patches).at(n, rows * columns * room)
        return place.at(u, columns * room).at(v, room)

    def cell(self, k: Emitter, n: ir.Value, u: ir.Value, v: ir.Value) -> tuple[Pointer, Pointer]:
        """Return the addresses of a cell's values and of its places."""
        rows, columns = self.shape
        room = places_room(self.filters, self.manner, k.lanes)
        places = (k.arena + self.places).at(n, rows * columns * room).at(u, columns * room).at(v, room)
        return self.y.row(k, n).at(u, columns * self.filters).at(v, self.filters), places


def patch_side(kernel: int, stride: int, window: int) -> int:
    return (window - 1) * stride + kernel


def choose_manner(kernel: int, stride: int, channels: int, window: int, target: Target) -> Manner:
    if picks.available(target):
        return "pick" if window**2 == picks.PIXELS else "window"
    last = (window - 1) * (patch_side(kernel, stride, window) + 1) * stride * channels
    return "permute" if target.permutes and last < target.lanes else "window"


def patch_room(kernel: int, stride: int, channels: int, window: int, target: Target) -> int:
    """Return the floats that a cell leaves for its gradient besides places, whole vectors."""
    match choose_manner(kernel, stride, channels, window, target):
        case "permute":
            return round_up(patch_side(kernel, stride, window) ** 2 * channels, target.lanes)
        case "pick":
            return round_up(picks.PIXELS * kernel**2 * channels, target.lanes)
        case "window":
            return 0


def places_room(filters: int, manner: Manner, lanes: int) -> int:
    """Return the floats that the places of a cell take."""
    return picks.words(filters // lanes) if manner == "pick" else filters // 4


def conv2d_row(k: Emitter, bank: FilterBank, weights: Pointer, bias: Pointer | None, u: ir.Value) -> None:
    """Fill row u of bank.y, the places and the patches. weights (K, K, C, F), bias (F,)."""
    _, columns = bank.shape
    with k.loop(k.count) as n, k.loop(columns) as v:
        corner = bank.corner(k, n, u, v)
        _store_patch(k, bank, corner, bank.patch(k, n, u, v))
        width = bank.side * bank.channels
        pixels = [k.splat(corner + (p // width * bank.row + p % width)) for p in range(bank.side * width)]
        cell, places = bank.cell(k, n, u, v)
        most = most_vectors(bank.side**2 * bank.channels, bank.window, bank.manner, k.target)
        for first, vectors, times in chunks(bank.filters // k.lanes, most):
            with k.loop(times) as t:
                f = k.builder.add(k.builder.mul(t, INDEX(vectors)), INDEX(first))
                column, b = weights.at(f, k.lanes), bias.at(f, k.lanes) if bias else None
                totals = _window_sums(k, bank, pixels, column, b, vectors)
                if bank.manner == "pick":
                    found = [picks.maximum(k, values) for values in totals]
                    codes = [code for _, code in found]
                    picks.store_codes(k, codes[0], codes[-1], places.at(k.builder.udiv(f, INDEX(2))))
                else:
                    corners = [k.integers(at) for at in bank.corners]
                    found = [k.first_maximum(list(zip(values, corners, strict=True))) for values in totals]
                    for i, (_, place) in enumerate(found):
                        k.store_bytes(place, places.at(f, k.lanes // 4) + i * (k.lanes // 4))
                for i, (value, _) in enumerate(found):
                    k.store(k.rectify(value) if bank.rectify else value, cell.at(f, k.lanes) + i * k.lanes)


def most_vectors(patch: int, window: int, manner: Manner, target: Target) -> int:
    """Return the vectors of filters at once: one where the registers hold a patch, else two, to read it half as often.

    Args:
        patch: values of one. window: S. manner: `picks` has two vectors' codes in a word.
    """
    return 1 if manner != "pick" and patch + window**2 + 1 <= target.registers else 2


def _window_sums(
    k: Emitter, bank: FilterBank, pixels: list[ir.Value], weights: Pointer, bias: Pointer | None, vectors: int
) -> list[list[ir.Value]]:
    """Return bias and products of some vectors of filters with a patch, [vector][pixel of the window]."""
    totals = [[k.load(bias + i * k.lanes) if bias else k.zero()] * len(bank.corners) for i in range(vectors)]
    for t, tap in enumerate(bank.taps):
        column = [k.load(weights + (t * bank.filters + i * k.lanes)) for i in range(vectors)]
        for i, weight in enumerate(column):
            totals[i] = [
                k.fma(weight, pixels[tap + at], total) for at, total in zip(bank.corners, totals[i], strict=True)
            ]
    return totals


def _store_patch(k: Emitter, bank: FilterBank, corner: Pointer, target: Pointer) -> None:
    """Leave what the gradient needs of a patch."""
    match bank.manner:
        case "permute":
            for i, part in enumerate(_gather_patch(k, bank, corner)):
                k.store(part, target + i * k.lanes)
        case "pick":
            for i, tap in enumerate(bank.taps):
                k.store(_seen(k, bank, corner, tap), target + i * picks.PIXELS)
        case "window":
            pass


def _seen(k: Emitter, bank: FilterBank, corner: Pointer, tap: int) -> ir.Value:
    """Return what the four pixels of a window see through a tap."""
    width = bank.side * bank.channels
    places = [corner + (p // width * bank.row + p % width) for p in (tap + at for at in bank.corners)]
    if bank.corners[1] == 1:  # neighbours in memory
        above, below = (k.load(place, 2) for place in places[::2])
        lanes = [INT(i) for i in range(picks.PIXELS)]
        return k.builder.shuffle_vector(above, below, ir.Constant(ir.VectorType(INT, picks.PIXELS), lanes))
    four = ir.Constant(ir.VectorType(FLOAT, picks.PIXELS), ir.Undefined)
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
    k: Emitter, bank: FilterBank, dy: Matrix, dw: Pointer, db: Pointer | None, u: ir.Value
) -> None:
    """dw += pixel under each tap of each maximum of row u * dy; db += dy. dy is 0 where ReLU gave 0.

    Args:
        dy: gradient of y, or of its row u alone.
    """
    _, columns = bank.shape
    taps = bank.taps
    gradient_row = columns * bank.filters if dy.size == bank.y.size else 0
    with k.loop(k.count) as n, k.loop(bank.filters // k.lanes) as f:
        targets = [dw.at(f, k.lanes) + t * bank.filters for t in range(len(taps))]
        if db is not None:
            targets.append(db.at(f, k.lanes))
        totals = [k.variable(k.load(target)) for target in targets]
        shifts = picks.shifts(k, f) if bank.manner == "pick" else None
        with k.loop(columns) as v:
            gradient = k.load(dy.row(k, n).at(u, gradient_row).at(v, bank.filters).at(f, k.lanes))
            (_, places), patch = bank.cell(k, n, u, v), bank.patch(k, n, u, v)
            if shifts is not None:
                codes = picks.load_codes(k, places.at(k.builder.udiv(f, INDEX(2))), shifts)
                for i, total in enumerate(totals[: len(taps)]):
                    k.accumulate(total, picks.pick(k, patch + i * picks.PIXELS, codes), gradient)
            else:
                place = k.load_bytes(places.at(f, k.lanes // 4))
                if bank.manner == "permute":
                    for tap, total in zip(taps, totals, strict=False):
                        pixel = k.permute(k.load_first(patch + tap, bank.corners[-1] + 1), place)
                        k.accumulate(total, pixel, gradient)
                else:
                    _accumulate_window(k, bank, bank.corner(k, n, u, v), gradient, place, totals)
            if db is not None:
                totals[-1].set(k.add(totals[-1].get(), gradient))
        for total, target in zip(totals, targets, strict=True):
            k.store(total.get(), target)


def _accumulate_window(
    k: Emitter, bank: FilterBank, corner: Pointer, gradient: ir.Value, place: ir.Value, totals: list[Variable]
) -> None:
    """Add every pixel of the window's part: the gradient where the maximum was, else 0."""
    width = bank.side * bank.channels
    for at in bank.corners:
        part = k.select(k.equal(place, at), gradient, k.zero())
        for tap, total in zip(bank.taps, totals, strict=False):
            p = at + tap
            k.accumulate(total, k.splat(corner + (p // width * bank.row + p % width)), part)
