"""What all algorithms have: the layers that they compute at once, and the kernels that do it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Generic, TypeVar

from cnnexp.backends.parts import BACKWARD, FOLLOWED, Part
from cnnexp.backends.simd.algorithms.cost import Work
from cnnexp.backends.simd.compiler.emit import Emit, Emitter, Kernels, Target
from cnnexp.backends.simd.layouts import Halo, Layout, Tensor
from cnnexp.network import PoolStage, ReLU, Stage
from cnnexp.optimizers import Optimizer

X = TypeVar("X", bound=Tensor)
Y = TypeVar("Y", bound=Tensor)


@dataclass(frozen=True)
class Section:
    """Stages that are computed at once.

    Attributes:
        stages: them, without the flattening among or after them. flattened: whether a `Flatten` comes after.
        opens: whether it is where a Residual begins; where it ends is another section.
    """

    stages: tuple[Stage, ...]
    flattened: bool
    opens: bool = False

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
class Seam:
    """A cut of the step, where all threads meet: a batch must be complete before the kernels after it run.

    Attributes:
        kernel: the whole name of the one that leaves a tile's part, the last before the cut.
        meet: makes of the parts what a tile needs; on the buffers of `batch_norm.Meeting`. None where a thread waits
            for its own tiles alone.
    """

    kernel: str
    meet: Emit | None = None


class Node(Generic[X, Y]):
    """Layers computed at once.

    Attributes:
        name: of its kernels, and of the first layer. shape: of its output, without the images.
        layers: the names of all that it computes; none where it changes a layout.
        stage: the layer whose multiply-adds it does.
        x, y: input and output, given by the plan.
        dy: gradient of y, given where the node goes backward. dx: of x, None where it is not needed.
        input_rectified: x is a ReLU's output, and dx to be the gradient of that ReLU's input.
        dy_rectified: dy already is the gradient of what its own ReLU takes in: the node after it saw to that.
    """

    layers: tuple[str, ...] = ()
    stage: Stage | None = None
    x: X
    y: Y
    dy: Y
    dx: X | None = None
    input_rectified = False
    dy_rectified = False
    algorithm: ClassVar[str]
    """The algorithm, as `backend.explain=true` prints it; its file has the same name."""
    spans: ClassVar[int] = 1
    """How many sections it computes."""
    holds: ClassVar[str] = ""
    """What a vector holds many of, e.g. `filters`; empty where nothing is multiplied."""
    follows: bool = False
    """Whether the backward pass follows each window's maximum and leaves out the rest."""
    input_layout: type[Tensor] | None = None
    """The layout of the input, `Blocked`, `NC` or `NHWC`; None for either, and the output is of the same."""
    any_image: bool = False
    """Whether it takes an image in either layout, where `input_layout` names none."""
    output_layout: type[Tensor] | None = None
    trains: bool = False
    """Whether it has parameters."""
    rectify = False
    """Whether it has taken in a ReLU."""
    whole_vectors: ClassVar[bool] = True
    """Whether its kernels go by vectors of images, and may write a whole one where a tile has fewer images."""
    in_parts: ClassVar[Sequence[str]] = ()
    """The kernels that threads may share."""
    parts = 1
    """How many parts those are cut into."""
    keeps_x: bool = True
    """Whether its backward pass reads its input."""
    keeps_y: bool = True
    """Whether its backward pass reads its output."""
    rectifies_dx: ClassVar[bool] = False
    """Whether it can see to a ReLU before it when it stores dx."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name, self.shape = name, shape

    @classmethod
    def of(cls, sections: Sequence[Section], first: bool) -> Node | None:
        """Return the node that computes the first of the sections, or `spans` of them; None where it cannot.

        Args:
            sections: all from this one on. first: whether it opens the network.
        """
        raise NotImplementedError

    @property
    def needed_dx(self) -> X:
        """dx, of a node that the gradient of one before it comes through."""
        assert self.dx is not None
        return self.dx

    @property
    def rectifies_dy(self) -> bool:
        """Whether its ReLU's gradient is still to be taken."""
        return self.rectify and not self.dy_rectified

    def fits(self, target: Target) -> bool:
        """Whether the CPU's registers hold it."""
        return True

    def may_follow(self, needs_dx: bool) -> bool:
        """Whether it can come where the gradient of its input is needed, or is not."""
        return True

    def work(self, target: Target, images: int, needs_dx: bool) -> dict[str, Work]:
        """Return what each kernel, by its name, does for an image.

        Args:
            images: of a tile. needs_dx: whether the gradient of its input is needed.
        """
        raise NotImplementedError

    def input_halo(self) -> Halo:
        """Return the room that its input needs around it."""
        return Halo()

    def gradient_halo(self, needs_dx: bool) -> Halo:
        """Return the room around dy that it needs."""
        return Halo()

    def prepare(self, plan: Layout) -> None:
        """Allocate what else it needs, once x, y, dy, dx are known."""

    def setup(self, plan: Layout) -> Kernels:
        """Return what is to be done once for all predictions with the same parameters."""
        return []

    def forward(self, plan: Layout) -> Kernels:
        """Return the kernels of its forward pass: one, unless it says otherwise."""
        return [("forward", lambda k: self.emit_forward(k, plan))]

    def emit_forward(self, k: Emitter, plan: Layout) -> None:
        raise NotImplementedError

    def backward(self, plan: Layout) -> Kernels:
        """As `forward`, of its backward pass."""
        return [("backward", lambda k: self.emit_backward(k, plan))]

    def emit_backward(self, k: Emitter, plan: Layout) -> None:
        raise NotImplementedError

    def owns(self, plan: Layout) -> bool:
        """Whether a thread takes the step of a share of its weights, by their gradient over all threads' images."""
        return False

    def backward_weights(self, k: Emitter, plan: Layout) -> None:
        raise NotImplementedError

    def update(self, k: Emitter, plan: Layout, optimizer: Optimizer) -> None:
        """Take the step of this thread's share of weights that threads own."""
        raise NotImplementedError

    def seams(self, plan: Layout) -> Sequence[Seam]:
        """Return where it cuts the forward pass and the backward pass, if it does."""
        return ()

    def part(self, plan: Layout, what: str, kernel: str) -> Part:
        """Return what a kernel of a pass is of the training step."""
        held = self.in_lanes(what, kernel)
        at_once = f"{plan.target.lanes} {held}" if held else ""
        return Part(what, self.layers or (self.name,), kernel, self.multiply_adds(what), at_once, self.fewer(what))

    def in_lanes(self, what: str, kernel: str) -> str:
        """Return what a vector of a kernel holds many of, where not all kernels are alike."""
        return self.holds

    def multiply_adds(self, what: str) -> int:
        """Return those of a pass over one image, at most: the stage's, less what the algorithm saves."""
        passes = 2 if what == BACKWARD and self.dx else 1
        return int(passes * self.stage.macs * self.computed(what)) if self.stage else 0

    def computed(self, what: str) -> Fraction:
        """Return the part of the stage's multiply-adds that a pass computes."""
        return Fraction(1)

    def fewer(self, what: str) -> str:
        """Return why a pass takes fewer multiply-adds than its layers have outputs for, empty where it does not."""
        return FOLLOWED if self.follows and what == BACKWARD else ""
