"""`cnnexp draw`: a page on this machine where one draws, and watches what a run's model makes of it.

The page is draw.html, which asks nobody else for anything. It sends what is drawn as a picture file; that goes the way
of a photograph given to `cnnexp predict`, so both give the same probabilities.
"""

import base64
import io
import json
import sys
import threading
import webbrowser
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from os import environ
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from cnnexp.app.resume import find_run
from cnnexp.backends import backend_class
from cnnexp.datasets import photograph
from cnnexp.datasets.images import decode_picture
from cnnexp.errors import CnnexpError, ConfigError
from cnnexp.network import Dropout, Flatten, Shape
from cnnexp.tracking.model import BACKEND, Classifier
from cnnexp.tracking.view import LOOPBACK, has_screen

PAGE = "draw.html"
MOST_MAPS = 32  # channels of a layer that are shown
MOST_BYTES = 1 << 22  # of a picture
STROKE = 1.7  # as long is the line of a digit, in its heights: 1 of a one, 2.5 of a three
DRAWN = 0.7  # as high do people draw, in sides of the paper
PEN = 0.08  # width, in sides of the paper, where nobody knows better
COLUMNS = 32  # numbers in a row, of a layer that is no image
# whatever the page came to hold, it can run nothing from elsewhere, nor send anything there
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def command(arguments: Sequence[str]) -> None:
    """Serve the page of `cnnexp draw RUN` until Ctrl-C, print its address, and open it where there is a screen.

    Raises as `resume.find_run` and `Classifier`; ConfigError: not one argument, or the model takes no pictures.
    """
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ConfigError("draw: give a run: its folder, its id, latest or best")
    path = find_run(arguments[0], f"draw {arguments[0]}")
    classifier = Classifier(path, backend_class(BACKEND)())
    classifier.check_pictures(f"draw {arguments[0]}: ")
    with Server(classifier, str(path)) as server:
        sys.stdout.write(f"Draw for {path} until Ctrl-C, at\n{server.address}\n")
        sys.stdout.flush()
        if has_screen(environ):
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt as error:
            if type(error) is not KeyboardInterrupt:  # SIGTERM is an end that nobody here asked for
                raise


class Server(ThreadingHTTPServer):
    """Serves the page of one model, whose backend runs layer after layer, to this machine alone, on a free port."""

    daemon_threads = True

    def __init__(self, classifier: Classifier, name: str) -> None:
        super().__init__((LOOPBACK, 0), _Handler)
        self.address = f"http://{LOOPBACK}:{self.server_port}/"
        self._classifier, self._name, self._one_at_a_time = classifier, name, threading.Lock()

    def describe(self) -> dict[str, Any]:
        network, look = self._classifier.network, self._classifier.look
        return {
            "classes": self._classifier.classes,
            "shape": network.input_shape,
            "text": f"{self._name}: {len(network.layers)} layers, {network.parameter_count:,} parameters",
            "colours": look is None,  # else only the shape counts
            "pen": PEN if look is None else _pen(look, network.input_shape),
        }

    def look(self, file: bytes) -> dict[str, Any]:
        """Return what the model makes of a picture file, see `show` in draw.html; raise DataError where it is none."""
        picture = decode_picture(io.BytesIO(file), "RGBA", "the drawing")
        with self._one_at_a_time:
            image = self._classifier.prepare(picture)
            (probabilities,) = self._classifier.predict(image[np.newaxis])
            outputs = self._classifier.outputs(image[np.newaxis])
        # a Flatten only shows its input again, and so does a Dropout outside training
        shown = [(stage, y[0]) for stage, y in outputs if not isinstance(stage.layer, Flatten | Dropout)]
        return {
            "image": base64.b64encode(image.tobytes()).decode(),
            "doubt": self._classifier.doubt(picture, image),
            "probabilities": probabilities.tolist(),
            "layers": [{"name": stage.name, "output": stage.output_shape, **_maps(y)} for stage, y in shown],
        }


class _Handler(BaseHTTPRequestHandler):
    """Answers the page alone: who comes by another name than this machine's is another site's script."""

    server: Server

    def parse_request(self) -> bool:
        """Return whether the request can be answered: it names this server, and comes from its page or from none."""
        if not super().parse_request():
            return False
        names = [f"{name}:{self.server.server_port}" for name in (LOOPBACK, "localhost")]
        origin = self.headers.get("Origin")
        ours = self.headers.get("Host") in names and (origin is None or urlsplit(origin).netloc in names)
        if not ours:
            self._reply_json(HTTPStatus.FORBIDDEN, {"error": f"only {self.server.address} is served"})
        return ours

    def do_GET(self) -> None:
        if self.path == "/":
            self._reply(HTTPStatus.OK, "text/html; charset=utf-8", files(__package__).joinpath(PAGE).read_bytes())
        elif self.path == "/model":
            self._reply_json(HTTPStatus.OK, self.server.describe())
        else:
            self._reply_json(HTTPStatus.NOT_FOUND, {"error": "no such page"})

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if self.path != "/look" or self.headers.get("Content-Type") != "image/png":
            self._reply_json(HTTPStatus.NOT_FOUND, {"error": "no such page; /look takes image/png"})
        elif not (length.isascii() and length.isdecimal() and int(length) <= MOST_BYTES):
            self._reply_json(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": f"give at most {MOST_BYTES} bytes"})
        else:
            try:
                self._reply_json(HTTPStatus.OK, self.server.look(self.rfile.read(int(length))))
            except CnnexpError as error:
                self._reply_json(HTTPStatus.BAD_REQUEST, {"error": str(error)})

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing of requests that went well."""

    def _reply_json(self, status: HTTPStatus, value: dict[str, Any]) -> None:
        self._reply(status, "application/json", json.dumps(value).encode())

    def _reply(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(content)), "Content-Security-Policy": POLICY}
        for name, value in {**headers, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def _pen(look: photograph.Look, shape: Shape) -> float:
    """Return the width of a pen that leaves as much ink as the training images have, in sides of the paper."""
    ink = np.sqrt(np.prod(look["ink"])) * shape[0] * shape[1]  # in pixels
    return float(np.clip(ink / (STROKE * look["side"]) * DRAWN / look["side"], 0.02, 0.2))


def _maps(y: np.ndarray) -> dict[str, Any]:
    """Return a layer's output, (H, W, C) or (D,), as small pictures: `shape` (H, W, C) of them, `shown` of the C.

    `numbers` are int8 (shown, H, W) in base64, +-127 being the `largest` number.
    """
    if y.ndim == 1:  # rows of numbers, the last filled up
        columns = min(COLUMNS, len(y))
        y = np.pad(y, (0, -len(y) % columns)).reshape(-1, columns, 1)
    largest = float(np.abs(y).max())
    shown = min(y.shape[2], MOST_MAPS)
    numbers = np.rint(y[:, :, :shown].transpose(2, 0, 1) * (127 / (largest or 1.0))).astype(np.int8)
    text = base64.b64encode(numbers.tobytes()).decode()
    return {"shape": y.shape, "shown": shown, "largest": largest, "numbers": text}
