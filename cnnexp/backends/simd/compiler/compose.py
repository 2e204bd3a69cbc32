"""Kernels as functions for `@njit` code: the one place where what `emit` emits meets Numba.

Numba optimizes a function three times, and compiles what calls it anew. So kernels lie in a module of their own, their
library, and Numba sees a weak function of the same name for each: `native.MachineCode.linked` puts them in its place.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cnnexp.backends.simd.compiler.emit import Kernels, Target, call_kernels


def compose(
    name: str,
    target: Target,
    kernels: Kernels,
    library: ir.Module | None = None,
    choices: Sequence[Kernels] = (),
    in_parts: bool = False,
) -> Callable[..., None]:
    """Return a function for `@njit` code that runs the kernels in order, each on the same arrays and a count of images.

    Each kernel is an LLVM function of its own, so that registers are allocated kernel by kernel.

    Args:
        library: where the kernels are defined; None for where they are called, once for each compiled function.
        choices: lists of kernels, of which the one of a number given last runs afterwards.
        in_parts: whether of those only a part runs, which is given last but one.
    """

    def emit(builder: ir.IRBuilder, given: list[ir.Value]) -> None:
        same = given[: -1 - in_parts] if choices else given
        call_kernels(builder, name, target, kernels, same)
        end = builder.append_basic_block("end")
        switch = builder.switch(given[-1], end)
        for number, chosen in enumerate(choices):
            switch.add_case(number, block := builder.append_basic_block(f"choice{number}"))
            builder.position_at_end(block)
            call_kernels(builder, name, target, chosen, same, given[-2] if in_parts else None)
            builder.branch(end)
        builder.position_at_end(end)

    symbol = f"kernels.{name}"

    def call(builder: ir.IRBuilder, *values: ir.Value) -> None:
        home = builder.module if library is None else library
        if symbol not in home.globals:
            _define(home, symbol, values, "internal" if library is None else "external", emit)
        if symbol not in builder.module.globals:
            _define(builder.module, symbol, values, "weak")
        builder.call(builder.module.globals[symbol], values)

    return emitted(types.void, call)


def emitted(result: types.Type, emit: Callable[..., ir.Value | None]) -> Callable[..., Any]:
    """Return a function for `@njit` code that stands for what emit(builder, *first elements and numbers) emits."""

    @intrinsic
    def run(typing: Any, *arguments: types.Type) -> tuple[types.Type, Callable[..., ir.Value]]:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[ir.Value]) -> ir.Value:
            values = [
                context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
                for kind, value in zip(kinds, cgutils.unpack_tuple(builder, given[0]), strict=True)
            ]
            found = emit(builder, *values)
            return context.get_dummy_value() if result is types.void else found

        kinds = [kind if isinstance(kind, types.Array | types.CPointer) else types.int64 for kind in arguments]
        return result(types.StarArgTuple.from_types(kinds)), codegen

    return run


def _define(
    module: ir.Module, name: str, like: Sequence[ir.Value], linkage: str, emit: Callable[..., None] | None = None
) -> None:
    """Define a function on arguments as those given, of which `emit` emits the body."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [value.type for value in like]), name)
    function.linkage = linkage
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    if emit:
        emit(builder, list(function.args))
    builder.ret_void()
