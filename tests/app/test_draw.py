"""The page on which one draws: what it serves to whom, and what a browser makes of it."""

import base64
import contextlib
import http.client
import io
import json
import math
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoints import saved
from chromium import CHROMIUM, Browser
from commands import raises, starting
from PIL import Image
from renderings import opaque, png, renderings

from cnnexp import Conv2d, Digits, Dropout, Flatten, Linear, MaxPool2d, OneConv, ReLU, backend, fit
from cnnexp.app import draw
from cnnexp.errors import CheckpointError, ConfigError
from cnnexp.tracking.model import Classifier

PNG = {"Content-Type": "image/png"}


@contextlib.contextmanager
def served(path):
    """Give the server of a checkpoint's page, which answers in a thread, and the classifier."""
    classifier = Classifier(path, backend("numpy"))
    with draw.Server(classifier, "a run") as server, ThreadPoolExecutor(1) as pool:
        pool.submit(server.serve_forever, 0.05)
        try:
            yield server, classifier
        finally:
            server.shutdown()


def ask(server, method="GET", path="/", body=None, **headers):
    """Return the status and what was answered, JSON where it is such."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)) as connection:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
    return answer.status, json.loads(content) if answer.getheader("Content-Type") == "application/json" else content


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A checkpoint of a network that knows digits."""
    data = Digits().load()
    result = fit(OneConv(filters=8), data, backend="numpy", epochs=3, batch_size=50, baseline=None)
    return result.save(tmp_path_factory.mktemp("digits")), data.test


def test_the_maps_are_the_outputs_of_the_layers(tmp_path):
    layers = (Conv2d(40, 3), ReLU(), MaxPool2d(2), Dropout(0.5), Flatten(), Linear(40), ReLU(), Linear(3))
    path, _ = saved(tmp_path, layers, (6, 8, 1))
    with served(path) as (server, classifier):
        pixels = np.random.default_rng(0).integers(0, 256, (6, 8)).astype(np.uint8)
        _, answer = ask(server, "POST", "/look", png(pixels), **PNG)
        outputs = {s.name: y[0] for s, y in classifier.outputs(pixels[np.newaxis, :, :, np.newaxis])}
        (scores,) = classifier.predict(pixels[np.newaxis])
    assert " ".join(layer["name"] for layer in answer["layers"]) == "conv1 relu1 maxpool1 linear1 relu2 linear2"
    shapes = [layer["shape"] for layer in answer["layers"]]
    assert shapes == [[4, 6, 40], [4, 6, 40], [2, 3, 40], [2, 32, 1], [2, 32, 1], [1, 3, 1]]
    for layer in answer["layers"]:
        y = outputs[layer["name"]]
        numbers = np.frombuffer(base64.b64decode(layer["numbers"]), np.int8) * layer["largest"] / 127
        wanted = y[:, :, : draw.MOST_MAPS].transpose(2, 0, 1) if y.ndim == 3 else y
        np.testing.assert_allclose(numbers[: wanted.size], wanted.ravel(), rtol=0, atol=layer["largest"] / 250)
        assert not numbers[wanted.size :].any()
    powers = np.exp(outputs["linear2"])
    np.testing.assert_allclose(powers / powers.sum(), scores, rtol=1e-5)


def test_the_page_has_the_labels_and_the_shape_of_its_model(tmp_path):
    path, _ = saved(tmp_path, shape=(4, 5, 3), classes=["<b>", "two", "three"])
    with served(path) as (server, _):
        status, page = ask(server)
        assert (status, page) == (200, (Path(draw.__file__).parent / draw.PAGE).read_bytes())
        _, model = ask(server, path="/model")
    assert (model["classes"], model["shape"], model["colours"]) == (["<b>", "two", "three"], [4, 5, 3], True)
    assert not re.search(rb"(src|href)=.https?:|url\(|import ", page)  # nothing from elsewhere


def test_only_this_machines_own_page_is_answered(digits):
    picture = png(np.zeros((28, 28), np.uint8))
    path, test = digits
    with served(path) as (server, classifier):
        port = server.server_port
        assert server.server_address[0] == "127.0.0.1"
        for headers, status in (
            ({"Host": f"localhost:{port}"}, 200),
            ({"Host": f"127.0.0.1:{port}", "Origin": f"http://127.0.0.1:{port}"}, 200),
            ({"Host": "evil.example"}, 403),
            ({"Host": f"evil.example:{port}"}, 403),
            ({"Host": "127.0.0.1"}, 403),
            ({"Origin": "http://evil.example"}, 403),
            ({"Origin": "null"}, 403),
        ):
            assert ask(server, **headers)[0] == status, headers
            assert ask(server, "POST", "/look", picture, **PNG, **headers)[0] == status, headers
        for method, path, headers, status in (
            ("GET", "/../draw.py", {}, 404),
            ("POST", "/", PNG, 404),
            ("POST", "/look", {"Content-Type": "text/plain"}, 404),
            ("POST", "/look", {**PNG, "Content-Length": str(draw.MOST_BYTES + 1)}, 413),
            ("PUT", "/look", PNG, 501),
        ):
            assert ask(server, method, path, picture, **headers)[0] == status, (method, path)
        large = 255 - test.images[0, :, :, 0].repeat(10, axis=0).repeat(10, axis=1)
        _, answer = ask(server, "POST", "/look", png(large), **PNG)  # it goes the way of a photograph
        assert base64.b64decode(answer["image"]) == classifier.prepare(opaque(large)).tobytes()
        _, blank = ask(server, "POST", "/look", png(np.full((280, 280), 255, np.uint8)), **PNG)
        assert (answer["doubt"], blank["doubt"]) == (None, "no stroke: the picture is blank")
        status, answer = ask(server, "POST", "/look", b"no picture", **PNG)
        assert (status, answer["error"]) == (400, "the drawing: not a picture that Pillow can read")


def test_a_mistake_is_one_line(tmp_path):
    for arguments in ([], ["a", "b"], ["--fast"]):
        raises(ConfigError, "draw: give a run", draw.command, arguments)
    raises(CheckpointError, "draw nowhere: no such file or folder", draw.command, ["nowhere"])
    path, _ = saved(tmp_path, (Linear(3),), (2,))
    raises(ConfigError, r"draw .*: the model takes inputs of shape \(2,\), no pictures", draw.command, [str(path)])


def test_the_command_serves_until_ctrl_c(digits):
    with starting("draw", str(digits[0])) as process:
        process.stdout.readline()
        port = int(re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\n", process.stdout.readline())[1])
        assert ask(SimpleNamespace(server_port=port))[0] == 200
        process.send_signal(signal.SIGINT)
        assert (process.wait(30), process.stderr.read()) == (0, "")


def three(left, top, side):
    """Return points of a 3 on a square."""
    arcs = ((0.33, 0.15, -2.6, 1.4), (0.65, 0.17, -1.5, 2.6))  # middle, radius, angles
    turns = [(y, r, a) for y, r, first, last in arcs for a in np.linspace(first, last, 12)]
    return [(left + side * (0.5 + r * math.cos(a)), top + side * (y + r * math.sin(a))) for y, r, a in turns]


PAPER = "(({x, y, width}) => [x, y, width])(document.getElementById('paper').getBoundingClientRect())"
BEST = "[...document.querySelectorAll('.name.best')].map((e) => e.textContent).join()"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed to draw in")
def test_a_digit_is_drawn_in_a_browser_and_read(digits, tmp_path):
    path, test = digits
    seven = test.images[np.flatnonzero(test.labels == 7)[0], :, :, 0]
    photograph_of_a_seven = tmp_path / "seven.png"
    Image.fromarray(renderings(seven)["margin"]).save(photograph_of_a_seven)
    with served(path) as (server, classifier), Browser(tmp_path / "profile") as browser:
        for width, phone in ((1280, False), (390, True)):
            browser.resize(width, 900, phone)
            browser.call("Page.navigate", url=server.address)
            browser.wait("document.querySelectorAll('#classes .name').length == 10")
            assert browser.evaluate(BEST) == ""
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
            browser.drag(three(*browser.evaluate(PAPER)))
            browser.wait("!asking && document.querySelectorAll('.maps canvas').length == 3 * 8 + 1")
            assert browser.evaluate(BEST) == "3"
            # what the page shows is what `predict` says of the file that it sent
            sent = browser.evaluate("paper.toDataURL('image/png').split(',')[1]")
            with Image.open(io.BytesIO(base64.b64decode(sent))) as file:
                image = classifier.prepare(np.asarray(file.convert("RGBA")))
            (expected,) = classifier.predict(image[np.newaxis])
            shown = browser.evaluate("[...document.querySelectorAll('.bar')].map((bar) => parseFloat(bar.style.width))")
            np.testing.assert_allclose(shown, 100 * expected, rtol=0, atol=1e-3)
            browser.click("#clear")
            browser.wait(f"!{BEST}")
            browser.choose("#file", photograph_of_a_seven)
            browser.wait(f"!asking && {BEST} == '7'")
            browser.click("#clear")
            browser.wait(f"!{BEST}")
            assert browser.evaluate("document.querySelectorAll('.maps canvas').length") == 0
    assert browser.said == []
    assert all(address.startswith(server.address) for address in browser.requested if not address.startswith("data:"))
