"""How long training with many workers takes, from three constants of the machine (chavan, section 5).

The paper's equations 5 to 8 are of one convolution split over processes by image rows. What it measures (figure 4), and
what `workers` does, is another split: by images, with the parameters or the gradients averaged. `epoch_s` says it with
the same three constants: t_c for the operations of a whole network, and t_s and t_b for the best known all-reduce of
long messages (Rabenseifner; Thakur et al. 2005, section 4.5), 2 log2(p) t_s + 2 (p - 1) / p n t_b for n bytes.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from cnnexp.network import Conv2d, Linear, Network
from cnnexp.network.shapes import walk

TRAINING_PASSES = 3  # forward, gradient of the input, gradient of the weights: as many operations each
BYTES = 4  # of a float32


class Costs(NamedTuple):
    """The constants of a machine and its network."""

    t_c: float  # seconds per arithmetic operation of one worker's backend (a multiply-add is two)
    t_s: float  # seconds to start a message
    t_b: float  # seconds per byte of a message


# Networks between machines: what replaces the costs measured here, between processes of one machine. Bandwidths as
# asked for, without protocol overhead. The start-up times are not measured: they are of the order that vendors state
# for TCP over 25 Gbit/s Ethernet and for 400 Gbit/s InfiniBand.
LINKS: dict[str, dict[str, float]] = {
    "loopback, as measured": {},
    "25 Gbit/s, 10 us": {"t_s": 10e-6, "t_b": 8 / 25e9},
    "400 Gbit/s, 2 us": {"t_s": 2e-6, "t_b": 8 / 400e9},
}
WORKERS = (1, 2, 4, 8, 16, 64, 1024, 16384)
TABLE = "cost_model.csv"  # of a run's folder: the rows of `extrapolate`


def operations(network: Network) -> int:
    """Return the operations of training on one image: per output 2 for each weight that feeds it and 1 for the bias.

    Convolutions and linear layers count; the others' time is part of a measured t_c.
    """
    counted = [stage for stage in walk(network.stages) if isinstance(stage.layer, Conv2d | Linear)]
    return TRAINING_PASSES * sum(2 * stage.macs + math.prod(stage.output_shape) for stage in counted)


def all_reduce_s(costs: Costs, floats: int, workers: int) -> float:
    """Return the seconds to sum `floats` float32 over the workers; one alone has 0."""
    return 2 * math.log2(workers) * costs.t_s + 2 * (workers - 1) / workers * floats * BYTES * costs.t_b


def fit_links(small: tuple[int, float], large: tuple[int, float], workers: int) -> tuple[float, float]:
    """Return t_s and t_b from two timed all-reduces, (floats, seconds) each; neither is below 0."""
    (few, short_s), (many, long_s) = small, large
    per_byte = 2 * (workers - 1) / workers * BYTES
    t_b = max(0.0, (long_s - short_s) / ((many - few) * per_byte))
    return max(0.0, (short_s - few * per_byte * t_b) / (2 * math.log2(workers))), t_b


class Training(NamedTuple):
    """What an epoch asks for: images of so many `operations`, and `averages_per_epoch` of so many float32 numbers."""

    operations: int
    images: int
    averages: int
    floats: int


class Prediction(NamedTuple):
    """What the model says of a run, before it starts: how long an epoch should take."""

    costs: Costs
    training: Training
    epoch_s: float

    def metrics(self) -> dict[str, float]:
        """Return it by the names it is recorded under."""
        constants = {f"cost_model/{name}_s": value for name, value in self.costs._asdict().items()}
        workers = break_even(self.costs, self.training)
        return {**constants, "cost_model/epoch_s": self.epoch_s, "cost_model/break_even_workers": workers}


def epoch_s(costs: Costs, training: Training, workers: int, cores: float | None = None) -> tuple[float, float]:
    """Return an epoch's seconds of computing and of communicating; workers share `cores`, None gives each its own."""
    sharing = max(1.0, workers / cores) if cores else 1.0
    compute = costs.t_c * training.operations * math.ceil(training.images / workers) * sharing
    return compute, training.averages * all_reduce_s(costs, training.floats, workers)


def averages_per_epoch(images: int, batch_size: int, sync: str, period: int | None) -> int:
    """Return how many all-reduces an epoch takes: one per batch (of all workers), per `period` batches, or one."""
    batches = math.ceil(images / batch_size)
    if sync == "gradients":
        return batches
    return math.ceil(batches / period) if period else 1


def extrapolate(
    costs: Costs, network: Network, images: int, batch_size: int, floats: int, sync: str, period: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield one row per link of `LINKS` and number of `WORKERS`, each worker on cores of its own.

    A batch has `batch_size` images for each worker here: shared out, it would soon be less than one image for each. The
    speedup is over one worker, the efficiency the speedup per worker.
    """
    for link, its_own in LINKS.items():
        on_link = costs._replace(**its_own)
        for count in WORKERS:
            averages = averages_per_epoch(images, batch_size * count, sync, period)
            training = Training(operations(network), images, averages, floats)
            compute, communicate = epoch_s(on_link, training, count)
            alone, _ = epoch_s(on_link, training, 1)
            seconds = {"compute_s": compute, "communicate_s": communicate, "epoch_s": compute + communicate}
            faster = alone / seconds["epoch_s"]
            gain = {"speedup": faster, "efficiency": faster / count}
            yield {"link": link, "workers": count, "sync": sync, **seconds, **gain}


def break_even(costs: Costs, training: Training, limit: int = 1 << 20) -> int:
    """Return the first power of two of workers at which communicating takes as long as computing, at most `limit`."""
    for power in range(1, limit.bit_length()):
        compute, communicate = epoch_s(costs, training, 1 << power)
        if communicate >= compute:
            return 1 << power
    return limit
