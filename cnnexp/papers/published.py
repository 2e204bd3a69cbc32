"""The papers' tables and figures: what they published, and which of our jobs make each number again.

An experiment is a table of lines and columns. Each cell is made by the jobs of a sweep whose config holds what its line
and its column ask for, and by a measure of such a job. `conf/experiment/<key>.yaml` runs the jobs; `page` sets
them beside the published numbers, which stand here as printed. None stands where the paper has no number.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cnnexp.measuring.amdahl import amdahl_limit


@dataclass(frozen=True)
class Job:
    """One run of a sweep, as its journal tells it.

    Attributes:
        config: the leaves of its config by dotted key.
        status: FINISHED, or why not.
        error: one line, None where it finished.
        metrics: what is recorded once. epochs: metrics of each epoch.
        images: of its whole training split.
        folder: of the run.
        device, threads: that it computed on.
    """

    config: Mapping[str, Any]
    status: str
    error: str | None
    metrics: Mapping[str, float]
    epochs: Sequence[Mapping[str, float]]
    images: int = 0
    folder: str = ""
    device: str = ""
    threads: int = 0


Measure = Callable[[Job], float | None]


def metric(name: str, scale: float = 1.0) -> Measure:
    """Return a measure: a metric that is recorded once, times `scale`; None where the job has none."""
    return lambda job: job.metrics[name] * scale if name in job.metrics else None


def epoch_s(job: Job) -> float:
    """Seconds of an epoch over the whole training split, scaled where a pass was cut short; the median over epochs."""
    return statistics.median(per_epoch(job, "time/epoch_s"))


def per_epoch(job: Job, name: str) -> list[float]:
    """Return a metric of every epoch; a time is scaled to the whole training split where its pass was cut short."""
    if name == "time/epoch_s":
        return [e[name] * job.images / e["train/images"] for e in job.epochs]
    return [e[name] for e in job.epochs]


def seconds_per_iteration(job: Job) -> float:
    """Seconds of one optimizer step; the median over epochs."""
    batch = job.config["trainer.batch_size"]
    return statistics.median(e["time/epoch_s"] * batch / e["train/images"] for e in job.epochs)


def images_per_s(job: Job) -> float:
    """Training images per second; the median over epochs."""
    return statistics.median(e["throughput/images_per_s"] for e in job.epochs)


def layer_ms(layer: str, *passes: str) -> Measure:
    """Return a measure: milliseconds per image in some passes of a layer, from the profile."""
    names = [f"profile/{layer}/{what}_ms" for what in passes or ("forward", "backward")]
    return lambda job: sum(job.metrics[name] for name in names) if set(names) <= set(job.metrics) else None


def limit(speedup: float | None) -> Measure:
    """Return a measure: Amdahl's limit for the profile's parallel share; None takes the job's threads as speedup."""

    def measure(job: Job) -> float | None:
        share = job.metrics.get("profile/parallel_share")
        return None if share is None else amdahl_limit(share, speedup or job.threads)

    return measure


accuracy = metric("final/test_accuracy", 100)


def test_loss(job: Job) -> float:
    """Mean loss on the test split after the last epoch."""
    return job.epochs[-1]["test/loss"]


@dataclass(frozen=True)
class Line:
    """A row of a table, a series of a figure.

    Attributes:
        label: as the paper has it, or ours where the paper has no such row.
        jobs: config keys and values of the jobs that make it.
        published: one number per column of the experiment, first to last; the paper has none for those left over.
        measure: of its own, else the column's, else the experiment's.
        against: makes the line a speedup: the measure of these jobs over that of its own.
    """

    label: str
    jobs: Mapping[str, Any] = field(default_factory=dict)
    published: tuple[float | None, ...] = ()
    measure: Measure | None = None
    against: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Column:
    """A column of a table, a place on a figure's axis; attributes as `Line`, `x` its number on the axis."""

    title: str
    jobs: Mapping[str, Any] = field(default_factory=dict)
    measure: Measure | None = None
    x: float | None = None


@dataclass(frozen=True)
class Experiment:
    """One table or figure of a paper.

    Attributes:
        title: what it shows.
        source: paper and place.
        quantity: what the numbers are, with their unit.
        lines, columns: the table.
        measure: of a job.
        figure: `bars` (a panel per column, a bar per line), `lines` (over the columns' x), or `epochs` (over epochs).
        axis: what the columns vary.
        top: a second horizontal axis: its name and its number for each column.
        by_epoch: of figure `epochs`, the metric drawn; `recall` adds a panel with the recall of each class.
        recall: see `by_epoch`.
        scaling: adds a panel and a table with more workers and other links, as the cost model of its jobs has them.
        notes: what differs from the paper, and why.
    """

    title: str
    source: str
    quantity: str
    lines: tuple[Line, ...]
    columns: tuple[Column, ...]
    measure: Measure = epoch_s
    figure: Literal["bars", "lines", "epochs"] = "bars"
    axis: str = ""
    top: tuple[str, tuple[float, ...]] | None = None
    by_epoch: str = "time/epoch_s"
    recall: bool = False
    scaling: bool = False
    notes: tuple[str, ...] = ()


def _on(backend: str, **more: Any) -> dict[str, Any]:
    return {"backend.name": backend, **{key.replace("__", "."): value for key, value in more.items()}}


def _columns(key: str, values: Sequence[Any], title: str = "{}") -> tuple[Column, ...]:
    return tuple(Column(title.format(value), {key: value}, x=float(value)) for value in values)


CASTANHEIRA_LINES = (
    Line("sequential CPU: cpu", _on("cpu")),
    Line("parallel CPU: cpu-parallel", _on("cpu-parallel")),
    Line("GPU: gpu-naive", _on("gpu-naive")),
    Line("ours, CPU: cpu-simd", _on("cpu-simd")),
    Line("ours, GPU: gpu-fused", _on("gpu-fused")),
)
CASTANHEIRA_NOTES = (
    "The paper drew its times and printed no numbers but these: the GPU is up to 3 times as fast as the CPU, and "
    "copying "
    "from GPU to CPU takes 3 s of an epoch.",
    "The paper's CPU is a Core i7-9750H, its GPU a GTX 1650 Max-Q; its parallel CPU code used two threads.",
    "Our GPU backends keep parameters and gradients on the GPU, so the paper's 3 s of copies do not arise.",
)
GARG_BATCHES = _columns("trainer.batch_size", (64, 32), "batch {}")
GARG_NOTES = (
    "The paper's rows on 40 and on 4 CPU cores are both compared with our run on every core of this machine.",
    "The paper names no CPU, no GPU and no learning rate; Adam has beta1 0.95 and beta2 0.99 as printed, and "
    "rate 0.001.",
    "The paper's order does not return everywhere. Its normal convolution is one small product per window, ours one "
    "large product per kernel offset for all windows of the batch, so unrolling, which copies every pixel K * K times, "
    "has nothing left to win. Its parallel rows had 4 and 40 cores.",
)
GPU_NOTE = (
    "chavan's GPU is a GTX 520 with 48 cores, the CPU an AMD with 4 cores; the published figures have no "
    "numbers printed."
)
ALEXNET_NOTE = (
    "The shapes of the paper's five layers are not published: the five convolutions of AlexNet (227x227x3 "
    "images) stand "
    "in for them, so only the ratios between columns compare. Times are per image, forward and backward; the "
    "first layer "
    "of a network computes no gradient of its input."
)
KNM = ((3, 20, 100), (3, 50, 100), (5, 20, 100), (5, 50, 100))
SIDES = (16, 28, 48, 64, 96, 128)
LAYERS = ("conv1", "conv2", "conv3", "conv4", "conv5")
KHANDAIT_NOTE = (
    "The paper's GPU is a GTX 1050 Ti with 768 cores; the sizes of its network and of its batches are not published."
)

EXPERIMENTS: dict[str, Experiment] = {
    "castanheira_fig2_batch": Experiment(
        title="Epoch time against batch size, 256 filters",
        source="Castanheira and Ingelse (2021), figure 2, left",
        quantity="epoch time (s)",
        lines=CASTANHEIRA_LINES,
        columns=_columns("trainer.batch_size", (100, 250, 500, 1000)),
        figure="lines",
        axis="batch size",
        notes=CASTANHEIRA_NOTES,
    ),
    "castanheira_fig2_filters": Experiment(
        title="Epoch time against number of filters, batch 1000",
        source="Castanheira and Ingelse (2021), figure 2, right",
        quantity="epoch time (s)",
        lines=CASTANHEIRA_LINES,
        columns=_columns("model.filters", (32, 64, 128, 256)),
        figure="lines",
        axis="filters",
        top=("parameters", tuple(1700 * d + 10 for d in (32, 64, 128, 256))),
        notes=CASTANHEIRA_NOTES,
    ),
    "castanheira_fig3": Experiment(
        title="Epoch time over a hundred epochs",
        source="Castanheira and Ingelse (2021), figure 3",
        quantity="epoch time (s)",
        lines=CASTANHEIRA_LINES,
        columns=(Column("median epoch (s)"), Column("test accuracy (%)", measure=accuracy)),
        figure="epochs",
        notes=CASTANHEIRA_NOTES,
    ),
    "garg_table1": Experiment(
        title="Seven ways to compute a convolution: running speed",
        source="Garg, Joshi and Sahu, table 1",
        quantity="seconds per iteration (one batch)",
        lines=(
            Line("naive conv: python", _on("python"), (262, 154)),
            Line("normal conv: numpy", _on("numpy"), (12.71, 7.56)),
            Line("normal conv, parallel, 40 cores: numpy-parallel", _on("numpy-parallel"), (2.42, 1.61)),
            Line("normal conv, parallel, 4 cores: numpy-parallel", _on("numpy-parallel"), (7.12, 4.23)),
            Line("unrolled conv: unrolled", _on("unrolled"), (7.01, 4.94)),
            Line("unrolled conv, parallel, 40 cores: unrolled-parallel", _on("unrolled-parallel"), (3.02, 2.25)),
            Line("unrolled conv, parallel, 4 cores: unrolled-parallel", _on("unrolled-parallel"), (5.25, 3.0)),
            Line("CUDA conv: gpu-naive", _on("gpu-naive"), (4.06, 2.83)),
            Line("Keras: keras", _on("keras"), (0.6, 0.45)),
            Line("ours: torch", _on("torch")),
            Line("ours: cpu-simd", _on("cpu-simd")),
        ),
        columns=GARG_BATCHES,
        measure=seconds_per_iteration,
        notes=GARG_NOTES,
    ),
    "garg_table2": Experiment(
        title="Seven ways to compute a convolution: test accuracy",
        source="Garg, Joshi and Sahu, table 2",
        quantity="test accuracy (%)",
        lines=(
            Line("normal conv: numpy", _on("numpy"), (97.06, 95.95)),
            Line("normal conv, parallel: numpy-parallel", _on("numpy-parallel"), (97.00, 97.55)),
            Line("unrolled conv: unrolled", _on("unrolled"), (97.45, 97.75)),
            Line("unrolled conv, parallel: unrolled-parallel", _on("unrolled-parallel"), (97.63, 97.7)),
            Line("CUDA conv: gpu-naive", _on("gpu-naive"), (96, 96.5)),
            Line("Keras: keras", _on("keras"), (98.7, 98.8)),
            Line("ours: torch", _on("torch")),
            Line("ours: cpu-simd", _on("cpu-simd")),
        ),
        columns=GARG_BATCHES,
        measure=accuracy,
        notes=(
            "The paper's number of epochs is not printed. All our backends start from the same parameters and "
            "see the same "
            "batches, so their accuracies differ by rounding alone; the paper's differ by their random starts.",
            GARG_NOTES[1],
        ),
    ),
    "garg_curves": Experiment(
        title="Training loss by epoch, and recall per class; learning rate and training examples varied",
        source="Garg, Joshi and Sahu, sections 6.2, 7.3 and 7.4",
        quantity="test accuracy (%) after the last epoch",
        lines=tuple(Line(f"learning rate {rate:g}", {"optimizer.lr": rate}) for rate in (0.0001, 0.001, 0.01)),
        columns=tuple(
            Column(f"{size:,} training images", {"dataset.train_size": size}, x=size) for size in (6000, 20000, 60000)
        ),
        measure=accuracy,
        figure="epochs",
        by_epoch="train/loss",
        recall=True,
        notes=(
            "The paper drew its curves and printed no numbers; which rates and how many examples it tried is not "
            "told, so "
            "these are ours.",
            "Drawn is the loss of the training pass, each image scored before its step's update; recall is of "
            "the rate and "
            "size with the best accuracy.",
        ),
    ),
    "rendon_results": Experiment(
        title="One epoch of a small network: accuracy and training time",
        source='Rendón and Sanseviero (2018), section "Resultado"',
        quantity="accuracy (%) and training time (s)",
        lines=(
            Line("CPU: python", _on("python"), (91.01, 7341)),
            Line("CPU, Numba JIT: cpu", _on("cpu"), (None, 4620)),
            Line("Keras on CPU: keras", _on("keras"), (94.85, 38)),
            Line("Keras on GPU: gpu-fused", _on("gpu-fused"), (94.91, 16)),
            Line("ours: torch", _on("torch")),
            Line("ours: cpu-simd", _on("cpu-simd")),
        ),
        columns=(Column("accuracy (%)", measure=accuracy), Column("training time (s)", measure=epoch_s)),
        notes=(
            "The paper ran on Google Colaboratory, whose share of a machine varies, as the paper says.",
            "Plain Python trains on as many images as fit in two minutes; its epoch is scaled from them, and its "
            "accuracy is "
            "that of so little training, on the same share of the test images.",
            "The paper's Keras row on a GPU is set beside our own GPU backend.",
        ),
    ),
    "chavan_fig1": Experiment(
        title="Forward and backward time of a convolution and of a linear layer against image size",
        source="Chavan and Kulkarni, figure 1",
        quantity="time per image (ms)",
        lines=tuple(
            Line(f"{name} {what}, {backend}", _on(backend), measure=layer_ms(layer, what))
            for backend in ("cpu", "cpu-parallel", "gpu-naive")
            for name, layer in (("conv", "conv1"), ("linear", "linear1"))
            for what in ("forward", "backward")
        ),
        columns=_columns("dataset.height", SIDES),
        figure="lines",
        axis="side of the image (pixels)",
        notes=(
            "The layers are those of 5-50-100-10. As the first layer of its network the convolution computes no "
            "gradient of "
            "its input.",
            GPU_NOTE,
        ),
    ),
    "chavan_fig2": Experiment(
        title="Speedup of a convolution against image size",
        source="Chavan and Kulkarni, figure 2",
        quantity="speedup over cpu, forward and backward",
        lines=tuple(
            Line(backend, _on(backend), against=_on("cpu")) for backend in ("cpu-parallel", "gpu-naive", "gpu-shared")
        ),
        columns=_columns("dataset.height", SIDES),
        measure=layer_ms("conv1"),
        figure="lines",
        axis="side of the image (pixels)",
        notes=("The convolution is that of 5-50-100-10.", GPU_NOTE),
    ),
    "chavan_fig3": Experiment(
        title="Training time of several K-N-M-10 networks",
        source="Chavan and Kulkarni, figure 3",
        quantity="epoch time (s)",
        lines=(
            Line("CPU: cpu", _on("cpu")),
            Line("ours: cpu-parallel", _on("cpu-parallel")),
            Line("ours: cpu-simd", _on("cpu-simd")),
            Line("GPU: gpu-naive", _on("gpu-naive")),
            Line("ours: gpu-fused", _on("gpu-fused")),
        ),
        columns=tuple(
            Column(f"{k}-{n}-{m}-10", {"model.kernel": k, "model.filters": n, "model.hidden": m}) for k, n, m in KNM
        ),
        notes=("Which networks the paper timed is not printed, but for 5-50-100-10.", GPU_NOTE),
    ),
    "chavan_fig4": Experiment(
        title="Training time with several workers: images split, parameters averaged once an epoch",
        source="Chavan and Kulkarni, figure 4 (algorithm 4); cost model: their equations 5 to 8",
        quantity="epoch time (s)",
        lines=(
            Line("measured"),
            Line("cost model, before the run", measure=metric("cost_model/epoch_s")),
            Line("of it communicating, worker 0", measure=metric("workers/0/communicate_s")),
        ),
        columns=_columns("workers.count", (1, 2, 4, 8, 16), "{} workers"),
        figure="lines",
        axis="workers",
        scaling=True,
        notes=(
            "Each worker has one thread; workers beyond the machine's cores share them, and the model knows that. With "
            "more workers on other links it gives each a core of its own. Its time for one worker stands there too.",
            "The bandwidths of the other links are nominal, their start-up times (10 us and 2 us) assumed.",
        ),
    ),
    "chavan_table1": Experiment(
        title="Time in the convolutional layers, five ways",
        source="Chavan and Kulkarni, table I",
        quantity="time (ms)",
        lines=(
            Line("layer 1", {}, (10033, 4.07, 3.99, 4.82, 3.89), layer_ms("conv1")),
            Line("layer 2", {}, (2205, 9.27, 8.95, 8.02, 5.08), layer_ms("conv2")),
            Line("layer 3", {}, (798, 4.27, 5.23, 7.84, 3.99), layer_ms("conv3")),
            Line("layer 4", {}, (908, 6.06, 6.86, 11.21, 5.55), layer_ms("conv4")),
            Line("layer 5", {}, (605, 5.28, 5.48, 5.70, 4.62), layer_ms("conv5")),
            Line(
                "total",
                {},
                (14549, 29.47, 30.51, 37.59, 23.11),
                lambda job: None if (ms := [layer_ms(name)(job) for name in LAYERS])[0] is None else sum(ms),
            ),
        ),
        columns=(
            Column("serial: cpu", _on("cpu")),
            Column("naive: gpu-naive", _on("gpu-naive")),
            Column("input in shared memory: gpu-shared-input", _on("gpu-shared-input")),
            Column("input and filter in shared memory: gpu-shared", _on("gpu-shared")),
            Column("advanced block setting: gpu-tuned", _on("gpu-tuned")),
            Column("ours: cpu-parallel", _on("cpu-parallel")),
        ),
        notes=(
            ALEXNET_NOTE,
            "The paper's layers add up to 28.95 (naive) and 23.13 (advanced) ms, not quite to the totals it prints.",
            "The paper's own table II calls this 826, 630, 529 and 701 times as fast as serial; table I gives "
            "494, 477, 387 "
            "and 630.",
            GPU_NOTE,
        ),
    ),
    "khandait_quadrants": Experiment(
        title="Points in quadrants: loss, accuracy and time",
        source="Khandait, Kanthed, Singh and Kumar, section III",
        quantity="test loss, test accuracy (%) and epoch time (ms)",
        lines=(
            Line("serial CPU: cpu", _on("cpu"), (0.106, 100, None)),
            Line("ours: cpu-parallel", _on("cpu-parallel")),
            Line("ours: cpu-simd", _on("cpu-simd")),
            Line("GPU: gpu-naive", _on("gpu-naive"), (0.106, 100, None)),
            Line("ours: gpu-fused", _on("gpu-fused")),
        ),
        columns=(
            Column("test loss", measure=test_loss),
            Column("test accuracy (%)", measure=accuracy),
            Column("epoch (ms)", measure=lambda job: 1e3 * epoch_s(job)),
        ),
        notes=("The paper's GPU is 32.09 times as fast as its serial code.", KHANDAIT_NOTE),
    ),
    "khandait_amdahl": Experiment(
        title="Share of the training time per layer type, and Amdahl's limit",
        source="Khandait, Kanthed, Singh and Kumar, sections III.B and III.C",
        quantity="share of the serial training time (%), and speedups",
        lines=(
            *(
                Line(f"{kind} {what} (%)", _on("cpu"), (share,), metric(f"profile/share/{kind}/{what}", 100))
                for kind, what, share in (
                    ("linear", "backward", 48.67),
                    ("linear", "forward", 33.26),
                    ("relu", "backward", 7.09),
                    ("relu", "forward", 7.06),
                    ("sigmoid", "backward", 1.03),
                    ("sigmoid", "forward", 0.6),
                )
            ),
            Line("sum, the parallel share p (%)", _on("cpu"), (98.01,), metric("profile/parallel_share", 100)),
            Line("Amdahl's limit with s = 768", _on("cpu"), (45.45,), limit(768)),
            Line("Amdahl's limit with s = our threads", _on("cpu-parallel"), (), limit(None)),
            Line("speedup reached, cpu-parallel", _on("cpu-parallel"), (), against=_on("cpu")),
            Line("speedup reached, gpu-naive", _on("gpu-naive"), (32.09,), against=_on("cpu")),
        ),
        columns=(Column("serial"),),
        notes=(
            "1 / ((1 - p) + p / s) with the paper's p = 0.9801 and s = 768 gives "
            f"{amdahl_limit(0.9801, 768):.1f}; the paper prints 45.45.",
            "The paper's six shares add up to 97.71 %, not to the 98.01 % that it prints.",
            "The limit with our threads takes p from the profile of cpu-parallel itself.",
            "Shares are of the training steps: what is left is the gathering of batches, the loss, the update, "
            "and Python.",
            KHANDAIT_NOTE,
        ),
    ),
    "fusion": Experiment(
        title="What castanheira's future work brings, step by step",
        source="Castanheira and Ingelse (2021), section 6, built here",
        quantity="epoch time (s)",
        lines=(
            Line("CPU as published: cpu-published", _on("cpu-published")),
            Line("+ place of the maximum kept: cpu-published-argmax", _on("cpu-published-argmax")),
            Line("+ gradients summed in place: cpu", _on("cpu")),
            Line("+ threads: cpu-parallel", _on("cpu-parallel")),
            Line("+ layers fused, vector kernels: cpu-simd", _on("cpu-simd")),
            Line("GPU, global memory: gpu-naive", _on("gpu-naive")),
            Line("+ input in shared memory: gpu-shared-input", _on("gpu-shared-input")),
            Line("+ filters too: gpu-shared", _on("gpu-shared")),
            Line("+ block sizes measured: gpu-tuned", _on("gpu-tuned")),
            Line("+ layers fused: gpu-fused", _on("gpu-fused")),
        ),
        columns=(Column("epoch (s)"), Column("images per second", measure=images_per_s)),
        notes=("These are our own steps, each with all before it on its processor; the paper has no such table.",),
    ),
}
