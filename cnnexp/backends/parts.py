"""What a training step consists of, where it is known: which layers a kernel computes, how, and for how long."""

from dataclasses import dataclass

FORWARD, BACKWARD = "forward", "backward"
FOLLOWED = "only each window's maximum is followed, its place being kept"
TRANSFORMED = "Winograd's transformation needs 36 where a 3 x 3 convolution has 144, and a 5 x 5 one 100"


@dataclass(frozen=True)
class Part:
    """A part of every training step of a fused program; or a row of `Program.explain`: what was chosen for a kernel."""

    what: str  # `forward` or `backward`, of layers; else `gather`, `update`, `wait`: what any step has
    layers: tuple[str, ...]  # whose pass it is, e.g. ("conv1", "relu1"); else what it works on, e.g. ("parameters",)
    kernel: str  # what of that pass, e.g. `backward_weights`; in a row of `explain` the whole name, `conv1.forward`
    multiply_adds: int = 0  # of all kernels of this pass for one image, at most: some skip what they find to be 0
    at_once: str = ""  # what fills the lanes of a vector, e.g. `16 filters`; empty where nothing says
    fewer: str = ""  # why it takes fewer multiply-adds than the layers' outputs have, empty where it does not
    # the rest is of a row of `explain`
    algorithm: str = ""  # how the layers are computed, of several that there are
    layout: str = ""  # of the input
    tile: str = ""  # what registers hold
    threads: int = 1  # that share a batch's images
    macs: int = 0  # the kernel's own multiply-adds of an image
    cycles: int = 0  # of one core for an image, as expected
    share: float = 0.0  # of the multiply-adds that a core can do; above 1 where terms that are zero are left out

    @property
    def name(self) -> str:
        return " ".join(self.layers)
