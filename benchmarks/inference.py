"""Contestants of the group `inference`: a batch of images in, probabilities out, by one call after another.

All get the same trained network: ours as a program, ONNX Runtime as the file that `cnnexp export` writes, PyTorch as
modules in `inference_mode`. A step is one call with a batch of float32 images that lies in memory, channels-last.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.cases import LOSS, Case, Data, averages

CLASSES = [str(number) for number in range(10)]


class Inference:
    """What they have in common; `call(images)` returns the probabilities (N, classes)."""

    compile_s = 0.0

    def __init__(self, case: Case, data: Data) -> None:
        self.batch_size, self._images = case.batch_size, data.images
        self.state = {"parameters": data.parameters, "running": averages(case.network)}

    def call(self, images: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def train(self, steps: int) -> None:
        """Predict, a batch a step: the name is that of what others do in a step."""
        for step in range(steps):
            self.call(self._images[step % len(self._images)])

    def probabilities(self) -> np.ndarray:
        """Return those of the first batch."""
        return np.asarray(self.call(self._images[0]))

    def reset(self) -> None:
        """Nothing changes in a step."""

    def draw(self, on: bool) -> bool:
        return False


class Ours(Inference):
    """`cpu-simd`: `load` and `probabilities`, as `Classifier.predict` calls them."""

    def __init__(self, case: Case, data: Data, threads: int) -> None:
        from cnnexp.backends.simd import CpuSimd

        super().__init__(case, data)
        self._program = CpuSimd(threads).forward_only.compile(case.network, LOSS, case.optimizer, case.batch_size)
        self._program.restore(self.state)
        self._labels = np.zeros(case.batch_size, np.int32)
        self.compile_s, self.facts = self._program.compile_s, {"threads": threads, "numpy": np.__version__}

    def call(self, images: np.ndarray) -> np.ndarray:
        return self._program.probabilities(self._program.load(images, self._labels))


class OnnxRuntime(Inference):
    """A session on the model that `cnnexp export` writes."""

    def __init__(self, case: Case, data: Data, threads: int) -> None:
        import onnxruntime

        from cnnexp.tracking import graph

        super().__init__(case, data)
        model = graph.build(case.network, LOSS, self.state, "float32", CLASSES).SerializeToString()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        started = time.perf_counter()
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.compile_s = time.perf_counter() - started
        self._names = [graph.OUTPUT], graph.INPUT
        self.facts = {"onnxruntime": onnxruntime.__version__, "threads": threads}

    def call(self, images: np.ndarray) -> np.ndarray:
        outputs, given = self._names
        return self._session.run(outputs, {given: images})[0]


class Torch(Inference):
    """Modules in `eval` mode under `torch.inference_mode`, channels_last or not."""

    def __init__(self, case: Case, data: Data, threads: int, channels_last: bool = False) -> None:
        import torch

        from benchmarks import torch_peer

        super().__init__(case, data)
        self._torch = torch
        self._model = torch_peer.Torch(case, data, threads, channels_last).predictor(self.state["running"])
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self.facts = {"torch": torch.__version__, "threads": threads}

    def call(self, images: np.ndarray) -> np.ndarray:
        with self._torch.inference_mode():
            x = self._torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(memory_format=self._layout)
            return self._model(x).softmax(1).numpy()
