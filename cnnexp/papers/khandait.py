"""Khandait, Kanthed, Singh and Kumar: a network of linear layers, and Amdahl's limit."""

from cnnexp.measuring.amdahl import amdahl_limit
from cnnexp.papers.experiment import Column, Experiment, Line, line, on
from cnnexp.papers.measures import accuracy, epoch_s, limit, metric

NOTE = "The paper's GPU is a GTX 1050 Ti with 768 cores; the sizes of its network and of its batches are not published."

EXPERIMENTS = {
    "khandait_quadrants": Experiment(
        title="Points in quadrants: loss, accuracy and time",
        source="Khandait, Kanthed, Singh and Kumar, section III",
        quantity="test loss, test accuracy (%) and epoch time (ms)",
        lines=(
            line("serial CPU: cpu", 0.106, 100, None),
            line("ours: cpu-parallel"),
            line("ours: cpu-simd"),
            line("GPU: gpu-naive", 0.106, 100, None),
            line("ours: gpu-fused"),
        ),
        columns=(
            Column("test loss", measure=lambda job: job.epochs[-1]["test/loss"]),
            Column("test accuracy (%)", measure=accuracy),
            Column("epoch (ms)", measure=lambda job: 1e3 * epoch_s(job)),
        ),
        notes=("The paper's GPU is 32.09 times as fast as its serial code.", NOTE),
    ),
    "khandait_amdahl": Experiment(
        title="Share of the training time per layer type, and Amdahl's limit",
        source="Khandait, Kanthed, Singh and Kumar, sections III.B and III.C",
        quantity="share of the serial training time (%), and speedups",
        lines=(
            *(
                Line(f"{kind} {what} (%)", on("cpu"), (share,), metric(f"profile/share/{kind}/{what}", 100))
                for kind, shares in (("linear", (48.67, 33.26)), ("relu", (7.09, 7.06)), ("sigmoid", (1.03, 0.6)))
                for what, share in zip(("backward", "forward"), shares, strict=True)
            ),
            Line("sum, the parallel share p (%)", on("cpu"), (98.01,), metric("profile/parallel_share", 100)),
            Line("Amdahl's limit with s = 768", on("cpu"), (45.45,), limit(768)),
            Line("Amdahl's limit with s = our threads", on("cpu-parallel"), (), limit(None)),
            Line("speedup reached, cpu-parallel", on("cpu-parallel"), (), against=on("cpu")),
            Line("speedup reached, gpu-naive", on("gpu-naive"), (32.09,), against=on("cpu")),
        ),
        columns=(Column("serial"),),
        notes=(
            "1 / ((1 - p) + p / s) with the paper's p = 0.9801 and s = 768 gives "
            f"{amdahl_limit(0.9801, 768):.1f}; the paper prints 45.45.",
            "The paper's six shares add up to 97.71 %, not to the 98.01 % that it prints.",
            "The limit with our threads takes p from the profile of cpu-parallel itself.",
            "Shares are of the training steps: what is left is the gathering of batches, the loss, the update, and "
            "Python.",
            NOTE,
        ),
    ),
}
