"""Chavan and Kulkarni: convolutions on a GPU, and workers that average."""

from cnnexp.papers.experiment import Column, Experiment, Line, line, on, over
from cnnexp.papers.measures import layer_ms, metric

GPU_NOTE = (
    "chavan's GPU is a GTX 520 with 48 cores, the CPU an AMD with 4 cores; the published figures have no numbers "
    "printed."
)
KNM = ((3, 20, 100), (3, 50, 100), (5, 20, 100), (5, 50, 100))
SIDES = (16, 28, 48, 64, 96, 128)

EXPERIMENTS = {
    "chavan_fig1": Experiment(
        title="Forward and backward time of a convolution and of a linear layer against image size",
        source="Chavan and Kulkarni, figure 1",
        quantity="time per image (ms)",
        lines=tuple(
            Line(f"{name} {what}, {backend}", on(backend), measure=layer_ms(layer, what))
            for backend in ("cpu", "cpu-parallel", "gpu-naive")
            for name, layer in (("conv", "conv1"), ("linear", "linear1"))
            for what in ("forward", "backward")
        ),
        columns=over("dataset.height", SIDES),
        axis="side of the image (pixels)",
        notes=(
            "The layers are those of 5-50-100-10. As the first layer of its network the convolution computes no "
            "gradient of its input.",
            GPU_NOTE,
        ),
    ),
    "chavan_fig2": Experiment(
        title="Speedup of a convolution against image size",
        source="Chavan and Kulkarni, figure 2",
        quantity="speedup over cpu, forward and backward",
        lines=tuple(
            Line(backend, on(backend), against=on("cpu")) for backend in ("cpu-parallel", "gpu-naive", "gpu-shared")
        ),
        columns=over("dataset.height", SIDES),
        measure=layer_ms("conv1"),
        axis="side of the image (pixels)",
        notes=("The convolution is that of 5-50-100-10.", GPU_NOTE),
    ),
    "chavan_fig3": Experiment(
        title="Training time of several K-N-M-10 networks",
        source="Chavan and Kulkarni, figure 3",
        lines=tuple(
            map(line, ("CPU: cpu", "ours: cpu-parallel", "ours: cpu-simd", "GPU: gpu-naive", "ours: gpu-fused"))
        ),
        columns=tuple(
            Column(f"{k}-{n}-{m}-10", {"model.kernel": k, "model.filters": n, "model.hidden": m}) for k, n, m in KNM
        ),
        notes=("Which networks the paper timed is not printed, but for 5-50-100-10.", GPU_NOTE),
    ),
    "chavan_fig4": Experiment(
        title="Training time with several workers: images split, parameters averaged once an epoch",
        source="Chavan and Kulkarni, figure 4 (algorithm 4); cost model: its three constants",
        lines=(
            Line("measured"),
            Line("cost model, before the run", measure=metric("cost_model/epoch_s")),
            Line("of it communicating, worker 0", measure=metric("workers/0/communicate_s")),
        ),
        columns=over("workers.count", (1, 2, 4, 8, 16), "{} workers"),
        axis="workers",
        scaling=True,
        notes=(
            "Each worker has one thread; workers beyond the machine's cores share them, and the model knows that. "
            "With more workers on other links it gives each a core of its own. Its time for one worker stands there "
            "too.",
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
            Line("total", {}, (14549, 29.47, 30.51, 37.59, 23.11), layer_ms("conv1 conv2 conv3 conv4 conv5")),
        ),
        columns=(
            Column("serial: cpu", on("cpu")),
            Column("naive: gpu-naive", on("gpu-naive")),
            Column("input in shared memory: gpu-shared-input", on("gpu-shared-input")),
            Column("input and filter in shared memory: gpu-shared", on("gpu-shared")),
            Column("advanced block setting: gpu-tuned", on("gpu-tuned")),
            Column("ours: cpu-parallel", on("cpu-parallel")),
        ),
        notes=(
            "The shapes of the paper's five layers are not published: the five convolutions of AlexNet (227x227x3 "
            "images) stand in for them, so only the ratios between columns compare. Times are per image, forward and "
            "backward; the first layer of a network computes no gradient of its input.",
            "The paper's layers add up to 28.95 (naive) and 23.13 (advanced) ms, not quite to the totals it prints.",
            "The paper's own table II calls this 826, 630, 529 and 701 times as fast as serial; table I gives 494, "
            "477, 387 and 630.",
            GPU_NOTE,
        ),
    ),
}
