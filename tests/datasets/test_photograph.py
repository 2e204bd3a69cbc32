"""Pictures as people take them, for a model trained on digits that a data set had prepared."""

import numpy as np
import pytest
from commands import MNIST, needs_mnist
from renderings import opaque, renderings
from tables import each

from cnnexp import SGD, Digits, Mnist, OneConv, TwoConvMlp, backend, train_epochs
from cnnexp.app.predict import SURE
from cnnexp.datasets import photograph

SHAPE = (28, 28, 1)


def strokes(count, seed=0):
    """Return light strokes on black, uint8, each 20 high, put by its centre of mass into the middle of 28 x 28."""
    rng = np.random.default_rng(seed)
    images = np.zeros((count, *SHAPE), np.uint8)
    for image in images:
        width = rng.integers(4, 9)
        ink = np.zeros((20, width + 6), np.uint8)
        ink[:, 3:6] = 255
        ink[-rng.integers(3, 8) :, : width + 6] = 255  # a foot, so that mass and box have different centres
        rows, columns = np.nonzero(ink)
        top, left = round(13.5 - rows.mean()), round(13.5 - columns.mean())
        image[top : top + 20, left : left + width + 6, 0] = ink
    return images


def height(image):
    return int((image[:, :, 0] > 60).any(axis=1).sum())


def look_of(images):
    return photograph.describe(images, np.zeros(len(images), np.int32), 1)


LOOK, LIGHT = look_of(strokes(200)), look_of(255 - strokes(50))


def test_the_look_is_read_from_the_images():
    assert (LOOK["ground"], LOOK["side"], LOOK["by_mass"]) == (0.0, 20, True)
    assert (LIGHT["ground"], LIGHT["side"]) == (1.0, 20)
    noise = np.random.default_rng(0).integers(0, 256, (50, 28, 28, 1)).astype(np.uint8)
    moved, small = strokes(50), strokes(50)
    for i in range(50):
        moved[i] = np.roll(moved[i], 8 * (i % 2) - 4, axis=1)
        small[i, : 14 * (i % 2)] = 0
    others = np.repeat(strokes(50), 3, axis=3), strokes(50).astype(np.float32), np.zeros_like(noise)
    # no plain ground, here and there, large and small, in colour, in floats, nothing on it
    for images in (noise, moved, small, *others):
        assert look_of(images) is None


def test_each_rendering_becomes_light_on_dark_of_their_size_in_their_place():
    for i, image in enumerate(strokes(5, seed=1)):
        # what is as they are is taken as it is
        np.testing.assert_array_equal(photograph.prepare(opaque(image[:, :, 0]), LOOK, SHAPE), image)
        for name, picture in renderings(image[:, :, 0], i).items():
            assert photograph.count(picture, SHAPE) is None, name
            prepared = photograph.prepare(picture, LOOK, SHAPE)
            assert (prepared.shape, prepared.dtype, np.median(prepared)) == (SHAPE, np.uint8, 0), name
            assert prepared.max() > 200, name
            assert abs(height(prepared) - 20) <= 2, name
            centre = [(prepared[:, :, 0] * axis).sum() / prepared.sum() for axis in np.mgrid[:28, :28]]
            np.testing.assert_allclose(centre, (13.5, 13.5), atol=1.0, err_msg=name)
            assert np.abs(prepared.astype(int) - image).mean() < 14, name


def test_a_ground_of_light_gets_dark_ink_and_without_a_look_a_picture_is_resized():
    prepared = photograph.prepare(renderings(strokes(1, seed=3)[0, :, :, 0])["280 pixels"], LIGHT, SHAPE)
    assert np.median(prepared) == 255
    assert prepared.min() < 55
    picture = np.zeros((100, 100, 4), np.uint8)
    picture[20:80, 40:60] = 255
    assert height(photograph.prepare(picture, LOOK, SHAPE)) == 20

    picture = np.zeros((8, 8, 4), np.uint8)
    picture[:, :, 3] = 255
    picture[:, :4, 0] = 255
    prepared = photograph.prepare(picture, None, (4, 4, 3))
    assert (prepared.shape, prepared[:, 0, 0].tolist()) == ((4, 4, 3), [255] * 4)
    assert prepared[:, 3].max() == 0


def test_what_is_not_like_them_has_no_stroke_or_several_things_is_said():
    rng = np.random.default_rng(0)
    assert sum(photograph.unlike(image, LOOK) is not None for image in strokes(100, seed=4)) <= 5
    blank = opaque(np.full((50, 50), 128, np.uint8))
    noise = opaque(rng.integers(0, 256, (100, 100)).astype(np.uint8))
    stripes = opaque(np.repeat(np.repeat([[0, 255]], 4, axis=0).ravel(), 8)[None].repeat(64, axis=0).astype(np.uint8))
    for picture in (blank, noise, stripes):
        assert photograph.unlike(photograph.prepare(picture, LOOK, SHAPE), LOOK) is not None

    rng = np.random.default_rng(0)
    (first, *_), (second, *_) = strokes(1, seed=5), strokes(1, seed=6)
    pictures = {
        "no stroke: the picture is blank": np.full((50, 50), 128),
        "no stroke: nothing stands out of its noise": rng.integers(0, 256, (100, 100)),
        "no stroke: only specks": 255 * (rng.random((200, 200)) < 0.03),
        "two things: give a picture of one": np.hstack([first, second])[:, :, 0],
        "three things: give a picture of one": np.hstack([first, second, first])[:, :, 0].repeat(9, 0).repeat(9, 1),
    }
    assert [photograph.count(opaque(pixels.astype(np.uint8)), SHAPE) for pixels in pictures.values()] == list(pictures)


@each(
    (Digits(), OneConv(filters=8), "numpy", 1),
    pytest.param(Mnist(root=str(MNIST)), TwoConvMlp(), "cpu-simd", 5, marks=[pytest.mark.slow, needs_mnist]),
    ids=["digits", "mnist"],
)
def test_ten_digits_in_nine_renderings_are_read_and_the_rest_flagged(source, model, name, places):
    data, network = source.load(), model.network(SHAPE, 10)
    look = photograph.describe(data.train.images, data.train.labels, 10)
    program = backend(name).compile(network, model.loss, SGD(lr=0.1), 50)
    program.restore(network.initial_state(0))
    list(train_epochs(program, data, 3))
    for place in range(places):  # among the test images of a class
        found = {}
        for digit in range(10):
            i = int(np.flatnonzero(data.test.labels == digit)[place])
            for rendering, picture in renderings(data.test.images[i, :, :, 0], i).items():
                found[digit, rendering] = photograph.prepare(picture, look, SHAPE)
        scores = program.predict(program.load(np.stack([*found.values()]), np.zeros(90, np.int32))).astype(np.float64)
        sure = np.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1) < 1 / SURE
        read = zip(found, scores.argmax(axis=1), sure, strict=True)
        wrong = [(key, is_sure) for key, best, is_sure in read if best != key[0]]
        assert len(wrong) <= 9
        assert not [key for key, is_sure in wrong if is_sure and photograph.unlike(found[key], look) is None]
