"""The nodes of a plan that are convolutions: in lanes of images, of channels or of filters."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import TypeVar

from llvmlite import ir

from cnnexp.backends.parts import BACKWARD, FOLLOWED, FORWARD
from cnnexp.backends.simd import (
    conv_channels,
    conv_events,
    conv_filters,
    conv_lanes,
    conv_sparse,
    cost,
    linear,
)
from cnnexp.backends.simd.conv_events import Events
from cnnexp.backends.simd.conv_filters import FilterBank
from cnnexp.backends.simd.conv_lanes import Correlation, Windows
from cnnexp.backends.simd.conv_sparse import SparseGradient
from cnnexp.backends.simd.cost import (
    Work,
    events,
    lane_gradient,
    lane_sums,
    passes,
    product_gradient,
    product_sums,
    transposition,
)
from cnnexp.backends.simd.emit import Emitter, Kernels, Target
from cnnexp.backends.simd.event_lists import make_lists
from cnnexp.backends.simd.layout import Grid, Image, Layout, Matrix, Ring, padded_rows, round_up
from cnnexp.backends.simd.nodes import Node
from cnnexp.backends.simd.product import Panels, most_height
from cnnexp.network import ConvStage, PoolStage

Pixels = TypeVar("Pixels", Grid, Image)


class _Convolution(Node[Pixels, Pixels]):
    """Conv2d [+ ReLU] [+ MaxPool2d].

    Args:
        argmax: whether the gradients follow the max-pool's argmax, rather than all outputs.
    """

    trains = rectifies_dx = True

    def __init__(self, stage: ConvStage, rectify: bool, pool: PoolStage | None, argmax: bool = False) -> None:
        super().__init__(stage.name, (pool or stage).output_shape)
        self.stage, self.rectify, self.pool, self.argmax = stage, rectify, pool, argmax

    @property
    def window(self) -> int:
        """Pixels of the convolution in each cell of the output."""
        return self.pool.window.size**2 if self.pool else 1

    def input_ring(self) -> Ring:
        return Ring(*self.stage.window.pads)

    def gradient_ring(self, needs_dx: bool) -> Ring:
        return self._dense_ring() if needs_dx and not self.pool else Ring()

    def _dense_ring(self) -> Ring:
        """Return the room around the gradient of the full convolution that the input's gradient needs."""
        raise NotImplementedError

    @property
    def follows(self) -> bool:
        """Whether the backward pass follows each window's maximum and leaves out the rest."""
        raise NotImplementedError

    def multiply_adds(self, what: str) -> int:
        (rows, columns, _), outputs = self.shape, math.prod(self.stage.output_shape[:2])
        computed = rows * columns if self.follows and what == BACKWARD else outputs
        if self.pool and what == FORWARD:
            computed = rows * columns * self.pool.window.size**2
        passes = 2 if what == BACKWARD and self.dx else 1
        return passes * self.stage.macs * computed // outputs

    def fewer(self, what: str) -> str:
        return FOLLOWED if self.follows and what == BACKWARD else ""


class Convolution(_Convolution[Grid]):
    """Batch in lanes; see `conv_lanes`."""

    wants = makes = Grid

    @property
    def follows(self) -> bool:
        return self.argmax

    def in_lanes(self, what: str, kernel: str) -> str:
        return "weights" if self.follows and what == BACKWARD else "images"

    def __init__(self, stage: ConvStage, rectify: bool, pool: PoolStage | None, argmax: bool = False) -> None:
        super().__init__(stage, rectify, pool, argmax)
        self.way = "lanes-argmax" if argmax else "lanes"

    def fits(self, target: Target) -> bool:
        """Whether the CPU's registers hold it."""
        layer, channels = self.stage.layer, self.stage.input_shape[2]
        return not self.argmax or conv_sparse.fits(layer.kernel, channels, target.registers, target.lanes)

    def may_follow(self, before: Ring | None, needs_dx: bool) -> bool:
        return needs_dx or not self.argmax

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        (height, width, channels), (rows, columns, filters) = self.stage.input_shape, self.stage.output_shape
        kernel, cells, window = self.stage.layer.kernel, math.prod(self.shape[:2]), self.window
        pixels, most = conv_lanes.sums_tile(target.registers)
        if self.pool:
            tile = math.prod(conv_lanes.window_part(self.pool.window.size, min(filters, most), target.registers))
            count = cells * window // tile
        else:
            tile, count = min(columns, pixels), rows * -(-columns // pixels)
        sums = lane_sums(tile, most, count, filters, kernel**2 * channels, target, 2.0 * window)
        found = {
            # without the pixels that fill a row's last tile
            "forward": replace(sums, macs=float(self.multiply_adds(FORWARD))),
            "rectify_gradient": passes(rows * columns * filters, 2, target, target.lanes, 3),
            "unpool": passes(cells * filters, 4 + 3 * window, target, target.lanes, window + 1),
        }
        if self.argmax:
            moved = transposition(2 * height * width * channels, target).cycles
            run, vectors = kernel * channels, kernel * len(conv_sparse.widths(kernel * channels, target.lanes))
            held = 8 * height * width * channels
            following = events(cells, window, filters, kernel, run, 1, held, target)
            packing = 6 * kernel**2 * channels * filters / images
            tile_text = f"{vectors} vectors of a filter"
            found["sparse_backward"] = Work(following.macs, following.cycles + moved + packing, tile_text)
            return {name: found[name] for name in ("forward", "sparse_backward")}
        held, terms = rows * columns * filters + height * width * channels, kernel**2 * channels
        gradient_tile = terms, conv_lanes.whole_width(terms, filters, target.registers)
        moved = float(held)
        if not gradient_tile[1]:
            # rows are gone over for every row of the kernel, and by blocks of 8 filters
            moved = kernel * (rows * columns * filters + height * width * channels * -(-filters // 8))
            gradient_tile = conv_lanes.gradient_tile(target.registers)
        found["backward_weights"] = lane_gradient(
            gradient_tile, terms, filters, rows * columns, images, moved, held, target
        )
        if needs_dx:
            count = height * -(-width // pixels)
            back = lane_sums(min(width, pixels), most, count, channels, kernel**2 * filters, target, 2.0)
            flipping = 2 * kernel**2 * channels * filters / images
            found["backward_input"] = Work(back.macs, back.cycles + flipping, back.tile)
        return found

    def _dense_ring(self) -> Ring:
        """Windows of the flipped kernel reach over its edge."""
        layer, reach = self.stage.layer, self.stage.layer.kernel - 1
        sides = []
        for pad, size, count in zip(
            self.stage.window.pads[:2], self.stage.input_shape, self.stage.output_shape, strict=False
        ):
            before, extent = max(0, reach - pad), (count - 1) * layer.stride + 1
            sides.append((before, max(0, max(0, pad - reach) + size + reach - before - extent)))
        (top, bottom), (left, right) = sides
        return Ring(top, left, bottom, right, layer.stride)

    def prepare(self, plan: Layout) -> None:
        layer, channels = self.stage.layer, self.stage.input_shape[2]
        plan.parameters.place_plain(self.stage.weight, self.stage.bias)
        windows = None
        if self.pool:
            windows = Windows(self.pool.window.size, self.pool.window.stride, plan.arena.argmax(self.shape))
        self.correlation = Correlation(
            self.x, (0, 0), layer.stride, layer.kernel, channels, layer.filters, self.y, self.rectify, windows
        )
        self.sparse = self._sparse(plan, windows) if windows and self.argmax else None
        if self.sparse:
            return
        self.sums = plan.arena.allocate(conv_lanes.MOST_SUMS * plan.target.lanes)
        self.d = self.dy
        if self.pool:
            self.d = plan.arena.grid(self.stage.output_shape, self._dense_ring() if self.dx else Ring())
        if self.dx:
            self.flipped = plan.arena.allocate(self.stage.weight.size)

    def _sparse(self, plan: Layout, windows: Windows[Grid]) -> SparseGradient:
        """Return the gradient that follows the argmax."""
        layer, channels = self.stage.layer, self.stage.input_shape[2]
        lists = make_lists(
            plan.arena, self.y, self.dy, windows, self.rectifies_dy,
            down=layer.stride * self.x.row // self.x.lanes, right=layer.stride * channels,
            reach=-(-(layer.kernel + layer.stride * windows.size) // (windows.stride * layer.stride)),
        )  # fmt: skip
        scratch = conv_sparse.make_scratch(plan.arena, layer.kernel, self.x, layer.filters)
        return SparseGradient(
            self.x, self.needed_dx, layer.kernel, channels, layer.filters, lists, self.input_rectified, scratch
        )

    def forward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            conv_lanes.conv2d(k, self.correlation, *plan.parameters.weights(k, self.stage))

        return [("forward", run)]

    def backward(self, plan: Layout) -> Kernels:
        if self.sparse:
            return self._sparse_backward(plan, self.sparse)

        def backward_weights(k: Emitter) -> None:
            dw, db = plan.parameters.gradients(k, self.stage)
            conv_lanes.conv2d_backward_weights(k, self.correlation, self.d, dw, db, k.arena + self.sums)

        kernels: Kernels = []
        windows, dx = self.correlation.windows, self.dx
        if windows:
            kernels.append(
                ("unpool", lambda k: conv_lanes.unpool(k, windows, self.y, self.dy, self.d, self.rectifies_dy))
            )
        elif self.rectifies_dy:
            kernels.append(("rectify_gradient", lambda k: conv_lanes.rectify_gradient(k, self.y, self.dy)))
        kernels.append(("backward_weights", backward_weights))
        if dx:
            kernels.append(("backward_input", lambda k: self._backward_input(k, plan, dx)))
        return kernels

    def _sparse_backward(self, plan: Layout, sparse: SparseGradient) -> Kernels:
        def run(k: Emitter) -> None:
            weights, _ = plan.parameters.weights(k, self.stage)
            conv_sparse.conv2d_backward(k, sparse, weights, *plan.parameters.gradients(k, self.stage))

        return [("sparse_backward", run)]

    def _backward_input(self, k: Emitter, plan: Layout, dx: Grid) -> None:
        layer, channels, reach = self.stage.layer, self.stage.input_shape[2], self.stage.layer.kernel - 1
        flipped = k.arena + self.flipped
        weights, _ = plan.parameters.weights(k, self.stage)
        conv_lanes.flip_weights(k, weights, flipped, layer.kernel, channels, layer.filters)
        top, left, _, _ = (max(0, pad - reach) for pad in self.stage.window.pads)
        positive = self.x if self.input_rectified else None
        back = Correlation(self.d, (top, left), 1, layer.kernel, layer.filters, channels, dx, positive=positive)
        conv_lanes.conv2d(k, back, flipped, None)


class ChannelConvolution(_Convolution[Image]):
    """Channels in lanes; see `conv_channels`."""

    wants = makes = Image
    whole_vectors = False

    @property
    def follows(self) -> bool:
        return self.events is not None

    def in_lanes(self, what: str, kernel: str) -> str:
        return "weights" if self.follows and what == BACKWARD else "channels"

    def __init__(self, stage: ConvStage, rectify: bool, pool: PoolStage | None, argmax: bool = False) -> None:
        super().__init__(stage, rectify, pool, argmax)
        self.way = "channels-argmax" if argmax else "channels"

    def fits(self, target: Target) -> bool:
        """Whether a window's sums fit the registers."""
        return self.window <= most_height(1, target.registers)

    def may_follow(self, before: Ring | None, needs_dx: bool) -> bool:
        return needs_dx or not self.argmax

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        (height, width, channels), (rows, columns, filters) = self.stage.input_shape, self.stage.output_shape
        layer, cells, window = self.stage.layer, math.prod(self.shape[:2]), self.window
        kernel, run = layer.kernel, layer.kernel * channels
        finish = 2.5 + 3.0 * (window - 1)
        found = {
            "forward": product_sums((self.shape[0], self.shape[1]), window, filters, kernel * run, target, finish),
            "gradient": passes(rows * columns * filters, 2, target, images),
            "unpool": passes(cells * filters, 4 + 3 * window, target, images, window + 1),
        }
        if self.argmax:
            vectors = -(-run // target.lanes)
            parts = -(-vectors // conv_events.most_vectors(target.registers))
            cell_rows = -(-conv_events.block_cells(target.lanes) // self.shape[1])
            step = self.pool.window.stride * layer.stride if self.pool else 1
            reach = min(height, cell_rows * step + kernel)
            held = 8 * reach * width * channels
            following = events(cells, window, filters, kernel, run, kernel * parts, held, target)
            packing = (3 * math.log2(target.lanes) + 6) * kernel * run * filters / target.lanes / images
            cleared = passes(height * width * channels, 4, target).cycles
            found["events"] = Work(following.macs, following.cycles + packing + cleared, following.tile)
            return {name: found[name] for name in ("forward", "events")}
        wide = conv_channels.panel_width((self.shape[0], self.shape[1]), window, filters, target)
        read = 4 * (height * width * channels + rows * columns * filters)
        found["backward_weights"] = product_gradient(run, kernel, filters, wide, (rows, columns), read, target)
        if needs_dx:
            sums = [
                product_sums((p.count, q.count), 1, channels, len(p.taps) * len(q.taps) * filters, target)
                for p in conv_channels.phases(height, kernel, layer.stride, self.stage.window.pads[0])
                for q in conv_channels.phases(width, kernel, layer.stride, self.stage.window.pads[1])
            ]
            packing = (math.log2(target.lanes) + 2) * kernel * run * filters / target.lanes / images
            macs, largest = sum(part.macs for part in sums), max(sums, key=lambda part: part.macs)
            found["backward_input"] = Work(macs, cost.total(sums) + packing, largest.tile)
        return found

    def _dense_ring(self) -> Ring:
        stage, layer = self.stage, self.stage.layer
        return conv_channels.gradient_ring(
            stage.input_shape, stage.output_shape, layer.kernel, layer.stride, stage.window.pads[:2]
        )

    def prepare(self, plan: Layout) -> None:
        stage, layer, channels, target = self.stage, self.stage.layer, self.stage.input_shape[2], plan.target
        windows, (rows, columns, _) = None, self.shape
        counts = rows, columns
        if self.pool:
            size, vectors = self.pool.window.size, -(-layer.filters // target.lanes)
            argmax = plan.arena.image((*counts, vectors * target.lanes // 4))
            windows = Windows(size, self.pool.window.stride, argmax)
        width = conv_channels.panel_width(counts, windows.size if windows else 1, layer.filters, target)
        panels = Panels(layer.kernel**2 * channels, layer.filters, width, target.lanes)
        plan.parameters.place(stage.weight, panels.size, panels.views)
        plan.parameters.place_plain(stage.bias)
        self.sum = conv_channels.Sum(
            self.x, (0, 0), layer.stride, (layer.kernel, layer.kernel), self.y, (0, 0), 1, counts,
            panels, self.rectify, windows,
        )  # fmt: skip
        self.events = self._events(plan, windows) if windows and self.argmax else None
        if self.events:
            return
        self.d, ring = self.dy, self._dense_ring() if self.dx else Ring()
        if self.pool or self.dy.ring != ring:
            self.d = plan.arena.image(stage.output_shape, ring)
        if self.dx:
            positive = self.x if self.input_rectified else None
            self.gradient = conv_channels.input_gradient_of(
                self.d, self.dx, layer.kernel, layer.stride, stage.window.pads[:2], positive, target
            )
            self.packed = plan.arena.allocate(self.gradient.size)

    def _events(self, plan: Layout, windows: Windows[Image]) -> Events:
        """Return the gradient that follows the argmax."""
        return conv_events.make_events(
            plan.arena, self.sum, windows, self.dy, self.needed_dx, self.rectifies_dy, self.input_rectified
        )

    def forward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            conv_channels.conv2d(k, self.sum, *plan.parameters.weights(k, self.stage))

        return [("forward", run)]

    def backward(self, plan: Layout) -> Kernels:
        if self.events:
            return self._follow_events(plan, self.events)

        kernels: Kernels = []
        windows = self.sum.windows
        if windows:
            kernels.append(
                ("unpool", lambda k: conv_channels.unpool(k, windows, self.y, self.dy, self.d, self.rectifies_dy))
            )
        elif self.rectifies_dy or self.d is not self.dy:
            positive = self.y if self.rectifies_dy else None
            kernels.append(("gradient", lambda k: conv_channels.copy_gradient(k, positive, self.dy, self.d)))
        kernels.append(("backward_weights", lambda k: self._backward_weights(k, plan)))
        if self.dx:
            kernels.append(("backward_input", lambda k: self._backward_input(k, plan)))
        return kernels

    def _follow_events(self, plan: Layout, events: Events) -> Kernels:
        def run(k: Emitter) -> None:
            weights, _ = plan.parameters.weights(k, self.stage)
            conv_events.conv2d_backward(k, events, weights, *plan.parameters.gradients(k, self.stage))

        return [("events", run)]

    def _backward_weights(self, k: Emitter, plan: Layout) -> None:
        conv_channels.conv2d_backward_weights(k, self.sum, self.d, *plan.parameters.gradients(k, self.stage))

    def _backward_input(self, k: Emitter, plan: Layout) -> None:
        layer, (weights, _) = self.stage.layer, plan.parameters.weights(k, self.stage)
        packed = k.arena + self.packed
        conv_channels.conv2d_backward_input(
            k, self.gradient, self.sum.panels, layer.kernel, layer.stride, weights, packed
        )


class FilterConvolution(Node[Matrix, Matrix]):
    """Conv2d [+ ReLU] + MaxPool2d that opens a network and leads into a linear layer, filters in lanes."""

    wants = makes = Matrix
    whole_vectors = False
    trains = True
    way = "filters"

    def __init__(self, stage: ConvStage, rectify: bool, pool: PoolStage) -> None:
        super().__init__(stage.name, pool.output_shape)
        self.stage, self.rectify, self.pool = stage, rectify, pool
        (height, width, channels), (top, left, bottom, right) = stage.input_shape, stage.window.pads
        self.row = (left + width + right) * channels
        self.input_size = (top + height + bottom) * self.row
        self.first = top * self.row + left * channels
        self.whole = False
        """Whether a cell of the output takes whole vectors; the plan's own tensors have none between cells."""

    def fits(self, target: Target) -> bool:
        """Whether windows are small enough for each of their pixels to be in the code."""
        layer, channels, size = self.stage.layer, self.stage.input_shape[2], self.pool.window.size
        side = conv_filters.patch_side(layer.kernel, layer.stride, size)
        return size <= 2 and side * side * channels <= 64

    def pitch(self, lanes: int) -> int:
        """Return the floats of a cell of the output."""
        filters = self.stage.layer.filters
        return round_up(filters, lanes) if self.whole else filters

    def may_follow(self, before: Ring | None, needs_dx: bool) -> bool:
        return before is None

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        layer, channels, size = self.stage.layer, self.stage.input_shape[2], self.pool.window.size
        cells, vectors, terms = math.prod(self.shape[:2]), -(-layer.filters // target.lanes), layer.kernel**2 * channels
        values = conv_filters.patch_side(layer.kernel, layer.stride, size) ** 2 * channels
        manner = conv_filters.choose_manner(layer.kernel, layer.stride, channels, size, target)
        wide = conv_filters.most_vectors(values, size, manner, target)
        # a patch that the registers do not hold is read again
        loads = terms + (terms * size**2 / wide if wide > 1 else 0)
        sums = max(terms * size**2 / cost.MACS, loads / cost.LOADS, 4) + 1.5 * size**2 + 3
        gradient = terms * size**2 / cost.MACS if manner == "window" else terms
        parts = len(conv_filters.gradient_parts(terms, target.registers))
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
        manner, room = conv_filters.choose_manner(*geometry), conv_filters.patch_room(*geometry)
        self.bank = FilterBank(
            self.x, self.row, layer.kernel, layer.stride, channels, layer.filters, vectors,
            size, self.pool.window.stride, (rows, columns), self.y, self.pitch(lanes), manner,
            plan.arena.allocate(images * cells * conv_filters.places_room(vectors, manner, lanes)),
            # loads reach past the last one
            plan.arena.allocate((images * cells + 1) * room),
            self.rectify,
        )  # fmt: skip

    @property
    def follows(self) -> bool:
        """As `Convolution.follows`."""
        return self.bank.manner != "window"

    def in_lanes(self, what: str, kernel: str) -> str:
        return "filters"

    def multiply_adds(self, what: str) -> int:
        window = 1 if self.follows and what == BACKWARD else self.pool.window.size**2
        return self.stage.macs * math.prod(self.shape[:2]) * window // math.prod(self.stage.output_shape[:2])

    def fewer(self, what: str) -> str:
        return FOLLOWED if self.follows and what == BACKWARD else ""

    def forward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            with k.loop(self.shape[0]) as u:
                self.conv2d_row(k, plan, u)

        return [("forward", run)]

    def conv2d_row(self, k: Emitter, plan: Layout, u: ir.Value) -> None:
        conv_filters.conv2d_row(k, self.bank, *plan.parameters.weights(k, self.stage), u)

    def backward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            with k.loop(self.shape[0]) as u:
                self.conv2d_backward_weights_row(k, plan, u)

        kernels: Kernels = []
        if self.rectifies_dy:
            kernels.append(("rectify_gradient", lambda k: linear.rectify_gradient(k, self.y, self.dy)))
        return [*kernels, ("backward_weights", run)]

    def conv2d_backward_weights_row(self, k: Emitter, plan: Layout, u: ir.Value) -> None:
        conv_filters.conv2d_backward_weights_row(k, self.bank, self.dy, *plan.parameters.gradients(k, self.stage), u)
