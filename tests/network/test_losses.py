from dataclasses import replace

import numpy as np
import pytest
from commands import raises
from tables import each

from cnnexp.errors import NetworkError
from cnnexp.network import Conv2d, Flatten, Linear, Network, ReLU, Sigmoid
from cnnexp.network.losses import Loss, Totals, check_loss, evaluate

SOFTMAX, BINARY = Loss.SOFTMAX_CROSS_ENTROPY, Loss.BINARY_CROSS_ENTROPY


def test_where_losses_saturate_or_tie_nan_is_not_hidden_and_totals_add_up():
    for loss, scores, labels, wanted, correct in (
        (SOFTMAX, [[1e30, -1e30], [1e30, -1e30]], [0, 1], 2e30, 1),  # they do not overflow
        (SOFTMAX, [[1, 1], [1, 1]], [0, 1], 2 * np.log(2), 1),  # a tie goes to the first
        (BINARY, [[0], [1]], [1, 0], 200, 0),  # sure and wrong costs 100
        (SOFTMAX, [[np.nan, 1]], [0], np.nan, 0),
        (BINARY, [[np.nan]], [0], np.nan, 1),
        (SOFTMAX, [[2, 0], [0, 2], [0, 2]], [0, 1, 0], 2 * np.log1p(np.exp(-2)) + np.log1p(np.exp(2)), 2),
    ):
        totals = evaluate(loss, np.array(scores, np.float32), np.array(labels))
        assert totals.loss == pytest.approx(wanted, rel=1e-6, nan_ok=True)
        assert (totals.count, totals.correct) == (len(labels), correct) or np.isnan(wanted)
    total = Totals(3.0, 1, 2) + Totals(1.0, 2, 2)
    assert (total, total.mean_loss, total.accuracy) == (Totals(4.0, 3, 4), 1.0, 0.75)


@each(
    ((Flatten(), Linear(2), Sigmoid()), BINARY, None, r"needs Linear\(1\) and Sigmoid last"),
    ((Flatten(), Linear(1)), BINARY, None, r"needs Linear\(1\) and Sigmoid last"),
    ((Flatten(), Linear(1), Sigmoid()), BINARY, 10, "2 classes, not 10"),
    ((Flatten(), Linear(9)), SOFTMAX, 10, r"\(9,\).*\(10,\)"),
    ((Conv2d(3, 2), ReLU()), SOFTMAX, None, "a flat vector of scores"),
    ((Flatten(), Linear(3)), replace(SOFTMAX, class_weights=(1, 2)), None, "2 class_weights: must be 3"),
    ((Flatten(), Linear(1), Sigmoid()), replace(BINARY, class_weights=(1,)), None, "1 class_weights: must be 2"),
)
def test_a_network_that_does_not_suit_is_refused(layers, loss, classes, message):
    raises(NetworkError, message, check_loss, Network((4, 4, 1), layers), loss, classes)
    check_loss(Network((3,), (Linear(2),)), SOFTMAX, 2)
    check_loss(Network((3,), (Linear(1), Sigmoid())), BINARY, 2)


@each(
    (("hinge",), "loss 'hinge': unknown; legal: softmax_cross_entropy, binary"),
    (("softmax_cross_entropy", 1.0), "label_smoothing=1.0: must be >= 0 and < 1"),
    (("mean_squared_error", 0.1), "label_smoothing=0.1: mean_squared_error has none; it must be 0"),
)
def test_losses_that_are_none(values, message):
    raises(NetworkError, message, Loss, *values)
