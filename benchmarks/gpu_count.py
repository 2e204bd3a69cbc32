"""What one training step of the GPU backends does, counted on the software GPU, and what it must cost on a named GPU.

    python -m benchmarks.gpu_count model=one_conv model.filters=64 batch=1000
    python -m benchmarks.gpu_count model=two_conv_mlp batch=64 backend=gpu-fused gpu="RTX 4090"

A model, never a time: nothing of this ran on a GPU. `bound` is what arithmetic, memory, shared memory and the issue of
what ptxas cannot leave out need at the boost clock; no GPU of those numbers is faster. `model` adds the latency of what
is waited for, instructions moved between two branches as is best, and the issue of whole-number instructions, which
ptxas makes fewer; caches are taken to be perfect, and the scarcest resource to hide all others. A launch costs
`edge_us` more in a graph; without one the host decides, and what that takes no count can show. `sum_up` comes once a
pass and `advance` once a graph: a step is charged with its share.

Columns: instructions of a thread (moves left out) per multiply-add; millions of multiply-adds; megabytes that differ
within a launch, and that are asked for, in sectors of 32 bytes; turns per access to shared memory; loads from global
memory that a block waits for one after another; branches at which a warp splits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from benchmarks.cases import LOSS
from cnnexp.errors import CnnexpError, ConfigError
from cnnexp.network.models import MODELS
from cnnexp.optimizers import SGD
from softgpu import SoftGpu, Unavailable
from softgpu.gpus import GPUS, GpuModel

MNIST, CLASSES, EPOCH = (28, 28, 1), 10, 60_000
BACKENDS = ("gpu-naive", "gpu-shared-input", "gpu-shared", "gpu-fused")
INSIDE = "SOFTGPU_COUNTING"  # in the environment of the process that counts


@dataclass(frozen=True)
class Question:
    """What is counted: by `key=value` on the command line.

    Attributes:
        model: of `cnnexp.network.models`; `model.filters=64` and the like set its fields.
        batch: images of the step.
        backend: names, with commas between.
        gpu: of `softgpu.gpus`.
        edge_us: taken for a launch in a graph; 1 is what the review of an H200 reckons with, unmeasured here.
    """

    model: str = "one_conv"
    batch: int = 1000
    backend: str = ",".join(BACKENDS)
    gpu: str = "H200"
    edge_us: float = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        question, settings = parse(arguments)
        if os.environ.get(INSIDE):
            return count(question, settings)
        gpu = GPUS[question.gpu]
        machine = SoftGpu(capability=gpu.capability, multiprocessors=gpu.multiprocessors, memory=16 << 30, checks=())
        command = [sys.executable, "-m", "benchmarks.gpu_count", *arguments]
        environment = {**machine.environment(), INSIDE: "1", "NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS": "0"}
        return subprocess.run(command, env=environment, cwd=Path(__file__).parents[1], check=False).returncode
    except (CnnexpError, Unavailable) as error:
        print(f"gpu_count: error: {error}", file=sys.stderr)
        return 2


def parse(arguments: Sequence[str]) -> tuple[Question, dict[str, int]]:
    """Return the question, and the settings of the model.

    Raises:
        ConfigError: an unknown key or value.
    """
    kinds = {"model": str, "batch": int, "backend": str, "gpu": str, "edge_us": float}
    found, settings = {}, {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if not key.startswith("model.") and key not in kinds:
            raise ConfigError(f"{argument}: no such key; there are {', '.join(kinds)}, and model.<setting>")
        try:
            if key in kinds:
                found[key] = kinds[key](value)
            else:
                settings[key.removeprefix("model.")] = int(value)
        except ValueError:
            raise ConfigError(f"{argument}: must be a number") from None
    question = Question(**found)
    legal = {"model": tuple(MODELS), "gpu": tuple(GPUS)}
    for key, names in legal.items():
        if getattr(question, key) not in names:
            raise ConfigError(f"{key}={getattr(question, key)}: must be one of {', '.join(names)}")
    for name in question.backend.split(","):
        if name not in BACKENDS:
            raise ConfigError(f"backend={name}: must be among {', '.join(BACKENDS)}")
    known = {field.name for field in fields(MODELS[question.model])}
    for key in settings:
        if key not in known:
            raise ConfigError(f"model.{key}: {question.model} has {', '.join(sorted(known))}")
    if question.batch < 1:
        raise ConfigError(f"batch={question.batch}: must be >= 1")
    return question, settings


def count(question: Question, settings: dict[str, int]) -> int:
    """Count a step of each backend, and print the tables."""
    gpu = GPUS[question.gpu]
    network = MODELS[question.model](**settings).network(MNIST, CLASSES)
    title = " ".join([question.model, *(f"{key}={value}" for key, value in settings.items())])
    print(f"{title}, a step of {question.batch} images: a model of {gpu.name}, never a time; no GPU was met")
    for name in question.backend.split(","):
        rows = counted_step(name, network, question.batch, gpu)
        print()
        print(table(name, rows, gpu, question))
    return 0


def counted_step(name: str, network, batch: int, gpu: GpuModel) -> list:
    """Return the counts of the kernels of one step, in the order of their first launch."""
    from cnnexp.backends import backend_class
    from softgpu.count import counting

    program = backend_class(name)().compile(network, LOSS, SGD(lr=0.1), batch)
    try:
        program.restore({"parameters": network.initial_parameters(seed=0)})
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (batch, *network.input_shape), np.uint8)
        handle = program.load(images, rng.integers(0, CLASSES, batch))
        order = np.arange(batch)
        program.train(handle, order, 0.1)  # kernels are compiled and graphs captured
        with counting(gpu) as kernels:
            program.train(handle, order, 0.1)
    finally:
        program.close()
    return kernels


COLUMNS = (
    *("kernel", "launches", "blocks", "regs", "shared", "resident", "instr/FMA", "FMA M", "MB", "MB asked"),
    *("conflicts", "chain", "split", "bound us", "model us", "held up by"),
)


def table(name: str, kernels: list, gpu: GpuModel, question: Question) -> str:
    """Return the table of one backend, and what a step and an epoch cost at least."""
    from cnnexp.backends.gpu.fused.program import GRAPH_STEPS
    from softgpu.count import cost

    # what comes once a pass, and once a graph
    shares = {"sum_up": question.batch / EPOCH, "advance": 1 / GRAPH_STEPS[0]} if name == "gpu-fused" else {}
    rows, bound, model, launches = [COLUMNS], 0.0, 0.0, 0.0
    for kernel in kernels:
        costs, share = cost(kernel, gpu), shares.get(kernel.short_name, 1)
        bound, model = bound + share * costs.bound_us, model + share * costs.model_us
        launches += share * kernel.launches
        fma = kernel.multiply_adds
        rows.append(
            (
                kernel.short_name,
                f"{kernel.launches}",
                f"{kernel.blocks // kernel.launches}",
                f"{kernel.registers}",
                f"{kernel.shared_bytes}",
                f"{costs.resident}",
                f"{kernel.instructions / fma:.1f}" if fma else "-",
                f"{fma / 1e6:.1f}",
                f"{kernel.different_bytes / 1e6:.1f}",
                f"{kernel.requested_bytes / 1e6:.1f}",
                f"{kernel.bank_conflicts:.2f}",
                f"{kernel.longest_chain}",
                f"{kernel.divergent}",
                f"{costs.bound_us:.1f}",
                f"{costs.model_us:.1f}",
                costs.bound_by,
            )
        )
    edges = launches * question.edge_us
    widths = [max(len(row[k]) for row in rows) for k in range(len(COLUMNS))]
    lines = []
    for row in rows:
        first, *numbers, last = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([f"{first.strip():<{widths[0]}}", *numbers, last.strip()]))
    at_least, likely = (EPOCH / question.batch * (us + edges) / 1e3 for us in (bound, model))
    summary = (
        f"{name}: a step is {launches:.0f} launches, {bound:.0f} us at least, {model:.0f} us by the model; an epoch of "
        f"{EPOCH:,} images, its launches in graphs, {at_least:.1f} ms at least, {likely:.1f} ms by the model"
    )
    return "\n".join([summary, *lines])


if __name__ == "__main__":
    sys.exit(main())
