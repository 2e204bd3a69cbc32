"""The nodes of a plan that are convolutions by Winograd's way; see `conv_winograd`."""

from __future__ import annotations

import math

from cnnexp.backends.parts import BACKWARD, FORWARD, TRANSFORMED
from cnnexp.backends.simd import conv_channels, conv_winograd
from cnnexp.backends.simd.conv_winograd import PLACES, Tiling, make_winograd, tiling_of
from cnnexp.backends.simd.convolutions import ChannelConvolution
from cnnexp.backends.simd.cost import Work, bring, passes, product_gradient, product_sums
from cnnexp.backends.simd.emit import Emitter, Kernels, Target
from cnnexp.backends.simd.layout import Layout
from cnnexp.network import ConvStage, PoolStage


class WinogradConvolution(ChannelConvolution):
    """3 x 3 convolution of stride 1 by Winograd's way, but for gradients that follow an argmax."""

    def __init__(self, stage: ConvStage, rectify: bool, pool: PoolStage | None, argmax: bool = False) -> None:
        super().__init__(stage, rectify, pool, argmax)
        self.way = "winograd-argmax" if argmax else "winograd"

    def fits(self, target: Target) -> bool:
        layer, sides = self.stage.layer, (*self.stage.input_shape[:2], *self.stage.output_shape[:2])
        tiled = not self.pool or self.pool.window.size == self.pool.window.stride == 2
        return super().fits(target) and layer.kernel == 3 and layer.stride == 1 and tiled and min(sides) > 1

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        (height, width, channels), filters = self.stage.input_shape, self.stage.layer.filters
        tiling = self._tiling(target)
        found = super().work(target, images, needs_dx)
        found["forward"] = _sums(tiling, target, images)
        if "backward_weights" in found:
            wide = conv_channels.panel_width((self.shape[0], self.shape[1]), self.window, filters, target)
            found["backward_weights"] = _gradient(tiling, wide, target, images)
        if "backward_input" in found:
            packing = (math.log2(target.lanes) + 2) * 9 * channels * filters / target.lanes / images
            back = _sums(tiling_of((height, width), False, filters, channels, target), target, images)
            found["backward_input"] = Work(back.macs, back.cycles + packing, back.tile)
        return found

    def _tiling(self, target: Target) -> Tiling:
        channels, filters = self.stage.input_shape[2], self.stage.layer.filters
        return tiling_of((self.shape[0], self.shape[1]), self.pool is not None, channels, filters, target)

    def multiply_adds(self, what: str) -> int:
        if self.follows and what == BACKWARD:
            return super().multiply_adds(what)
        passes = [self.transformed] if what == FORWARD or not self.dx else [self.transformed, self.back]
        return sum(
            PLACES * math.prod(part.tiling.counts) * part.tiling.channels * part.tiling.filters for part in passes
        )

    def fewer(self, what: str) -> str:
        return super().fewer(what) or TRANSFORMED

    def prepare(self, plan: Layout) -> None:
        super().prepare(plan)
        self.transformed = make_winograd(plan.arena, self.sum, plan.target)
        if self.dx and not self.events:
            _, _, conv, _ = self.gradient.parts[0]
            self.back = make_winograd(plan.arena, conv, plan.target)

    def forward(self, plan: Layout) -> Kernels:
        def run(k: Emitter) -> None:
            conv_winograd.conv2d(k, self.transformed, *plan.parameters.weights(k, self.stage))

        return [("forward", run)]

    def _backward_weights(self, k: Emitter, plan: Layout) -> None:
        dw, db = plan.parameters.gradients(k, self.stage)
        conv_winograd.conv2d_backward_weights(k, self.transformed, self.d, dw, db)

    def _backward_input(self, k: Emitter, plan: Layout) -> None:
        weights, _ = plan.parameters.weights(k, self.stage)
        packed, taps = k.arena + self.packed, (2, 1, 0)
        conv_channels.transpose_weights(k, self.sum.panels, 3, 1, taps, taps, weights, self.back.conv.panels, packed)
        conv_winograd.conv2d(k, self.back, packed, None)


def _moves(tiling: Tiling, images: int, target: Target) -> float:
    """Return the cycles of transforming a block of so many images' tiles, and of transforming back."""
    floats = PLACES * images * tiling.block * (tiling.channels + tiling.filters)
    return passes(floats, 2, target, streams=1).cycles


def _weight_moves(tiling: Tiling, images: int, target: Target) -> float:
    """Return the cycles of transforming the weights, or back, for each of the images of a step."""
    return passes(PLACES * tiling.channels * tiling.filters, 3, target).cycles / images


def _sums(tiling: Tiling, target: Target, images: int) -> Work:
    """Return the work of outputs from inputs."""
    product = product_sums((1, tiling.block), 1, tiling.filters, tiling.channels, target, 1)
    weights = PLACES * tiling.channels * tiling.filters
    brought = bring(weights, 4 * weights, target)  # by every block
    cycles = tiling.blocks * (max(PLACES * product.cycles, brought) + _moves(tiling, 1, target))
    macs, tile = PLACES * tiling.blocks * product.macs, f"{product.tile} for each of {PLACES} places"
    return Work(macs, cycles + _weight_moves(tiling, images, target), tile)


def _gradient(tiling: Tiling, width: int, target: Target, images: int) -> Work:
    """Return the work of the weights' gradient, for panels of `width` vectors."""
    together = min(images, tiling.images)
    terms, sums = together * tiling.block, PLACES * tiling.channels * tiling.filters
    held = 4 * terms * (tiling.channels + tiling.filters)
    product = product_gradient(tiling.channels, PLACES, tiling.filters, width, (1, terms), held, target)
    block = product.cycles + _moves(tiling, together, target) + bring(2 * sums, 4 * sums, target)
    blocks = tiling.blocks / together
    cycles = blocks * block + _weight_moves(tiling, images, target)
    return Work(blocks * product.macs, cycles, f"{product.tile} for each of {PLACES} places")
