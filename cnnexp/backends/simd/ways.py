"""The ways there are to compute each layer, and the choice between them by what they cost.

    lanes, lanes-argmax         convolution with the batch in the lanes; gradients through all outputs, or through the
                                argmax of the max-pool after it alone
    channels, channels-argmax   likewise with channels in the lanes
    winograd, winograd-argmax   likewise, 3 x 3 taps by Winograd's transformation
    lanes-pair                  a first convolution and the one after it, gradients through the argmax of both
    filters, filters-fused      a first convolution with filters in the lanes; alone, or with the linear layer after it
    skinny, wide                linear layers of few outputs, of many

A convolution takes in the ReLU and the max-pool after it whatever its way. Between two layouts stands a change, which
costs as well: so the choice is of the whole network's cheapest path, not of each layer's cheapest way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from cnnexp.backends.simd.convolutions import ChannelConvolution, Convolution, FilterConvolution
from cnnexp.backends.simd.cost import Work, total
from cnnexp.backends.simd.dense import FilterClassifier, SkinnyDense, WideDense
from cnnexp.backends.simd.emit import Target
from cnnexp.backends.simd.layout import Grid, Image, Matrix, Ring, round_up
from cnnexp.backends.simd.nodes import Activation, Node, Pool, Tensor, ToImages, ToLanes, ToRows
from cnnexp.backends.simd.pair import ConvolutionPair
from cnnexp.backends.simd.winograd import WinogradConvolution
from cnnexp.errors import ConfigError, did_you_mean
from cnnexp.network import (
    ConvStage,
    DropoutStage,
    ElementwiseStage,
    FlattenStage,
    LinearStage,
    MaxPool2d,
    Network,
    NormStage,
    PoolStage,
    ReLU,
    ResidualStage,
    Stage,
)

LARGEST_WINDOW = 4
"""Side of the largest max-pool that a convolution computes along: its code has every pixel of the window in it."""


@dataclass(frozen=True)
class Section:
    """Stages that are computed at once.

    Attributes:
        stages: them, without the flattening among or after them. flattened: whether a `Flatten` comes after.
    """

    stages: tuple[Stage, ...]
    flattened: bool

    @property
    def stage(self) -> Stage:
        """The one that its node bears the name of."""
        return self.stages[0]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self.stages)

    @property
    def rectify(self) -> bool:
        return any(isinstance(stage.layer, ReLU) for stage in self.stages[1:])

    @property
    def pool(self) -> PoolStage | None:
        return next((stage for stage in self.stages[1:] if isinstance(stage, PoolStage)), None)


@dataclass(frozen=True)
class Path:
    """Nodes from the first section on, with what they cost so far.

    Attributes:
        layout, shape: of the last one's output. trained: whether any has parameters.
        ring: the room around the gradient of the last one's output, None where there is no node.
    """

    nodes: tuple[Node, ...]
    layout: type[Tensor]
    shape: tuple[int, ...]
    trained: bool = False
    ring: Ring | None = None
    cycles: float = 0.0

    def then(self, node: Node, target: Target, images: int) -> Path | None:
        """Return the path with a node, None where it cannot come next; a change of layout before it is put in."""
        path = self.change(node.name, node.wants, target, images)
        if not node.may_follow(path.ring, path.trained):
            return None
        return path._and(node, target, images)

    def change(self, name: str, wanted: type[Tensor] | None, target: Target, images: int) -> Path:
        """Return the path to a layout, None for any that is not an image; images and matrices are both in rows."""
        if wanted is None and self.layout is Image:
            wanted = Grid
        if wanted is None or wanted is self.layout or not self.nodes:
            return self
        if self.layout is Image and wanted is Grid:
            return self._and(ToLanes(f"{name}.lanes", self.shape), target, images)
        if self.layout is Grid:
            if wanted is Image:
                return self._and(ToImages(f"{name}.rows", self.shape), target, images)
            return self._and(ToRows(f"{name}.rows", (math.prod(self.shape),)), target, images)
        return replace(self, layout=wanted)

    def _and(self, node: Node, target: Target, images: int) -> Path:
        layout = node.makes or self.layout
        found = works(node, node.wants or layout, target, images, self.trained)
        backward = self.trained or node.trains
        cycles = self.cycles + total(work for name, work in found.items() if backward or name == "forward")
        ring = node.gradient_ring(self.trained)
        return Path((*self.nodes, node), layout, node.shape, backward, ring, cycles)


def works(node: Node, layout: type[Tensor], target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
    """Return what each of a node's kernels does for an image; with the batch in the lanes, empty lanes cost as well."""
    found = node.work(target, images, needs_dx)
    if layout is not Grid:
        return found
    filled = round_up(images, target.lanes) / images
    return {name: Work(work.macs, work.cycles * filled, work.tile) for name, work in found.items()}


def choose_nodes(network: Network, target: Target, images: int) -> list[Node]:
    """Return the nodes of the path that costs least.

    Args:
        images: of a tile.

    Raises:
        ConfigError: `target.forced` names a layer that there is not, or a way that it has not.
    """
    sections = split(network)
    forced = dict(target.forced)
    for name in forced:
        if name not in (names := [section.stage.name for section in sections]):
            raise ConfigError(f"backend.ways: no layer {name!r} to force; there are {', '.join(names)}")
    start = Path((), Grid if len(network.input_shape) == 3 else Matrix, network.input_shape)
    paths: list[list[Path]] = [[start], *([] for _ in sections)]
    for at, section in enumerate(sections):
        for node, spans in allowed(sections[at:], target, forced, first=at == 0):
            found = [path.then(node, target, images) for path in paths[at]]
            possible = [path for path in found if path is not None]
            if possible:
                paths[at + spans].append(min(possible, key=lambda path: path.cycles))
        if not any(paths[at + 1 :]):
            raise _no_way(section, forced)
    ends = [path.change("scores", Matrix, target, images) for path in paths[-1]]
    return list(min(ends, key=lambda path: path.cycles).nodes)


def allowed(
    sections: Sequence[Section], target: Target, forced: Mapping[str, str], first: bool
) -> list[tuple[Node, int]]:
    """Return the nodes that the registers hold and nothing forbids, with how many sections each one spans."""
    name, *after = (section.stage.name for section in sections)
    found = [(node, spans) for node, spans in candidates(sections, first) if node.fits(target)]
    found = [(node, spans) for node, spans in found if not set(after[: spans - 1]) & set(forced)]
    return [(node, spans) for node, spans in found if forced.get(name, node.way) == node.way]


def candidates(sections: Sequence[Section], first: bool) -> list[tuple[Node, int]]:
    """Return a node for each way to compute the first of the sections, with how many of them it spans."""
    section = sections[0]
    found = [(node, 1) for node in _nodes(section, first)]
    after = sections[1] if len(sections) > 1 else None
    opens = next((node for node, _ in found if isinstance(node, FilterConvolution)), None)
    if first and after is not None and section.rectify and not section.pool:
        stage, pool = section.stage, after.pool
        if isinstance(stage, ConvStage) and isinstance(after.stage, ConvStage) and pool and pool.window.size > 1:
            before = Convolution(stage, rectify=True, pool=None)
            pooled = Convolution(after.stage, after.rectify, pool, argmax=True)
            before.layers, pooled.layers = section.names, after.names
            found.append((ConvolutionPair(before, pooled), 2))
    if opens is not None and after is not None and isinstance(after.stage, LinearStage):
        conv = FilterConvolution(opens.stage, opens.rectify, opens.pool)
        dense = SkinnyDense(after.stage, after.rectify)
        conv.layers, dense.layers = section.names, after.names
        found.append((FilterClassifier(conv, dense), 2))
    for node, spans in found:
        node.layers = tuple(name for taken in sections[:spans] for name in taken.names)
    return found


def _nodes(section: Section, first: bool) -> list[Node]:
    """Return a node for each way that takes no more than the section."""
    stage, rectify, pool = section.stage, section.rectify, section.pool
    match stage:
        case ConvStage():
            kinds = ChannelConvolution, WinogradConvolution, Convolution
            found: list[Node] = [kind(stage, rectify, pool) for kind in kinds]
            if pool and pool.window.size > 1:
                found += [kind(stage, rectify, pool, argmax=True) for kind in kinds]
            if first and pool and section.flattened:
                found.append(FilterConvolution(stage, rectify, pool))
            return found
        case LinearStage():
            return [SkinnyDense(stage, rectify), WideDense(stage, rectify)]
        case PoolStage():
            return [Pool(stage)]
        case ElementwiseStage():
            return [Activation(stage, stage.input_shape)]
        case FlattenStage() | DropoutStage() | NormStage() | ResidualStage():
            raise TypeError(f"{stage.name}: no node computes it; `suits` tells")
        case _:
            assert_never(stage)


def split(network: Network) -> list[Section]:
    """Group the stages into what is computed at once.

    A `Flatten` is no stage of its own: rows are flat already, and in lanes only a change of layout flattens.
    """
    stages, sections = list(network.stages), []
    while stages:
        stage = stages.pop(0)
        if isinstance(stage, FlattenStage):
            continue
        taken: list[Stage] = [stage]
        if isinstance(stage, ConvStage):
            taken += _follow(stages)
        elif isinstance(stage, LinearStage) and stages and isinstance(stages[0].layer, ReLU):
            taken.append(stages.pop(0))
        sections.append(Section(tuple(taken), bool(stages) and isinstance(stages[0], FlattenStage)))
    return sections


def _follow(following: list[Stage]) -> list[Stage]:
    """Take a ReLU and a max-pool, in either order, that a convolution can compute along."""
    taken: list[Stage] = []
    while following:
        kind = type(following[0].layer)
        fits = kind is ReLU or _fits_windows(following[0])
        if not fits or any(isinstance(stage.layer, kind) for stage in taken):
            break
        taken.append(following.pop(0))
    return taken


def _fits_windows(pool: Stage) -> bool:
    """Whether a stage is a max-pool whose windows are small, do not overlap and do not reach past the image."""
    if not isinstance(pool, PoolStage) or not isinstance(pool.layer, MaxPool2d) or pool.window.padded:
        return False
    return pool.window.size <= min(LARGEST_WINDOW, pool.window.stride)


def _no_way(section: Section, forced: Mapping[str, str]) -> ConfigError:
    name = section.stage.name
    ways = [node.way for node, _ in candidates([section], first=True)]
    wanted = forced.get(name, "")
    return ConfigError(
        f"backend.ways: {name} cannot be computed by {wanted!r} here; there are {', '.join(ways)}, "
        f"where registers and the layers around allow{did_you_mean(wanted, ways)}"
    )
