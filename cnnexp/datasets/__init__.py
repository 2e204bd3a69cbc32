"""Where images come from: one file per source, one class per name in `conf/dataset/`.

>>> from cnnexp.datasets import Mnist
>>> dataset = Mnist(root="data/mnist", train_size=50_000).load()  # doctest: +SKIP

A source is a frozen dataclass whose fields are the keys of its config file; `load()` returns a `Dataset`. What only one
source needs (pooch, Pillow) is imported when it loads.
"""

from cnnexp.datasets.base import Dataset, Source, Split
from cnnexp.datasets.cifar10 import Cifar10
from cnnexp.datasets.digits import Digits
from cnnexp.datasets.fashion_mnist import FashionMnist
from cnnexp.datasets.fer2013 import Fer2013
from cnnexp.datasets.images import Images
from cnnexp.datasets.mnist import Mnist
from cnnexp.datasets.npz import Npz
from cnnexp.datasets.quadrants import Quadrants
from cnnexp.datasets.synthetic import Synthetic
from cnnexp.system.registry import Registry

_SOURCES = Digits, Mnist, FashionMnist, Cifar10, Fer2013, Quadrants, Synthetic, Images, Npz
DATASETS: Registry[Source] = Registry("dataset", {source.name: source for source in _SOURCES})
