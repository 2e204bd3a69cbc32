"""The node of a plan that is a network's first two convolutions."""

from __future__ import annotations

import math

from cnnexp.backends.parts import BACKWARD, FORWARD, Part
from cnnexp.backends.simd import conv_lanes, conv_pair
from cnnexp.backends.simd.conv_lanes import Correlation, Windows
from cnnexp.backends.simd.conv_pair import PairGradient, Patch, make_patch
from cnnexp.backends.simd.convolutions import Convolution
from cnnexp.backends.simd.cost import Work, pair_events, transposition
from cnnexp.backends.simd.emit import Emitter, Kernels, Target
from cnnexp.backends.simd.event_lists import make_lists
from cnnexp.backends.simd.layout import Grid, Layout, Ring
from cnnexp.backends.simd.nodes import Node


class ConvolutionPair(Node[Grid, Grid]):
    """Conv2d + ReLU that opens a network, and Conv2d [+ ReLU] + MaxPool2d, the batch in lanes; see `conv_pair`.

    Args:
        first, second: the convolutions, which compute their forward passes.
    """

    wants = makes = Grid
    trains = True
    way = "lanes-pair"

    def __init__(self, first: Convolution, second: Convolution) -> None:
        super().__init__(f"{first.name}+{second.name}", second.shape)
        self.first, self.second, self.rectify = first, second, second.rectify

    def _patch(self, lanes: int) -> Patch:
        first, second = self.first.stage, self.second.stage
        kernels = second.layer.kernel, first.layer.filters, first.layer.kernel
        return make_patch(*kernels, first.layer.stride, first.input_shape[2], lanes)

    def fits(self, target: Target) -> bool:
        """Whether sums and a patch fit the registers, a row of the image a vector, and the ways to stand at an edge."""
        patch, (top, left, bottom, right) = self._patch(target.lanes), self.second.stage.window.pads
        edges = (top + bottom + 1) * (left + right + 1)
        row = patch.side * patch.depth
        return patch.registers <= target.registers and row <= target.lanes and edges <= conv_pair.MOST_EDGES

    def may_follow(self, before: Ring | None, needs_dx: bool) -> bool:
        return before is None

    def input_ring(self) -> Ring:
        """Return the room for windows of the first one at every place where the second one looks, edges with it."""
        step = self.first.stage.layer.stride
        near, far = self.first.stage.window.pads, self.second.stage.window.pads
        return Ring(*(pad + step * more for pad, more in zip(near, far, strict=True)))

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        patch, (height, width, depth) = self._patch(target.lanes), self.first.stage.input_shape
        packed = 6 * (len(patch.taps) + 1 + self.shape[2]) * patch.vectors * target.lanes / images
        turned = transposition(height * width * depth, target).cycles
        macs = self.multiply_adds(BACKWARD)
        following = pair_events(
            math.prod(self.shape[:2]), self.second.window, self.shape[2], patch.vectors, len(patch.taps), target
        )
        return {
            "first.forward": self.first.work(target, images, False)["forward"],
            "forward": self.second.work(target, images, True)["forward"],
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
        ring, step = self.second.input_ring(), first.layer.stride
        between = plan.arena.grid(first.output_shape, ring)
        windows = Windows(pool.window.size, pool.window.stride, plan.arena.argmax(self.shape))
        opening = Correlation(
            self.x, (step * ring.top, step * ring.left), step, first.layer.kernel,
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
        room = conv_pair.make_room(plan.arena, opening, closing, patch)
        self.gradient = PairGradient(opening, closing, patch, lists, room)

    def forward(self, plan: Layout) -> Kernels:
        def run_first(k: Emitter) -> None:
            conv_lanes.conv2d(k, self.gradient.first, *plan.parameters.weights(k, self.first.stage))

        def run(k: Emitter) -> None:
            conv_lanes.conv2d(k, self.gradient.second, *plan.parameters.weights(k, self.second.stage))

        return [("first.forward", run_first), ("forward", run)]

    def backward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            first, second = self.first.stage, self.second.stage
            weights, _ = plan.parameters.weights(k, second)
            conv_pair.conv2d_pair_backward(
                k, self.gradient, plan.parameters.weights(k, first), weights,
                plan.parameters.gradients(k, first), plan.parameters.gradients(k, second),
            )  # fmt: skip

        return [("backward", run)]
