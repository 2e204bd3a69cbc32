"""Bringing images into the arena and changing layouts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llvmlite import ir

from cnnexp.backends.simd.emit import BYTE, FLOAT, INDEX, INT, Emitter, Pointer
from cnnexp.backends.simd.layout import Grid, Image, Matrix
from cnnexp.network import Shape

BYTE_SCALE = float(np.float32(1) / np.float32(255))


def gather_lanes(k: Emitter, y: Grid, pixel: ir.Type) -> None:
    """Copy images (uint8 / 255 or float32), picked by an order, into lanes.

    Buffers: images (N * H * W * C,), order int64, arena. Lanes past the last image hold that image again, so that they
    stay finite; their gradient is zero.
    """
    images, order, _ = k.buffers
    height, width, channels = y.shape
    run, runs = (height * width * channels, 1) if y.dense else (width * channels, height)
    with k.loop(k.groups(k.lanes)) as g:
        sources = [
            _image(k, images, order, k.builder.add(k.builder.mul(g, INDEX(k.lanes)), INDEX(n)), y.shape)
            for n in range(k.lanes)
        ]
        with k.loop(runs) as r:
            rows = [source.at(r, run) for source in sources]
            target = y.image(k, g).at(r, y.row)
            for start, count in _blocks(run, k.lanes):
                with k.loop(count) as b:
                    at = k.builder.add(k.builder.mul(b, INDEX(k.lanes)), INDEX(start))
                    columns = k.transpose([_pixels(k, row.at(at), pixel) for row in rows])
                    for i, column in enumerate(columns):
                        k.store(column, target.at(at, k.lanes) + i * k.lanes)
            if run < k.lanes:
                with k.loop(run) as i:
                    value = k.zero()
                    for n, row in enumerate(rows):
                        value = k.builder.insert_element(value, _pixel(k, row.at(i), pixel), INT(n))
                    k.store(value, target.at(i, k.lanes))


def gather_rows(k: Emitter, y: Matrix, shape: Shape, first: int, stride: int, pixel: ir.Type) -> None:
    """Copy images, picked by an order, into rows; buffers as `gather_lanes`.

    Args:
        shape: (H, W, C).
        first: elements before the image's first pixel. stride: elements from row to row of it, at least W * C.
    """
    images, order, _ = k.buffers
    height, width, channels = shape
    run, runs = (width * channels, height) if stride > width * channels else (height * width * channels, 1)
    with k.loop(k.count) as n:
        source = _image(k, images, order, n, shape)
        _fetch(k, _image(k, images, order, k.builder.add(n, INDEX(1)), shape), height * width * channels, pixel)
        with k.loop(runs) as r:
            row, target = source.at(r, run), (y.row(k, n) + first).at(r, stride)
            for start, count in _blocks(run, k.lanes):
                with k.loop(count) as b:
                    at = k.builder.add(k.builder.mul(b, INDEX(k.lanes)), INDEX(start))
                    k.store(_pixels(k, row.at(at), pixel), target.at(at))
            if run < k.lanes:
                with k.loop(run) as i:
                    k.store(_pixel(k, row.at(i), pixel), target.at(i))


def to_rows(k: Emitter, x: Grid, y: Matrix) -> None:
    """y[n] = x's values of image n in row, column, channel order; x has no ring."""
    with k.loop(k.groups(k.lanes)) as g:
        rows = y.row(k, k.builder.mul(g, INDEX(k.lanes)))
        group_to_rows(k, x.image(k, g), rows, y.size, y.stride)


def to_image(k: Emitter, x: Grid, y: Image) -> None:
    """y = x's values of every image; its ring stays as it is."""
    height, width, channels = y.shape
    with k.loop(k.groups(k.lanes)) as g, k.loop(height) as p:
        target = y.pixel(k, k.builder.mul(g, INDEX(k.lanes)), p, INDEX(0))
        if x.ring.step == 1:
            _row_to_images(k, x.pixel(k, g, p, INDEX(0)), target, width * channels, y.stride)
        else:
            with k.loop(width) as q:
                _row_to_images(k, x.pixel(k, g, p, q), target.at(q, y.column), channels, y.stride)


def from_image(k: Emitter, x: Image, y: Grid) -> None:
    """The inverse of `to_image`; lanes past the last image get 0."""
    height, width, channels = x.shape
    with k.loop(k.groups(k.lanes)) as g, k.loop(height) as p:
        first = k.builder.mul(g, INDEX(k.lanes))
        images = k.builder.sub(k.count, first)
        source = x.pixel(k, first, p, INDEX(0))
        if y.ring.step == 1:
            group_to_lanes(k, source, y.pixel(k, g, p, INDEX(0)), width * channels, x.stride, images)
        else:
            with k.loop(width) as q:
                group_to_lanes(k, source.at(q, x.column), y.pixel(k, g, p, q), channels, x.stride, images)


def _row_to_images(k: Emitter, source: Pointer, target: Pointer, size: int, stride: int) -> None:
    """Transpose `size` vectors into `lanes` rows, and write nothing else."""

    def block(at: ir.Value, valid: int) -> None:
        start = source.at(at, k.lanes)
        lanes = [k.load(start + i * k.lanes) if i < valid else k.zero() for i in range(k.lanes)]
        for n, value in enumerate(k.transpose(lanes)):
            k.store_part(value, target.at(at) + n * stride, valid)

    _each_block(k, size, block)


def to_lanes(k: Emitter, x: Matrix, y: Grid) -> None:
    """The inverse of `to_rows`; lanes past the last image get 0."""
    with k.loop(k.groups(k.lanes)) as g:
        first = k.builder.mul(g, INDEX(k.lanes))
        images = k.builder.sub(k.count, first)
        group_to_lanes(k, x.row(k, first), y.image(k, g), x.size, x.stride, images)


def group_to_rows(k: Emitter, source: Pointer, target: Pointer, size: int, stride: int) -> None:
    """Transpose `size` vectors into `lanes` rows, each rounded up to whole vectors with zeros.

    Args:
        stride: floats from row to row of the target.
    """

    def block(at: ir.Value, valid: int) -> None:
        start = source.at(at, k.lanes)
        lanes = [k.load(start + i * k.lanes) if i < valid else k.zero() for i in range(k.lanes)]
        for n, value in enumerate(k.transpose(lanes)):
            k.store(value, target.at(at) + n * stride)

    _each_block(k, size, block)


def group_to_lanes(
    k: Emitter,
    source: Pointer,
    target: Pointer,
    size: int,
    stride: int,
    images: ir.Value,
    positive: Pointer | None = None,
) -> None:
    """Transpose the first `size` values of `lanes` rows into vectors; rows from `images` on count as 0.

    Args:
        positive: where this, laid out as the target, is not positive, 0 is stored.
    """
    inside = [k.builder.icmp_signed("<", INDEX(n), images) for n in range(k.lanes)]

    def block(at: ir.Value, valid: int) -> None:
        rows = [
            k.builder.select(within, k.load(source.at(at) + n * stride), k.zero()) for n, within in enumerate(inside)
        ]
        for i, value in enumerate(k.transpose(rows)[:valid]):
            if positive is not None:
                value = k.where_positive(k.load(positive.at(at, k.lanes) + i * k.lanes), value)
            k.store(value, target.at(at, k.lanes) + i * k.lanes)

    _each_block(k, size, block)


def _each_block(k: Emitter, size: int, block: Callable[[ir.Value, int], None]) -> None:
    """Call block(first, valid) for blocks of `lanes` of `size` values; the last may have fewer valid ones."""
    with k.loop(size // k.lanes) as b:
        block(k.builder.mul(b, INDEX(k.lanes)), k.lanes)
    if size % k.lanes:
        block(INDEX(size // k.lanes * k.lanes), size % k.lanes)


def _blocks(run: int, lanes: int) -> list[tuple[int, int]]:
    """Return (first element, blocks) that cover a run with whole vectors; the last one overlaps its neighbour."""
    if run < lanes:
        return []
    return [(0, run // lanes)] + ([(run - lanes, 1)] if run % lanes else [])


def _image(k: Emitter, images: Pointer, order: Pointer, n: ir.Value, shape: Shape) -> Pointer:
    """Return the address of the image that the order names, the last one for n past it."""
    last = k.builder.sub(k.count, INDEX(1))
    n = k.builder.select(k.builder.icmp_signed("<", n, last), n, last)
    index = k.builder.load(order.at(n).value(INDEX))
    return images.at(index, shape[0] * shape[1] * shape[2])


def _fetch(k: Emitter, image: Pointer, size: int, pixel: ir.Type) -> None:
    """Have an image brought near: where the next one in an order lies, a CPU does not foresee."""
    line = 16 if pixel is FLOAT else 64
    with k.loop(-(-size // line)) as i:
        k.prefetch(image.at(i, line))


def _pixels(k: Emitter, pointer: Pointer, pixel: ir.Type) -> ir.Value:
    """Load `lanes` pixels as floats."""
    if pixel is FLOAT:
        return k.load(pointer)
    return k.multiply(k.builder.uitofp(k.load_bytes(pointer), k.vector), k.constant(BYTE_SCALE))


def _pixel(k: Emitter, pointer: Pointer, pixel: ir.Type) -> ir.Value:
    if pixel is FLOAT:
        return k.load_float(pointer)
    byte = k.builder.load(pointer.value(BYTE))
    return k.builder.fmul(k.builder.uitofp(byte, FLOAT), FLOAT(BYTE_SCALE))
