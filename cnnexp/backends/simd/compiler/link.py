"""Object files for x86-64 Linux brought into memory without LLVM, whose library takes a process 50 MB and 30 ms.

Nothing is asked of them but what LLVM writes in its large code model: every address is one absolute number of eight
bytes. Whatever else one holds, it is for LLVM to link.
"""

import contextlib
import ctypes
import mmap
import sys

import numpy as np

HEADER = np.dtype({"names": ["kind", "machine", "sections", "count"], "formats": ["<u2", "<u2", "<u8", "<u2"],
                   "offsets": [16, 18, 40, 60], "itemsize": 64})  # fmt: skip
SECTION = np.dtype([("name", "<u4"), ("kind", "<u4"), ("flags", "<u8"), ("address", "<u8"), ("offset", "<u8"),
                    ("size", "<u8"), ("link", "<u4"), ("info", "<u4"), ("align", "<u8"), ("entry", "<u8")])  # fmt: skip
SYMBOL = np.dtype([("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"),
                   ("size", "<u8")])  # fmt: skip
RELOCATION = np.dtype([("offset", "<u8"), ("kind", "<u4"), ("symbol", "<u4"), ("addend", "<i8")])

MAGIC = b"\x7fELF\x02\x01"
RELOCATABLE, X86_64 = 1, 62
PROGBITS, SYMTAB, RELA, UNWIND = 1, 2, 4, 0x70000001
WRITE, ALLOC = 1, 2
UNDEFINED, COMMON = 0, 0xFFF2
ABSOLUTE_64 = 1

_kept: list[mmap.mmap] = []
"""For good: a thread that nobody waits for may still be in it."""


def link(object_file: bytes, symbol: str) -> int | None:
    """Return the address of a function of an object file, now in memory; None where only LLVM can bring it there."""
    with contextlib.suppress(AttributeError, KeyError, OSError, ValueError):
        return _link(object_file, symbol)
    return None


def _link(data: bytes, wanted: str) -> int:
    """Raise AttributeError where the process lacks a name, OSError where it may not run code, else ValueError.

    Also KeyError where there is no such function.
    """
    header = np.frombuffer(data, HEADER, 1)[0]
    is_code = data.startswith(MAGIC) and (header["kind"], header["machine"]) == (RELOCATABLE, X86_64)
    if sys.platform != "linux" or not is_code:
        raise ValueError
    sections = np.frombuffer(data, SECTION, header["count"], header["sections"])
    (table,) = sections[sections["kind"] == SYMTAB]
    symbols, names = np.frombuffer(_content(data, table), SYMBOL), _content(data, sections[table["link"]])
    # each section on its alignment, then the common symbols, which nobody writes either
    places, size = {}, 0
    for number, section in enumerate(sections):
        if section["flags"] & ALLOC and section["size"] and section["kind"] != UNWIND:
            if section["kind"] != PROGBITS or section["flags"] & WRITE:
                raise ValueError
            places[number] = size + -size % int(section["align"])
            size = places[number] + int(section["size"])
    common = size + -size % 16
    size = common + int(symbols[symbols["section"] == COMMON]["size"].sum())
    memory = mmap.mmap(-1, size)
    base = ctypes.addressof(ctypes.c_byte.from_buffer(memory))
    for number, place in places.items():
        memory[place : place + int(sections[number]["size"])] = _content(data, sections[number])
    # where every symbol is
    process, addresses = ctypes.CDLL(None, use_errno=True), dict[str | int, int]()
    for number, symbol in enumerate(symbols):
        name = names[symbol["name"] : names.index(b"\0", symbol["name"])].decode()
        address = 0  # a file's or an unwind table's
        if symbol["section"] in places:
            address = base + places[symbol["section"]] + int(symbol["value"])
        elif symbol["section"] == COMMON:
            address, common = base + common, common + int(symbol["size"])
        elif symbol["section"] == UNDEFINED and name:
            address = int(ctypes.cast(getattr(process, name), ctypes.c_void_p).value or 0)
        addresses[number] = addresses[name] = address
    # the places that name them
    for relocations in sections[sections["kind"] == RELA]:
        if (start := places.get(int(relocations["info"]))) is not None:
            for one in np.frombuffer(_content(data, relocations), RELOCATION):
                address = addresses[int(one["symbol"])]
                if one["kind"] != ABSOLUTE_64 or not address:
                    raise ValueError
                at = start + int(one["offset"])
                memory[at : at + 8] = (address + int(one["addend"])).to_bytes(8, "little")
    if process.mprotect(ctypes.c_void_p(base), ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno())
    _kept.append(memory)
    return addresses[wanted]


def _content(data: bytes, section: np.void) -> bytes:
    return data[section["offset"] : section["offset"] + section["size"]]
