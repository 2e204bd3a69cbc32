"""What every kernel is written with: sizes as constants, and index arithmetic in uint32, which all of it stands in.

A kernel is made by a function of the sizes that are known when a network is compiled, so that index arithmetic folds
into constants. Arrays are flat, indices uint32 and numbers float32: an int64 index doubles the instructions of an inner
loop, a float64 literal makes the GPU compute in double. Numba types the sum of two uint32 as uint64; `offset` and
`split` compute in 32 bits whatever they are given, and `u32(...)` around a lone sum or product does the same. A bare
sum of two offsets is made where the second is a constant once loops are unrolled: it becomes part of the address.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cuda
from numba.cuda import types
from numba.cuda.extending import intrinsic

from cnnexp.backends.gpu.device import Tensor
from cnnexp.network import Window

u32, f32 = np.uint32, np.float32
ZERO, ONE = f32(0), f32(1)


@dataclass(frozen=True)
class ConvSizes:
    """Sizes of a convolution, in the letters of `protocol`; images by `stride`, `top` and `left` as there.

    Those of a pooling layer, too: S is its K, U and V are its P and Q, and its F is C.
    """

    H: int
    W: int
    C: int
    K: int
    F: int
    stride: int
    top: int
    left: int
    P: int
    Q: int
    groups: int = 1  # of channels and filters
    dilation: int = 1  # step in pixels from tap to tap

    @property
    def dense(self) -> bool:
        """Whether every filter sees all channels, and the kernel's taps are neighbours."""
        return self.groups == self.dilation == 1

    @property
    def wide(self) -> int:
        """Columns of the padded image that windows without dilation see."""
        return (self.Q - 1) * self.stride + self.K

    @property
    def padded(self) -> bool:
        """Whether windows reach outside the image."""
        reach = (self.K - 1) * self.dilation + 1
        below = (self.P - 1) * self.stride + reach - self.top > self.H
        right = (self.Q - 1) * self.stride + reach - self.left > self.W
        return bool(self.top or self.left or below or right)


@intrinsic
def offset(typing: Any, *numbers: Any) -> Any:
    """Where an element lies, (i * J + j) * K + k for `offset(i, J, j, K, k)`; every product and sum is below 2**32."""

    def code(context: Any, builder: Any, kinds: Any, arguments: Any) -> Any:
        place, *rest = _words(context, builder, kinds.args[-1], arguments[-1])
        for size, index in zip(rest[::2], rest[1::2], strict=True):
            place = builder.add(builder.mul(place, size), index)
        return place

    return types.uint32(types.StarArgTuple(numbers)), code


@intrinsic
def split(typing: Any, place: Any, *sizes: Any) -> Any:
    """The indices of an element, `(i, j, k)` for `split(offset(i, J, j, K, k), J, K)`; the first may be any number."""

    def code(context: Any, builder: Any, kinds: Any, arguments: Any) -> Any:
        rest, found = context.cast(builder, arguments[0], kinds.args[0], types.uint32), []
        for size in reversed(_words(context, builder, kinds.args[-1], arguments[-1])):
            found.append(builder.urem(rest, size))
            rest = builder.udiv(rest, size)
        return context.make_tuple(builder, kinds.return_type, [rest, *reversed(found)])

    return types.UniTuple(types.uint32, len(sizes) + 1)(place, types.StarArgTuple(sizes)), code


@intrinsic
def four(typing: Any, array: Any, place: Any) -> Any:
    """Return four float32 from a place on, a multiple of four, of an array whose memory begins at one: by one load."""

    def code(context: Any, builder: Any, kinds: Any, arguments: Any) -> Any:
        loaded = builder.load(_vector(context, builder, kinds, arguments), align=16)
        numbers = [builder.extract_element(loaded, ir.Constant(ir.IntType(32), i)) for i in range(4)]
        return context.make_tuple(builder, kinds.return_type, numbers)

    return types.UniTuple(types.float32, 4)(array, place), code


@intrinsic
def put_four(typing: Any, array: Any, place: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Store four float32 where `four` would load them."""

    def code(context: Any, builder: Any, kinds: Any, arguments: Any) -> Any:
        numbers = ir.Constant(ir.VectorType(ir.FloatType(), 4), ir.Undefined)
        for i, value in enumerate(arguments[2:]):
            numbers = builder.insert_element(numbers, value, ir.Constant(ir.IntType(32), i))
        builder.store(numbers, _vector(context, builder, kinds, arguments), align=16)
        return context.get_dummy_value()

    return types.none(array, place, *[types.float32] * 4), code


def _vector(context: Any, builder: Any, kinds: Any, arguments: Any) -> Any:
    """Return the pointer to four numbers of arguments[0] from arguments[1] on."""
    data = context.make_array(kinds.args[0])(context, builder, arguments[0]).data
    index = context.cast(builder, arguments[1], kinds.args[1], types.uint64)
    return builder.bitcast(builder.gep(data, [index]), ir.VectorType(ir.FloatType(), 4).as_pointer())


def _words(context: Any, builder: Any, kinds: Any, packed: Any) -> list[Any]:
    """Return the numbers of a tuple as uint32."""
    return [context.cast(builder, builder.extract_value(packed, i), kind, types.uint32) for i, kind in enumerate(kinds)]


@cuda.jit(device=True)
def first_window(row, size, stride):
    """Return the first of the windows of a padded image that hold a row, or a column."""
    return u32(u32(row - size) // stride + 1) if row >= size else u32(0)


@cache
def padded_pixel(sizes: ConvSizes, number: Any = f32) -> Any:
    """Return the device function (x, first, row, col, c): a pixel of the padded image that begins at x[first].

    `number` makes a float32 of what x holds.
    """
    H, W, C, _, _, _, top, left, *_ = unsigned(sizes)

    def pixel(x, first, row, col, c):
        if top <= row and row < u32(H + top) and left <= col and col < u32(W + left):
            return number(x[u32(first + offset(u32(row - top), W, u32(col - left), C, c))])
        return ZERO

    return cuda.jit(device=True)(pixel)


def conv_sizes(x: Tensor, w: Tensor, window: Window, y: Tensor) -> ConvSizes:
    """Return the sizes of the convolution of x (N,H,W,C) with w (K,K,C/G,F) to y (N,P,Q,F)."""
    (K, _, seen, F), at = w.shape, (window.stride, window.top, window.left)
    return ConvSizes(*x.shape[1:], K, F, *at, *y.shape[1:3], x.shape[3] // seen, window.dilation)


def pool_sizes(x: Tensor, window: Window, y: Tensor) -> ConvSizes:
    """Return the sizes of the pooling of x (N,H,W,C) to y (N,U,V,C)."""
    return ConvSizes(*x.shape[1:], window.size, x.shape[3], window.stride, window.top, window.left, *y.shape[1:3])


def unsigned(sizes: ConvSizes) -> list[np.uint32]:
    """Return the sizes, in their order, as constants that a kernel takes for uint32."""
    return [u32(value) for value in vars(sizes).values()]
