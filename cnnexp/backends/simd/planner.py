"""The choice of an algorithm for each layer, by what they cost.

`ALGORITHMS` lists all; each file of that name says what it computes and how. A convolution takes in the ReLU and the
max-pool after it whatever its algorithm, but `depthwise` no pool. Between two layouts stands a reorder, which costs as
well: so the choice is of the whole network's cheapest path, not of each layer's cheapest algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cnnexp import network as net
from cnnexp.backends.simd.algorithms.batch_norm import BatchNormNode
from cnnexp.backends.simd.algorithms.convolution.channels import Channels
from cnnexp.backends.simd.algorithms.convolution.channels_argmax import ChannelsArgmax
from cnnexp.backends.simd.algorithms.convolution.depthwise import Depthwise
from cnnexp.backends.simd.algorithms.convolution.filters import Filters
from cnnexp.backends.simd.algorithms.convolution.filters_fused import FiltersFused
from cnnexp.backends.simd.algorithms.convolution.lanes import Lanes
from cnnexp.backends.simd.algorithms.convolution.lanes_argmax import LanesArgmax
from cnnexp.backends.simd.algorithms.convolution.lanes_pair import LanesPair
from cnnexp.backends.simd.algorithms.convolution.winograd import Winograd
from cnnexp.backends.simd.algorithms.convolution.winograd_argmax import WinogradArgmax
from cnnexp.backends.simd.algorithms.cost import Work
from cnnexp.backends.simd.algorithms.dropout import DropoutNode
from cnnexp.backends.simd.algorithms.elementwise import ElementwiseNode
from cnnexp.backends.simd.algorithms.linear.skinny import Skinny
from cnnexp.backends.simd.algorithms.linear.wide import Wide
from cnnexp.backends.simd.algorithms.node import Node, Section
from cnnexp.backends.simd.algorithms.pool import Pool
from cnnexp.backends.simd.algorithms.reorder import Reorder
from cnnexp.backends.simd.algorithms.residual import Split, Sum
from cnnexp.backends.simd.compiler.emit import Target
from cnnexp.backends.simd.general import General
from cnnexp.backends.simd.layouts import NC, NHWC, Blocked, Tensor, round_up
from cnnexp.errors import ConfigError, did_you_mean
from cnnexp.network import Network, Stage

ALGORITHMS: tuple[type[Node], ...] = (
    *(Channels, Winograd, Lanes, ChannelsArgmax, WinogradArgmax, LanesArgmax, Filters, LanesPair, FiltersFused),
    *(Depthwise, Skinny, Wide, Pool, ElementwiseNode, DropoutNode, BatchNormNode, Split, Sum),
)
"""All of a layer but `General`, for what they do not compute; of two that cost the same the first is taken."""

LARGEST_WINDOW = 4
"""Side of the largest max-pool that a convolution computes along: its code has every pixel of the window in it."""


@dataclass(frozen=True)
class Path:
    """Nodes from the first section on, with what they cost so far.

    Attributes:
        layout, shape: of the last one's output. trained: whether any has parameters.
        splits: layouts where the Residuals begin that have not ended, the innermost last.
    """

    nodes: tuple[Node, ...]
    layout: type[Tensor]
    shape: tuple[int, ...]
    trained: bool = False
    cycles: float = 0.0
    splits: tuple[type[Tensor], ...] = ()

    def then(self, node: Node, target: Target, images: int) -> Path | None:
        """Return the path with a node, None where it cannot come next; a change of layout before it is put in."""
        wanted = self.splits[-1] if isinstance(node, Sum) else node.input_layout
        path = self if node.any_image and wanted is None else self.change(node.name, wanted, target, images)
        return path._and(node, target, images) if node.may_follow(path.trained) else None

    def change(self, name: str, wanted: type[Tensor] | None, target: Target, images: int) -> Path:
        """Return the path with a reorder to the layout; None is any of images. Both NC and NHWC are rows, and stay."""
        if wanted is None and self.layout is NHWC:
            wanted = Blocked
        if wanted is None or wanted is self.layout or not self.nodes:
            return self
        if Blocked not in (self.layout, wanted):
            return replace(self, layout=wanted)
        shape = (math.prod(self.shape),) if wanted is NC else self.shape
        name = f"{name}.{'lanes' if wanted is Blocked else 'rows'}"
        return self._and(Reorder(name, shape, self.layout, wanted), target, images)

    def _and(self, node: Node, target: Target, images: int) -> Path:
        layout = node.output_layout or self.layout
        found = works(node, node.input_layout or layout, target, images, self.trained)
        backward = (self.trained or node.trains) and not target.forward_only
        cycles = self.cycles + sum(work.cycles for name, work in found.items() if backward or name == "forward")
        splits = self.splits
        if isinstance(node, Split):
            splits = (*splits, layout)
        elif isinstance(node, Sum):
            splits = splits[:-1]
        return Path((*self.nodes, node), layout, node.shape, backward, cycles, splits)


def works(node: Node, layout: type[Tensor], target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
    """Return what each of a node's kernels does for an image; with the batch in the lanes, empty lanes cost as well."""
    found = node.work(target, images, needs_dx)
    if layout is not Blocked:
        return found
    filled = round_up(images, target.lanes) / images
    return {name: Work(work.macs, work.cycles * filled, work.tile) for name, work in found.items()}


def choose_nodes(network: Network, target: Target, images: int) -> list[Node]:
    """Return the nodes of the path that costs least, for tiles of so many images.

    Raises:
        ConfigError: `target.forced` names a layer that there is not, or an algorithm that cannot compute it.
    """
    sections = split(network.stages)
    forced = dict(target.forced)
    for name in forced:
        if name not in (names := [section.stage.name for section in sections]):
            raise ConfigError(f"backend.algorithms: no layer {name!r} to force; there are {', '.join(names)}")
    start = Path((), Blocked if len(network.input_shape) == 3 else NC, network.input_shape)
    paths: list[list[Path]] = [[start], *([] for _ in sections)]
    for at, section in enumerate(sections):
        for node in allowed(sections[at:], target, forced, first=at == 0):
            possible = [longer for path in paths[at] if (longer := path.then(node, target, images))]
            if possible:
                paths[at + node.spans].append(min(possible, key=lambda path: path.cycles))
        if not any(paths[at + 1 :]):
            name = section.stage.name
            names, wanted = [node.algorithm for node in candidates([section], first=True)], forced.get(name, "")
            raise ConfigError(
                f"backend.algorithms: {name} cannot be computed by {wanted!r} here; there are {', '.join(names)}, "
                f"where registers and the layers around allow{did_you_mean(wanted, names)}"
            )
    ends = [path.change("scores", NC, target, images) for path in paths[-1]]
    return list(min(ends, key=lambda path: path.cycles).nodes)


def allowed(sections: Sequence[Section], target: Target, forced: Mapping[str, str], first: bool) -> list[Node]:
    """Return the nodes that the registers hold and nothing forbids."""
    name, *after = (section.stage.name for section in sections)
    found = [node for node in candidates(sections, first) if node.fits(target)]
    if not found or forced.get(name) == General.algorithm:
        found += candidates(sections, first, (General,))
    found = [node for node in found if not set(after[: node.spans - 1]) & set(forced)]
    return [node for node in found if forced.get(name, node.algorithm) == node.algorithm]


def candidates(sections: Sequence[Section], first: bool, algorithms: Sequence[type[Node]] | None = None) -> list[Node]:
    """Return a node for each algorithm that computes the first of the sections, alone or with those after it."""
    nodes = [node for algorithm in algorithms or ALGORITHMS if (node := algorithm.of(sections, first))]
    for node in nodes:
        node.layers = tuple(name for section in sections[: node.spans] for name in section.names)
    return nodes


def split(network: Sequence[Stage]) -> list[Section]:
    """Group stages into what is computed at once.

    A `Flatten` is no stage of its own: rows are flat already, and in lanes only a change of layout flattens. A Residual
    is a section where it begins, those of its layers, and one where it ends.
    """
    stages, sections = list(network), list[Section]()
    while stages:
        stage = stages.pop(0)
        if isinstance(stage, net.FlattenStage):
            continue
        taken: list[Stage] = [stage]
        if isinstance(stage, net.ConvStage | net.NormStage):
            taken += _follow(stages, tiled=isinstance(stage, net.NormStage))
        elif isinstance(stage, net.LinearStage | net.ResidualStage):
            taken += [stages.pop(0)] if stages and isinstance(stages[0].layer, net.ReLU) else []
        if isinstance(stage, net.ResidualStage):
            sections += [Section((stage,), False, opens=True), *split(stage.stages)]
        sections.append(Section(tuple(taken), bool(stages) and isinstance(stages[0], net.FlattenStage)))
    return sections


def _follow(following: list[Stage], tiled: bool) -> list[Stage]:
    """Take a ReLU and a max-pool, in either order, that a convolution can compute along; `tiled`: a normalization."""
    taken: list[Stage] = []
    while following:
        kind = type(following[0].layer)
        fits = kind is net.ReLU or _fits_windows(following[0], tiled)
        if not fits or any(isinstance(stage.layer, kind) for stage in taken):
            break
        taken.append(following.pop(0))
    return taken


def _fits_windows(pool: Stage, tiled: bool) -> bool:
    """Whether a stage is a max-pool of small windows, apart, inside the image; `tiled`: of four, with every pixel."""
    if not isinstance(pool, net.PoolStage) or not isinstance(pool.layer, net.MaxPool2d) or pool.window.padded:
        return False
    if tiled:
        return pool.window.size == pool.window.stride == 2 and not any(count % 2 for count in pool.input_shape[:2])
    return pool.window.size <= min(LARGEST_WINDOW, pool.window.stride)
