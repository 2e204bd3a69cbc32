"""`cifar10` on small files in the published format, damaged ones included."""

import hashlib
import io
import tarfile

import numpy as np
import pytest
from commands import refused
from tables import each

from cnnexp.datasets import Cifar10
from cnnexp.datasets.cifar10 import ARCHIVE, FOLDER, MOST_BYTES, RECORD, TEST, TRAIN

NAMES = (*TRAIN, TEST)


def records(count, seed):
    """Return the images (N, 32, 32, 3), the labels, and a file of them."""
    rng = np.random.default_rng(seed)
    images, labels = rng.integers(0, 256, (count, 32, 32, 3), np.uint8), rng.integers(0, 10, count, np.uint8)
    planes = images.transpose(0, 3, 1, 2).reshape(count, -1)
    return images, labels, np.hstack([labels[:, None], planes]).tobytes()


FILES = {name: records(3, i) for i, name in enumerate(NAMES)}


def whole(folder, content=FILES[TEST][2], where=f"{FOLDER}/{TEST}", kind=tarfile.REGTYPE):
    """Write the gzipped archive, its test file with another content, in another place, or of another kind."""
    files = {f"{FOLDER}/{name}": FILES[name][2] for name in TRAIN} | {where: content}
    with tarfile.open(folder / ARCHIVE, "w:gz") as tar:
        for place, written in files.items():
            member = tarfile.TarInfo(place)
            member.size, member.type = len(written), kind if place == where else tarfile.REGTYPE
            member.linkname = "/etc/passwd" if member.issym() else ""
            tar.addfile(member, io.BytesIO(written))


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
    assert (dataset.input_shape, dataset.classes[3]) == ((32, 32, 3), "cat")
    written = {"archive": [ARCHIVE], "folder": [FOLDER], "files": [*NAMES]}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(written[where])


def test_the_archive_is_held_against_its_sha256(tmp_path, monkeypatch):
    whole(tmp_path)
    refused(Cifar10(root=str(tmp_path)), r"altered or truncated: it has sha256 [0-9a-f]{64}; download it again")
    monkeypatch.setattr(Cifar10, "sha256", hashlib.sha256((tmp_path / ARCHIVE).read_bytes()).hexdigest())
    refused(Cifar10(root=str(tmp_path)), r"data_batch_1.bin in it: holds 3 images, the published one 10000")


@each(
    (f"../{TEST}", tarfile.REGTYPE),
    (f"/{FOLDER}/{TEST}", tarfile.REGTYPE),
    (f"{FOLDER}/{TEST}", tarfile.SYMTYPE),
    ids=["above", "absolute", "a link"],
)
def test_what_lies_elsewhere_or_is_a_link_is_no_part_of_an_archive(tmp_path, where, kind):
    whole(tmp_path, b"" if kind == tarfile.SYMTYPE else FILES[TEST][2], where, kind)
    refused(Cifar10(root=str(tmp_path), verify=False), rf"lacks {FOLDER}/{TEST}")
    assert [path.name for path in tmp_path.iterdir()] == [ARCHIVE]


@each(
    (FILES[TEST][2][:-1], rf"{TEST} in it: truncated or altered: {3 * RECORD - 1} bytes are no whole number"),
    (b"", r"truncated or altered: 0 bytes"),
    (b"\x0b" + FILES[TEST][2][1:], r"labels must be 0 \.\. 9 for 10 classes"),
    (bytes(MOST_BYTES + 1), rf"has {MOST_BYTES + 1} bytes, more than the {MOST_BYTES} of a file"),
    ids=["cut", "empty", "label", "large"],
)
def test_damaged_members_are_one_line(tmp_path, content, message):
    whole(tmp_path, content)
    refused(Cifar10(root=str(tmp_path), verify=False), message)


@each(
    (ARCHIVE, lambda archive: b"<html>", "damaged, or no gzipped archive"),
    (ARCHIVE, lambda archive: b"", "damaged, or no gzipped archive|lacks"),
    (ARCHIVE, lambda archive: archive[:-2000], "damaged, or no gzipped archive"),
    ("another", lambda archive: archive, "holds neither"),
    (TRAIN[2], lambda archive: FILES[TRAIN[2]][2][:100], r"data_batch_3\.bin'?: truncated or altered: 100 bytes"),
    ids=["page", "empty", "cut", "none", "a file of it cut"],
)
def test_what_is_no_archive_is_one_line(tmp_path, name, cut, message):
    whole(tmp_path)
    content = cut((tmp_path / ARCHIVE).read_bytes())
    (tmp_path / ARCHIVE).unlink()
    for other in NAMES if name in NAMES else ():
        (tmp_path / other).write_bytes(FILES[other][2])
    (tmp_path / name).write_bytes(content)
    refused(Cifar10(root=str(tmp_path), verify=False), message)
    refused(Cifar10(root=str(tmp_path / "nowhere")), r"dataset.root=.*nowhere.*: ")
