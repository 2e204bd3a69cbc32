"""Measures: the number that a job of a sweep gives to a paper's table."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cnnexp.measuring.amdahl import amdahl_limit


class Job(NamedTuple):
    """One run of a sweep, as its journal has it."""

    config: Mapping[str, Any]  # its leaves by dotted key
    status: str  # FINISHED, or why not
    error: str | None  # one line, None where it finished
    metrics: Mapping[str, float]  # what is recorded once
    epochs: Sequence[Mapping[str, float]]  # metrics of each
    images: int = 0  # of its whole training split
    folder: str = ""
    threads: int = 0


Measure = Callable[[Job], float | None]


def metric(name: str, scale: float = 1.0) -> Measure:
    """Return a measure: a metric that is recorded once, times `scale`; None where the job has none."""
    return lambda job: job.metrics[name] * scale if name in job.metrics else None


def epoch_s(job: Job) -> float:
    """Seconds of an epoch over the whole training split, scaled where a pass was cut short; the median over epochs."""
    return statistics.median(per_epoch(job, "time/epoch_s"))


def training_s(job: Job) -> float:
    """Seconds of all training passes; evaluation is left out."""
    return sum(per_epoch(job, "time/epoch_s"))


def per_epoch(job: Job, name: str) -> list[float]:
    """Return a metric of every epoch; a time is scaled to the whole training split where its pass was cut short."""
    if name == "time/epoch_s":
        return [e[name] * job.images / e["train/images"] for e in job.epochs]
    return [e[name] for e in job.epochs]


def seconds_per_iteration(job: Job) -> float:
    """Seconds of one optimizer step; the median over epochs."""
    batch = job.config["trainer.batch_size"]
    return statistics.median(e["time/epoch_s"] * batch / e["train/images"] for e in job.epochs)


def layer_ms(layers: str, *passes: str) -> Measure:
    """Return a measure: milliseconds per image in some passes of layers together; None where one was not clocked."""
    names = [f"profile/{layer}/{what}_ms" for layer in layers.split() for what in passes or ("forward", "backward")]
    return lambda job: sum(job.metrics[name] for name in names) if set(names) <= set(job.metrics) else None


def limit(speedup: float | None) -> Measure:
    """Return a measure: Amdahl's limit for the profile's parallel share; None takes the job's threads as speedup."""
    parallel_share = metric("profile/parallel_share")
    return lambda job: None if (p := parallel_share(job)) is None else amdahl_limit(p, speedup or job.threads)


accuracy = metric("final/test_accuracy", 100)
images_per_s = metric("throughput/median_images_per_s")  # of training; the median over epochs
