"""Every LLVM intrinsic in use, and the feature of the CPU that it needs: the one list, and the one place that calls.

An intrinsic without its instruction ends the process, by an assertion inside LLVM or by a call to nowhere, and no
exception says so. So kernels ask what the target has, and emit plain instructions where it has not got it. LLVM's
`experimental` intrinsics have no place here: whether a version expands them on a CPU without the instruction is luck.
"""

from collections.abc import Sequence

from llvmlite import ir

PORTABLE = ("llvm.fmuladd", "llvm.sqrt", "llvm.ctpop", "llvm.prefetch")
"""What every LLVM since 15 turns into instructions of any CPU; their names go on with a type."""

COMPRESS_16 = "llvm.x86.avx512.mask.compress.v16f32"
PERMUTE_16 = "llvm.x86.avx512.permvar.sf.512"
PERMUTE_8 = "llvm.x86.avx2.permps"
PICK_8 = "llvm.x86.avx.vpermilvar.ps.256"
PACK_8 = "llvm.x86.avx2.packssdw"
LOAD_CONTROL = "llvm.x86.sse.ldmxcsr"
STORE_CONTROL = "llvm.x86.sse.stmxcsr"
PAUSE = "llvm.x86.sse2.pause"
READ_CLOCK = "llvm.readcyclecounter"

NEEDS = {
    COMPRESS_16: "avx512f",
    PERMUTE_16: "avx512f",
    PERMUTE_8: "avx2",
    PICK_8: "avx",
    PACK_8: "avx2",
    LOAD_CONTROL: "sse",
    STORE_CONTROL: "sse",
    PAUSE: "sse2",
    READ_CLOCK: "sse2",
}
"""The feature, by LLVM's name for it, of each intrinsic that stands for one CPU's instruction."""


def known_features(triple: str, listed: str) -> tuple[str, ...]:
    """Return the features that `NEEDS` speaks of and a CPU has.

    Args:
        triple: LLVM's name of the machine, whose first part is the architecture.
        listed: `+avx2,-sse4a,...`. What all CPUs of the architecture have may be missing.
    """
    has = {feature[1:] for feature in listed.split(",") if feature.startswith("+")}
    if triple.startswith("x86_64"):
        has |= {"sse", "sse2"}
    return tuple(sorted(has & set(NEEDS.values())))


def call(
    builder: ir.IRBuilder, features: tuple[str, ...], name: str, result: ir.Type, arguments: Sequence[ir.Value]
) -> ir.Value:
    """Call an intrinsic of `NEEDS` that these features allow, or one of `PORTABLE`, its type behind its name."""
    if not name.startswith(PORTABLE) and NEEDS[name] not in features:
        raise ValueError(f"{name} needs {NEEDS[name]}, and the target has {features}")
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(declare(builder.module, kind, name), arguments)


def read_register(builder: ir.IRBuilder, name: str) -> ir.Value:
    """Read a register of 64-bit Arm that programs may read; anywhere else LLVM ends the process."""
    kind = ir.FunctionType(ir.IntType(64), [ir.MetaDataType()])
    register = builder.module.add_metadata([ir.MetaDataString(builder.module, name)])
    return builder.call(declare(builder.module, kind, "llvm.read_volatile_register.i64"), [register])


def declare(module: ir.Module, kind: ir.FunctionType, name: str) -> ir.Function:
    """Return a function that is defined elsewhere, declared once in a module."""
    return module.globals.get(name) or ir.Function(module, kind, name)
