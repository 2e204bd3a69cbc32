import csv
import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from commands import raises, refused
from PIL import Image
from tables import each

from cnnexp.datasets import Digits, Fer2013, Images, Npz, Quadrants, Synthetic, photograph
from cnnexp.datasets.digits import enlarge
from cnnexp.datasets.idx import read_idx
from cnnexp.datasets.images import read_picture
from cnnexp.errors import ConfigError, DataError, OutOfMemory
from cnnexp.system import memory

SPLIT = ("images", "labels")


def nearest_mean_accuracy(dataset):
    """Return the test accuracy of a classifier that knows the mean training image of each class."""
    train, test = (s.images.reshape(len(s), -1).astype(np.float32) for s in (dataset.train, dataset.test))
    means = np.stack([train[dataset.train.labels == label].mean(0) for label in range(len(dataset.classes))])
    distances = ((test[:, None] - means) ** 2).sum(2)
    return (distances.argmin(1) == dataset.test.labels).mean()


def test_digits():
    dataset = Digits().load()
    assert (dataset.train.images.shape, dataset.test.images.shape) == ((1500, 28, 28, 1), (297, 28, 28, 1))
    assert dataset.train.images.dtype == np.uint8
    assert (dataset.train.images.min(), dataset.train.images.max()) == (0, 255)
    assert nearest_mean_accuracy(dataset) > 0.85
    assert dataset.sha256 == Digits(seed=0).load().sha256 != Digits(seed=1).load().sha256


def test_digits_hold_the_images_of_scikit_learn():
    bunch = pytest.importorskip("sklearn.datasets").load_digits()
    loaded = Digits().load()
    order = np.random.default_rng(0).permutation(len(bunch.images))
    images, labels = (np.concatenate([getattr(s, what) for s in (loaded.train, loaded.test)]) for what in SPLIT)
    np.testing.assert_array_equal(images, enlarge(bunch.images)[order])
    np.testing.assert_array_equal(labels, bunch.target[order])


def test_enlarge_agrees_with_pillow():
    images = np.random.default_rng(0).integers(0, 17, (3, 8, 8))
    for image, enlarged in zip(images, enlarge(images), strict=True):
        expected = Image.fromarray(image.astype(np.float32)).resize((28, 28), Image.Resampling.BILINEAR)
        np.testing.assert_allclose(enlarged[..., 0], np.asarray(expected) * 255 / 16, atol=0.51)


def test_quadrants():
    dataset = Quadrants(train_size=1000, test_size=100, validation_size=50, seed=3).load()
    points, labels = dataset.train.images, dataset.train.labels
    assert (points.shape, points.dtype, len(dataset.validation)) == ((1000, 2), np.float32, 50)
    assert -1 <= points.min() < -0.9 < 0.9 < points.max() <= 1
    np.testing.assert_array_equal(labels, [int((x > 0) != (y > 0)) for x, y in points])
    assert 400 < labels.sum() < 600
    assert dataset.sha256 != Quadrants(train_size=1000, test_size=100, validation_size=50, seed=4).load().sha256


@pytest.mark.parametrize("shape", [(28, 28, 1), (1, 7, 2), (30, 17, 3)])
def test_synthetic_is_of_any_shape_and_can_be_learned(shape):
    height, width, channels = shape
    dataset = Synthetic(height=height, width=width, channels=channels, classes=3, seed=1, noise=0.1).load()
    assert dataset.input_shape == shape
    assert np.bincount(dataset.train.labels).tolist() == [667, 667, 666]
    assert nearest_mean_accuracy(dataset) > 0.9


@pytest.mark.parametrize("source", [Quadrants, Synthetic])
def test_fewer_generated_images_are_the_first_of_more(source):
    few, many = source(train_size=50).load(), source(train_size=90).load()
    np.testing.assert_array_equal(few.train.images, many.train.images[:50])
    assert not np.array_equal(few.train.images[:40], few.test.images[:40])


@each(
    (Quadrants, {"test_size": None}, r"dataset\.test_size=None"),
    (Images, {}, r"dataset\.root: not given; .*e\.g\. dataset\.root=photos"),
    (Fer2013, {}, r"dataset\.path: not given"),
    (Npz, {}, r"dataset\.path: not given"),
)
def test_illegal_values_are_one_line(source, values, part):
    raises(ConfigError, part, source, **values)


USAGES = ["Training"] * 6 + ["PublicTest"] * 3 + ["PrivateTest"] * 2
ROWS = [[n % 7, " ".join([str(n)] * 48 * 48), usage] for n, usage in enumerate(USAGES)]


def write_fer(path, rows, header=("emotion", "pixels", "Usage")):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


@pytest.fixture
def fer(tmp_path, monkeypatch):
    monkeypatch.setattr(Fer2013, "rows", {"Training": 6, "PublicTest": 3, "PrivateTest": 2})
    return write_fer(tmp_path / "fer2013.csv", ROWS)


def test_fer2013(fer):
    dataset = Fer2013(path=fer).load()
    assert (dataset.train.images.shape, dataset.train.images.dtype) == ((6, 48, 48, 1), np.uint8)
    assert dataset.train.images[:, 5, 5, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert (dataset.test.images[:, 0, 0, 0].tolist(), dataset.test.labels.tolist()) == ([9, 10], [2, 3])
    assert (dataset.validation, len(dataset.classes)) == (None, 7)
    validation = Fer2013(path=fer, validation_size=2, train_size=6).load().validation  # of PublicTest
    assert validation.images[:, 0, 0, 0].tolist() == [6, 7]
    raises(ConfigError, "validation_size=4: PublicTest has 3", Fer2013(path=fer, validation_size=4).load)


def pixels(*last):
    return " ".join(["0"] * (2304 - len(last)) + [*last])


@each(
    ([0, "1 2 3", "Training"], "line 2: 3 pixels, expected 48 x 48 = 2304"),
    ([0, pixels("256"), "Training"], r"line 2: pixels 0 \.\. 256; legal: 0 \.\. 255"),
    ([0, pixels() + " x", "Training"], "line 2: emotion and pixels must be whole numbers"),
    ([0, pixels("1.5"), "Training"], "line 2: emotion and pixels must be whole numbers"),
    ([0, pixels("-1"), "Training"], r"line 2: pixels -1 \.\. 0"),
    (["happy", pixels(), "Training"], "line 2: emotion and pixels must be whole numbers"),
    ([7, pixels(), "Training"], r"line 2: emotion 7; legal: 0 \.\. 6"),
    ([0, pixels(), "Testing"], "line 2: Usage is 'Testing'; legal: Training, PublicTest, Priv"),
    ([0, pixels()], "line 2: 2 columns, expected 3"),
)
def test_fer2013_malformed_row(tmp_path, row, part):
    refused(Fer2013(path=write_fer(tmp_path / "a.csv", [row])), part)


def test_fer2013_of_another_layout_truncated_missing_or_binary(tmp_path, fer):
    other = write_fer(tmp_path / "other.csv", [], ("label", "image"))
    refused(Fer2013(path=other), r"dataset\.path='.*other\.csv': begins with 'label,image', expected 'emotion")
    short = write_fer(tmp_path / "short.csv", ROWS[:-1])
    refused(Fer2013(path=short), "1 rows of Usage PrivateTest, published were 2")
    assert len(Fer2013(path=short, verify=False).load().test) == 1
    refused(Fer2013(path=str(tmp_path / "none.csv")), "no such file")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00" * 50)
    refused(Fer2013(path=str(tmp_path / "binary.csv")), r"binary\.csv")


def write_pictures(folder, count=10, size=(6, 4), suffix=".png"):
    for name, red, blue in (("blue", 0, 250), ("red", 250, 0)):
        (folder / name).mkdir(parents=True)
        for n in range(count):
            Image.new("RGB", size, (red, n, blue)).save(folder / name / f"{n}{suffix}")
    return str(folder)


def test_images_are_split_by_seed_in_every_class_or_by_folders(tmp_path):
    root = write_pictures(tmp_path / "photos")
    (tmp_path / "photos" / "blue" / "notes.txt").write_text("no picture")
    dataset = Images(root=root).load()
    assert (dataset.classes, dataset.input_shape, dataset.train.images.dtype) == (("blue", "red"), (4, 6, 3), np.uint8)
    assert (np.bincount(dataset.train.labels).tolist(), np.bincount(dataset.test.labels).tolist()) == ([8, 8], [2, 2])
    np.testing.assert_array_equal(dataset.train.images[:, 0, 0, 0] == 250, dataset.train.labels == 1)
    seen = [(s.images[n, 0, 0, 1], s.labels[n]) for s in (dataset.train, dataset.test) for n in range(len(s))]
    assert len(set(seen)) == 20
    assert Images(root=root).load().sha256 == dataset.sha256 != Images(root=root, seed=1).load().sha256

    write_pictures(tmp_path / "split" / "train", 5)
    write_pictures(tmp_path / "split" / "test", 3)
    dataset = Images(root=f"{tmp_path}/split", height=8, width=9, grayscale=True, validation_size=2, test_size=4).load()
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (8, 2, 4)
    assert dataset.input_shape == (8, 9, 1)


@each(
    ({"train": 5, "val": 3}, [10, 6, None]),
    ({"Train": 5, "Test": 4}, [10, 8, None]),
    ({"train": 5, "valid": 3, "test": 4}, [10, 8, 6]),
    ({"train": 5, "other": 5}, [16, 4, None]),  # two classes of these names
)
def test_images_of_folders_that_hold_splits(tmp_path, folders, sizes):
    for name, count in folders.items():
        write_pictures(tmp_path / name, count)
        write_pictures(tmp_path / name / "blue" / ".thumbnails", 2)
    dataset = Images(root=str(tmp_path)).load()
    assert [split and len(split) for split in (dataset.train, dataset.test, dataset.validation)] == sizes


def test_classes_have_names_that_can_be_printed_and_drawn(tmp_path):
    write_pictures(tmp_path)
    (tmp_path / "blue").rename(tmp_path / "b\nl")
    os.rename(tmp_path / "red", os.fsencode(tmp_path) + b"/r\xffd")
    assert Images(root=str(tmp_path)).load().classes == ("b\ufffdl", "r\ufffdd")


@pytest.mark.parametrize("grayscale", [False, True])
def test_what_is_transparent_is_the_ground_on_which_predict_lays_a_picture(tmp_path, grayscale):
    root = Path(write_pictures(tmp_path))
    for mode in ("RGBA", "LA"):
        picture = np.zeros((4, 6, 4), np.uint8)  # black, wherever it is to be seen
        picture[1:3, 2:4, 3] = 255
        Image.fromarray(picture).convert(mode).save(path := root / "blue" / f"{mode}.png")
        image = Images(root=str(root), grayscale=grayscale).read(path)
        seen = photograph.prepare(read_picture(path, "RGBA"), None, image.shape)
        np.testing.assert_array_equal(image, seen)
        assert (image[0, 0, 0], image[1, 2, 0]) == (255, 0)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_images_of_other_modes(tmp_path, mode):
    suffix = ".tif" if mode == "CMYK" else ".png"
    root = Path(write_pictures(tmp_path, 3, suffix=suffix))
    Image.new("RGB", (6, 4), (255, 255, 255)).convert(mode).save(root / "blue" / f"white{suffix}")
    dataset = Images(root=str(root)).load()
    images = np.concatenate([dataset.train.images, dataset.test.images])
    assert (images == 255).all(axis=(1, 2, 3)).sum() == 1


def test_images_of_different_sizes_ask_for_one(tmp_path, monkeypatch):
    root = write_pictures(tmp_path)
    Image.new("RGB", (5, 5)).save(tmp_path / "red" / "big.png")
    said = r"is 5 x 5 pixels and .* 4 x 6; .*dataset\.height=\.\.\. dataset\.width"
    refused(Images(root=root, test_fraction=0.01), said)
    assert Images(root=root, height=4, width=4).load().input_shape == (4, 4, 3)
    with pytest.raises(ConfigError, match="height=65536: must be"):
        Images(root=root, height=65536)
    monkeypatch.setattr(memory, "available", lambda: (2**31, "ulimit -v"))
    with pytest.raises(OutOfMemory, match=r"lower dataset\.height"):
        Images(root=root, height=65535, width=65535).load()


def test_damaged_images_and_ones_too_large(tmp_path, monkeypatch):
    root = Path(write_pictures(tmp_path, 2, (60, 40)))
    victim = root / "blue" / "0.png"
    sound = victim.read_bytes()
    Image.fromarray(np.zeros((40, 60), np.uint16)).save(root / "deep.png")
    cases = {"not a picture": b"<html>", "cannot be read": sound[:-30], "mode I;16": (root / "deep.png").read_bytes()}
    for part, content in cases.items():
        victim.write_bytes(content)
        refused(Images(root=str(root)), rf"0\.png': .*{part}")

    root = write_pictures(tmp_path / "large")
    for limit in (20, 5):  # Pillow warns above its limit and refuses above twice that; both are refused here
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        refused(Images(root=root), f"more than {limit} pixels")


def test_folders_that_hold_no_classes(tmp_path):
    (tmp_path / "empty").mkdir()
    refused(Images(root=str(tmp_path)), "holds 1 folders; it needs one per class")
    refused(Images(root=str(tmp_path / "none")), "no such file or directory")
    (tmp_path / "other").mkdir()
    refused(Images(root=str(tmp_path)), "empty': holds no pictures")
    write_pictures(tmp_path / "single", 1)
    refused(Images(root=str(tmp_path / "single")), "blue': holds one picture")
    write_pictures(tmp_path / "split" / "train", 2)
    write_pictures(tmp_path / "split" / "test", 2)
    (tmp_path / "split" / "test" / "green").mkdir()
    refused(Images(root=str(tmp_path / "split")), "class 'green' is not among the training classes blue, red")


ARRAYS = {
    "train_images": np.arange(6 * 4 * 4, dtype=np.uint8).reshape(6, 4, 4),
    "train_labels": np.array([0, 1, 2, 0, 1, 2]),
    "test_images": np.ones((2, 4, 4), np.uint8),
    "test_labels": np.array([0, 2]),
}
CHANNELS_FIRST = r"channels come last, .*; write numpy\.moveaxis\(images, 1, 3\)"


def write_npz(path, **changes):
    np.savez_compressed(path, **{k: v for k, v in {**ARRAYS, **changes}.items() if v is not None})
    return str(path)


def test_npz(tmp_path):
    dataset = Npz(path=write_npz(tmp_path / "a.npz"), validation_size=1).load()
    assert (dataset.input_shape, dataset.classes) == ((4, 4, 1), ("0", "1", "2"))
    np.testing.assert_array_equal(dataset.train.images[..., 0], ARRAYS["train_images"][:5])
    assert dataset.validation.labels.tolist() == [2]
    assert len(Npz(path=str(tmp_path / "a.npz"), classes=5).load().classes) == 5


@each(
    ({"test_labels": None}, "holds no test_labels, but train_images, train_labels, test_images; needs"),
    ({"train_images": np.array([{}] * 6, object)}, "train_images is an array of Python objects: pickled data refu"),
    ({"test_labels": np.array([0, 3])}, r"npz, test: labels must be 0 \.\. 2 for 3 classes; found 0 \.\. 3"),
    *(({name: np.uint8(3)}, r"a single number, no array|labels of type|of shape") for name in ARRAYS),
    *(({"train_images": np.zeros((6, channels, 8, 9), np.uint8)}, CHANNELS_FIRST) for channels in (1, 3)),
)
def test_npz_malformed(tmp_path, changes, part):
    refused(Npz(path=write_npz(tmp_path / "a.npz", **changes)), part)


def test_npz_with_an_absurd_shape_or_one_enormous_label_is_refused_at_once(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (2**50, 4, 4)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        for name in ARRAYS:
            file.writestr(f"{name}.npy", header.getvalue())
    refused(Npz(path=str(tmp_path / "a.npz")), r"damaged: .*allocate")
    path = write_npz(tmp_path / "a.npz", train_labels=np.array([0, 1, 2, 0, 1, 10**12]))
    refused(Npz(path=path), "train_labels up to 1000000000000; there can be 100000 classes")


def test_npz_damaged_or_something_else(tmp_path):
    path = Path(write_npz(tmp_path / "a.npz"))
    sound = path.read_bytes()
    flipped = bytearray(sound)
    flipped[sound.index(b"train_images.npy") + 60] ^= 0xFF
    np.save(tmp_path / "array.npy", ARRAYS["train_images"])
    for content in (sound[:-30], b"\x80\x04N.", (tmp_path / "array.npy").read_bytes(), b""):
        path.write_bytes(content)
        refused(Npz(path=str(path)), r"dataset\.path='.*a\.npz': not a whole \.npz file")
    path.write_bytes(flipped)
    refused(Npz(path=str(path)), "damaged")
    refused(Npz(path=str(tmp_path / "none.npz")), "no such file")
    refused(Npz(path=str(tmp_path)), "is a directory")


def test_npz_that_unfolds_to_more_than_there_is(tmp_path, monkeypatch):
    path = write_npz(tmp_path / "a.npz", train_images=np.zeros((6, 1000, 1000), np.uint8))
    monkeypatch.setattr(memory, "available", lambda: (5_000_000, "ulimit -v"))
    raises(OutOfMemory, r"needs 600\d+ bytes .* for the arrays of dataset.path", Npz(path=path).load)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names are of POSIX systems")
def test_no_source_waits_for_a_pipe_or_reads_a_device(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        sources = Npz(path=str(path)).load, Fer2013(path=str(path)).load
        for read in (*sources, lambda path=path: read_idx(path, 1), lambda path=path: Images(root=".").read(path)):
            raises(DataError, "not a regular file", read)


@each(
    ([0] * 6, [0, 0], "npz: all training images are of one class, 0: nothing can be learned"),
    ([0, 1, 1, 0, 1, 1], [0, 2], "1 of the classes tested on have no training image: 2"),
    ([1, 2, 2, 1, 2, 2], [1, 2], "labels from 1: class 0, which no image is of, gets an output"),
)
def test_classes_that_cannot_be_learned_are_told(tmp_path, caplog, trained, tested, said):
    changes = {"train_labels": np.array(trained), "test_labels": np.array(tested)}
    Npz(path=write_npz(tmp_path / "a.npz", **changes), classes=None if min(trained) else 3).load()
    assert said in caplog.text
