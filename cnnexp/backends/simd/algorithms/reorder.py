"""`reorder`: a change of layout between two algorithms, by transposing blocks of lanes x lanes."""

import math

from llvmlite import ir

from cnnexp.backends.simd.algorithms.cost import Work, transposition
from cnnexp.backends.simd.algorithms.node import Node
from cnnexp.backends.simd.compiler.emit import INDEX, Emitter, Pointer, Target
from cnnexp.backends.simd.layouts import Blocked, Layout, Tensor, runs


class Reorder(Node[Tensor, Tensor]):
    """Changes layout, from blocked or to it."""

    algorithm = "reorder"
    keeps_x = keeps_y = False

    def __init__(self, name: str, shape: tuple[int, ...], from_: type[Tensor], to: type[Tensor]) -> None:
        super().__init__(name, shape)
        self.input_layout, self.output_layout = from_, to

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        moved = transposition(math.prod(self.shape), target)
        return {"forward": moved, "backward": moved}

    def emit_forward(self, k: Emitter, plan: Layout) -> None:
        reorder(k, self.x, self.y)

    def emit_backward(self, k: Emitter, plan: Layout) -> None:
        reorder(k, self.dy, self.needed_dx)


def reorder(k: Emitter, x: Tensor, y: Tensor) -> None:
    """y = x, of which one has the batch in lanes; lanes past the last image get 0, a halo and other rows stay."""
    with k.loop(k.groups(k.lanes)) as g:
        first = k.builder.mul(g, INDEX(k.lanes))
        images = k.builder.sub(k.count, first)
        if isinstance(x, Blocked):
            for (source, target), _, size in runs(k, (x, g), (y, first)):
                to_rows(k, source, target, size, y.stride, images, whole=y.dense)
        else:
            for (source, target), _, size in runs(k, (x, first), (y, g)):
                to_lanes(k, source, target, size, x.stride, images)


def to_rows(
    k: Emitter, source: Pointer, target: Pointer, size: int, stride: int, images: ir.Value, whole: bool = False
) -> None:
    """Transpose `size` vectors into `lanes` rows `stride` floats apart, the first `images` of them; write nothing else.

    Or `whole` vectors, of zeros behind the last: a part of one is not there yet for who loads all of it next.
    """
    places = _rows(k, target, stride, images)
    for block, valid in k.vectors(size):
        at = k.builder.mul(block, INDEX(k.lanes))
        start = source.at(at, k.lanes)
        lanes = [k.load(start + i * k.lanes) if i < valid else k.zero() for i in range(k.lanes)]
        # from the last on: what has no row is stored where another one comes after it
        for place, value in reversed([*zip(places, k.transpose(lanes), strict=True)]):
            k.store_part(value, place.at(at), k.lanes if whole else valid)


def to_lanes(
    k: Emitter, source: Pointer, target: Pointer, size: int, stride: int, images: ir.Value, *positive: Pointer
) -> None:
    """Transpose the first `size` values of `lanes` rows into vectors; rows from `images` on count as 0.

    Args:
        positive: where this, laid out as the target, is not positive, 0 is stored.
    """
    inside = [k.builder.icmp_signed("<", INDEX(n), images) for n in range(k.lanes)]
    places = _rows(k, source, stride, images)
    # a block of lanes x lanes, transposed
    for block, valid in k.vectors(size):
        at = k.builder.mul(block, INDEX(k.lanes))
        rows = [k.select(within, k.load(place.at(at)), k.zero()) for place, within in zip(places, inside, strict=True)]
        for i, value in enumerate(k.transpose(rows)[:valid]):
            for place in positive:
                value = k.where_positive(k.load(place.at(at, k.lanes) + i * k.lanes), value)
            k.store(value, target.at(at, k.lanes) + i * k.lanes)


def _rows(k: Emitter, first: Pointer, stride: int, images: ir.Value) -> list[Pointer]:
    """Return where `lanes` rows begin; of those from `images` on where the last one before them does."""
    last = k.builder.sub(images, INDEX(1))
    return [first.at(k.least(INDEX(n), last), stride) for n in range(k.lanes)]
