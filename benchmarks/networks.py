"""The networks of the group `networks`: kinds that the papers do not have, from published examples and between them.

Where an example's pooling drops a row, its convolutions are padded instead.
"""

from __future__ import annotations

from cnnexp.network import (
    GELU,
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Flatten,
    Layer,
    Linear,
    MaxPool2d,
    Network,
    ReLU,
    Tanh,
)
from cnnexp.network.models import MobileNet, ResNet

CLASSES = 10
MNIST, CIFAR, FACE = (28, 28, 1), (32, 32, 3), (48, 48, 1)


def _conv(filters: int, kernel: int = 3, stride: int = 1, padding: str | int = "same") -> tuple[Layer, ...]:
    return Conv2d(filters, kernel, stride, padding), ReLU()


def _normalized(filters: int) -> tuple[Layer, ...]:
    return Conv2d(filters, 3, padding="same", bias=False), BatchNorm2d(), ReLU()


def _mlp(*widths: int) -> tuple[Layer, ...]:
    return (*(layer for width in widths for layer in (Linear(width), ReLU())), Linear(CLASSES))


def pixels(padding: str | int) -> str | int:
    """Return what peers call a padding: `floor+1` is 1 to them, who leave out what does not fill a window."""
    return int(padding.removeprefix("floor+")) if isinstance(padding, str) and padding.startswith("floor+") else padding


POOL, FLAT = (MaxPool2d(2),), (Flatten(),)

NETWORKS: dict[str, tuple[str, Network, str]] = {
    "lenet5": (
        "LeNet-5 (LeCun et al. 1998, figure 2), with ReLU and max-pooling",
        Network(MNIST, (*_conv(6, 5), *POOL, *_conv(16, 5, padding="valid"), *POOL, *FLAT, *_mlp(120, 84))),
        "sgd",
    ),
    "lenet5_1998": (
        "LeNet-5 with tanh, means and its third convolution, as `experiment=lenet5`",
        Network(
            MNIST,
            (
                *(Conv2d(6, 5, padding="same"), Tanh(), AvgPool2d(2), Conv2d(16, 5), Tanh(), AvgPool2d(2)),
                *(Conv2d(120, 5), Tanh(), *FLAT, Linear(84), Tanh(), Linear(CLASSES)),
            ),
        ),
        "sgd",
    ),
    "keras_mnist": (
        "Keras's simple MNIST convnet: 32-pool-64-pool, dropout",
        Network(MNIST, (*_conv(32), *POOL, *_conv(64), *POOL, *FLAT, Dropout(0.5), Linear(CLASSES))),
        "adam",
    ),
    "keras_cifar": (
        "Keras's CIFAR-10 example: 32-32-pool-64-64-pool-512, three dropouts",
        Network(
            CIFAR,
            (
                *(*_conv(32), *_conv(32), *POOL, Dropout(0.25)),
                *(*_conv(64), *_conv(64), *POOL, Dropout(0.25)),
                *(*FLAT, Linear(512), ReLU(), Dropout(0.5), Linear(CLASSES)),
            ),
        ),
        "adam",
    ),
    "pytorch_mnist": (
        "PyTorch's MNIST example: 32-64-pool-128, two dropouts",
        Network(
            MNIST,
            (
                *(*_conv(32, padding="valid"), *_conv(64, padding="valid"), *POOL, Dropout(0.25)),
                *(*FLAT, Linear(128), ReLU(), Dropout(0.5), Linear(CLASSES)),
            ),
        ),
        "adam",
    ),
    "vgg_norm": (
        "VGG with batch normalization: 32-32-pool-64-64-pool-128, dropout",
        Network(
            CIFAR,
            (
                *(*_normalized(32), *_normalized(32), *POOL, *_normalized(64), *_normalized(64), *POOL),
                *(*FLAT, Linear(128), ReLU(), Dropout(0.5), Linear(CLASSES)),
            ),
        ),
        "sgd",
    ),
    "vgg11": (
        "VGG-11 with batch normalization: 64-128-256-256-512-512-512-512, five pools",
        Network(
            CIFAR,
            (
                *(*_normalized(64), *POOL, *_normalized(128), *POOL, *_normalized(256) * 2, *POOL),
                *(*_normalized(512) * 2, *POOL, *_normalized(512) * 2, *POOL, *FLAT, Linear(CLASSES)),
            ),
        ),
        "sgd",
    ),
    "resnet20": ("ResNet-20: `model=resnet model.blocks=3`", ResNet(blocks=3).network(CIFAR, CLASSES), "sgd"),
    "resnet56": ("ResNet-56: `model=resnet model.blocks=9`", ResNet(blocks=9).network(CIFAR, CLASSES), "sgd"),
    "mobilenet": (
        "MobileNet: depthwise separable, `model=mobilenet`",
        MobileNet().network(CIFAR, CLASSES),
        "sgd",
    ),
    "gelu_mlp": (
        "MLP with GELU and dropout: 784-512-512",
        Network(MNIST, (*FLAT, *(Linear(512), GELU(), Dropout(0.2)) * 2, Linear(CLASSES))),
        "adam",
    ),
    "vgg": (
        "VGG-like: 64-64-pool-128-128-pool-256-pool",
        Network(
            CIFAR,
            (
                *_conv(64),
                *_conv(64),
                *POOL,
                *_conv(128),
                *_conv(128),
                *POOL,
                *_conv(256),
                *POOL,
                *FLAT,
                Linear(CLASSES),
            ),
        ),
        "sgd",
    ),
    "strided": (
        "strided 33 x 33: 32, 64/2, 64, 128/2",
        Network(
            (33, 33, 3),  # so that steps of 2 go into it with one pixel of padding on every side
            (*_conv(32), *_conv(64, 3, 2, 1), *_conv(64), *_conv(128, 3, 2, 1), *FLAT, Linear(CLASSES)),
        ),
        "adam",
    ),
    "all_conv": (
        "all-convolutional: 16-16-pool-32-32-average",
        Network(MNIST, (*_conv(16), *_conv(16), *POOL, *_conv(32), *_conv(32), AvgPool2d(14), *FLAT, Linear(CLASSES))),
        "sgd",
    ),
    "faces": (
        "faces 48 x 48: 32 of 5 x 5, pool, 64 of 5 x 5, pool, 128",
        Network(FACE, (*_conv(32, 5), *POOL, *_conv(64, 5), *POOL, *FLAT, *_mlp(128))),
        "adam",
    ),
    "deep": (
        "12 convolutions: 4 of 32, 4 of 64, 4 of 128, each four with a pool",
        Network(
            CIFAR,
            (
                *(layer for filters in (32, 64, 128) for layer in (*_conv(filters) * 4, *POOL)),
                *FLAT,
                Linear(CLASSES),
            ),
        ),
        "sgd",
    ),
    "wide_mlp": ("wide MLP: 784-1024-1024-10", Network(MNIST, (*FLAT, *_mlp(1024, 1024))), "adam"),
    "deep_mlp": ("deep MLP: 784, 8 layers of 128", Network(MNIST, (*FLAT, *_mlp(*[128] * 8))), "sgd"),
    "smallest_mlp": ("smallest MLP: 8 x 8 digits, 30", Network((8, 8, 1), (*FLAT, *_mlp(30))), "sgd"),
    "smallest_conv": (
        "smallest convolution: 8 x 8 digits, 4 filters",
        Network((8, 8, 1), (*_conv(4, padding="valid"), MaxPool2d(2), *FLAT, Linear(CLASSES))),
        "sgd",
    ),
}
"""By name: (title, network, optimizer)."""
