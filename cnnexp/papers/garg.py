"""Garg, Joshi and Sahu: seven ways to compute a convolution."""

from cnnexp.papers.experiment import Experiment, Line, line, over
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
            line("naive conv: python", 262, 154),
            line("normal conv: numpy", 12.71, 7.56),
            line("normal conv, parallel, 40 cores: numpy-parallel", 2.42, 1.61),
            line("normal conv, parallel, 4 cores: numpy-parallel", 7.12, 4.23),
            line("unrolled conv: unrolled", 7.01, 4.94),
            line("unrolled conv, parallel, 40 cores: unrolled-parallel", 3.02, 2.25),
            line("unrolled conv, parallel, 4 cores: unrolled-parallel", 5.25, 3.0),
            line("CUDA conv: gpu-naive", 4.06, 2.83),
            line("Keras: keras", 0.6, 0.45),
            line("ours: torch"),
            line("ours: cpu-simd"),
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
            line("normal conv: numpy", 97.06, 95.95),
            line("normal conv, parallel: numpy-parallel", 97.00, 97.55),
            line("unrolled conv: unrolled", 97.45, 97.75),
            line("unrolled conv, parallel: unrolled-parallel", 97.63, 97.7),
            line("CUDA conv: gpu-naive", 96, 96.5),
            line("Keras: keras", 98.7, 98.8),
            line("ours: torch"),
            line("ours: cpu-simd"),
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
        columns=over("dataset.train_size", (6000, 20000, 60000), "{:,} training images"),
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
