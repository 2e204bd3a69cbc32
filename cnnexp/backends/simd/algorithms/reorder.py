"""`reorder`: a change of layout between two algorithms, by transposing blocks of lanes x lanes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from llvmlite import ir

from cnnexp.backends.simd.algorithms.cost import Work, passes, transposition
from cnnexp.backends.simd.algorithms.elementwise import apply, same
from cnnexp.backends.simd.algorithms.node import Node, Tensor
from cnnexp.backends.simd.compiler.emit import INDEX, Emitter, Kernels, Pointer, Target
from cnnexp.backends.simd.layouts import NC, NHWC, Blocked, Layout


class Reorder(Node[Tensor, Tensor]):
    """Changes layout, from blocked or to it."""

    algorithm = "reorder"
    keeps_x = keeps_y = False

    def __init__(self, name: str, shape: tuple[int, ...], from_: type[Tensor], to: type[Tensor]) -> None:
        super().__init__(name, shape)
        self.input_layout, self.output_layout = from_, to

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        floats = math.prod(self.shape)
        moved = transposition(floats, target)
        return {"forward": moved, "backward": moved, "copy": passes(floats, 1, target)}

    def prepare(self, plan: Layout) -> None:
        self.dense: Blocked | None = None
        if self.output_layout is NC and isinstance(self.dx, Blocked) and not self.dx.dense:
            self.dense = plan.arena.blocked(self.dx.shape)

    def forward(self, plan: Layout) -> Kernels:
        return [("forward", lambda k: reorder(k, self.x, self.y))]

    def backward(self, plan: Layout) -> Kernels:
        dx = self.needed_dx
        dense = self.dense or dx
        kernels: Kernels = [("backward", lambda k: reorder(k, self.dy, dense))]
        if dense is not dx:
            kernels.append(("copy", lambda k: apply(k, same, dense, dx)))
        return kernels


def reorder(k: Emitter, x: Tensor, y: Tensor) -> None:
    """y = x, of which one is blocked; a halo stays as it is."""
    match x, y:
        case Blocked(), NHWC():
            to_image(k, x, y)
        case Blocked(), NC():
            to_rows(k, x, y)
        case NHWC(), Blocked():
            from_image(k, x, y)
        case NC(), Blocked():
            to_lanes(k, x, y)


def to_rows(k: Emitter, x: Blocked, y: NC) -> None:
    """y[n] = x's values of image n in row, column, channel order; x has no halo."""
    with k.loop(k.groups(k.lanes)) as g:
        rows = y.stored(k, k.builder.mul(g, INDEX(k.lanes)))
        group_to_rows(k, x.image(k, g), rows, y.size, y.stride)


def to_image(k: Emitter, x: Blocked, y: NHWC) -> None:
    """y = x's values of every image; its halo stays as it is."""
    height, width, channels = y.shape
    with k.loop(k.groups(k.lanes)) as g, k.loop(height) as p:
        target = y.pixel(k, k.builder.mul(g, INDEX(k.lanes)), p, INDEX(0))
        if x.halo.step == 1:
            _row_to_images(k, x.pixel(k, g, p, INDEX(0)), target, width * channels, y.stride)
        else:
            with k.loop(width) as q:
                _row_to_images(k, x.pixel(k, g, p, q), target.at(q, y.column), channels, y.stride)


def from_image(k: Emitter, x: NHWC, y: Blocked) -> None:
    """The inverse of `to_image`; lanes past the last image get 0."""
    height, width, channels = x.shape
    with k.loop(k.groups(k.lanes)) as g, k.loop(height) as p:
        first = k.builder.mul(g, INDEX(k.lanes))
        images = k.builder.sub(k.count, first)
        source = x.pixel(k, first, p, INDEX(0))
        if y.halo.step == 1:
            group_to_lanes(k, source, y.pixel(k, g, p, INDEX(0)), width * channels, x.stride, images, None)
        else:
            with k.loop(width) as q:
                group_to_lanes(k, source.at(q, x.column), y.pixel(k, g, p, q), channels, x.stride, images, None)


def _row_to_images(k: Emitter, source: Pointer, target: Pointer, size: int, stride: int) -> None:
    """Transpose `size` vectors into `lanes` rows, and write nothing else."""
    for row, at, valid in _to_rows(k, source, size):
        for n, value in enumerate(row):
            k.store_part(value, target.at(at) + n * stride, valid)


def to_lanes(k: Emitter, x: NC, y: Blocked) -> None:
    """The inverse of `to_rows`; lanes past the last image get 0."""
    with k.loop(k.groups(k.lanes)) as g:
        first = k.builder.mul(g, INDEX(k.lanes))
        images = k.builder.sub(k.count, first)
        group_to_lanes(k, x.stored(k, first), y.image(k, g), x.size, x.stride, images, None)


def group_to_rows(k: Emitter, source: Pointer, target: Pointer, size: int, stride: int) -> None:
    """Transpose `size` vectors into `lanes` rows `stride` floats apart, each rounded up to whole vectors with zeros."""
    for row, at, _ in _to_rows(k, source, size):
        for n, value in enumerate(row):
            k.store(value, target.at(at) + n * stride)


def _to_rows(k: Emitter, source: Pointer, size: int) -> Iterator[tuple[list[ir.Value], ir.Value, int]]:
    """Run what follows for every block of vectors, transposed: its rows, where it begins, and the lanes that count."""
    for block, valid in k.vectors(size):
        at = k.builder.mul(block, INDEX(k.lanes))
        start = source.at(at, k.lanes)
        lanes = [k.load(start + i * k.lanes) if i < valid else k.zero() for i in range(k.lanes)]
        yield k.transpose(lanes), at, valid


def group_to_lanes(
    k: Emitter, source: Pointer, target: Pointer, size: int, stride: int, images: ir.Value, positive: Pointer | None
) -> None:
    """Transpose the first `size` values of `lanes` rows into vectors; rows from `images` on count as 0.

    Args:
        positive: where this, laid out as the target, is not positive, 0 is stored.
    """
    # rows past the last image count as 0
    inside = [k.builder.icmp_signed("<", INDEX(n), images) for n in range(k.lanes)]

    # a block of lanes x lanes, transposed
    for block, valid in k.vectors(size):
        at = k.builder.mul(block, INDEX(k.lanes))
        rows = [
            k.builder.select(within, k.load(source.at(at) + n * stride), k.zero()) for n, within in enumerate(inside)
        ]
        for i, value in enumerate(k.transpose(rows)[:valid]):
            if positive is not None:
                value = k.where_positive(k.load(positive.at(at, k.lanes) + i * k.lanes), value)
            k.store(value, target.at(at, k.lanes) + i * k.lanes)
