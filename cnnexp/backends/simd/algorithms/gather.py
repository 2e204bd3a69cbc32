"""The images of a batch, picked by an order, into the arena."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from llvmlite import ir

from cnnexp.backends.simd.compiler.emit import BYTE, FLOAT, INDEX, INT, Emitter, Pointer
from cnnexp.backends.simd.layouts import NC, Blocked

BYTE_SCALE = float(np.float32(1) / np.float32(255))


def gather_lanes(k: Emitter, y: Blocked, pixel: ir.Type) -> None:
    """Copy images (uint8 / 255 or float32), picked by an order, into lanes.

    Buffers: images (N * H * W * C,), order int64, arena. Lanes past the last image hold that image again, so that they
    stay finite; their gradient is zero.
    """
    images, order, _ = k.buffers
    height, width, channels = y.shape
    run, runs = (y.size, 1) if y.dense else (width * channels, height)
    with k.loop(k.groups(k.lanes)) as g:
        # the images of a group
        sources = [_image(k, images, order, k.scaled(g, k.lanes, n), y.size) for n in range(k.lanes)]
        with k.loop(runs) as r:
            rows = [source.at(r, run) for source in sources]
            target = y.pixel(k, g, 0, 0).at(r, y.row)
            # blocks of lanes x lanes pixels, transposed
            for at in _vectors(k, run):
                columns = k.transpose([_pixels(k, row.at(at), pixel) for row in rows])
                for i, column in enumerate(columns):
                    k.store(column, target.at(at, k.lanes) + i * k.lanes)
            # a run shorter than a vector, value by value
            if run < k.lanes:
                with k.loop(run) as i:
                    value = k.zero()
                    for n, row in enumerate(rows):
                        value = k.builder.insert_element(value, _pixel(k, row.at(i), pixel), INT(n))
                    k.store(value, target.at(i, k.lanes))


def gather_rows(k: Emitter, y: NC, pixel: ir.Type) -> None:
    """Copy images, picked by an order, into rows; buffers as `gather_lanes`."""
    images, order, _ = k.buffers
    y = replace(y, shape=(1, 1, y.size)) if len(y.shape) == 1 else y
    height, width, channels = y.shape
    run, runs = (width * channels, height) if y.row > width * channels else (y.size, 1)
    with k.loop(k.count) as n:
        # the next image but one is asked for meanwhile: shuffled, it is anywhere in memory
        source, later = (_image(k, images, order, image, y.size) for image in (n, k.builder.add(n, INDEX(2))))
        with k.loop(runs) as r:
            row, target = source.at(r, run), y.pixel(k, n, 0, 0).at(r, y.row)
            # whole vectors, the last of which overlaps its neighbour
            for at in _vectors(k, run):
                k.prefetch(later.at(r, run).at(at))
                k.store(_pixels(k, row.at(at), pixel), target.at(at))
            # a run shorter than a vector, value by value
            if run < k.lanes:
                with k.loop(run) as i:
                    k.store(_pixel(k, row.at(i), pixel), target.at(i))


def _vectors(k: Emitter, run: int) -> Iterator[ir.Value]:
    """Run what follows for every whole vector of a run: where it begins; the last one overlaps its neighbour."""
    whole, rest = divmod(run, k.lanes)
    for start, count in ((0, whole), (run - k.lanes, 1 if rest else 0)):
        if whole and count:
            with k.loop(count) as vector:
                yield k.scaled(vector, k.lanes, start)


def _image(k: Emitter, images: Pointer, order: Pointer, n: ir.Value, size: int) -> Pointer:
    """Return the address of the image that the order names, the last one for n past it."""
    place = order.at(k.least(n, k.builder.sub(k.count, INDEX(1))))
    return images.at(k.builder.load(place.value(INDEX)), size)


def _pixels(k: Emitter, pointer: Pointer, pixel: ir.Type) -> ir.Value:
    """Load `lanes` pixels as floats."""
    if pixel is FLOAT:
        return k.load(pointer)
    return k.multiply(k.builder.uitofp(k.load_bytes(pointer), k.vector), k.constant(BYTE_SCALE))


def _pixel(k: Emitter, pointer: Pointer, pixel: ir.Type) -> ir.Value:
    if pixel is FLOAT:
        return k.load_float(pointer)
    return k.builder.fmul(k.builder.uitofp(k.builder.load(pointer.value(BYTE)), FLOAT), FLOAT(BYTE_SCALE))
