"""`filters`: the first convolution of a network with many filters, filters in the vector lanes, one image at a time.

Fused with ReLU and max-pool, on matrices. An image lies in its row as [row][column][channel] with its padding around
it; what one pooled cell sees is a square *patch* of it. Forward: the patch's values are broadcast once into registers
and used by every vector of filters, whose K * K * C weights are loaded once and serve all pixels of the window: 36
multiply-adds per 9 loads for 3x3 kernels and 2x2 windows. What does not stay in registers is read once for two vectors.

Every filter has its own argmax, so for the gradient each lane needs another pixel of the patch at each tap; K * K * C
accumulators stay in registers along a row of cells, in parts where there are more than registers. Gather methods:

    permute    the pixels of a window lie within one vector of a patch. The forward pass leaves the patches in memory
               and stores, instead of the argmax, the place of the window's pixel in the patch; a tap further is the
               same permutation of what lies a tap further in memory.
    pick       on AVX2, windows of four pixels: see `argmax_codes`. What they see through each tap is left in memory.
    window     otherwise the gradient is split into one vector per pixel of the window, zero where the maximum was not,
               and each is multiplied by broadcast pixels.

Filters that fill their last vector in part are followed by some whose weights, and so all that comes of them, are 0.

Gain: `one_conv` of 64 filters takes 88,883 cycles, 156,150 by `channels`, 178,278 by `lanes`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from llvmlite import ir

from cnnexp.backends.parts import BACKWARD
from cnnexp.backends.simd.algorithms import cost
from cnnexp.backends.simd.algorithms.cost import Work, passes
from cnnexp.backends.simd.algorithms.elementwise import copy_gradient
from cnnexp.backends.simd.algorithms.linear.product import Panels
from cnnexp.backends.simd.algorithms.node import Node, Section
from cnnexp.backends.simd.compiler import argmax_codes
from cnnexp.backends.simd.compiler.emit import FLOAT, INDEX, INT, Emitter, Kernels, Pointer, Target
from cnnexp.backends.simd.layouts import NC, NHWC, Halo, Layout, padded_rows, round_up
from cnnexp.network import ConvStage, PoolStage

GatherMethod = Literal["permute", "pick", "window"]


class Filters(Node[NHWC, NC]):
    """Conv2d [+ ReLU] + MaxPool2d that opens a network and leads into a linear layer, filters in lanes.

    Attributes:
        channels, filters, size: C, F, S. side: of a patch. values: of one.
        vectors: of filters. gather: how the gradient finds the maximum's pixels.
        cells: y, a cell a pixel. places: [image][u][v][filter], bytes, the place of each maximum in its patch; or the
            codes of `argmax_codes`.
        patches: [image][u][v][pixel], rounded up to vectors; or what four pixels see, [tap][pixel].
    """

    input_layout, output_layout = NHWC, NC
    whole_vectors = False
    trains = True
    stage: ConvStage
    algorithm = holds = "filters"

    def __init__(self, stage: ConvStage, rectify: bool, pool: PoolStage) -> None:
        super().__init__(stage.name, pool.output_shape)
        self.stage, self.rectify, self.pool = stage, rectify, pool
        self.channels, self.filters, self.size = stage.input_shape[2], stage.layer.filters, pool.window.size
        self.side = (self.size - 1) * stage.layer.stride + stage.layer.kernel
        self.values = self.side**2 * self.channels
        self.whole = False
        """Whether a cell of the output takes whole vectors; the plan's own tensors have none between cells."""

    @classmethod
    def of(cls, sections: Sequence[Section], first: bool) -> Filters | None:
        stage, pool = sections[0].stage, sections[0].pool
        if not (first and isinstance(stage, ConvStage) and stage.dense and pool and sections[0].flattened):
            return None
        return cls(stage, sections[0].rectify, pool)

    def input_halo(self) -> Halo:
        return Halo(*self.stage.window.pads)

    def fits(self, target: Target) -> bool:
        """Whether windows are small enough for each of their pixels to be in the code."""
        return self.size <= 2 and self.values <= 64

    def pitch(self, lanes: int) -> int:
        """Return the floats of a cell of the output."""
        return round_up(self.filters, lanes) if self.whole else self.filters

    @property
    def taps(self) -> list[int]:
        """The place of every weight of a filter in a patch whose window starts at its corner."""
        kernel = range(self.stage.layer.kernel)
        return [(i * self.side + j) * self.channels + c for i in kernel for j in kernel for c in range(self.channels)]

    @property
    def corners(self) -> list[int]:
        """The place in the patch of every pixel of the window."""
        unit, size = self.stage.layer.stride * self.channels, range(self.size)
        return [(i * self.side + j) * unit for i in size for j in size]

    def choose_gather(self, target: Target) -> GatherMethod:
        """Return how the gradient finds the maximum's pixels."""
        if argmax_codes.available(target):
            return "pick" if self.size**2 == argmax_codes.PIXELS else "window"
        return "permute" if target.permutes and self.corners[-1] < target.lanes else "window"

    def most_vectors(self, target: Target) -> int:
        """Return the vectors of filters at once: one if the registers hold a patch, else two, to read it half as often.

        By `pick` there are two, whose codes are in one word.
        """
        patch_fits = self.values + self.size**2 + 1 <= target.registers
        return 1 if self.choose_gather(target) != "pick" and patch_fits else 2

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        cells, vectors, terms = math.prod(self.shape[:2]), -(-self.filters // target.lanes), len(self.taps)
        gather, size, wide = self.choose_gather(target), self.size, self.most_vectors(target)
        # a patch that the registers do not hold is read again
        loads = terms + (terms * size**2 / wide if wide > 1 else 0)
        sums = max(terms * size**2 / cost.MACS, loads / cost.LOADS, 4) + 1.5 * size**2 + 3
        gradient = terms * size**2 / cost.MACS if gather == "window" else terms
        parts = len(gradient_parts(terms, target.registers))
        macs, tile = cells * self.filters * terms, f"{-(-terms // parts)} taps x 1 vector of filters"
        pixels = f"{size**2} pixels x {wide} vectors of filters"
        return {
            "forward": Work(macs * size**2, cells * (self.values + vectors * sums), pixels),
            "rectify_gradient": passes(cells * self.filters, 2, target),
            "backward_weights": Work(macs, cells * vectors * (gradient + 4 * parts), tile),
        }

    def prepare(self, plan: Layout) -> None:
        (rows, columns, _), lanes, terms = self.shape, plan.target.lanes, len(self.taps)
        self.vectors, self.gather = -(-self.filters // lanes), self.choose_gather(plan.target)
        self.follows = self.gather != "window"
        views = functools.partial(padded_rows, rows=terms, row=self.vectors * lanes)
        plan.parameters.place(self.stage.weight, terms * self.vectors * lanes, views)
        plan.parameters.place_plain(self.stage.bias)
        # a word has the codes of two vectors, or the places of four lanes
        places = -(-self.vectors // 2) if self.gather == "pick" else self.vectors * lanes // 4
        values = {"permute": self.values, "pick": argmax_codes.PIXELS * terms, "window": 0}
        self.cells = NHWC(self.y.offset, (rows, columns, self.pitch(lanes)), self.y.stride)
        self.places, self.patches = (
            plan.arena.nhwc((rows, columns, room)) for room in (places, round_up(values[self.gather], lanes))
        )

    def computed(self, what: str) -> Fraction:
        window = 1 if self.follows and what == BACKWARD else self.size**2
        return Fraction(math.prod(self.shape[:2]) * window, math.prod(self.stage.output_shape[:2]))

    def emit_forward(self, k: Emitter, plan: Layout) -> None:
        with k.loop(self.shape[0]) as u:
            self.conv2d_row(k, plan, u)

    def backward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            with k.loop(self.shape[0]) as u:
                self.conv2d_backward_weights_row(k, plan, u)

        kernels: Kernels = []
        if self.rectifies_dy:
            kernels.append(("rectify_gradient", lambda k: copy_gradient(k, self.y, self.dy, self.dy)))
        return [*kernels, ("backward_weights", run)]

    def corner(self, k: Emitter, n: ir.Value, u: ir.Value, v: ir.Value) -> Pointer:
        """Return the address of the first pixel that a cell sees."""
        step = self.pool.window.stride * self.stage.layer.stride
        return self.x.stored(k, n).at(u, step * self.x.row).at(v, step * self.x.column)

    def pixel(self, corner: Pointer, place: int) -> Pointer:
        """Return the address of what lies at a place of the patch that begins at a corner."""
        width = self.side * self.channels
        return corner + (place // width * self.x.row + place % width)

    def conv2d_row(self, k: Emitter, plan: Layout, u: ir.Value) -> None:
        """Fill row u of y, the places and the patches. weights [tap][filter], bias [filter], in whole vectors."""
        weights, bias = plan.parameters.of(self.stage, k.parameters)
        with k.loop(k.count) as n, k.loop(self.shape[1]) as v:
            # the patch of a cell: what the gradient needs of it, and every pixel in a register
            corner = self.corner(k, n, u, v)
            self._store_patch(k, corner, self.patches.pixel(k, n, u, v))
            pixels = [k.splat(self.pixel(corner, p)) for p in range(self.values)]
            cell, places = self.cells.pixel(k, n, u, v), self.places.pixel(k, n, u, v)
            for first, vectors, times, valid in self._blocks(self.most_vectors(k.target), k.lanes):
                with k.loop(times) as t:
                    f = k.scaled(t, vectors, first)
                    column, b = weights.at(f, k.lanes), bias.at(f, k.lanes) if bias else None
                    # the sums of each pixel of the window
                    totals = self._window_sums(k, pixels, column, b, vectors)
                    # the maximum, and which pixel it was
                    if self.gather == "pick":
                        found = [argmax_codes.maximum(k, values) for values in totals]
                        codes = [code for _, code in found]
                        argmax_codes.store_codes(k, codes[0], codes[-1], places.at(k.builder.udiv(f, INDEX(2))))
                    else:
                        corners = [k.integers(at) for at in self.corners]
                        found = [k.first_maximum(list(zip(values, corners, strict=True))) for values in totals]
                        for i, (_, place) in enumerate(found):
                            k.store_bytes(place, places.at(f, k.lanes // 4) + i * (k.lanes // 4))
                    # ReLU, and no lane past the last filter
                    for i, (value, _) in enumerate(found):
                        count = valid if i + 1 == vectors else k.lanes
                        k.store_part(k.finish(value, rectify=self.rectify), cell.at(f, k.lanes) + i * k.lanes, count)

    def _blocks(self, most: int, lanes: int) -> list[tuple[int, int, int, int]]:
        """Return (first, size, times, lanes that count of the last vector) for blocks of at most so many vectors.

        Not all count where the next cell follows at once.
        """
        panels = Panels(len(self.taps), self.pitch(lanes), most, lanes)
        return [(*kind, panels.valid(*kind)[-1]) for kind in panels.kinds]

    def _window_sums(
        self, k: Emitter, pixels: list[ir.Value], weights: Pointer, bias: Pointer | None, vectors: int
    ) -> list[list[ir.Value]]:
        """Return bias and products of some vectors of filters with a patch, [vector][pixel of the window]."""
        totals = [[k.load(bias + i * k.lanes) if bias else k.zero()] * len(self.corners) for i in range(vectors)]
        for t, tap in enumerate(self.taps):
            column = [k.load(weights + (t * self.vectors + i) * k.lanes) for i in range(vectors)]
            for i, weight in enumerate(column):
                totals[i] = [
                    k.fma(weight, pixels[tap + at], total) for at, total in zip(self.corners, totals[i], strict=True)
                ]
        return totals

    def _store_patch(self, k: Emitter, corner: Pointer, target: Pointer) -> None:
        """Leave what the gradient needs of a patch: nothing by `window`."""
        if self.gather == "permute":
            for i, part in enumerate(self._gather_patch(k, corner)):
                k.store(part, target + i * k.lanes)
        elif self.gather == "pick":
            for i, tap in enumerate(self.taps):
                k.store(self._seen(k, corner, tap), target + i * argmax_codes.PIXELS)

    def _seen(self, k: Emitter, corner: Pointer, tap: int) -> ir.Value:
        """Return what the four pixels of a window see through a tap."""
        places = [self.pixel(corner, tap + at) for at in self.corners]
        if self.corners[1] == 1:  # neighbours in memory
            above, below = (k.load(place, 2) for place in places[::2])
            return k.shuffle(above, below, range(argmax_codes.PIXELS))
        four = ir.Constant(ir.VectorType(FLOAT, argmax_codes.PIXELS), ir.Undefined)
        for i, place in enumerate(places):
            four = k.builder.insert_element(four, k.load_float(place), INT(i))
        return four

    def _gather_patch(self, k: Emitter, corner: Pointer) -> list[ir.Value]:
        """Return the patch in vectors, its rows one after another; what rounds up the last one is some other pixels."""
        width, parts = self.side * self.channels, []
        for start in range(0, self.side * width, k.lanes):
            first, last = start // width, min((start + k.lanes - 1) // width, self.side - 1)
            part = k.load(corner + (first * self.x.row + start - first * width))
            for i in range(first + 1, last + 1):
                begin = i * width - start
                lanes = [k.lanes + lane - begin if begin <= lane < begin + width else lane for lane in range(k.lanes)]
                part = k.shuffle(part, k.load(corner + i * self.x.row), lanes)
            parts.append(part)
        return parts

    def conv2d_backward_weights_row(self, k: Emitter, plan: Layout, u: ir.Value) -> None:
        """dw += pixel under each tap of each maximum of row u * dy; db += dy. dy is 0 where ReLU gave 0.

        dy may be the gradient of y, or of its row u alone.
        """
        for first, _, count, valid in self._blocks(1, k.lanes):
            for part in gradient_parts(len(self.taps), k.target.registers):
                with k.loop(k.count) as n, k.loop(first + count, start=first) as f:
                    self._backward_part(k, plan, valid, (n, u, f), part)

    def _backward_part(
        self, k: Emitter, plan: Layout, valid: int, place: tuple[ir.Value, ir.Value, ir.Value], part: tuple[int, int]
    ) -> None:
        """Add to the gradients of some taps of a vector of filters what a row of cells of an image adds.

        Args:
            valid: lanes of dy that count.
            place: image, row u, vector. part: the first tap and the one past the last; db is added to with the first.
        """
        (dw, db), (n, u, f), (first, end), dy = plan.parameters.of(self.stage, k.gradients), place, part, self.dy
        columns, pitch = self.shape[1], self.pitch(k.lanes)
        gradient_row = columns * pitch if dy.size == self.y.size else 0
        places = [dw.at(f, k.lanes) + t * self.vectors * k.lanes for t in range(first, end)]
        if db is not None and not first:
            places.append(db.at(f, k.lanes))
        shifts = argmax_codes.shifts(k, f) if self.gather == "pick" else None
        # along the row of cells the sums stay in registers
        with k.sums([places]) as [totals], k.loop(columns) as v:
            value = k.load_part(dy.stored(k, n).at(u, gradient_row).at(v, pitch).at(f, k.lanes), valid)
            found, patch = self.places.pixel(k, n, u, v), self.patches.pixel(k, n, u, v)
            taps = list(zip(range(first, end), totals, strict=False))
            # the pixel that each lane's maximum saw through a tap, by the gather method
            if shifts is not None:
                codes = k.builder.lshr(k.spread(k.load_int(found.at(k.builder.udiv(f, INDEX(2))))), shifts)
                for t, total in taps:
                    k.accumulate(total, argmax_codes.pick(k, patch + t * argmax_codes.PIXELS, codes), value)
            else:
                where = k.load_bytes(found.at(f, k.lanes // 4))
                if self.gather == "permute":
                    for t, total in taps:
                        pixel = k.permute(k.load_first(patch + self.taps[t], self.corners[-1] + 1), where)
                        k.accumulate(total, pixel, value)
                else:
                    corner = self.corner(k, n, u, v)
                    for at in self.corners:
                        of_pixel = k.select(k.equal(where, at), value, k.zero())
                        for t, total in taps:
                            k.accumulate(total, k.splat(self.pixel(corner, at + self.taps[t])), of_pixel)
            for of_bias in totals[end - first :]:
                k.increase(of_bias, value)


def gradient_parts(taps: int, registers: int) -> list[tuple[int, int]]:
    """Return the first tap and the one past the last of the parts whose gradients fit the registers.

    A bias's gradient, that of y, the places, a pixel and its permutation are in registers, too.
    """
    count = -(-taps // (registers - 5))
    return [(taps * part // count, taps * (part + 1) // count) for part in range(count)]
