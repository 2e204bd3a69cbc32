"""Kernels as functions for `@njit` code: the one place where what `emit` emits meets Numba."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cnnexp.backends.simd.compiler.emit import Emit, Kernels, Target, call_kernels

Codegen = Callable[[Any, ir.IRBuilder, Any, Sequence[ir.Value]], ir.Value]
Intrinsic = tuple[types.Type, Codegen]
"""What Numba asks of an intrinsic: its signature, and what emits it."""


def compose(name: str, target: Target, kernels: Kernels) -> Callable[..., None]:
    """Return a function for `@njit` code that runs the kernels in order, each on three arrays and a count of images.

    Each kernel is an LLVM function of its own, so that registers are allocated kernel by kernel.
    """

    @intrinsic
    def run(
        typing: Any, parameters: types.Type, gradients: types.Type, arena: types.Type, count: types.Type
    ) -> Intrinsic:
        return _signature(parameters, gradients, arena), _caller(name, target, kernels)

    return run


def compose_six(name: str, target: Target, kernels: Kernels) -> Callable[..., None]:
    """Return a function for `@njit` code that runs the kernels in order, each on six arrays and a count."""

    @intrinsic
    def run(
        typing: Any,
        a: types.Type,
        b: types.Type,
        c: types.Type,
        d: types.Type,
        e: types.Type,
        f: types.Type,
        count: types.Type,
    ) -> Intrinsic:
        return _signature(a, b, c, d, e, f), _caller(name, target, kernels)

    return run


def compose_five(name: str, target: Target, kernel: Emit) -> Callable[..., None]:
    """Return a function for `@njit` code that runs one kernel on five arrays and a count."""

    @intrinsic
    def run(
        typing: Any, a: types.Type, b: types.Type, c: types.Type, d: types.Type, e: types.Type, count: types.Type
    ) -> Intrinsic:
        return _signature(a, b, c, d, e), _caller(name, target, [("kernel", kernel)])

    return run


def compose_choice(name: str, target: Target, choices: Sequence[Kernels]) -> Callable[..., None]:
    """Return a function for `@njit` code that runs, of lists of kernels, the one of a number given last.

    Each kernel is run on four arrays and a count.
    """

    @intrinsic
    def run(
        typing: Any, a: types.Type, b: types.Type, c: types.Type, d: types.Type, count: types.Type, choice: types.Type
    ) -> Intrinsic:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
            end = builder.append_basic_block("chosen")
            switch = builder.switch(arguments[-1], end)
            for number, kernels in enumerate(choices):
                block = builder.append_basic_block(f"choice{number}")
                switch.add_case(number, block)
                builder.position_at_end(block)
                call = _caller(name, target, kernels)
                call(context, builder, _signature(*signature.args[:4]), arguments[:-1])
                builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return types.void(a, b, c, d, types.int64, types.int64), codegen

    return run


def on_arena(emit: Callable[[ir.IRBuilder, ir.Value], None]) -> Callable[..., Any]:
    """Return a function of an arena for `@njit` code that does what is emitted, given the arena's first float."""

    @intrinsic
    def run(typing: Any, arena: types.Type) -> Intrinsic:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
            emit(builder, context.make_array(arena)(context, builder, arguments[0]).data)
            return context.get_dummy_value()

        return types.void(arena), codegen

    return run


def _signature(*arrays: types.Type) -> types.Type:
    return types.void(*arrays, types.int64)


def _caller(name: str, target: Target, kernels: Kernels) -> Codegen:
    """Return what emits the calls of the kernels, with the arrays' first elements."""

    def emit_calls(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        *arrays, count = zip(signature.args, arguments, strict=True)
        buffers = [context.make_array(kind)(context, builder, value).data for kind, value in arrays]
        call_kernels(builder, name, target, kernels, [*buffers, count[1]])
        return context.get_dummy_value()

    return emit_calls
