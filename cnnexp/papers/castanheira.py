"""Castanheira and Ingelse (2021): a convolutional network on MNIST, on one CPU core, on several and on a GPU."""

from cnnexp.papers.experiment import Column, Experiment, line, over
from cnnexp.papers.measures import accuracy, images_per_s

LINES = (
    line("sequential CPU: cpu"),
    line("parallel CPU: cpu-parallel"),
    line("GPU: gpu-naive"),
    line("ours, CPU: cpu-simd"),
    line("ours, GPU: gpu-fused"),
)
NOTES = (
    "The paper drew its times and printed no numbers but these: the GPU is up to 3 times as fast as the CPU, and "
    "copying from GPU to CPU takes 3 s of an epoch.",
    "The paper's CPU is a Core i7-9750H, its GPU a GTX 1650 Max-Q; its parallel CPU code used two threads.",
    "Our GPU backends keep parameters and gradients on the GPU, so the paper's 3 s of copies do not arise.",
)

EXPERIMENTS = {
    "castanheira_fig2_batch": Experiment(
        title="Epoch time against batch size, 256 filters",
        source="Castanheira and Ingelse (2021), figure 2, left",
        lines=LINES,
        columns=over("trainer.batch_size", (100, 250, 500, 1000)),
        axis="batch size",
        notes=NOTES,
    ),
    "castanheira_fig2_filters": Experiment(
        title="Epoch time against number of filters, batch 1000",
        source="Castanheira and Ingelse (2021), figure 2, right",
        lines=LINES,
        columns=over("model.filters", (32, 64, 128, 256)),
        axis="filters",
        top=("parameters", tuple(1700 * d + 10 for d in (32, 64, 128, 256))),
        notes=NOTES,
    ),
    "castanheira_fig3": Experiment(
        title="Epoch time over a hundred epochs",
        source="Castanheira and Ingelse (2021), figure 3",
        lines=LINES,
        columns=(Column("median epoch (s)"), Column("test accuracy (%)", measure=accuracy)),
        by_epoch="time/epoch_s",
        notes=NOTES,
    ),
    "fusion": Experiment(
        title="What castanheira's future work brings, step by step",
        source="Castanheira and Ingelse (2021), section 6, built here",
        lines=(
            line("CPU as published: cpu-published"),
            line("+ place of the maximum kept: cpu-published-argmax"),
            line("+ gradients summed in place: cpu"),
            line("+ threads: cpu-parallel"),
            line("+ layers fused, vector kernels: cpu-simd"),
            line("GPU, global memory: gpu-naive"),
            line("+ input in shared memory: gpu-shared-input"),
            line("+ filters too: gpu-shared"),
            line("+ block sizes measured: gpu-tuned"),
            line("+ layers fused: gpu-fused"),
        ),
        columns=(Column("epoch (s)"), Column("images per second", measure=images_per_s)),
        notes=("These are our own steps, each with all before it on its processor; the paper has no such table.",),
    ),
}
