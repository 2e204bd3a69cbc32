"""Machine code in this process: linked and called through ctypes, without Numba, which made it elsewhere.

A process that finds its program in the cache has Numba neither to import, which takes 0.3 s, nor in memory, 60 MB, and
on x86-64 Linux not LLVM either: see `link`.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from llvmlite import ir

from cnnexp.backends.cache import host
from cnnexp.backends.simd.compiler.entry import Array
from cnnexp.backends.simd.compiler.link import link

PACKED = "call_packed"
"""The function that takes all arguments in one array of integers: `pack`."""
BYTE = ctypes.c_byte.from_buffer
Packed: TypeAlias = "ctypes.Array[ctypes.c_int64]"


@dataclass(frozen=True)
class MachineCode:
    """A function that Numba has compiled.

    Attributes:
        symbol: its name in the object file. needs: the functions outside that it calls, libm's and the C library's.
    """

    symbol: str
    needs: tuple[str, ...]
    object_file: bytes

    def to_bytes(self) -> bytes:
        return json.dumps([self.symbol, self.needs]).encode() + b"\n" + self.object_file

    @staticmethod
    def of_bytes(payload: bytes) -> MachineCode:
        """Raise ValueError where `to_bytes` did not make them."""
        head, _, object_file = payload.partition(b"\n")
        symbol, needs = json.loads(head)
        return MachineCode(symbol, tuple(needs), object_file)

    @staticmethod
    def linked(bitcode: bytes, kernels: str) -> MachineCode:
        """Return a function of Numba's with the kernels that it calls, optimized by LLVM for this CPU.

        Args:
            kernels: LLVM's text of a module, whose functions take the place of weak ones, and which has `PACKED`.
        """
        import llvmlite.binding as llvm

        module = llvm.parse_bitcode(bitcode)
        module.link_in(llvm.parse_assembly(kernels))
        for function in module.functions:
            if not function.is_declaration and function.name != PACKED:
                function.linkage = "internal"
        triple, cpu, features = host()
        machine = llvm.Target.from_triple(triple).create_target_machine(
            cpu, features, 3, "static" if triple.startswith("x86") else "default", "jitdefault", jit=True
        )
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        options.loop_vectorization, options.slp_vectorization = True, False
        builder = llvm.create_pass_builder(machine, options)
        builder.getModulePassManager().run(module, builder)
        needs = sorted(f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm."))
        return MachineCode(PACKED, tuple(needs), machine.emit_object(module))


class Function:
    """Machine code that can be called, by several threads at once: it runs without Python's lock.

    It stays in memory until the process ends, as a thread that nobody waits for may still be in it.

    Args:
        arguments: of the function, an integer where they are None.

    Raises:
        LookupError: something it calls is not in this process.
    """

    def __init__(self, made: MachineCode, arguments: Sequence[Array | None]) -> None:
        self._arguments = arguments
        address = link(made.object_file, made.symbol) or _link_by_llvm(made)
        self._returned = (ctypes.c_int64 * 2)()
        self._call = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(address)

    def pack(self, *given: int | np.ndarray) -> Packed:
        """Return the arguments as `run` takes them; TypeError where an array is not what `arguments` says."""
        # Numba's convention: places for a result and for an exception come first, a status comes back
        flat = [ctypes.addressof(self._returned), ctypes.addressof(self._returned) + 8]
        for wanted, value in zip(self._arguments, given, strict=True):
            if wanted is None:
                flat.append(int(value))
            elif isinstance(value, np.ndarray):
                flat += _fields(value, wanted)
            else:
                raise TypeError(f"{value!r} given for {wanted}")
        return (ctypes.c_int64 * len(flat))(*flat)

    def run(self, packed: Packed) -> None:
        """Call it; RuntimeError where the function raised, which none of ours means to."""
        if status := self._call(packed):
            raise RuntimeError(f"compiled code ended with status {status}")

    def __call__(self, *given: int | np.ndarray) -> None:
        self.run(self.pack(*given))


def add_packed(module: ir.Module, symbol: str, arguments: Sequence[Array | None]) -> None:
    """Add `PACKED` to a module: it calls a function of Numba's; ctypes takes 5 us longer for as many arguments."""
    number, pointer = ir.IntType(64), ir.IntType(8).as_pointer()
    kinds: list[ir.Type] = [pointer, pointer]
    for argument in arguments:
        kinds += [pointer, pointer, number, number, pointer] if argument else []  # an array, as `_fields` has it
        kinds += [number] * (2 * argument.dimensions if argument else 1)
    called = ir.Function(module, ir.FunctionType(ir.IntType(32), kinds), symbol)
    packed = ir.Function(module, ir.FunctionType(ir.IntType(32), [number.as_pointer()]), PACKED)
    builder = ir.IRBuilder(packed.append_basic_block())
    given = [builder.load(builder.gep(packed.args[0], [number(at)]), align=8) for at in range(len(kinds))]
    fitting = [builder.inttoptr(n, kind) if kind is pointer else n for n, kind in zip(given, kinds, strict=True)]
    builder.ret(builder.call(called, fitting))


def _link_by_llvm(made: MachineCode) -> int:
    """Return the address of its function, by a linker of its own: names in one program know nothing of another's.

    Raise LookupError as `Function` says.
    """
    import llvmlite.binding as llvm

    def missing() -> list[str]:
        return [name for name in made.needs if llvm.address_of_symbol(name) is None]

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)  # LLVM now looks for names in this process
    if missing():
        from numba.core.registry import cpu_target  # which brings what it calls

        cpu_target.target_context.codegen()
    if lacking := missing():
        raise LookupError(f"compiled code calls {', '.join(lacking)}, which this process does not have")
    engine.add_object_file(llvm.ObjectFileRef.from_data(made.object_file))
    engine.finalize_object()
    address = engine.get_function_address(made.symbol)
    if not address:
        raise LookupError(f"no {made.symbol} in the compiled code")
    engine.detach()
    return int(address)


def _fields(array: np.ndarray, wanted: Array) -> tuple[int, ...]:
    """Return an array as Numba passes it: (owner, Python object, elements, bytes of one, address, shape, strides)."""
    fits = array.dtype == wanted.kind and array.ndim == wanted.dimensions and array.flags.c_contiguous
    if not fits or (wanted.written and not array.flags.writeable):
        raise TypeError(f"array {array.shape} of {array.dtype}, {array.flags.c_contiguous=} given for {wanted}")
    return (0, 0, array.size, array.itemsize, address_of(array), *array.shape, *array.strides)


def address_of(array: np.ndarray) -> int:
    """Return where an array's memory is: `array.ctypes.data` takes four times as long."""
    flags = array.flags
    return ctypes.addressof(BYTE(array.data)) if flags.writeable and array.size else array.ctypes.data
