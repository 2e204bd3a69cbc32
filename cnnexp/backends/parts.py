"""What a training step consists of, where a program tells: which layers a kernel computes, how, and for how long."""

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
    """

    what: str
    layers: tuple[str, ...]
    kernel: str
    multiply_adds: int = 0
    at_once: str = ""
    fewer: str = ""

    @property
    def name(self) -> str:
        return " ".join(self.layers)
