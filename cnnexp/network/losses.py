"""What training minimizes: the mean over images of one loss per image.

A loss is one rule on the scores of an image, compiled for every target as elementwise layers are: `Loss.rule`. For
evaluation and the NumPy backends the same stands here over whole arrays: `compute`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, assert_never, get_args

import numpy as np

from cnnexp.errors import NetworkError
from cnnexp.network.elementwise import HALF, ONE, ZERO, Sigmoid
from cnnexp.network.shapes import Network

# As torch.nn.BCELoss: log is clamped at -100 and the gradient's denominator at 1e-12: a saturated sigmoid stays finite.
LOG_FLOOR = np.float32(-100.0)
VARIANCE_FLOOR = np.float32(1e-12)

LossName = Literal["softmax_cross_entropy", "binary_cross_entropy", "mean_squared_error"]
NAMES: tuple[LossName, ...] = get_args(LossName)
Array = np.ndarray
Rule = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
"""(scores, label, scale, d_scores) -> (loss, hit), of one image: see `Loss.rule`."""
Weights = tuple[np.float32, ...]
"""Of the classes. A tuple, which compiled code has no need to load from memory."""


@dataclass(frozen=True)
class Loss:
    """What training minimizes.

    Attributes:
        name: `softmax_cross_entropy`, `binary_cross_entropy` or `mean_squared_error`.
        label_smoothing: of `softmax_cross_entropy`, how much of the target is spread evenly over all classes (Szegedy
            et al. 2016, section 7), 0 <= label_smoothing < 1.
        class_weights: what the loss of an image of each class is multiplied by, all > 0; empty weighs all alike. The
            mean stays that over images, as with Keras's class_weight; PyTorch divides by the sum of their weights.

    Raises:
        NetworkError: there is no such loss, or the smoothing is out of range.
    """

    name: LossName
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] = ()

    SOFTMAX_CROSS_ENTROPY: ClassVar[Loss]
    BINARY_CROSS_ENTROPY: ClassVar[Loss]
    MEAN_SQUARED_ERROR: ClassVar[Loss]

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise NetworkError(f"loss {self.name!r}: unknown; legal: {', '.join(NAMES)}")
        if not 0 <= self.label_smoothing < 1 or isinstance(self.label_smoothing, bool):
            raise NetworkError(f"label_smoothing={self.label_smoothing}: must be >= 0 and < 1")
        if self.label_smoothing and self.name != "softmax_cross_entropy":
            raise NetworkError(f"label_smoothing={self.label_smoothing}: {self.name} has none; it must be 0")

    @property
    def is_binary(self) -> bool:
        """Whether one score says which of two classes it is."""
        return self.name == "binary_cross_entropy"

    def probabilities(self, scores: np.ndarray) -> np.ndarray:
        """Return the probability of each class, (N, classes), by the scores (N, O)."""
        if self.is_binary:
            return np.hstack([1 - scores, scores])
        powers = np.exp(scores - np.maximum.reduce(scores, axis=1, keepdims=True))
        return powers / np.add.reduce(powers, axis=1, keepdims=True)

    def rule(self, outputs: int, exp: Callable | None, log: Callable, log1p: Callable) -> Rule:
        """Return the loss of one image, in the form that a target compiles or runs; all numbers are float32.

        It is given scores (outputs,), the label, a factor on the gradient, and where the gradient goes (outputs,); and
        returns the loss and whether the image was classified right. `log(0)` and `log1p(-1)` are -infinity. Without
        `exp`, what a softmax asks for lies where the gradient goes: exp(score - the largest).
        """
        weights, is_weighted = tuple(map(np.float32, self.class_weights or (1.0,))), bool(self.class_weights)
        match self.name:
            case "softmax_cross_entropy":
                return _softmax_rule(outputs, weights, is_weighted, np.float32(self.label_smoothing), exp, log)
            case "binary_cross_entropy":
                return _binary_rule(weights, is_weighted, log, log1p)
            case "mean_squared_error":
                return _squares_rule(outputs, weights, is_weighted)
            case _:
                assert_never(self.name)


Loss.SOFTMAX_CROSS_ENTROPY, Loss.BINARY_CROSS_ENTROPY, Loss.MEAN_SQUARED_ERROR = map(Loss, NAMES)


def _softmax_rule(
    outputs: int, weights: Weights, is_weighted: bool, smoothing: np.float32, exp: Callable | None, log: Callable
) -> Rule:
    is_smooth, share, rest = bool(smoothing), np.float32(smoothing / outputs), ONE - smoothing

    def softmax_cross_entropy(scores: Any, label: Any, scale: Any, d_scores: Any) -> tuple[Any, Any]:
        best, total, whole = 0, ZERO, ZERO
        scale = scale * (weights[label] if is_weighted else ONE)
        for o in range(outputs):
            if scores[o] > scores[best]:
                best = o
        for o in range(outputs):
            if exp is not None:
                d_scores[o] = exp(scores[o] - scores[best])
            total += d_scores[o]
            whole += scores[o]
        factor, spread = scale / total, share * scale
        for o in range(outputs):
            d_scores[o] = d_scores[o] * factor - spread
        d_scores[label] -= rest * scale
        loss = log(total) - (scores[label] - scores[best])
        if is_smooth:
            loss += smoothing * scores[label] - share * whole
        return (loss * weights[label] if is_weighted else loss), best == label

    return softmax_cross_entropy


def _binary_rule(weights: Weights, is_weighted: bool, log: Callable, log1p: Callable) -> Rule:
    def binary_cross_entropy(scores: Any, label: Any, scale: Any, d_scores: Any) -> tuple[Any, Any]:
        p, is_one = scores[0], label == 1
        log_p, log_q, variance, target = log(p), log1p(-p), p * (ONE - p), ONE if is_one else ZERO
        # comparisons this way round let NaN through
        log_p = LOG_FLOOR if log_p < LOG_FLOOR else log_p
        log_q = LOG_FLOOR if log_q < LOG_FLOOR else log_q
        variance = VARIANCE_FLOOR if variance < VARIANCE_FLOOR else variance
        scale = scale * (weights[label] if is_weighted else ONE)
        d_scores[0] = (p - target) / variance * scale
        loss = -(target * log_p + (ONE - target) * log_q)
        return (loss * weights[label] if is_weighted else loss), (p >= HALF) == is_one

    return binary_cross_entropy


def _squares_rule(outputs: int, weights: Weights, is_weighted: bool) -> Rule:
    share = np.float32(1 / outputs)

    def mean_squared_error(scores: Any, label: Any, scale: Any, d_scores: Any) -> tuple[Any, Any]:
        best, total = 0, ZERO
        scale = scale * (weights[label] if is_weighted else ONE)
        for o in range(outputs):
            if scores[o] > scores[best]:
                best = o
            difference = scores[o] - (ONE if o == label else ZERO)
            total += difference * difference
            d_scores[o] = (difference + difference) * share * scale
        loss = total * share
        return (loss * weights[label] if is_weighted else loss), best == label

    return mean_squared_error


@dataclass(frozen=True)
class Totals:
    """What a pass over images sums up: their losses (not the mean), those classified right, and all of them."""

    loss: float
    correct: int
    count: int

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.loss + other.loss, self.correct + other.correct, self.count + other.count)

    @property
    def mean_loss(self) -> float:
        return self.loss / self.count

    @property
    def accuracy(self) -> float:
        return self.correct / self.count


def check_loss(network: Network, loss: Loss, classes: int | None = None) -> None:
    """Raise NetworkError where the network's last shape does not suit the loss and the number of classes."""
    shape = network.output_shape
    if loss.name == "binary_cross_entropy":
        if shape != (1,) or not isinstance(network.layers[-1], Sigmoid):
            raise NetworkError(f"binary_cross_entropy needs Linear(1) and Sigmoid last; the network ends in {shape}")
        if classes not in (None, 2):
            raise NetworkError(f"binary_cross_entropy needs a data set of 2 classes, not {classes}")
    elif len(shape) != 1 or (classes is not None and shape != (classes,)):
        want = f"({classes},)" if classes is not None else "a flat vector of scores"
        raise NetworkError(f"the network ends in shape {shape}, the data set needs {want}: one output per class")
    weights, told = len(loss.class_weights), 2 if loss.is_binary else shape[0]
    if weights not in (0, told):
        raise NetworkError(f"{weights} class_weights: must be {told}, one for each class of the network")


def compute(
    loss: Loss, scores: Array, labels: Array, scale: np.float32, d_scores: Array, losses: Array, hits: Array
) -> None:
    """Fill the gradient, the loss and the hit of every image n; t_o is 1 where o is its label, else 0.

    `softmax_cross_entropy`: log(sum_o exp(scores[n, o])) - scores[n, label] (castanheira, definition 1), with a label
    smoothing s against (1 - s) * t_o + s / O, as torch.nn.CrossEntropyLoss. `binary_cross_entropy`: -(t log p +
    (1 - t) log(1 - p)), p = scores[n, 0] in [0, 1] (khandait, section II.C). `mean_squared_error`: the mean of
    (scores[n, o] - t_o)^2, as torch.nn.MSELoss. Each of them times the weight of the image's class.

    Args:
        loss, scores: which; float32 (N, O), (N, 1) of `binary_cross_entropy`.
        labels, scale: integers (N,); factor on the gradient, 1/N for the mean.
        d_scores, losses: out, float32 (N, O) and (N,).
        hits: out, uint8 (N,), 1 where the first largest score is the label's, or (p >= 0.5) == (t == 1).
    """
    rows, outputs = np.arange(len(labels)), scores.shape[1]
    if loss.class_weights:
        compute(replace(loss, class_weights=()), scores, labels, scale, d_scores, losses, hits)
        weights = np.array(loss.class_weights, np.float32)[labels]
        losses[...], d_scores[...] = losses * weights, d_scores * weights[:, np.newaxis]
        return
    match loss.name:
        case "softmax_cross_entropy":
            smoothing = np.float32(loss.label_smoothing)
            shifted = scores - scores.max(axis=1, keepdims=True)
            sums = (exps := np.exp(shifted)).sum(axis=1, keepdims=True)
            losses[...] = np.log(sums[:, 0]) - shifted[rows, labels]
            np.divide(exps, sums, out=d_scores)
            d_scores[rows, labels] -= 1
            if smoothing:
                losses += smoothing * (scores[rows, labels] - scores.mean(axis=1))
                d_scores -= smoothing / outputs
                d_scores[rows, labels] += smoothing
            d_scores *= scale
        case "binary_cross_entropy":
            p, t = scores[:, 0], labels.astype(scores.dtype)
            with np.errstate(divide="ignore"):
                log_p, log_q = np.maximum(np.log(p), LOG_FLOOR), np.maximum(np.log1p(-p), LOG_FLOOR)
            losses[...] = -(t * log_p + (1 - t) * log_q)
            d_scores[:, 0] = (p - t) / np.maximum(p * (1 - p), VARIANCE_FLOOR) * scale
            hits[...] = (p >= 0.5) == (labels == 1)
            return
        case "mean_squared_error":
            np.copyto(d_scores, scores)
            d_scores[rows, labels] -= 1
            losses[...] = np.square(d_scores).mean(axis=1)
            d_scores *= np.float32(2 / outputs) * scale
        case _:
            assert_never(loss.name)
    hits[...] = scores.argmax(axis=1) == labels


def evaluate(loss: Loss, scores: np.ndarray, labels: np.ndarray) -> Totals:
    """Return the totals of `scores` (N, O) against `labels` (N,), summed in float64; every class counts alike."""
    count = len(labels)
    losses, hits = np.empty(count, np.float32), np.empty(count, np.uint8)
    compute(replace(loss, class_weights=()), scores, labels, np.float32(1), np.empty_like(scores), losses, hits)
    return Totals(float(losses.sum(dtype=np.float64)), int(hits.sum(dtype=np.int64)), count)
