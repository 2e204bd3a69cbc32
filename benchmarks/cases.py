"""What is timed: networks, batch sizes and optimizers, their data, and the multiply-adds they need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.networks import CLASSES, NETWORKS
from cnnexp.datasets import Mnist
from cnnexp.network import Conv2d, Flatten, Linear, MaxPool2d, Network, ReLU, Sigmoid, Stage
from cnnexp.network.losses import Loss
from cnnexp.network.models import Ffn, Knm, Model, OneConv, TwoConvMlp, TwoConvPool4
from cnnexp.network.shapes import walk
from cnnexp.optimizers import SGD, Adam, Optimizer

LOSS = Loss.SOFTMAX_CROSS_ENTROPY
SEED = 0
DROPOUT_SEED = 7  # of the masks that our backends draw, which the oracle draws again


@dataclass(frozen=True)
class Case:
    """One training job.

    Attributes:
        name: how it is asked for.
        group: the table it belongs to; in `inference` the job is to predict.
        title: how a figure names it.
        network, batch_size, optimizer: the job.
        grows: where the case is one of a sweep, the value that the sweep varies.
    """

    name: str
    group: str
    title: str
    network: Network
    batch_size: int
    optimizer: Optimizer
    grows: int | None = None

    @property
    def batches(self) -> int:
        """How many different batches there are: about 4,000 images, at least two batches."""
        return max(2, math.ceil(4000 / self.batch_size))


@dataclass(frozen=True)
class Data:
    """A case's images float32 (batches, batch_size, H, W, C), labels int32 (batches, batch_size), first parameters."""

    images: np.ndarray
    labels: np.ndarray
    parameters: np.ndarray


def data(case: Case, mnist: str | None = None) -> Data:
    """Draw a case's data; the same for every contestant, since it follows from the arguments alone.

    Args:
        case: what is timed.
        mnist: a folder with MNIST's files, whose training images are then drawn. None makes up images, pixels uniform
            in [0, 1): they have no empty background, on which units die and a sparse gradient saves work.
    """
    rng = np.random.default_rng(SEED)
    shape = (case.batches, case.batch_size)
    if mnist is None:
        images = rng.random((*shape, *case.network.input_shape), np.float32)
        labels = rng.integers(0, case.network.output_shape[0], shape, np.int32)
    else:
        train = Mnist(root=mnist).load().train
        drawn = rng.permutation(len(train))[: math.prod(shape)].reshape(shape)
        images, labels = train.images[drawn].astype(np.float32) / np.float32(255), train.labels[drawn]
    return Data(images, labels, case.network.initial_parameters(SEED))


def averages(network: Network) -> np.ndarray:
    """Return the running averages that a case of the group `inference` has, as `conformance.Case.state` draws them."""
    return np.random.default_rng(1).uniform(0.5, 1.5, network.running_count).astype(np.float32)


def visiting_order(case: Case) -> np.ndarray:
    """Return the order in which our backends visit the images; what Dropout leaves out follows from it."""
    return np.random.default_rng(1).permutation(case.batches * case.batch_size)


def multiply_adds(network: Network) -> tuple[int, int]:
    """Return the multiply-adds that one training step needs per image: (through the argmax, dense).

    Forward: every output of every convolution and linear layer. Backward: as much again for the weights' gradient, and
    again for the input's, which the first layer does not need. A convolution whose outputs go (through elementwise
    layers) into max-pooling has at most one output per pooled cell with a gradient, so "through the argmax" its
    gradients cost one patch per pooled cell; "dense", they cost every output. Elementwise work is not counted.
    """
    through, dense = 0, 0
    stages = tuple(stage for stage in walk(network.stages) if not stage.stages)
    first = next(stage for stage in stages if stage.macs)
    for position, stage in enumerate(stages):
        if not stage.macs:
            continue
        backward = stage.multiply_adds("backward", needs_dx=stage is not first)
        outputs = math.prod(stage.output_shape)
        share = min(_outputs_with_gradient(stages, position), outputs) / outputs
        through += stage.macs + round(backward * share)
        dense += stage.macs + backward
    return through, dense


def _outputs_with_gradient(stages: Sequence[Stage], position: int) -> int:
    """Return how many outputs of a stage can receive a gradient per image."""
    for stage in stages[position + 1 :]:
        if isinstance(stage.layer, MaxPool2d):
            return math.prod(stage.output_shape)
        if not isinstance(stage.layer, (ReLU, Sigmoid)):
            break
    return math.prod(stages[position].output_shape)


def _one_conv(filters: int, batch_size: int, group: str, side: int = 28, grows: int | None = None) -> Case:
    name = f"one_conv-f{filters}-b{batch_size}" + ("" if side == 28 else f"-s{side}")
    title = f"one_conv, {filters} filters, batch {batch_size}" + ("" if side == 28 else f", {side} x {side}")
    network = OneConv(filters=filters).network((side, side, 1), CLASSES)
    return Case(name, group, title, network, batch_size, SGD(lr=0.01), grows)


def _deep(depth: int) -> Case:
    """Return `depth` convolutions of 8 filters, 3 x 3, "same" padding; then pooling and one linear layer."""
    convolutions = (Conv2d(8, 3, padding="same"), ReLU()) * depth
    network = Network((28, 28, 1), (*convolutions, MaxPool2d(2), Flatten(), Linear(CLASSES)))
    return Case(
        f"deep-{depth}", "depth", f"{depth} convolutions, 8 filters 3 x 3, batch 64", network, 64, SGD(lr=0.01), depth
    )


def _networks() -> list[Case]:
    optimizers = {"sgd": SGD(lr=0.01), "adam": Adam(lr=1e-3)}
    return [
        Case(f"{name}-b{batch_size}", "networks", f"{title}, batch {batch_size}", network, batch_size, optimizers[rule])
        for name, (title, network, rule) in NETWORKS.items()
        for batch_size in (1, 16, 128)
    ]


def _papers() -> list[Case]:
    """Return the zoo's networks at sizes of the papers, but for those of `main`; khandait's has a score per class."""
    mnist, points = (28, 28, 1), (2,)
    sgd, adam, scores = SGD(lr=0.01), Adam(lr=1e-3), "softmax_cross_entropy"
    jobs: list[tuple[str, Model, tuple[int, ...], int, int, Optimizer]] = [
        ("castanheira, one_conv of 32 filters", OneConv(filters=32), mnist, CLASSES, 100, sgd),
        ("chavan, knm 5-50-100", Knm(), mnist, CLASSES, 100, sgd),
        ("chavan, knm 3-20-100", Knm(kernel=3, filters=20), mnist, CLASSES, 100, sgd),
        ("chavan, knm on 128 x 128", Knm(), (128, 128, 1), CLASSES, 16, sgd),
        ("garg, two_conv_mlp", TwoConvMlp(), mnist, CLASSES, 32, adam),
        ("khandait, points, 64 hidden", Ffn((64,), scores), points, 2, 50, sgd),
        ("khandait, points, 256 and 256 hidden", Ffn((256, 256), scores), points, 2, 500, sgd),
        ("khandait, ffn of 30 on MNIST", Ffn((30,), scores), mnist, CLASSES, 50, sgd),
    ]
    return [
        Case(f"papers-{i}", "papers", f"{title}, batch {batch}", model.network(shape, classes), batch, optimizer)
        for i, (title, model, shape, classes, batch, optimizer) in enumerate(jobs, 1)
    ]


_TWO_CONV_MLP = Case(
    "two_conv_mlp-b64",
    "main",
    "two_conv_mlp, batch 64",
    TwoConvMlp().network((28, 28, 1), CLASSES),
    64,
    Adam(lr=1e-3, beta1=0.95, beta2=0.99),
)
_TWO_CONV_POOL4 = Case(
    "two_conv_pool4-b32",
    "main",
    "two_conv_pool4, batch 32",
    TwoConvPool4().network((28, 28, 1), CLASSES),
    32,
    Adam(lr=1e-3),
)
_TINY = Case(
    "tiny",
    "tiny",
    "tiny, batch 8",
    Network((6, 6, 1), (Conv2d(4, 3), ReLU(), MaxPool2d(2), Flatten(), Linear(CLASSES))),
    8,
    SGD(lr=0.01),
)

CASES: tuple[Case, ...] = (
    _one_conv(64, 1000, "main"),
    _one_conv(256, 500, "main"),
    _TWO_CONV_MLP,
    _TWO_CONV_POOL4,
    # castanheira's two sweeps (section 5), then the two that the papers leave out
    *(_one_conv(256, batch_size, "batch", grows=batch_size) for batch_size in (100, 250, 500, 1000)),
    *(_one_conv(filters, 1000, "filters", grows=filters) for filters in (32, 64, 128, 256)),
    *(_one_conv(64, 100, "size", side, grows=side) for side in (14, 28, 56)),
    *(_deep(depth) for depth in (1, 2, 3, 4)),
    *_networks(),
    *_papers(),
    *(replace(case, name=f"{case.name}-predict", group="inference") for case in [*_networks(), _TINY]),
    _TINY,
)
GROUPS = ("main", "batch", "filters", "size", "depth", "networks", "papers", "inference")


def select(wanted: list[str]) -> list[Case]:
    """Return the cases that the groups and names in `wanted` mean, each network and batch once a group.

    Those named come last, in the order given.

    Raises:
        ValueError: nothing has that name.
    """
    legal = [*GROUPS, *(case.name for case in CASES)]
    for name in wanted:
        if name not in legal:
            raise ValueError(f"--cases {name}: unknown; legal: {', '.join(dict.fromkeys(legal))}")
    grouped = [case for case in CASES if case.group in wanted]
    by_name = {case.name: case for case in reversed(CASES)}
    named = [by_name[name] for name in dict.fromkeys(wanted) if name in by_name]
    return grouped + [case for case in named if case.name not in {one.name for one in grouped}]
