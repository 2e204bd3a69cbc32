"""PTX text, as NVVM and nvJitLink write it, taken apart into instructions.

Of the language (NVIDIA, Parallel Thread Execution ISA 9.0) only its grammar is known here; what an instruction means is
for `assembler`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

SIZES = {
    **dict.fromkeys(("b8", "u8", "s8"), 1),
    **dict.fromkeys(("b16", "u16", "s16", "f16"), 2),
    **dict.fromkeys(("b32", "u32", "s32", "f32"), 4),
    **dict.fromkeys(("b64", "u64", "s64", "f64"), 8),
}


class PtxError(Exception):
    """PTX that the software GPU does not know: says what, and the line."""


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        parts: the opcode, split at its dots: ("ld", "global", "f32").
        operands: as written, e.g. "%r1", "[%rd2+4]", "0f3F800000", "{%f1, %f2}".
        guard: the predicate register that it depends on, or "".
        negated: whether it runs where the predicate is false.
        line: in the text, from 1.
        text: as written.
    """

    parts: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str
    negated: bool
    line: int
    text: str


@dataclass
class Variable:
    """A parameter or an array in shared or local memory: its type, bytes in all, alignment."""

    kind: str
    size: int
    align: int


@dataclass
class Entry:
    """One kernel.

    Attributes:
        registers: type by register prefix ("%rd": "b64").
        labels: index of the instruction that follows each.
        threads: most in a block, by `.maxntid`; 0 where nothing is said.
        target: what it was compiled for, "sm_90a".
    """

    name: str
    target: str
    params: dict[str, Variable] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    shared: dict[str, Variable] = field(default_factory=dict)
    local: dict[str, Variable] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    code: list[Instruction] = field(default_factory=list)
    threads: int = 0


_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{;]*)\{")
_VARIABLE = re.compile(r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?$")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)$", re.DOTALL)
_INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.DOTALL)
_LABEL = re.compile(r"([\w$]+):(?!:)\s*")
_IGNORED = (".loc", ".pragma", ".file", ".section")


def parse(text: str) -> list[Entry]:
    """Return the kernels of a PTX module.

    Raises:
        PtxError: a construct that is not known.
    """
    text = re.sub(r"//[^\n]*", "", text.rstrip("\0"))
    target = re.search(r"\.target\s+(\w+)", text)
    module_shared = {
        name: variable
        for declared in re.findall(
            r"^\s*(?:\.extern\s+|\.weak\s+|\.visible\s+)*\.shared\s+([^;]*);", text, re.MULTILINE
        )
        for name, variable in [_variable(declared, 0)]
    }
    if re.search(r"^\s*(?:\.visible\s+|\.weak\s+)*\.func\s", text, re.MULTILINE):
        raise PtxError("a function that is not inlined (.func)")
    found = []
    for match in _ENTRY.finditer(text):
        entry = Entry(match[1], target[1] if target else "")
        entry.shared.update(module_shared)
        for declared in filter(None, (part.strip() for part in match[2].split(","))):
            name, variable = _variable(declared.removeprefix(".param").strip(), 0)
            entry.params[name] = variable
        threads = re.search(r"\.maxntid\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?", match[3])
        if threads:
            entry.threads = int(threads[1]) * int(threads[2] or 1) * int(threads[3] or 1)
        _parse_body(entry, text, match.end())
        found.append(entry)
    return found


def _parse_body(entry: Entry, text: str, start: int) -> None:
    """Read statements up to the brace that closes the kernel."""
    line, place = text.count("\n", 0, start) + 1, start
    depth = 0
    while True:
        while text[place].isspace():
            line += text[place] == "\n"
            place += 1
        if text[place] == "}":
            if depth == 0:
                return
            depth, place = depth - 1, place + 1
            continue
        if text[place] == "{":
            depth, place = depth + 1, place + 1
            continue
        label = _LABEL.match(text, place)
        if label:
            entry.labels[label[1]] = len(entry.code)
            line += label[0].count("\n")
            place = label.end()
            continue
        end = text.index(";", place)
        if text.startswith((".loc ", ".loc\t", ".file"), place):
            end = text.index("\n", place)
        statement = text[place:end].strip()
        _parse_statement(entry, statement, line)
        line += text.count("\n", place, end)
        place = end + 1 if text[end] == ";" else end


def _parse_statement(entry: Entry, statement: str, line: int) -> None:
    if statement.startswith(".reg"):
        kind, names = _REGISTERS.match(statement).groups()
        for name in names.split(","):
            entry.registers[name.strip().partition("<")[0]] = kind
    elif statement.startswith((".shared", ".local")):
        space, declared = statement[1:].split(None, 1)
        name, variable = _variable(declared, line)
        getattr(entry, space)[name] = variable
    elif statement.startswith(_IGNORED):
        pass
    else:
        match = _INSTRUCTION.match(statement)
        if not match:
            raise PtxError(f"line {line}: {statement}")
        negated, guard, opcode, rest = match.groups()
        parts = tuple(opcode.replace("shared::cta", "shared").replace("::", "_").split("."))
        words = " ".join(statement.split())
        entry.code.append(Instruction(parts, _operands(rest), guard or "", bool(negated), line, words))


def _variable(declared: str, line: int) -> tuple[str, Variable]:
    declared = re.sub(r"\.ptr(\s+\.(global|shared|const|local))?(\s+\.align\s+\d+)?\s+", "", " ".join(declared.split()))
    match = _VARIABLE.match(declared)
    if not match or match[2] not in SIZES:
        raise PtxError(f"line {line}: a variable: {declared}")
    align, kind, name, count = match.groups()
    size = SIZES[kind] * (int(count) if count else count is None)
    return name, Variable(kind, size, int(align) if align else SIZES[kind])


def _operands(text: str) -> tuple[str, ...]:
    """Split at the commas that are not inside braces or brackets."""
    found, depth, current = [], 0, ""
    for letter in text:
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            found.append(current.strip())
            current = ""
        else:
            current += letter
    return tuple([*found, current.strip()] if current.strip() else found)
