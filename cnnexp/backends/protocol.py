"""The contract of a backend, stated once; the files beside this one hold only tactics.

A backend is a compiler: `compile(network, loss, optimizer, batch_size)` returns a `Program`, and a `Program` is all
that the train loop sees. Most backends implement `Ops`, one method per layer and pass, and let `layerwise` drive them;
a fused backend implements `Program` itself. The same tests hold both.

Dimension letters, in every shape comment of every backend:

    N images   C channels   H W input      F filters   K kernel side   P Q convolution output
    S pool side   U V pooled output   D features (inputs of a linear layer)   O outputs (of a linear layer)

Arrays are C-contiguous and float32 unless a shape says otherwise; images are channels-last. Convolution is
cross-correlation, as in every framework. Arguments go inputs first, outputs last; every output is fully overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from cnnexp.backends.parts import Part
from cnnexp.backends.state import PendingAverages
from cnnexp.backends.state import State as State
from cnnexp.network import BatchNorm2d, Elementwise, Network, Stage, Window
from cnnexp.network.losses import Loss, Totals
from cnnexp.optimizers import Optimizer
from cnnexp.system.cores import cpu_name

Rate = float | np.ndarray
"""A learning rate, or that of each step, (steps,)."""
Handle = TypeVar("Handle")
"""A split where a program wants it."""


class AnyArray(Protocol):
    """What a NumPy array and a device array of the same shape have in common."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, part: slice, /) -> Any: ...
    def reshape(self, shape: tuple[int, ...], /) -> Any: ...


Array = TypeVar("Array", bound=AnyArray)

Watch = Callable[[str, str], AbstractContextManager]
"""Makes the context in which a pass of a layer runs, e.g. ("conv1", "backward"): where a profiler puts its clock."""


class Program(Protocol[Handle]):
    """A network compiled for training at one batch size.

    A program inherits from it: what only some know has an answer here for the others.
    """

    network: Network
    loss: Loss
    optimizer: Optimizer
    batch_size: int
    compile_s: float
    """Seconds spent compiling and warming up, before anything is timed."""
    pending: PendingAverages | None = None
    """What `gradients` leaves for `apply`; None where no layer keeps running averages."""

    def load(self, images: np.ndarray, labels: np.ndarray) -> Handle:
        """Put a split where the backend wants it, once; return a handle on it.

        Args:
            images: `(N, *input_shape)`, float32, or uint8 that stands for value / 255.
            labels: integers (N,), 0 .. classes - 1.
        """

    def refill(self, handle: Handle | None, images: np.ndarray, labels: np.ndarray, epoch: int) -> Handle:
        """Load images that take the place of those of a handle, which is of no more use; return the new one.

        Args:
            handle: of the last ones, as many; None for the first.
            images, labels: as for `load`, which may keep them: they must stay as they are while the handle is used.
            epoch: images of a whole epoch, of which these are some.
        """
        return self.load(images, labels)

    def train(self, handle: Handle, order: np.ndarray, rate: Rate) -> Totals:
        """Take ceil(len(order) / batch_size) optimizer steps over the images `order` (int64) at learning rate `rate`.

        Each step averages the gradient over its batch; a last short batch is trained too, averaged over its own size.
        The totals are of the scores that each step saw, before its update. On return the work is done (devices are
        synchronized), so a clock around the call is right.
        """

    def gradients(self, handle: Handle, indices: np.ndarray) -> tuple[Totals, np.ndarray]:
        """Return the totals and the flat mean gradient (float32) of one batch, at most batch_size images.

        Nothing that `state` returns changes. Running averages wait for `apply`, which moves them by the batch of the
        last `gradients`; `train` and `restore` forget what waits.
        """

    def apply(self, gradient: np.ndarray, rate: float) -> None:
        """Take one optimizer step with a flat gradient: the second half of a training step, see `gradients`."""

    def predict(self, handle: Handle) -> np.ndarray:
        """Return the scores (N, O) of a whole split."""

    def probabilities(self, handle: Handle) -> np.ndarray:
        """Return the probability of each class, float32 (N, classes), of a whole split."""
        return self.loss.probabilities(self.predict(handle))

    def state(self) -> State:
        """Return copies: `parameters` (flat float32), `step` (int64 scalar), and a flat array per optimizer slot.

        Where layers keep running averages also `running` (flat float32, see `Network.running`), and where a step draws
        random numbers `seed` (int64 scalar).
        """

    def restore(self, state: State) -> None:
        """Take over a `state()` of any backend; what is missing is as when a run begins, see `state.complete`."""

    def close(self) -> None:
        """Give back threads and device memory, of its own if it has any. Idempotent."""
        return

    def warm(self, handle: Handle, indices: np.ndarray) -> None:
        """Have threads, caches and code ready for the batch `indices`, before a clock starts; `state()` stays as it is.

        A training step after other work, a baseline's or an evaluation, takes longer where it is short.
        """
        return

    def watch(self, watch: Watch | None) -> bool:
        """Have `watch` hear of every pass of a layer in training from now on, each until its work is done.

        Besides the layers it hears of ("batch", "gather"), ("loss", "forward") and ("parameters", "update"). None ends
        it. Returns whether there is anything to hear: no where a step is computed as one piece.
        """
        return False

    def clocked(self) -> Sequence[tuple[Part, float]]:
        """Return the parts of a step that clock themselves, and the seconds of each in all training so far.

        The seconds are a mean over the threads; see `Backend.clocked`.
        """
        return ()

    def explain(self) -> Sequence[Part]:
        """Return what was chosen for every kernel of a step, in order, where there was a choice."""
        return ()


def rate_of_steps(rate: Rate, images: int, batch_size: int) -> np.ndarray:
    """Return the rate of each step (steps,) of `Program.train` over so many images."""
    return np.full(-(-images // batch_size), rate)


class Backend:
    """One way to compute, at first on the CPU and with nothing to choose; what inherits from it says what differs.

    Attributes:
        name: as in `conf/backend/`.
        threads: CPU threads that its programs use (1 where it uses none of its own).
        device_name: what computes, for the record: the CPU's or the GPU's name.
        on_gpu: whether a GPU computes.
        facts: what else the record says of the device, by tag name.
        next_best: the backend to go on with where the compiler dies; None ends the run.
        explain: whether a run shows what its compiler chose, where its programs know.
        clocked: the same backend, for a profile: what its programs report of their parts may cost a little of the time.
        forward_only: the same backend, for predictions: its programs need do no more than `load`, `restore`, `predict`.
    """

    name: ClassVar[str]
    on_gpu: ClassVar[bool] = False
    explain: bool = False
    threads: int = 1

    @property
    def device_name(self) -> str:
        return cpu_name()

    @property
    def facts(self) -> Mapping[str, str]:
        return {}

    @property
    def next_best(self) -> Backend | None:
        return None

    @property
    def clocked(self) -> Backend:
        return self

    @property
    def forward_only(self) -> Backend:
        return self

    def limits(self) -> Mapping[str, float]:
        """Measure what its device can do; of a CPU `roofline.machine_limits` adds what is missing here."""
        return {}

    def of_worker(self, host_rank: int) -> Backend:
        """Return the backend as the `host_rank`-th worker of a machine has it: on its own GPU if there are more."""
        return self

    def compile(self, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int) -> Program[Any]:
        """Make a program; its parameters are zero until `restore`."""
        raise NotImplementedError


Update = Callable[[Array, Array, tuple[Array, ...], float, int], None]


class Ops(Protocol[Array]):
    """The layers' mathematics on one kind of array.

    A `Window` says how windows slide over an image. What lies outside the image is 0 for convolution and does not exist
    for pooling. `saved` is what a layer's backward pass keeps of its forward pass, the ops' own business: nobody else
    looks into it. `dx` is None where no gradient of the input is needed, `b` and `db` are None in a layer without bias.
    """

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate an array; on the CPU written once, so that no timed batch pays for the first use of its memory."""

    def saved(self, stage: Stage, batch_size: int) -> Any:
        """Allocate what the stage's backward pass keeps of its forward pass, for up to `batch_size` images."""

    def to_device(self, array: np.ndarray) -> Array:
        """Return `array` where the ops want it; may be the same object."""

    def to_host(self, array: Array) -> np.ndarray:
        """Return a NumPy copy, once all work on it is done."""

    def copy(self, source: np.ndarray, target: Array) -> None:
        """Overwrite `target` with a NumPy array of the same shape and dtype."""

    def gather(self, images: Array, labels: Array, indices: Array, x: Array, t: Array) -> None:
        """x[n] = images[indices[n]], t[n] = labels[indices[n]]. indices int64 (N,), labels and t int32."""

    def conv2d(self, x: Array, w: Array, b: Array | None, window: Window, y: Array) -> None:
        """y[n,p,q,f] = b[f] + sum_{i,j,c} w[i,j,c,f] * x[n, row(p,i), column(q,j), c].

        row(p,i) = p*stride + i*dilation - top; column(q,j) = q*stride + j*dilation - left.

        x (N,H,W,C), w (K,K,C,F), b (F,), y (N,P,Q,F). Where w is (K,K,C/G,F), each of G parts of the filters sees its
        part of the channels alone.
        """

    def conv2d_backward(
        self, x: Array, w: Array, dy: Array, window: Window, dx: Array | None, dw: Array, db: Array | None
    ) -> None:
        """Spread dy (N,P,Q,F) over the terms of `conv2d`.

        dw[i,j,c,f] = the sum over n,p,q of the x that w[i,j,c,f] meets there times dy[n,p,q,f];
        db[f] = sum_{n,p,q} dy[n,p,q,f]; dx gathers w[i,j,c,f] * dy[n,p,q,f] at the same places.
        """

    def elementwise(self, layer: Elementwise, x: Array, y: Array) -> None:
        """y = the layer's rule of x, number by number."""

    def elementwise_backward(self, layer: Elementwise, x: Array, y: Array, dy: Array, dx: Array) -> None:
        """dx = dy times the layer's derivative at x."""

    def max_pool(self, x: Array, window: Window, y: Array, saved: Any) -> None:
        """y[n,u,v,c] = the largest x in its window, the first such in row order; `saved` keeps which.

        x (N,H,W,C), y (N,U,V,C). Rows and columns of the window that lie outside the image do not take part.
        """

    def max_pool_backward(self, saved: Any, dy: Array, window: Window, dx: Array) -> None:
        """dx = dy added at the pixel that each window took, else 0 (castanheira, section 2.2.2)."""

    def avg_pool(self, x: Array, window: Window, y: Array) -> None:
        """y[n,u,v,c] = the mean of the pixels of the window that lie inside the image."""

    def avg_pool_backward(self, dy: Array, window: Window, dx: Array) -> None:
        """dx = dy / (pixels of the window inside the image), added over the windows that hold the pixel."""

    def add(self, a: Array, b: Array, total: Array) -> None:
        """total = a + b; `total` may be one of them."""

    def dropout(self, x: Array, images: Array, key: int, rate: float, y: Array) -> None:
        """y = x / (1 - rate) where `noise.keeps(key, rate, images, D)`, else 0; of a gradient likewise. y (N, ...)."""

    def batch_norm(
        self, layer: BatchNorm2d, x: Array, w: Array, b: Array, mean: Array, variance: Array, y: Array, saved: Any
    ) -> None:
        """y = (x - m) / sqrt(v + epsilon) * w + b, m and v the mean and variance of a channel over the batch.

        x, y (N,H,W,C), all else (C,). The running averages `mean` and `variance` move towards m and v, by `momentum`;
        v as the unbiased estimate there.
        """

    def batch_norm_predict(
        self, layer: BatchNorm2d, x: Array, w: Array, b: Array, mean: Array, variance: Array, y: Array
    ) -> None:
        """y = (x - mean) / sqrt(variance + epsilon) * w + b, with the running averages."""

    def batch_norm_backward(
        self, x: Array, w: Array, dy: Array, saved: Any, dx: Array | None, dw: Array, db: Array
    ) -> None:
        """With n = (x - m) / sqrt(v + epsilon): db = sum of dy, dw = sum of dy * n, both over all but the channels.

        dx = w / sqrt(v + epsilon) * (dy - mean(dy) - n * mean(dy * n)).
        """

    def linear(self, x: Array, w: Array, b: Array | None, y: Array) -> None:
        """y = x @ w + b. x (N,D), w (D,O), b (O,), y (N,O)."""

    def linear_backward(self, x: Array, w: Array, dy: Array, dx: Array | None, dw: Array, db: Array | None) -> None:
        """dx = dy @ w.T, dw = x.T @ dy, db = sum of dy over n (khandait, section II.B.1)."""

    def loss(
        self, loss: Loss, scores: Array, labels: Array, scale: float, d_scores: Array, losses: Array, hits: Array
    ) -> None:
        """Fill the gradient, the loss and the hit of every image: see the function of that name in `network.losses`."""

    def updater(self, optimizer: Optimizer) -> Update[Array]:
        """Compile the optimizer's rule into `update(w, g, slots, rate, step)`, in place over flat arrays."""
