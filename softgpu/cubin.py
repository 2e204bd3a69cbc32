"""What a cubin, an ELF file, says of a kernel that its PTX does not: registers and stack."""

from __future__ import annotations

import struct
from dataclasses import dataclass

REGISTERS, FRAME = 0x2F, 0x11  # attributes of the section .nv.info: (symbol, number) each


@dataclass(frozen=True)
class Resources:
    """What the compiler for the real GPU gave a kernel.

    Attributes:
        registers: of a thread.
        local_bytes: of a thread's stack.
        instructions: of the machine code, 16 bytes each.
    """

    registers: int
    local_bytes: int
    instructions: int


def resources(cubin: bytes, name: str) -> Resources:
    """Read them of one kernel."""
    if cubin[:4] != b"\x7fELF":
        raise ValueError("no cubin")
    start, size, count, names = (
        struct.unpack_from("<Q", cubin, 40)[0],
        *struct.unpack_from("<HHH", cubin, 58),
    )
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + k * size) for k in range(count)]

    def text(section: int, offset: int) -> str:
        at = headers[section][4] + offset
        return cubin[at : cubin.index(b"\0", at)].decode()

    sections = {text(names, header[0]): header for header in headers}
    attributes = {}
    symbols = sections[".symtab"]
    for place, length in [(sections[".nv.info"][4], sections[".nv.info"][5])] if ".nv.info" in sections else []:
        end = place + length
        while place < end:
            form, attribute, value = struct.unpack_from("<BBH", cubin, place)
            place += 4
            if form == 4:  # `value` bytes follow
                if attribute in (REGISTERS, FRAME):
                    symbol, number = struct.unpack_from("<II", cubin, place)
                    entry = struct.unpack_from("<I", cubin, symbols[4] + 24 * symbol)[0]
                    attributes[attribute, text(symbols[6], entry)] = number
                place += value
    code = sections[f".text.{name}"]
    return Resources(
        attributes.get((REGISTERS, name), code[7] >> 24),
        attributes.get((FRAME, name), 0),
        code[5] // 16,
    )
