"""Where activations lie in a thread's arena, and how they are addressed.

Two layouts. A `Grid` has the batch in the vector lanes, [group][row][column][channel][lane]: one vector holds one value
of `lanes` images, so a convolution of any shape is full vectors. A `Matrix` has one image per row, channels-last:
linear layers and gradients through an argmax, where every image goes its own way, work on these. Changing layout is a
transposition of `lanes` x `lanes` blocks, a few hundred cycles an image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from llvmlite import ir

from cnnexp.backends.simd.emit import Emitter, Pointer, Target
from cnnexp.network import Parameter, Shape


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class Ring:
    """Room around an image, so that windows that reach past its edge need no tests.

    Attributes:
        top, left, bottom, right: rows and columns around the image.
        step: distance between neighbouring pixels; the pixels between them keep the fill value.
        value: what the room is filled with, once.
    """

    top: int = 0
    left: int = 0
    bottom: int = 0
    right: int = 0
    step: int = 1
    value: float = 0.0


@dataclass(frozen=True)
class Grid:
    """Values (H, W, C) of groups of images, batch in lanes, perhaps with a ring.

    Attributes:
        offset: of the first element in the arena, in floats.
        shape: (H, W, C).
        lanes: room of one vector in floats.
        ring: the room around.
    """

    offset: int
    shape: Shape
    lanes: int
    ring: Ring = Ring()

    @property
    def column(self) -> int:
        """Floats from one stored column to the next."""
        return self.shape[2] * self.lanes

    @property
    def row(self) -> int:
        ring = self.ring
        return ((self.shape[1] - 1) * ring.step + 1 + ring.left + ring.right) * self.column

    @property
    def group(self) -> int:
        ring = self.ring
        return ((self.shape[0] - 1) * ring.step + 1 + ring.top + ring.bottom) * self.row

    @property
    def dense(self) -> bool:
        """Whether pixels follow each other without room between them."""
        return self.ring == Ring(value=self.ring.value)

    def stored(self, k: Emitter, group: ir.Value) -> Pointer:
        """Return the address of the first stored pixel, in the ring if there is one."""
        return (k.arena + self.offset).at(group, self.group)

    def image(self, k: Emitter, group: ir.Value) -> Pointer:
        """Return the address of the image's first pixel."""
        return self.stored(k, group) + (self.ring.top * self.row + self.ring.left * self.column)

    def pixel(self, k: Emitter, group: ir.Value, row: ir.Value | int, column: ir.Value | int) -> Pointer:
        """Return the address of channel 0 of a pixel of the image."""
        step = self.ring.step
        return self.image(k, group).at(row, self.row * step).at(column, self.column * step)


@dataclass(frozen=True)
class Matrix:
    """Values (D,) of images, one image per row.

    Attributes:
        offset: of the first element in the arena, in floats.
        size: D.
        stride: floats from row to row, a multiple of the lanes; the rest of a row holds finite values.
    """

    offset: int
    size: int
    stride: int

    def row(self, k: Emitter, image: ir.Value | int) -> Pointer:
        return (k.arena + self.offset).at(image, self.stride)


class Arena:
    """Hands out room for a tile of images.

    Args:
        lanes: images per vector.
        groups: vectors of images per tile.
    """

    def __init__(self, lanes: int, groups: int) -> None:
        self.lanes, self.groups, self.images = lanes, groups, lanes * groups
        # loads may reach one vector past the last value
        self.size = 16 * lanes
        self._fills: list[tuple[int, np.ndarray]] = []

    def allocate(self, floats: int) -> int:
        """Return the offset of room that starts on a cache line."""
        offset = self.size
        self.size += round_up(floats, 16)
        return offset

    def grid(self, shape: Shape, ring: Ring = Ring()) -> Grid:
        grid = Grid(0, shape, self.lanes, ring)
        size = self.groups * grid.group
        grid = Grid(self.allocate(size), shape, self.lanes, ring)
        if ring.value:
            self._fills.append((grid.offset, np.full(size, ring.value, np.float32)))
        return grid

    def codes(self, shape: Shape) -> Grid:
        """Return a grid of bytes, one per lane."""
        grid = Grid(0, shape, self.lanes // 4)
        return Grid(self.allocate(self.groups * grid.group), shape, self.lanes // 4)

    def matrix(self, size: int) -> Matrix:
        stride = round_up(size, self.lanes)
        return Matrix(self.allocate(self.images * stride), size, stride)

    def constants(self, values: np.ndarray) -> int:
        """Return the offset of room that holds these float32 values for good."""
        values = values.ravel()
        offset = self.allocate(len(values))
        self._fills.append((offset, values))
        return offset

    def make(self, threads: int) -> np.ndarray:
        """Return arenas (threads, size) as a fresh run needs them, each on its own cache lines."""
        size = round_up(self.size + 16 * self.lanes, 16)
        arenas = aligned_zeros((threads, size))
        for offset, values in self._fills:
            arenas[:, offset : offset + len(values)] = values
        return arenas


def aligned_zeros(shape: Shape) -> np.ndarray:
    """Return float32 zeros that start on a cache line of 64 bytes."""
    raw = np.zeros(math.prod(shape) + 16, np.float32)
    start = -(raw.ctypes.data // 4) % 16
    return raw[start : start + math.prod(shape)].reshape(shape)


class Parameters:
    """Where every parameter lies in this backend's own flat buffer, rounded up to vectors where a kernel likes it so.

    Attributes:
        size: of the buffer, in floats.
        positions: int64 (parameter_count,), the place of every element of the network's flat buffer.
    """

    def __init__(self, lanes: int) -> None:
        self.lanes, self.size = lanes, 0
        self._offsets: dict[str, int] = {}
        self._parts: list[tuple[int, np.ndarray]] = []

    def place(self, parameter: Parameter, size: int, positions: np.ndarray) -> None:
        """Give a parameter `size` floats, its elements at `positions` in them."""
        self._offsets[parameter.name] = self.size
        self._parts.append((parameter.offset, self.size + positions.ravel()))
        self.size += round_up(size, 16)

    def place_plain(self, parameter: Parameter) -> None:
        self.place(parameter, round_up(parameter.size, self.lanes), np.arange(parameter.size))

    @property
    def positions(self) -> np.ndarray:
        return np.concatenate([positions for _, positions in sorted(self._parts, key=lambda part: part[0])])

    def weight(self, k: Emitter, parameter: Parameter) -> Pointer:
        return k.parameters + self._offsets[parameter.name]

    def gradient(self, k: Emitter, parameter: Parameter) -> Pointer:
        return k.gradients + self._offsets[parameter.name]


class Layout(Protocol):
    """What a node sees of its plan: the vectors, and the room of activations and of parameters."""

    target: Target
    arena: Arena
    parameters: Parameters
