"""From PTX to the code of the software GPU: registers get places, names get numbers, and every instruction its meaning.

What it makes is an image that the driver loads in place of a cubin. It holds beside the code what the compiler for the
real GPU said of the kernel, registers and shared memory, since that is what decides how many blocks run at once there.

A register is 32 lanes of 4 bytes, or of 8; halves and predicates (0 or -1 by lane) take 4. Immediates and parameters
are registers too, filled before a launch.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

from softgpu.cubin import Resources
from softgpu.ptx import SIZES, Entry, Instruction, PtxError

MAGIC = b"SOFTGPU1"
# in this order, 128 bytes each, at the beginning of the register file: see `engine.c`
SPECIAL = (
    *("%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z"),
    *("%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid", "%warpid"),
    *("%globaltimer", "%globaltimer, its other half"),
)
# what an instruction is, for the count; the engine knows them by number, for their latencies
CLASSES = (
    *("other", "fma", "float", "double", "integer", "compare", "convert", "special", "load", "store"),
    *("shared load", "shared store", "local", "atomic", "barrier", "branch"),
)
SPACES = {"": 0, "global": 1, "shared": 2, "local": 3}
VECTORS = {"v2": 1, "v4": 2}
SIGNED, WIDE, ADDRESS_32, FLOATING = 1 << 5, 1 << 6, 1 << 7, 1 << 8
ROUNDINGS = {"rn", "rz", "rm", "rp"}
# what says nothing here: caches, scopes and orders of memory, how lanes are grouped
HINTS = {
    *("nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "volatile", "relaxed", "acquire", "release", "acq_rel", "weak"),
    *("cta", "cluster", "gpu", "sys", "uni", "aligned", "sync", "L1_evict_first", "L1_evict_last", "L1_no_allocate"),
    *("L2_64B", "L2_128B", "L2_256B", "shared_cta"),
}
INSTRUCTION = struct.Struct("<HBBiiiiiiiqII")
NOTHING = -1


def image(entry: Entry, resources: Resources) -> bytes:
    """Return the image of one kernel.

    Raises:
        PtxError: an instruction that the software GPU does not have.
    """
    made = _Assembly(entry)
    made.assemble()
    operations = list(dict.fromkeys(code.operation for code in made.code))
    numbers = {name: number for number, name in enumerate(operations)}
    parts = [_text(entry.name), struct.pack("<I", int("".join(filter(str.isdigit, entry.target))))]
    parts.append(struct.pack("<IIII", resources.registers, made.shared_size, resources.local_bytes, entry.threads))
    parts.append(struct.pack("<III", made.shared_size, made.local_size, made.file_bytes))
    sizes = [variable.size for variable in entry.params.values()]
    parts.append(struct.pack(f"<I{2 * len(sizes)}I", len(sizes), *sizes, *made.param_offsets.values()))
    for table in (made.constants, made.loads):
        parts.append(struct.pack("<I", len(table)))
        parts += [struct.pack("<IIQ", place, width, value) for place, width, value in table]
    parts += [struct.pack("<I", len(operations)), *map(_text, operations), struct.pack("<I", len(made.code))]
    parts += [code.pack(numbers) + _text(code.text) for code in made.code]
    body = b"".join(parts)
    return MAGIC + struct.pack("<Q", len(body)) + body


def _text(text: str) -> bytes:
    encoded = text.encode() + b"\0"
    return struct.pack("<I", len(encoded)) + encoded


@dataclass
class Code:
    """One instruction of the software GPU: `Instruction` of engine.h."""

    operation: str
    kind: str
    size: int = 0
    guard: int = 0
    d: int = NOTHING
    a: int = NOTHING
    b: int = NOTHING
    c: int = NOTHING
    e: int = NOTHING
    target: int = NOTHING
    imm: int = 0
    line: int = 0
    flags: int = 0
    text: str = ""

    def pack(self, numbers: dict[str, int]) -> bytes:
        places = (self.guard, self.d, self.a, self.b, self.c, self.e, self.target)
        return INSTRUCTION.pack(
            numbers[self.operation], CLASSES.index(self.kind), self.size, *places, self.imm, self.line, self.flags
        )


class _Assembly:
    """The work on one kernel."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.code: list[Code] = []
        self.constants: list[tuple[int, int, int]] = []
        self.loads: list[tuple[int, int, int]] = []
        self.file_bytes = 128 * len(SPECIAL)
        self._places: dict[object, int] = {name: 128 * i for i, name in enumerate(SPECIAL)}
        self.param_offsets = _offsets(entry.params)
        self._shared, self._local = _offsets(entry.shared), _offsets(entry.local)
        self.shared_size = _end(self._shared, entry.shared)
        self.local_size = _end(self._local, entry.local)
        self._now: Instruction | None = None

    def assemble(self) -> None:
        starts, jumps = [], []
        for instruction in self.entry.code:
            starts.append(len(self.code))
            self._now = instruction
            self._instruction(instruction)
            for made in self.code[starts[-1] :]:
                if made.operation == "bra":
                    jumps.append(made)
        starts.append(len(self.code))
        self._now = None
        self.code.append(Code("exit", "branch", text="end of the kernel"))
        for made in jumps:
            made.target = starts[self.entry.labels[made.text.split()[-1]]]

    # registers

    def _place(self, key: object, width: int) -> int:
        if key not in self._places:
            self._places[key] = self.file_bytes
            self.file_bytes += 32 * width
        return self._places[key]

    def _kind(self, register: str) -> str:
        kind = self.entry.registers.get(register.rstrip("0123456789")) or self.entry.registers.get(register)
        if kind is None:
            raise self._unknown(f"register {register}")
        return kind

    def _width(self, register: str) -> int:
        kind = self._kind(register)
        return 8 if kind != "pred" and SIZES[kind] == 8 else 4

    def _register(self, name: str) -> int:
        return NOTHING if name == "_" else self._place(name, self._width(name))

    def _constant(self, value: int, width: int) -> int:
        value &= (1 << 8 * width) - 1
        key = ("constant", value, width)
        if key not in self._places:
            self.constants.append((self._place(key, width), width, value))
        return self._places[key]

    def _parameter(self, name: str, offset: int, size: int, width: int) -> int:
        key = ("parameter", name, offset, size, width)
        if key not in self._places:
            start = self.param_offsets[name] + offset
            self.loads.append((self._place(key, width), width, start | size << 32))
        return self._places[key]

    def _scratch(self, name: str, width: int = 4) -> int:
        return self._place(("scratch", name, width), width)

    def _value(self, operand: str, kind: str) -> int:
        """Return the place of what an instruction of a type reads."""
        width = 8 if kind != "pred" and SIZES[kind] == 8 else 4
        if operand in SPECIAL:
            return self._places[operand]
        if operand == "WARP_SZ":
            return self._constant(32, width)
        if operand.startswith("%"):
            return self._register(operand)
        if operand in self._shared or operand in self._local:
            return self._constant({**self._shared, **self._local}[operand], width)
        if operand.startswith(("0f", "0F")):
            bits = int(operand[2:], 16)
            if kind == "f64":
                bits = struct.unpack("<Q", struct.pack("<d", struct.unpack("<f", struct.pack("<I", bits))[0]))[0]
            return self._constant(bits, width)
        if operand.startswith(("0d", "0D")):
            return self._constant(int(operand[2:], 16), 8)
        try:
            number = int(operand.rstrip("U"), 0)
        except ValueError:
            raise self._unknown(f"operand {operand}") from None
        if kind in ("f32", "f64"):
            raise self._unknown(f"operand {operand}")
        if kind == "pred":
            number = -(number != 0)
        return self._constant(number & 0xFFFF if SIZES.get(kind) == 2 else number, width)

    # instructions

    def _unknown(self, what: str = "") -> PtxError:
        now = self._now
        return PtxError(f"line {now.line}: the software GPU has no {what or 'such instruction'}: {now.text}")

    def _emit(self, operation: str, kind: str, **places: int) -> Code:
        now, guard = self._now, 0
        if now.guard:
            place = self._register(now.guard) + 1
            guard = -place if now.negated else place
        made = Code(operation, kind, guard=guard, line=now.line, text=now.text, **places)
        self.code.append(made)
        return made

    def _instruction(self, now: Instruction) -> None:
        parts = tuple(part for part in now.parts if part not in HINTS)
        name = parts[0]
        method: Callable[..., None] | None = getattr(self, f"_on_{name}", None)
        if method is not None:
            method(parts[1:], *now.operands)
        elif name in ARITHMETIC:
            self._arithmetic(name, parts[1:], *now.operands)
        elif name in ("membar", "fence", "griddepcontrol", "nanosleep", "pmevent", "prefetch", "discard"):
            self._emit("nop", "other")
        else:
            raise self._unknown()

    def _arithmetic(self, name: str, modifiers: tuple[str, ...], target: str, *operands: str) -> None:
        """Whatever takes operands of one type and gives that type."""
        kind, others = modifiers[-1], set(modifiers[:-1])
        approximate, flush = "approx" in others, "ftz" in others
        rounding = (others & ROUNDINGS) or {"rn"}
        others -= ROUNDINGS | {"approx", "ftz", "full", "lo"}
        mode = ({"hi", "wide"} & others or {""}).pop()
        saturate = "sat" in others
        others -= {"hi", "wide", "sat"}
        if others or kind not in SIZES or (saturate and kind != "f32") or (flush and kind != "f32"):
            raise self._unknown()
        d = self._register(target)
        sources = [self._value(operand, kind) for operand in operands]
        if name == "mad" and kind in ("f32", "f64"):
            name = "fma"
        if mode == "wide" and len(operands) == 3:  # what is added is as wide as the result
            sources[2] = self._value(operands[2], {2: "u32", 4: "u64"}[SIZES[kind]])
        operation = _operation(name, mode, kind)
        way = rounding.pop()
        if way != "rn" and not approximate:
            operation = f"{name}_{way}_{kind}"
        if flush and kind == "f32":
            for k, source in enumerate(sources):
                sources[k] = self._emit("flush_f32", "other", d=self._scratch(f"flush{k}"), a=source).d
        self._emit(operation, _class(name, kind), **dict(zip("dabc", (d, *sources), strict=False)))
        if flush and name not in ("abs", "neg", "min", "max"):
            self._emit("flush_f32", "other", d=d, a=d)
        if saturate:
            self._emit("saturate_f32", "other", d=d, a=d)

    def _on_mov(self, modifiers: tuple[str, ...], target: str, source: str) -> None:
        kind = modifiers[-1]
        if kind == "pred":
            self._emit("mov_32", "other", d=self._register(target), a=self._value(source, "pred"))
        elif target.startswith("{"):
            low, high = (self._register(name.strip()) for name in target[1:-1].split(","))
            a = self._value(source, kind)
            if SIZES[kind] == 8:
                shifted = self._scratch("unpack", 8)
                self._emit("shr_u64", "other", d=shifted, a=a, b=self._constant(32, 4))
                low_op, high_op, high_from = "cvt_32_64", "cvt_32_64", shifted
            else:
                shifted = self._scratch("unpack")
                self._emit("shr_u32", "other", d=shifted, a=a, b=self._constant(16, 4))
                low_op, high_op, high_from = "cvt_32_u16", "cvt_32_u16", shifted
            for operation, d, a_from in ((low_op, low, a), (high_op, high, high_from)):
                if d != NOTHING:
                    self._emit(operation, "other", d=d, a=a_from)
        elif source.startswith("{"):
            half = {8: "b32", 4: "b16"}[SIZES[kind]]
            low, high = (self._value(name.strip(), half) for name in source[1:-1].split(","))
            d = self._register(target)
            if SIZES[kind] == 8:
                self._emit("pack_64", "other", d=d, a=low, b=high, c=low)
            else:
                moved = self._scratch("pack")
                self._emit("shl_32", "other", d=moved, a=high, b=self._constant(16, 4))
                self._emit("or_32", "other", d=d, a=moved, b=low)
        else:
            wide = SIZES[kind] == 8
            self._emit(f"mov_{64 if wide else 32}", "other", d=self._register(target), a=self._value(source, kind))

    def _on_cvta(self, modifiers: tuple[str, ...], target: str, source: str) -> None:
        d, a = self._register(target), self._value(source, "u64")
        *direction, space, _ = modifiers
        if space == "global":
            self._emit("mov_64", "other", d=d, a=a)
        elif space in ("shared", "local"):
            self._emit(f"{'to' if direction else 'from'}_{space}", "other", d=d, a=a)
        else:
            raise self._unknown()

    def _on_cvt(self, modifiers: tuple[str, ...], target: str, source: str) -> None:
        *how, to, kind = modifiers
        d, a = self._register(target), self._value(source, kind)
        how = set(how)
        flush, saturate = "ftz" in how, "sat" in how
        way = (how - {"ftz", "sat"} or {""}).pop()
        if kind in ("f32", "f64"):
            if flush and kind == "f32":
                a = self._emit("flush_f32", "convert", d=self._scratch("flush"), a=a).d
            if len(way) == 3:  # to a whole number
                scratch = self._scratch("round", SIZES[kind])
                a = self._emit(f"round_{way[1:]}_{kind}", "convert", d=scratch, a=a).d
            if to in ("f32", "f64"):
                operation = "mov_32" if to == kind == "f32" else "mov_64" if to == kind else f"cvt_{to}_{kind}"
                if way in ("rz", "rm", "rp") and to == "f32" and kind == "f64":
                    raise self._unknown()
                self._emit(operation, "convert", d=d, a=a)
                if saturate:
                    self._emit("saturate_f32", "convert", d=d, a=d)
                if flush and to == "f32":
                    self._emit("flush_f32", "convert", d=d, a=d)
            elif to[1:] in ("32", "64") and len(way) == 3:
                self._emit(f"cvt_{to}_{kind}", "convert", d=d, a=a)
            elif len(way) == 3 and to[1:] in ("8", "16"):  # saturates at its own bounds
                bits, signed = int(to[1:]), to[0] == "s"
                low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
                scratch = self._scratch("narrow")
                self._emit(f"cvt_s32_{kind}", "convert", d=scratch, a=a)
                self._emit("max_s32", "convert", d=scratch, a=scratch, b=self._constant(low, 4))
                self._emit("min_s32", "convert", d=scratch, a=scratch, b=self._constant(high, 4))
                self._emit("cvt_32_u16", "convert", d=d, a=scratch)
            else:
                raise self._unknown()
        elif to in ("f32", "f64"):
            if way not in ("", "rn"):
                raise self._unknown()
            self._emit(f"cvt_{to}_{kind}", "convert", d=d, a=a)
        elif saturate or "f16" in (to, kind):
            raise self._unknown()
        else:
            self._integers(d, self._width(target), a, self._width(source) if source.startswith("%") else 4, to, kind)

    def _integers(self, d: int, d_width: int, a: int, a_width: int, to: str, kind: str) -> None:
        """Convert between whole numbers: extend from the source's type, cut to the target's."""
        if SIZES[to] < SIZES[kind]:
            kind = to  # only the lower bits count
        if a_width == 8 and d_width == 4:
            a = self._emit("cvt_32_64", "convert", d=self._scratch("cut"), a=a).d
        if d_width == 8 and a_width == 4:
            self._emit(f"cvt_64_{kind}", "convert", d=d, a=a)
        elif d_width == 8:
            if SIZES[kind] == 8:
                self._emit("mov_64", "convert", d=d, a=a)
            else:
                cut = self._emit("cvt_32_64", "convert", d=self._scratch("cut"), a=a).d
                self._emit(f"cvt_64_{kind}", "convert", d=d, a=cut)
        elif SIZES[kind] >= 4:
            self._emit("mov_32", "convert", d=d, a=a)
        else:
            self._emit(f"cvt_32_{kind}", "convert", d=d, a=a)
            if SIZES[to] == 2 and kind[0] == "s":
                self._emit("cvt_32_u16", "convert", d=d, a=d)

    def _on_setp(self, modifiers: tuple[str, ...], target: str, x: str, y: str, mixed: str = "") -> None:
        comparison, *how, kind = modifiers
        how = [word for word in how if word != "ftz"]
        comparison = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(comparison, comparison)
        name, _, other = target.partition("|")
        signed = kind[0] == "s"
        if kind in ("f32", "f64"):
            operation = f"setp_{comparison}_{kind}"
        elif comparison in ("eq", "ne"):
            operation = f"setp_{comparison}_{64 if SIZES[kind] == 8 else 32}"
        else:
            operation = (
                f"setp_{comparison}_{'s' if signed else 'u'}{8 * SIZES[kind] if signed else max(8 * SIZES[kind], 32)}"
            )
        a, b = self._value(x, kind), self._value(y, kind)
        result = self._scratch("setp") if how or other else self._register(name)
        self._emit(operation, "compare", d=result, a=a, b=b)
        for place, is_other in ((name, False), (other, True)):
            if not place or (not how and not other):
                continue
            d, value = self._register(place), result
            if is_other:
                value = self._emit("not_32", "compare", d=self._scratch("setp not"), a=result).d
            if how:
                self._emit(f"{how[0]}_32", "compare", d=d, a=value, b=self._predicate(mixed))
            else:
                self._emit("mov_32", "compare", d=d, a=value)

    def _predicate(self, operand: str) -> int:
        if not operand.startswith("!"):
            return self._value(operand, "pred")
        return self._emit("not_32", "compare", d=self._scratch("not"), a=self._register(operand[1:])).d

    def _on_selp(self, modifiers: tuple[str, ...], target: str, x: str, y: str, chosen: str) -> None:
        kind = modifiers[-1]
        bits = 64 if SIZES[kind] == 8 else 32
        a, b, c = self._value(x, kind), self._value(y, kind), self._predicate(chosen)
        self._emit(f"selp_{bits}", "compare", d=self._register(target), a=a, b=b, c=c)

    def _logic(self, name: str, modifiers: tuple[str, ...], target: str, *operands: str) -> None:
        kind = modifiers[-1]
        bits = 64 if kind != "pred" and SIZES[kind] == 8 else 32
        if name == "not" and kind == "b16":
            bits = 16
        sources = [self._predicate(o) if kind == "pred" else self._value(o, kind) for o in operands]
        self._emit(f"{name}_{bits}", "integer", **dict(zip("dab", (self._register(target), *sources), strict=False)))

    def _on_and(self, *all_of_it: str) -> None:
        self._logic("and", *all_of_it)

    def _on_or(self, *all_of_it: str) -> None:
        self._logic("or", *all_of_it)

    def _on_xor(self, *all_of_it: str) -> None:
        self._logic("xor", *all_of_it)

    def _on_not(self, *all_of_it: str) -> None:
        self._logic("not", *all_of_it)

    def _shift(self, name: str, kind: str, target: str, x: str, by: str) -> None:
        a, b = self._value(x, kind), self._value(by, "u32")
        self._emit(f"{name}_{kind.replace('b', 'u') if name == 'shr' else 8 * SIZES[kind]}", "integer",
                   d=self._register(target), a=a, b=b)  # fmt: skip

    def _on_shl(self, modifiers: tuple[str, ...], *operands: str) -> None:
        self._shift("shl", modifiers[-1], *operands)

    def _on_shr(self, modifiers: tuple[str, ...], *operands: str) -> None:
        self._shift("shr", modifiers[-1], *operands)

    def _on_shf(self, modifiers: tuple[str, ...], target: str, *operands: str) -> None:
        direction, mode, _ = modifiers
        a, b, c = (self._value(operand, "u32") for operand in operands)
        name = f"shf_{direction}" + ("_clamp" if mode == "clamp" else "")
        self._emit(name, "integer", d=self._register(target), a=a, b=b, c=c)

    def _on_lop3(self, modifiers: tuple[str, ...], target: str, x: str, y: str, z: str, table: str) -> None:
        a, b, c = (self._value(operand, "b32") for operand in (x, y, z))
        self._emit("lop3_32", "integer", d=self._register(target), a=a, b=b, c=c, imm=int(table, 0))

    def _on_copysign(self, modifiers: tuple[str, ...], target: str, sign: str, x: str) -> None:
        if modifiers != ("f32",):
            raise self._unknown()
        self._on_lop3(("b32",), target, sign, x, "0x80000000", "0xe4")  # the first where the mask is, else the second

    def _on_prmt(self, modifiers: tuple[str, ...], target: str, *operands: str) -> None:
        if modifiers != ("b32",):
            raise self._unknown()
        a, b, c = (self._value(operand, "b32") for operand in operands)
        self._emit("prmt_32", "integer", d=self._register(target), a=a, b=b, c=c)

    def _on_dp2a(self, modifiers: tuple[str, ...], target: str, *operands: str) -> None:
        if modifiers[1:] != ("u32", "u32"):
            raise self._unknown()
        a, b, c = (self._value(operand, "u32") for operand in operands)
        self._emit(f"dp2a_{modifiers[0]}_u32", "integer", d=self._register(target), a=a, b=b, c=c)

    def _on_bfe(self, modifiers: tuple[str, ...], target: str, *operands: str) -> None:
        if SIZES[modifiers[-1]] != 4:
            raise self._unknown()
        a, b, c = (self._value(operand, "u32") for operand in operands)
        self._emit(f"bfe_{modifiers[-1]}", "integer", d=self._register(target), a=a, b=b, c=c)

    def _on_bfi(self, modifiers: tuple[str, ...], target: str, x: str, y: str, position: str, length: str) -> None:
        kind = modifiers[-1]
        a, b = self._value(x, kind), self._value(y, kind)
        c, e = self._value(position, "u32"), self._value(length, "u32")
        self._emit(f"bfi_{8 * SIZES[kind]}", "integer", d=self._register(target), a=a, b=b, c=c, e=e)

    def _bits(self, name: str, modifiers: tuple[str, ...], target: str, x: str) -> None:
        kind = modifiers[-1]
        self._emit(f"{name}_{8 * SIZES[kind]}", "integer", d=self._register(target), a=self._value(x, kind))

    def _on_popc(self, *all_of_it: str) -> None:
        self._bits("popc", *all_of_it)

    def _on_clz(self, *all_of_it: str) -> None:
        self._bits("clz", *all_of_it)

    def _on_brev(self, *all_of_it: str) -> None:
        self._bits("brev", *all_of_it)

    # memory

    def _address(self, operand: str) -> tuple[int, int, int]:
        """Return (place of the address, what is added to it, flags)."""
        match = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
        if not match:
            raise self._unknown(f"address {operand}")
        name, offset = match[1], int(match[2] or "0", 0)
        if name.startswith("%"):
            return self._register(name), offset, 0 if self._width(name) == 8 else ADDRESS_32
        if name in self._shared or name in self._local:
            return self._constant({**self._shared, **self._local}[name], 8), offset, 0
        raise self._unknown(f"variable {name}")

    def _access(self, modifiers: tuple[str, ...], data: str, address: str) -> tuple[str, int, dict[str, int]]:
        """Return (space, flags, fields) of a load or a store."""
        kind = modifiers[-1]
        space = next((part for part in modifiers if part in SPACES), "")
        vector = next((VECTORS[part] for part in modifiers if part in VECTORS), 0)
        if set(modifiers[:-1]) - set(SPACES) - set(VECTORS) or kind not in SIZES:
            raise self._unknown()
        names = [name.strip() for name in data.strip("{}").split(",")]
        places = [self._value(name, kind) for name in names]
        widths = {self._width(name) if name.startswith("%") else max(SIZES[kind], 4) for name in names}
        if len(widths) != 1:
            raise self._unknown()
        a, imm, flags = self._address(address)
        flags |= SPACES[space] | vector << 3 | (SIGNED if kind[0] == "s" else 0) | (WIDE if widths == {8} else 0)
        fields = dict(zip("dbce", places, strict=False))
        return space, flags, {**fields, "a": a, "imm": imm, "size": SIZES[kind]}

    def _on_ld(self, modifiers: tuple[str, ...], target: str, address: str) -> None:
        if modifiers[0] == "param":
            match = re.fullmatch(r"\[\s*([\w$]+)\s*(?:\+\s*(\d+))?\s*\]", address)
            if not match or match[1] not in self.entry.params or target.startswith("{"):
                raise self._unknown()
            width, size = self._width(target), SIZES[modifiers[-1]]
            a = self._parameter(match[1], int(match[2] or 0), size, width)
            self._emit(f"mov_{8 * width}", "other", d=self._register(target), a=a)
            if modifiers[-1] in ("s8", "s16", "s32") and width > size:
                self._integers(self._register(target), width, a, width, f"s{8 * width}", modifiers[-1])
            return
        space, flags, fields = self._access(modifiers, target, address)
        kind = {"shared": "shared load", "local": "local"}.get(space, "load")
        self._emit("ld", kind, flags=flags, **fields)

    def _on_ldu(self, modifiers: tuple[str, ...], target: str, address: str) -> None:
        self._on_ld(modifiers, target, address)

    def _on_st(self, modifiers: tuple[str, ...], address: str, source: str) -> None:
        space, flags, fields = self._access(modifiers, source, address)
        kind = {"shared": "shared store", "local": "local"}.get(space, "store")
        self._emit("st", kind, flags=flags, **fields)

    def _on_atom(self, modifiers: tuple[str, ...], target: str, address: str, *operands: str) -> None:
        kind = modifiers[-1]
        space = next((part for part in modifiers if part in SPACES), "")
        name = next((part for part in modifiers[:-1] if part not in SPACES), "")
        if name not in ("add", "min", "max", "exch", "cas", "and", "or", "xor") or SIZES[kind] < 4:
            raise self._unknown()
        a, imm, flags = self._address(address)
        flags |= SPACES[space] | (SIGNED if kind[0] == "s" else 0) | (FLOATING if kind[0] == "f" else 0)
        b = self._value(operands[0], kind)
        c = self._value(operands[1], kind) if len(operands) > 1 else b
        d = self._register(target) if target else NOTHING
        self._emit(f"atom_{name}", "atomic", d=d, a=a, b=b, c=c, imm=imm, size=SIZES[kind], flags=flags)

    def _on_red(self, modifiers: tuple[str, ...], address: str, *operands: str) -> None:
        self._on_atom(modifiers, "", address, *operands)

    # flow

    def _on_bra(self, modifiers: tuple[str, ...], label: str) -> None:
        if label not in self.entry.labels:
            raise self._unknown(f"label {label}")
        self._emit("bra", "branch")

    def _on_ret(self, modifiers: tuple[str, ...]) -> None:
        self._emit("exit", "branch")

    def _on_exit(self, modifiers: tuple[str, ...]) -> None:
        self._emit("exit", "branch")

    def _on_trap(self, modifiers: tuple[str, ...]) -> None:
        self._emit("trap", "branch")

    def _on_bar(self, modifiers: tuple[str, ...], barrier: str = "0", threads: str = "") -> None:
        if modifiers == ("warp",):
            self._emit("warp_sync", "barrier", e=self._value(barrier, "b32"))
        elif modifiers or barrier != "0" or threads:
            raise self._unknown("barrier but the one of the whole block")
        else:
            self._emit("bar", "barrier")

    def _on_barrier(self, modifiers: tuple[str, ...], *operands: str) -> None:
        self._on_bar(modifiers, *operands)

    def _on_shfl(self, modifiers: tuple[str, ...], target: str, x: str, by: str, clamp: str, members: str) -> None:
        name, _, valid = target.partition("|")
        a, b, c, e = (self._value(operand, "b32") for operand in (x, by, clamp, members))
        made = self._emit(f"shfl_{modifiers[0]}", "shared load", d=self._register(name), a=a, b=b, c=c, e=e)
        made.target = self._register(valid) if valid else NOTHING

    def _on_vote(self, modifiers: tuple[str, ...], target: str, x: str, members: str) -> None:
        a, e = self._predicate(x), self._value(members, "b32")
        self._emit(f"vote_{modifiers[0]}", "integer", d=self._register(target), a=a, e=e)

    def _on_activemask(self, modifiers: tuple[str, ...], target: str) -> None:
        self._emit("activemask", "integer", d=self._register(target))


ARITHMETIC = {
    *("add", "sub", "mul", "mad", "fma", "div", "rem", "min", "max", "neg", "abs"),
    *("sqrt", "rcp", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh"),
}
SPECIAL_FUNCTIONS = {"sqrt", "rcp", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh", "div"}


def _operation(name: str, mode: str, kind: str) -> str:
    """Return the engine's name of an arithmetic instruction."""
    bits = 8 * SIZES[kind]
    if kind in ("f32", "f64"):
        return f"{name}_{kind}"
    if mode:
        return f"{name}_{mode}_{kind}"
    if name in ("mul", "mad"):
        return f"{name}_lo_{bits}"
    if name in ("div", "rem", "min", "max", "abs"):  # halves without a sign are words
        return f"{name}_{kind[0]}{32 if kind == 'u16' else bits}"
    return f"{name}_{bits}"


def _class(name: str, kind: str) -> str:
    if kind == "f64":
        return "double"
    if kind != "f32":
        return "integer"
    return "fma" if name == "fma" else "special" if name in SPECIAL_FUNCTIONS else "float"


def _offsets(variables: dict) -> dict[str, int]:
    found, end = {}, 0
    for name, variable in variables.items():
        end = -(-end // variable.align) * variable.align
        found[name] = end
        end += variable.size
    return found


def _end(offsets: dict[str, int], variables: dict) -> int:
    return max((offset + variables[name].size for name, offset in offsets.items()), default=0)
