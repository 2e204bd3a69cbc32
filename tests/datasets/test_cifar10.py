"""`cifar10` on small files in the published format, damaged ones included."""

import hashlib
import io
import tarfile

import numpy as np
import pytest

from cnnexp.datasets import Cifar10
from cnnexp.datasets.cifar10 import ARCHIVE, FOLDER, MOST_BYTES, RECORD, TEST, TRAIN
from cnnexp.errors import DataError

NAMES = (*TRAIN, TEST)


def records(count, seed):
    """Return the images (N, 32, 32, 3), the labels, and a file of them."""
    rng = np.random.default_rng(seed)
    images, labels = rng.integers(0, 256, (count, 32, 32, 3), np.uint8), rng.integers(0, 10, count, np.uint8)
    planes = images.transpose(0, 3, 1, 2).reshape(count, -1)
    return images, labels, np.hstack([labels[:, None], planes]).tobytes()


FILES = {name: records(3, i) for i, name in enumerate(NAMES)}


def archive(path, members):
    """Write a gzipped archive of (name, content)."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def whole(folder, **changes):
    contents = {name: content for name, (_, _, content) in FILES.items()} | changes
    archive(folder / ARCHIVE, [(f"{FOLDER}/{name}", content) for name, content in contents.items()])


@pytest.mark.parametrize("where", ["archive", "files", "folder"])
def test_images_and_labels_are_those_written(tmp_path, where):
    if where == "archive":
        whole(tmp_path)
    else:
        folder = tmp_path if where == "files" else tmp_path / FOLDER
        folder.mkdir(exist_ok=True)
        for name, (_, _, content) in FILES.items():
            (folder / name).write_bytes(content)
    dataset = Cifar10(root=str(tmp_path), verify=False).load()
    np.testing.assert_array_equal(dataset.train.images, np.concatenate([FILES[name][0] for name in TRAIN]))
    np.testing.assert_array_equal(dataset.train.labels, np.concatenate([FILES[name][1] for name in TRAIN]))
    np.testing.assert_array_equal(dataset.test.images, FILES[TEST][0])
    assert dataset.input_shape == (32, 32, 3)
    assert dataset.classes[3] == "cat"
    written = {"archive": [ARCHIVE], "folder": [FOLDER], "files": [*NAMES]}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(written[where])


def test_the_archive_is_held_against_its_sha256(tmp_path, monkeypatch):
    whole(tmp_path)
    with pytest.raises(DataError, match=r"altered or truncated: it has sha256 [0-9a-f]{64}; download it again"):
        Cifar10(root=str(tmp_path)).load()
    monkeypatch.setattr(Cifar10, "sha256", hashlib.sha256((tmp_path / ARCHIVE).read_bytes()).hexdigest())
    with pytest.raises(DataError, match=r"data_batch_1.bin in it: holds 3 images, the published one 10000"):
        Cifar10(root=str(tmp_path)).load()


def test_what_lies_elsewhere_in_an_archive_is_no_part_of_it(tmp_path):
    members = [(f"{FOLDER}/{name}", FILES[name][2]) for name in NAMES if name != TEST]
    archive(tmp_path / ARCHIVE, [*members, (f"../{TEST}", FILES[TEST][2]), (f"/{FOLDER}/{TEST}", FILES[TEST][2])])
    with pytest.raises(DataError, match=rf"lacks {FOLDER}/{TEST}"):
        Cifar10(root=str(tmp_path), verify=False).load()
    assert [path.name for path in tmp_path.iterdir()] == [ARCHIVE]


def test_a_link_in_an_archive_is_not_followed(tmp_path):
    whole(tmp_path)
    with tarfile.open(tmp_path / ARCHIVE, "w:gz") as tar:
        link = tarfile.TarInfo(f"{FOLDER}/{TEST}")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with pytest.raises(DataError, match="lacks"):
        Cifar10(root=str(tmp_path), verify=False).load()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (FILES[TEST][2][:-1], rf"{TEST} in it: truncated or altered: {3 * RECORD - 1} bytes are no whole number"),
        (b"", r"truncated or altered: 0 bytes"),
        (b"\x0b" + FILES[TEST][2][1:], r"labels must be 0 \.\. 9 for 10 classes"),
        (bytes(MOST_BYTES + 1), rf"has {MOST_BYTES + 1} bytes, more than the {MOST_BYTES} of a file"),
    ],
    ids=["cut", "empty", "label", "large"],
)
def test_damaged_members_are_one_line(tmp_path, content, message):
    whole(tmp_path, **{TEST: content})
    with pytest.raises(DataError, match=message) as caught:
        Cifar10(root=str(tmp_path), verify=False).load()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>", "damaged, or no gzipped archive"),
        (b"", "damaged, or no gzipped archive|lacks"),
        (None, "holds neither"),
    ],
)
def test_what_is_no_archive_is_one_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / ARCHIVE).write_bytes(content)
    with pytest.raises(DataError, match=message):
        Cifar10(root=str(tmp_path), verify=False).load()


def test_an_archive_cut_short_is_one_line(tmp_path):
    whole(tmp_path)
    path = tmp_path / ARCHIVE
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(DataError, match="damaged, or no gzipped archive"):
        Cifar10(root=str(tmp_path), verify=False).load()


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match=r"dataset.root=.*nowhere.*: "):
        Cifar10(root=str(tmp_path / "nowhere")).load()


def test_a_file_that_lacks_its_end_is_named(tmp_path):
    for name, (_, _, content) in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / TRAIN[2]).write_bytes(FILES[TRAIN[2]][2][:100])
    with pytest.raises(DataError, match=r"data_batch_3\.bin'?: truncated or altered: 100 bytes"):
        Cifar10(root=str(tmp_path), verify=False).load()
