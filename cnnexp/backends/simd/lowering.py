"""From a network to kernels: `Plan` gives the nodes of `planner` room in the arena, and asks them for their kernels."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import pickle
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from cnnexp.backends.parts import BACKWARD, FORWARD, Part
from cnnexp.backends.simd.algorithms.batch_norm import AHEAD, BatchNormNode
from cnnexp.backends.simd.algorithms.convolution.base import ConvolutionNode
from cnnexp.backends.simd.algorithms.convolution.winograd import Winograd
from cnnexp.backends.simd.algorithms.cost import MACS, Work
from cnnexp.backends.simd.algorithms.dropout import DropoutNode
from cnnexp.backends.simd.algorithms.elementwise import ElementwiseNode
from cnnexp.backends.simd.algorithms.gather import gather_lanes, gather_rows
from cnnexp.backends.simd.algorithms.linear.dense import Dense
from cnnexp.backends.simd.algorithms.linear.together import Together
from cnnexp.backends.simd.algorithms.linear.wide import Wide
from cnnexp.backends.simd.algorithms.node import Node
from cnnexp.backends.simd.algorithms.residual import Split, Sum
from cnnexp.backends.simd.algorithms.update import own_arena
from cnnexp.backends.simd.compiler.clocks import Clocks
from cnnexp.backends.simd.compiler.emit import BYTE, FLOAT, INDEX, Emitter, Kernel, Kernels, Offset, Target
from cnnexp.backends.simd.general import General
from cnnexp.backends.simd.layouts import NC, NHWC, Arena, Blocked, Halo, Parameters, Tensor, clear_halo
from cnnexp.backends.simd.planner import choose_nodes, works
from cnnexp.network import Network, Parameter, Shape, Stage
from cnnexp.optimizers import Optimizer

LAYOUTS = {Blocked: "images in lanes", NHWC: "channels last", NC: "an image a row"}

STEP = {
    "gather": Part("gather", ("batch",), "gather"),
    "loss": Part(FORWARD, ("loss",), "loss"),
    "wait": Part("wait", ("threads",), "wait"),
    "update": Part("update", ("parameters",), "update"),
}
"""The parts of a step besides the layers', by name: `wait` is for the other threads."""

MANY_TILES = 8
"""Tiles of a share from which on two sums of three are made again, not one of two: 5 % less memory, 1 % slower."""
FEWEST_IN_A_TILE = 4
"""Images that a tile has room for at least where the program predicts, which takes as many at once."""

Steps = list[tuple[int, int]]
"""The first and the last step that use a tensor, every time. A step is a node's forward or backward pass, in order."""

Rooms = dict[tuple[object, ...], list[tuple[Tensor, Steps]]]
"""Tensors with the steps that use each, by what those must be like that may lie there at other steps."""


class Plan:
    """A network laid out in an arena, with the kernels that run it.

    Attributes:
        nodes: first to last. target, arena, parameters, clocks, share, owns: see `Layout`.
        least: the least share that has this plan.
        vectors: of images that go through the layers at once; a part of one where no kernel takes it whole.
        apart: floats of the weights that no tile reads, but all of a share together.
        step_parts: the numbers of the parts in `STEP`.
        scores, d_scores: output of the network and its gradient, one image per row.
        dropouts: the nodes that draw. draws: kernels that begin to, of a tile and of all: see `DropoutNode.draw`.
        gather: kernels that bring images in, by the type of their pixels (`uint8`, `float32`).
        forward, backward: kernels in order. setup: of those that predict, what runs once for the same parameters.
        gradients: what adds to the gradients of owned weights, after `backward`.
        updates: what takes the step of owned weights instead, once all threads have come through `backward`.
        seams: where a training step is cut, in order: as many in the forward pass as in the backward pass.
        brought: what kernels bring near of the next tile, by the names of node and kernel.
    """

    def __init__(self, network: Network, target: Target, vectors: float, share: int) -> None:
        self.target, self.vectors = target, vectors
        groups, most = math.ceil(vectors), max(1, int(vectors * target.lanes))
        self.share = min(share, most)
        nodes = self.nodes = choose_nodes(network, target, self.share)
        for node in nodes:
            # a part of Winograd's needs room of its own, which a step does not give it
            if node.in_parts and target.parts > 1 and (target.forward_only or not isinstance(node, Winograd)):
                cycles = works(node, node.input_layout or NC, target, self.share, False)["forward"].cycles
                node.parts = target.parts if cycles * self.share > target.part_cycles else 1
        self._cuts = [i for i, node in enumerate(nodes) if node.seams(self)]
        whole = any(node.whole_vectors for node in nodes)
        most = groups * target.lanes if whole else most
        self._chained, self.least = (2, MANY_TILES * most) if share >= MANY_TILES * most else (1, min(share, most + 1))
        self.share, self.owns = min(share, most), share <= most
        few = FEWEST_IN_A_TILE if target.forward_only else 1
        images = most if whole else max(self.share, few)
        self.arena, self.parameters = Arena(target.lanes, groups, images), Parameters(target.lanes)
        self.clocks, self._again = Clocks(target), dict[int, list[Node]]()
        self._put_together(share)
        self._allocate(network, nodes)
        for node in nodes:
            node.prepare(self._of(node))
        self.arena.shared = self.arena.allocate(self.arena.needed, scratch=bool(self._cuts))
        self.brought = self._bring() if self._cuts and not self.owns else {}
        gather = partial(gather_lanes if isinstance(nodes[0].x, Blocked) else gather_rows, y=nodes[0].x)
        self.gather: dict[str, Kernels] = {
            name: [("gather", partial(gather, pixel=kind))] for name, kind in (("uint8", BYTE), ("float32", FLOAT))
        }
        self.dropouts = [node for node in nodes if isinstance(node, DropoutNode)]
        self.draws: list[Kernels] = [[], []]
        for i, node in enumerate(self.dropouts):
            self.draws[self._of(node) is not self].append((f"{node.name}.draw", partial(node.draw, number=i)))
        self.setup = self._named(FORWARD, nodes, lambda node: node.setup(self)) if target.forward_only else []
        self.scores, self.d_scores = cast(NC, nodes[-1].y), cast(NC, nodes[-1].dy)
        trained, self.forward, self.backward = nodes[self._first_trained :], Kernels(), Kernels()
        for i, node in enumerate(nodes):
            self.forward += self._made_before(FORWARD, i)
            self.forward += self._named(FORWARD, [node], lambda node: node.forward(self._of(node)))
        for node in reversed(trained):
            self.backward += self._made_before(BACKWARD, self._backward(nodes.index(node)))
            self.backward += self._named(BACKWARD, [node], lambda node: node.backward(self._of(node)))
        owned, weights = [node for node in trained if node.owns(self)], "backward_weights"
        self.gradients = self._named(BACKWARD, owned, lambda n: [(weights, partial(n.backward_weights, plan=self))])
        self._updates = self._named(BACKWARD, owned, lambda n: [("update", partial(n.update, plan=self))])
        self.seams = [seam for node in nodes for seam in node.seams(self)[:1]]
        self.seams += [seam for node in reversed(trained) for seam in node.seams(self)[1:]]
        self.step_parts = {name: self.clocks.part(part) for name, part in STEP.items()}
        self.clocks.place(self.arena.allocate)

    def explain(self, threads: int) -> list[Part]:
        """Return a row for every kernel of a step, in order."""
        most, rows, known = MACS * self.target.lanes, list[Part](), dict[str, tuple[Node, Work]]()
        for node in self.nodes:
            layout = node.input_layout or type(node.x)
            found = works(node, layout, self.target, self._of(node).share, node.dx is not None)
            known |= {f"{node.name}.{kernel}": (node, work) for kernel, work in found.items()}
        for what, kernels in ((FORWARD, self.forward), (BACKWARD, self.backward), (BACKWARD, self.gradients)):
            for name, _ in kernels:
                node, work = known[re.sub(r"again$", "forward", name)]
                part = node.part(self, what, name.removeprefix(f"{node.name}."))
                rows.append(
                    replace(
                        part, kernel=name, layers=node.layers, algorithm=node.algorithm,
                        layout=LAYOUTS[node.input_layout or type(node.x)], tile=work.tile, threads=threads,
                        macs=round(work.macs), cycles=round(work.cycles), share=work.macs / (work.cycles * most),
                    )
                )  # fmt: skip
        return rows

    def _put_together(self, share: int) -> None:
        """Have the linear layers behind the last seam take all images of a share at once, not by tiles."""
        nodes, self._all, self._behind, self.apart = self.nodes, self, list[Node](), 0
        after = range(self._cuts[-1] + 1, len(nodes)) if self._cuts and not self.owns else ()
        first = next((i for i in after if isinstance(nodes[i], Wide)), None)
        if first and not any(isinstance(node, Split | Sum | General) for node in nodes[first:]):
            self._behind = nodes[first:]
            self.apart = sum(node.stage.weight.size for node in self._behind if isinstance(node, Dense))
            nodes.insert(first, Together(f"{nodes[first].name}.together", (math.prod(nodes[first - 1].shape),)))
            self._cuts.append(first)
            self._all, self.least = copy.copy(self), share
            self._all.arena, self._all.share = self.arena.together(share), share

    def _of(self, node: Node) -> Plan:
        """Return this plan, or for layers that take all images of a share at once what they see of it."""
        return self._all if node in self._behind else self

    @property
    def between_seams(self) -> int:
        """Bytes that a tile needs near between two seams of the backward pass, with those brought for the next tile.

        Of a convolution three tensors as its input and three as its output: x, dy and dx of the normalization behind
        it, its own dx, and of the one before it x and y, which is made again.
        """
        floats = self.arena.floats
        near = {n.name: 3 * (floats(n.x) + floats(n.y)) for n in self.nodes if isinstance(n, ConvolutionNode)}
        for (name, kernel), brought in self.brought.items():
            near[name] += sum(map(floats, brought)) if kernel.startswith(BACKWARD) else 0
        return 4 * max(near.values(), default=0)

    @property
    def _first_trained(self) -> int:
        trained = (i for i, node in enumerate(self.nodes) if node.trains and not self.target.forward_only)
        return next(trained, len(self.nodes))

    def updates(self, optimizer: Optimizer) -> Kernels:
        return [(name, partial(emit, optimizer=optimizer)) for name, emit in self._updates]

    def _named(
        self, what: str, nodes: Iterable[Node], kernels_of: Callable[[Node], Sequence[tuple[str, Callable[..., None]]]]
    ) -> list[tuple[str, Callable[..., None]]]:
        """Return the kernels of the nodes under their names, each charged to its part of the step."""
        return [
            (f"{node.name}.{name}", Kernel(self._clocked(node, what, name, emit), key, parts))
            for node in nodes
            for name, emit in kernels_of(node)
            for key in [partial(self._key, node, what, name)]
            for parts in [node.parts if name in node.in_parts else 1]
        ]

    def _made_before(self, what: str, step: int) -> Kernels:
        """Return the kernels that make tensors again for a step."""
        return self._named(what, self._again.get(step, ()), lambda node: [("again", node.forward(self)[-1][1])])

    def _bring(self) -> dict[tuple[str, str], list[Tensor]]:
        """Return what the convolutions' kernels bring near of the next tile, by the names of node and kernel.

        What the normalizations before them read, which has left the caches: else memory waits while a convolution
        computes, and then they for memory. One thread, batch 128, Zen 5: MobileNet takes 0.92 of the time. Not by
        Winograd's kernels, which gain nothing by it.
        """
        found: dict[tuple[str, str], list[Tensor]] = {}
        for what, nodes in ((FORWARD, self.nodes), (BACKWARD, self.nodes[::-1])):
            read: list[Tensor] = []
            for node in nodes:
                if isinstance(node, BatchNormNode):
                    read = [node.x] if what == FORWARD else [node.x, node.dy]
                elif isinstance(node, ConvolutionNode) and not isinstance(node, Winograd) and read:
                    passes = node.forward(self) if what == FORWARD else node.backward(self)
                    kernels = [name for name, _ in passes if name.startswith(what)]
                    again = self._again.get(self._backward(self.nodes.index(node)), ()) if what == BACKWARD else ()
                    read += [other.x for other in again if isinstance(other, BatchNormNode)]
                    kept = [x for x in read if x.offset >= 0]
                    found |= {(node.name, kernel): kept[i :: len(kernels)] for i, kernel in enumerate(kernels)}
                    read = []
        return found

    def _key(self, node: Node, what: str, name: str) -> tuple[bytes, list[Offset]]:
        """Return what the code of a kernel follows from, and what differs between equal nodes: see `Kernel`."""
        state = _NodeState(self, text := io.BytesIO())
        with contextlib.suppress(AttributeError, TypeError, pickle.PicklingError):
            state.dump((node, what, name, self._of(node).share, self.brought.get((node.name, name), [])))
            return text.getvalue(), state.offsets
        return b"", []

    def _clocked(self, node: Node, what: str, name: str, emit: Callable[..., None]) -> Callable[..., None]:
        number, brought = self.clocks.part(node.part(self, what, name)), self.brought.get((node.name, name), [])
        clears = self.target.forward_only and name == FORWARD and node.y.offset < 0 and not node.y.dense

        def run(k: Emitter, **options: Optimizer) -> None:
            if brought and len(k.buffers) > 3:  # by itself, as the benchmark has it, a kernel has no next tile
                far = k.builder.load((k.buffers[3] + AHEAD).value(INDEX))
                k.bring([((k.arena + x.offset).at(far), self.arena.floats(x)) for x in brought])
            if clears:
                clear_halo(k, node.y)
            emit(k, **options)
            if self.clocks.on:
                self.clocks.charge(k, number, own_arena(k, self.arena.stride) if options else k.arena)

        return run

    def _allocate(self, network: Network, nodes: list[Node]) -> None:
        """Give every node its input, output and gradients."""
        flat = len(network.input_shape) == 1 or nodes[0].input_layout is NC
        shape = (math.prod(network.input_shape),) if flat else network.input_shape
        halo, self._rows = _reader(nodes, -1).input_halo(), self.arena
        x = self._tensor(NC if flat else nodes[0].input_layout or Blocked, shape, halo)
        first, dx, rooms = self._first_trained, cast(Tensor | None, None), Rooms()
        splits: list[Split] = []
        for node in nodes:
            if isinstance(node, Split):
                splits.append(node)
            elif isinstance(node, Sum):
                node.split = splits.pop()
                node.split.sum = node
        for i, node in enumerate(nodes):
            node.x, node.dx = x, dx
            if self._all is not self and i >= self._cuts[-1]:  # what the loss reads and writes lies in an arena
                self._rows = self._all.arena if i + 1 < len(nodes) else self.arena.together(self._all.share, False)
            kind = node.output_layout or type(x)
            if isinstance(node, Split):
                node.y, node.dy = _like(x, kind), _like(dx, kind)
                x, dx = node.y, node.dy
                continue
            # in lanes nothing flattens but a change of layout: what is elementwise after a Flatten keeps the image
            shape = x.shape if isinstance(node, ElementwiseNode) and isinstance(x, Blocked) else node.shape
            halo = _reader(nodes, i).input_halo() if i + 1 < len(nodes) else Halo()
            node.y = self._room(rooms, kind, shape, halo, self._steps_of_y(nodes, i))
            x, dx, node.dy = node.y, None, node.y  # in `predict` nobody looks for a gradient
            if i >= first:
                flat = i + 1 == len(nodes) or nodes[i + 1].input_layout is NC
                halo = Halo() if flat else node.gradient_halo(i > first)
                if self._hands_on(nodes, i):
                    continue
                used = None  # the loss writes the last one, `Together` all tiles': in the arena, like the scores
                if i + 1 < len(nodes) and not node.owns(self) and not isinstance(nodes[i + 1], Together):
                    used = [(self._backward(nodes.index(_reader(nodes, i))), self._backward(_start(nodes, i)))]
                dx = node.dy = self._room(rooms, kind, shape, halo, used)
                if i and self._hands_on(nodes, i - 1):
                    nodes[i - 1].dy = node.dx = node.dy
                if i + 1 < len(nodes):
                    nodes[i + 1].input_rectified = node.dy_rectified = node.rectify and nodes[i + 1].rectifies_dx

    def _hands_on(self, nodes: list[Node], i: int) -> bool:
        """Whether a node's dy is that of the sum after it: the node leaves it as it is, who reads the sum rectifies."""
        after = nodes[i + 1] if i + 1 < len(nodes) else None
        if not isinstance(nodes[i], BatchNormNode) or not isinstance(after, Sum):
            return False
        return not after.rectify or (i + 2 < len(nodes) and nodes[i + 2].rectifies_dx)

    def _backward(self, i: int) -> int:
        """Return the step that is a node's backward pass."""
        return 2 * len(self.nodes) - 1 - i

    def _steps_of_y(self, nodes: list[Node], i: int) -> Steps | None:
        """Return the steps in which a node's output must exist, its room another's in between; None if it has its own.

        Where a share is many tiles, outputs of normalizations and half the sums or more are made again in the backward
        pass, not kept; `_again` gets these steps here.
        """
        if i + 1 == len(nodes) or ((self._cuts or self.target.forward_only) and _reader(nodes, i).input_layout is NC):
            return None  # what rounds up a row must stay 0
        if _reader(nodes, i).owns(self):
            return None  # all threads read it, once all are through the backward pass
        node, last, trained = nodes[i], i + 1, nodes.index(_reader(nodes, i)) >= self._first_trained
        if isinstance(split := nodes[last], Split):  # the sum where it ends reads this, too
            last = nodes.index(split.sum)
        if not trained or not (node.keeps_y or nodes[i + 1].keeps_x or last > i + 1):
            return [(i, last), *((step, step) for step in self._made_again(nodes, i + 1))]
        if not self._cuts:
            return None
        if isinstance(node, BatchNormNode) and not self.owns and last == i + 1 and last not in self._cuts:
            self._again[self._backward(last)] = [node]
            return [(i, last), (self._backward(last), self._backward(last))]
        if again := self._made_again(nodes, i):
            self._again |= dict.fromkeys(again[:2], self._chain(nodes, i))
            return [(i, i + 2), (again[1], again[1] + 1), *((step, step) for step in again)]
        return [(i, self._backward(_start(nodes, i) if node.keeps_y or last > i + 1 else last))]

    def _made_again(self, nodes: list[Node], i: int) -> list[int]:
        """Return the steps for which a sum is made again; none if it is kept.

        Where the sum after it takes it and where a layer goes back; then those for which the sum after it is.
        """
        if not self._chain(nodes, i):
            return []
        after = nodes.index(cast(Split, nodes[i + 1]).sum)
        longer = len(self._chain(nodes, after)) > len(self._chain(nodes, i))
        return [after, self._backward(i + 2), *(self._made_again(nodes, after) if longer else ())]

    def _chain(self, nodes: list[Node], i: int) -> list[Node]:
        """Return what makes a sum again, of a tensor that is kept: a sum or two, each of a normalization."""
        node, after = nodes[i], nodes[i + 1 : i + 3]
        if self.owns or not self._cuts or not isinstance(node, Sum) or not isinstance(nodes[i - 1], BatchNormNode):
            return []
        if [isinstance(reader, Split) for reader in after] != [True, False] or i + 2 in self._cuts:
            return []
        before = self._chain(nodes, nodes.index(node.split) - 1)
        return [*before, nodes[i - 1], node] if len(before) < 2 * self._chained else []

    def _room(self, rooms: Rooms, kind: type[Tensor], shape: Shape, halo: Halo, used: Steps | None) -> Tensor:
        """Return a tensor that is used in these steps: where another one lies that is not used then, if there is.

        Where a halo keeps its values that is one just like it; so it is in a step that is not cut, whose tile is small.
        Where the program predicts, whoever writes a tensor clears its halo, and any room does.
        """
        if used is None or kind is NC:
            return self._tensor(kind, shape, halo)
        # a node with seams reads its input and dy on both sides of them
        seams = [step for cut in self._cuts for step in (cut, self._backward(cut))]
        scratch = bool(seams) and not any(first < step <= last for first, last in used for step in seams)
        wanted = self._tensor(kind, shape, halo, scratch, Offset(0))
        if self.target.forward_only and not halo.value:
            return replace(wanted, offset=self.arena.reuse(self.arena.floats(wanted), *used[0]))
        alike = (scratch,) if self._cuts and halo == Halo() else (kind, shape, halo, scratch)
        for tensor, others in rooms.setdefault(alike, []):
            is_free = all(until < first or last < start for first, last in others for start, until in used)
            if is_free and self.arena.floats(wanted) <= self.arena.floats(tensor):
                others.extend(used)
                return replace(wanted, offset=tensor.offset)
        tensor = self._tensor(kind, shape, halo, scratch)
        rooms[alike].append((tensor, [*used]))
        return tensor

    def _tensor(
        self, kind: type[Tensor], shape: Shape, halo: Halo, scratch: bool = False, at: Offset | None = None
    ) -> Tensor:
        if kind is NC:
            return self._rows.nc(math.prod(shape))
        image = shape if len(shape) == 3 else (1, 1, *shape)
        return (self.arena.nhwc if kind is NHWC else self.arena.blocked)(image, halo, scratch, at)


class _NodeState(pickle.Pickler):
    """Writes all that a node holds, but for names and for offsets, which are counted: equal layers give equal bytes.

    Attributes:
        offsets: those met, in the order of their first.
    """

    def __init__(self, plan: Plan, file: io.BytesIO) -> None:
        super().__init__(file)
        self.fast = True  # what is equal is written alike, whether or not it is the same
        self._parameters, self.offsets, self._nodes = plan.parameters, [plan.arena.shared], list[object]()

    def persistent_id(self, thing: object) -> object:
        if isinstance(thing, Parameter):
            return thing.shape, self._number(self._parameters.offset(thing))
        if isinstance(thing, Offset):
            return self._number(thing), thing < 0
        if isinstance(thing, Node):  # the ends of a Residual name each other
            if thing in self._nodes:
                return self._nodes.index(thing)
            self._nodes.append(thing)
        return type(thing).__name__ if isinstance(thing, Arena | Parameters | Plan) else None

    def reducer_override(self, thing: object) -> Any:
        if isinstance(thing, Node | Stage):
            state = {name: value for name, value in vars(thing).items() if name not in ("name", "layers", "running")}
            return object.__new__, (type(thing),), state
        return NotImplemented

    def _number(self, offset: Offset) -> int:
        if offset not in self.offsets:
            self.offsets.append(offset)
        return self.offsets.index(offset)


def _reader(nodes: list[Node], at: int) -> Node:
    """Return the first node after one that reads its output: where a Residual begins nothing does."""
    return next(node for node in nodes[at + 1 :] if not isinstance(node, Split))


def _start(nodes: list[Node], at: int) -> int:
    """Return the node whose backward pass is the last that reads a node's output and its gradient."""
    node = nodes[at]
    return nodes.index(node.split) if isinstance(node, Sum) else at


def _like(x: Tensor | None, kind: type[Tensor]) -> Tensor:
    """Return a tensor as it is, or a dense image as the row that it is."""
    if kind is NC and isinstance(x, NHWC):
        return NC(x.offset, (x.size,), x.stride, width=x.width)
    return cast(Tensor, x)
