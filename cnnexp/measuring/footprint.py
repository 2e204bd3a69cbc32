"""What a training run takes of the host's memory, from the network and the config alone, before any of it is taken.

The parts are what is certain: buffers that the code makes, not what the interpreter, the compilers and NumPy's
temporaries add. So a run that is refused could not have been; one that is let in may still run out.
"""

import math
from collections.abc import Iterator

from cnnexp.backends.protocol import Backend
from cnnexp.datasets import Dataset
from cnnexp.network import Flatten, MaxPool2d, Network
from cnnexp.optimizers import Optimizer
from cnnexp.system.memory import Part

FLOAT = 4  # bytes
LANES = 4  # images that a vector of cpu-simd holds at least
PROCESS_BYTES = 100_000_000  # of a worker that has imported a compiler
CHECKPOINT_COPIES = 2  # of the state, while one is written


def training(
    network: Network, optimizer: Optimizer, batch_size: int, backend: Backend, dataset: Dataset, workers: int = 1
) -> Iterator[Part]:
    """Yield the parts of a program, what it loads, and its checkpoints; as many programs as there are workers."""
    yield from program(network, optimizer, batch_size, backend, workers)
    states = FLOAT * network.parameter_count * (1 + len(optimizer.slots))
    yield Part("the copies of the parameters in a checkpoint", CHECKPOINT_COPIES * states, "the size of the model")
    splits = [split for split in (dataset.train, dataset.test, dataset.validation) if split is not None]
    count = sum(len(split) for split in splits)
    if backend.name != "cpu-simd" and not backend.on_gpu and dataset.train.images.itemsize < FLOAT:
        yield Part(f"{count} images as float32", FLOAT * count * math.prod(dataset.input_shape), "dataset.train_size")
    held_out = count - len(dataset.train)
    scores = FLOAT * held_out * math.prod(network.output_shape)
    yield Part(f"the scores of {held_out} images", scores, "dataset.test_size")
    if workers > 1:
        yield Part(f"{workers} processes", (workers - 1) * PROCESS_BYTES, "workers.count")


def program(
    network: Network, optimizer: Optimizer, batch_size: int, backend: Backend, workers: int = 1
) -> Iterator[Part]:
    """Yield what a compiled network holds: nothing on the host where a GPU has it."""
    if backend.on_gpu:
        return
    fused = backend.name == "cpu-simd"
    gradients = backend.threads if fused else 1
    copies, count = 1 + gradients + len(optimizer.slots), network.parameter_count
    what = f"{count} parameters, their gradients and the optimizer's slots"
    yield Part(what, workers * copies * FLOAT * count, "the size of the model")
    fused = fused and not network.running  # a batch normalization needs the whole batch
    images = min(workers * backend.threads * LANES, batch_size) if fused else batch_size
    what = "the activations of a tile of images" if fused else f"the activations of a batch of backend={backend.name}"
    key = "the size of the model" if fused else "trainer.batch_size"
    # values of an image in all layers, with their gradients and the places of maxima where not fused
    kept = {Flatten: 0, MaxPool2d: 1 if fused else 3}
    values = [kept.get(type(s.layer), 1 if fused else 2) * math.prod(s.output_shape) for s in network.stages]
    yield Part(what, images * FLOAT * (math.prod(network.input_shape) + sum(values)), key)
