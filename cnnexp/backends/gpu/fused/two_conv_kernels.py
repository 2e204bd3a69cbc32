"""The kernels of a small network of two convolutions, pooling and two linear layers: see `two_conv`.

A block works on a tile: some rows of pooled outputs of one image. What passes between the convolutions stays in shared
memory, channel by channel, with the rows around the tile that windows reach: "the map" is what lies between them, in
rows and columns as the second convolution pads it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from cnnexp.backends.gpu.fused.conv_kernels import ACROSS, in_fours, pixel_of, pooled_of
from cnnexp.backends.gpu.fused.linear_kernels import lanes_of
from cnnexp.backends.gpu.fused.two_conv_cut import THREADS, Cut, Places, at_once, largest_factor
from cnnexp.backends.gpu.kernels import ZERO, f32, u32
from cnnexp.backends.gpu.launch import Kernel


@cache
def copy_of(size: int) -> Any:
    """Return the device function (source, target): the block copies `size` numbers, all loads on their way at once."""
    whole, rest, last = size // THREADS, u32(size % THREADS), u32(size - 1)

    def copy(source, target):
        t = u32(cuda.threadIdx.x)
        end = u32(t + u32(whole * THREADS))
        value = source[end if end < last else last]
        for j in range(whole):
            target[u32(t + u32(j * THREADS))] = source[u32(t + u32(j * THREADS))]
        if t < rest:
            target[end] = value

    return cuda.jit(device=True)(copy)


@cache
def forward(cut: Cut, places: Places) -> Kernel:
    """Both convolutions, pooling, and the tile's part of the first linear layer: a block per image and tile.

    Writes the map, the argmax, the pooled features, and partial[tile, n, o] = sum over the tile's features d of
    feature[d] * w3[d, o].
    """
    first, second = cut.first.sizes, cut.second.sizes
    C, K1, F1, stride = u32(first.C), u32(first.K), u32(first.F), u32(first.stride)
    K2, F2, S, U, V = u32(second.K), u32(second.F), u32(cut.second.pool), u32(cut.second.U), u32(cut.second.V)
    top, left, M, N = u32(second.top), u32(second.left), u32(cut.map_rows), u32(cut.map_columns)
    image, D, hidden = u32(first.H * first.W * first.C), u32(cut.features), u32(cut.hidden)
    rows, tiles, wide, pitch, plane = (u32(v) for v in (cut.rows, cut.tiles, cut.second.wide, cut.pitch, cut.plane))
    block, window, batch, y_base = u32(THREADS), cut.second.pool**2, u32(cut.batch), u32(places.features)
    x_high, x_wide = u32(cut.image_rows), u32(cut.image_columns)
    x_top, x_left = u32(top * stride), u32(left * stride)
    x_size, m_size, sums_size = cut.image_rows * cut.image_columns * first.C, in_fours(first.F * cut.plane), cut.sums
    w1_size, w2_size = first.K**2 * first.C * first.F, second.K**2 * second.C * second.F
    w1_room, w2_room, y_size = in_fours(w1_size), in_fours(w2_size), cut.padded_features
    pixel, pooled, copy_w1, copy_w2 = pixel_of(cut.first), pooled_of(cut.second), copy_of(w1_size), copy_of(w2_size)
    together, across, x_seen = largest_factor(first.F, 4), u32(ACROSS), (ACROSS - 1) * first.stride + first.K
    map_high, map_quads, total_count = u32(cut.map_shape[0]), u32(cut.map_quads), together * ACROSS
    map_cells, ragged = u32(cut.high * cut.map_quads), int(wide) % ACROSS != 0
    map_items, step = u32(int(map_cells) * first.F // together), first.stride
    first_bias, first_relu, has_bias = cut.first.has_bias, cut.first.relu, cut.second.has_bias
    filters, filter_groups, channel_groups = cut.filters, u32(cut.filter_groups), u32(cut.channel_groups)
    channels, cells, abreast = second.C // cut.channel_groups, u32(cut.cells), u32(cut.abreast)
    neighbours, cells_across = cut.neighbours, u32(cut.second.V // cut.neighbours)
    rounds, items, totals = (
        -(-cut.cells // cut.abreast),
        u32(cut.abreast * cut.filter_groups),
        filters * neighbours * window,
    )
    weights, seen, handed = (
        filters * second.K,
        neighbours * cut.second.pool + second.K - 1,
        u32((cut.channel_groups - 1) * int(items)),
    )
    seen_size = cut.second.pool * seen
    lanes, parts, (ahead_by, turns) = u32(cut.linear_lanes), u32(cut.linear_parts), at_once(cut.linear_each)
    pair, linear_rounds = cut.hidden_together, -(-cut.hidden // (cut.linear_lanes * cut.hidden_together))
    exact = cut.rows * cut.tiles == cut.second.U and cut.padded_features == cut.features // cut.tiles

    def forward(x, order, cursor, ahead, w1, b1, w2, b2, w3, maps, argmax, arena, partial):
        x_tile = cuda.shared.array(x_size, f32, alignment=16)
        m_tile = cuda.shared.array(m_size, f32, alignment=16)
        w1_tile = cuda.shared.array(w1_room, f32, alignment=16)
        w2_tile = cuda.shared.array(w2_room, f32, alignment=16)
        sums = cuda.shared.array(sums_size, f32)
        y_tile = cuda.shared.array(y_size, f32)
        t = u32(cuda.threadIdx.x)
        n, tile = u32(u32(cuda.blockIdx.x) // tiles), u32(u32(cuda.blockIdx.x) % tiles)
        u0 = u32(tile * rows)
        start = u32(order[u32(cursor[0] + ahead + n)] * image)
        copy_w1(w1, w1_tile)
        copy_w2(w2, w2_tile)
        i = t
        while i < u32(y_size):
            y_tile[i] = ZERO
            i = u32(i + block)
        i = t
        while i < u32(x_size):
            c, place = u32(i % C), u32(i // C)
            row, col = u32(u32(u0 * S) * stride + place // x_wide), u32(place % x_wide)  # past what pads the map
            value = ZERO
            if x_top <= row and x_left <= col:
                value = pixel(x, start, u32(row - x_top), u32(col - x_left), c)
            x_tile[u32(u32(c * u32(x_high * x_wide)) + place)] = value
            i = u32(i + block)
        cuda.syncthreads()

        total_m = cuda.local.array(total_count, f32)
        pixels = cuda.local.array(x_seen, f32)
        item = t
        while item < map_items:
            cell, f0 = u32(item % map_cells), u32(u32(item // map_cells) * u32(together))
            i, j0 = u32(cell // map_quads), u32(u32(cell % map_quads) * across)
            corner = u32(u32(i * x_wide + j0) * stride)
            for g in range(total_count):
                total_m[g] = ZERO
            for c in range(C):
                for a in range(K1):
                    place = corner + u32(u32(u32(c) * x_high + u32(a)) * x_wide)
                    for k in range(x_seen):
                        pixels[k] = x_tile[place + u32(k)]
                    tap = f0 + u32(u32(u32(u32(a) * K1) * C + u32(c)) * F1)
                    for e in range(K1):
                        for g in range(together):
                            value = w1_tile[tap + u32(u32(u32(e) * u32(C * F1)) + u32(g))]
                            for j in range(ACROSS):
                                total_m[g * ACROSS + j] += value * pixels[j * step + e]
            row = u32(u0 * S + i)
            owned = top <= row and row < u32(M + top) and (i < u32(rows * S) or tile == u32(tiles - u32(1)))
            for g in range(together):
                bias = b1[u32(f0 + u32(g))] if first_bias else ZERO
                place = u32(u32(u32(u32(n * F1 + f0) + u32(g)) * map_high + row) * pitch)
                own = u32(u32(u32(f0 + u32(g)) * plane) + u32(i * pitch + j0))
                for k in range(ACROSS):
                    j = u32(j0 + u32(k))
                    inside = top <= row and row < u32(M + top) and left <= j and j < u32(N + left)
                    value = total_m[g * ACROSS + k] + bias
                    if first_relu:
                        value = value if value > ZERO else ZERO
                    if not ragged or j < wide:
                        m_tile[own + u32(k)] = value if inside else ZERO
                    if inside and owned:
                        maps[u32(place + j)] = value
            item = u32(item + block)
        cuda.syncthreads()

        total = cuda.local.array(totals, f32)
        weight = cuda.local.array(weights, f32)
        values = cuda.local.array(seen_size, f32)
        group, item = u32(t // items), u32(t % items)
        f0 = u32(u32(item % filter_groups) * u32(filters))
        for turn in range(rounds):
            cell = u32(u32(u32(turn) * abreast) + item // filter_groups)
            u, v = u32(cell // cells_across), u32(u32(cell % cells_across) * u32(neighbours))
            active = group < channel_groups and cell < cells and u32(u0 + u) < U
            for k in range(totals):
                total[k] = ZERO
            if active:
                corner = u32(u32(group * plane) + u32(u32(u * S) * pitch + v * S))
                own = u32(group * F2 + f0)
                for c in range(channels):
                    for a in range(K2):
                        tap = own + u32(u32(u32(u32(a) * K2) * F1 + u32(c) * channel_groups) * F2)
                        for e in range(K2):
                            for g in range(filters):
                                weight[e * filters + g] = w2_tile[tap + u32(u32(u32(e) * u32(F1 * F2)) + u32(g))]
                        place = corner + u32(u32(u32(u32(c) * channel_groups) * plane) + u32(a) * pitch)
                        for i in range(S):
                            for k in range(seen):
                                values[i * seen + k] = m_tile[place + u32(u32(u32(i) * pitch) + u32(k))]
                        for e in range(K2):
                            for g in range(filters):
                                for k in range(neighbours):
                                    for i in range(S):
                                        for j in range(S):
                                            total[((g * neighbours + k) * S + i) * S + j] += (
                                                weight[e * filters + g] * values[i * seen + k * S + j + e]
                                            )
                if group > u32(0):
                    for k in range(totals):
                        sums[u32(u32(u32(k) * handed) + u32(u32(group - u32(1)) * items + item))] = total[k]
            cuda.syncthreads()
            if active and group == u32(0):
                for c in range(u32(channel_groups - u32(1))):
                    for k in range(totals):
                        total[k] += sums[u32(u32(u32(k) * handed) + u32(u32(c) * items + item))]
                for g in range(filters):
                    f = u32(f0 + u32(g))
                    for k in range(neighbours):
                        best, where = pooled(total, (g * neighbours + k) * window, b2[f] if has_bias else ZERO)
                        place = u32(u32(u32(u * V + v) + u32(k)) * F2 + f)
                        feature = u32(n * D + u32(u32(u0 * V) * F2) + place)
                        y_tile[place] = best
                        arena[u32(y_base + feature)] = best
                        argmax[feature] = np.uint8(where)
            cuda.syncthreads()

        part, d0 = u32(t // lanes), u32(u32(u0 * V) * F2)
        sum_o = cuda.local.array(pair, f32)
        for turn in range(linear_rounds):
            o = u32(u32(u32(turn) * u32(lanes * u32(pair))) + t % lanes)
            for g in range(pair):
                sum_o[g] = ZERO
            if o < hidden and part < parts:
                for some in range(turns):
                    k = u32(part + u32(u32(some) * u32(u32(ahead_by) * parts)))
                    first_w = u32(u32(d0 + k) * hidden + o)
                    for j in range(ahead_by):
                        value, place = y_tile[k + u32(u32(j) * parts)], first_w + u32(u32(j) * u32(parts * hidden))
                        if not exact:  # what is past the tile is multiplied by zero
                            d = u32(u32(d0 + k) + u32(j) * parts)
                            place = u32((d if d < D else u32(D - u32(1))) * hidden + o)
                        for g in range(pair):
                            sum_o[g] += value * w3[place + u32(u32(g) * lanes)]
            for g in range(pair):
                sums[u32(u32(u32(g) * block) + t)] = sum_o[g]
            cuda.syncthreads()
            if o < hidden and part == u32(0):
                for g in range(pair):
                    value = ZERO
                    for k in range(parts):
                        value += sums[u32(u32(u32(g) * block) + u32(t + u32(k) * lanes))]
                    partial[u32(u32(u32(tile * batch) + n) * hidden + u32(o + u32(g) * lanes))] = value
            cuda.syncthreads()

    floats = ", ".join(["float32[::1]"] * 6)
    start = f"{cut.first.input_type}, uint32[::1], uint32[::1], uint32"
    return Kernel(forward, f"void({start}, {floats}, uint8[::1], float32[::1], float32[::1])", THREADS)


@cache
def head_of(cut: Cut) -> Any:
    """Return the device function (partial, n, b3, w4, b4, h, sums, score): an image's hidden outputs and scores.

    `h`, `sums` and `score` are in shared memory; all threads of the block are in step at the end.
    """
    hidden, outputs, tiles, batch, block = (u32(v) for v in (cut.hidden, cut.outputs, cut.tiles, cut.batch, THREADS))
    lanes = u32(lanes_of(cut.outputs))
    parts, relu, (bias, last_bias) = u32(THREADS // int(lanes)), cut.relu, cut.biases
    each = -(-cut.hidden // int(parts))

    def head(partial, n, b3, w4, b4, h, sums, score):
        t = u32(cuda.threadIdx.x)
        o, part = u32(t % lanes), u32(t // lanes)
        weight = cuda.local.array(each, f32)
        for j in range(each):
            k = u32(part + u32(j) * parts)
            within = o < outputs and k < hidden
            weight[j] = w4[u32(k * outputs + o) if within else u32(0)]
        i = t
        while i < hidden:
            value = b3[i] if bias else ZERO
            for tile in range(tiles):
                value += partial[u32(u32(u32(u32(tile) * batch) + n) * hidden + i)]
            if relu:
                value = value if value > ZERO else ZERO
            h[i] = value
            i = u32(i + block)
        cuda.syncthreads()
        value = ZERO
        for j in range(each):
            k = u32(part + u32(j) * parts)
            value += weight[j] * (h[k] if k < hidden else ZERO)
        sums[t] = value
        cuda.syncthreads()
        if t < outputs:
            value = b4[t] if last_bias else ZERO
            for k in range(parts):
                value += sums[u32(u32(k) * lanes + t)]
            score[t] = value
        cuda.syncthreads()

    return cuda.jit(device=True)(head)


@cache
def scores(cut: Cut) -> Kernel:
    """The scores of an image from the parts of its hidden outputs: a block per image, for predictions."""
    head, outputs, hidden, lanes = head_of(cut), u32(cut.outputs), cut.hidden, lanes_of(cut.outputs)

    def scores(partial, b3, w4, b4, y):
        h = cuda.shared.array(hidden, f32)
        sums = cuda.shared.array(THREADS, f32)
        score = cuda.shared.array(lanes, f32)
        t, n = u32(cuda.threadIdx.x), u32(cuda.blockIdx.x)
        head(partial, n, b3, w4, b4, h, sums, score)
        if t < outputs:
            y[u32(n * outputs + t)] = score[t]

    return Kernel(scores, f"void({', '.join(['float32[::1]'] * 5)})", THREADS)
