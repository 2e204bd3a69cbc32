"""The kernel that takes the network of `two_conv` back from its hidden outputs: a tile of an image at a time."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from cnnexp.backends.gpu.fused.conv_kernels import ACROSS, in_fours, pixel_of
from cnnexp.backends.gpu.fused.linear_kernels import lanes_of, softmax_of
from cnnexp.backends.gpu.fused.two_conv_cut import THREADS, Cut, Places, at_once, largest_factor
from cnnexp.backends.gpu.fused.two_conv_kernels import head_of
from cnnexp.backends.gpu.kernels import ZERO, f32, u32
from cnnexp.backends.gpu.launch import Kernel


@cache
def rows_of_weights(K: int, C: int, F: int, groups: int, has_bias: bool) -> Any:
    """Return the device function (room, total, total_b, arena, w_base, b_base): the gradient of a block's windows.

    Each thread hands over the K sums of its row of weights (a, c, f), and that of the bias; they are added up over the
    groups that share out a row's windows. `room` is in shared memory.
    """
    owners, K_, C_, F_, block = K * C * F, u32(K), u32(C), u32(F), u32(THREADS)

    def add_up(room, total, total_b, arena, w_base, b_base):
        t = u32(cuda.threadIdx.x)
        cuda.syncthreads()
        for e in range(K):
            room[u32(u32(u32(e) * block) + t)] = total[e]
        room[u32(u32(K_ * block) + t)] = total_b
        cuda.syncthreads()
        i = t
        while i < u32(u32(K_ + u32(1)) * u32(owners)):
            e, owner = u32(i // u32(owners)), u32(i % u32(owners))
            f, c, a = u32(owner % F_), u32(u32(owner // F_) % C_), u32(owner // u32(F_ * C_))
            value = ZERO
            for g in range(groups):
                value += room[u32(u32(e * block) + u32(g * owners) + owner)]
            if e < K_:
                arena[u32(w_base + u32(u32(u32(a * K_ + e) * C_ + c) * F_) + f)] = value
            elif has_bias and owner < F_:
                arena[u32(b_base + f)] = value
            i = u32(i + block)

    return cuda.jit(device=True)(add_up)


@cache
def turned(K: int, C: int, F: int) -> Any:
    """Return the device function (w, tile): the block stages filters w (K, K, C, F), turned, as (F, K, K, C)."""
    size, K_, C_, F_, block = u32(K * K * C * F), u32(K), u32(C), u32(F), u32(THREADS)
    each, last = -(-int(size) // THREADS), u32(K - 1)

    def stage(w, tile):
        t = u32(cuda.threadIdx.x)
        held = cuda.local.array(each, f32)
        for k in range(each):
            i = u32(t + u32(u32(k) * block))
            i = i if i < size else u32(0)
            c, e, a, f = (
                u32(i % C_),
                u32(u32(i // C_) % K_),
                u32(u32(i // u32(C_ * K_)) % K_),
                u32(i // u32(C_ * K_ * K_)),
            )
            held[k] = w[u32(u32(u32(u32(u32(last - a) * K_ + u32(last - e)) * C_) + c) * F_ + f)]
        for k in range(each):
            i = u32(t + u32(u32(k) * block))
            if i < size:
                tile[i] = held[k]

    return cuda.jit(device=True)(stage)


@cache
def backward(cut: Cut, places: Places) -> Kernel:
    """Scores, losses and all gradients but the linear weights', which `update` makes: a block per slice and tile.

    Windows of the tile give its part of the second filters' gradient, rows of the map that it owns that of the first's.
    """
    first, second = cut.first.sizes, cut.second.sizes
    C, K1, F1, stride = u32(first.C), u32(first.K), u32(first.F), u32(first.stride)
    K2, F2, S, V = u32(second.K), u32(second.F), u32(cut.second.pool), u32(cut.second.V)
    top, left, last = u32(second.top), u32(second.left), u32(second.K - 1)
    M, N, pitch = u32(cut.map_rows), u32(cut.map_columns), u32(cut.pitch)
    image, D, hidden, outputs = u32(first.H * first.W * first.C), u32(cut.features), u32(cut.hidden), u32(cut.outputs)
    rows, tiles, slices, block, shut = (u32(v) for v in (cut.rows, cut.tiles, cut.slices, THREADS, cut.second.shut))
    m_high, u_high, plane, owned = u32(cut.extents[0]), cut.extents[1], u32(cut.backward_plane), u32(cut.owned_rows)
    g_size, m_size, room_size = u_high * int(V * F2), first.F * int(plane), cut.room
    own_size, per = cut.rows * int(V * F2), -(-g_size // (THREADS // 2))  # features of a thread
    g_lanes, m_plane, map_plane = u32(-(-g_size // per)), u32(m_high * pitch), u32(cut.map_shape[0] * cut.map_shape[1])
    m_count = u32(F1 * m_plane)
    high, broad = (u32(v) for v in cut.spread)
    x_high, x_wide = (u32(v) for v in cut.image_backward)
    x_size, w_size, w_room = int(x_high * x_wide * C), int(K2 * K2 * F1 * F2), in_fours(int(K2 * K2 * F1 * F2))
    (owners1, owners2), (groups1, groups2) = ((u32(v) for v in pair) for pair in (cut.owners, cut.groups))
    head, softmax, pixel = head_of(cut), softmax_of(cut.outputs), pixel_of(cut.first)
    m_each, f_weights, stage_turned = (
        -(-int(m_count) // THREADS),
        u32(K2 * K2 * F1),
        turned(second.K, first.F, second.F),
    )
    add_up1 = rows_of_weights(first.K, first.C, first.F, int(groups1), cut.first.has_bias)
    add_up2 = rows_of_weights(second.K, second.C, second.F, int(groups2), cut.second.has_bias)
    ahead_by, turns = at_once(cut.hidden)
    h_size, o_size = in_fours(ahead_by * turns), lanes_of(cut.outputs)
    together = largest_factor(first.F, 2)
    channel_groups, spans, across, sharers = u32(first.F // together), u32(cut.spans), cut.across, u32(cut.sharers)
    items, seen, totals = u32(cut.gradient_items), cut.across + second.K - 1, cut.across * together
    filters, row_weights, rounds = (
        second.F // cut.sharers,
        second.K * together,
        -(-cut.gradient_items * cut.sharers // THREADS),
    )
    x_seen, step, quads = (ACROSS - 1) * first.stride + first.K, first.stride, u32(-(-cut.map_columns // ACROSS))
    ragged, ragged4 = int(N) % cut.across != 0, int(N) % ACROSS != 0
    cells, exact = u32(cut.rows * cut.second.V), ahead_by * turns == cut.hidden
    per_group = -(-int(cells) // int(groups2))
    every_group, at_a_time = per_group * int(groups2) == int(cells), largest_factor(per_group, 8)
    relu, first_relu = cut.relu, cut.first.relu
    h_base, dh_base, ds_base = (u32(v) for v in (places.hidden, places.d_hidden, places.d_scores))
    w1_base, b1_base, w2_base, b2_base = (
        u32(v) for v in (places.first_w, places.first_b, places.second_w, places.second_b)
    )
    w1_size, taps1, taps2 = u32(K1 * K1 * C * F1), first.K, second.K

    def backward(
        x, order, cursor, ahead, labels, partial, b3, w4, b4, wt3, w2, maps, argmax, scale, losses, hits, arena, count
    ):
        m_tile = cuda.shared.array(m_size, f32, alignment=16)  # the map; then the gradient of what made it
        room = cuda.shared.array(room_size, f32, alignment=16)
        w_tile = cuda.shared.array(w_room, f32, alignment=16)
        x_tile = cuda.shared.array(x_size, f32, alignment=16)
        g_tile = cuda.shared.array(own_size, f32)  # the gradient of the tile's features, none where ReLU shut them off
        corners = cuda.shared.array(own_size, np.uint32)  # where in `m_tile` their argmaxes' windows begin
        h = cuda.shared.array(h_size, f32, alignment=16)
        dh = cuda.shared.array(h_size, f32, alignment=16)
        score = cuda.shared.array(o_size, f32)
        d_score = cuda.shared.array(o_size, f32)
        t = u32(cuda.threadIdx.x)
        s, tile = u32(u32(cuda.blockIdx.x) // tiles), u32(u32(cuda.blockIdx.x) % tiles)
        u0, h0 = u32(tile * rows), u32(tile * owned)
        low = u32(h0 + top)
        first_row = low if low < u32(u0 * S) else u32(u0 * S)  # of the map in shared memory
        first_u = u32(u32(low - last) // S) if last <= low else u32(0)
        first_u = first_u if first_u < u0 else u0
        total1, total2 = cuda.local.array(taps1, f32), cuda.local.array(taps2, f32)
        bias1, bias2 = ZERO, ZERO
        for e in range(K1):
            total1[e] = ZERO
        for e in range(K2):
            total2[e] = ZERO
        stage_turned(w2, w_tile)
        i = t
        while i < u32(h_size):
            dh[i] = ZERO
            i = u32(i + block)
        held, pixels = cuda.local.array(m_each, f32), cuda.local.array(x_seen, f32)
        values, spots = cuda.local.array(per, f32), cuda.local.array(per, np.uint32)
        features, argmaxes = cuda.local.array(per, np.uint32), cuda.local.array(per, np.uint32)
        n = s
        while n < count:
            place = u32(cursor[0] + ahead + n)
            source = u32(order[place])
            label, start = u32(labels[source]), u32(source * image)
            cuda.syncthreads()
            i = t
            while i < u32(x_size):
                c, cell = u32(i % C), u32(i // C)
                value = pixel(x, start, u32(u32(h0 * stride) + cell // x_wide), u32(cell % x_wide), c)
                x_tile[u32(u32(c * u32(x_high * x_wide)) + cell)] = value
                i = u32(i + block)
            for k in range(m_each):  # all loads are on their way before the first is needed
                i = u32(t + u32(u32(k) * block))
                i = i if i < m_count else u32(0)
                held[k] = maps[u32(u32(u32(n * F1 + i // m_plane) * map_plane + first_row * pitch) + i % m_plane)]
            for k in range(m_each):
                i = u32(t + u32(u32(k) * block))
                if i < m_count:
                    m_tile[u32(u32(u32(i // m_plane) * plane) + i % m_plane)] = held[k]

            head(partial, n, b3, w4, b4, h, room, score)
            if t < outputs:
                g, loss, hit = softmax(score, u32(0), t, label, scale)
                d_score[t] = g
                if tile == u32(0):
                    arena[u32(ds_base + n * outputs + t)] = g
                    if t == label:
                        losses[place], hits[place] = loss, np.uint8(1) if hit else np.uint8(0)
            cuda.syncthreads()
            i = t
            while i < hidden:
                value = ZERO
                for q in range(outputs):
                    value += d_score[q] * w4[u32(i * outputs + u32(q))]
                if relu:
                    value = value if h[i] > ZERO else ZERO
                dh[i] = value
                if tile == u32(0):
                    arena[u32(h_base + n * hidden + i)] = h[i]
                    arena[u32(dh_base + n * hidden + i)] = value
                i = u32(i + block)
            cuda.syncthreads()

            for j in range(per):  # the pooled features whose gradient reaches the tile's rows of the map
                i = u32(t + u32(j) * g_lanes)
                d = u32(u32(u32(first_u * V) * F2) + i)
                features[j] = d if t < g_lanes and d < D else u32(0)
                argmaxes[j] = argmax[u32(n * D + features[j])]
                values[j] = ZERO
            if t < g_lanes:
                for some in range(turns):
                    o = u32(u32(some) * u32(ahead_by))
                    for k in range(ahead_by):
                        g, row = dh[o + u32(k)], u32(o + u32(k))
                        row = row if exact or row < hidden else u32(0)  # what is past the last is multiplied by zero
                        for j in range(per):
                            place_w = (
                                features[j] + u32(u32(o * D) + u32(k) * D) if exact else u32(row * D + features[j])
                            )
                            values[j] += g * wt3[place_w]
            for j in range(per):
                i = u32(t + u32(j) * g_lanes)
                cell, f, where = u32(i // F2), u32(i % F2), argmaxes[j]
                within = t < g_lanes and i < u32(g_size) and u32(u32(u32(first_u * V) * F2) + i) < D
                shut_off = not within or where >= shut
                where = u32(0) if shut_off else where
                values[j] = ZERO if shut_off else values[j]
                row = u32(u32(u32(first_u + cell // V) * S) + where // S)
                col = u32(u32(u32(cell % V) * S) + where % S)
                skipped = u32(u32(u32(u0 - first_u) * V) * F2)
                if t < g_lanes and skipped <= i and u32(i - skipped) < u32(own_size):
                    g_tile[u32(i - skipped)] = values[j]
                    corners[u32(i - skipped)] = u32(u32(row - first_row) * pitch + col) if within else u32(0)
                row, col = u32(row + last), u32(u32(col + last) - left)
                reached = within and low <= row and u32(row - low) < high and col < broad
                spots[j] = u32(u32(u32(f * high + u32(row - low)) * broad) + col) if reached else u32(room_size)
            cuda.syncthreads()

            if t < u32(owners2 * groups2):
                group, owner = u32(t // owners2), u32(t % owners2)
                f, c, a = u32(owner % F2), u32(u32(owner // F2) % F1), u32(owner // u32(F2 * F1))
                base, own = u32(u32(c * plane) + u32(a * pitch)), u32(group * F2 + f)
                for some in range(per_group // at_a_time):
                    for k in range(at_a_time):
                        m = u32(u32(some) * u32(at_a_time) + u32(k))
                        if every_group or u32(group + m * groups2) < cells:
                            spot = own + u32(m * u32(groups2 * F2))
                            g, corner = g_tile[spot], base + u32(corners[spot])
                            for e in range(K2):
                                total2[e] += g * m_tile[corner + u32(e)]
                            bias2 += g
            i = t
            while i < u32(room_size):
                room[i] = ZERO
                i = u32(i + block)
            cuda.syncthreads()
            for j in range(per):
                if spots[j] < u32(room_size):
                    room[spots[j]] = values[j]
            cuda.syncthreads()

            total = cuda.local.array(totals, f32)
            d = cuda.local.array(seen, f32)
            weight = cuda.local.array(row_weights, f32)
            for turn in range(rounds):
                sharer, item = u32(0), u32(u32(u32(turn) * block) + t)
                if sharers > u32(1):
                    sharer, item = u32(t // items), u32(t % items)
                c0, span = u32(u32(item % channel_groups) * u32(together)), u32(u32(item // channel_groups) % spans)
                row = u32(u32(item // channel_groups) // spans)
                for j in range(totals):
                    total[j] = ZERO
                if sharer < sharers and item < items:
                    first_f = u32(sharer * u32(filters))
                    corner, tap = (
                        u32(u32(u32(first_f * high) + row) * broad + span * u32(across)),
                        u32(first_f * f_weights + c0),
                    )
                    for f in range(filters):
                        for a in range(K2):
                            spot = corner + u32(u32(u32(u32(f) * high) + u32(a)) * broad)
                            for k in range(seen):
                                d[k] = room[spot + u32(k)]
                            spot = tap + u32(u32(u32(u32(f) * K2) + u32(a)) * u32(K2 * F1))
                            for e in range(K2):
                                for g in range(together):
                                    weight[e * together + g] = w_tile[spot + u32(u32(u32(e) * F1) + u32(g))]
                            for e in range(K2):
                                for g in range(together):
                                    for j in range(across):
                                        total[g * across + j] += weight[e * together + g] * d[j + e]
                if sharers > u32(1):
                    cuda.syncthreads()
                    if u32(0) < sharer and sharer < sharers:
                        for k in range(totals):
                            room[
                                u32(u32(u32(u32(k) * u32(sharers - u32(1))) + u32(sharer - u32(1))) * items + item)
                            ] = total[k]
                    cuda.syncthreads()
                if sharer == u32(0) and item < items and u32(h0 + row) < M:
                    for s_ in range(u32(sharers - u32(1))):
                        for k in range(totals):
                            total[k] += room[u32(u32(u32(u32(k) * u32(sharers - u32(1))) + u32(s_)) * items + item)]
                    corner = u32(u32(u32(u32(low + row) - first_row) * pitch + left) + span * u32(across))
                    for g in range(together):
                        for j in range(across):
                            if not ragged or u32(span * u32(across) + u32(j)) < N:
                                spot = u32(u32(u32(c0 + u32(g)) * plane) + corner + u32(j))
                                opened = not first_relu or m_tile[spot] > ZERO
                                m_tile[spot] = total[g * across + j] if opened else ZERO
            cuda.syncthreads()

            if t < u32(owners1 * groups1):
                group, owner = u32(t // owners1), u32(t % owners1)
                f, c, a = u32(owner % F1), u32(u32(owner // F1) % C), u32(owner // u32(F1 * C))
                row = group
                while row < owned and u32(h0 + row) < M:
                    spot = u32(u32(f * plane) + u32(u32(low + row) - first_row) * pitch + left)
                    corner = u32(u32(c * x_high + u32(row * stride) + a) * x_wide)
                    for quad in range(quads):
                        j0 = u32(u32(quad) * u32(ACROSS))
                        for j in range(x_seen):
                            pixels[j] = x_tile[corner + u32(u32(j0 * stride) + u32(j))]
                        for j in range(ACROSS):
                            g = ZERO
                            if not ragged4 or u32(j0 + u32(j)) < N:
                                g = m_tile[spot + u32(j0 + u32(j))]
                            for e in range(K1):
                                total1[e] += g * pixels[j * step + e]
                            bias1 += g
                    row = u32(row + groups1)
            n = u32(n + slices)
        part = u32(cuda.blockIdx.x)
        add_up2(room, total2, bias2, arena, u32(w2_base + part * u32(w_size)), u32(b2_base + part * F2))
        add_up1(room, total1, bias1, arena, u32(w1_base + part * w1_size), u32(b1_base + part * F1))

    arrays = ", ".join(["float32[::1]"] * 7)
    signature = (
        f"void({cut.first.input_type}, uint32[::1], uint32[::1], uint32, int32[::1], {arrays}, uint8[::1], float32, "
        "float32[::1], uint8[::1], float32[::1], uint32)"
    )
    return Kernel(backward, signature, THREADS)
