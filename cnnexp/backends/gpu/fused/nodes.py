"""What a fused program is made of: each node runs one layer, or several that share a kernel, forward and backward.

A node reads the outputs of the node before it and writes its own; backward it reads the gradient of its outputs, writes
that of the outputs of the node before it, and leaves partial gradients of its parameters in the arena.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cnnexp import network as net
from cnnexp.backends.gpu import device
from cnnexp.backends.gpu.device import Gpu, Tensor
from cnnexp.backends.gpu.fused import conv_kernels, kernels, linear_kernels, product_kernels
from cnnexp.backends.gpu.fused.conv_kernels import ConvBlock
from cnnexp.backends.gpu.fused.kernels import BLOCK, LANES
from cnnexp.backends.gpu.fused.product_kernels import Cut
from cnnexp.backends.gpu.kernels.index import ConvSizes, f32, u32
from cnnexp.backends.gpu.launch import Kernel
from cnnexp.backends.gpu.shared import SharedOps
from cnnexp.backends.parts import Part
from cnnexp.backends.stages import Run, backward_stage, forward_stage
from cnnexp.network.losses import Loss
from cnnexp.network.noise import threshold

MOST_TAPS = 49  # K * K accumulators of a thread in registers
SPARE_SHARED = 1024  # bytes of shared memory left to the compiler


@dataclass
class BatchStep:
    """Where a step's images are."""

    stream: Any  # where its kernels are enqueued: a stream, or a graph builder
    split: Any  # the loaded split, see `program.DeviceSplit`
    ahead: int  # place of the first image after `split.order[0]`
    count: int  # images, at most the batch size
    trains: bool  # whether it is a step of training, not of `predict`

    @property
    def place(self) -> tuple[Tensor, np.uint32]:
        return self.split.order, u32(self.ahead)


@dataclass
class Partials:
    """Partial gradients of parameters that lie side by side, in the arena."""

    offset: int  # of the parameters in the flat buffer
    size: int
    base: int  # where in the arena the first of so many parts begins; the others follow
    parts: int
    memory: Tensor | None = None  # all of them, once the arena is allocated


class GradientArena:
    """Gives out room for partial gradients. The first `parameter_count` floats are the gradient of layers not fused."""

    def __init__(self, parameter_count: int) -> None:
        self.partials: list[Partials] = []
        self.memory: Tensor | None = None  # allocated when all is given out
        self._size = parameter_count

    def take(self, stage: net.ConvStage | net.LinearStage, parts: int) -> Partials:
        """Return room for `parts` partial gradients of a layer's weights and biases."""
        found = Partials(*extent(stage), self._size, parts)
        self._size += parts * found.size
        self.partials.append(found)
        return found

    def take_whole(self, parameter: net.Parameter) -> None:
        """Let a layer that is not fused write the whole gradient, at the parameter's own offset."""
        self.partials.append(Partials(parameter.offset, parameter.size, parameter.offset, 1))

    def allocate(self) -> None:
        """Allocate the memory of all that was given out."""
        self.memory = device.empty((self._size,), np.float32)
        for given in self.partials:
            given.memory = self.memory[given.base : given.base + given.parts * given.size]


def extent(stage: net.ConvStage | net.LinearStage) -> tuple[int, int]:
    """Return (offset, size) of a layer's weights and biases in the flat buffer, where the biases come next."""
    return stage.weight.offset, stage.weight.size + (stage.bias.size if stage.bias else 0)


@dataclass
class Context:
    """What nodes are built from, and share."""

    gpu: Gpu
    batch_size: int
    parameters: Tensor
    running: Tensor
    arena: GradientArena
    ops: SharedOps  # the kernels of layers that are not fused
    draws: tuple[str, ...]  # names of the layers that draw random numbers

    def view(self, stage: net.ConvStage | net.LinearStage) -> Tensor:
        """Return a layer's weights and biases, in the flat buffer."""
        offset, size = extent(stage)
        return self.parameters[offset : offset + size]

    def splits(self, blocks: int, most: int) -> int:
        """Return into how many parts to split `blocks` blocks so that every multiprocessor has two; at most `most`."""
        return max(1, min(most, -(-2 * self.gpu.multiprocessors // blocks)))


class FusedNode:
    """A part of the network: its outputs `y` and their gradient `dy`, (N, *shape); the gather has no gradient."""

    y: Tensor
    dy: Tensor | None = None
    parts: Mapping[str, Part] = {}  # of a step, by pass: what a profile shows

    def _allocate(self, context: Context, shape: tuple[int, ...]) -> None:
        self.y = device.empty((context.batch_size, *shape), np.float32)
        self.dy = device.empty((context.batch_size, *shape), np.float32)

    def forward(self, step: BatchStep) -> None:
        """Do nothing: the outputs are another node's, perhaps in another shape."""

    def backward(self, step: BatchStep) -> None:
        """Do nothing: all gradients that there are have been made."""


class Gather(FusedNode):
    """Opens a network whose first layer does not read the data set itself."""

    def __init__(self, context: Context, shape: tuple[int, ...]) -> None:
        self.y = device.empty((context.batch_size, *shape), np.float32)
        self._size = math.prod(shape)

    def forward(self, step: BatchStep) -> None:
        kernel = kernels.gather(self._size, step.split.is_bytes)
        kernel.over(step.count * self._size, step.stream, step.split.images, *step.place, self.y)


@dataclass(frozen=True)
class ConvPlan:
    """How the kernels of a convolution cut it up."""

    rows: int  # of pooled outputs of a block, forward
    filters: int  # of a block, forward
    slices: int  # of the batch, for the gradient of the weights
    weight_rows: int  # of pooled outputs of a block there
    pairs: int  # (channel, filter) pairs of a block there
    input_rows: int  # of a block, for the gradient of the input; 0 if none fits


def conv_block(stage: net.ConvStage, pool: int, relu: bool, from_order: bool) -> ConvBlock:
    (H, W, C), (P, Q, F), window = stage.input_shape, stage.output_shape, stage.window
    P, Q = P // pool * pool, Q // pool * pool  # what no window sees is not made
    sizes = ConvSizes(H, W, C, window.size, F, window.stride, window.top, window.left, P, Q)
    return ConvBlock(sizes, pool, relu, stage.bias is not None, from_order, from_bytes=False)


def plan_conv(conv: ConvBlock, context: Context) -> ConvPlan | None:
    """Return a plan whose tiles fit in shared memory, with blocks enough for the GPU; None if none fits."""
    sizes, batch = conv.sizes, context.batch_size
    room = (context.gpu.shared_bytes - SPARE_SHARED) // 4  # floats of shared memory
    filters = min(sizes.F, LANES)
    together = conv_kernels.filters_together(conv, filters)
    w_size = sizes.K**2 * sizes.C * -(-filters // together) * together
    row = sizes.wide * sizes.C
    rows = -(-conv.U // context.splits(batch * -(-sizes.F // filters), conv.U))
    rows = fitting(rows, lambda r: conv.input_rows(r) * row + w_size <= room)

    pairs, slices = min(sizes.C * sizes.F, BLOCK), min(batch, 4 * LANES)
    weight_rows = -(-conv.U // context.splits(slices * -(-sizes.C * sizes.F // pairs), conv.U))
    weight_rows = fitting(weight_rows, lambda r: conv.input_rows(r) * row + (sizes.K**2 + 1) * BLOCK <= room)

    input_rows = -(-sizes.H // context.splits(batch, sizes.H))
    across, together = conv_kernels.ACROSS, min(sizes.C, conv_kernels.CHANNELS)
    broad = conv_kernels.in_fours(-(-sizes.W // across) * across + sizes.K - 1)
    w_size = sizes.K**2 * sizes.F * -(-sizes.C // together) * together
    input_rows = fitting(input_rows, lambda r: sizes.F * (r + sizes.K - 1) * broad + w_size <= room)
    if sizes.stride > 1:
        input_rows = 0
    fits = rows and weight_rows and sizes.K**2 <= MOST_TAPS
    return ConvPlan(rows, filters, slices, weight_rows, pairs, input_rows) if fits else None


def fitting(rows: int, fits: Callable[[int], bool]) -> int:
    """Return the most rows up to `rows` that fit, 0 if none."""
    return next(filter(fits, range(rows, 0, -1)), 0)


class FusedConv(FusedNode):
    """Convolution, max-pool and ReLU in one kernel, and their gradients in two; it reads the data set if first."""

    def __init__(
        self, context: Context, stage: net.ConvStage, conv: ConvBlock, plan: ConvPlan, before: FusedNode | None
    ) -> None:
        self._before = before
        self._allocate(context, (conv.U, conv.V, conv.sizes.F))
        self._argmax = device.empty(self.y.shape, np.uint8)
        self._w = context.view(stage)

        self._blocks = -(-conv.U // plan.rows) * -(-conv.sizes.F // plan.filters)  # of an image
        kinds = {is_bytes: replace(conv, from_bytes=is_bytes and before is None) for is_bytes in (False, True)}
        self._forward = {k: conv_kernels.conv2d(conv, plan.rows, plan.filters) for k, conv in kinds.items()}
        slices, splits = plan.slices, -(-conv.U // plan.weight_rows)
        cut = plan.weight_rows, plan.pairs, slices
        self._weights = {k: conv_kernels.conv2d_backward_weights(conv, *cut) for k, conv in kinds.items()}
        self._weight_blocks = slices * splits * -(-conv.sizes.C * conv.sizes.F // plan.pairs)
        self._partials = context.arena.take(stage, slices * splits)
        if before is not None and before.dy is not None:
            self._input = conv_kernels.conv2d_backward_input(conv, plan.input_rows)
            self._input_blocks = -(-conv.sizes.H // plan.input_rows)  # of an image

    def forward(self, step: BatchStep) -> None:
        arrays = self._x(step), *step.place, self._w, self.y, self._argmax
        self._forward[step.split.is_bytes].launch(step.count * self._blocks, step.stream, *arrays)

    def backward(self, step: BatchStep) -> None:
        arrays = self._x(step), *step.place, self.dy, self._argmax, self._partials.memory
        self._weights[step.split.is_bytes].launch(self._weight_blocks, step.stream, *arrays, u32(step.count))
        if self._before is not None and self._before.dy is not None:
            blocks = step.count * self._input_blocks
            self._input.launch(blocks, step.stream, self._w, self.dy, self._argmax, self._before.dy)

    def _x(self, step: BatchStep) -> Tensor:
        return step.split.images if self._before is None else self._before.y


class FusedProduct(FusedNode):
    """A convolution of many channels or a linear layer, and the ReLU after it: products of `product_kernels`."""

    def __init__(self, context: Context, stage: net.ConvStage | net.LinearStage, relu: bool, before: FusedNode) -> None:
        self._before, self._w, self._relu, self._scratch = before, context.view(stage), relu, context.ops.scratch
        self._allocate(context, stage.output_shape)
        if isinstance(stage, net.ConvStage):
            sizes = conv_block(stage, 1, relu, False).sizes
        else:  # of images of one pixel
            sizes = ConvSizes(1, 1, stage.weight.shape[0], 1, stage.weight.shape[1], 1, 0, 0, 1, 1)
        C, F, taps, has_bias = sizes.C, sizes.F, sizes.K**2, stage.bias is not None
        self._bias = self._w[-F:] if has_bias else None
        self._of_x, self._of_y, self._rows = sizes.H * sizes.W, sizes.P * sizes.Q, taps * C + has_bias
        of_x, of_y, gpu = context.batch_size * self._of_x, context.batch_size * self._of_y, context.gpu.multiprocessors
        self._y_cut = product_kernels.cut(of_y, F, taps * C, 3 * gpu, C)
        self._x_cut = product_kernels.cut(of_x, C, taps * F, 3 * gpu, F)
        self._w_cut = product_kernels.cut(self._rows, F, of_y, 4 * gpu, C)
        whole = self._y_cut.slices == 1  # else what adds up the slices does the rest
        aligned = stage.weight.offset % 4 == 0
        self._forward = product_kernels.forward(sizes, has_bias and whole, relu and whole, aligned, self._y_cut.tile)
        self._input = product_kernels.backward_input(sizes, relu, aligned, self._x_cut.tile)
        self._weights = product_kernels.backward_weights(sizes, has_bias, relu, self._w_cut.tile)
        self._partials = context.arena.take(stage, self._w_cut.slices)

    def forward(self, step: BatchStep) -> None:
        y = self.y[: step.count]
        made = self._multiply(step, self._forward, self._y_cut, (self._before.y, self._w, self._w), self._of_y, y)
        if made is not y:
            self._scratch.add_up(step.stream, made, y, self._bias, self._relu)

    def backward(self, step: BatchStep) -> None:
        arrays = self._before.y, self.dy, self.y, self._partials.memory
        sizes = u32(self._rows), u32(step.count * self._of_y), u32(self._w_cut.deep)
        self._weights.launch(self._w_cut.blocks(self._rows), step.stream, *arrays, *sizes)
        if self._before.dy is not None:
            dx = self._before.dy[: step.count]
            made = self._multiply(step, self._input, self._x_cut, (self.dy, self._w, self.y), self._of_x, dx)
            if made is not dx:
                self._scratch.add_up(step.stream, made, dx)

    def _multiply(
        self, step: BatchStep, kernel: Kernel, cut: Cut, arrays: tuple[Tensor | None, ...], pixels: int, out: Tensor
    ) -> Tensor:
        """Enqueue a product with a row for each pixel; return `out`, or its slices where the depth is cut."""
        rows, made = step.count * pixels, out if cut.slices == 1 else self._scratch.take(cut.slices, out.size)
        kernel.launch(cut.blocks(rows), step.stream, *arrays, made, u32(rows), u32(cut.depth), u32(cut.deep))
        return made


class FusedHead(FusedNode):
    """The last linear layer with softmax and cross entropy: forward makes the gradients too, so backward is empty."""

    def __init__(self, context: Context, stage: net.LinearStage, before: FusedNode) -> None:
        D, O = stage.weight.shape  # noqa: E741
        self._before, self._w = before, context.view(stage)
        self.y = device.empty((context.batch_size, O), np.float32)
        self._slices = min(context.batch_size, 2 * LANES)
        self._partials = context.arena.take(stage, self._slices)
        self._kernel = linear_kernels.linear_head(D, O, stage.bias is not None, self._slices)
        self._d_input = before.dy or device.empty(before.y.shape, np.float32)

    def forward(self, step: BatchStep) -> None:
        given = self._before.y, step.split.labels, *step.place, self._w
        made = self.y, step.split.outcomes, self._d_input, self._partials.memory
        self._kernel.launch(self._slices, step.stream, *given, *made, u32(step.count))


class PlainLoss(FusedNode):
    """A loss that is not fused with the layer before it."""

    def __init__(self, loss: Loss, before: FusedNode) -> None:
        self._before, self.y, self._kernel = before, before.y, kernels.loss(loss, before.y.shape[1])

    def forward(self, step: BatchStep) -> None:
        arrays = self.y, step.split.labels, *step.place, self._before.dy, step.split.outcomes
        self._kernel.over(step.count, step.stream, *arrays)


class View(FusedNode):
    """A Flatten: its arrays are those of the node before it, seen in another shape."""

    def __init__(self, context: Context, stage: net.FlattenStage, before: FusedNode) -> None:
        shape = (context.batch_size, *stage.output_shape)
        self.y, self.dy = before.y.reshape(shape), before.dy and before.dy.reshape(shape)


class PlainLayer(FusedNode):
    """A layer with no fused kernel: `gpu-shared`'s; it has a use for gradients if it or one before it `trains`."""

    def __init__(self, context: Context, stage: net.Stage, before: FusedNode, trains: bool) -> None:
        self._stage, self._before, self._context = stage, before, context
        for parameter in stage.parameters:
            context.arena.take_whole(parameter)
        self._allocate(context, stage.output_shape)
        self.dy = self.dy if trains else None
        self._saved = context.ops.saved(stage, context.batch_size)

    def forward(self, step: BatchStep) -> None:
        x, y = self._before.y[: step.count], self.y[: step.count]
        forward_stage(self._ops(step), self._stage, self._run(step), x, y, self._saved)

    def backward(self, step: BatchStep) -> None:
        if self.dy is not None:
            x, y, dy = (array[: step.count] for array in (self._before.y, self.y, self.dy))
            dx = self._before.dy and self._before.dy[: step.count]
            backward_stage(self._ops(step), self._stage, self._run(step), x, y, dy, self._saved, dx)

    def _ops(self, step: BatchStep) -> SharedOps:
        self._context.ops.stream = step.stream
        return self._context.ops

    def _run(self, step: BatchStep) -> Run:
        context = self._context
        return Run(step.count, context.parameters, context.arena.memory, context.running, step.trains)


class NormReLU(PlainLayer):
    """A BatchNorm2d and the ReLU after it."""

    def __init__(self, context: Context, stage: net.NormStage, before: FusedNode) -> None:
        super().__init__(context, stage, before, trains=True)
        self._saved = replace(self._saved, relu=self.y)

    def forward(self, step: BatchStep) -> None:
        super().forward(step)
        if not step.trains:
            y = self.y[: step.count]
            self._ops(step).elementwise(net.ReLU(), y, y)


class PlainDropout(PlainLayer):
    """A Dropout; in `predict` it drops nothing."""

    def __init__(self, context: Context, stage: net.DropoutStage, before: FusedNode, trains: bool) -> None:
        super().__init__(context, stage, before, trains)
        self._rate, self._which = stage.layer.rate, u32(context.draws.index(stage.name))
        self._kernel = kernels.dropout(math.prod(stage.output_shape), context.batch_size, len(context.draws))

    def forward(self, step: BatchStep) -> None:
        self._drop(step, self._rate if step.trains else 0.0, self._before.y, self.y)

    def backward(self, step: BatchStep) -> None:
        if self.dy is not None and self._before.dy is not None:
            self._drop(step, self._rate, self.dy, self._before.dy)

    def _drop(self, step: BatchStep, rate: float, source: Tensor, target: Tensor) -> None:
        place = *step.place, step.split.shown, step.split.keys, self._which
        count = step.count * (source.size // len(source))
        numbers = np.int64(threshold(rate)), f32(1 / (1 - rate))
        self._kernel.over(count, step.stream, source, *place, *numbers, target)


class Fork(FusedNode):
    """Where a Residual begins: its layers read what it reads, and backward the way past them adds to their gradient."""

    def __init__(self, stage: net.ResidualStage, before: FusedNode) -> None:
        self.y, self.dy = before.y, before.dy
        large, small = ((1,) * (3 - len(shape)) + shape for shape in (stage.input_shape, stage.output_shape))
        self.sizes = large, small, stage.window.stride if stage.window else 1
        self._kernel = kernels.skip_backward(*self.sizes)
        self.end: Join | None = None

    def backward(self, step: BatchStep) -> None:
        if self.dy is not None and self.end is not None:
            inner = self.end.dy if self.end.doubles else self.dy
            self._kernel.over(self.dy[: step.count].size, step.stream, self.end.dy, inner, self.dy)


class Join(FusedNode):
    """Where a Residual ends: the sum of its layers' output and the way past them; its gradient is that of the first.

    But where its layers are views alone (it `doubles`), that is the very memory of what the fork adds to.
    """

    def __init__(self, context: Context, fork: Fork, before: FusedNode) -> None:
        self._fork, self._before = fork, before
        self._allocate(context, before.y.shape[1:])
        self.doubles = before.dy is not None and fork.dy is not None and before.dy.flat is fork.dy.flat
        self.dy = self.dy if self.doubles else before.dy
        self._kernel = kernels.skip(*fork.sizes)
        fork.end = self

    def forward(self, step: BatchStep) -> None:
        arrays = self._fork.y, self._before.y, self.y
        self._kernel.over(self.y[: step.count].size, step.stream, *arrays)
