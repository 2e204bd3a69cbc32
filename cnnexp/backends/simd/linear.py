"""Linear layers on matrices (one image per row), in two forms.

*Wide* (many outputs): outputs in the lanes, weights (D, O) as NumPy has them, O rounded up to whole vectors. Forward
and weight gradient are products with 8 x 3 accumulators: 8 images x 3 vectors of outputs, 8 features x 3 vectors. The
input's gradient sums over outputs, so it has the batch in the lanes instead and broadcasts the weights.

*Skinny* (at most `MOST_OUTPUTS` outputs, as a classifier's last layer, where BLAS does badly): features in the lanes,
weights kept as [feature vector][output][lane]. Forward: 2 images x O accumulators, in blocks of features whose weights
stay in the first cache. Backward, one pass per feature vector: the weights and their gradients, O vectors each, stay in
registers while the images go by; each image costs 2 O multiply-adds, O broadcasts, one load and one store.
"""

from __future__ import annotations

import itertools

from llvmlite import ir

from cnnexp.backends.simd.conv_lanes import chunks
from cnnexp.backends.simd.emit import INDEX, Emitter, Pointer
from cnnexp.backends.simd.layout import Grid, Matrix, round_up

MOST_OUTPUTS = 12
BLOCK_FLOATS = 4096
"""Weights that stay in the first cache during a forward pass of the wide form, 16 KB: of a block of features, per
vector of outputs."""
SKINNY_BLOCK_FLOATS = 6144
"""Likewise in the skinny form, 24 KB: it has less else to keep there, and begins anew with each block."""


def wide_forward(k: Emitter, x: Matrix, weights: Pointer, bias: Pointer | None, y: Matrix, rectify: bool) -> None:
    """y = x @ weights + bias. weights (D, y.stride), bias (y.stride,).

    By blocks of features, so that the weights of a block stay in a cache while the images go by.
    """
    images, vectors = (8, 3) if k.target.registers >= 32 and k.lanes >= 8 else (4, 2)
    with k.loop(k.builder.mul(k.groups(images), INDEX(images))) as n, k.loop(y.stride // k.lanes) as v:
        k.store(k.load(bias.at(v, k.lanes)) if bias else k.zero(), y.row(k, n).at(v, k.lanes))
    for first, width, times in chunks(y.stride // k.lanes, vectors):
        for first_feature, features, blocks in chunks(x.size, BLOCK_FLOATS // k.lanes):
            with k.loop(times) as chunk, k.loop(blocks) as block, k.loop(k.groups(images)) as tile:
                o = k.builder.add(k.builder.mul(chunk, INDEX(width * k.lanes)), INDEX(first * k.lanes))
                d = k.builder.add(k.builder.mul(block, INDEX(features)), INDEX(first_feature))
                n = k.builder.mul(tile, INDEX(images))
                _wide_tile(k, x, weights.at(d, y.stride).at(o), y, n, d, o, features, images, width)
    if rectify:
        with k.loop(k.count) as n, k.loop(y.stride // k.lanes) as v:
            at = y.row(k, n).at(v, k.lanes)
            k.store(k.rectify(k.load(at)), at)


def _wide_tile(k: Emitter, x: Matrix, weights: Pointer, y: Matrix, n, d, o, features: int, images: int, width: int):
    """Add the products of one block of features to `width` vectors of outputs of some images."""
    source, target = x.row(k, n).at(d), y.row(k, n).at(o)
    places = [[target + (i * y.stride + v * k.lanes) for v in range(width)] for i in range(images)]
    with k.sums(places) as totals, k.loop(features) as feature:
        block = weights.at(feature, y.stride)
        row = [k.load(block + v * k.lanes) for v in range(width)]
        for i in range(images):
            value = k.splat(source.at(feature) + i * x.stride)
            for v in range(width):
                k.accumulate(totals[i][v], value, row[v])


def wide_weight_gradients(k: Emitter, x: Matrix, dy: Matrix, dw: Pointer) -> None:
    """dw += x.T @ dy. dw (D, dy.stride)."""
    features, vectors = (8, 3) if k.target.registers >= 32 else (4, 2)
    for first, width, times in chunks(dy.stride // k.lanes, vectors):
        for first_feature, height, feature_times in chunks(x.size, features):
            with k.loop(feature_times) as feature_chunk, k.loop(times) as chunk:
                o = k.builder.add(k.builder.mul(chunk, INDEX(width * k.lanes)), INDEX(first * k.lanes))
                d = k.builder.add(k.builder.mul(feature_chunk, INDEX(height)), INDEX(first_feature))
                target = dw.at(d, dy.stride).at(o)
                places = [[target + (i * dy.stride + v * k.lanes) for v in range(width)] for i in range(height)]
                with k.sums(places) as totals, k.loop(k.count) as n:
                    gradient = dy.row(k, n).at(o)
                    row = [k.load(gradient + v * k.lanes) for v in range(width)]
                    source = x.row(k, n).at(d)
                    for i in range(height):
                        value = k.splat(source + i)
                        for v in range(width):
                            k.accumulate(totals[i][v], value, row[v])


def wide_input_gradient(k: Emitter, weights: Pointer, stride: int, dy: Grid, dx: Grid) -> None:
    """dx[d, lane] = sum over o of weights[d, o] * dy[o, lane]; two groups of lanes at a time where there are two.

    Args:
        stride: of a row of the weights. dy: (1, 1, O). dx: any shape of D values without a ring.
    """
    features = dx.group // dx.lanes
    outputs = dy.shape[2]
    groups = k.groups(k.lanes)
    pairs = k.builder.udiv(groups, INDEX(2))
    with k.loop(pairs) as pair:
        _input_tiles(k, weights, stride, dy, dx, features, outputs, k.builder.mul(pair, INDEX(2)), 2)
    with k.loop(groups, start=k.builder.mul(pairs, INDEX(2))) as last:
        _input_tiles(k, weights, stride, dy, dx, features, outputs, last, 1)


def _input_tiles(k: Emitter, weights, stride, dy, dx, features: int, outputs: int, group: ir.Value, width: int) -> None:
    most = 12 if k.target.registers >= 32 else 8 // width
    source, target = dy.image(k, group), dx.image(k, group)
    for first, height, times in chunks(features, most):
        with k.loop(times) as chunk:
            d = k.builder.add(k.builder.mul(chunk, INDEX(height)), INDEX(first))
            rows = weights.at(d, stride)
            totals = [k.variables(width) for _ in range(height)]
            with k.loop(outputs) as o:
                gradients = [k.load(source.at(o, k.lanes) + g * dy.group) for g in range(width)]
                for i in range(height):
                    weight = k.splat(rows.at(o) + i * stride)
                    for g in range(width):
                        k.accumulate(totals[i][g], weight, gradients[g])
            for i in range(height):
                for g in range(width):
                    k.store(totals[i][g].get(), target.at(d, k.lanes) + (i * k.lanes + g * dx.group))


def bias_gradients(k: Emitter, dy: Matrix, db: Pointer) -> None:
    """db += the sum of dy over images."""
    with k.loop(dy.stride // k.lanes) as v:
        total = k.variable(k.load(db.at(v, k.lanes)))
        with k.loop(k.count) as n:
            total.set(k.add(total.get(), k.load(dy.row(k, n).at(v, k.lanes))))
        k.store(total.get(), db.at(v, k.lanes))


def rectify_gradient(k: Emitter, y: Matrix, dy: Matrix) -> None:
    """dy = 0 wherever ReLU gave 0, in place."""
    with k.loop(k.count) as n, k.loop(y.stride // k.lanes) as v:
        at = dy.row(k, n).at(v, k.lanes)
        k.store(k.where_positive(k.load(y.row(k, n).at(v, k.lanes)), k.load(at)), at)


def skinny_size(features: int, outputs: int, lanes: int) -> int:
    """Return the floats of a skinny layer's weights."""
    return round_up(features, lanes) * outputs


def skinny_begin(k: Emitter, totals: Pointer, outputs: int) -> None:
    """Begin y = x @ weights + bias: clear totals [image][output][lane], sums over the features of each lane."""
    with k.loop(k.count) as n, k.loop(outputs) as o:
        k.store(k.zero(), totals.at(n, outputs * k.lanes).at(o, k.lanes))


def skinny_add(
    k: Emitter, x: Matrix, weights: Pointer, totals: Pointer, outputs: int, start: ir.Value, vectors: int
) -> None:
    """Add the products of `vectors` vectors of features from `start` on. weights [feature vector][output][lane]."""
    room = outputs * k.lanes
    images = 2 if 2 * outputs + 3 <= k.target.registers else 1
    for first, size, times in chunks(vectors, max(1, SKINNY_BLOCK_FLOATS // room)):
        with k.loop(times) as block:
            at = k.builder.add(k.builder.mul(block, INDEX(size)), k.builder.add(start, INDEX(first)))
            pairs = k.builder.udiv(k.count, INDEX(images))
            with k.loop(pairs) as pair:
                n = k.builder.mul(pair, INDEX(images))
                _skinny_tile(k, x, weights, totals, n, images, at, size, outputs)
            with k.loop(k.count, start=k.builder.mul(pairs, INDEX(images))) as n:
                _skinny_tile(k, x, weights, totals, n, 1, at, size, outputs)


def skinny_end(k: Emitter, totals: Pointer, bias: Pointer | None, y: Matrix, rectify: bool) -> None:
    """y = the totals, their lanes added up, + bias (y.stride,)."""
    outputs = y.size
    room = outputs * k.lanes
    with k.loop(k.count) as n:
        for first in range(0, outputs, k.lanes):
            rows = [k.load(totals.at(n, room) + o * k.lanes) for o in range(first, min(first + k.lanes, outputs))]
            rows += [k.zero()] * (k.lanes - len(rows))
            terms = k.transpose(rows)
            while len(terms) > 1:
                terms = [k.add(a, b) for a, b in zip(terms[::2], terms[1::2], strict=True)]
            value = k.add(terms[0], k.load(bias + first)) if bias else terms[0]
            k.store(k.rectify(value) if rectify else value, y.row(k, n) + first)


def _skinny_tile(k: Emitter, x: Matrix, weights, totals, n, images: int, start, size: int, outputs: int) -> None:
    """Add the products of one block of features to the totals of one or two images."""
    room = outputs * k.lanes
    places = [[totals.at(n, room) + (i * room + o * k.lanes) for o in range(outputs)] for i in range(images)]
    with k.sums(places) as sums:
        source = x.row(k, n).at(start, k.lanes)
        block = weights.at(start, room)
        with k.loop(size) as v:
            values = [k.load(source.at(v, k.lanes) + i * x.stride) for i in range(images)]
            for o in range(outputs):
                weight = k.load(block.at(v, room) + o * k.lanes)
                for i in range(images):
                    k.accumulate(sums[i][o], weight, values[i])


def skinny_backward(
    k: Emitter,
    x: Matrix,
    weights: Pointer,
    dy: Matrix,
    dx: Matrix | None,
    dw: Pointer,
    rectified: bool,
    start: ir.Value,
    vectors: int,
) -> None:
    """dw += x.T @ dy, dx = dy @ weights.T.

    Args:
        start, vectors: the vectors of features that it is about.
        dx: may be `x` itself, which then is overwritten, if `reads_once`.
        rectified: x is a ReLU's output, and dx the gradient of that ReLU's input.
    """
    outputs = dy.size
    room = outputs * k.lanes
    parts = chunks(outputs, 12 if k.target.registers >= 32 else 6)
    starts = [first + i * size for first, size, times in parts for i in range(times)] + [outputs]
    with k.loop(k.builder.add(start, INDEX(vectors)), start=start) as v:
        for first, last in itertools.pairwise(starts):
            block = [weights.at(v, room) + o * k.lanes for o in range(first, last)]
            places = [dw.at(v, room) + o * k.lanes for o in range(first, last)]
            columns = [k.load(place) for place in block] if dx else []
            totals = [k.variable(k.load(place)) for place in places]
            with k.loop(k.count) as n:
                value = k.load(x.row(k, n).at(v, k.lanes))
                sums = [k.zero(), k.zero()]
                for i in range(last - first):
                    gradient = k.splat(dy.row(k, n) + (first + i))
                    k.accumulate(totals[i], gradient, value)
                    if dx:
                        sums[i % 2] = k.fma(gradient, columns[i], sums[i % 2])
                if dx:
                    target = dx.row(k, n).at(v, k.lanes)
                    total = k.add(*sums)
                    if first:
                        total = k.add(total, k.load(target))
                    k.store(k.where_positive(value, total) if rectified else total, target)
            for total, place in zip(totals, places, strict=True):
                k.store(total.get(), place)


def reads_once(outputs: int, registers: int) -> bool:
    """Whether `skinny_backward` reads each x only once, so that dx may take its place."""
    return outputs <= (12 if registers >= 32 else 6)
