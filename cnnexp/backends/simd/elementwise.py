"""Pooling and elementwise layers on their own, where no convolution or linear layer next to them takes them in.

General kernels: any window, stride and padding, batch in lanes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from llvmlite import ir

from cnnexp.backends.simd.emit import BIT, INDEX, INT, Emitter, Pointer
from cnnexp.backends.simd.layout import Grid, Matrix

MAGIC = 1.5 * 2**23

Map = Callable[[Emitter, ir.Value], ir.Value]
Map2 = Callable[[Emitter, ir.Value, ir.Value], ir.Value]


def exp(k: Emitter, x: ir.Value) -> ir.Value:
    """e**x, relative error below 1e-7 where the result is no denormal; infinity where it is too large; a NaN stays one.

    x = n log 2 + r: n by rounding (adding 1.5 * 2**23 leaves n in the low bits), log 2 in two parts (Cody and Waite
    1980), e**r by Taylor's polynomial of degree 7 for |r| <= 0.35, 2**n in two factors, as it may be a denormal, each
    by writing its exponent. e**-104 is 0, e**89 infinity.
    """
    x = k.select(k.builder.fcmp_ordered("<", x, k.constant(-104)), k.constant(-104), x)
    x = k.select(k.builder.fcmp_ordered(">", x, k.constant(89)), k.constant(89), x)
    magic = k.constant(MAGIC)
    rounded = k.fma(x, k.constant(float(np.float32(1 / math.log(2)))), magic)
    n = k.builder.fsub(rounded, magic)
    high = 0.693359375
    low = float(np.float32(math.log(2) - high))
    r = k.fma(n, k.constant(-low), k.fma(n, k.constant(-high), x))
    total = k.constant(float(np.float32(1 / math.factorial(7))))
    for degree in range(6, -1, -1):
        total = k.fma(total, r, k.constant(float(np.float32(1 / math.factorial(degree)))))
    exponent = k.builder.sub(k.builder.bitcast(rounded, k.indices), k.integers(int(np.float32(MAGIC).view(np.int32))))
    half = k.builder.ashr(exponent, k.integers(1))
    for part in (half, k.builder.sub(exponent, half)):
        bits = k.builder.shl(k.builder.add(part, k.integers(127)), k.integers(23))
        total = k.multiply(total, k.builder.bitcast(bits, k.vector))
    return total


def same(k: Emitter, x: ir.Value) -> ir.Value:
    return x


def apply(k: Emitter, function: Map, x: Grid | Matrix, y: Grid | Matrix) -> None:
    """y = function(x); what rounds up a matrix's rows stays 0."""
    if isinstance(x, Matrix) and isinstance(y, Matrix) and x.size % k.lanes:
        _apply_rows(k, function, x, y)
        return
    _each(k, (x, y), lambda a, b: k.store(function(k, k.load(a)), b))


def apply_backward(
    k: Emitter, function: Map2, x: Grid | Matrix, y: Grid | Matrix, dy: Grid | Matrix, dx: Grid | Matrix
) -> None:
    """dx = dy * function(x, y)."""
    _each(k, (x, y, dy, dx), lambda a, b, c, d: k.store(k.multiply(k.load(c), function(k, k.load(a), k.load(b))), d))


def _apply_rows(k: Emitter, function: Map, x: Matrix, y: Matrix) -> None:
    whole = x.size // k.lanes
    inside = ir.Constant(ir.VectorType(BIT, k.lanes), [BIT(i < x.size % k.lanes) for i in range(k.lanes)])
    with k.loop(k.count) as n:
        source, target = x.row(k, n), y.row(k, n)
        with k.loop(whole) as i:
            k.store(function(k, k.load(source.at(i, k.lanes))), target.at(i, k.lanes))
        value = function(k, k.load(source + whole * k.lanes))
        k.store(k.select(inside, value, k.zero()), target + whole * k.lanes)


def _each(k: Emitter, arrays: tuple, body: Callable) -> None:
    """Call the body with the address of every vector of arrays of the same shape."""
    if isinstance(arrays[0], Matrix):
        with k.loop(k.count) as n, k.loop(arrays[0].width // k.lanes) as i:
            body(*(a.row(k, n).at(i, k.lanes) for a in arrays))
        return
    rows, columns, channels = arrays[0].shape
    with k.loop(k.groups(k.lanes)) as g, k.loop(rows) as p, k.loop(columns) as q, k.loop(channels) as c:
        body(*(a.pixel(k, g, p, q).at(c, a.lanes) for a in arrays))


def max_pool(k: Emitter, x: Grid, size: int, stride: int, y: Grid, argmax: Grid) -> None:
    """y = the largest of each window, argmax = its place, a 32-bit integer; x's ring holds -inf, so it never wins."""
    rows, columns, channels = y.shape
    with k.loop(k.groups(k.lanes)) as g, k.loop(rows) as u, k.loop(columns) as v, k.loop(channels) as c:
        corner = x.stored(k, g).at(u, stride * x.row).at(v, stride * x.column).at(c, x.lanes)
        best, where = k.variable(k.constant(-math.inf)), k.variable(k.integers(0))
        with k.loop(size) as i, k.loop(size) as j:
            value = k.load(corner.at(i, x.row).at(j, x.column))
            code = k.builder.trunc(k.builder.add(k.builder.mul(i, INDEX(size)), j), INT)
            larger = k.larger(value, best.get())
            best.set(k.select(larger, value, best.get()))
            where.set(k.select(larger, _spread_place(k, code), where.get()))
        k.store(best.get(), y.pixel(k, g, u, v).at(c, y.lanes))
        k.store(k.as_floats(where.get()), argmax.pixel(k, g, u, v).at(c, argmax.lanes))


def max_pool_backward(k: Emitter, argmax: Grid, dy: Grid, size: int, stride: int, dx: Grid) -> None:
    """dx = dy added at each window's argmax. dx has the ring that x has; what lands in it is not used."""
    _clear(k, dx)
    rows, columns, channels = dy.shape
    with k.loop(k.groups(k.lanes)) as g, k.loop(rows) as u, k.loop(columns) as v, k.loop(channels) as c:
        corner = dx.stored(k, g).at(u, stride * dx.row).at(v, stride * dx.column).at(c, dx.lanes)
        value = k.load(dy.pixel(k, g, u, v).at(c, dy.lanes))
        where = k.as_integers(k.load(argmax.pixel(k, g, u, v).at(c, argmax.lanes)))
        with k.loop(size) as i, k.loop(size) as j:
            code = k.builder.trunc(k.builder.add(k.builder.mul(i, INDEX(size)), j), INT)
            here = k.builder.icmp_signed("==", where, _spread_place(k, code))
            at = corner.at(i, dx.row).at(j, dx.column)
            k.store(k.add(k.load(at), k.select(here, value, k.zero())), at)


def avg_pool(k: Emitter, x: Grid, size: int, stride: int, shares: Pointer, y: Grid) -> None:
    """y = the mean of each window's pixels inside the image; `shares` (U, V) holds 1 / their number."""
    rows, columns, channels = y.shape
    with k.loop(k.groups(k.lanes)) as g, k.loop(rows) as u, k.loop(columns) as v:
        share = k.splat(shares.at(u, columns).at(v))
        with k.loop(channels) as c:
            corner = x.stored(k, g).at(u, stride * x.row).at(v, stride * x.column).at(c, x.lanes)
            total = k.variable()
            with k.loop(size) as i, k.loop(size) as j:
                total.set(k.add(total.get(), k.load(corner.at(i, x.row).at(j, x.column))))
            k.store(k.multiply(total.get(), share), y.pixel(k, g, u, v).at(c, y.lanes))


def avg_pool_backward(k: Emitter, dy: Grid, size: int, stride: int, shares: Pointer, dx: Grid) -> None:
    """dx = each window's share of dy, added up; dx has the ring that x has."""
    _clear(k, dx)
    rows, columns, channels = dy.shape
    with k.loop(k.groups(k.lanes)) as g, k.loop(rows) as u, k.loop(columns) as v:
        share = k.splat(shares.at(u, columns).at(v))
        with k.loop(channels) as c:
            corner = dx.stored(k, g).at(u, stride * dx.row).at(v, stride * dx.column).at(c, dx.lanes)
            value = k.multiply(k.load(dy.pixel(k, g, u, v).at(c, dy.lanes)), share)
            with k.loop(size) as i, k.loop(size) as j:
                at = corner.at(i, dx.row).at(j, dx.column)
                k.store(k.add(k.load(at), value), at)


def _clear(k: Emitter, x: Grid) -> None:
    with k.loop(k.groups(k.lanes)) as g, k.loop(x.group // x.lanes) as i:
        k.store(k.zero(), x.stored(k, g).at(i, x.lanes))


def _spread_place(k: Emitter, code: ir.Value) -> ir.Value:
    single = k.builder.insert_element(ir.Constant(k.indices, ir.Undefined), code, INT(0))
    return k.builder.shuffle_vector(single, single, ir.Constant(k.indices, None))
