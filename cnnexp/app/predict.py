"""`cnnexp predict`: classify images with what a run has trained."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from cnnexp.app.config import container, named
from cnnexp.app.resume import find_run
from cnnexp.datasets import Dataset, photograph
from cnnexp.datasets.images import read_picture
from cnnexp.errors import ConfigError, DataError, first_line
from cnnexp.tracking.model import BACKEND, Classifier

SURE = 0.9  # a smaller probability is shown with the next class


def command(arguments: Sequence[str]) -> None:
    """Print the class and its probability of every image; of a data set's test split the accuracy, too.

    The arguments are a run; then either picture files or `dataset=NAME` with its keys; and `backend=NAME` with its
    keys. It raises as `resume.find_run` and `Classifier`, ConfigError where an argument is unknown, missing or illegal,
    and DataError where an image or the data set cannot be read, or is not what the model takes.
    """
    run, files, options = _parse(arguments)
    backend = named("backend", {"name": BACKEND, **options.get("backend", {})})
    source = named("dataset", options["dataset"]) if "dataset" in options else None
    classifier = Classifier(find_run(run, f"predict {run}"), backend)
    for line in _classify_split(classifier, source.load()) if source else _classify_files(classifier, files):
        sys.stdout.write(f"{line}\n")


def _parse(arguments: Sequence[str]) -> tuple[str, list[str], dict[str, dict[str, Any]]]:
    """Return the run, the image files, and the options by group."""
    words, overrides = [], []
    for argument in arguments:
        key, given, value = argument.partition("=")
        if given and key.partition(".")[0] in ("dataset", "backend"):
            # without a dot it picks the object, as on the command line of a run
            overrides.append(argument if "." in key else f"{key}.name={value}")
        elif argument.startswith("-") or (given and not Path(argument).exists()):
            legal = "dataset=NAME, backend=NAME, their keys, and files that exist"
            raise ConfigError(f"predict {argument}: unknown; legal: {legal}")
        else:
            words.append(argument)
    try:
        options = container(OmegaConf.from_dotlist(overrides), resolve=True)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"predict {' '.join(overrides)}: {first_line(error)}") from error
    if not words or bool(words[1:]) == ("dataset" in options):
        raise ConfigError("predict: give a run and either images or a data set: RUN IMAGE... | RUN dataset=NAME")
    return words[0], words[1:], options


def _classify_files(classifier: Classifier, files: Sequence[str]) -> Iterator[str]:
    """Yield `FILE  CLASS  PROBABILITY` of each picture, brought to the look of the images that the model takes.

    What the model is not sure of is said in the line, and a picture that is not like its training data, or of several
    things; one without a stroke gets no class.
    """
    classifier.check_pictures("predict IMAGE: ")
    for file in files:
        picture = read_picture(Path(file), "RGBA")
        image = classifier.prepare(picture)
        if (doubt := classifier.doubt(picture, image)) and doubt.startswith(photograph.NO_STROKE):
            yield f"{file}  {doubt}"
            continue
        (probabilities,) = classifier.predict(image[np.newaxis])
        best, second = (int(i) for i in probabilities.argsort()[:-3:-1])
        line = f"{file}  {classifier.classes[best]}  {probabilities[best]:.4f}"
        if probabilities[best] < SURE:
            line += f"  unsure: or {classifier.classes[second]}, {probabilities[second]:.4f}"
        yield f"{line}  {doubt}" if doubt else line


def _classify_split(classifier: Classifier, dataset: Dataset) -> Iterator[str]:
    """Yield `NUMBER  CLASS  PROBABILITY` of each test image, what a wrong one is instead, and the accuracy."""
    if dataset.input_shape != classifier.input_shape or len(dataset.classes) != len(classifier.classes):
        given = f"inputs of shape {dataset.input_shape} and {len(dataset.classes)} classes"
        takes = f"the model takes {classifier.input_shape} and tells {len(classifier.classes)} apart"
        raise DataError(f"dataset={dataset.name}: {given}; {takes}")
    named = [names for names in (dataset.classes, classifier.classes) if not all(map(str.isdecimal, names))]
    if len({tuple(names) for names in named}) == 2:
        given, takes = (", ".join(names) for names in named)
        raise DataError(f"dataset={dataset.name}: its classes are {given}; the model tells {takes} apart")
    probabilities = classifier.predict(dataset.test.images)
    predicted = probabilities.argmax(axis=1)
    digits, letters = len(str(len(predicted) - 1)), max(map(len, dataset.classes))
    for i, (label, found) in enumerate(zip(dataset.test.labels, predicted, strict=True)):
        wrong = "" if found == label else f"  wrong: {dataset.classes[label]}"
        yield f"{i:{digits}}  {dataset.classes[found]:{letters}}  {probabilities[i, found]:.4f}{wrong}"
    right = int((predicted == dataset.test.labels).sum())
    yield f"test accuracy {right / len(predicted):.4f}, {right} of {len(predicted)} images"
