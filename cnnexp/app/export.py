"""`cnnexp export`: what a run has trained as an ONNX file, verified against `predict`."""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cnnexp.app.resume import find_run, folder_of
from cnnexp.backends import backend_class
from cnnexp.errors import BackendUnavailable, CnnexpError, ConfigError, installing, refused
from cnnexp.tracking.model import BACKEND, Classifier

FILE = "model.onnx"
CHECKED = 16  # images on which the file must agree with `predict`
AGREES = 1e-4  # by more, and the file is wrong: scores of hundreds, as noise may get, are rounded to 1e-5


def command(arguments: Sequence[str]) -> None:
    """Write the ONNX file of `cnnexp export RUN [FILE]`, by default into the run's folder, and say what it takes.

    Raises as `resume.find_run` and `Classifier`; ConfigError: not one or two arguments; BackendUnavailable: no onnx.
    """
    if not 1 <= len(arguments) <= 2 or any(word.startswith("-") for word in arguments):
        raise ConfigError("export: give a run, and a file where it is not to lie in the run's folder: RUN [FILE.onnx]")
    try:
        import onnxruntime

        from cnnexp.tracking import graph
    except ImportError as error:
        raise BackendUnavailable(f"export: ONNX cannot be imported ({error}); {installing('onnx')}") from error
    path = find_run(arguments[0], f"export {arguments[0]}")
    classifier = Classifier(path, backend_class(BACKEND)())
    network = classifier.network
    model = graph.build(network, classifier.loss, classifier.state, classifier.pixels, classifier.classes)
    content = model.SerializeToString()
    rng, size = np.random.default_rng(0), (CHECKED, *network.input_shape)
    whole = classifier.pixels == "uint8"
    images = rng.integers(0, 256, size).astype(np.uint8) if whole else rng.standard_normal(size, np.float32)
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (found,) = session.run([graph.OUTPUT], {graph.INPUT: images})
    differ = float(np.abs(found - classifier.predict(images)).max())
    if not differ <= AGREES:
        raise CnnexpError(f"export {path}: onnxruntime's probabilities differ from predict's by {differ:.1e}")
    target = Path(arguments[1]) if arguments[1:] else folder_of(path) / FILE
    with refused(ConfigError, f"export: {target}"):
        target.write_bytes(content)
    shape = " x ".join(map(str, network.input_shape))
    takes, gives = f"{classifier.pixels}, N x {shape}", f"float32, N x {len(classifier.classes)}"
    differs = f"differs from predict by {differ:.0e}, over {CHECKED} random images"
    sys.stdout.write(f"{target}\n{graph.INPUT}: {takes}; {graph.OUTPUT}: {gives}\n")
    sys.stdout.write(f"onnxruntime {onnxruntime.__version__} {differs}\n")
