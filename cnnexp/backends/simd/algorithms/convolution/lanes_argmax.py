"""`lanes-argmax`: `lanes`, with gradients through the argmax of the max-pool after it; see `argmax_gradient`.

For one filter the weights of a whole patch, and as many sums of their gradient, stay in registers. For each group of
images: the input to rows; the events of every image and filter, in lists; the events one by one; dx back to lanes.

Gain: few channels before a max-pool. For the second convolution of `two_conv_pool4` 21,522 cycles, 25,330 by `lanes`.
"""

import math

from llvmlite import ir

from cnnexp.backends.simd.algorithms.convolution import argmax_gradient
from cnnexp.backends.simd.algorithms.convolution.lanes import Lanes
from cnnexp.backends.simd.algorithms.cost import Work, events, transposition
from cnnexp.backends.simd.algorithms.reorder import to_lanes
from cnnexp.backends.simd.compiler.emit import INDEX, Emitter, Target
from cnnexp.backends.simd.layouts import Layout, round_up, runs


class LanesArgmax(Lanes):
    """Batch in lanes; gradients through the argmax of the max-pool after it alone.

    Attributes:
        events: of the output. x_rows, dx_rows: a group's input and its gradient, with the halo of x.
        packed, gradients: where in the arena the weights' [filter][kernel row][K * C, rounded up] lie.
    """

    algorithm, follows, any_taps = "lanes-argmax", True, False

    def fits(self, target: Target) -> bool:
        """Whether a filter's weights and their gradients fit the registers."""
        return 2 * self.stage.layer.kernel * len(run_vectors(self.run, target.lanes)) + 2 <= target.registers

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        (height, width, channels), filters = self.stage.input_shape, self.stage.layer.filters
        kernel, cells = self.stage.layer.kernel, math.prod(self.shape[:2])
        moved = transposition(2 * height * width * channels, target).cycles
        vectors, held = kernel * len(run_vectors(self.run, target.lanes)), 8 * height * width * channels
        following = events(cells, self.window, filters, kernel, self.run, 1, held, target)
        packing = 6 * kernel**2 * channels * filters / images
        backward = Work(following.macs, following.cycles + moved + packing, f"{vectors} vectors of a filter")
        return {"forward": self.forward_work(target), "backward": backward}

    def prepare_backward(self, plan: Layout) -> None:
        layer, windows, arena = self.stage.layer, self.windows, plan.arena
        assert windows is not None
        packed = layer.filters * layer.kernel * round_up(self.run, arena.lanes)
        self.x_rows, self.dx_rows = argmax_gradient.image_rows(arena, self.x), argmax_gradient.image_rows(arena, self.x)
        self.packed, self.gradients = arena.allocate(packed), arena.allocate(packed)
        reach = -(-(layer.kernel + layer.stride * windows.size) // (windows.stride * layer.stride))
        self.events = argmax_gradient.group_lists(arena, self, windows, self.x_rows, layer.stride, reach)

    def emit_backward(self, k: Emitter, plan: Layout) -> None:
        """dw, db += the gradient; dx = the gradient."""
        (weights, _), (dw, db) = (plan.parameters.of(self.stage, at) for at in (k.parameters, k.gradients))
        packed, gradients = k.arena + self.packed, k.arena + self.gradients
        filters, row, stride = self.stage.layer.filters, round_up(self.run, k.lanes), self.x_rows.stride
        # weights by filter; no gradient yet
        size = self.stage.layer.kernel, self.run, filters
        argmax_gradient.pack_weights(k, weights, packed, gradients, size, row)
        # a group: its input to rows, its events to lists
        with k.loop(k.groups(k.lanes)) as g:
            images = k.builder.sub(k.count, k.builder.mul(g, INDEX(k.lanes)))
            argmax_gradient.list_group(k, self.events, self.x, g, db)
            # image by image, filter by filter
            with k.loop(k.lanes) as n:
                k.clear(self.dx_rows.stored(k, n), stride // k.lanes)
                with k.loop(filters) as f:
                    self._follow_events(k, n, f)
            # dx back to lanes, without what lies in the halo of x
            placed = (self.dx_rows, INDEX(0)), (self.needed_dx, g), (self.x, g)
            for (source, target, *positive), _, part in runs(k, *placed[: 3 if self.input_rectified else 2]):
                to_lanes(k, source, target, part, stride, images, *positive)
        # the gradients of the weights to where they belong
        argmax_gradient.unpack_gradients(k, gradients, dw, size, row)

    def _follow_events(self, k: Emitter, n: ir.Value, f: ir.Value) -> None:
        """Run one image's events of one filter."""
        kernel, row = self.stage.layer.kernel, round_up(self.run, k.lanes)
        packed, gradients = ((k.arena + at).at(f, kernel * row) for at in (self.packed, self.gradients))
        parts = [
            (i * self.x_rows.row + start, width, packed + (i * row + start), gradients + (i * row + start))
            for i in range(kernel)
            for start, width in run_vectors(self.run, k.lanes)
        ]
        operands = self.x_rows.stored(k, n), self.dx_rows.stored(k, n)
        events = self.events.of(k, k.builder.add(k.builder.mul(f, INDEX(k.lanes)), n))
        events.follow(k, parts, operands)


def run_vectors(run: int, lanes: int) -> list[tuple[int, int]]:
    """Cut a run of floats into vectors, (start, width); the last one is the smallest power of 2 that holds the rest."""
    return [(start, min(lanes, 1 << (run - start - 1).bit_length())) for start in range(0, run, lanes)]
