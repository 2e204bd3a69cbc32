"""The fused kernels: what `gpu_kernels` does layer by layer, in as few passes over memory as the layers allow.

A convolution never writes its full map: bias, max-pool and ReLU follow in registers, and one byte per pooled value says
where it came from, `code` = row * S + column of the window, or S * S where ReLU shut it off. The gradient then goes
through that one place alone (castanheira, section 2.2.2). A network's images stay where they were loaded, as bytes:
`order` lists the images of the steps to come, `cursor[0] + ahead` is where a batch starts in it.

Gradients of parameters are partial sums in an arena; `update` adds them up in a fixed order and takes the step. Every
partial sum is written at every step, by zero where a short batch has no image for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numba import cuda

from cnnexp.backends.gpu_device import SIMULATED, Kernel
from cnnexp.backends.gpu_kernels import ONE, ZERO, ConvSizes, f32, u32, unsigned
from cnnexp.optimizers import Optimizer

BLOCK = 16 if SIMULATED else 256  # threads
LANES = 4 if SIMULATED else 32  # threads of a block side by side in memory: a warp
WIDE_BLOCK = 8 if SIMULATED else 512  # for the few, long sums of a linear layer
ACROSS = 4  # pixels of a row that one thread makes in `conv_backward_input`
BYTE = f32(255)


@dataclass(frozen=True)
class ConvBlock:
    """A convolution with what follows it in registers.

    Attributes:
        sizes: of the convolution.
        pool: S, side and step of the max-pool after it; 1 if there is none.
        relu: whether a ReLU is before or after the pooling (the same thing, as max and ReLU commute).
        has_bias: of the convolution.
        from_order: its input is the data set, read through `order`; else the layer before, image by image.
        from_bytes: the data set holds bytes.
    """

    sizes: ConvSizes
    pool: int
    relu: bool
    has_bias: bool
    from_order: bool
    from_bytes: bool

    @property
    def U(self) -> int:  # noqa: N802
        return self.sizes.P // self.pool

    @property
    def V(self) -> int:  # noqa: N802
        return self.sizes.Q // self.pool

    @property
    def wide(self) -> int:
        """Columns of the padded image that windows see."""
        return (self.sizes.Q - 1) * self.sizes.stride + self.sizes.K

    def input_rows(self, rows: int) -> int:
        """Return the rows of the padded image under `rows` rows of pooled outputs."""
        return (rows * self.pool - 1) * self.sizes.stride + self.sizes.K

    @property
    def input_type(self) -> str:
        return "uint8[::1]" if self.from_bytes else "float32[::1]"


@cache
def conv_forward(conv: ConvBlock, rows: int, filters: int) -> Kernel:
    """A block makes `rows` rows of pooled outputs of one image, `filters` filters; a thread one (u, v, f) at a time.

    Neighbours in a warp differ in f: pixels broadcast from shared memory, outputs coalesce.
    """
    H, W, C, K, F, stride, top, left, _, _ = unsigned(conv.sizes)
    S, U, V, wide = u32(conv.pool), u32(conv.U), u32(conv.V), u32(conv.wide)
    rows_, filters_, block = u32(rows), u32(filters), u32(BLOCK)
    tiles, deep = u32(-(-conv.U // rows)), u32(-(-conv.sizes.F // filters))
    x_size, w_size = conv.input_rows(rows) * conv.wide * conv.sizes.C, conv.sizes.K**2 * conv.sizes.C * filters
    image, cells, lanes = u32(H * W * C), u32(rows * conv.V), u32(BLOCK // filters)
    window, shut, from_order, from_bytes = conv.pool**2, u32(conv.pool**2), conv.from_order, conv.from_bytes
    relu, has_bias = conv.relu, conv.has_bias

    def conv_forward(x, order, cursor, ahead, w, b, y, code):
        x_tile = cuda.shared.array(x_size, f32)
        w_tile = cuda.shared.array(w_size, f32)
        t = u32(cuda.threadIdx.x)
        f0 = u32(u32(u32(cuda.blockIdx.x) % deep) * filters_)
        u0 = u32(u32(u32(u32(cuda.blockIdx.x) // deep) % tiles) * rows_)
        n = u32(u32(cuda.blockIdx.x) // u32(deep * tiles))
        first = u32(n * image)
        if from_order:
            first = u32(order[u32(cursor[0] + ahead + n)] * image)
        i = t
        while i < u32(x_size):
            row = u32(u0 * S * stride + u32(u32(i // C) // wide))  # in the padded image
            col = u32(u32(i // C) % wide)
            value = ZERO
            if top <= row and row < u32(H + top) and left <= col and col < u32(W + left):
                value = f32(x[u32(first + u32(u32(u32(row - top) * W + col - left) * C + i % C))])
            x_tile[i] = value / BYTE if from_bytes else value
            i = u32(i + block)
        i = t
        while i < u32(w_size):
            f = u32(f0 + i % filters_)
            w_tile[i] = w[u32(u32(i // filters_) * F + f)] if f < F else ZERO
            i = u32(i + block)
        cuda.syncthreads()
        lane_f = u32(t % filters_)
        f = u32(f0 + lane_f)
        if f < F and t < u32(lanes * filters_):
            total = cuda.local.array(window, f32)
            bias = b[f] if has_bias else ZERO
            cell = u32(t // filters_)
            while cell < cells and u32(u0 + cell // V) < U:
                for k in range(window):
                    total[k] = ZERO
                corner = u32(u32(u32(u32(cell // V) * S * stride) * wide + u32(cell % V) * S * stride) * C)
                for c in range(C):
                    for a in range(K):
                        for e in range(K):
                            weight = w_tile[u32(u32(u32(u32(a) * K + u32(e)) * C + u32(c)) * filters_ + lane_f)]
                            for i in range(S):
                                for j in range(S):
                                    row = u32(u32(i) * stride + u32(a))
                                    col = u32(u32(j) * stride + u32(e))
                                    total[i * S + j] += weight * x_tile[corner + u32(row * wide + col) * C + u32(c)]
                best, where = total[0], u32(0)
                for k in range(1, window):
                    if total[k] > best:
                        best, where = total[k], u32(k)
                best += bias
                if relu and not best > ZERO:
                    best, where = ZERO, shut
                place = u32(u32(u32(u32(n * U + u0) * V) + cell) * F + f)
                y[place] = best
                code[place] = np.uint8(where)
                cell = u32(cell + lanes)

    arrays = "float32[::1], float32[::1], float32[::1], uint8[::1]"
    return Kernel(conv_forward, f"void({conv.input_type}, uint32[::1], uint32[::1], uint32, {arrays})", BLOCK)


@cache
def conv_backward_weights(conv: ConvBlock, rows: int, pairs: int, slices: int) -> Kernel:
    """Partial gradients of the weights, through the argmax alone: a thread owns the K * K weights of one (c, f).

    A block takes `rows` rows of pooled outputs of the images of one slice, and `pairs` pairs (c, f); its threads share
    out the places of a pair and add up in shared memory. part = slice * splits + rows' number.
    """
    H, W, C, K, F, stride, top, left, _, _ = unsigned(conv.sizes)
    S, U, V, wide = u32(conv.pool), u32(conv.U), u32(conv.V), u32(conv.wide)
    rows_, pairs_, slices_, block = u32(rows), u32(pairs), u32(slices), u32(BLOCK)
    splits, pair_groups = u32(-(-conv.U // rows)), u32(-(-conv.sizes.C * conv.sizes.F // pairs))
    x_size, image, cells = conv.input_rows(rows) * conv.wide * conv.sizes.C, u32(H * W * C), u32(rows * conv.V)
    taps, sums, groups = conv.sizes.K**2, (conv.sizes.K**2 + 1) * BLOCK, u32(BLOCK // pairs)
    size, shut, all_pairs = u32(taps * int(C * F)), u32(conv.pool**2), u32(C * F)
    from_order, from_bytes, has_bias = conv.from_order, conv.from_bytes, conv.has_bias

    def conv_backward_weights(x, order, cursor, ahead, dy, code, arena, w_base, b_base, count):
        x_tile = cuda.shared.array(x_size, f32)
        shared_sums = cuda.shared.array(sums, f32)
        t = u32(cuda.threadIdx.x)
        u0 = u32(u32(u32(cuda.blockIdx.x) % splits) * rows_)
        pair = u32(u32(u32(u32(cuda.blockIdx.x) // splits) % pair_groups) * pairs_ + t % pairs_)
        s = u32(u32(cuda.blockIdx.x) // u32(splits * pair_groups))
        c, f, group = u32(pair // F), u32(pair % F), u32(t // pairs_)
        total = cuda.local.array(taps, f32)
        for k in range(taps):
            total[k] = ZERO
        total_b = ZERO
        n = s
        while n < count:
            first = u32(n * image)
            if from_order:
                first = u32(order[u32(cursor[0] + ahead + n)] * image)
            cuda.syncthreads()
            i = t
            while i < u32(x_size):
                row = u32(u0 * S * stride + u32(u32(i // C) // wide))  # in the padded image
                col = u32(u32(i // C) % wide)
                value = ZERO
                if top <= row and row < u32(H + top) and left <= col and col < u32(W + left):
                    value = f32(x[u32(first + u32(u32(u32(row - top) * W + col - left) * C + i % C))])
                x_tile[i] = value / BYTE if from_bytes else value
                i = u32(i + block)
            cuda.syncthreads()
            if pair < all_pairs and group < groups:
                cell = group
                while cell < cells and u32(u0 + cell // V) < U:
                    place = u32(u32(u32(u32(n * U + u0) * V) + cell) * F + f)
                    where = u32(code[place])
                    if where < shut:
                        g = dy[place]
                        row = u32(u32(u32(cell // V) * S + where // S) * stride)
                        col = u32(u32(u32(cell % V) * S + where % S) * stride)
                        corner = u32(u32(row * wide + col) * C + c)
                        for a in range(K):
                            for e in range(K):
                                total[a * K + e] += g * x_tile[corner + u32(u32(a) * wide + u32(e)) * C]
                        total_b += g
                    cell = u32(cell + groups)
            n = u32(n + slices_)
        for k in range(taps):
            shared_sums[u32(u32(k) * block + t)] = total[k]
        shared_sums[u32(u32(taps) * block + t)] = total_b
        cuda.syncthreads()
        part = u32(s * splits + u32(cuda.blockIdx.x) % splits)
        i = t
        while i < u32(u32(taps + 1) * pairs_):
            k, lane = u32(i // pairs_), u32(i % pairs_)
            owner = u32(pair - t % pairs_ + lane)
            if owner < all_pairs:
                value = ZERO
                for g in range(groups):
                    value += shared_sums[u32(k * block + u32(g) * pairs_ + lane)]
                if k < u32(taps):
                    arena[u32(w_base + part * size + k * all_pairs + owner)] = value
                elif has_bias and owner < F:
                    arena[u32(b_base + part * F + owner)] = value
            i = u32(i + block)

    signature = (
        f"void({conv.input_type}, uint32[::1], uint32[::1], uint32, float32[::1], uint8[::1], float32[::1], uint32, "
        "uint32, uint32)"
    )
    return Kernel(conv_backward_weights, signature, BLOCK)


@cache
def conv_backward_input(conv: ConvBlock, rows: int) -> Kernel:
    """A block makes `rows` rows of dx of one image, for stride 1; a thread `ACROSS` neighbours of one channel.

    The gradient is spread to the convolution's map in shared memory, and convolved with the turned filters.
    """
    H, W, C, K, F, _, top, left, P, Q = unsigned(conv.sizes)
    S, U, V, rows_, block = u32(conv.pool), u32(conv.U), u32(conv.V), u32(rows), u32(BLOCK)
    across, quads = u32(ACROSS), u32(-(-conv.sizes.W // ACROSS))
    high, broad = u32(rows + conv.sizes.K - 1), u32(int(quads) * ACROSS + conv.sizes.K - 1)
    d_size, w_size = int(F * high * broad), conv.sizes.K**2 * conv.sizes.C * conv.sizes.F
    tiles, items, last = u32(-(-conv.sizes.H // rows)), u32(rows * int(quads) * int(C)), u32(conv.sizes.K - 1)
    seen = ACROSS + conv.sizes.K - 1

    def conv_backward_input(w, dy, code, dx):
        d_tile = cuda.shared.array(d_size, f32)
        w_tile = cuda.shared.array(w_size, f32)
        t = u32(cuda.threadIdx.x)
        h0 = u32(u32(u32(cuda.blockIdx.x) % tiles) * rows_)
        n = u32(u32(cuda.blockIdx.x) // tiles)
        i = t
        while i < u32(d_size):
            f = u32(i % F)
            # p and q plus K - 1, so that they are not negative
            q = u32(u32(u32(i // F) % broad) + left)
            p = u32(u32(h0 + u32(u32(i // F) // broad)) + top)
            value = ZERO
            if last <= p and u32(p - last) < P and last <= q and u32(q - last) < Q:
                p, q = u32(p - last), u32(q - last)
                place = u32(u32(u32(n * U + p // S) * V + q // S) * F + f)
                if u32(code[place]) == u32(u32(p % S) * S + q % S):
                    value = dy[place]
            d_tile[u32(u32(f * high + u32(u32(i // F) // broad)) * broad + u32(i // F) % broad)] = value
            i = u32(i + block)
        i = t
        while i < u32(w_size):
            f, c, k = u32(i % F), u32(u32(i // F) % C), u32(i // u32(F * C))
            w_tile[u32(u32(u32(K * K - u32(1) - k) * F + f) * C + c)] = w[i]
            i = u32(i + block)
        cuda.syncthreads()
        total = cuda.local.array(ACROSS, f32)
        d = cuda.local.array(seen, f32)
        item = t
        while item < items:
            c, quad, row = u32(item % C), u32(u32(item // C) % quads), u32(u32(item // C) // quads)
            for j in range(ACROSS):
                total[j] = ZERO
            for f in range(F):
                for a in range(K):
                    corner = u32(u32(u32(f) * high + row + u32(a)) * broad + quad * across)
                    for j in range(seen):
                        d[j] = d_tile[corner + u32(j)]
                    for e in range(K):
                        weight = w_tile[u32(u32(u32(u32(a) * K + u32(e)) * F + u32(f)) * C + c)]
                        for j in range(ACROSS):
                            total[j] += weight * d[j + e]
            h = u32(h0 + row)
            for j in range(ACROSS):
                col = u32(quad * across + u32(j))
                if h < H and col < W:
                    dx[u32(u32(u32(n * H + h) * W + col) * C + c)] = total[j]
            item = u32(item + block)

    return Kernel(conv_backward_input, "void(float32[::1], float32[::1], uint8[::1], float32[::1])", BLOCK)


@cache
def linear_forward(D: int, O: int, has_bias: bool, relu: bool) -> Kernel:  # noqa: E741
    """y = relu(x @ w + b): a block makes LANES outputs of one image, its threads share out the D products of each."""
    D, O = u32(D), u32(O)  # noqa: E741
    lanes, parts, block = u32(LANES), u32(WIDE_BLOCK // LANES), WIDE_BLOCK
    groups = u32(-(-int(O) // LANES))

    def linear_forward(x, w, b, y):
        sums = cuda.shared.array(block, f32)
        t = u32(cuda.threadIdx.x)
        n = u32(u32(cuda.blockIdx.x) // groups)
        o = u32(u32(u32(cuda.blockIdx.x) % groups) * lanes + t % lanes)
        total = ZERO
        if o < O:
            k = u32(t // lanes)
            while k < D:
                total += x[u32(n * D + k)] * w[u32(k * O + o)]
                k = u32(k + parts)
        sums[t] = total
        cuda.syncthreads()
        if t < lanes and o < O:
            value = b[o] if has_bias else ZERO
            for part in range(parts):
                value += sums[u32(u32(part) * lanes + t)]
            y[u32(n * O + o)] = value if not relu or value > ZERO else ZERO

    return Kernel(linear_forward, "void(float32[::1], float32[::1], float32[::1], float32[::1])", WIDE_BLOCK)


@cache
def linear_backward_input(D: int, O: int, relu: bool) -> Kernel:  # noqa: E741
    """dx = dy @ w.T, dy only where y > 0 if the layer ends in ReLU: a block makes LANES inputs of PER * Z images.

    A tile of w goes through shared memory, since threads side by side need rows of it and memory wants columns.
    """
    D, O = u32(D), u32(O)  # noqa: E741
    lanes, Z, block, PER = u32(LANES), u32(BLOCK // LANES), u32(BLOCK), 4
    chunk = u32(min(int(O), LANES))
    pitch, w_size, d_size = u32(chunk + 1), LANES * (int(chunk) + 1), PER * (BLOCK // LANES) * int(chunk)
    groups, images = u32(-(-int(D) // LANES)), u32(PER * (BLOCK // LANES))

    def linear_backward_input(w, y, dy, dx, count):
        w_tile = cuda.shared.array(w_size, f32)
        d_tile = cuda.shared.array(d_size, f32)
        t = u32(cuda.threadIdx.x)
        lane, z = u32(t % lanes), u32(t // lanes)
        k0 = u32(u32(u32(cuda.blockIdx.x) % groups) * lanes)
        n0 = u32(u32(u32(cuda.blockIdx.x) // groups) * images)
        total = cuda.local.array(PER, f32)
        for j in range(PER):
            total[j] = ZERO
        o0 = u32(0)
        while o0 < O:
            cuda.syncthreads()
            i = t
            while i < u32(lanes * chunk):
                k, o = u32(k0 + i // chunk), u32(o0 + i % chunk)
                w_tile[u32(u32(i // chunk) * pitch + i % chunk)] = w[u32(k * O + o)] if k < D and o < O else ZERO
                i = u32(i + block)
            i = t
            while i < u32(images * chunk):
                n, o = u32(n0 + i // chunk), u32(o0 + i % chunk)
                value = ZERO
                if n < count and o < O and (not relu or y[u32(n * O + o)] > ZERO):
                    value = dy[u32(n * O + o)]
                d_tile[i] = value
                i = u32(i + block)
            cuda.syncthreads()
            for o in range(chunk):
                weight = w_tile[u32(lane * pitch + u32(o))]
                for j in range(PER):
                    total[j] += weight * d_tile[u32(u32(u32(u32(j) * Z) + z) * chunk + u32(o))]
            o0 = u32(o0 + chunk)
        for j in range(PER):
            n = u32(n0 + u32(u32(j) * Z) + z)
            if n < count and u32(k0 + lane) < D:
                dx[u32(n * D + k0 + lane)] = total[j]

    signature = "void(float32[::1], float32[::1], float32[::1], float32[::1], uint32)"
    return Kernel(linear_backward_input, signature, BLOCK)


@cache
def linear_backward_weights(D: int, O: int, has_bias: bool, relu: bool, slices: int) -> Kernel:  # noqa: E741
    """Partial gradients of w and b, one thread per element and slice of the images; the bias is row D of w."""
    D, O, slices_ = u32(D), u32(O), u32(slices)  # noqa: E741
    size, rows = u32(D * O), u32(D + 1) if has_bias else u32(D)

    def linear_backward_weights(x, y, dy, arena, w_base, b_base, images, count):
        i = u32(cuda.grid(1))
        while i < count:
            o, k, s = u32(i % O), u32(u32(i // O) % rows), u32(i // u32(O * rows))
            total = ZERO
            n = s
            while n < images:
                g = dy[u32(n * O + o)]
                if not relu or y[u32(n * O + o)] > ZERO:
                    total += g * x[u32(n * D + k)] if k < D else g
                n = u32(n + slices_)
            if k < D:
                arena[u32(w_base + s * size + k * O + o)] = total
            else:
                arena[u32(b_base + s * O + o)] = total
            i = u32(i + u32(cuda.gridsize(1)))

    arrays = "float32[::1], float32[::1], float32[::1], float32[::1]"
    return Kernel(linear_backward_weights, f"void({arrays}, uint32, uint32, uint32, uint32)", BLOCK)


@cache
def linear_head(D: int, O: int, has_bias: bool, slices: int) -> Kernel:  # noqa: E741
    """The last linear layer, softmax, cross entropy and their gradients, a block per image of a slice.

    Writes scores, losses and hits, dx = d_scores @ w.T, and partial gradients of w and b, one per slice.
    """
    D, O, slices_, block = u32(D), u32(O), u32(slices), u32(BLOCK)  # noqa: E741
    lanes = u32(lanes_of(int(O)))
    parts, size = u32(BLOCK // int(lanes)), u32(D * O)
    owned = -(-int(size) // BLOCK)  # weights of a thread
    d_count, o_count = int(D), int(lanes)

    def linear_head(
        x, labels, order, cursor, ahead, w, b, scores, losses, hits, dx, arena, w_base, b_base, scale, count
    ):
        row = cuda.shared.array(d_count, f32)
        sums = cuda.shared.array(BLOCK, f32)
        score = cuda.shared.array(o_count, f32)
        d_score = cuda.shared.array(o_count, f32)
        t = u32(cuda.threadIdx.x)
        s, o = u32(cuda.blockIdx.x), u32(t % lanes)
        total = cuda.local.array(owned, f32)
        for j in range(owned):
            total[j] = ZERO
        total_b = ZERO
        n = s
        while n < count:
            cuda.syncthreads()
            k = t
            while k < D:
                row[k] = x[u32(n * D + k)]
                k = u32(k + block)
            cuda.syncthreads()
            value = ZERO
            if o < O:
                k = u32(t // lanes)
                while k < D:
                    value += row[k] * w[u32(k * O + o)]
                    k = u32(k + parts)
            sums[t] = value
            cuda.syncthreads()
            if t < O:
                value = b[t] if has_bias else ZERO
                for part in range(parts):
                    value += sums[u32(u32(part) * lanes + t)]
                score[t] = value
                scores[u32(n * O + t)] = value
            cuda.syncthreads()
            if t < O:
                place = u32(cursor[0] + ahead + n)
                label = u32(labels[order[place]])
                best, largest = u32(0), score[0]
                for q in range(1, O):
                    if score[q] > largest:
                        best, largest = u32(q), score[q]
                exps = ZERO
                for q in range(O):
                    exps += f32(math.exp(score[q] - largest))
                target = ONE if t == label else ZERO
                g = (f32(math.exp(score[t] - largest)) / exps - target) * scale
                d_score[t] = g
                total_b += g
                if t == label:
                    losses[place] = f32(math.log(exps)) - (score[t] - largest)
                    hits[place] = np.uint8(1) if best == label else np.uint8(0)
            cuda.syncthreads()
            k = t
            while k < D:
                value = ZERO
                for q in range(O):
                    value += d_score[q] * w[u32(k * O + u32(q))]
                dx[u32(n * D + k)] = value
                k = u32(k + block)
            for j in range(owned):
                i = u32(u32(j) * block + t)
                if i < size:
                    total[j] += row[u32(i // O)] * d_score[u32(i % O)]
            n = u32(n + slices_)
        for j in range(owned):
            i = u32(u32(j) * block + t)
            if i < size:
                arena[u32(w_base + s * size + i)] = total[j]
        if has_bias and t < O:
            arena[u32(b_base + s * O + t)] = total_b

    signature = (
        "void(float32[::1], int32[::1], uint32[::1], uint32[::1], uint32, float32[::1], float32[::1], float32[::1], "
        "float32[::1], uint8[::1], float32[::1], float32[::1], uint32, uint32, float32, uint32)"
    )
    return Kernel(linear_head, signature, BLOCK)


def lanes_of(outputs: int) -> int:
    """Return how many threads side by side serve one image's outputs: the next power of two."""
    return 1 << max(outputs - 1, 0).bit_length()


@cache
def gather(D: int, from_bytes: bool) -> Kernel:
    """x[n, d] = image order[start + n], for a network that does not open with a fused convolution."""
    D = u32(D)

    def gather(images, order, cursor, ahead, x, count):
        i = u32(cuda.grid(1))
        while i < count:
            value = f32(images[u32(order[u32(cursor[0] + ahead + i // D)] * D + i % D)])
            x[i] = value / BYTE if from_bytes else value
            i = u32(i + u32(cuda.gridsize(1)))

    images = "uint8[::1]" if from_bytes else "float32[::1]"
    return Kernel(gather, f"void({images}, uint32[::1], uint32[::1], uint32, float32[::1], uint32)", BLOCK)


@cache
def gather_labels() -> Kernel:
    """t[n] = label of image order[start + n], for a loss that is not fused."""

    def gather_labels(labels, order, cursor, ahead, t, count):
        i = u32(cuda.grid(1))
        while i < count:
            t[i] = labels[order[u32(cursor[0] + ahead + i)]]
            i = u32(i + u32(cuda.gridsize(1)))

    return Kernel(gather_labels, "void(int32[::1], uint32[::1], uint32[::1], uint32, int32[::1], uint32)", BLOCK)


@cache
def keep_losses() -> Kernel:
    """Put a batch's losses and hits in their places, for a loss that is not fused."""

    def keep_losses(batch_losses, batch_hits, cursor, ahead, losses, hits, count):
        i = u32(cuda.grid(1))
        while i < count:
            losses[u32(cursor[0] + ahead + i)] = batch_losses[i]
            hits[u32(cursor[0] + ahead + i)] = batch_hits[i]
            i = u32(i + u32(cuda.gridsize(1)))

    arrays = "float32[::1], uint8[::1], uint32[::1], uint32, float32[::1], uint8[::1]"
    return Kernel(keep_losses, f"void({arrays}, uint32)", BLOCK)


SUM_SLICES = 8  # threads that share out the parts of one parameter
MANY = 4  # parts that one thread adds up by itself
SEGMENT = 6  # numbers in a row of `update`'s table


@cache
def update(optimizer: Optimizer | None, batch_size: int, mirror: tuple[int, int, int] | None) -> Kernel:
    """Add up every parameter's partial gradients and take the optimizer's step, all parameters in one launch.

    Args:
        optimizer: whose rule; None writes the gradient to `w` instead.
        batch_size: finds a step's row (rate, c0, c1) of `rates` from its place in the order.
        mirror: (offset, D, O) of a linear layer's weights that are kept transposed in `mirrored` too.

    A block's row of `table`: first parameter, how many, where in the arena the first part of the first is, from one
    part to the next, parts, threads per parameter.
    """
    rule = cuda.jit(device=True)(optimizer.rule(sqrt=math.sqrt, maximum=max)) if optimizer else None
    slots = len(optimizer.slots) if optimizer else 0
    steps, block = optimizer is not None, BLOCK
    mirrors = mirror is not None
    offset, D, O = (u32(v) for v in mirror or (0, 1, 1))  # noqa: E741
    batch = u32(batch_size)

    def add_up(arena, table, sums):
        t, row = u32(cuda.threadIdx.x), u32(u32(cuda.blockIdx.x) * u32(SEGMENT))
        base, stride = u32(table[u32(row + u32(2))]), u32(table[u32(row + u32(3))])
        parts, threads = u32(table[u32(row + u32(4))]), u32(table[u32(row + u32(5))])
        wide = u32(u32(block) // threads)
        total = ZERO
        if u32(t % wide) < u32(table[u32(row + u32(1))]):
            part = u32(t // wide)
            while part < parts:
                total += arena[u32(base + part * stride + t % wide)]
                part = u32(part + threads)
        sums[t] = total
        cuda.syncthreads()
        value = ZERO
        if t < wide:
            for s in range(threads):
                value += sums[u32(u32(s) * wide + t)]
        return value

    add_up = cuda.jit(device=True)(add_up)

    if not steps:

        def update(arena, table, w):
            sums = cuda.shared.array(block, f32)
            t, row = u32(cuda.threadIdx.x), u32(u32(cuda.blockIdx.x) * u32(SEGMENT))
            g = add_up(arena, table, sums)
            if t < u32(table[u32(row + u32(1))]):
                w[u32(table[row] + t)] = g

        return Kernel(update, "void(float32[::1], uint32[::1], float32[::1])", BLOCK)

    def update(arena, table, w, s, t, rates, cursor, ahead, mirrored):
        sums = cuda.shared.array(block, f32)
        lane, row = u32(cuda.threadIdx.x), u32(u32(cuda.blockIdx.x) * u32(SEGMENT))
        g = add_up(arena, table, sums)
        if lane < u32(table[u32(row + u32(1))]):
            i = u32(table[row] + lane)
            step = u32(u32(cursor[0] + ahead) // batch * u32(3))
            old_s = s[i] if slots > 0 else ZERO
            old_t = t[i] if slots > 1 else ZERO
            rate, c0, c1 = rates[step], rates[u32(step + u32(1))], rates[u32(step + u32(2))]
            new_w, new_s, new_t = rule(w[i], g, old_s, old_t, rate, c0, c1)
            w[i] = new_w
            if slots > 0:
                s[i] = new_s
            if slots > 1:
                t[i] = new_t
            if mirrors and offset <= i and u32(i - offset) < u32(D * O):
                place = u32(i - offset)
                mirrored[u32(u32(place % O) * D + place // O)] = new_w

    signature = (
        "void(float32[::1], uint32[::1], float32[::1], float32[::1], float32[::1], float32[::1], uint32[::1], uint32, "
        "float32[::1])"
    )
    return Kernel(update, signature, BLOCK)


@cache
def transpose(D: int, O: int) -> Kernel:  # noqa: E741
    """out[o, d] = w[d, o]."""
    D, O = u32(D), u32(O)  # noqa: E741

    def transpose(w, out, count):
        i = u32(cuda.grid(1))
        while i < count:
            out[u32(u32(i % O) * D + i // O)] = w[i]
            i = u32(i + u32(cuda.gridsize(1)))

    return Kernel(transpose, "void(float32[::1], float32[::1], uint32)", BLOCK)


@cache
def advance() -> Kernel:
    """cursor[0] += by: the last node of a graph, so that the same graph runs the next steps when launched again."""

    def advance(cursor, by):
        if cuda.threadIdx.x == 0:
            cursor[0] = u32(cursor[0] + by)

    return Kernel(advance, "void(uint32[::1], uint32)", 1)


@cache
def sum_up() -> Kernel:
    """Per block of `BLOCK` images, the sum of their losses and hits: what is copied to the host after a pass."""
    block = BLOCK

    def sum_up(losses, hits, loss_sums, hit_sums, count):
        some_losses = cuda.shared.array(block, f32)
        some_hits = cuda.shared.array(block, np.uint32)
        t, i = u32(cuda.threadIdx.x), u32(cuda.grid(1))
        some_losses[t] = losses[i] if i < count else ZERO
        some_hits[t] = u32(hits[i]) if i < count else u32(0)
        cuda.syncthreads()
        if t == u32(0):
            loss, hit = ZERO, u32(0)
            for k in range(block):
                loss += some_losses[k]
                hit = u32(hit + some_hits[k])
            loss_sums[u32(cuda.blockIdx.x)] = loss
            hit_sums[u32(cuda.blockIdx.x)] = hit

    return Kernel(sum_up, "void(float32[::1], uint8[::1], float32[::1], uint32[::1], uint32)", BLOCK)
