"""A trained network that classifies: for `cnnexp predict`, and for MLflow's `pyfunc.load_model`.

Only `Served` and its errors need mlflow, which imports this module by the name that `store.Store.save_model` wrote into
the model.
"""

import base64
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cnnexp.backends import backend_class
from cnnexp.backends.layerwise import LayerwiseProgram
from cnnexp.backends.protocol import Backend
from cnnexp.backends.state import AVERAGES
from cnnexp.datasets import photograph
from cnnexp.datasets.images import decode_picture
from cnnexp.errors import CheckpointError, CnnexpError, ConfigError, DataError
from cnnexp.network import Shape, Stage
from cnnexp.optimizers import SGD
from cnnexp.system.registry import VARIABLE
from cnnexp.training import checkpoint

BACKEND = "numpy"  # it needs no compiler, so a few images are classified soonest
BATCH_SIZE = 128
SERVING = "_MLFLOW_IS_IN_SERVING_ENVIRONMENT"  # set by MLflow's server
Images = np.ndarray | Sequence[Any] | str


class Classifier:
    """A trained network, ready to classify; raises CheckpointError where its file is damaged, or holds no network."""

    def __init__(self, path: Path, backend: Backend) -> None:
        trained = checkpoint.load(path)
        try:
            self.network, self.loss = checkpoint.rebuild(trained.training)
            state = trained.state
            self.state = {n: state.get(AVERAGES.get(n, n), state[n]) for n in self.network.initial_state(0)}
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"checkpoint {path}: holds no network: {error}") from error
        except ConfigError as error:
            for name, file in trained.about.get("plugins", {}).items():  # of all that were loaded
                if str(error).startswith(f"a layer's type={name!r}: unknown"):
                    advice = f"add plugins={file}, or set {VARIABLE}={file}"
                    raise ConfigError(f"layer {name}: of a plugin that is not loaded; {advice}") from error
            raise
        outputs = 2 if self.loss.is_binary else self.network.output_shape[0]
        self.input_shape: Shape = self.network.input_shape  # (H, W, C) of an image, or (D,) of a point
        self.classes: tuple[str, ...] = tuple(trained.about.get("classes", map(str, range(outputs))))
        self.pixels: str = trained.about.get("pixels", "uint8")  # of the images that it was trained on, or float32
        self.look: Mapping[str, Any] | None = trained.about.get("look")  # what they have in common
        self._program = backend.forward_only.compile(self.network, self.loss, SGD(), BATCH_SIZE)
        self._program.restore(self.state)

    def prepare(self, picture: np.ndarray) -> np.ndarray:
        """Return a picture, uint8 RGBA (h, w, 4), as the model takes it, uint8 (H, W, C): see `photograph.prepare`."""
        self.check_pictures()
        return photograph.prepare(picture, self.look, self.input_shape)

    def doubt(self, picture: np.ndarray, image: np.ndarray) -> str | None:
        """Return why a picture, `prepare`d as `image`, may be classified wrong; None where nothing says so."""
        if self.look is None:
            return None
        why = photograph.unlike(image, self.look)
        return photograph.count(picture, self.input_shape) or (why and f"unlike the training data: {why}")

    def check_pictures(self, given: str = "") -> None:
        """Raise ConfigError where the model takes no pictures; `given` begins the message."""
        shape = self.input_shape
        if len(shape) != 3 or shape[2] not in (1, 3):
            raise ConfigError(f"{given}the model takes inputs of shape {shape}, no pictures; give a dataset=NAME")
        if self.pixels != "uint8":
            why = "the model was trained on floating-point images, whose scale no picture file has"
            raise ConfigError(f"{given}{why}; give them as dataset=npz dataset.path=FILE")

    def predict(self, images: Images) -> np.ndarray:
        """Return the probability of each class, float32 (N, classes).

        Images are (N, *input_shape), or gray ones (N, H, W), as an array or nested lists. Whole numbers, 0 .. 255,
        stand for value / 255; floats are taken as they are. Or they are a list of texts, each a picture file in base64,
        which is brought to the look of the training images. DataError is raised where they are of another shape or
        type, ConfigError where the model takes no pictures.
        """
        images = self._as_array(images)
        if images.ndim == 3 and self.input_shape[2:] == (1,):
            images = images[..., np.newaxis]
        if images.shape[1:] != self.input_shape:
            raise DataError(f"images of shape {images.shape}: the model takes (N, {str(self.input_shape)[1:]}")
        if images.dtype.kind in "iu":
            if images.size and not 0 <= images.min() <= images.max() <= 255:
                raise DataError(f"whole pixels must be 0 .. 255; found {images.min()} .. {images.max()}")
            images = images.astype(np.uint8)
        elif images.dtype.kind == "f":
            images = images.astype(np.float32)
        else:
            raise DataError(f"images of type {images.dtype}: must be whole or floating-point numbers")
        return self._program.probabilities(self._program.load(images, np.zeros(len(images), np.int32)))

    def outputs(self, images: np.ndarray) -> list[tuple[Stage, np.ndarray]]:
        """Return each layer with its output (N, *output_shape), of `BATCH_SIZE` images at most; TypeError if fused."""
        if not isinstance(self._program, LayerwiseProgram):
            raise TypeError(f"{type(self._program).__name__} keeps no outputs of layers")
        return self._program.outputs(self._program.load(images, np.zeros(len(images), np.int32)))

    def _as_array(self, images: Images) -> np.ndarray:
        try:
            array = np.asarray([images] if isinstance(images, str) else images)
        except ValueError as error:  # lists of lists of several lengths
            raise DataError("images of several shapes: give them all in the model's") from error
        if array.dtype.kind == "U" and array.ndim == 1:
            return np.stack([self.prepare(_decode(str(text), i)) for i, text in enumerate(array.ravel())])
        if not isinstance(images, np.ndarray) and self.pixels != "uint8" and array.dtype.kind in "iu":
            return array.astype(np.float32)  # JSON may write 1.0 as 1
        return array


def _decode(text: str, place: int) -> np.ndarray:
    """Return a picture file in base64, or such a `data:` address, as uint8 RGBA (h, w, 4)."""
    try:
        content = base64.b64decode(text.rpartition(",")[2], validate=True)
    except ValueError as error:
        raise DataError(f"image {place}: no picture in base64: {error}") from error
    return decode_picture(io.BytesIO(content), "RGBA", f"image {place}")


class Served:
    """What `mlflow models serve` asks: it answers with class names, and refuses in one line."""

    def __init__(self, classifier: Classifier) -> None:
        self.classifier = classifier

    def predict(self, images: Images, params: Mapping[str, Any] | None = None) -> np.ndarray | list[dict[str, Any]]:
        """Return as `Classifier.predict`; to who asks a server, each image's `class`, and `probabilities` by class."""
        if os.environ.get(SERVING) != "true":
            return self.classifier.predict(images)
        try:
            found, classes = self.classifier.predict(images), self.classifier.classes
        except CnnexpError as error:
            raise _refusal(str(error)) from error
        answers = ((classes[row.argmax()], dict(zip(classes, row.tolist(), strict=True))) for row in found)
        return [{"class": best, "probabilities": by_class} for best, by_class in answers]


def _refusal(text: str) -> Exception:
    """Return what MLflow answers with status 400 and no traceback."""
    from mlflow.exceptions import MlflowException

    class Refusal(MlflowException):
        message = property(lambda self: text, lambda self, value: None)  # MLflow puts all that was sent before it

    return Refusal.invalid_parameter_value(text)


def _load_pyfunc(path: str, model_config: Mapping[str, Any] | None = None) -> Served:
    """Return what `mlflow.pyfunc.load_model` wraps; `{"backend": NAME}` asks for another backend than `BACKEND`."""
    return Served(Classifier(Path(path), backend_class((model_config or {}).get("backend", BACKEND))()))
