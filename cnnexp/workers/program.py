"""A `Program` that many workers run: rank 0 is called and asks the others, who do the same at the same time.

So the train loop, the tracker and the checkpoints know of one program only, on rank 0. A command is a pickle of ours,
as what the workers are started with is, and the arrays in it follow.
"""

import pickle
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import numpy as np

from cnnexp.backends.protocol import Program, State
from cnnexp.backends.state import complete
from cnnexp.datasets import Split
from cnnexp.errors import Diverged
from cnnexp.measuring import cost_model
from cnnexp.system.cores import usable_cores
from cnnexp.workers.collective import Collective
from cnnexp.workers.replica import ParameterReplica, Replica, Spec, divide_threads

CLOSE = "close"
REPEATS = 20
SHORT, LONG = 1, 1 << 18  # floats in the all-reduces that the cost model's constants are measured with


def make_replica(spec: Spec, collective: Collective) -> Replica:
    """Compile one worker's part, on the next GPU of its machine where the backend computes on one."""
    Diverged.in_one_line()
    spec = spec._replace(backend=spec.backend.of_worker(collective.host_rank))
    if spec.sync == "hybrid":
        from cnnexp.workers.hybrid import HybridReplica

        return HybridReplica(spec, collective)
    return ParameterReplica(spec, collective) if spec.sync == "parameters" else Replica(spec, collective)


class ParallelProgram(Program[int]):
    """Rank 0's program; see `Program` in `cnnexp.backends.protocol`.

    `close` calls `release` once, with whether the workers end by themselves; they do not where a call was interrupted
    halfway, since then no two workers stand at the same place.
    """

    def __init__(
        self, spec: Spec, collective: Collective, replica: Replica, compile_s: float, release: Callable[[bool], None]
    ) -> None:
        self.network, self.loss, self.optimizer = spec.network, spec.loss, spec.optimizer
        self.batch_size, self.compile_s = spec.batch_size, compile_s
        self._spec, self._collective, self._replica, self._release = spec, collective, replica, release
        self.predictable = spec.sync != "hybrid"  # whether the cost model covers how the workers keep together
        self._together, self._is_closed = True, False
        self._prediction: cost_model.Prediction | None = None

    def restore(self, state: State) -> None:
        complete(state, self.network, self.optimizer)  # refuses what does not fit before any worker hears of it
        self._call("restore", state)

    def metrics(self) -> dict[str, float]:
        """Return `times`, e.g. as `workers/1/communicate_s`, and what was measured, by the names for the record."""
        names = ("compute_s", "communicate_s", "images")
        found = {f"workers/{rank}/{names[i]}": float(value) for (rank, i), value in np.ndenumerate(self.times())}
        return {**found, **(self._prediction.metrics() if self._prediction else {})}

    def measure(self, split: Split) -> cost_model.Prediction:
        """Measure the cost model's constants and return what it says of epochs over `split`, if `predictable`."""
        spec, collective, operations = self._spec, self._collective, cost_model.operations(self.network)
        images, count = len(split), min(self._replica.program.batch_size, len(split))
        few = self.load(split.images[:count], split.labels[:count])
        t_c = self._replica.gradient_s(few, count, REPEATS) / count / operations
        short, long = ((floats, self._call("exchange", floats, REPEATS)) for floats in (SHORT, LONG))
        costs = cost_model.Costs(t_c, *cost_model.fit_links(short, long, collective.size))
        averages = cost_model.averages_per_epoch(images, spec.batch_size, spec.sync, spec.period)
        training = cost_model.Training(operations, images, averages, self._exchanged(spec.sync))
        threads = max(1, divide_threads(spec.backend, collective.host_size).threads)
        cores = usable_cores() / threads * collective.size / collective.host_size
        seconds = sum(cost_model.epoch_s(costs, training, collective.size, cores))
        self._prediction = cost_model.Prediction(costs, training, seconds)
        return self._prediction

    def extrapolate(self) -> list[dict[str, Any]]:
        """Return the cost model's rows for this training on more workers and other links, after `measure`.

        Beside the way that this run keeps its workers together stands `gradients`, the one that costs most.
        """
        spec, prediction = self._spec, self._prediction
        assert prediction is not None  # `measure` made it
        given = prediction.costs, spec.network, prediction.training.images, spec.batch_size
        ways = {spec.sync: spec.period, "gradients": None}
        return [row for way in ways for row in cost_model.extrapolate(*given, self._exchanged(way), way, ways[way])]

    def _exchanged(self, sync: str) -> int:
        """Return how many float32 numbers one average sends: the gradient, or parameters and optimizer state."""
        return self.network.parameter_count * (1 if sync == "gradients" else 1 + len(self.optimizer.slots))

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._together:
            send(self._collective, CLOSE)
        self._release(self._together)
        self._replica.close()

    def _call(self, command: str, *arguments: Any) -> Any:
        self._together = False
        send(self._collective, command, *arguments)
        result = getattr(self._replica, command)(*arguments)
        self._together = True
        return result

    load: Any = partialmethod(_call, "load")
    refill: Any = partialmethod(_call, "refill")
    train: Any = partialmethod(_call, "train")
    gradients: Any = partialmethod(_call, "gradients")
    apply: Any = partialmethod(_call, "apply")
    predict: Any = partialmethod(_call, "predict")
    state: Any = partialmethod(_call, "state")
    times: Any = partialmethod(_call, "times")


def serve(replica: Replica, collective: Collective) -> None:
    """Do what rank 0 does until it closes the program: the life of every other worker."""
    command = ""
    while command != CLOSE:
        command, arguments = receive(collective)
        getattr(replica, command)(*arguments)


def send(collective: Collective, command: str, *arguments: Any) -> None:
    """Broadcast a command from rank 0; its arrays go as they lie in memory."""
    arrays: list[pickle.PickleBuffer] = []
    line = pickle.dumps((command, arguments), protocol=5, buffer_callback=arrays.append)
    parts = [np.frombuffer(line, np.uint8), *(np.frombuffer(array.raw(), np.uint8) for array in arrays)]
    collective.broadcast(np.array([len(parts)], np.int64))
    collective.broadcast(np.array([len(part) for part in parts], np.int64))
    for part in parts:
        collective.broadcast(part)


def receive(collective: Collective) -> tuple[str, tuple[Any, ...]]:
    """Return the next command and its arguments, as `send` took them."""
    count = np.empty(1, np.int64)
    collective.broadcast(count)
    sizes = np.empty(int(count[0]), np.int64)
    collective.broadcast(sizes)
    parts = [np.empty(size, np.uint8) for size in sizes]
    for part in parts:
        collective.broadcast(part)
    return pickle.loads(parts[0].tobytes(), buffers=parts[1:])
