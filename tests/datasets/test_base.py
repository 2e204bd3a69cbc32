import logging
import re
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from commands import raises
from tables import each

from cnnexp.datasets import Dataset, Source, Split
from cnnexp.errors import ConfigError, DataError

CLASSES = tuple("abc")


@dataclass(frozen=True, kw_only=True)
class Counting(Source):
    """Ten training and four test images; image n is filled with n."""

    name: ClassVar[str] = "counting"

    def load(self):
        return self._dataset(counting(10), counting(4), CLASSES, "test")


def counting(count, dtype=np.uint8):
    n = np.arange(count)
    return Split(np.broadcast_to(n[:, None, None, None], (count, 2, 3, 1)).astype(dtype), n % 3)


def values(split):
    return split.images[:, 0, 0, 0].tolist()


def build(images, labels, test=None):
    return Dataset.build("own", Split(images, labels), test or counting(4), classes=CLASSES)


@each(
    ({}, range(10), None, range(4)),
    ({"train_size": 5, "test_size": 2, "validation_size": 3}, range(5), [7, 8, 9], range(2)),
    ({"validation_size": 3}, range(7), [7, 8, 9], range(4)),  # the rest is trained on
)
def test_limits_take_the_first_images_and_validation_the_last(sizes, train, validation, test):
    dataset = Counting(**sizes).load()
    assert (values(dataset.train), values(dataset.test)) == ([*train], [*test])
    assert (values(dataset.validation) if dataset.validation else None) == validation
    assert dataset.input_shape == (2, 3, 1)


@each(
    ({"train_size": 11}, ("dataset.train_size=11", "10 images")),
    ({"test_size": 5}, ("dataset.test_size=5", "4 images")),
    ({"train_size": 8, "validation_size": 3}, ("dataset.train_size=8", "10 images, 3 of which", "at most 7")),
    ({"validation_size": 10}, ("dataset.validation_size=10", "10 images", "at most 9")),
)
def test_more_than_there_is_names_both_numbers(sizes, parts):
    raises(ConfigError, ".*".join(parts), Counting(**sizes).load)


def test_hash_sees_the_images_in_use_alone_and_every_pixel_and_label_of_them():
    assert Counting().load().sha256 == Counting(train_size=10).load().sha256
    different = [Counting(), Counting(train_size=9), Counting(test_size=3), Counting(validation_size=1)]
    assert len({source.load().sha256 for source in different}) == 4
    split = counting(10)
    images, labels = split.images.copy(), split.labels.copy()
    images[9, 1, 2, 0] += 1
    labels[9] = 2
    hashes = {build(*pair).sha256 for pair in ((split.images, split.labels), (images, split.labels), (images, labels))}
    assert len(hashes) == 3


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64", ">f4", ">f8"])
def test_images_become_uint8_or_float32(dtype):
    split = counting(10, dtype)
    images = np.asfortranarray(split.images)
    images.flags.writeable = False
    train = build(images, split.labels.astype(">i8"), counting(4, dtype)).train
    assert train.images.dtype == (np.uint8 if dtype == "uint8" else np.float32)
    assert train.images.flags.c_contiguous
    assert train.images.flags.writeable
    assert train.labels.dtype == np.int32
    np.testing.assert_array_equal(train.images, split.images.astype(np.float32))
    assert build(split.images[..., 0], split.labels).input_shape == (2, 3, 1), "gray images get a channel"


IMAGES, LABELS = counting(10).images, counting(10).labels


@each(
    (IMAGES, LABELS[:9], "own, train: 10 images but 9 labels"),
    (IMAGES[:0], LABELS[:0], "no images"),
    (IMAGES, LABELS + 1, r"must be 0 \.\. 2 for 3 classes; found 1 \.\. 3, first wrong one at index 2"),
    (IMAGES, LABELS - 1, r"found -1 \.\. 1, first wrong one at index 0"),
    (IMAGES, LABELS.astype(np.float32), "labels of type float32"),
    (IMAGES, np.eye(3, dtype=int)[LABELS], "one-hot"),
    (IMAGES.astype(np.uint16), LABELS, "images of type uint16"),
    (IMAGES.astype(np.complex64), LABELS, "images of type complex64"),
    (IMAGES.astype(object), LABELS, "images of type object"),
    (IMAGES[:, 0, 0, 0], LABELS, r"images of shape \(10,\)"),
    (IMAGES[:, :0], LABELS, r"images of shape \(10, 0, 3, 1\)"),
    (IMAGES[:, :1], LABELS, "different shapes"),
    (np.where(IMAGES == 4, np.nan, IMAGES), LABELS, r"6 pixels are NaN or infinite, the first at index \(4, 0, 0"),
    (np.where(IMAGES == 4, 1e300, IMAGES), LABELS, "6 pixels are NaN or infinite"),
)
def test_malformed_arrays_are_one_line(images, labels, part):
    raises(DataError, part, build, images, labels)


@each(
    (IMAGES, None),
    (IMAGES / np.float32(9), None),
    (np.zeros_like(IMAGES), "pixels from 0 to 0, standard deviation 0: all training pixels are equal"),
    (np.minimum(IMAGES, 1), "multiply these by 255"),
    (IMAGES * np.float32(28), "pixels from 0 to 252, .* divide these by 255"),
    ((IMAGES * 28, IMAGES / np.float32(9)), None),
    ((IMAGES / np.float32(9), IMAGES * np.float32(28)), "training pixels are up to 1, test pixels up to 84: scale"),
    ((IMAGES * 28, IMAGES * np.float32(28)), "training pixels are up to 0.988, test pixels up to 84"),
)
def test_suspicious_scale_is_a_warning(caplog, images, part):
    images, tested = images if isinstance(images, tuple) else (images, images)
    test = Split(tested[:4], LABELS[:4])
    with caplog.at_level(logging.WARNING, "cnnexp"):
        build(images, LABELS, test)
    assert len(caplog.records) == (part is not None)
    assert part is None or re.search(part, caplog.text)
