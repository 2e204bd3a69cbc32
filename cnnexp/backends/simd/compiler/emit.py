"""Vector kernels written in Python, emitted as LLVM IR.

A kernel is a Python function that takes an `Emitter` and calls its methods; each method appends instructions. A Python
`for` therefore unrolls (the register tile of a kernel), while `with k.loop(n) as i` makes a loop that runs. Shapes are
Python numbers, so every stride and offset is a constant in the machine code.

Why not plain `@njit` loops: LLVM's own vectorizer reaches a tenth of the FMA rate on these convolutions, because it
does not keep a tile of accumulators in registers. Vectors are `<lanes x float>`; LLVM splits them where a CPU must.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from llvmlite import ir

from cnnexp.backends.simd.compiler import intrinsics

FLOAT, BIT, BYTE, INT, INDEX = ir.FloatType(), ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64)

LINE_FLOATS = 16
"""Of a cache line."""

AHEAD_EVERY = 16
"""Multiply-adds from one line that is brought near to the next, some 8 cycles: faster, Zen 5 drops what it is told."""

PERMUTES = {8: intrinsics.PERMUTE_8, 16: intrinsics.PERMUTE_16}
"""By lanes."""


@dataclass(frozen=True)
class Target:
    """What the kernels are shaped for.

    Attributes:
        lanes: floats per vector, a power of 2 >= 4.
        registers: vector registers, which bound the register tiles.
        features: those of the CPU that `intrinsics.NEEDS` speaks of, sorted.
        l2_bytes, l1_bytes: of the caches that a core has to itself.
        forced: (layer, algorithm) where a layer is not to be computed by the one that costs least; see `planner`.
        clocks: whether kernels read the clock, for a profile: see `clocks`.
        forward_only: whether the kernels are to predict and never train.
        parts: that a kernel is cut into where threads share a tile: in `predict`, and in a step of one image.
            part_cycles: that are worth it, some 2 us.
    """

    lanes: int
    registers: int
    features: tuple[str, ...] = ()
    l2_bytes: int = 2 << 20
    l1_bytes: int = 32 << 10
    forced: tuple[tuple[str, str], ...] = ()
    clocks: bool = False
    forward_only: bool = False
    parts: int = 1
    part_cycles: int = 8_000

    def has(self, intrinsic_name: str) -> bool:
        """Whether the CPU has the instruction of an intrinsic in `intrinsics.NEEDS`."""
        return intrinsics.NEEDS[intrinsic_name] in self.features

    @property
    def compresses(self) -> bool:
        """Whether one instruction moves the lanes under a mask to the front."""
        return self.lanes == 16 and self.has(intrinsics.COMPRESS_16)

    @property
    def permutes(self) -> bool:
        """Whether one instruction permutes a vector by a vector of indices."""
        return self.lanes in PERMUTES and self.has(PERMUTES[self.lanes])


def chunks(total: int, most: int) -> list[tuple[int, int, int]]:
    """As `chunks_of`, of at most `most`, and as equal as can be."""
    return chunks_of(total, -(-total // -(-total // most)))


def chunks_of(total: int, size: int) -> list[tuple[int, int, int]]:
    """Split `total` into chunks of `size` and one rest: (first, size of a chunk, number of chunks)."""
    whole, rest = divmod(total, size)
    return ([(0, size, whole)] if whole else []) + ([(whole * size, rest, 1)] if rest else [])


Chunk = tuple[int, int, int]
"""As `chunks_of` returns them."""


class Offset(int):
    """Where something lies in a buffer: it follows from the place in the network, so a kernel is given it."""

    def _refuse(self, *_: object) -> int:
        raise TypeError("add it to a Pointer: a number made of it would be of one place in the network")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __mod__ = _refuse


Offsets = dict[tuple[str, Offset], int]
"""What a kernel adds to its buffers, by buffer: their numbers in the table that it is called with."""


@functools.cache
def _in_all_lanes(lanes: int, number: str) -> ir.Constant:
    return ir.Constant(ir.VectorType(FLOAT, lanes), [FLOAT(float.fromhex(number))] * lanes)  # 0.0 == -0.0 is no key


class Pointer:
    """The address of an element of a buffer: a base, and a constant number of elements that costs nothing to add."""

    def __init__(self, k: Emitter, base: ir.Value, constant: int = 0) -> None:
        self._k, self._base, self._constant = k, base, constant

    def __add__(self, elements: int) -> Pointer:
        if isinstance(elements, Offset):
            return Pointer(self._k, self._k.place(self._base, elements), self._constant)
        return Pointer(self._k, self._base, self._constant + elements)

    def at(self, index: ir.Value | int, stride: int = 1) -> Pointer:
        """Return the address `index * stride` elements further."""
        if isinstance(index, int):
            return self + index * stride
        elements = self._k.builder.mul(index, INDEX(stride)) if stride != 1 else index
        return Pointer(self._k, self._k.builder.gep(self._base, [elements]), self._constant)

    def value(self, kind: ir.Type) -> ir.Value:
        """Return the LLVM pointer, to a `kind`."""
        address = self._k.builder.gep(self._base, [INDEX(self._constant)]) if self._constant else self._base
        return self._k.builder.bitcast(address, kind.as_pointer())


class Variable:
    """A value that a loop changes; LLVM keeps it in a register."""

    def __init__(self, k: Emitter, value: ir.Value) -> None:
        self._k = k
        with k.builder.goto_entry_block():  # what a loop allocates would grow the stack at every turn
            self._slot = k.builder.alloca(value.type)
        self.set(value)

    def get(self) -> ir.Value:
        return self._k.builder.load(self._slot)

    def set(self, value: ir.Value) -> None:
        self._k.builder.store(value, self._slot)


class Emitter:
    """Appends instructions to one kernel.

    Attributes:
        buffers: the arrays it works on; `parameters`, `gradients` and `arena` are the names of the first three in most
            kernels.
        count: images in the tile, at run time. index: what `call` passes on, or which part this is, at run time.
        own: the arena of the thread, which is not that of the tile where threads share one.
        target: lanes and registers of the CPU. offsets: those in use so far.
        add, subtract, multiply, select: the builder's, of vectors as well as numbers.
    """

    def __init__(self, function: ir.Function, target: Target, offsets: Offsets) -> None:
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        self.function, self.module, self.target, self.lanes = function, function.module, target, target.lanes
        *buffers, self.count, self.index, self._table = function.args
        self.offsets, self._places = offsets, dict[tuple[str, Offset], ir.Value]()
        self.buffers = [Pointer(self, buffer) for buffer in buffers]
        self.parameters, self.gradients, self.arena = self.buffers[:3]
        self.own = self.gradients if target.forward_only else self.arena
        self.vector = ir.VectorType(FLOAT, target.lanes)
        self.indices = ir.VectorType(INT, target.lanes)
        self.bytes = ir.VectorType(BYTE, target.lanes)
        self.add, self.subtract, self.multiply = self.builder.fadd, self.builder.fsub, self.builder.fmul
        self.select = self.builder.select
        self._ahead: list[tuple[Variable, ir.Value]] = []
        self._multiplied = 0

    def place(self, base: ir.Value, offset: Offset) -> ir.Value:
        """Return the address at an offset from a base; one below 0 counts from the end of a share's scratch buffer."""
        whole = isinstance(base, ir.Argument)
        key = base.name if whole else "", offset
        if key not in self._places:
            with self.builder.goto_entry_block():
                number = self.offsets.setdefault(key, len(self.offsets))
                found = self.builder.load(self.builder.gep(self._table, [INDEX(number)]))
                if offset < 0:
                    end = self.builder.load(self.builder.bitcast(base, INDEX.as_pointer()))
                    found = self.builder.add(found, end)
                self._places[key] = self.builder.gep(base, [found]) if whole else found
        return self._places[key] if whole else self.builder.gep(base, [self._places[key]])

    # control

    @contextmanager
    def loop(self, stop: ir.Value | int, start: ir.Value | int = 0) -> Iterator[ir.Value]:
        """Run the block for start, start + 1, ... below stop; what shall be unrolled is so in Python already."""
        builder = self.builder
        start, stop = (INDEX(n) if isinstance(n, int) else n for n in (start, stop))
        head, body, end = (builder.append_basic_block(f"loop.{part}") for part in ("head", "body", "end"))
        before = builder.block
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(INDEX)
        builder.cbranch(builder.icmp_signed("<", index, stop), body, end)
        builder.position_at_end(body)
        yield index
        index.add_incoming(start, before)
        index.add_incoming(builder.add(index, INDEX(1)), builder.block)
        builder.branch(head).set_metadata("llvm.loop", self._as_it_is())
        builder.position_at_end(end)

    def turns(self, chunks: list[Chunk], parts: int = 1) -> list[tuple[int, int, ir.Value | int, ir.Value | int]]:
        """Return for each kind of chunk its first, its size, and where a `loop` over them stops and starts.

        Args:
            parts: of the kernel that share the chunks: this one has as many as the others, side by side.
        """
        if parts == 1:
            return [(first, size, times, 0) for first, size, times in chunks]
        total, before, found = sum(times for *_, times in chunks), 0, []
        ends = [self.builder.udiv(self.scaled(self.index, total, more * total), INDEX(parts)) for more in (1, 0)]
        for first, size, times in chunks:
            stop, start = (self.builder.sub(self.least(end, INDEX(before + times)), INDEX(before)) for end in ends)
            found.append((first, size, stop, self.largest(start, INDEX(0))))
            before += times
        return found

    def chunks(self, total: int, most: int, parts: int = 1) -> Iterator[tuple[ir.Value, int]]:
        """Run what follows for every chunk of `chunks`: where it begins, and its size. Parts as for `turns`."""
        for first, size, *turns in self.turns(chunks(total, most), parts):
            with self.loop(*turns) as t:
                yield self.scaled(t, size, first), size

    def tiles(
        self, down: tuple[int, int], across: tuple[int, int], parts: int = 1
    ) -> Iterator[tuple[ir.Value, int, ir.Value, int]]:
        """Run what follows for every chunk of the first (total, most), which parts share, with all of the second."""
        for (u, high, *turns), (v, wide, times) in itertools.product(self.turns(chunks(*down), parts), chunks(*across)):
            with self.loop(*turns) as i, self.loop(times) as j:
                yield self.scaled(i, high, u), high, self.scaled(j, wide, v), wide

    def vectors(self, count: int, parts: int = 1) -> Iterator[tuple[ir.Value, int]]:
        """Run what follows for every vector of `count` elements: its number, and how many of its lanes count."""
        whole, rest = divmod(count, self.lanes)
        (_, _, *turns), (_, _, *last) = self.turns([(0, self.lanes, whole), (whole, rest, 1)], parts)
        if whole:
            with self.loop(*turns) as v:
                yield v, self.lanes
        if rest:
            with nullcontext() if parts == 1 else self.loop(*last):
                yield INDEX(whole), rest

    def call(
        self, name: str, emit: Callable[[Emitter, ir.Value], None], index: ir.Value, first: Sequence[Pointer] = ()
    ) -> None:
        """Call emit(k, index) as a function of its own, with its own registers, on the same buffers after `first`."""
        *same, _, table = self.function.args
        same[: len(first)] = [pointer.value(FLOAT) for pointer in first]
        function = define(
            self.module, f"{self.function.name}.{name}", same, self.target, lambda k: emit(k, k.index), self.offsets
        )
        self.builder.call(function, [*same, index, table])

    def opaque(self, pointer: Pointer) -> Pointer:
        """Return the same address; LLVM's loop strength reduction, slow where five loops make one, does not know it."""
        kind = pointer.value(FLOAT).type
        same = ir.InlineAsm(ir.FunctionType(kind, [kind]), "", "=r,0")
        return Pointer(self, self.builder.call(same, [pointer.value(FLOAT)]))

    def _as_it_is(self) -> ir.values.MDValue:
        """Return a mark for a loop that LLVM shall not unroll: it may take minutes over nested ones."""
        disable = self.module.add_metadata(["llvm.loop.unroll.disable"])
        for mark in self.module.metadata:
            if mark.operands[1:] == (disable,):
                return mark
        mark = ir.values.MDValue(self.module, [disable], name=str(len(self.module.metadata)))
        mark.operands = (mark, disable)  # what LLVM demands of a loop's mark
        return mark

    def scaled(self, index: ir.Value, factor: int, more: int = 0) -> ir.Value:
        """Return index * factor + more."""
        return self.builder.add(self.builder.mul(index, INDEX(factor)), INDEX(more))

    def least(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Return the smaller of two indices."""
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)

    def largest(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.select(self.builder.icmp_signed("<", a, b), b, a)

    def blocks(self, size: int) -> Iterator[tuple[ir.Value, ir.Value]]:
        """Run what follows for every `size` images: the first, and the one past the last."""
        with self.loop(self.groups(size)) as g:
            first = self.builder.mul(g, INDEX(size))
            yield first, self.least(self.builder.add(first, INDEX(size)), self.count)

    def groups(self, size: int) -> ir.Value:
        """Return how many groups of `size` images hold the tile's images, the last one perhaps not full."""
        return self.builder.udiv(self.builder.add(self.count, INDEX(size - 1)), INDEX(size))

    def variable(self, value: ir.Value | None = None) -> Variable:
        return Variable(self, self.zero() if value is None else value)

    def variables(self, count: int) -> list[Variable]:
        """Return `count` vectors of zeros."""
        return [self.variable() for _ in range(count)]

    def grid(self, first: Pointer, rows: int, row: int, vectors: int) -> list[list[Pointer]]:
        """Return the addresses of `vectors` vectors of each of some rows, `row` floats apart."""
        return [[first + (i * row + v * self.lanes) for v in range(vectors)] for i in range(rows)]

    @contextmanager
    def sums(self, places: list[list[Pointer]], new: bool = False) -> Iterator[Sums]:
        """Keep the vectors at `places`, row by row, or `new` ones, in registers while the block adds to them."""
        totals = [[self.variable(None if new else self.load(place)) for place in row] for row in places]
        yield totals
        self.store_all(totals, places)

    def store_all(self, totals: Sums, places: list[list[Pointer]]) -> None:
        """Store sums, row by row."""
        for total_row, place_row in zip(totals, places, strict=True):
            for total, place in zip(total_row, place_row, strict=True):
                self.store(total.get(), place)

    def increase(self, total: Variable, value: ir.Value) -> None:
        total.set(self.add(total.get(), value))

    # memory

    def load(self, pointer: Pointer, width: int | None = None) -> ir.Value:
        """Load a vector, of `width` floats rather than `lanes` if given."""
        return self.builder.load(pointer.value(ir.VectorType(FLOAT, width or self.lanes)), align=4)

    def load_first(self, pointer: Pointer, count: int) -> ir.Value:
        """Load the first `count` lanes, and perhaps more, over and over: it crosses fewer cache lines."""
        width = min(self.lanes, max(4, 1 << (count - 1).bit_length()))
        part = self.load(pointer, width)
        return self.shuffle(part, part, [i % width for i in range(self.lanes)])

    def store(self, value: ir.Value, pointer: Pointer) -> None:
        self.builder.store(value, pointer.value(value.type), align=4)

    def clear(self, pointer: Pointer, vectors: int) -> None:
        """Fill so many vectors with zeros."""
        with self.loop(vectors) as i:
            self.store(self.zero(), pointer.at(i, self.lanes))

    def load_part(self, pointer: Pointer, count: int, others: ir.Value | None = None) -> ir.Value:
        """Load a vector of which the first `count` lanes count; the others are 0, or those given."""
        value = self.load(pointer)
        if count == self.lanes:
            return value
        inside = ir.Constant(ir.VectorType(BIT, self.lanes), [BIT(i < count) for i in range(self.lanes)])
        return self.select(inside, value, others or self.zero())

    def bring(self, ranges: Sequence[tuple[Pointer, int]]) -> None:
        """Have floats brought near meanwhile, (first, how many), a line each at every so many multiply-adds."""
        self._ahead = [(Variable(self, first.value(FLOAT)), (first + floats).value(FLOAT)) for first, floats in ranges]

    def prefetch(self, pointer: Pointer, written: bool = False, near: int = 3) -> None:
        """Have a cache line brought to L1 (`near` 3) or L2 (2) that is soon read, or written, and not foreseen."""
        hints = INT(int(written)), INT(near), INT(1)
        self.intrinsic("llvm.prefetch.p0i8", ir.VoidType(), pointer.value(BYTE), *hints)

    def store_part(self, value: ir.Value, pointer: Pointer, count: int) -> None:
        """Store the first `count` lanes and no others, in parts whose sizes are powers of 2."""
        first = 0
        while count - first:
            width = 1 << ((count - first).bit_length() - 1)
            part = value if width == self.lanes else self.shuffle(value, value, range(first, first + width))
            self.store(part, pointer + first)
            first += width

    def load_float(self, pointer: Pointer) -> ir.Value:
        return self.builder.load(pointer.value(FLOAT), align=4)

    def load_bytes(self, pointer: Pointer) -> ir.Value:
        """Return `lanes` unsigned bytes as 32-bit integers; they fill a quarter of a float vector's room."""
        return self.builder.zext(self.builder.load(pointer.value(self.bytes), align=1), self.indices)

    def store_bytes(self, value: ir.Value, pointer: Pointer) -> None:
        self.builder.store(self.builder.trunc(value, self.bytes), pointer.value(self.bytes), align=1)

    # values

    def zero(self) -> ir.Value:
        return ir.Constant(self.vector, None)

    def constant(self, number: float) -> ir.Value:
        return _in_all_lanes(self.lanes, float(number).hex())

    def integers(self, number: int) -> ir.Value:
        return ir.Constant(self.indices, [INT(number)] * self.lanes)

    def spread(self, scalar: ir.Value, width: int | None = None) -> ir.Value:
        """Return the scalar in every lane, or in each of `width`."""
        width = width or self.lanes
        empty = ir.Constant(ir.VectorType(scalar.type, width), ir.Undefined)
        single = self.builder.insert_element(empty, scalar, INT(0))
        return self.builder.shuffle_vector(single, single, ir.Constant(ir.VectorType(INT, width), None))

    def shuffle(self, a: ir.Value, b: ir.Value, lanes: Sequence[int]) -> ir.Value:
        """Return lanes of two vectors, those of the second counted on from the first's."""
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT, len(lanes)), [*map(INT, lanes)]))

    def splat(self, pointer: Pointer) -> ir.Value:
        """Load one float into every lane."""
        return self.spread(self.load_float(pointer))

    def load_int(self, pointer: Pointer) -> ir.Value:
        """Load a 32-bit integer that lies in a float's place."""
        return self.builder.load(pointer.value(INT), align=4)

    def load_index(self, pointer: Pointer) -> ir.Value:
        """As `load_int`, to count with."""
        return self.builder.sext(self.load_int(pointer), INDEX)

    def as_floats(self, integers: ir.Value) -> ir.Value:
        """Return the same bits, as floats: for moving them about."""
        return self.builder.bitcast(integers, self.vector)

    def as_integers(self, floats: ir.Value) -> ir.Value:
        """The inverse of `as_floats`."""
        return self.builder.bitcast(floats, self.indices)

    # arithmetic

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """Return a * b + c, in one instruction where the CPU has it."""
        self._multiplied += 1
        if self._ahead and self._multiplied % AHEAD_EVERY == 0:
            # the next line of a range; each has its turn
            at, end = self._ahead[0]
            self._ahead.append(self._ahead.pop(0))
            self.prefetch(Pointer(self, line := at.get()), near=2)
            more = self.builder.gep(line, [INDEX(LINE_FLOATS)])
            at.set(self.select(self.builder.icmp_unsigned("<", line, end), more, line))
        return self.intrinsic(f"llvm.fmuladd.v{a.type.count}f32", a.type, a, b, c)

    def accumulate(self, total: Variable, a: ir.Value, b: ir.Value) -> None:
        total.set(self.fma(a, b, total.get()))

    def sqrt(self, x: ir.Value) -> ir.Value:
        return self.intrinsic(f"llvm.sqrt.v{x.type.count}f32", x.type, x)

    def rectify(self, x: ir.Value) -> ir.Value:
        """Return max(x, 0); a NaN stays one."""
        return self.builder.select(self.builder.fcmp_ordered("<", x, self.zero()), self.zero(), x)

    def finish(
        self, value: ir.Value, bias: ir.Value | None = None, rectify: bool = False, positive: Pointer | None = None
    ) -> ir.Value:
        """Return a sum with its bias and through the ReLU, 0 where what lies at `positive` is not positive."""
        value = value if bias is None else self.add(value, bias)
        value = self.rectify(value) if rectify else value
        return value if positive is None else self.where_positive(self.load(positive), value)

    def where_positive(self, x: ir.Value, value: ir.Value) -> ir.Value:
        """Return `value` where x > 0, else 0."""
        return self.builder.select(self.builder.fcmp_ordered(">", x, self.zero()), value, self.zero())

    def larger_of(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Return a mask: where a > b, and neither is NaN; a choice by it between them is one instruction on x86."""
        return self.builder.fcmp_ordered(">", a, b)

    def first_maximum(self, found: list[tuple[ir.Value, ir.Value]]) -> tuple[ir.Value, ir.Value]:
        """Return the largest of values, each with its code, lane by lane, and the first as large; a NaN may get lost.

        Pair by pair, as two values that are compared in order are one instruction on x86, and few wait for others.
        """
        while len(found) > 1:
            pairs = []
            for (a, first), (b, second) in zip(found[::2], found[1::2], strict=False):
                larger = self.larger_of(b, a)
                pairs.append((self.select(larger, b, a), self.select(larger, second, first)))
            found = pairs + found[len(pairs) * 2 :]
        return found[0]

    def equal(self, a: ir.Value, number: int) -> ir.Value:
        """Return a mask: where the integers `a` are `number`."""
        return self.builder.icmp_signed("==", a, self.integers(number))

    def sum_lanes(self, x: ir.Value) -> ir.Value:
        return self.fold(self.add, x)

    def fold(self, join: Callable[..., ir.Value], x: ir.Value) -> ir.Value:
        """Return the lanes joined to one, in halves."""
        width = self.lanes
        while width > 1:
            width //= 2
            x = join(*[self.shuffle(x, x, range(first, first + width)) for first in (0, width)])
        return self.builder.extract_element(x, INT(0))

    def add_to(self, pointer: Pointer, scalar: ir.Value) -> None:
        """Add a scalar to a float in memory."""
        self.builder.store(self.builder.fadd(self.load_float(pointer), scalar), pointer.value(FLOAT), align=4)

    def add_lanes(self, totals: list[Variable], pointer: Pointer) -> None:
        """Add the lanes of each of some sums to one of as many floats."""
        for i, total in enumerate(totals):
            self.add_to(pointer + i, self.sum_lanes(total.get()))

    def transpose(self, rows: list[ir.Value]) -> list[ir.Value]:
        """Transpose `lanes` vectors of `lanes`: log2(lanes) rounds that exchange halves between pairs of rows."""
        span = self.lanes // 2
        while span:
            low = [i + self.lanes - span if i & span else i for i in range(self.lanes)]
            high = [lane + span for lane in low]
            swapped = list(rows)
            for i in range(self.lanes):
                if not i & span:
                    pair = rows[i], rows[i + span]
                    swapped[i], swapped[i + span] = (self.shuffle(*pair, lanes) for lanes in (low, high))
            rows, span = swapped, span // 2
        return rows

    def permute(self, table: ir.Value, indices: ir.Value) -> ir.Value:
        """Return table[indices], lane by lane (needs `target.permutes`)."""
        return self.intrinsic(PERMUTES[self.lanes], self.vector, table, indices)

    def append(self, mask: ir.Value, count: ir.Value, columns: list[tuple[ir.Value, Pointer]]) -> ir.Value:
        """Store the lanes under the mask behind the first `count` elements; return the new count.

        Args:
            columns: vectors, and the list in memory that each goes to, of which `lanes` past the new end may change.
        """
        if self.target.compresses or (self.lanes == 8 and self.target.permutes):
            for value, column in columns:
                self.store(self._to_front(value, mask), column.at(count))
            bits = ir.IntType(self.lanes)
            more = self.intrinsic(f"llvm.ctpop.i{self.lanes}", bits, self.builder.bitcast(mask, bits))
            return self.builder.add(count, self.builder.zext(more, INDEX))
        # every lane is stored, and over it the next one where the mask is not set: no branch
        for lane in range(self.lanes):
            for value, column in columns:
                element = self.builder.extract_element(value, INT(lane))
                self.builder.store(element, column.at(count).value(FLOAT), align=4)
            count = self.builder.add(count, self.builder.zext(self.builder.extract_element(mask, INT(lane)), INDEX))
        return count

    def _to_front(self, value: ir.Value, mask: ir.Value) -> ir.Value:
        """Return the lanes under a mask moved to the front: where 8 are, by a permutation out of a table of 2 KB.

        A step of two small convolutions takes up to 8 % less time by it than with lanes stored one by one.
        """
        if self.target.compresses:
            return self.intrinsic(intrinsics.COMPRESS_16, self.vector, value, self.zero(), mask)
        table = self.module.globals.get("front_orders")
        if table is None:
            # those whose bit is set first
            orders = (sorted(range(8), key=lambda lane: not m >> lane & 1) for m in range(256))
            rows = [ir.Constant(self.bytes, [BYTE(lane) for lane in order]) for order in orders]
            table = _constant(self.module, "front_orders", ir.Constant(ir.ArrayType(self.bytes, len(rows)), rows))
        row = self.builder.zext(self.builder.bitcast(mask, BYTE), INDEX)
        order = self.builder.load(self.builder.gep(table, [INDEX(0), row]), align=8)
        return self.permute(value, self.builder.zext(order, self.indices))

    def intrinsic(self, name: str, result: ir.Type, *values: ir.Value) -> ir.Value:
        """Call an intrinsic that the target has."""
        return intrinsics.call(self.builder, self.target.features, name, result, values)


Sums = list[list[Variable]]  # of a register tile, row by row
Emit = Callable[[Emitter], None]
Kernels = list[tuple[str, Emit]]


class Kernel:
    """A kernel that may do the same as another, but for offsets.

    Attributes:
        key: returns what its code follows from, empty where that is unknown, and the offsets that it may use, in the
            order in which the key counts them.
        parts: that it is cut into, one after the other where nobody says which.
    """

    def __init__(self, run: Callable[..., None], key: Callable[[], tuple[bytes, list[Offset]]], parts: int = 1) -> None:
        self._emit, self.key, self.parts = run, key, parts

    def __call__(self, k: Emitter, **options: object) -> None:
        self._emit(k, **options)


def call_kernels(
    builder: ir.IRBuilder,
    name: str,
    target: Target,
    kernels: Kernels,
    like: list[ir.Value],
    part: ir.Value | None = None,
) -> None:
    """Define the kernels and call them in order, on `like`: buffers, and the count of images; whole, or a part each."""
    known = _known.setdefault(builder.module, {})
    for kernel_name, emit in kernels:
        key, own = emit.key() if isinstance(emit, Kernel) else (b"", [])
        if key in known:
            function, numbers = known[key]
            used = [own[number] for number in numbers]
        else:
            offsets = Offsets()
            function = define(builder.module, f"{name}.{kernel_name}", like, target, emit, offsets)
            used, numbered = [at for _, at in offsets], {id(at): number for number, at in enumerate(own)}
            if key and all(id(at) in numbered for at in used):
                known[key] = function, [numbered[id(at)] for at in used]
        content = ir.Constant(ir.ArrayType(INDEX, len(used)), [INDEX(int(at)) for at in used])
        table = _constant(builder.module, builder.module.get_unique_name("offsets"), content)
        whole = [INDEX(n) for n in range(emit.parts)] if isinstance(emit, Kernel) else [INDEX(0)]
        for index in whole if part is None else [part]:
            builder.call(function, [*like, index, table.gep([INDEX(0), INDEX(0)])])


def _constant(module: ir.Module, name: str, content: ir.Constant) -> ir.GlobalVariable:
    table = ir.GlobalVariable(module, content.type, name)
    table.global_constant, table.linkage, table.initializer = True, "internal", content
    return table


_known: WeakKeyDictionary[ir.Module, dict[str | bytes, tuple[ir.Function, list[int]]]] = WeakKeyDictionary()
"""The kernels of a module by their code, and by their key with the numbers of the offsets that each uses."""


def define(
    module: ir.Module, name: str, like: Sequence[ir.Value], target: Target, emit: Emit, offsets: Offsets
) -> ir.Function:
    """Emit a kernel into the module, on arguments as those given: buffers, and the count of images.

    One that does the same as an earlier one, but for its offsets, is that one: equal layers are compiled once. What it
    uses is added to the offsets.
    """
    kind = ir.FunctionType(ir.VoidType(), [*(argument.type for argument in like), INDEX, INDEX.as_pointer()])
    function = ir.Function(module, kind, module.get_unique_name(name))
    function.linkage = "internal"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    # a register that is spilled then lies in one line of the cache; in two it costs 4 % of a step of `one_conv` (AVX2)
    function.attributes.alignstack = 4 * target.lanes
    *buffers, _, _, table = function.args
    for buffer in (*buffers, table):
        buffer.add_attribute("noalias")
    k = Emitter(function, target, offsets)
    emit(k)
    k.builder.ret_void()
    function.descr_body(body := list[str]())
    function.descr_body = lambda text: text.extend(body)  # once: it takes as long as all else here
    code = ",".join(str(argument.type) for argument in like) + "".join(body)
    same, _ = _known.setdefault(module, {}).setdefault(code, (function, []))
    if same is not function:
        del module.globals[function.name]
    return same
