import gzip
import hashlib
import re
import struct
import tracemalloc

import numpy as np
import pytest
from commands import MNIST, needs_mnist, raises, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from idx_files import NAMES, idx_bytes, publish, small_set, write
from tables import each

from cnnexp.datasets import FashionMnist, Mnist
from cnnexp.datasets.idx import read_idx
from cnnexp.errors import DataError

IMAGES = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)
SOUND = idx_bytes(IMAGES)
GZIPPED = gzip.compress(SOUND, mtime=0)


def read(tmp_path, content, name):
    path = tmp_path / name
    path.write_bytes(content)
    return read_idx(path, 3)


@settings(max_examples=30)
@given(array=hnp.arrays(np.uint8, hnp.array_shapes(min_dims=3, max_dims=3)), gzipped=st.booleans())
def test_reads_plain_and_gzipped(tmp_path_factory, array, gzipped):
    content = idx_bytes(array)
    given, name = (gzip.compress(content), "a.gz") if gzipped else (content, "a")
    found, sha256 = read(tmp_path_factory.mktemp("idx"), given, name)
    np.testing.assert_array_equal(found, array)
    assert sha256 == hashlib.sha256(content).hexdigest()


BROKEN = {
    "labels given as images": ("images", idx_bytes(IMAGES[:, 0, 0]), "0x00000801, expected 0x00000803 (images)"),
    "no IDX": ("images", b"\x89PNG\r\n\x1a\n" * 9, "found magic number 0x89504E47"),
    "floats": ("images", idx_bytes(IMAGES, 0x0D), "type 0x0D (float32); supported: 0x08 (uint8)"),
    "empty": ("images", b"", "truncated: 0 bytes"),
    "header cut": ("images", SOUND[:10], "truncated: 10 bytes, its header alone has 16"),
    "cut": ("images", SOUND[:-7], "announces 5x4x3 = 60, 53 bytes follow"),
    "trailing bytes": ("images", SOUND + b"x", "announces 5x4x3 = 60, more bytes follow"),
    "trailing bytes, gzipped": ("images.gz", gzip.compress(SOUND + b"x", mtime=0), "more bytes follow"),
    "no images": ("images", idx_bytes(IMAGES[:0]), "announces 0x4x3 bytes"),
    "absurd header": ("images", struct.pack(">4I", 0x803, *[2**32 - 1] * 3), "legal: 1 .. 2147483648"),
    "gzip cut": ("images.gz", GZIPPED[:-20], "truncated: the compressed data end early"),
    "gzip without its last byte": ("images.gz", GZIPPED[:-1], "truncated"),
    "wrong CRC": ("images.gz", GZIPPED[:-8] + b"\0" * 4 + GZIPPED[-4:], "damaged: CRC check failed"),
    "damaged deflate stream": ("images.gz", GZIPPED[:10] + b"\xff" * 30, "damaged: Error -3"),
    "plain file named .gz": ("images.gz", SOUND, "not gzip but something else: it begins with b'\\x00\\x00\\x08\\x03"),
    "web page named .gz": ("images.gz", b"<!DOCTYPE html><html><body>404", "not gzip but a web page"),
}


@pytest.mark.parametrize(("name", "content", "part"), BROKEN.values(), ids=BROKEN)
def test_broken_files_say_what_is_wrong(tmp_path, name, content, part):
    raises(DataError, re.escape(part), read, tmp_path, content, name)


def test_every_truncation_is_seen(tmp_path):
    for content, name in ((SOUND, "images"), (GZIPPED, "images.gz")):
        for length in range(len(content)):
            raises(DataError, "truncated|announces|not gzip", read, tmp_path, content[:length], name)


def test_gzip_bomb_is_read_no_further_than_its_header_says(tmp_path):
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(SOUND + bytes(50_000_000)))
    tracemalloc.start()
    raises(DataError, "announces 5x4x3 = 60, more bytes follow", read_idx, path, 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


@pytest.mark.parametrize("gzipped", [True, False])
def test_root_may_hold_either_form(tmp_path, gzipped):
    write(tmp_path, small_set(), gzipped=gzipped)
    dataset = Mnist(root=str(tmp_path), verify=False, train_size=20).load()
    assert (dataset.train.images.shape, dataset.train.images.dtype) == ((20, 28, 28, 1), np.uint8)
    assert dataset.train.images[:, 14, 14, 0].tolist() == list(range(20))
    assert dataset.test.labels.tolist() == list(range(10))
    assert (dataset.name, dataset.classes, dataset.source) == ("mnist", tuple("0123456789"), str(tmp_path))


@pytest.mark.parametrize("name", ["with space", "ünïcode 日本", "%41#?&", "new\nline", "x" * 250])
def test_root_may_have_any_name(tmp_path, name):
    folder = write(tmp_path / name, small_set())
    assert len(Mnist(root=str(folder), verify=False).load().train) == 30
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(b"")
    refused(Mnist(root=str(folder), verify=False), "t10k-labels-idx1-ubyte")


def test_root_missing_file_and_empty_and_another_shape_than_the_published(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    cases = {"nowhere": "no such file", "file": "not a directory", "empty": "holds neither train-images-idx3"}
    for name, part in {**cases, "x" * 300: "file name too long"}.items():
        refused(Mnist(root=str(tmp_path / name)), f"^dataset.root='{tmp_path / name}': .*{part}")

    write(tmp_path, small_set())
    said = r"idx3-ubyte\.gz': holds an array of \(30, 28, 28\), .* \(60000, 28, 28\); down"
    refused(Mnist(root=str(tmp_path)), said)


@each((Mnist, "altered: its content has sha256"), (FashionMnist, "altered.*: it has sha256"))
def test_verify_accepts_the_published_content_and_sees_one_altered_pixel(tmp_path, monkeypatch, source, part):
    publish(monkeypatch, published := small_set())
    write(tmp_path, published)
    assert len(source(root=str(tmp_path)).load().train) == 30
    if source is Mnist:  # it may be compressed anew
        for name, content in published.items():
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content, compresslevel=1, mtime=7))
        assert len(Mnist(root=str(tmp_path)).load().train) == 30
    altered = bytearray(published[NAMES[2]])
    altered[-1] ^= 1
    write(tmp_path, {NAMES[2]: bytes(altered)})
    refused(source(root=str(tmp_path)), f"{NAMES[2]}.gz': {part}.*; download it again")


@needs_mnist
def test_real_mnist():
    whole = Mnist(root=str(MNIST)).load()
    assert (len(whole.train), len(whole.test), whole.input_shape) == (60_000, 10_000, (28, 28, 1))
    assert whole.train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    rendon = Mnist(root=str(MNIST), train_size=50_000, validation_size=10_000).load()
    np.testing.assert_array_equal(rendon.train.images, whole.train.images[:50_000])
    np.testing.assert_array_equal(rendon.validation.labels, whole.train.labels[50_000:])
    assert rendon.sha256 != whole.sha256
