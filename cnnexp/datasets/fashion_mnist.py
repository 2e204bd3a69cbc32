"""`fashion_mnist`: 70,000 pictures of clothes (Xiao, Rasul, Vollgraf 2017), 28x28, gray, in MNIST's form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cnnexp.datasets.idx import IdxFile, IdxSet


@dataclass(frozen=True, kw_only=True, repr=False)
class FashionMnist(IdxSet):
    """60,000 training and 10,000 test images; fields as `IdxSet`.

    Published with the md5 of the gzipped files, so that is what they are held against; of decompressed files only the
    form and the counts can be checked.
    """

    name: ClassVar[str] = "fashion_mnist"
    mirrors: ClassVar[tuple[str, ...]] = (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    )
    files: ClassVar[tuple[IdxFile, ...]] = (
        IdxFile("train-images-idx3-ubyte", (60_000, 28, 28), gz_md5="8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        IdxFile("train-labels-idx1-ubyte", (60_000,), gz_md5="25c81989df183df01b3e8a0aad5dffbe"),
        IdxFile("t10k-images-idx3-ubyte", (10_000, 28, 28), gz_md5="bef4ecab320f06d8554ea6380940ec79"),
        IdxFile("t10k-labels-idx1-ubyte", (10_000,), gz_md5="bb300cfdad3c16e7a12a480ee83cd310"),
    )
    classes: ClassVar[tuple[str, ...]] = (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    )
