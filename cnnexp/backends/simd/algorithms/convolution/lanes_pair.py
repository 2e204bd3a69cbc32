"""`lanes-pair`: a first convolution and the one after it, gradients through the argmax of both.

An event is followed as in `argmax_gradient`, but past what lies between the convolutions, straight on to the weights of
the first. Of the few pixels that a window's maximum saw there, their values are computed again from the image, and
their gradient is multiplied with the image at once: less work than rows and back where kernels and channels are few.

A window's pixels, [kernel row][column, channel], lie in vectors, two rows in each where they fit. For a tap of the
first convolution each pixel meets one of the image: a permutation of the image's rows, the same for every event.

Packed rows that are shorter than a vector are followed by weights of 0 in the second convolution, and what is computed
there goes nowhere. Windows that reach over the edge of what lies between see zeros there, whatever the first
convolution would make of the image's own edge: a mask for each of the few positions at an edge.

Gain: two small convolutions with wide vectors. A step of `two_conv_pool4`, batch 32, takes 44 us for 56 on two
threads, 78 for 101 on one (Zen 5, AVX-512); with AVX2 (Zen 3) no less than `lanes` and `lanes-argmax`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from llvmlite import ir

from cnnexp.backends.parts import BACKWARD, FORWARD, Part
from cnnexp.backends.simd.algorithms import cost
from cnnexp.backends.simd.algorithms.convolution import argmax_gradient
from cnnexp.backends.simd.algorithms.convolution.lanes import Lanes
from cnnexp.backends.simd.algorithms.convolution.lanes_argmax import LanesArgmax
from cnnexp.backends.simd.algorithms.cost import Work, transposition
from cnnexp.backends.simd.algorithms.node import Node, Section
from cnnexp.backends.simd.compiler.emit import BYTE, INDEX, Emitter, Kernels, Pointer, Sums, Target
from cnnexp.backends.simd.layouts import Blocked, Halo, Layout, round_up
from cnnexp.network import ConvStage

MOST_EDGES = 256
"""Positions at an edge that a byte can number."""


class LanesPair(Node[Blocked, Blocked]):
    """Conv2d + ReLU that opens a network, and Conv2d [+ ReLU] + MaxPool2d, the batch in lanes.

    Args:
        first, second: the convolutions, which compute their forward passes.

    Attributes:
        opening: geometry of the first; the halo of the image is wide enough for every patch, also at an edge.
        patch: what a window of the second sees. events: of its output.
        x_rows: a group's input, with the halo of x.
        weights, gradients: where in the arena those of the second lie, packed as `Patch` says.
        first_weights, first_gradients: likewise of the first, [tap or bias][pattern] vectors.
        edges: bytes, by the place of a patch the number of its mask; None without edges. masks: [number][vector], bits.
    """

    input_layout = output_layout = Blocked
    trains = follows = True
    algorithm, holds, spans = "lanes-pair", "weights", 2

    def __init__(self, first: Lanes, second: LanesArgmax) -> None:
        super().__init__(f"{first.name}+{second.name}", second.shape)
        self.first, self.second, self.rectify = first, second, second.rectify

    @classmethod
    def of(cls, sections: Sequence[Section], first: bool) -> LanesPair | None:
        if not first or len(sections) == 1 or not sections[0].rectify or sections[0].pool:
            return None
        before, pooled = Lanes.of(sections, first), LanesArgmax.of(sections[1:], False)
        if before is None or pooled is None or not before.stage.dense:
            return None
        before.layers, pooled.layers = sections[0].names, sections[1].names
        return cls(before, pooled)

    def _patch(self, lanes: int) -> Patch:
        return Patch(self.first.stage, self.second.stage, lanes)

    def fits(self, target: Target) -> bool:
        """Whether sums and a patch fit the registers, a row of the image a vector, and the positions at an edge."""
        patch, (top, left, bottom, right) = self._patch(target.lanes), self.second.stage.window.pads
        edges = (top + bottom + 1) * (left + right + 1)
        row = patch.side * patch.depth
        return patch.registers <= target.registers and row <= target.lanes and edges <= MOST_EDGES

    def input_halo(self) -> Halo:
        """Return the room for windows of the first one at every place where the second one looks, edges with it."""
        step = self.first.stage.layer.stride
        near, far = self.first.stage.window.pads, self.second.stage.window.pads
        return Halo(*(pad + step * more for pad, more in zip(near, far, strict=True)))

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        patch, (height, width, depth) = self._patch(target.lanes), self.first.stage.input_shape
        packed = 6 * (len(patch.taps) + 1 + self.shape[2]) * patch.vectors * target.lanes / images
        turned = transposition(height * width * depth, target).cycles
        cells, vectors, outputs = math.prod(self.shape[:2]), patch.vectors, self.shape[2]
        each = vectors * ((2 * len(patch.taps) + 3) / cost.MACS + 1) + 4.5
        listed = cost.listing(cells, self.second.window, outputs, target)
        following = listed + cost.RELU_DENSITY * cells * outputs * each
        tile = f"{vectors} vector{'s' * (vectors > 1)} of a window"
        return {
            "first.forward": self.first.forward_work(target),
            "forward": self.second.forward_work(target),
            "backward": Work(self.multiply_adds(BACKWARD), following + turned + packed, tile),
        }

    def part(self, plan: Layout, what: str, kernel: str) -> Part:
        """As `Node.part`; the forward passes are each convolution's own."""
        if what == FORWARD:
            return (self.second if kernel == "forward" else self.first).part(plan, what, "forward")
        return super().part(plan, what, kernel)

    def multiply_adds(self, what: str) -> int:
        return self.first.multiply_adds(what) + 2 * self.second.multiply_adds(what)

    def prepare(self, plan: Layout) -> None:
        first, second = self.first.stage, self.second.stage
        halo, step, arena = self.second.input_halo(), first.layer.stride, plan.arena
        between = arena.blocked(first.output_shape, halo)
        for node, x, y in ((self.first, self.x, between), (self.second, between, self.y)):
            node.x, node.y = x, y
            node.prepare_forward(plan)
        self.opening = replace(self.first.correlation, origin=(step * halo.top, step * halo.left))
        windows = self.second.windows
        assert windows is not None
        self.patch, move, lanes = self._patch(arena.lanes), step * second.layer.stride, arena.lanes
        self.x_rows = argmax_gradient.image_rows(arena, self.x)
        self.events = argmax_gradient.group_lists(arena, self, windows, self.x_rows, move, reach=1)
        packed = second.layer.filters * self.patch.vectors * lanes
        held = (len(self.patch.taps) + 1) * self.patch.patterns * lanes
        edges, masks = self._edges()
        self.weights, self.gradients = arena.allocate(packed), arena.allocate(packed)
        self.first_weights, self.first_gradients = arena.allocate(held), arena.allocate(held)
        self.edges = arena.constants(edges.view(np.float32)) if len(masks) > 1 else None
        self.masks = arena.constants(masks.view(np.float32))

    def forward(self, plan: Layout) -> Kernels:
        return [
            ("first.forward", lambda k: self.opening.conv2d(k, *plan.parameters.of(self.first.stage, k.parameters))),
            *self.second.forward(plan),
        ]

    def _edges(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of the mask for each place of a patch, uint8, and the masks (numbers, vectors * lanes).

        A place is where in the image, its halo with it, the patch begins. Masks are int32.
        """
        patch, between = self.patch, self.second.x
        halo, (height, width, _) = between.halo, between.shape
        row, column = self.x_rows.row, self.x_rows.column
        # a lane without a pixel is outside everywhere
        pixels = [patch.pixel(lane) or (-(1 << 30), 0) for lane in range(patch.vectors * patch.lanes)]
        down, right = np.array(pixels).T
        p = np.arange(halo.top + height + halo.bottom - patch.kernel + 1)[:, None]
        q = np.arange(halo.left + width + halo.right - patch.kernel + 1)[:, None]
        stands, reaches = p + down, q + right // patch.channels
        in_rows, row_kind = _kinds((halo.top <= stands) & (stands < halo.top + height))
        in_columns, column_kind = _kinds((halo.left <= reaches) & (reaches < halo.left + width))
        masks, number = _kinds((in_rows[:, None] & in_columns).reshape(-1, len(pixels)))
        edges = np.zeros(round_up(self.x.stride // patch.lanes, 4), np.uint8)
        numbers = number.reshape(len(in_rows), len(in_columns))[row_kind[:, None], column_kind]
        edges[(p * row + q.T * column) * patch.stride] = numbers
        return edges, -masks.astype(np.int32)

    def emit_backward(self, k: Emitter, plan: Layout) -> None:
        """Add to the gradients (dw, db) of both convolutions."""
        patch, first, second = self.patch, self.first.stage, self.second.stage
        (weights, _), first_parameters = (plan.parameters.of(stage, k.parameters) for stage in (second, first))
        first_gradients, (dw, db) = (plan.parameters.of(stage, k.gradients) for stage in (first, second))
        packed, d_packed = k.arena + self.weights, k.arena + self.gradients
        size = patch.kernel, patch.run, second.layer.filters
        argmax_gradient.pack_weights(k, weights, packed, d_packed, size, patch.row)
        for weight, place in self._each(k, self.first_weights, *first_parameters):  # for every pixel of a patch
            k.store(k.load_float(weight), place)
        places = self._first_places(k, self.first_gradients)
        totals = [k.variables(patch.patterns) for _ in places]
        with k.loop(k.groups(k.lanes)) as g:
            argmax_gradient.list_group(k, self.events, self.x, g, db)
            with k.loop(k.lanes) as n, k.loop(second.layer.filters) as f:
                self._follow_events(k, n, f, totals)
        k.store_all(totals, places)
        argmax_gradient.unpack_gradients(k, d_packed, dw, size, patch.row)
        for weight, place in self._each(k, self.first_gradients, *first_gradients):
            k.add_to(weight, k.load_float(place))

    def _first_places(self, k: Emitter, at: int) -> list[list[Pointer]]:
        """Return where vectors of the first convolution lie, [tap, the bias last][pattern]."""
        patterns = self.patch.patterns
        return k.grid(k.arena + at, len(self.patch.taps) + 1, patterns * k.lanes, patterns)

    def _each(self, k: Emitter, at: int, weights: Pointer, bias: Pointer | None) -> Iterator[tuple[Pointer, Pointer]]:
        """Yield, of the first convolution, (weight, a lane in use where it lies), the biases last."""
        patch, filters = self.patch, self.first.stage.layer.filters
        lanes = [lane for lane in range(patch.patterns * patch.lanes) if lane % patch.row < patch.run]
        sources = [weights + tap * filters for tap in range(len(patch.taps))]
        for tap, source in enumerate(sources if bias is None else [*sources, bias]):
            start = k.arena + at + tap * patch.patterns * patch.lanes
            for lane in lanes:
                yield source + lane % patch.row % patch.channels, start + lane

    def _follow_events(self, k: Emitter, n: ir.Value, f: ir.Value, first_totals: Sums) -> None:
        """Run one image's events of one filter."""
        patch, vectors = self.patch, range(self.patch.vectors)
        packed, gradients = ((k.arena + at).at(f, patch.vectors * k.lanes) for at in (self.weights, self.gradients))
        *first_weights, bias = ([k.load(place) for place in row] for row in self._first_places(k, self.first_weights))
        *d_first, d_bias = first_totals
        weights = [k.load(packed + v * k.lanes) for v in vectors]
        width = max(4, 1 << (patch.side * patch.depth - 1).bit_length())
        with (
            k.sums(k.grid(gradients, 1, 0, patch.vectors)) as [totals],
            self.events.of(k, k.builder.add(k.builder.mul(f, INDEX(k.lanes)), n)).each(k) as (value, place),
        ):
            # the part of the image that the window sees
            source, factor = self.x_rows.stored(k, n).at(place), k.spread(value)
            rows = [k.load(source + i * self.x_rows.row, width) for i in range(patch.side)]
            masks = self._masks(k, place)
            for v in vectors:
                pattern = v % patch.patterns
                pixels = [_pixels(k, patch, rows, tap, v) for tap in patch.taps]
                # the first convolution's output there, 0 past its edge
                between = k.zero()
                for weight, pixel in zip(first_weights, pixels, strict=True):
                    between = k.fma(weight[pattern], pixel, between)
                between = k.rectify(k.add(between, bias[pattern]))
                if masks is not None:
                    inside = k.builder.load((masks + v * k.lanes).value(k.indices), align=4)
                    between = k.as_floats(k.builder.and_(k.as_integers(between), inside))
                # the second one's weights; through its ReLU; the first one's weights and bias
                k.accumulate(totals[v], factor, between)
                gradient = k.where_positive(between, k.multiply(factor, weights[v]))
                for total, pixel in zip(d_first, pixels, strict=True):
                    k.accumulate(total[pattern], gradient, pixel)
                k.increase(d_bias[pattern], gradient)

    def _masks(self, k: Emitter, place: ir.Value) -> Pointer | None:
        """Return the masks of a patch that begins at a place."""
        if self.edges is None:
            return None
        edges = k.builder.bitcast((k.arena + self.edges).value(BYTE), BYTE.as_pointer())
        number = k.builder.zext(k.builder.load(k.builder.gep(edges, [place])), INDEX)
        return (k.arena + self.masks).at(number, self.patch.vectors * k.lanes)


class Patch:
    """What a window of the second convolution sees of the first one's output, and that of the image, in vectors.

    Attributes:
        kernel, run: of the second convolution, K and K * C. channels: C, the first one's filters.
        taps: of the first convolution, (row, column, channel). stride: of the first. depth: the image's channels.
        row: floats from one kernel row to the next: half a vector where two rows fit, else whole ones.
        lanes, vectors: of a vector, and of the window. patterns: after so many vectors the lanes' channels repeat.
        side: rows and columns of the image that a window sees.
        registers: vectors that are needed all the time: sums, image and what is multiplied.
    """

    def __init__(self, first: ConvStage, second: ConvStage, lanes: int) -> None:
        self.kernel, self.channels, self.lanes = second.layer.kernel, first.layer.filters, lanes
        self.run = self.kernel * self.channels
        self.stride, self.depth = first.layer.stride, first.input_shape[2]
        side = range(first.layer.kernel)
        self.taps = tuple(itertools.product(side, side, range(self.depth)))
        self.row = lanes // 2 if 2 * self.run <= lanes else round_up(self.run, lanes)
        self.vectors, self.patterns = -(-self.kernel * self.row // lanes), -(-self.row // lanes)
        self.side = (self.kernel - 1) * self.stride + first.layer.kernel
        self.registers = (len(self.taps) + 1) * self.patterns + self.vectors + len(self.taps) + 3

    def pixel(self, lane: int) -> tuple[int, int] | None:
        """Return kernel row and place in the run of a lane, counted over all vectors; None of one that is not used."""
        row, at = divmod(lane, self.row)
        return (row, at) if row < self.kernel and at < self.run else None


def _kinds(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that differ from each other, and which of them each row is."""
    found, which = np.unique(rows, axis=0, return_inverse=True)
    return found, which.ravel()


def _pixels(k: Emitter, patch: Patch, rows: list[ir.Value], tap: tuple[int, int, int], v: int) -> ir.Value:
    """Return what a tap of the first convolution meets, for every pixel in vector v, out of rows of the image."""
    i, j, c = tap
    places = [patch.pixel(v * k.lanes + lane) for lane in range(k.lanes)]
    used, width = sorted({place[0] for place in places if place}), rows[0].type.count

    def met(row: int, at: int) -> int:
        return (at // patch.channels * patch.stride + j) * patch.depth + c + width * used.index(row)

    first, last = (rows[row * patch.stride + i] for row in (used[0], used[-1]))
    return k.shuffle(first, last, [met(*place) if place else 0 for place in places])
