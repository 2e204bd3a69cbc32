"""What a training step consists of, where it is known: which layers a kernel computes, how, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

FORWARD, BACKWARD = "forward", "backward"
FOLLOWED = "only each window's maximum is followed, its place being kept"
TRANSFORMED = "Winograd's transformation needs 16 where a 3 x 3 convolution has 36"


@dataclass(frozen=True)
class Part:
    """A part of every training step of a fused program.

    Attributes:
        what: `forward` or `backward`, of layers; else `gather`, `update`, `wait`: what any step has.
        layers: whose pass it computes, e.g. ("conv1", "relu1", "pool1"); else what it works on, e.g. ("parameters",).
        kernel: what of that pass, e.g. `backward_weights`.
        multiply_adds: of all kernels of this pass for one image, at most: some skip what they find to be 0.
        at_once: what fills the lanes of a vector, e.g. `16 filters`; empty where nothing says.
        fewer: why it takes fewer multiply-adds than the layers' outputs have, empty where it does not.

    In a row of `Program.explain`, what a compiler chose for a kernel, whose name is then whole, as `conv1.forward`:

    Attributes:
        algorithm: how the layers are computed, of several that there are. layout: of the input.
        tile: what registers hold. threads: that share a batch's images.
        macs: the kernel's own multiply-adds of an image. cycles: of one core for an image, as expected.
        share: of the multiply-adds that a core can do; above 1 where terms that are zero are left out.
    """

    what: str
    layers: tuple[str, ...]
    kernel: str
    multiply_adds: int = 0
    at_once: str = ""
    fewer: str = ""
    algorithm: str = ""
    layout: str = ""
    tile: str = ""
    threads: int = 1
    macs: int = 0
    cycles: int = 0
    share: float = 0.0

    @property
    def name(self) -> str:
        return " ".join(self.layers)
