"""`general`: layers that no other algorithm computes, by the operations of `numpy`: one call out of the compiled step.

Compiled code calls a function whose address lies in the tile's arena, which takes Python's lock, works on the tile in
place and comes back: the layers before and after stay what they are, and no thread waits for another but for the lock.
So it is with a structural layer of a plugin; `backend.algorithms=[LAYER:general]` has it so with any other.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from cnnexp.backends.plain.numpy import NumpyOps
from cnnexp.backends.simd.algorithms.cost import Work
from cnnexp.backends.simd.algorithms.node import Node, Section
from cnnexp.backends.simd.compiler.emit import FLOAT, INDEX, Emitter, Target
from cnnexp.backends.simd.layouts import NC, NHWC, Layout, Tensor
from cnnexp.backends.stages import Chain, Run
from cnnexp.errors import CnnexpError, NetworkError
from cnnexp.network import DropoutStage, NormStage, ResidualStage, Stage

CALLED = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)
"""What compiled code calls: whether backward, images, and the addresses of arena, parameters and gradients."""

NUMPY_CYCLES, CYCLES = 200_000, 20
"""Cycles of a call of Python's, and for each number and multiply-add: so that anything else is chosen first."""


class General(Node[NC, NC]):
    """The layers of a section, whatever they are.

    Attributes:
        address: where in the arena the address of what is called lies, see `Calls`.
    """

    algorithm, whole_vectors = "general", False

    def __init__(self, stages: Sequence[Stage]) -> None:
        first, last = stages[0], stages[-1]
        super().__init__(first.name, last.output_shape)
        self.parameters = [parameter for stage in stages for parameter in stage.parameters]
        self.trains, self.stages, self.macs = bool(self.parameters), stages, sum(stage.macs for stage in stages)
        shapes = first.input_shape, last.output_shape
        self.input_layout, self.output_layout = (NHWC if len(shape) == 3 else NC for shape in shapes)

    @classmethod
    def of(cls, sections: Sequence[Section], first: bool) -> General | None:
        section = sections[0]
        return None if isinstance(section.stage, DropoutStage | NormStage | ResidualStage) else cls(section.stages)

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        numbers = self.macs + math.prod(self.stages[0].input_shape) + math.prod(self.shape)
        forward = Work(self.macs, CYCLES * numbers + NUMPY_CYCLES / images)
        return {"forward": forward, "backward": Work(2.0 * self.macs, 2 * forward.cycles)}

    def prepare(self, plan: Layout) -> None:
        plan.parameters.place_plain(*self.parameters)
        self.address = plan.arena.allocate(ctypes.sizeof(ctypes.c_int64) // 4)

    def emit_forward(self, k: Emitter, plan: Layout) -> None:
        self._call(k, back=False)

    def emit_backward(self, k: Emitter, plan: Layout) -> None:
        self._call(k, back=True)

    def _call(self, k: Emitter, back: bool) -> None:
        function = ir.FunctionType(ir.VoidType(), [INDEX] * 5).as_pointer()
        given = [k.builder.ptrtoint(buffer.value(FLOAT), INDEX) for buffer in (k.arena, k.parameters, k.gradients)]
        address = k.builder.load((k.arena + self.address).value(INDEX), align=4)
        k.builder.call(k.builder.inttoptr(address, function), [INDEX(int(back)), k.count, *given])


class Calls:
    """What the general nodes of a program call; it must live as long as that runs.

    Args:
        arenas: the tiles', (tiles, floats), which the addresses are written into.
    """

    def __init__(self, nodes: Sequence[Node], plan: Layout, arenas: np.ndarray) -> None:
        self._kept, self._failures = list[Any](), list[tuple[str, Exception]]()
        for node in nodes:
            if isinstance(node, General):
                called = CALLED(functools.partial(_guarded, self._failures, node.name, _Tiles(node, plan)))
                self._kept.append(called)
                address = ctypes.cast(called, ctypes.c_void_p).value
                at = int(node.address)
                arenas[:, at : at + 2] = np.array([address]).view(np.float32)

    def check(self) -> None:
        """Raise what has failed since the last time, first of all."""
        if self._failures:
            name, error = self._failures[0]
            self._failures.clear()
            if isinstance(error, CnnexpError):
                raise error
            raise NetworkError(f"layer {name}: {type(error).__name__}: {error}") from error


def _guarded(failures: list[tuple[str, Exception]], layer: str, function: Callable[..., None], *given: int) -> None:
    """Call a function of a layer and keep what it raises: nothing goes through compiled code."""
    try:
        function(*given)
    except Exception as error:
        failures.append((layer, error))


class _Tiles:
    """A general node's work on tiles, each with an arena of its own and what is kept from forward to backward."""

    def __init__(self, node: General, plan: Layout) -> None:
        self._node, self._images, self._size = node, plan.arena.images, plan.parameters.size
        self._places = [(parameter, int(plan.parameters.offset(parameter))) for parameter in node.parameters]
        self._chains: dict[int, Chain[np.ndarray]] = {}

    def __call__(self, back: int, count: int, arena: int, parameters: int, gradients: int) -> None:
        node, chain = self._node, self._chain(arena)
        x_shape, y_shape = node.stages[0].input_shape, node.stages[-1].output_shape
        # flat as the network's, but nothing is in it, nor read, beside the layers' own
        flat, gradient = np.empty((2, max((p.offset + p.size for p, _ in self._places), default=0)), np.float32)
        for p, at in self._places:
            flat[p.offset : p.offset + p.size] = _floats(parameters, self._size)[at : at + p.size]
        run = Run(count, flat, gradient, trains=True)
        x = np.ascontiguousarray(_view(node.x, arena, count, x_shape))
        if not back:
            _view(node.y, arena, count, y_shape)[...] = chain.forward(run, x)
            return
        chain.gradient(count)[...] = _view(node.dy, arena, count, y_shape)
        dx = None if node.dx is None else np.empty_like(x)
        chain.backward(run, x, dx)
        if dx is not None:
            _view(node.dx, arena, count, x_shape)[...] = dx
        for p, at in self._places:
            _floats(gradients, self._size)[at : at + p.size] += gradient[p.offset : p.offset + p.size]

    def _chain(self, arena: int) -> Chain[np.ndarray]:
        if arena not in self._chains:
            x = np.zeros((self._images, *self._node.stages[0].input_shape), np.float32)
            dx = None if self._node.dx is None else np.zeros_like(x)
            self._chains[arena] = Chain(NumpyOps(), self._node.stages, self._images, x, dx)
        return self._chains[arena]


def _floats(address: int, size: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_float * size).from_address(address))


def _view(tensor: Tensor | None, arena: int, images: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return what lies in a tensor of rows or images, (images, *shape), of the arena at an address."""
    assert isinstance(tensor, NC)
    first, steps = int(tensor.offset), [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    if first < 0:  # see `Emitter.place`
        first += ctypes.c_int64.from_address(arena).value
    if not tensor.dense:
        first += tensor.halo.top * tensor.row + tensor.halo.left * tensor.column
        steps = [tensor.row, tensor.column, 1]
    strides = [4 * step for step in (tensor.stride, *steps)]
    values = _floats(arena + 4 * first, images * tensor.stride)
    return np.lib.stride_tricks.as_strided(values, (images, *shape), strides)
