"""Rendón and Sanseviero (2018): a small network in plain Python, Numba and Keras."""

from cnnexp.papers.experiment import Column, Experiment, line
from cnnexp.papers.measures import accuracy, epoch_s

EXPERIMENTS = {
    "rendon_results": Experiment(
        title="One epoch of a small network: accuracy and training time",
        source='Rendón and Sanseviero (2018), section "Resultado"',
        quantity="accuracy (%) and training time (s)",
        lines=(
            line("CPU: python", 91.01, 7341),
            line("CPU, Numba JIT: cpu", None, 4620),
            line("Keras on CPU: keras", 94.85, 38),
            line("Keras on GPU: gpu-fused", 94.91, 16),
            line("ours: torch"),
            line("ours: cpu-simd"),
        ),
        columns=(Column("accuracy (%)", measure=accuracy), Column("training time (s)", measure=epoch_s)),
        notes=(
            "The paper ran on Google Colaboratory, whose share of a machine varies, as the paper says.",
            "Plain Python trains on as many images as fit in two minutes; its epoch is scaled from them, and its "
            "accuracy is that of so little training, on the same share of the test images.",
            "The paper's Keras row on a GPU is set beside our own GPU backend.",
        ),
    )
}
