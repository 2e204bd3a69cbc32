"""Convolution with the batch in the vector lanes: any shape, any number of filters, full vectors.

Layout [group][row][column][channel][lane]. A kernel row of one pixel is a contiguous run of K * C vectors, and its
weights (K, K, C, F) a run of K * C * F floats, so every convolution is K runs.

Register tile of the forward pass: 4 pixels x up to 6 filters of accumulators; per (channel, tap) 4 loads of x and one
broadcast per filter feed 4 multiply-adds each, 8 loads per 16 multiply-adds with 4 filters. Where a max-pool follows,
the 4 pixels are those of its window, so maximum, argmax, bias and ReLU happen in registers and the full convolution is
never stored. The gradient of the input is the same kernel on the flipped weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from cnnexp.backends.cpu_simd.emit import INDEX, Emitter, Pointer
from cnnexp.backends.cpu_simd.layout import Grid


@dataclass(frozen=True)
class Windows:
    """Max-pool windows that do not overlap and lie inside the image, fused into a convolution.

    Attributes:
        size: S. stride: >= S. codes: bytes, where each argmax goes (row * S + column), a grid of the pooled shape.
    """

    size: int
    stride: int
    codes: Grid


@dataclass(frozen=True)
class Correlation:
    """y = cross-correlation of x with weights, the geometry of one forward or input-gradient pass.

    Attributes:
        x: input grid, its ring wide enough for every window.
        origin: stored (row, column) of x where the first window starts.
        stride: stored pixels from window to window.
        kernel, channels, filters: K, C, F.
        y: output grid, of the pooled shape with `windows`.
        rectify: whether ReLU is applied.
        windows: the max-pool fused into it, or None.
    """

    x: Grid
    origin: tuple[int, int]
    stride: int
    kernel: int
    channels: int
    filters: int
    y: Grid
    rectify: bool = False
    windows: Windows | None = None


def chunks(total: int, most: int) -> list[tuple[int, int, int]]:
    """Split `total` into runs of equal chunks of at most `most`: (first, size of a chunk, number of chunks)."""
    size = -(-total // -(-total // most))
    whole = total // size
    rest = total - whole * size
    return [(0, size, whole)] + ([(whole * size, rest, 1)] if rest else [])


def forward(k: Emitter, conv: Correlation, weights: Pointer, bias: Pointer | None) -> None:
    """Fill conv.y (and the argmax codes)."""
    pixels = 4 if k.target.registers >= 32 else 2
    most_filters = 6 if k.target.registers >= 32 else 4
    rows, columns, _ = conv.y.shape
    step = conv.stride * (conv.windows.stride if conv.windows else 1)
    with k.loop(k.groups(k.lanes)) as g:
        source = conv.x.stored(k, g) + (conv.origin[0] * conv.x.row + conv.origin[1] * conv.x.column)
        with k.loop(rows) as row:
            for first, width, count in [(0, 1, columns)] if conv.windows else chunks_of(columns, pixels):
                with k.loop(count) as tile:
                    column = k.builder.add(k.builder.mul(tile, INDEX(width)), INDEX(first))
                    corner = source.at(row, step * conv.x.row).at(column, step * conv.x.column)
                    for first_filter, filters, times in chunks(conv.filters, most_filters):
                        with k.loop(times) as t:
                            f = k.builder.add(k.builder.mul(t, INDEX(filters)), INDEX(first_filter))
                            w, b = weights.at(f), bias.at(f) if bias else None
                            if conv.windows:
                                _pooled(k, conv, corner, w, b, g, row, column, f, filters, pixels)
                            else:
                                _plain(k, conv, corner, w, b, g, row, column, f, filters, width)


def chunks_of(total: int, size: int) -> list[tuple[int, int, int]]:
    """Split `total` into chunks of `size` and one rest: (first, size of a chunk, number of chunks)."""
    whole, rest = divmod(total, size)
    return ([(0, size, whole)] if whole else []) + ([(whole * size, rest, 1)] if rest else [])


def _plain(k: Emitter, conv: Correlation, corner, w, b, g, row, column, f, filters: int, pixels: int) -> None:
    """Convolve `pixels` neighbours of one row with `filters` filters, and store them."""
    totals = _dot(k, conv, corner, [(0, i) for i in range(pixels)], w, filters)
    for i in range(pixels):
        target = conv.y.pixel(k, g, row, column).at(f, conv.y.lanes) + i * conv.y.column * conv.y.ring.step
        for j in range(filters):
            value = totals[i][j]
            if b is not None:
                value = k.add(value, k.splat(b + j))
            k.store(k.rectify(value) if conv.rectify else value, target + j * conv.y.lanes)


def _pooled(k: Emitter, conv: Correlation, corner, w, b, g, row, column, f, filters: int, most: int) -> None:
    """Convolve one pooling window with `filters` filters, and store its maxima and where they were."""
    size, codes = conv.windows.size, conv.windows.codes
    window = [(i, j) for i in range(size) for j in range(size)]
    best: list[ir.Value] = []
    where: list[ir.Value] = []
    for start in range(0, len(window), most):
        part = window[start : start + most]
        for code, values in enumerate(_dot(k, conv, corner, part, w, filters), start):
            if code == 0:
                best, where = values, [k.integers(0)] * filters
                continue
            for j in range(filters):
                larger = k.larger(values[j], best[j])
                best[j] = k.select(larger, values[j], best[j])
                where[j] = k.select(larger, k.integers(code), where[j])
    target = conv.y.pixel(k, g, row, column).at(f, conv.y.lanes)
    code_target = codes.pixel(k, g, row, column).at(f, codes.lanes)
    for j in range(filters):
        value = best[j] if b is None else k.add(best[j], k.splat(b + j))
        k.store(k.rectify(value) if conv.rectify else value, target + j * conv.y.lanes)
        k.store_bytes(where[j], code_target + j * codes.lanes)


def _dot(k: Emitter, conv: Correlation, corner: Pointer, pixels, w: Pointer, filters: int) -> list[list[ir.Value]]:
    """Return the sums over kernel and channels, [pixel][filter]; `pixels` are (row, column) in steps of the stride."""
    x, run = conv.x, conv.kernel * conv.channels
    places = [(i * x.row + j * x.column) * conv.stride for i, j in pixels]
    totals = [k.variables(filters) for _ in pixels]

    def taps(source: Pointer, weights: Pointer, count: int) -> None:
        for r in range(count):
            values = [k.load(source + (place + r * x.lanes)) for place in places]
            for f in range(filters):
                weight = k.splat(weights + (r * conv.filters + f))
                for p, value in enumerate(values):
                    k.accumulate(totals[p][f], weight, value)

    with k.loop(conv.kernel) as i:
        source, weights = corner.at(i, x.row), w.at(i, run * conv.filters)
        for first, size, count in chunks_of(run, 8 if run > 16 else run):
            with k.loop(count) as c:
                taps(
                    (source + first * x.lanes).at(c, size * x.lanes),
                    (weights + first * conv.filters).at(c, size * conv.filters),
                    size,
                )
    return [[total.get() for total in row] for row in totals]


def flip_weights(k: Emitter, weights: Pointer, flipped: Pointer, kernel: int, channels: int, filters: int) -> None:
    """flipped[K-1-i, K-1-j, f, c] = weights[i, j, c, f]: the kernel of the input's gradient."""
    taps = kernel * kernel
    with k.loop(taps) as tap:
        source = weights.at(tap, channels * filters)
        target = flipped.at(k.builder.sub(INDEX(taps - 1), tap), channels * filters)
        with k.loop(channels) as c, k.loop(filters) as f:
            value = k.load_float(source.at(c, filters).at(f))
            k.store(value, target.at(f, channels).at(c))


def weight_gradients(k: Emitter, conv: Correlation, d: Grid, dw: Pointer, db: Pointer | None) -> None:
    """dw[i,j,c,f] += sum over pixels and lanes of x * d; db likewise.

    Register tile: 5 (tap, channel) x 4 filters of accumulators, over all pixels; 9 loads feed 20 multiply-adds. Lanes
    are added up once per tile of images.

    Args:
        conv: the forward geometry; its y is not used.
        d: gradient of the convolution's output (P, Q, F), perhaps with room between pixels.
    """
    taps, most_filters = (5, 4) if k.target.registers >= 32 else (3, 3)
    run = conv.kernel * conv.channels
    for first_filter, filters, filter_count in chunks(conv.filters, most_filters):
        for first_tap, size, tap_count in chunks(run, taps):
            # the same few filters of d, the larger of the two, for every tap
            with k.loop(filter_count) as filter_chunk, k.loop(conv.kernel) as i, k.loop(tap_count) as tap_chunk:
                r = k.builder.add(k.builder.mul(tap_chunk, INDEX(size)), INDEX(first_tap))
                f = k.builder.add(k.builder.mul(filter_chunk, INDEX(filters)), INDEX(first_filter))
                _weight_tile(k, conv, d, i, r, f, size, filters, dw)
    if db is not None:
        _bias_gradients(k, d, db)


def _weight_tile(k: Emitter, conv: Correlation, d: Grid, i, r, f, taps: int, filters: int, dw: Pointer) -> None:
    x = conv.x
    rows, columns, _ = d.shape
    totals = [k.variables(filters) for _ in range(taps)]
    with k.loop(k.groups(k.lanes)) as g, k.loop(rows) as p:
        source = (x.stored(k, g) + (conv.origin[0] * x.row + conv.origin[1] * x.column)).at(i, x.row)
        source = source.at(p, conv.stride * x.row).at(r, x.lanes)
        gradient = d.pixel(k, g, p, 0).at(f, d.lanes)
        with k.loop(columns) as q:
            at, gradient_at = source.at(q, conv.stride * x.column), gradient.at(q, d.ring.step * d.column)
            gradients = [k.load(gradient_at + j * d.lanes) for j in range(filters)]
            for t in range(taps):
                value = k.load(at + t * x.lanes)
                for j in range(filters):
                    k.accumulate(totals[t][j], value, gradients[j])
    run = conv.kernel * conv.channels
    target = dw.at(i, run * conv.filters).at(r, conv.filters).at(f)
    for t in range(taps):
        for j in range(filters):
            k.add_to(target + (t * conv.filters + j), k.sum_lanes(totals[t][j].get()))


def _bias_gradients(k: Emitter, d: Grid, db: Pointer) -> None:
    rows, columns, channels = d.shape
    for first, size, count in chunks(channels, 8):
        with k.loop(count) as chunk:
            f = k.builder.add(k.builder.mul(chunk, INDEX(size)), INDEX(first))
            totals = k.variables(size)
            with k.loop(k.groups(k.lanes)) as g, k.loop(rows) as p, k.loop(columns) as q:
                at = d.pixel(k, g, p, q).at(f, d.lanes)
                for j in range(size):
                    totals[j].set(k.add(totals[j].get(), k.load(at + j * d.lanes)))
            for j in range(size):
                k.add_to(db.at(f) + j, k.sum_lanes(totals[j].get()))


def unpool(k: Emitter, windows: Windows, y: Grid, dy: Grid, d: Grid, rectified: bool) -> None:
    """d = dy at each window's argmax, else 0, and 0 wherever ReLU gave 0. Pixels in no window keep their zero."""
    rows, columns, channels = y.shape
    size = windows.size
    with k.loop(k.groups(k.lanes)) as g, k.loop(rows) as u, k.loop(columns) as v, k.loop(channels) as c:
        value = k.load(dy.pixel(k, g, u, v).at(c, dy.lanes))
        if rectified:
            value = k.where_positive(k.load(y.pixel(k, g, u, v).at(c, y.lanes)), value)
        where = k.load_bytes(windows.codes.pixel(k, g, u, v).at(c, windows.codes.lanes))
        step = d.ring.step
        corner = d.image(k, g).at(u, windows.stride * step * d.row).at(v, windows.stride * step * d.column)
        corner = corner.at(c, d.lanes)
        for i in range(size):
            for j in range(size):
                here = k.select(k.equal(where, i * size + j), value, k.zero())
                k.store(here, corner + (i * d.row + j * d.column) * step)


def rectify_gradient(k: Emitter, y: Grid, dy: Grid) -> None:
    """dy = 0 wherever ReLU gave 0, in place."""
    rows, columns, channels = y.shape
    with k.loop(k.groups(k.lanes)) as g, k.loop(rows) as p, k.loop(columns) as q, k.loop(channels) as c:
        at = dy.pixel(k, g, p, q).at(c, dy.lanes)
        k.store(k.where_positive(k.load(y.pixel(k, g, p, q).at(c, y.lanes)), k.load(at)), at)
