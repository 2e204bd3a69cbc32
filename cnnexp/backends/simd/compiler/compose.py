"""Kernels as functions for `@njit` code: the one place where what `emit` emits meets Numba.

Numba optimizes a function three times, and compiles what calls it anew. So kernels lie in a module of their own, their
library, and Numba sees a weak function of the same name for each: `native.MachineCode.linked` puts them in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cnnexp.backends.simd.compiler.emit import INDEX, Emit, Kernels, Target, call_kernels

Codegen = Callable[[Any, ir.IRBuilder, Any, Sequence[ir.Value]], ir.Value]
Intrinsic = tuple[types.Type, Codegen]
"""What Numba asks of an intrinsic: its signature, and what emits it."""


def compose(
    name: str, target: Target, kernels: Kernels, library: ir.Module | None = None, choices: Sequence[Kernels] = ()
) -> Callable[..., None]:
    """Return a function for `@njit` code that runs the kernels in order, each on the same arrays and a count of images.

    Each kernel is an LLVM function of its own, so that registers are allocated kernel by kernel.

    Args:
        library: where the kernels are defined; None for where they are called, once for each compiled function.
        choices: lists of kernels, of which the one of a number given last runs afterwards.
    """

    def emit(builder: ir.IRBuilder, given: list[ir.Value]) -> None:
        same = given[:-1] if choices else given
        call_kernels(builder, name, target, kernels, same)
        end = builder.append_basic_block("end")
        switch = builder.switch(given[-1], end)
        for number, chosen in enumerate(choices):
            switch.add_case(number, block := builder.append_basic_block(f"choice{number}"))
            builder.position_at_end(block)
            call_kernels(builder, name, target, chosen, same)
            builder.branch(end)
        builder.position_at_end(end)

    return _outlined(f"kernels.{name}", library, emit)


def _outlined(
    name: str, library: ir.Module | None, emit: Callable[[ir.IRBuilder, list[ir.Value]], None]
) -> Callable[..., None]:
    """Return a function for `@njit` code that calls what is emitted, once, on first elements and numbers."""

    @intrinsic
    def run(typing: Any, *arguments: types.Type) -> Intrinsic:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[ir.Value]) -> ir.Value:
            values = [
                context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
                for kind, value in zip(kinds, cgutils.unpack_tuple(builder, given[0]), strict=True)
            ]
            home = builder.module if library is None else library
            if name not in home.globals:
                _define(home, name, values, "internal" if library is None else "external", emit)
            if name not in builder.module.globals:
                _define(builder.module, name, values, "weak")
            builder.call(builder.module.globals[name], values)
            return context.get_dummy_value()

        kinds = [kind if isinstance(kind, types.Array) else types.int64 for kind in arguments]
        return types.void(types.StarArgTuple.from_types(kinds)), codegen

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


def on_arena(target: Target, emit: Emit) -> Callable[..., Any]:
    """Return a function of an arena for `@njit` code that runs a kernel, each time a function of its own."""

    @intrinsic
    def run(typing: Any, arena: types.Type) -> Intrinsic:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[ir.Value]) -> ir.Value:
            first = context.make_array(arena)(context, builder, given[0]).data
            call_kernels(builder, "arena", target, [("kernel", emit)], [first] * 3 + [INDEX(0)])
            return context.get_dummy_value()

        return types.void(arena), codegen

    return run
