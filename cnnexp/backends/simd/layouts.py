"""Where activations lie in a thread's arena, and how they are addressed.

Three layouts. `Blocked` is nHWC16n (8 or 4 with narrower vectors): the batch is in the vector lanes,
[group][row][column][channel][lane]. One vector holds one value of `lanes` images, so a convolution of any shape is full
vectors. `NC` has one image per row: linear layers, and gradients through an argmax, where images differ in what they
read, work on it. `NHWC` is the same with rows, columns and perhaps a halo: convolutions of many channels work on it.
A reorder is a transposition of `lanes` x `lanes` blocks, a few hundred cycles an image.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from llvmlite import ir

from cnnexp.backends.simd.compiler.clocks import Clocks
from cnnexp.backends.simd.compiler.emit import INDEX, LINE_FLOATS, Emitter, Offset, Pointer, Target
from cnnexp.network import ConvStage, LinearStage, Parameter, Shape


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


SHORT_ROW = 256
"""Floats of rows that are stored without room between them."""


def odd_lines(floats: int) -> int:
    """Return the next odd number of cache lines: rows a power of two apart would meet in one set of a cache."""
    lines = -(-floats // LINE_FLOATS)
    return LINE_FLOATS * (lines + 1 - lines % 2)


@dataclass(frozen=True)
class Halo:
    """Room around an image, so that windows that reach past its edge need no tests.

    Attributes:
        top, left, bottom, right: rows and columns around the image.
        step: distance between neighbouring pixels; the pixels between them keep the fill value.
        value: what the room is filled with, once; 0 before every use where the program predicts.
    """

    top: int = 0
    left: int = 0
    bottom: int = 0
    right: int = 0
    step: int = 1
    value: float = 0.0

    def around(self, shape: Shape) -> tuple[int, int]:
        """Return the rows and columns that are stored of (H, W, C)."""
        rows, columns = ((count - 1) * self.step + 1 for count in shape[:2])
        return rows + self.top + self.bottom, columns + self.left + self.right


@dataclass(frozen=True)
class Tensor:
    """Values of images, channels last, perhaps with a halo; with many images in a vector, each `image` is a group.

    Attributes:
        offset: of the first stored value in the arena, in floats. shape: (H, W, C), or (D,) of rows.
        stride: floats from image to image. lanes: images in a vector, so floats from value to value.
        halo: the room around.
    """

    offset: int
    shape: Shape
    stride: int
    lanes: int = 1
    halo: Halo = Halo()

    @property
    def size(self) -> int:
        """Values of an image."""
        return math.prod(self.shape)

    @property
    def column(self) -> int:
        """Floats from one stored column to the next."""
        return self.shape[2] * self.lanes

    @property
    def row(self) -> int:
        return self.halo.around(self.shape)[1] * self.column

    @property
    def dense(self) -> bool:
        """Whether pixels follow each other without room between them."""
        return self.halo == Halo(value=self.halo.value)

    def stored(self, k: Emitter, image: ir.Value | int) -> Pointer:
        """Return the address of the first stored value, in the halo if there is one."""
        return (k.arena + self.offset).at(image, self.stride)

    def pixel(self, k: Emitter, image: ir.Value, row: ir.Value | int, column: ir.Value | int) -> Pointer:
        """Return the address of channel 0 of a pixel of the image."""
        first = self.stored(k, image) + (self.halo.top * self.row + self.halo.left * self.column)
        return first.at(row, self.row * self.halo.step).at(column, self.column * self.halo.step)

    def apart(self, rows: int, columns: int) -> int:
        """Return the floats from a pixel to the one so much further."""
        return (rows * self.row + columns * self.column) * self.halo.step


class Blocked(Tensor):
    """Images (H, W, C), the batch in lanes."""


@dataclass(frozen=True)
class NC(Tensor):
    """An image a row; loads and stores may reach a vector past the last value. The step of its halo is 1.

    Attributes:
        width: the size rounded up to whole vectors; the rest of them holds finite values, 0 where a linear layer reads.
    """

    width: int = 0


class NHWC(NC):
    """As `NC`, of images: rows and columns count, and there may be a halo. Without one it serves as `NC`, too."""


Placed = tuple[Tensor, ir.Value]
"""A tensor and one of its images."""


def runs(k: Emitter, *placed: Placed) -> Iterator[tuple[list[Pointer], ir.Value, int]]:
    """Run what follows for every run of values between which no tensor has room.

    Yields where it begins in each, the number of its first value, and how many there are.
    """
    shape = next((tensor.shape for tensor, _ in placed if not tensor.dense), None)
    if shape is None:
        yield [tensor.stored(k, n) for tensor, n in placed], INDEX(0), placed[0][0].size
        return
    (rows, columns, channels), run = shape, shape[1] * shape[2]
    images = [(replace(tensor, shape=shape), n) for tensor, n in placed]  # a row without room is an image of any shape
    with k.loop(rows) as p:
        if all(tensor.halo.step == 1 for tensor, _ in placed):
            yield [image.pixel(k, n, p, 0) for image, n in images], k.scaled(p, run), run
            return
        with k.loop(columns) as q:
            first = k.builder.add(k.scaled(p, run), k.scaled(q, channels))
            yield [image.pixel(k, n, p, q) for image, n in images], first, channels


def vectors_of(k: Emitter, *placed: Placed, parts: int = 1) -> Iterator[tuple[list[Pointer], int]]:
    """Run what follows for every vector of an image: its address in each tensor, and how many of its lanes count."""
    for starts, _, size in runs(k, *placed):
        for v, valid in k.vectors(size * placed[0][0].lanes, parts):
            yield [start.at(v, k.lanes) for start in starts], valid


def vectors(k: Emitter, *tensors: Tensor, parts: int = 1) -> Iterator[tuple[list[Pointer], int]]:
    """As `vectors_of`, of every image; parts as for `Emitter.turns`."""
    with k.loop(k.groups(tensors[0].lanes)) as n:
        yield from vectors_of(k, *((tensor, n) for tensor in tensors), parts=parts)


def clear_halo(k: Emitter, y: Tensor) -> None:
    """Fill the room around every image with zeros, in the first part of a kernel, and write nothing else."""
    pixels, last = y.shape[1] * y.column, y.shape[0] - 1
    above, below = y.halo.top * y.row + y.halo.left * y.column, y.halo.bottom * y.row + y.halo.right * y.column
    rooms = (0, above, 1), (above + pixels, y.row - pixels, last), (above + last * y.row + pixels, below, 1)
    with k.loop(1, k.index), k.loop(k.groups(y.lanes)) as n:
        for start, floats, times in rooms:
            with k.loop(times) as p:
                for v, valid in k.vectors(floats):
                    k.store_part(k.zero(), (y.stored(k, n) + start).at(p, y.row).at(v, k.lanes), valid)


class Arena:
    """Hands out room for a tile of images.

    Args:
        lanes: images per vector.
        groups: vectors of images per tile.
        images: per tile; if they fill no vectors, nothing may write whole vectors of images to an `NC`.

    Attributes:
        size: floats. shared: where the room lies that each kernel has for itself while it runs, once all is allocated.
            needed: floats of that.
        scratch: floats of a scratch buffer that the tiles of a share use one after the other, for what none needs once
            the next one comes. Its offsets are negative: they count back from its end.
    """

    def __init__(self, lanes: int, groups: int, images: int) -> None:
        self.lanes, self.groups, self.images = lanes, groups, images
        # loads may reach one vector past the last value
        self.size = self.scratch = 16 * lanes
        self.shared, self.needed = Offset(0), 0
        self._fills: list[tuple[int, np.ndarray]] = []
        self._taken: list[tuple[int, int, int, int]] = []

    def allocate(self, floats: int, scratch: bool = False) -> Offset:
        """Return the offset of room that starts on a cache line."""
        if scratch:
            self.scratch += round_up(floats, 16)
            return Offset(-self.scratch)
        offset = Offset(self.size)
        self.size += round_up(floats, 16)
        return offset

    def together(self, images: int, scratch: bool = True) -> Arena:
        """Return this arena for what holds so many images, those of all tiles of a share, in the scratch buffer."""
        rows = copy.copy(self)
        rows.groups, rows.images = -(-images // self.lanes), images
        rows.allocate = lambda floats, _=False: self.allocate(floats, scratch)  # type: ignore[assignment]
        return rows

    def reuse(self, floats: int, first: int, last: int) -> Offset:
        """Return the offset of room in the scratch buffer that nothing else has from the first step to the last."""
        end, floats = 16 * self.lanes, round_up(floats, 16)
        for start, until, *used in sorted(self._taken):
            if first <= used[1] and used[0] <= last and start < end + floats:
                end = max(end, until)
        self._taken.append((end, end + floats, first, last))
        self.scratch = max(self.scratch, end + floats)
        return Offset(-end - floats)

    def share(self, floats: int) -> None:
        """Have the room that kernels take turns in hold as much."""
        self.needed = max(self.needed, floats)

    def blocked(self, shape: Shape, halo: Halo = Halo(), scratch: bool = False, at: Offset | None = None) -> Blocked:
        stride = math.prod(halo.around(shape)) * shape[2] * self.lanes
        return Blocked(self._filled(self.groups * stride, halo, scratch, at), shape, stride, self.lanes, halo)

    def floats(self, tensor: Tensor) -> int:
        """Return how many floats of room a tensor takes."""
        return tensor.stride * (self.groups if isinstance(tensor, Blocked) else self.images)

    def _filled(self, floats: int, halo: Halo, scratch: bool, at: Offset | None) -> Offset:
        """Return the offset of room for images with what their halo holds all over: `at`, if there is some."""
        if at is not None:
            return at
        offset = self.allocate(floats, scratch)
        if halo.value:
            self._fills.append((offset, np.full(floats, halo.value, np.float32)))
        return offset

    def argmax(self, shape: Shape) -> Blocked:
        """Return a tensor of bytes, one per lane."""
        stride = math.prod(shape) * self.lanes // 4
        return Blocked(self.allocate(self.groups * stride), shape, stride, self.lanes // 4)

    def nc(self, size: int) -> NC:
        width = round_up(size, self.lanes)
        stride = width if width < SHORT_ROW else odd_lines(width)
        return NC(self.allocate(self.images * stride), (size,), stride, width=width)

    def nhwc(self, shape: Shape, halo: Halo = Halo(), scratch: bool = False, at: Offset | None = None) -> NHWC:
        stride = odd_lines(math.prod(halo.around(shape)) * shape[2] + self.lanes)
        width = round_up(math.prod(shape), self.lanes)
        return NHWC(self._filled(self.images * stride, halo, scratch, at), shape, stride, halo=halo, width=width)

    def constants(self, values: np.ndarray) -> Offset:
        """Return the offset of room that holds these float32 values for good."""
        values = values.ravel()
        offset = self.allocate(len(values))
        self._fills.append((offset, values))
        return offset

    @property
    def stride(self) -> int:
        """Floats from one thread's arena to the next, once all is allocated."""
        return round_up(self.size + 16 * self.lanes, 16)

    def make(self, shares: int, tiles: int = 1) -> np.ndarray:
        """Return arenas (tiles * shares, stride) as a fresh run needs them, tile by tile, each on its own cache lines.

        The first eight bytes of each hold the floats to the end of its share's scratch buffer, for offsets below 0.
        """
        room = round_up(self.scratch + 16 * self.lanes, 16)
        whole = aligned_zeros((tiles * shares * self.stride + shares * room,))
        arenas, rooms = np.split(whole, [tiles * shares * self.stride])
        arenas, rooms = arenas.reshape(-1, self.stride), rooms.reshape(-1, room)
        for offset, values in self._fills:
            filled, at = (rooms, room + int(offset)) if offset < 0 else (arenas, int(offset))
            filled[:, at : at + len(values)] = values
        numbers = np.arange(len(arenas))
        arenas[:, :2].view(np.int64)[:, 0] = (len(arenas) - numbers) * self.stride + (numbers % shares + 1) * room
        return arenas


def aligned_zeros(shape: Shape) -> np.ndarray:
    """Return float32 zeros that start on a cache line of 64 bytes."""
    raw = np.zeros(math.prod(shape) + 16, np.float32)
    start = -(raw.ctypes.data // 4) % 16
    return raw[start : start + math.prod(shape)].reshape(shape)


Views = list[tuple[np.ndarray, np.ndarray]]
"""Pairs of views of one shape: what lies in the first, of the network's own order, lies in the second, of a buffer."""


def padded_rows(flat: np.ndarray, packed: np.ndarray, rows: int, row: int) -> Views:
    """Return where the elements of `rows` equal rows lie that take `row` floats each."""
    return [(flat.reshape(rows, -1), packed[: rows * row].reshape(rows, row)[:, : len(flat) // rows])]


class Parameters:
    """Where every parameter lies in this backend's own flat buffer, rounded up to vectors where a kernel likes it so.

    The owned ones lie last: a thread that owns a share of them adds up their gradient over all images and takes their
    step at once (`Plan.updates`). The others' gradients are added up by thread.

    Attributes:
        added, owned: floats of the two parts of the buffer. kept: of the first, what is no parameter: see `reserve`.
    """

    def __init__(self, lanes: int) -> None:
        self.lanes, self.added, self.owned, self.kept = lanes, 0, 0, 0
        self._places: dict[str, tuple[bool, int]] = {}
        self._offsets: dict[str, Offset] = {}
        self._parts: list[tuple[Parameter, int, Callable[[np.ndarray, np.ndarray], Views]]] = []

    @property
    def size(self) -> int:
        """Floats of the parameters."""
        return self.added + self.owned - self.kept

    def place(
        self, parameter: Parameter, size: int, views: Callable[[np.ndarray, np.ndarray], Views], owned: bool = False
    ) -> None:
        """Give a parameter `size` floats, where its elements lie as `views` states, given it, flat, and its room."""
        self._places[parameter.name] = owned, self.owned if owned else self.added
        self._parts.append((parameter, size, views))
        if owned:
            self.owned += round_up(size, 16)
        else:
            self.added += round_up(size, 16)

    def place_plain(self, *parameters: Parameter | None) -> None:
        """Give parameters, those that there are, room in their own order."""
        for parameter in parameters:
            if parameter is not None:
                size = round_up(parameter.size, self.lanes)
                self.place(parameter, size, functools.partial(padded_rows, rows=1, row=size))

    def reserve(self, floats: int) -> Offset:
        """Return the offset of room for what `Node.setup` makes of the parameters, and all threads read."""
        at, floats = self.added, round_up(floats, 16)
        self.added, self.kept = at + floats, self.kept + floats
        return Offset(at)

    def rows(self) -> np.ndarray:
        """Return (first, end, axes) of every parameter in the buffer, int64 (parameters, 3)."""
        starts = [(int(self.offset(parameter)), size, len(parameter.shape)) for parameter, size, _ in self._parts]
        return np.array([(start, start + round_up(size, 16), axes) for start, size, axes in starts], np.int64)

    def pack(self, flat: np.ndarray, packed: np.ndarray) -> None:
        """Put values in the network's order, (parameter_count,), where they lie in a buffer (size,)."""
        for ours, theirs in self._views(flat, packed):
            theirs[...] = ours

    def unpack(self, packed: np.ndarray) -> np.ndarray:
        """Return a buffer's values in the network's order, float32 (parameter_count,)."""
        flat = np.empty(sum(parameter.size for parameter, _, _ in self._parts), np.float32)
        for ours, theirs in self._views(flat, packed):
            ours[...] = theirs
        return flat

    def _views(self, flat: np.ndarray, packed: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for parameter, size, views in self._parts:
            at = int(self.offset(parameter))
            yield from views(flat[parameter.offset : parameter.offset + parameter.size], packed[at : at + size])

    def offset(self, parameter: Parameter) -> Offset:
        """Return where a parameter begins, once all have their places."""
        owned, at = self._places[parameter.name]
        return self._offsets.setdefault(parameter.name, Offset(at + self.added if owned else at))

    def of(self, stage: ConvStage | LinearStage, start: Pointer) -> tuple[Pointer, Pointer | None]:
        """Return the addresses of a layer's weight and of its bias, None where it has none, in a buffer."""
        bias = None if stage.bias is None else start + self.offset(stage.bias)
        return start + self.offset(stage.weight), bias


class Layout(Protocol):
    """What a node sees of its plan.

    Attributes:
        target: the CPU. arena, parameters: the room of activations and of parameters.
        share: images of a thread in a step, at most a tile's. clocks: of the parts of a step.
        owns: whether a step's images are one tile of each thread, so that weights may be owned.
    """

    target: Target
    arena: Arena
    parameters: Parameters
    clocks: Clocks
    share: int
    owns: bool
