"""Garg, Joshi and Sahu: seven ways to compute a convolution."""

from cnnexp.papers.experiment import Column, Experiment, Line, on, over
from cnnexp.papers.measures import accuracy, seconds_per_iteration

BATCHES = over("trainer.batch_size", (64, 32), "batch {}")
NOTES = (
    "The paper's rows on 40 and on 4 CPU cores are both compared with our run on every core of this machine.",
    "The paper names no CPU, no GPU and no learning rate; Adam has beta1 0.95 and beta2 0.99 as printed, and rate "
    "0.001.",
    "The paper's order does not return everywhere. Its normal convolution is one small product per window, ours one "
    "large product per kernel offset for all windows of the batch, so unrolling, which copies every pixel K * K "
    "times, has nothing left to win. Its parallel rows had 4 and 40 cores.",
)

EXPERIMENTS = {
    "garg_table1": Experiment(
        title="Seven ways to compute a convolution: running speed",
        source="Garg, Joshi and Sahu, table 1",
        quantity="seconds per iteration (one batch)",
        lines=(
            Line("naive conv: python", on("python"), (262, 154)),
            Line("normal conv: numpy", on("numpy"), (12.71, 7.56)),
            Line("normal conv, parallel, 40 cores: numpy-parallel", on("numpy-parallel"), (2.42, 1.61)),
            Line("normal conv, parallel, 4 cores: numpy-parallel", on("numpy-parallel"), (7.12, 4.23)),
            Line("unrolled conv: unrolled", on("unrolled"), (7.01, 4.94)),
            Line("unrolled conv, parallel, 40 cores: unrolled-parallel", on("unrolled-parallel"), (3.02, 2.25)),
            Line("unrolled conv, parallel, 4 cores: unrolled-parallel", on("unrolled-parallel"), (5.25, 3.0)),
            Line("CUDA conv: gpu-naive", on("gpu-naive"), (4.06, 2.83)),
            Line("Keras: keras", on("keras"), (0.6, 0.45)),
            Line("ours: torch", on("torch")),
            Line("ours: cpu-simd", on("cpu-simd")),
        ),
        columns=BATCHES,
        measure=seconds_per_iteration,
        notes=NOTES,
    ),
    "garg_table2": Experiment(
        title="Seven ways to compute a convolution: test accuracy",
        source="Garg, Joshi and Sahu, table 2",
        quantity="test accuracy (%)",
        lines=(
            Line("normal conv: numpy", on("numpy"), (97.06, 95.95)),
            Line("normal conv, parallel: numpy-parallel", on("numpy-parallel"), (97.00, 97.55)),
            Line("unrolled conv: unrolled", on("unrolled"), (97.45, 97.75)),
            Line("unrolled conv, parallel: unrolled-parallel", on("unrolled-parallel"), (97.63, 97.7)),
            Line("CUDA conv: gpu-naive", on("gpu-naive"), (96, 96.5)),
            Line("Keras: keras", on("keras"), (98.7, 98.8)),
            Line("ours: torch", on("torch")),
            Line("ours: cpu-simd", on("cpu-simd")),
        ),
        columns=BATCHES,
        measure=accuracy,
        notes=(
            "The paper's number of epochs is not printed. All our backends start from the same parameters and see the "
            "same batches, so their accuracies differ by rounding alone; the paper's differ by their random starts.",
            NOTES[1],
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
        by_epoch="train/loss",
        recall=True,
        notes=(
            "The paper drew its curves and printed no numbers; which rates and how many examples it tried is not "
            "given, so these are ours.",
            "Drawn is the loss of the training pass, each image scored before its step's update; recall is of the "
            "rate and size with the best accuracy.",
        ),
    ),
}
