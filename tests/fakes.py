"""A clock that moves only when told, a program whose steps cost what the test says, and a hostile pickle."""

import numpy as np

from cnnexp import SGD, Flatten, Linear, Loss, Network, Totals
from cnnexp.backends.protocol import Program


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


class FakeClock:
    """Call it for the seconds; `advance` moves it."""

    now = 0.0

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds


class FakeProgram(Program):
    """A `Program` that moves a fake clock by a cost per image and per step, and remembers what it was asked."""

    def __init__(self, clock, per_image_s, per_step_s=0.0, batch_size=10, losses=None):
        self.network = Network((2, 2, 1), (Flatten(), Linear(2)))
        self.loss, self.optimizer = Loss.SOFTMAX_CROSS_ENTROPY, SGD(lr=0.01)
        self.batch_size, self.compile_s = batch_size, 0.0
        self.clock, self.per_image_s, self.per_step_s = clock, per_image_s, per_step_s
        self.losses = iter(losses) if losses else None
        self.orders, self.rates, self.restored = [], [], []

    def load(self, images, labels):
        return images

    def train(self, handle, order, rate):
        self.orders.append(np.array(order))
        self.rates.append(rate)
        steps = -(-len(order) // self.batch_size)
        self.clock.advance(self.per_image_s * len(order) + self.per_step_s * steps)
        return Totals(next(self.losses) if self.losses else 1.0 * len(order), len(order), len(order))

    def predict(self, handle):
        self.clock.advance(100.0)  # evaluation must not count
        return np.zeros((len(handle), 2), np.float32)

    def state(self):
        self.clock.advance(50.0)  # nor may copying the parameters
        return {"parameters": np.zeros(self.network.parameter_count, np.float32)}

    def restore(self, state):
        self.restored.append(state)
