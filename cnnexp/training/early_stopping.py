"""Early stopping: an observer that ends training where going on is not worth it."""

import math
from collections.abc import Sequence

from cnnexp.training.loop import EpochResult, Observer


class EarlyStopping(Observer):
    """An observer that ends the training (Prechelt, "Early stopping, but when?", 1998).

    Args:
        patience: after so many epochs in a row without a smaller held-out loss; None has no end to it.
        target: after the first epoch with such a held-out accuracy, 0 .. 1; None has none.
        history: epochs that are done: they count, and may have come to the end already.

    Attributes:
        reason: why training is to end; empty while it is not.
    """

    def __init__(
        self, patience: int | None = None, target: float | None = None, history: Sequence[EpochResult] = ()
    ) -> None:
        self.reason = ""
        self._patience, self._target = patience, target
        self._least, self._worse, self._reached = math.inf, 0, False
        for result in history:
            self.finished(result)

    def finished(self, result: EpochResult) -> bool:
        loss, accuracy = result.held_out.mean_loss, result.held_out.accuracy
        self._worse = 0 if loss < self._least else self._worse + 1
        self._least = min(self._least, loss)
        self._reached = self._reached or (self._target is not None and accuracy >= self._target)
        images, self.reason = f"the {'validation' if result.validation else 'test'} images", ""
        if self._reached:
            self.reason = f"trainer.target={self._target:g} was reached on {images}"
        elif self._patience is not None and self._worse >= self._patience:
            self.reason = f"early stopping, trainer.patience={self._patience}: the loss of {images} fell no more"
        return bool(self.reason)
