"""Linear layers on matrices (one image per row), in two forms.

*Wide* (many outputs): outputs in the lanes, weights in panels; forward and weight gradient are the products of
`product`. The input's gradient sums over outputs, so it has the batch in the lanes instead and broadcasts the weights,
which the panels hold in runs.

*Skinny* (at most `MOST_OUTPUTS` outputs, as a classifier's last layer, where BLAS does badly): features in the lanes,
weights kept as [feature vector][output][lane]. Forward: 2 images x O accumulators, in blocks of features whose weights
stay in the first cache. Backward, one pass per feature vector: the weights and their gradients, O vectors each, stay in
registers while the images go by; each image costs 2 O multiply-adds, O broadcasts, one load and one store.
"""

from __future__ import annotations

import itertools

import numpy as np
from llvmlite import ir

from cnnexp.backends.simd import update
from cnnexp.backends.simd.emit import INDEX, Emitter, Pointer
from cnnexp.backends.simd.layout import LINE_FLOATS, Grid, Matrix, Views, round_up
from cnnexp.backends.simd.product import Panels, Steps, add_products, chunks, most_height
from cnnexp.optimizers import Optimizer

MOST_OUTPUTS = 12
SKINNY_BLOCK_FLOATS = 6144
"""Weights that stay in the first cache during a forward pass of the skinny form, 24 KB."""

AHEAD = 2
"""Vectors of features before the one whose x is brought near: images lie too far apart for a CPU to foresee them."""


def linear(
    k: Emitter, x: Matrix, weights: Pointer, panels: Panels, bias: Pointer | None, y: Matrix, rectify: bool, height: int
) -> None:
    """y = x @ weights + bias, by tiles of `height` images; the last ends with the last image, and may do some twice."""
    for panel in panels.each(k):
        unit = panel.width * k.lanes
        with k.loop(k.groups(height)) as tile:
            n = k.builder.mul(tile, INDEX(height))
            last = k.builder.sub(k.count, INDEX(height))
            n = k.builder.select(k.builder.icmp_signed("<", n, last), n, last)
            n = k.builder.select(k.builder.icmp_signed("<", n, INDEX(0)), INDEX(0), n)
            totals = [k.variables(panel.width) for _ in range(height)]
            steps = Steps(1, x.size, (0, 1), (0, unit))
            places = [i * x.stride for i in range(height)]
            add_products(k, totals, x.row(k, n), places, panel.at(weights), steps, [k.lanes] * panel.width)
            target = panel.outputs(y.row(k, n))
            for i, row in enumerate(totals):
                for v, total in enumerate(row):
                    value = total.get()
                    if bias is not None:
                        value = k.add(value, k.load(panel.outputs(bias) + v * k.lanes))
                    k.store(k.rectify(value) if rectify else value, target + (i * y.stride + v * k.lanes))


def linear_backward_weights(k: Emitter, x: Matrix, dy: Matrix, panels: Panels, dw: Pointer) -> None:
    """dw += x.T @ dy, in panels as the weights."""
    for panel in panels.each(k):
        unit = panel.width * k.lanes
        for first, height, times in chunks(x.size, most_height(panel.width, k.target.registers)):
            with k.loop(times) as t:
                d = k.builder.add(k.builder.mul(t, INDEX(height)), INDEX(first))
                target = panel.at(dw).at(d, unit)
                places = [[target + (i * unit + v * k.lanes) for v in range(panel.width)] for i in range(height)]
                with k.sums(places) as totals:
                    steps = Steps(1, k.count, (0, x.stride), (0, dy.stride))
                    source, gradient = x.row(k, 0).at(d), panel.outputs(dy.row(k, 0))
                    add_products(k, totals, source, list(range(height)), gradient, steps, panel.valid)


def own_arena(k: Emitter, stride: int) -> Pointer:
    """Return the arena of the thread that runs a kernel on the buffers of `wide_update`."""
    *_, arenas, table = k.buffers
    return arenas.at(k.builder.load(table.value(INDEX)), stride)


def wide_update(
    k: Emitter, x: Matrix, dy: Matrix, panels: Panels, offset: int, arena: int, optimizer: Optimizer
) -> None:
    """Take the optimizer's step of this thread's share of the weights with x.T @ dy over all threads' images.

    The gradient is never stored. One sum goes over all threads' images: a sum for each would end in the very bits that
    workers end in, and take a fifth more time at 8 images a thread. Buffers: parameters, two slots, (rate, c0, c1), all
    threads' arenas, and int64 (2 + threads,): this thread's rank, the number of threads, and the images in each one's
    arena.

    Args:
        offset: of the weights in the parameters. arena: floats from arena to arena.
    """
    *state, numbers, arenas, table = k.buffers
    rank, threads = (k.builder.load((table + i).value(INDEX)) for i in range(2))
    step = update.Step(k, optimizer, numbers)
    for panel in panels.each(k):
        unit = panel.width * k.lanes
        for first, height, times in chunks(x.size, most_height(panel.width, k.target.registers)):
            low, high = (
                k.builder.udiv(k.builder.mul(INDEX(times), r), threads) for r in (rank, k.builder.add(rank, INDEX(1)))
            )
            with k.loop(high, start=low) as t:
                d = k.builder.add(k.builder.mul(t, INDEX(height)), INDEX(first))
                places = [panel.at(buffer + offset).at(d, unit) for buffer in state]
                for line in range(0, height * unit, LINE_FLOATS):  # the other threads' cores have them, too
                    k.prefetch(places[0] + line, written=True)
                totals = [k.variables(panel.width) for _ in range(height)]
                with k.loop(threads) as other:
                    count = k.builder.load((table + 2).at(other).value(INDEX))
                    steps = Steps(1, count, (0, x.stride), (0, dy.stride))
                    source = (arenas + x.offset).at(other, arena).at(d)
                    gradient = panel.outputs((arenas + dy.offset).at(other, arena))
                    add_products(k, totals, source, list(range(height)), gradient, steps, panel.valid)
                for i, row in enumerate(totals):
                    for v, total in enumerate(row):
                        step.take([place + (i * unit + v * k.lanes) for place in places], total.get())


def linear_backward_input(k: Emitter, weights: Pointer, panels: Panels, dy: Grid, dx: Grid, groups: int) -> None:
    """dx[d, lane] = sum over o of weights[d, o] * dy[o, lane], `groups` groups of lanes.

    Args:
        dy: (1, 1, O). dx: any shape of D values without a ring.
    """
    features = dx.group // dx.lanes
    for first_group, width, group_times in chunks(groups, 4):
        for first, height, times in chunks(features, most_height(width, k.target.registers)):
            with k.loop(times) as t, k.loop(group_times) as part:
                d = k.builder.add(k.builder.mul(t, INDEX(height)), INDEX(first))
                group = k.builder.add(k.builder.mul(part, INDEX(width)), INDEX(first_group))
                source, target = dy.image(k, group), dx.image(k, group)
                totals = [k.variables(width) for _ in range(height)]
                for vector, panel_width, panel_times in panels.kinds:
                    unit, panel = panel_width * k.lanes, panels.rows * panel_width * k.lanes
                    outputs = min(unit, panels.outputs - (vector + (panel_times - 1) * panel_width) * k.lanes)
                    steps = Steps(panel_times, outputs, (panel, 1), (unit * k.lanes, k.lanes), dy.group)
                    rows = (weights + vector * panels.rows * k.lanes).at(d, unit)
                    lines = source + vector * k.lanes * k.lanes
                    places = [i * unit for i in range(height)]
                    add_products(k, totals, rows, places, lines, steps, [k.lanes] * width)
                for i, row in enumerate(totals):
                    for g, total in enumerate(row):
                        k.store(total.get(), target.at(d, k.lanes) + (i * k.lanes + g * dx.group))


def linear_backward_bias(k: Emitter, dy: Matrix, db: Pointer) -> None:
    """db += the sum of dy over images."""
    with k.loop(dy.width // k.lanes) as v:
        total = k.variable(k.load(db.at(v, k.lanes)))
        with k.loop(k.count) as n:
            total.set(k.add(total.get(), k.load(dy.row(k, n).at(v, k.lanes))))
        k.store(total.get(), db.at(v, k.lanes))


def rectify_gradient(k: Emitter, y: Matrix, dy: Matrix) -> None:
    """dy = 0 wherever ReLU gave 0, in place."""
    with k.loop(k.count) as n, k.loop(y.width // k.lanes) as v:
        at = dy.row(k, n).at(v, k.lanes)
        k.store(k.where_positive(k.load(y.row(k, n).at(v, k.lanes)), k.load(at)), at)


def skinny_size(features: int, outputs: int, lanes: int) -> int:
    """Return the floats of a skinny layer's weights."""
    return round_up(features, lanes) * outputs


def skinny_views(flat: np.ndarray, packed: np.ndarray, runs: int, run: int, room: int, lanes: int) -> Views:
    """Return where the weights (D, O) of a skinny layer lie whose features are runs that take `room` each.

    See `Parameters.place`. The room is whole vectors where there is more than one.
    """
    ours, vectors = flat.reshape(runs, run, -1), round_up(room, lanes) // lanes
    theirs, whole = packed.reshape(runs, vectors, -1, lanes), run // lanes
    full = ours[:, : whole * lanes].reshape(runs, whole, lanes, ours.shape[2])
    pairs = [(full.swapaxes(2, 3), theirs[:, :whole])]
    if whole < vectors:
        pairs.append((ours[:, whole * lanes :].swapaxes(1, 2), theirs[:, whole, :, : run - whole * lanes]))
    return pairs


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
    """y = the totals, their lanes added up, + bias (y.width,)."""
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


def _skinny_tile(
    k: Emitter,
    x: Matrix,
    weights: Pointer,
    totals: Pointer,
    n: ir.Value,
    images: int,
    start: ir.Value,
    size: int,
    outputs: int,
) -> None:
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
        dx: of all of x, or of those features alone.
        rectified: x is a ReLU's output, and dx the gradient of that ReLU's input.
    """
    outputs = dy.size
    room = outputs * k.lanes
    parts = chunks(outputs, most_block(k.target.registers))
    starts = [first + i * size for first, size, times in parts for i in range(times)] + [outputs]
    with k.loop(k.builder.add(start, INDEX(vectors)), start=start) as v:
        for first, last in itertools.pairwise(starts):
            block = [weights.at(v, room) + o * k.lanes for o in range(first, last)]
            places = [dw.at(v, room) + o * k.lanes for o in range(first, last)]
            columns = [k.load(place) for place in block] if dx else []
            totals = [k.variable(k.load(place)) for place in places]
            with k.loop(k.count) as n:
                k.prefetch(x.row(k, n).at(v, k.lanes) + AHEAD * k.lanes)
                value = k.load(x.row(k, n).at(v, k.lanes))
                sums = [k.zero(), k.zero()]
                for i in range(last - first):
                    gradient = k.splat(dy.row(k, n) + (first + i))
                    k.accumulate(totals[i], gradient, value)
                    if dx:
                        sums[i % 2] = k.fma(gradient, columns[i], sums[i % 2])
                if dx:
                    target = dx.row(k, n).at(v if dx.size == x.size else k.builder.sub(v, start), k.lanes)
                    total = k.add(*sums)
                    if first:
                        total = k.add(total, k.load(target))
                    k.store(k.where_positive(value, total) if rectified else total, target)
            for total, place in zip(totals, places, strict=True):
                k.store(total.get(), place)


def most_block(registers: int) -> int:
    """Return the outputs that `skinny_backward` does at once; with more it reads x again."""
    return 12 if registers >= 32 else 6
