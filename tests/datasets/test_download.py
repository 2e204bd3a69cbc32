import functools
import gzip
import http.server
import os
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
from commands import raises, refused
from idx_files import NAMES, publish, small_set, write

from cnnexp.datasets import FashionMnist, Mnist
from cnnexp.datasets.download import fetch
from cnnexp.datasets.idx import FORM
from cnnexp.errors import DataError

FILES = small_set()


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, counts what is asked for, and breaks off in the middle of files under /cut/."""

    requests: ClassVar[list[str]] = []

    def do_GET(self):
        self.requests.append(self.path)
        if self.path.startswith("/cut/"):
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"\x1f\x8b")
        else:
            super().do_GET()

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A mirror under /good/ and broken ones beside it; returns the base URL. The cache is a fresh folder."""
    web = tmp_path / "web"
    write(web / "good", FILES)
    write(web / "altered", {name: content[:-1] + b"\xff" for name, content in FILES.items()})
    write(web / "html", {f"{name}.gz": b"<!doctype html><html>Please log in" for name in NAMES}, gzipped=False)
    monkeypatch.setattr(Handler, "requests", [])
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path / "cache" / name)
    publish(monkeypatch, FILES)
    handler = functools.partial(Handler, directory=web)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd, ThreadPoolExecutor(1) as pool:
        pool.submit(httpd.serve_forever, 0.01)
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


def test_downloads_once_into_the_cache(server, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(Mnist, "mirrors", (f"{server}/good/",))
    cache = tmp_path / "cache" / "cnnexp" / "mnist"
    left = cache / "partial-of-a-killed-process"
    left.mkdir(parents=True)
    os.utime(left, (1000, 1000))
    first = Mnist().load()
    assert (len(first.train), len(first.test)) == (30, 10)
    assert Handler.requests == [f"/good/{name}.gz" for name in NAMES]
    assert {path.name for path in cache.iterdir()} == {f"{name}.gz" for name in NAMES}
    assert Mnist().load().sha256 == first.sha256
    assert len(Handler.requests) == 4
    cached = cache / f"{NAMES[0]}.gz"  # what is damaged is downloaded again
    sound = cached.read_bytes()
    cached.write_bytes(sound[:100])
    assert len(Mnist().load().train) == 30
    assert cached.read_bytes() == sound
    assert len(Handler.requests) == 5
    assert "truncated" in caplog.text


@pytest.mark.parametrize("broken", ["missing", "altered", "html", "cut"])
def test_falls_back_to_the_second_mirror(server, monkeypatch, broken):
    monkeypatch.setattr(Mnist, "mirrors", (f"{server}/{broken}/", f"{server}/good/"))
    assert len(Mnist().load().train) == 30
    assert Handler.requests[:2] == [f"/{broken}/{NAMES[0]}.gz", f"/good/{NAMES[0]}.gz"]


def test_both_mirrors_failing_is_one_line_with_the_way_offline(server, monkeypatch, tmp_path):
    reached = [f"{server}/{name}/" for name in ("missing", "cut", "altered")]
    monkeypatch.setattr(Mnist, "mirrors", ("http://127.0.0.1:9/", *reached))
    parts = ("mnist: cannot download train-images-idx3-ubyte.gz", "127.0.0.1:9: no connection", "404", "broke off")
    refused(Mnist(), ".*".join((*parts, "altered", "dataset.root=<folder>")))
    assert not list((tmp_path / "cache" / "cnnexp" / "mnist").iterdir())


def test_fashion_mnist_is_held_against_the_sha256_of_the_gzipped_file(server, monkeypatch):
    monkeypatch.setattr(FashionMnist, "mirrors", (f"{server}/altered/", f"{server}/good/"))
    dataset = FashionMnist().load()
    assert dataset.classes[9] == "Ankle boot"
    assert len(Handler.requests) == 8


def test_progress_is_shown_in_a_terminal_alone(server, monkeypatch, capsys):
    monkeypatch.setattr(Mnist, "mirrors", (f"{server}/good/",))
    size = len(gzip.compress(FILES[NAMES[1]], mtime=0))
    fetch("mnist", f"{NAMES[0]}.gz", (f"{server}/good/",), lambda path: path, 10**6)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    Mnist().load()
    shown = capsys.readouterr().err
    assert all(f"{name}.gz" in shown for name in NAMES[1:])
    assert f"{size}/{size} bytes" in shown


def test_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path / "file")
    raises(DataError, "cannot write to the cache .*not a directory", fetch, "mnist", "a.gz", ("http://a/",), str, 10)


def test_a_mirror_that_sends_more_than_the_file_can_have_is_left(server, monkeypatch, tmp_path):
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path / "cache")
    read = []
    with pytest.raises(DataError, match=r"127\.0\.0\.1:\d+: more than the 100 bytes that it can have"):
        fetch("mnist", f"{NAMES[0]}.gz", (f"{server}/good/",), read.append, 100)
    assert read == []
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_published_mirrors_and_hashes():
    for source in (Mnist, FashionMnist):
        assert all(url.startswith("https://") and url.endswith("/") for url in source.mirrors)
    assert tuple(FORM) == NAMES
    assert [len(digest) for digest in (*Mnist.sha256, *FashionMnist.sha256)] == [64] * 8
