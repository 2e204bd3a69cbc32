"""`lanes-pair`: a first convolution and the one after it, gradients through the argmax of both.

An event is followed as in `argmax_gradient`, but past what lies between the convolutions, straight on to the weights of
the first. Of the few pixels that a window's maximum saw there, their values are computed again from the image, and
their gradient is multiplied with the image at once: where kernels and channels are few, that takes less time than to
turn all of both to rows and back.

A window's pixels, [kernel row][column, channel], lie in vectors, two rows in each where they fit. For a tap of the
first convolution each pixel meets one of the image: a permutation of the image's rows, the same for every event.

Packed rows that are shorter than a vector are followed by weights of 0 in the second convolution, and what is computed
there goes nowhere. Windows that reach over the edge of what lies between see zeros there, whatever the first
convolution would make of the image's own edge: a mask for each of the few positions at an edge.

Gain: two small convolutions with wide vectors. A step of `two_conv_pool4`, batch 32, takes 44 us for 56 on two
threads, 78 for 101 on one (Zen 5, AVX-512); with AVX2 (Zen 3) no less than `lanes` and `lanes-argmax`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from cnnexp.backends.parts import BACKWARD, FORWARD, Part
from cnnexp.backends.simd.algorithms.convolution.argmax_gradient import (
    EventLists,
    list_events,
    make_lists,
    pack_weights,
    unpack_gradients,
)
from cnnexp.backends.simd.algorithms.convolution.base import Windows
from cnnexp.backends.simd.algorithms.convolution.lanes import Correlation, Lanes, conv2d
from cnnexp.backends.simd.algorithms.convolution.lanes_argmax import LanesArgmax
from cnnexp.backends.simd.algorithms.cost import Work, pair_events, transposition
from cnnexp.backends.simd.algorithms.node import Node, Section
from cnnexp.backends.simd.algorithms.reorder import group_to_rows
from cnnexp.backends.simd.compiler.emit import BYTE, INDEX, INT, Emitter, Kernels, Pointer, Target, Variable
from cnnexp.backends.simd.layouts import Arena, Blocked, Halo, Layout, round_up

MOST_EDGES = 256
"""Positions at an edge that a byte can number."""


class LanesPair(Node[Blocked, Blocked]):
    """Conv2d + ReLU that opens a network, and Conv2d [+ ReLU] + MaxPool2d, the batch in lanes.

    Args:
        first, second: the convolutions, which compute their forward passes.
    """

    input_layout = output_layout = Blocked
    trains = True
    algorithm = "lanes-pair"
    spans = 2

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
        first, second = self.first.stage, self.second.stage
        kernels = second.layer.kernel, first.layer.filters, first.layer.kernel
        return make_patch(*kernels, first.layer.stride, first.input_shape[2], lanes)

    def fits(self, target: Target) -> bool:
        """Whether sums and a patch fit the registers, a row of the image a vector, and the positions at an edge."""
        patch, (top, left, bottom, right) = self._patch(target.lanes), self.second.stage.window.pads
        edges = (top + bottom + 1) * (left + right + 1)
        row = patch.side * patch.depth
        return patch.registers <= target.registers and row <= target.lanes and edges <= MOST_EDGES

    def may_follow(self, before: Halo | None, needs_dx: bool) -> bool:
        return before is None

    def input_halo(self) -> Halo:
        """Return the room for windows of the first one at every place where the second one looks, edges with it."""
        step = self.first.stage.layer.stride
        near, far = self.first.stage.window.pads, self.second.stage.window.pads
        return Halo(*(pad + step * more for pad, more in zip(near, far, strict=True)))

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        patch, (height, width, depth) = self._patch(target.lanes), self.first.stage.input_shape
        packed = 6 * (len(patch.taps) + 1 + self.shape[2]) * patch.vectors * target.lanes / images
        turned = transposition(height * width * depth, target).cycles
        macs = self.multiply_adds(BACKWARD)
        following = pair_events(
            math.prod(self.shape[:2]), self.second.window, self.shape[2], patch.vectors, len(patch.taps), target
        )
        return {
            "first.forward": self.first.forward_work(target),
            "forward": self.second.forward_work(target),
            "backward": Work(
                macs, following + turned + packed, f"{patch.vectors} vector{'s' * (patch.vectors > 1)} of a window"
            ),
        }

    def part(self, plan: Layout, what: str, kernel: str) -> Part:
        """As `Node.part`; the forward passes are each convolution's own."""
        if what == FORWARD:
            return (self.second if kernel == "forward" else self.first).part(plan, what, "forward")
        return super().part(plan, what, kernel)

    def in_lanes(self, what: str, kernel: str) -> str:
        return "weights"

    def multiply_adds(self, what: str) -> int:
        return self.first.multiply_adds(what) + 2 * self.second.multiply_adds(what)

    def fewer(self, what: str) -> str:
        return self.second.fewer(what)

    def prepare(self, plan: Layout) -> None:
        first, second, pool = self.first.stage, self.second.stage, self.second.pool
        assert pool is not None
        for stage in (first, second):
            plan.parameters.place_plain(stage.weight, stage.bias)
        halo, step = self.second.input_halo(), first.layer.stride
        between = plan.arena.blocked(first.output_shape, halo)
        windows = Windows(pool.window.size, pool.window.stride, plan.arena.argmax(self.shape))
        opening = Correlation(
            self.x, (step * halo.top, step * halo.left), step, first.layer.kernel,
            first.input_shape[2], first.layer.filters, between, rectify=True,
        )  # fmt: skip
        closing = Correlation(
            between, (0, 0), second.layer.stride, second.layer.kernel,
            first.layer.filters, second.layer.filters, self.y, self.rectify, windows,
        )  # fmt: skip
        patch, move = self._patch(plan.target.lanes), step * second.layer.stride
        lists = make_lists(
            plan.arena, self.y, self.dy, windows, self.rectifies_dy,
            down=move * self.x.row // self.x.lanes, right=move * self.x.column // self.x.lanes, reach=1,
        )  # fmt: skip
        room = make_room(plan.arena, opening, closing, patch)
        self.gradient = PairGradient(opening, closing, patch, lists, room)

    def forward(self, plan: Layout) -> Kernels:
        def run_first(k: Emitter) -> None:
            conv2d(k, self.gradient.first, *plan.parameters.weights(k, self.first.stage))

        def run(k: Emitter) -> None:
            conv2d(k, self.gradient.second, *plan.parameters.weights(k, self.second.stage))

        return [("first.forward", run_first), ("forward", run)]

    def backward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            first, second = self.first.stage, self.second.stage
            weights, _ = plan.parameters.weights(k, second)
            conv2d_pair_backward(
                k, self.gradient, plan.parameters.weights(k, first), weights,
                plan.parameters.gradients(k, first), plan.parameters.gradients(k, second),
            )  # fmt: skip

        return [("backward", run)]


@dataclass(frozen=True)
class Patch:
    """What a window of the second convolution sees of the first one's output, and that of the image, in vectors.

    Attributes:
        kernel, run: of the second convolution, K and K * C. channels: C, the first one's filters.
        taps: of the first convolution, (row, column, channel). stride: of the first. depth: the image's channels.
        lanes: of a vector.
    """

    kernel: int
    run: int
    channels: int
    taps: tuple[tuple[int, int, int], ...]
    stride: int
    depth: int
    lanes: int

    @property
    def row(self) -> int:
        """Floats from one kernel row to the next: half a vector where two rows fit, else whole ones."""
        return self.lanes // 2 if 2 * self.run <= self.lanes else round_up(self.run, self.lanes)

    @property
    def vectors(self) -> int:
        return -(-self.kernel * self.row // self.lanes)

    @property
    def patterns(self) -> int:
        """After so many vectors the channels of the lanes are the same again."""
        return -(-self.row // self.lanes)

    @property
    def side(self) -> int:
        """Rows and columns of the image that a window sees."""
        return (self.kernel - 1) * self.stride + self.taps[-1][0] + 1

    @property
    def registers(self) -> int:
        """Vectors that are needed all the time: sums, image and what is multiplied."""
        return (len(self.taps) + 1) * self.patterns + self.vectors + len(self.taps) + 3

    def pixel(self, lane: int) -> tuple[int, int] | None:
        """Return kernel row and place in the run of a lane, counted over all vectors; None of one that is not used."""
        row, at = divmod(lane, self.row)
        return (row, at) if row < self.kernel and at < self.run else None


@dataclass(frozen=True)
class Room:
    """Room in the arena, for one group of images.

    Attributes:
        x: [image][values of the input with its halo, rounded up].
        weights, gradients: of the second convolution, packed as `Patch` says.
        first_weights: [tap or bias][pattern] vectors of the first one's weights. first_gradients: likewise.
        edges: bytes, by the place of a patch the number of its mask; None where no window reaches over an edge.
        masks: [number][vector], bits.
    """

    x: int
    weights: int
    gradients: int
    first_weights: int
    first_gradients: int
    edges: int | None
    masks: int


@dataclass(frozen=True)
class PairGradient:
    """The geometry.

    Attributes:
        first, second: the convolutions; the halo of the image is wide enough for every patch, also at an edge.
        patch: what a window sees. events: of the second's output. room: see there.
    """

    first: Correlation
    second: Correlation
    patch: Patch
    events: EventLists
    room: Room

    @property
    def size(self) -> int:
        """Floats of one image, its halo with it."""
        return self.first.x.group // self.first.x.lanes

    @property
    def row(self) -> int:
        """Floats of one of its rows."""
        return self.first.x.row // self.first.x.lanes


def make_patch(kernel: int, channels: int, first_kernel: int, stride: int, depth: int, lanes: int) -> Patch:
    """Return the patch of a convolution of so many channels after one of `depth` channels with a stride."""
    taps = tuple((i, j, c) for i in range(first_kernel) for j in range(first_kernel) for c in range(depth))
    return Patch(kernel, kernel * channels, channels, taps, stride, depth, lanes)


def make_room(arena: Arena, first: Correlation, second: Correlation, patch: Patch) -> Room:
    lanes = arena.lanes
    packed = second.filters * patch.vectors * lanes
    held = (len(patch.taps) + 1) * patch.patterns * lanes
    edges, masks = _edges(first, second, patch)
    return Room(
        x=arena.allocate(lanes * (round_up(first.x.group // lanes, lanes) + lanes)),
        weights=arena.allocate(packed),
        gradients=arena.allocate(packed),
        first_weights=arena.allocate(held),
        first_gradients=arena.allocate(held),
        edges=arena.constants(edges.view(np.float32)) if len(masks) > 1 else None,
        masks=arena.constants(masks.view(np.float32)),
    )


def _edges(first: Correlation, second: Correlation, patch: Patch) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of the mask for each place of a patch, uint8, and the masks (numbers, vectors * lanes), int32.

    A place is where in the image, its halo with it, the patch begins.
    """
    halo, (height, width, _) = second.x.halo, second.x.shape
    row, column = first.x.row // first.x.lanes, first.x.column // first.x.lanes
    # a lane without a pixel is outside everywhere
    pixels = [patch.pixel(lane) or (-(1 << 30), 0) for lane in range(patch.vectors * patch.lanes)]
    down, right = np.array(pixels).T
    p = np.arange(halo.top + height + halo.bottom - second.kernel + 1)[:, None]
    q = np.arange(halo.left + width + halo.right - second.kernel + 1)[:, None]
    stands, reaches = p + down, q + right // patch.channels
    in_rows, row_kind = _kinds((halo.top <= stands) & (stands < halo.top + height))
    in_columns, column_kind = _kinds((halo.left <= reaches) & (reaches < halo.left + width))
    masks, number = _kinds((in_rows[:, None] & in_columns).reshape(-1, len(pixels)))
    edges = np.zeros(round_up(first.x.group // first.x.lanes, 4), np.uint8)
    numbers = number.reshape(len(in_rows), len(in_columns))[row_kind[:, None], column_kind]
    edges[(p * row + q.T * column) * first.stride] = numbers
    return edges, -masks.astype(np.int32)


def _kinds(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that differ from each other, and which of them each row is."""
    found, which = np.unique(rows, axis=0, return_inverse=True)
    return found, which.ravel()


def conv2d_pair_backward(
    k: Emitter,
    pair: PairGradient,
    first: tuple[Pointer, Pointer | None],
    weights: Pointer,
    first_gradients: tuple[Pointer, Pointer | None],
    gradients: tuple[Pointer, Pointer | None],
) -> None:
    """Add to the gradients (dw, db) of both convolutions.

    Args:
        first: weights and bias of the first one. weights: of the second.
    """
    room, patch, (dw, db) = pair.room, pair.patch, gradients
    x, stride = k.arena + room.x, round_up(pair.size, k.lanes) + k.lanes
    packed, d_packed = k.arena + room.weights, k.arena + room.gradients
    size = patch.kernel, patch.run, pair.second.filters
    pack_weights(k, weights, packed, d_packed, size, patch.row)
    for weight, place in _each_weight(k, pair, room.first_weights, *first):  # repeated for every pixel of a patch
        k.store(k.load_float(weight), place)
    places = _first_places(k, pair, room.first_gradients)
    totals = [[k.variable() for _ in row] for row in places]
    with k.loop(k.groups(k.lanes)) as g:
        group_to_rows(k, pair.first.x.stored(k, g), x, pair.size, stride)
        list_events(k, pair.events, g, db)
        with k.loop(k.lanes) as n, k.loop(pair.second.filters) as f:
            _follow_events(k, pair, n, f, x.at(n, stride), totals)
    for place_row, total_row in zip(places, totals, strict=True):
        for place, total in zip(place_row, total_row, strict=True):
            k.store(total.get(), place)
    unpack_gradients(k, d_packed, dw, size, patch.row)
    for weight, place in _each_weight(k, pair, room.first_gradients, *first_gradients):
        k.add_to(weight, k.load_float(place))


def _first_places(k: Emitter, pair: PairGradient, at: int) -> list[list[Pointer]]:
    """Return where vectors of the first convolution lie, [tap, the bias last][pattern]."""
    patterns = pair.patch.patterns
    return [
        [k.arena + at + (tap * patterns + p) * k.lanes for p in range(patterns)]
        for tap in range(len(pair.patch.taps) + 1)
    ]


def _each_weight(
    k: Emitter, pair: PairGradient, at: int, weights: Pointer, bias: Pointer | None
) -> Iterator[tuple[Pointer, Pointer]]:
    """Yield, of the first convolution, (weight, a lane in use where it lies), the biases last."""
    patch, filters = pair.patch, pair.first.filters
    lanes = [lane for lane in range(patch.patterns * patch.lanes) if lane % patch.row < patch.run]
    sources = [weights + tap * filters for tap in range(len(patch.taps))]
    for tap, source in enumerate(sources if bias is None else [*sources, bias]):
        start = k.arena + at + tap * patch.patterns * patch.lanes
        for lane in lanes:
            yield source + lane % patch.row % patch.channels, start + lane


def _follow_events(
    k: Emitter, pair: PairGradient, n: ir.Value, f: ir.Value, x: Pointer, first_totals: list[list[Variable]]
) -> None:
    """Run one image's events of one filter."""
    patch, room, vectors = pair.patch, pair.room, range(pair.patch.vectors)
    packed, gradients = ((k.arena + at).at(f, patch.vectors * k.lanes) for at in (room.weights, room.gradients))
    *first_weights, bias = ([k.load(place) for place in row] for row in _first_places(k, pair, room.first_weights))
    *d_first, d_bias = first_totals
    weights = [k.load(packed + v * k.lanes) for v in vectors]
    width = max(4, 1 << (patch.side * patch.depth - 1).bit_length())
    with (
        k.sums([[gradients + v * k.lanes for v in vectors]]) as [totals],
        pair.events.of(k, n, f).each(k) as (value, place),
    ):
        # the part of the image that the window sees
        source, factor = x.at(place), k.spread(value)
        rows = [k.load(source + i * pair.row, width) for i in range(patch.side)]
        masks = _masks(k, pair, place)
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
            d_bias[pattern].set(k.add(d_bias[pattern].get(), gradient))


def _masks(k: Emitter, pair: PairGradient, place: ir.Value) -> Pointer | None:
    """Return the masks of a patch that begins at a place."""
    if pair.room.edges is None:
        return None
    edges = k.builder.bitcast((k.arena + pair.room.edges).value(BYTE), BYTE.as_pointer())
    number = k.builder.zext(k.builder.load(k.builder.gep(edges, [place])), INDEX)
    return (k.arena + pair.room.masks).at(number, pair.patch.vectors * k.lanes)


def _pixels(k: Emitter, patch: Patch, rows: list[ir.Value], tap: tuple[int, int, int], v: int) -> ir.Value:
    """Return what a tap of the first convolution meets, for every pixel in vector v, out of rows of the image."""
    i, j, c = tap
    places = [patch.pixel(v * k.lanes + lane) or (0, 0) for lane in range(k.lanes)]
    used = sorted({row for lane, (row, _) in enumerate(places) if patch.pixel(v * k.lanes + lane)})
    width, lanes = rows[0].type.count, []
    for lane, (row, at) in enumerate(places):
        column = (at // patch.channels * patch.stride + j) * patch.depth + c
        lanes.append(INT(column + width * used.index(row) if patch.pixel(v * k.lanes + lane) else 0))
    sources = [rows[row * patch.stride + i] for row in (used[0], used[-1])]
    return k.builder.shuffle_vector(*sources, ir.Constant(k.indices, lanes))
